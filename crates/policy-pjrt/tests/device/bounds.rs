//! Errors that a device could have, and the bounds of gradients that catch them: each error exceeds its bound tenfold.

use crate::checkpoint::Checkpoint;
use crate::support::{
    Named, cross_entropy, differences, gradients, halves, on_device, runtime, to_host, weights as weights_of,
};
use grpo_core::LossConfig;
use grpo_models::{ModelConfig, NamedTensor};
use grpo_policy::{Policy, Sequence};
use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions};
use rstest::rstest;

/// Returns the gradients of the sequences; the policy forgets them.
fn gradients_of(policy: &mut PjrtPolicy, sequences: &[Sequence]) -> Named {
    policy.accumulate(&halves(sequences), cross_entropy(sequences)).unwrap();
    let gradients = gradients(policy);
    policy.skip().unwrap();
    gradients
}

/// Fails unless the largest difference of a tensor exceeds the bound of gradients on device and host tenfold.
#[track_caller]
fn assert_caught(name: &str, error: &str, found: &Named, expected: &Named) {
    let off = differences(error, found, expected).into_values().fold(0.0, f64::max);
    let bound = f64::from(to_host(name));
    println!("error {:.0} bounds: {name}, {error}: off by {off:.2e}, bound {bound:.2e}", off / bound);
    assert!(off > 10.0 * bound, "{name}, {error}: off by {off:e}, expected more than ten times {bound:e}");
}

/// Exchanges two rows, which differ. Rows of the embedding are those of tokens that the sequences have.
fn exchange_rows(tensor: &mut NamedTensor, [first, second]: [usize; 2]) {
    let row = tensor.data.len() / tensor.shape[0];
    let other = if tensor.name.ends_with("embed_tokens.weight") {
        [first, second]
    } else {
        let differs = |other: &usize| tensor.data[..row] != tensor.data[other * row..][..row];
        [0, (1..tensor.shape[0]).find(differs).unwrap_or_else(|| panic!("{}: equal rows", tensor.name))]
    };
    (0..row).for_each(|column| tensor.data.swap(other[0] * row + column, other[1] * row + column));
}

/// The smallest error in the layout of a weight: one head, expert or channel in another's place.
#[rstest]
#[case::qwen2("qwen2")]
#[ignore = "GRPO_TESTS=all"]
#[case::gemma4("gemma4")]
#[ignore = "GRPO_TESTS=all"]
#[case::gpt_oss("gpt_oss")]
#[ignore = "GRPO_TESTS=all"]
#[case::qwen3_moe("qwen3_moe")]
#[ignore = "GRPO_TESTS=all"]
#[case::qwen3_5("qwen3_5")]
fn two_exchanged_rows_of_any_tensor_exceed_the_bound(#[case] name: &str) {
    let checkpoint = Checkpoint::open(name);
    let sequences = checkpoint.completions();
    let mut policy = on_device(&checkpoint, PjrtPolicyOptions::default());
    let expected = gradients_of(&mut policy, &sequences);
    let weights: Vec<NamedTensor> = weights_of(&policy).into_values().collect();
    let first = sequences[0].prompt[0];
    let second = *sequences[0].completion.iter().find(|id| **id != first).unwrap();
    for index in 0..weights.len() {
        let mut exchanged = weights.clone();
        exchange_rows(&mut exchanged[index], [first, second].map(|id| id as usize));
        policy.import_weights(&exchanged).unwrap();
        assert_caught(name, &weights[index].name, &gradients_of(&mut policy, &sequences), &expected);
    }
}

/// Errors of the numbers of a model, which have no tensor.
#[rstest]
#[case::qwen2("qwen2")]
#[ignore = "GRPO_TESTS=all"]
#[case::gemma4("gemma4")]
#[ignore = "GRPO_TESTS=all"]
#[case::gpt_oss("gpt_oss")]
#[ignore = "GRPO_TESTS=all"]
#[case::qwen3_moe("qwen3_moe")]
#[ignore = "GRPO_TESTS=all"]
#[case::qwen3_5("qwen3_5")]
fn another_epsilon_theta_or_scale_exceeds_the_bound(#[case] name: &str) {
    let checkpoint = Checkpoint::open(name);
    let sequences = checkpoint.completions();
    let of = |config: &ModelConfig| {
        let (weights, options) = (&checkpoint.weights, PjrtPolicyOptions::default());
        let policy = PjrtPolicy::from_weights(runtime(), config, weights, LossConfig::default(), options);
        gradients_of(&mut policy.unwrap(), &sequences)
    };
    let config = checkpoint.config();
    let expected = of(config);
    for (error, changed) in [
        ("10 times epsilon", ModelConfig { rms_norm_eps: 10.0 * config.rms_norm_eps, ..config.clone() }),
        ("theta 10 % off", ModelConfig { rope_theta: 1.1 * config.rope_theta, ..config.clone() }),
        ("scores 1 % off", {
            let scale = config.attention_multiplier.unwrap_or((config.head_dim() as f64).sqrt().recip());
            ModelConfig { attention_multiplier: Some(1.01 * scale), ..config.clone() }
        }),
    ] {
        assert_caught(name, error, &of(&changed), &expected);
    }
}
