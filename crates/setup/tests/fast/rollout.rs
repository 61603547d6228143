//! Training uses exactly what was sampled: the same ids, positions and probabilities.

use super::own_policy::Unigram;
use grpo_core::{LossConfig, Metrics};
use grpo_models::{CharTokenizer, ModelConfig, Tokenizer};
use grpo_policy::{Completion, Policy, Result, RolloutEngine, RolloutRequest};
use grpo_run_config::{PolicyDtype, RolloutConfig};
use grpo_trainer::{TrainConfig, Trainer};
use std::sync::Arc;

/// Returns one step with one update and one micro-batch, on prompts of different lengths.
pub(crate) fn config() -> TrainConfig {
    // Weights are scaled so that probabilities are far from uniform.
    let model =
        ModelConfig { hidden_size: 32, intermediate_size: 32, initializer_range: 0.3, ..ModelConfig::default() };
    let mut config = TrainConfig { model: model.into(), ..TrainConfig::built_in() };
    config.data.tasks.addition.zero_pad = false;
    config.data.tasks.countdown.weight = 1.0;
    config.warmup.steps = 0;
    config.rollout.temperature = Some(0.8);
    config.rollout.max_completion_length = Some(6);
    config.rollout.batch_size = 16;
    config.grpo.max_steps = 1;
    config.grpo.num_iterations = 1;
    config.grpo.steps_per_generation = 1;
    config.grpo.gradient_accumulation_steps = 1;
    config.grpo.prompts_per_step = 8;
    config.grpo.num_generations = 4;
    config.eval.num_problems = Some(4);
    config.loss = LossConfig::from_json(r#"{"vllm_importance_sampling_correction": true}"#).unwrap();
    config
}

fn trainer(engine: impl RolloutEngine + 'static) -> Trainer {
    let parts = grpo_setup::parts(&config()).unwrap().with_engine(engine);
    Trainer::with_parts(config(), parts).unwrap()
}

/// The built-in engine with possible faults between it and the loss.
struct Engine {
    prompt: fn(&[u32]) -> Vec<u32>,
    completion: fn(&mut Completion),
}

impl RolloutEngine for Engine {
    fn generate(&mut self, policy: &mut dyn Policy, request: &RolloutRequest<'_>) -> Result<Vec<Completion>> {
        let lengths: Vec<usize> = request.prompts.iter().map(Vec::len).collect();
        assert!(lengths.iter().any(|length| *length != lengths[0]), "no prompt is padded");
        for prompt in request.prompts {
            let text = CharTokenizer.decode(&prompt[1..])?;
            assert_eq!(*prompt, CharTokenizer.encode_prompt(&text)?, "one BOS, then the question");
        }
        let prompts: Vec<Vec<u32>> = request.prompts.iter().map(|prompt| (self.prompt)(prompt)).collect();
        let request = RolloutRequest { prompts: &prompts, ..*request };
        let mut completions = policy.generate(&request)?;
        completions.iter_mut().for_each(self.completion);
        Ok(completions)
    }
}

/// Returns the largest difference between the log-probabilities of the engine, which decodes left-padded prompts with a cache, and of the
/// loss, which runs the same ids right-padded in one pass.
fn difference(engine: Engine) -> f64 {
    let report = trainer(engine).grpo_step().unwrap();
    report.metric("sampling/sampling_logp_difference/max")
}

#[test]
fn loss_and_engine_agree_on_log_probabilities() {
    let found = difference(Engine { prompt: <[u32]>::to_vec, completion: |_| () });
    assert!(found > 0.0 && found < 1e-4, "{found}");
}

/// Returns the metrics of a step whose loss does not read the sampler's log-probabilities.
fn uncorrected(dtype: PolicyDtype, updates: [usize; 2], completion: fn(&mut Completion)) -> Metrics {
    let mut config = config();
    config.loss = LossConfig::default();
    config.policy.dtype = dtype;
    [config.grpo.num_iterations, config.grpo.steps_per_generation] = updates;
    let engine = Engine { prompt: <[u32]>::to_vec, completion };
    let parts = grpo_setup::parts(&config).unwrap().with_engine(engine);
    Trainer::with_parts(config, parts).unwrap().grpo_step().unwrap().metrics
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn the_difference_to_the_sampler_is_a_metric_of_every_step() {
    for updates in [[1, 1], [2, 1], [1, 2]] {
        let step = |dtype, completion| uncorrected(dtype, updates, completion);
        let of = |metrics: &Metrics, what| metrics.value(&format!("sampling/sampling_logp_difference/{what}")).unwrap();
        let [single, pairs] = [PolicyDtype::Float32, PolicyDtype::Bfloat16].map(|dtype| step(dtype, |_| ()));
        for max in [of(&single, "max"), of(&pairs, "max")] {
            assert!(max > 0.0 && max < 1e-5, "{max}");
        }
        // Other log-probabilities of the sampler change the metric, and nothing else.
        let shifted =
            step(PolicyDtype::Float32, |completion| completion.logps.iter_mut().for_each(|logp| *logp -= 0.5));
        assert!((of(&shifted, "mean") - 0.5).abs() < 1e-3, "{shifted:?}");
        assert_eq!(shifted.value("loss"), single.value("loss"));
        assert_eq!(shifted.value("grad_norm"), single.value("grad_norm"));
        // Unknown ones do not count.
        let unknown = step(PolicyDtype::Float32, |completion| completion.logps.fill(f32::NAN));
        assert_eq!(unknown.value("sampling/sampling_logp_difference/mean"), None);
    }
}

/// The difference detects a duplicate BOS, attention to padding, log-probabilities shifted by one token, and a different
/// temperature.
#[test]
fn faulty_rollouts_are_detected() {
    let of_prompts = |prompt| Engine { prompt, completion: |_| () };
    let of_completions = |completion| Engine { prompt: <[u32]>::to_vec, completion };
    let naive = [
        ("two BOS", of_prompts(|prompt| [&[CharTokenizer::BOS], prompt].concat())),
        ("padding", of_prompts(|prompt| [&[CharTokenizer::PAD; 2], prompt].concat())),
        ("off by one", of_completions(|completion| completion.logps.rotate_right(1))),
        ("temperature", of_completions(|completion| completion.logps.iter_mut().for_each(|logp| *logp *= 0.8))),
    ];
    for (name, engine) in naive {
        let found = difference(engine);
        assert!(found > 0.1, "{name}: {found}");
    }
}

#[test]
fn runs_warn_of_samplers_with_other_log_probabilities() {
    let log_of_step = |completion: fn(&mut Completion)| {
        let mut run = trainer(Engine { prompt: <[u32]>::to_vec, completion });
        grpo_testkit::logged(|| drop(run.grpo_step().unwrap()))
    };
    let warning = "step 1: the sampler's log-probabilities differ from the policy's by";
    let faithful = log_of_step(|_| ());
    assert!(!faithful.contains(warning), "{faithful}");
    let faulty = log_of_step(|completion| completion.logps.iter_mut().for_each(|logp| *logp *= 0.5));
    assert!(faulty.lines().any(|line| line.contains("WARN") && line.contains(warning)), "{faulty}");
}

/// The engine's log-probabilities are over the kept ids, and the loss's only with their replay.
#[test]
fn a_replayed_sampling_mask_makes_loss_and_engine_agree() {
    for (top_k, top_p, min_p) in [(Some(3), None, None), (None, Some(0.7), None), (None, None, Some(0.3))] {
        let of = |replay_sampling_mask: bool| {
            let mut config = config();
            config.rollout = RolloutConfig { top_k, top_p, min_p, replay_sampling_mask, ..config.rollout };
            config.loss.beta = 0.1;
            let report = grpo_setup::trainer(config).unwrap().grpo_step().unwrap();
            // The reference equals the policy, also over the kept ids.
            let kl = report.metrics.value("kl").unwrap();
            assert!(kl.abs() < 1e-6, "{top_k:?} {top_p:?} {min_p:?}: {kl}");
            report.metric("sampling/sampling_logp_difference/max")
        };
        let [with, without] = [true, false].map(of);
        assert!(with < 1e-4 && without > 0.1, "{top_k:?} {top_p:?} {min_p:?}: {with} {without}");
    }
}

#[test]
fn an_engine_without_sampling_masks_cannot_replay_them() {
    let mut config = config();
    (config.rollout.top_k, config.rollout.replay_sampling_mask) = (Some(3), true);
    let parts = grpo_setup::parts(&config).unwrap().with_engine(Strays);
    let error = Trainer::with_parts(config, parts).unwrap().grpo_step().unwrap_err().to_string();
    assert!(error.contains("with the ids that it was sampled from"), "{error}");
}

/// An engine that returns tokens which no text encodes to: padding and BOS inside a completion.
struct Strays;

/// Decodes as "<pad>2<bos>4".
const STRAYS: [u32; 5] = [CharTokenizer::PAD, 5, CharTokenizer::BOS, 7, CharTokenizer::EOS];

impl RolloutEngine for Strays {
    fn generate(&mut self, _: &mut dyn Policy, request: &RolloutRequest<'_>) -> Result<Vec<Completion>> {
        let completion = |i: usize| {
            let ids = if i.is_multiple_of(2) { STRAYS.to_vec() } else { STRAYS[1..].to_vec() };
            Completion::sampled(ids, vec![f32::NAN; 5 - i % 2], false)
        };
        Ok((0..request.prompts.len() * request.num_generations).map(completion).collect())
    }
}

/// Only rewards use the text. Encoding it again would give different ids.
#[test]
fn training_uses_the_sampled_ids() {
    let text = CharTokenizer.decode(&STRAYS).unwrap();
    let naive = CharTokenizer.encode_completion(&text).unwrap();
    assert!(naive.len() > 2 * STRAYS.len(), "naive: {text:?} is {naive:?}");

    let policy = Unigram::new();
    let targets = Arc::clone(&policy.trained_on);
    let mut parts = grpo_setup::parts(&config()).unwrap().with_engine(Strays);
    parts.policy = Box::new(policy);
    let mut run = Trainer::with_parts(config(), parts).unwrap();
    let report = run.grpo_step().unwrap();
    let long = STRAYS.map(i64::from);
    assert_eq!(*targets.lock().unwrap(), [&long[..], &long[1..]].concat().repeat(16));
    assert_eq!(report.metric("completions/mean_length"), 4.5);
    assert!(report.samples.iter().any(|sample| sample.completion == text));
}
