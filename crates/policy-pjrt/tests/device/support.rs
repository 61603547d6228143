//! Fixtures of these tests: runtimes, policies on the device and on the CPU, requests, and comparisons.

use crate::checkpoint::{self, Checkpoint, Tensors};
use grpo_core::{Implementation, LossConfig, LossOutput, Scores};
use grpo_models::NamedTensor;
use grpo_pjrt::install::{Kind, install};
use grpo_policy::{
    Completion, LogitsProcessors, OptimizerSettings, Policy, PolicyState, RolloutRequest, Sampling, Sequence,
    SequenceBatch, StateGroup, StepLoss, TensorSource, Weights, export_all, token_batch,
};
use grpo_policy_cpu::{CpuPolicy, PolicyLoss};
use grpo_policy_pjrt::decoder::{Attention, Compute};
use grpo_policy_pjrt::{DeviceRollout, DeviceWeights, PjrtPolicy, PjrtPolicyOptions, RolloutOptions, Runtime};
use grpo_rng::Purpose;
use grpo_stablehlo::Dtype;
use grpo_testkit::margin::{assert_below, largest_difference};
use grpo_testkit::xla_cpu::{flags, program_cache};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, OnceLock};

/// Returns XLA's CPU runtime with default compiler options; installs the plugin if it is missing.
pub(crate) fn optimised() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        let installed = install(Kind::Cpu, |_| {}).expect("XLA's CPU plugin can be installed");
        let runtime = Runtime::open(Kind::Cpu, Some(&installed.path)).expect("the CPU opens");
        // Compiled programs are cached between runs.
        runtime.with_compile_cache(program_cache())
    })
}

/// Returns the same runtime with fast compilation, for hundreds of programs that compile longer than they run.
pub(crate) fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        flags().into_iter().fold(optimised().clone(), |runtime, (flag, value)| runtime.with_compile_flag(flag, value))
    })
}

pub(crate) fn on_device(checkpoint: &Checkpoint, options: PjrtPolicyOptions) -> PjrtPolicy {
    let (config, weights) = (checkpoint.config(), &checkpoint.weights);
    PjrtPolicy::from_weights(runtime(), config, weights, LossConfig::default(), options).unwrap()
}

pub(crate) fn on_host(checkpoint: &Checkpoint) -> CpuPolicy {
    CpuPolicy::from_weights(checkpoint.config(), &checkpoint.weights, host_loss(LossConfig::default())).unwrap()
}

/// Returns the loss of a CPU policy.
pub(crate) fn host_loss(config: LossConfig) -> PolicyLoss {
    PolicyLoss {
        config: config.into(),
        backend: Arc::new(grpo_backend_cpu::CpuBackend::new()),
        implementation: Implementation::Fused,
        max_tokens: 64,
    }
}

/// Returns the results of `run` on the device and on the CPU.
pub(crate) fn both<T>(device: &mut PjrtPolicy, host: &mut CpuPolicy, run: impl FnMut(&mut dyn Policy) -> T) -> [T; 2] {
    [device as &mut dyn Policy, host].map(run)
}

/// Returns options with bf16 products.
pub(crate) fn narrow() -> PjrtPolicyOptions {
    PjrtPolicyOptions { compute: Compute::Bf16, ..PjrtPolicyOptions::default() }
}

/// Why comparisons of bf16 products with f32 products need no margin.
pub(crate) const BF16: &str = "operands rounded to bf16 are the same on every processor, except near midpoints";

pub(crate) fn blocks_of(tokens: usize) -> Attention {
    Attention::Blockwise { block: NonZeroUsize::new(tokens).unwrap() }
}

/// Returns all sequences as one micro-batch, without inputs of the GRPO loss.
pub(crate) fn whole(sequences: &[Sequence]) -> SequenceBatch<'_> {
    SequenceBatch { routed_experts: &[], sequences, tokens: token_batch(sequences).unwrap() }
}

/// Splits the sequences into two micro-batches; one sequence is one micro-batch.
pub(crate) fn halves(sequences: &[Sequence]) -> Vec<SequenceBatch<'_>> {
    sequences.chunks(sequences.len().div_ceil(2)).map(whole).collect()
}

/// Returns the cross-entropy of all completion tokens.
pub(crate) fn cross_entropy(sequences: &[Sequence]) -> StepLoss {
    StepLoss::CrossEntropy { tokens: sequences.iter().map(|s| s.completion.len()).sum() }
}

/// Tensors by the names of transformers and PEFT.
pub(crate) type Named = BTreeMap<String, NamedTensor>;

pub(crate) fn by_name(tensors: Vec<NamedTensor>) -> Named {
    tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect()
}

/// Returns the trained weights.
pub(crate) fn weights(policy: &dyn Policy) -> Named {
    by_name(export_all(policy, StateGroup::Weights(Weights::Policy)).unwrap())
}

/// Returns the weights of both policies and the moments.
pub(crate) fn state(policy: &dyn Policy) -> [Vec<NamedTensor>; 3] {
    let of = StateGroup::Weights;
    [of(Weights::Policy), of(Weights::RefPolicy), StateGroup::Optimizer].map(|group| export_all(policy, group).unwrap())
}

/// Returns the tensors of the model, with merged adapters.
pub(crate) fn exported(policy: &dyn Policy) -> Named {
    let mut tensors = Vec::new();
    policy.export_model(&mut tensors).unwrap();
    by_name(tensors)
}

pub(crate) fn gradients(policy: &mut PjrtPolicy) -> Named {
    let mut gradients = Vec::new();
    policy.export_gradients(&mut gradients).unwrap();
    by_name(gradients)
}

pub(crate) fn host_gradients(host: &CpuPolicy) -> Named {
    let mut gradients = Vec::new();
    host.model().export_values(host.gradients().parameters(), &mut gradients).unwrap();
    by_name(gradients)
}

/// Returns the expected gradients of a file.
pub(crate) fn expected_gradients(expected: &Tensors) -> Named {
    let named = |(name, tensor): (&String, &NamedTensor)| {
        Some((name.strip_prefix("expected.grad.")?.to_owned(), tensor.clone()))
    };
    expected.0.iter().filter_map(named).collect()
}

/// Returns the trained weights with nonzero value heads, and B of adapters of size `b`: both are initialised to zero.
pub(crate) fn moved(policy: &dyn Policy, b: f32) -> Vec<NamedTensor> {
    let mut weights = export_all(policy, StateGroup::Weights(Weights::Policy)).unwrap();
    for (i, NamedTensor { name, data, .. }) in weights.iter_mut().enumerate() {
        let size = if name.contains(".lora_B.") { b } else { 0.2 };
        if name.contains(".lora_B.") || name.starts_with("value_head.") {
            data.iter_mut().enumerate().for_each(|(k, value)| *value = size * ((i + 2 * k) as f32).sin());
        }
    }
    weights
}

/// Imports weights of both policies, moments, and the number of optimizer steps.
pub(crate) fn import(
    policy: &mut dyn Policy,
    weights: &dyn TensorSource,
    ref_policy: Option<&dyn TensorSource>,
    optimizer: &dyn TensorSource,
    optimizer_steps: u64,
    optimizer_settings: &OptimizerSettings,
) {
    policy
        .import(&PolicyState { policy: weights, ref_policy, optimizer, optimizer_steps, optimizer_settings })
        .unwrap();
}

pub(crate) fn device_weights(checkpoint: &Checkpoint, dtype: Dtype) -> DeviceWeights {
    DeviceWeights::from_weights(runtime(), checkpoint.config(), &checkpoint.weights, dtype).unwrap()
}

pub(crate) fn rollout(checkpoint: &Checkpoint, slots: usize, tokens_per_call: usize) -> DeviceRollout {
    let options = RolloutOptions { slots, tokens_per_call };
    DeviceRollout::new(runtime(), checkpoint.config(), Compute::F32, options).unwrap()
}

/// Returns a request without a stop condition.
pub(crate) fn request<'a>(
    prompts: &'a [Vec<u32>],
    num_generations: usize,
    max_completion_length: usize,
    stop_ids: &'a [u32],
    sampling: Sampling,
) -> RolloutRequest<'a> {
    RolloutRequest {
        prompts,
        num_generations,
        max_completion_length,
        stop_ids,
        stop: None,
        sampling,
        return_sampling_mask: false,
        return_routed_experts: false,
        turn: None,
    }
}

/// Returns random sampling of one step whose first sample index is `first`.
pub(crate) fn random(temperature: f64, processors: LogitsProcessors, first: usize) -> Sampling {
    let first = first as u64;
    Sampling::Random { temperature, processors, seed: 5, purpose: Purpose::Rollout, step: 3, first }
}

/// Returns the largest difference, relative to the largest expected value.
#[track_caller]
pub(crate) fn relative_difference(what: &str, found: &[f32], expected: &[f32]) -> f64 {
    let [found, expected] = [found, expected].map(|list| list.iter().copied().map(f64::from).collect::<Vec<_>>());
    let largest = expected.iter().fold(0f64, |m, x| m.max(x.abs()));
    assert!(largest > 0.0, "{what}: nothing to compare");
    largest_difference(&found, &expected) / largest
}

/// Fails unless all values are within `tolerance` of the expected ones, relative to the largest.
#[track_caller]
pub(crate) fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_below(what, relative_difference(what, found, expected), tolerance.into());
}

/// Returns the allowed difference between gradients of device and host for a checkpoint. Scores of Gemma 4 are not scaled, and amplify rounding
/// errors: gradients are within 6e-6 (device) and 8e-6 (host) of transformers in f64, so their difference reaches 1.4e-5. Gated DeltaNets have
/// longer chains of f32 operations.
pub(crate) fn to_host(name: &str) -> f32 {
    match name {
        "gemma4" | "gemma4_vision" => 4e-5,
        name if checkpoint::GATED_DELTA_NETS.contains(&name) => 1e-4,
        _ => 2e-5,
    }
}

/// Returns the largest difference of each tensor, relative to its largest value or to a tenth of the largest of all tensors: a small gradient is a
/// difference of large terms, and has their rounding errors.
///
/// # Panics
/// Panics unless names and shapes are equal.
#[track_caller]
pub(crate) fn differences(what: &str, found: &Named, expected: &Named) -> BTreeMap<String, f64> {
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{what}");
    // Both moments of AdamW are in one list, with names like `exp_avg_sq.NAME`.
    let kind = |name: &str| name.split_once('.').map(|(kind, _)| kind.to_owned());
    let largest = |values: &[f32]| values.iter().fold(0f64, |m, x| m.max(f64::from(x.abs())));
    let mut of_kind = BTreeMap::new();
    for (name, tensor) in expected {
        let of_all: &mut f64 = of_kind.entry(kind(name)).or_default();
        *of_all = of_all.max(largest(&tensor.data));
    }
    let of = |(name, expected): (&String, &NamedTensor)| {
        assert_eq!(found[name].shape, expected.shape, "{what}: {name}");
        let own = largest(&expected.data);
        assert!(own > 0.0, "{what}: {name}: nothing to compare");
        let [found, expected] =
            [&found[name], expected].map(|t| t.data.iter().copied().map(f64::from).collect::<Vec<_>>());
        let scale = own.max(0.1 * of_kind[&kind(name)]);
        (name.clone(), largest_difference(&found, &expected) / scale)
    };
    expected.iter().map(of).collect()
}

/// Fails unless names and shapes are equal, and all [`differences`] at most `tolerance`.
#[track_caller]
pub(crate) fn assert_same_tensors(what: &str, found: &Named, expected: &Named, tolerance: f32) {
    for (name, off) in differences(what, found, expected) {
        assert_below(&format!("{what}: {name}"), off, tolerance.into());
    }
}

/// Fails unless gradients are within `tolerance`. Those of experts without tokens, and of a router of one expert, are 0 in both.
#[track_caller]
pub(crate) fn assert_same_gradients(what: &str, found: &Named, expected: &Named, tolerance: f32) {
    let is_zero = |tensors: &Named, name: &str| tensors[name].data.iter().all(|x| *x == 0.0);
    let is_idle = |name: &str| {
        let is_of_experts = name.contains("mlp.experts.") || name.ends_with("mlp.gate.weight");
        is_of_experts && is_zero(expected, name) && found.contains_key(name) && is_zero(found, name)
    };
    let busy = |tensors: &Named| tensors.clone().into_iter().filter(|(name, _)| !is_idle(name)).collect();
    assert_same_tensors(what, &busy(found), &busy(expected), tolerance);
}

/// Fails unless losses or norms are within 1e-5.
#[track_caller]
pub(crate) fn assert_near(what: &str, found: f64, expected: f64) {
    assert_below(what, (found - expected).abs() / expected.abs().max(0.1), 1e-5);
}

/// Fails unless scores are within 1e-5.
#[track_caller]
pub(crate) fn assert_same_scores(what: &str, found: &Scores, expected: &Scores) {
    assert_close(&format!("{what}: logp"), &found.logp, &expected.logp, 1e-5);
    assert_close(&format!("{what}: entropy"), &found.entropy, &expected.entropy, 1e-5);
}

/// Fails unless losses and scores are within 1e-5.
#[track_caller]
pub(crate) fn assert_same_losses(what: &str, found: &LossOutput, expected: &LossOutput) {
    assert_near(what, found.loss, expected.loss);
    assert_near(what, found.policy_loss, expected.policy_loss);
    assert_near(what, found.value_loss, expected.value_loss);
    assert_same_scores(what, &found.scores, &expected.scores);
}

/// Fails unless all metrics have the same names, and values within 1e-4. Only the device has rows, and the metric of empty ones.
#[track_caller]
pub(crate) fn assert_same_metrics(what: &str, found: &LossOutput, expected: &LossOutput) {
    let [mut found, expected] = [found, expected].map(|output| output.metrics.values().collect::<BTreeMap<_, _>>());
    assert!(found.remove("frac_rows_empty").is_some(), "{what}: {found:?}");
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{what}");
    for (key, expected) in expected {
        let found = found[key];
        let off = largest_difference(&[found], &[expected]);
        assert_below(&format!("{what}, {key}"), off / expected.abs().max(0.01), 1e-4);
    }
}

/// Fails unless tokens are equal and log-probabilities within 1e-5.
#[track_caller]
pub(crate) fn assert_same_completions(what: &str, found: &[Completion], expected: &[Completion]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!((&found.ids, found.truncated), (&expected.ids, expected.truncated), "{what}, sample {i}");
        let [found, expected] = [found, expected].map(|c| c.logps.iter().copied().map(f64::from).collect::<Vec<_>>());
        assert_below(&format!("{what}, sample {i}"), largest_difference(&found, &expected), 1e-5);
    }
}
