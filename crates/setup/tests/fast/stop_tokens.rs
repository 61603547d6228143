//! A model with several stop tokens: each of them ends completions, in rollouts and in evaluations.

use grpo_models::{ExportOptions, FolderWriter, GenerationDefaults, ModelConfig};
use grpo_policy::{Completion, Policy, PolicyEngine, Result, RolloutEngine, RolloutRequest};
use grpo_trainer::{ModelSource, TrainConfig, Trainer};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// `<|im_end|>`, the tokenizer's own EOS, `<|endoftext|>` and `<|im_start|>`.
const STOP_IDS: [u32; 3] = [402, 400, 401];

/// The built-in engine, which records all its samples.
#[derive(Clone, Default)]
struct Recorded(Arc<Mutex<Vec<Completion>>>);

impl RolloutEngine for Recorded {
    fn generate(&mut self, policy: &mut dyn Policy, request: &RolloutRequest<'_>) -> Result<Vec<Completion>> {
        let completions = PolicyEngine.generate(policy, request)?;
        self.0.lock().unwrap().extend(completions.iter().cloned());
        Ok(completions)
    }
}

/// Writes a model of small weights, whose tokens are about equally likely, with the tokenizer of a Qwen3.
fn folder(path: &Path) {
    let shape = ModelConfig {
        vocab_size: 512,
        hidden_size: 16,
        intermediate_size: 16,
        num_hidden_layers: 1,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: Some(8),
        max_position_embeddings: 128,
        attention_bias: false,
        qk_norm: true,
        ..ModelConfig::default()
    };
    let generation = GenerationDefaults { eos_token_id: STOP_IDS.to_vec(), ..GenerationDefaults::default() };
    let options = ExportOptions { dtype: grpo_models::Dtype::F32, generation, ..ExportOptions::default() };
    let mut writer = FolderWriter::create(path, &shape, None, options).unwrap();
    for parameter in shape.parameters() {
        let values: Vec<f32> = (0..parameter.len()).map(|i| 0.1 * (i as f32).sin()).collect();
        writer.write(&parameter.name, &values).unwrap();
    }
    writer.finish().unwrap();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures/chat/qwen3");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixtures.join(file), path.join(file)).unwrap();
    }
}

/// Checks that `completions` end at a stop token or at the limit, and returns the stop tokens.
fn ends_of(completions: &[Completion], limit: usize) -> BTreeSet<u32> {
    let mut found = BTreeSet::new();
    for completion in completions {
        let (last, before) = completion.ids.split_last().unwrap();
        assert!(before.iter().all(|id| !STOP_IDS.contains(id)), "it goes on behind its end: {completion:?}");
        let has_ended = STOP_IDS.contains(last);
        assert_eq!(completion.truncated, !has_ended, "{completion:?}");
        assert!(has_ended || completion.ids.len() == limit, "{completion:?}");
        found.extend(has_ended.then_some(*last));
    }
    found
}

#[test]
fn every_stop_token_of_the_model_ends_a_completion() {
    let place = tempfile::tempdir().unwrap();
    let model = place.path().join("model");
    folder(&model);
    let limit = 64;
    let mut config =
        TrainConfig { model: ModelSource::Pretrained(model.display().to_string()), ..TrainConfig::default() };
    config.data.tasks.addition.weight = 1.0;
    config.rollout.max_completion_length = Some(limit);
    config.grpo.max_steps = 1;
    config.grpo.prompts_per_step = 8;
    config.grpo.num_generations = 16;
    config.eval.num_problems = Some(8);
    config.eval.num_generations = 16;
    let engine = Recorded::default();
    let parts = grpo_setup::parts(&config).unwrap().with_engine(engine.clone());
    let mut run = Trainer::with_parts(config, parts).unwrap();
    let all = BTreeSet::from(STOP_IDS);
    let report = run.grpo_step().unwrap();
    let sampled = std::mem::take(&mut *engine.0.lock().unwrap());
    assert_eq!(sampled.len(), 128);
    assert_eq!(ends_of(&sampled, limit), all);
    let cut_off = sampled.iter().filter(|completion| completion.truncated).count();
    assert!(cut_off > 0 && report.metric("completions/clipped_ratio") == cut_off as f64 / 128.0, "{cut_off}");
    // Rewards read the text without the stop token.
    assert!(report.samples.iter().all(|sample| !sample.completion.contains("<|")), "{:?}", report.samples);
    run.evaluate().unwrap();
    let evaluated = std::mem::take(&mut *engine.0.lock().unwrap());
    assert!(evaluated.len() > 128, "sampled and greedy ones");
    assert_eq!(ends_of(&evaluated, limit), all);
}
