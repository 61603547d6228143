//! Policies of the checkpoints, and comparisons.

use crate::checkpoint::Checkpoint;
use grpo_core::LossConfig;
use grpo_models::NamedTensor;
use grpo_policy::{Policy, SequenceBatch, StepLoss, token_batch};
use grpo_policy_cpu::decoder::{Decoder, PackedBatch};
use grpo_policy_cpu::{CpuPolicy, PolicyLoss};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Fails unless all values are within 1e-4 of the expected ones, absolutely and relative to the largest.
#[track_caller]
pub(crate) fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
    assert!(largest > 0.0, "{what}: nothing to compare");
    let off = found.iter().zip(expected).map(|(f, e)| (f - e).abs()).fold(0.0, f32::max);
    assert!(off <= 1e-4 * largest.min(1.0), "{what}: off by {off} of {largest}");
}

pub(crate) fn policy_loss() -> PolicyLoss {
    PolicyLoss {
        config: LossConfig::default().into(),
        backend: Arc::new(grpo_backend_cpu::CpuBackend::new()),
        implementation: grpo_core::Implementation::Fused,
        max_tokens: 64,
    }
}

pub(crate) fn policy(checkpoint: &Checkpoint) -> CpuPolicy {
    CpuPolicy::from_weights(checkpoint.config(), &checkpoint.weights, policy_loss()).unwrap()
}

/// Returns logits `[N, V]` of packed sequences.
pub(crate) fn logits<S: AsRef<[u32]>>(decoder: &Decoder, sequences: &[S]) -> Vec<f32> {
    let hidden = decoder.forward(&PackedBatch::new(sequences).unwrap()).unwrap();
    let logits: Vec<f32> = hidden.matmul(decoder.lm_head().unwrap().transpose()).into_data().try_into_vec().unwrap();
    match decoder.config().final_logit_softcapping {
        Some(cap) => logits.into_iter().map(|logit| cap as f32 * (logit / cap as f32).tanh()).collect(),
        None => logits,
    }
}

/// Returns the loss, and the gradients with Hugging Face's names.
pub(crate) fn accumulate(policy: &mut CpuPolicy, checkpoint: &Checkpoint) -> (f64, BTreeMap<String, NamedTensor>) {
    let sequences = checkpoint.completions();
    let tokens = sequences.iter().map(|s| s.completion.len()).sum();
    // Two micro-batches; one if there is only one sequence.
    let batches: Vec<_> = (sequences.chunks(sequences.len().div_ceil(2)))
        .map(|sequences| SequenceBatch { routed_experts: &[], sequences, tokens: token_batch(sequences).unwrap() })
        .collect();
    let loss = policy.accumulate(&batches, StepLoss::CrossEntropy { tokens }).unwrap().loss;
    let mut gradients = Vec::new();
    policy.model().export_values(policy.gradients().parameters(), &mut gradients).unwrap();
    (loss, gradients.into_iter().map(|gradient| (gradient.name.clone(), gradient)).collect())
}
