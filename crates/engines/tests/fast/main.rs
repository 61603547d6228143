//! Engines against a server of our own, which speaks both protocols and misbehaves on request.

mod fake;
mod masks;
mod misbehaving;
mod sampling;
mod settings;
mod weights;

use fake::{Fake, Program};
use grpo_engines::{EngineKind, Run, ServerConfig, ServerEngine};
use grpo_models::{Dtype, ExportOptions, FolderWriter, LoraConfig, ModelConfig, ModelFolder, TargetModules};
use grpo_policy::{Completion, Policy, RolloutEngine, RolloutRequest, Sampling, TensorSource};
use grpo_policy_cpu::CpuPolicy;
use std::path::Path;
use tempfile::TempDir;

grpo_testkit::tiers!();

const PROMPTS: usize = 3;
const PER_PROMPT: usize = 2;
const STOP: u32 = 2;

/// A small model in a folder, and the policy that trains it.
struct Model {
    folder: TempDir,
    policy: CpuPolicy,
    lora: Option<LoraConfig>,
}

fn shape() -> ModelConfig {
    ModelConfig {
        vocab_size: 24,
        hidden_size: 16,
        intermediate_size: 16,
        num_hidden_layers: 1,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: Some(8),
        max_position_embeddings: 64,
        initializer_range: 0.5,
        ..ModelConfig::default()
    }
}

fn write_model(folder: &Path, seed: u64) {
    let (shape, options) = (shape(), ExportOptions { dtype: Dtype::F32, ..ExportOptions::default() });
    let weights = grpo_policy::InitialWeights::of_model(&shape, seed).unwrap();
    let mut writer = FolderWriter::create(folder, &shape, None, options).unwrap();
    for parameter in shape.parameters() {
        writer.write(&parameter.name, &weights.values(&parameter.name).unwrap()).unwrap();
    }
    writer.finish().unwrap();
}

impl Model {
    /// Returns a model whose weights are trained.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_model(&folder.path().join("model"), 1);
        let policy = fake::whole(&folder.path().join("model")).unwrap();
        Self { folder, policy, lora: None }
    }

    /// Returns a model whose adapters are trained.
    fn adapted() -> Self {
        let model = Self::new();
        let targets = TargetModules::Names(vec!["q_proj".into(), "v_proj".into()]);
        let lora = LoraConfig { r: 4, lora_alpha: 32.0, target_modules: targets, ..LoraConfig::default() };
        let policy = model.policy.with_lora(&lora, 3).unwrap();
        Self { policy, lora: Some(lora), ..model }
    }

    fn path(&self) -> std::path::PathBuf {
        self.folder.path().join("model")
    }

    /// Replaces the trained weights by others.
    fn change(&mut self, seed: u64) {
        let weights = match &self.lora {
            None => grpo_policy::InitialWeights::of_model(&shape(), seed).unwrap(),
            Some(lora) => grpo_policy::InitialWeights::of_adapters(&shape(), lora, seed).unwrap(),
        };
        let mut tensors = Vec::new();
        for (name, shape) in weights.shapes() {
            let mut data = weights.values(name).unwrap().into_owned();
            if name.contains("lora_B") {
                // Fresh adapters change nothing.
                data.iter_mut().enumerate().for_each(|(i, value)| *value = 0.3 * ((i as u64 + seed) % 7) as f32 - 0.9);
            }
            tensors.push(grpo_models::NamedTensor { name: name.to_owned(), shape: shape.to_vec(), data });
        }
        self.policy.import_weights(&tensors).unwrap();
    }

    fn run(&self) -> Run {
        let model = ModelFolder::open(&self.path()).unwrap();
        Run { lora: self.lora.clone(), max_tokens: 20, max_staleness: 2, ..Run::new(model) }
    }

    fn config(&self, servers: &[&Fake]) -> ServerConfig {
        ServerConfig {
            base_urls: servers.iter().map(|server| server.url.clone()).collect(),
            weights_dir: Some(self.folder.path().to_owned()),
            retries: 3,
            timeout: 5.0,
            ..ServerConfig::default()
        }
    }

    fn engine(&self, kind: EngineKind, servers: &[&Fake]) -> grpo_engines::Result<ServerEngine> {
        ServerEngine::open(kind, &self.config(servers), self.run())
    }
}

fn kind(program: Program) -> EngineKind {
    match program {
        Program::Vllm => EngineKind::Vllm,
        Program::Sglang => EngineKind::Sglang,
    }
}

fn prompts() -> Vec<Vec<u32>> {
    vec![vec![1, 5, 9], vec![1, 7], vec![1, 5, 9, 11, 3]]
}

fn sampling(step: u64) -> Sampling {
    Sampling::Random {
        temperature: 0.7,
        processors: grpo_policy::LogitsProcessors::default(),
        seed: 5,
        purpose: grpo_rng::Purpose::Rollout,
        step,
        first: 0,
    }
}

fn request(prompts: &[Vec<u32>], sampling: Sampling) -> RolloutRequest<'_> {
    let (num_generations, max_completion_length) = (PER_PROMPT, 8);
    RolloutRequest {
        prompts,
        num_generations,
        max_completion_length,
        stop_ids: &[STOP],
        stop: None,
        sampling,
        return_sampling_mask: false,
        return_routed_experts: false,
        turn: None,
    }
}

/// Samples with an engine.
fn sample(engine: &mut ServerEngine, model: &mut Model, step: u64) -> grpo_policy::Result<Vec<Completion>> {
    let prompts = prompts();
    engine.generate(&mut model.policy, &request(&prompts, sampling(step)))
}

/// Returns the largest difference between the log-probabilities of completions and those that the policy computes.
fn difference(model: &mut Model, completions: &[Completion]) -> f32 {
    let mut largest = 0.0_f32;
    let prompts = prompts();
    for (index, completion) in completions.iter().enumerate() {
        let prompt = &prompts[index / PER_PROMPT];
        let ids = [&prompt[..], &completion.ids].concat();
        let mut logps = Vec::new();
        let mut see = |first: usize, rows: &[f32]| {
            for (position, logits) in rows.chunks(shape().vocab_size).enumerate().map(|(i, row)| (first + i, row)) {
                if position + 1 >= prompt.len() && position + 1 < ids.len() {
                    let scaled: Vec<f64> = logits.iter().map(|logit| f64::from(*logit) / 0.7).collect();
                    let max = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let lse = max + scaled.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
                    logps.push((scaled[ids[position + 1] as usize] - lse) as f32);
                }
            }
        };
        model.policy.logits(&ids, &mut see).unwrap();
        assert_eq!(logps.len(), completion.logps.len());
        for (own, found) in logps.iter().zip(&completion.logps) {
            largest = largest.max((own - found).abs());
        }
    }
    largest
}
