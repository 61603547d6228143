//! The claim that the whole thing rests on: advantages, and nothing else, make the policy better.

use crate::support::{Runs, json};

/// Rise of the held-out sampled reward and of the training reward.
fn rise(advantage_scale: &str, seed: &str, dtype: &str) -> (f64, f64) {
    let settings =
        [format!("grpo.advantage_scale={advantage_scale}"), format!("seed={seed}"), format!("policy.dtype={dtype}")];
    let runs = Runs::new(&settings.each_ref().map(String::as_str));
    runs.train("a");
    let summary = json(&runs.path("a").join("summary.json"));
    let number = |pointer: &str| summary.pointer(pointer).and_then(serde_json::Value::as_f64).expect("a number");
    (number("/eval_after/reward") - number("/eval_before/reward"), number("/reward_last") - number("/reward_first"))
}

#[test]
fn rewards_rise_with_advantages_and_not_without() {
    assert_learns("0", "float32");
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn rewards_rise_with_other_seeds_and_in_bf16() {
    assert_learns("1", "float32");
    assert_learns("2", "bfloat16");
}

fn assert_learns(seed: &str, dtype: &str) {
    let (held_out, training) = rise("1", seed, dtype);
    assert!(held_out > 0.3 && training > 0.3, "seed {seed}: {held_out:+.3} held out, {training:+.3} in training");
    let (held_out, training) = rise("0", seed, dtype);
    assert!(held_out < 0.05 && training < 0.1, "seed {seed}: {held_out:+.3} held out, {training:+.3} in training");
}
