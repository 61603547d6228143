//! Completions that are sampled on the device.

use crate::checkpoint::{self, Checkpoint};
use crate::support::runtime;
use policy::{Completion, LogitsProcessors, Policy, RolloutRequest, Sampling};
use policy_burn::{BurnPolicy, PolicyLoss};
use policy_device::decoder::Compute;
use policy_device::{DeviceRollout, DeviceWeights, Error, RolloutOptions};
use rng::Purpose;
use stablehlo::Dtype;
use std::sync::Arc;

fn host(checkpoint: &Checkpoint) -> BurnPolicy {
    let loss = PolicyLoss {
        config: grpo_core::LossConfig::default(),
        backend: Arc::new(backend_cpu::CpuBackend::new()),
        implementation: grpo_core::Implementation::Fused,
        max_tokens: 64,
    };
    BurnPolicy::from_weights(checkpoint.config(), &checkpoint.weights, loss).unwrap()
}

fn weights(checkpoint: &Checkpoint) -> DeviceWeights {
    DeviceWeights::from_weights(runtime(), checkpoint.config(), &checkpoint.weights, Dtype::F32).unwrap()
}

fn rollout(checkpoint: &Checkpoint, options: RolloutOptions) -> DeviceRollout {
    DeviceRollout::new(runtime(), checkpoint.config(), Compute::F32, options).unwrap()
}

/// Random sampling of the step `step`.
fn random(temperature: f64, processors: LogitsProcessors) -> Sampling {
    Sampling::Random { temperature, processors, seed: 5, purpose: Purpose::Rollout, step: 3, first: 0 }
}

/// Prompts of several lengths.
fn prompts() -> Vec<Vec<u32>> {
    vec![vec![1, 9, 4], vec![7], vec![1, 20, 21, 22, 23, 24, 25], vec![3, 2], (0..19).collect()]
}

#[test]
fn greedy_completions_are_those_of_the_host() {
    let prompts = prompts();
    for name in checkpoint::ALL {
        let checkpoint = Checkpoint::open(name);
        let request = |stop_ids| RolloutRequest {
            prompts: &prompts,
            num_generations: 2,
            max_completion_length: 9,
            stop_ids,
            sampling: Sampling::Greedy,
        };
        let mut rollout = rollout(&checkpoint, RolloutOptions { slots: 8, tokens_per_call: 4 });
        let (mut host, weights) = (host(&checkpoint), weights(&checkpoint));
        let found = rollout.generate(&weights, &request(&[])).unwrap();
        let expected = host.generate(&request(&[])).unwrap();
        assert_same(name, &found, &expected);
        assert!(found.iter().all(|completion| completion.truncated && completion.ids.len() == 9));
        // Tokens that do come end the completions.
        let stop_ids = [found[0].ids[2], found[4].ids[5]];
        let found = rollout.generate(&weights, &request(&stop_ids)).unwrap();
        assert_same(name, &found, &host.generate(&request(&stop_ids)).unwrap());
        assert!(found.iter().any(|completion| !completion.truncated), "{name}");
    }
}

/// Fails unless ids are equal and log-probabilities within 1e-5.
#[track_caller]
fn assert_same(name: &str, found: &[Completion], expected: &[Completion]) {
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!((&found.ids, found.truncated), (&expected.ids, expected.truncated), "{name}, sample {i}");
        for (found, expected) in found.logps.iter().zip(&expected.logps) {
            assert!((found - expected).abs() < 1e-5, "{name}, sample {i}: {found} {expected}");
        }
    }
}

#[test]
fn a_sample_is_the_same_in_any_slot_beside_any_other() {
    let (checkpoint, prompts) = (Checkpoint::open("qwen2"), prompts());
    let weights = weights(&checkpoint);
    let generate = |prompts: &[Vec<u32>], first: u64, options| {
        let mut sampling = random(0.8, LogitsProcessors::default());
        let Sampling::Random { first: of_request, .. } = &mut sampling else { panic!("random") };
        *of_request = first;
        let request =
            RolloutRequest { prompts, num_generations: 4, max_completion_length: 11, stop_ids: &[5, 6, 7], sampling };
        rollout(&checkpoint, options).generate(&weights, &request).unwrap()
    };
    let all = generate(&prompts, 0, RolloutOptions::default());
    assert!(all.iter().any(|completion| completion.truncated) && all.iter().any(|completion| !completion.truncated));
    assert!(all[..4].iter().any(|completion| completion.ids != all[0].ids), "samples of a prompt differ");
    for (slots, tokens_per_call) in [(1, 3), (8, 1), (8, 32), (12, 5), (40, 2)] {
        let found = generate(&prompts, 0, RolloutOptions { slots, tokens_per_call });
        assert_eq!(found, all, "{slots} slots, {tokens_per_call} tokens per call");
    }
    // Beside other prompts: alone, and behind the others.
    for (i, prompt) in prompts.iter().enumerate() {
        let found = generate(std::slice::from_ref(prompt), 4 * i as u64, RolloutOptions::default());
        assert_eq!(found, all[4 * i..4 * i + 4], "prompt {i} alone");
    }
}
