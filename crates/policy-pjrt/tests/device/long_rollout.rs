//! Completions of prompts of very different lengths, whose decode calls read different numbers of cache columns.

use crate::support::runtime;
use models::{ModelConfig, NamedTensor};
use policy::{Completion, LogitsProcessors, Policy, RolloutRequest, Sampling};
use policy_cpu::{CpuPolicy, PolicyLoss};
use policy_pjrt::decoder::Compute;
use policy_pjrt::{DeviceRollout, DeviceWeights, RolloutOptions};
use rng::Purpose;
use stablehlo::Dtype;
use std::sync::Arc;

/// Samples per prompt: in some runs, all prompts together have more samples than slots.
const SAMPLES: usize = 6;

/// Returns a model whose hidden size fits into one block of CPU matrix products, and whose logits are far apart.
fn config() -> ModelConfig {
    ModelConfig {
        hidden_size: 64,
        intermediate_size: 96,
        num_hidden_layers: 2,
        max_position_embeddings: 1024,
        initializer_range: 0.15,
        ..ModelConfig::default()
    }
}

fn host() -> CpuPolicy {
    let loss = PolicyLoss {
        config: grpo_core::LossConfig::default().into(),
        backend: Arc::new(backend_cpu::CpuBackend::new()),
        implementation: grpo_core::Implementation::Fused,
        max_tokens: 64,
    };
    CpuPolicy::new(&config(), 7, loss).unwrap()
}

/// Returns prompts of very different lengths. Alone, they have caches of 384, 32, 256 and 640 columns; together, calls read 512 or 640.
fn prompts() -> Vec<Vec<u32>> {
    let id = |prompt: usize, i: usize| 3 + ((i * i + 31 * i + 17 * prompt) % (config().vocab_size - 3)) as u32;
    [300, 5, 140, 520].iter().enumerate().map(|(prompt, n)| (0..*n).map(|i| id(prompt, i)).collect()).collect()
}

/// Fails unless tokens are equal and log-probabilities within 1e-5.
#[track_caller]
fn assert_same(what: &str, found: &[Completion], expected: &[Completion]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!((&found.ids, found.truncated), (&expected.ids, expected.truncated), "{what}, sample {i}");
        for (token, (found, expected)) in found.logps.iter().zip(&expected.logps).enumerate() {
            let off = (found - expected).abs();
            assert!(off < 1e-5, "{what}, sample {i}, token {token}: {found} {expected}");
        }
    }
}

/// Returns random sampling whose first sample index is `first`.
fn random(processors: LogitsProcessors, first: usize) -> Sampling {
    let (seed, purpose, step, first) = (5, Purpose::Rollout, 3, first as u64);
    Sampling::Random { temperature: 1.0, processors, seed, purpose, step, first }
}

fn request(prompts: &[Vec<u32>], sampling: Sampling) -> RolloutRequest<'_> {
    RolloutRequest {
        prompts,
        num_generations: SAMPLES,
        max_completion_length: 18,
        stop_ids: &[5, 6, 7],
        stop: None,
        sampling,
    }
}

/// Checks that completions depend neither on the number of slots nor on other prompts, and, if greedy, that they match the CPU policy.
fn check(sampling: impl Fn(usize) -> Sampling) {
    let (prompts, mut host) = (prompts(), host());
    let mut tensors: Vec<NamedTensor> = Vec::new();
    host.export_model(&mut tensors).unwrap();
    let weights = DeviceWeights::from_tensors(runtime(), &config(), &tensors, Dtype::F32).unwrap();
    let generate = |prompts: &[Vec<u32>], sampling, slots| {
        let options = RolloutOptions { slots, tokens_per_call: 8 };
        let mut rollout = DeviceRollout::new(runtime(), &config(), Compute::F32, options).unwrap();
        rollout.generate(&weights, &request(prompts, sampling)).unwrap()
    };
    let all = generate(&prompts, sampling(0), 64);
    assert!(all.iter().any(|completion| completion.truncated) && all.iter().any(|completion| !completion.truncated));
    // Samples wait for slots while others are in progress.
    assert_same("eight slots", &generate(&prompts, sampling(0), 8), &all);
    for (prompt, tokens) in prompts.iter().enumerate() {
        let first = SAMPLES * prompt;
        let alone = generate(std::slice::from_ref(tokens), sampling(first), 64);
        assert_same(&format!("prompt {prompt} alone"), &alone, &all[first..first + SAMPLES]);
    }
    match sampling(0) {
        Sampling::Greedy => {
            let reversed: Vec<Vec<u32>> = prompts.iter().rev().cloned().collect();
            let reversed = generate(&reversed, Sampling::Greedy, 64);
            let in_order: Vec<Completion> = reversed.chunks(SAMPLES).rev().flatten().cloned().collect();
            assert_same("in other slots", &in_order, &all);
            assert_same("on the host", &all, &host.generate(&request(&prompts, Sampling::Greedy)).unwrap());
        }
        Sampling::Random { .. } => {
            assert!(all[..SAMPLES].iter().any(|completion| completion.ids != all[0].ids), "samples of a prompt differ");
        }
    }
}

#[test]
fn greedy_completions_do_not_depend_on_other_prompts() {
    check(|_| Sampling::Greedy);
}

#[test]
fn samples_of_the_full_distribution_do_not_depend_on_other_prompts() {
    check(|first| random(LogitsProcessors::default(), first));
}

#[test]
fn top_k_and_top_p_samples_do_not_depend_on_other_prompts() {
    let processors = LogitsProcessors { top_k: Some(20), top_p: Some(0.9), ..LogitsProcessors::default() };
    check(|first| random(processors, first));
}
