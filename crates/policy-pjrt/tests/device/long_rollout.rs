//! Completions of prompts of very different lengths, whose decode calls read different numbers of cache columns.

use crate::support::{assert_same_completions, exported, host_loss, random, request, runtime};
use grpo_core::LossConfig;
use grpo_models::{LayerRope, LayerSpec, ModelConfig, NamedTensor};
use grpo_policy::{Completion, LogitsProcessors, Policy, RolloutRequest, Sampling};
use grpo_policy_cpu::CpuPolicy;
use grpo_policy_pjrt::decoder::Compute;
use grpo_policy_pjrt::{DeviceRollout, DeviceWeights, RolloutOptions};
use grpo_stablehlo::Dtype;

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

/// Returns the same model with windows that are shorter than a call, shorter than most sequences, and shorter than the longest ones. Layers with
/// full attention have wider heads.
fn with_windows() -> ModelConfig {
    let sliding = |window| LayerSpec { sliding_window: Some(window), rope: LayerRope::Local, ..LayerSpec::default() };
    let wide = LayerSpec { head_dim: Some(24), num_key_value_heads: Some(1), ..LayerSpec::default() };
    ModelConfig {
        num_hidden_layers: 6,
        layers: vec![sliding(1), sliding(40), wide, sliding(40), sliding(200)],
        rope_local_theta: Some(100.0),
        qk_norm: true,
        value_norm: true,
        ..config()
    }
}

/// Returns prompts of very different lengths. Alone, they have caches of 384, 32, 256 and 640 columns; together, calls read 512 or 640.
fn prompts() -> Vec<Vec<u32>> {
    let id = |prompt: usize, i: usize| 3 + ((i * i + 31 * i + 17 * prompt) % (config().vocab_size - 3)) as u32;
    [300, 5, 140, 520].iter().enumerate().map(|(prompt, n)| (0..*n).map(|i| id(prompt, i)).collect()).collect()
}

fn of(prompts: &[Vec<u32>], sampling: Sampling) -> RolloutRequest<'_> {
    request(prompts, SAMPLES, 18, &[5, 6, 7], sampling)
}

/// Checks that completions depend neither on the number of slots nor on other prompts, and, if greedy, that they match the CPU policy.
fn check(config: &ModelConfig, sampling: impl Fn(usize) -> Sampling) {
    let prompts = prompts();
    let mut host = CpuPolicy::new(config, 7, host_loss(LossConfig::default())).unwrap();
    let tensors: Vec<NamedTensor> = exported(&host).into_values().collect();
    let weights = DeviceWeights::from_tensors(runtime(), config, &tensors, Dtype::F32).unwrap();
    let generate = |prompts: &[Vec<u32>], sampling, slots| {
        let options = RolloutOptions { slots, tokens_per_call: 8 };
        let mut rollout = DeviceRollout::new(runtime(), config, Compute::F32, options).unwrap();
        rollout.generate(&weights, &of(prompts, sampling)).unwrap()
    };
    let all = generate(&prompts, sampling(0), 64);
    assert!(all.iter().any(|completion| completion.truncated) && all.iter().any(|completion| !completion.truncated));
    // Samples wait for slots while others are in progress.
    assert_same_completions("eight slots", &generate(&prompts, sampling(0), 8), &all);
    for (prompt, tokens) in prompts.iter().enumerate() {
        let first = SAMPLES * prompt;
        let alone = generate(std::slice::from_ref(tokens), sampling(first), 64);
        assert_same_completions(&format!("prompt {prompt} alone"), &alone, &all[first..first + SAMPLES]);
    }
    match sampling(0) {
        Sampling::Greedy => {
            let reversed: Vec<Vec<u32>> = prompts.iter().rev().cloned().collect();
            let reversed = generate(&reversed, Sampling::Greedy, 64);
            let in_order: Vec<Completion> = reversed.chunks(SAMPLES).rev().flatten().cloned().collect();
            assert_same_completions("in other slots", &in_order, &all);
            assert_same_completions("on the host", &all, &host.generate(&of(&prompts, Sampling::Greedy)).unwrap());
        }
        Sampling::Random { .. } => {
            assert!(all[..SAMPLES].iter().any(|completion| completion.ids != all[0].ids), "samples of a prompt differ");
        }
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn greedy_completions_do_not_depend_on_other_prompts() {
    check(&config(), |_| Sampling::Greedy);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn samples_of_the_full_distribution_do_not_depend_on_other_prompts() {
    check(&config(), |first| random(1.0, LogitsProcessors::default(), first));
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn completions_with_sliding_windows_do_not_depend_on_other_prompts() {
    check(&with_windows(), |_| Sampling::Greedy);
}

#[test]
fn top_k_and_top_p_samples_do_not_depend_on_other_prompts() {
    let processors = LogitsProcessors { top_k: Some(20), top_p: Some(0.9), ..LogitsProcessors::default() };
    check(&config(), |first| random(1.0, processors, first));
}
