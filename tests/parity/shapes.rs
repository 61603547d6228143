//! Shapes of real models, scaled down, and the ugly ones, on every backend and implementation.

use crate::synthetic::{Shape, case};
use crate::{assert_parity, backends};
use grpo_check::parity::Check;
use grpo_core::Dtype;
use grpo_core::format::BatchLoss;
use rstest::rstest;

const LOSSES: [(&str, &str); 6] = [
    ("grpo", r#"{"loss_type": "grpo", "epsilon_high": 0.28, "beta": 0.04, "temperature": 0.8}"#),
    ("bnpo", r#"{"loss_type": "bnpo", "delta": 1.6, "temperature": 0.7, "temperature_mode": "scale_logprobs"}"#),
    ("dr_grpo", r#"{"loss_type": "dr_grpo", "max_completion_length": 16, "entropy_coef": 0.05}"#),
    (
        "dapo",
        r#"{"loss_type": "dapo", "epsilon_high": 0.28, "num_items_in_batch": 40, "beta": 0.1, "kl_estimator": "k1"}"#,
    ),
    ("cispo", r#"{"loss_type": "cispo", "epsilon_high": 1.3, "beta": 0.02, "kl_estimator": "k2"}"#),
    ("gspo", r#"{"loss_type": "gspo", "epsilon_low": 0.05, "epsilon_high": 0.08, "beta": 0.04}"#),
];

fn run(name: &str, shape: Shape, losses: &[(&str, &str)], dtype: Dtype) {
    for (seed, (loss, json)) in losses.iter().enumerate() {
        let of = BatchLoss::from_json(json).unwrap();
        let file = case(shape, &of.loss, dtype, seed as u64).with_loss(of).unwrap();
        for backend in backends() {
            assert_parity(backend.as_ref(), &format!("{name}/{loss}"), &file, &Check::default());
        }
    }
}

/// H / 64 and V / 64 of the models that people train (Hugging Face configurations), so that the ratio of the two and
/// the awkwardness of V stay.
#[rstest]
#[case::qwen2_5_0_5b(14, 2374, false)]
#[case::qwen2_5_1_5b(24, 2374, false)]
#[case::qwen2_5_7b(56, 2376, false)]
#[case::qwen3_8b(64, 2374, false)]
#[case::llama_3_1_8b(64, 2004, false)]
#[case::gemma_2_2b(36, 4000, false)]
#[case::with_a_bias(32, 1013, true)]
fn models(#[case] h: usize, #[case] v: usize, #[case] bias: bool, #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype) {
    run(&format!("H{h} V{v}"), Shape { b: 4, t: 7, h, v, bias }, &LOSSES, dtype);
}

#[rstest]
#[case::one_token(1, 1)]
#[case::one_long_sequence(1, 67)]
#[case::one_token_sequences(9, 1)]
#[case::many(13, 11)]
fn ugly(
    #[case] b: usize,
    #[case] t: usize,
    #[values(2, 3, 257, 1013)] v: usize,
    #[values(5, 33)] h: usize,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
) {
    run(&format!("B{b} T{t} H{h} V{v}"), Shape { b, t, h, v, bias: v == 3 }, &LOSSES[..1], dtype);
    run(&format!("B{b} T{t} H{h} V{v}"), Shape { b, t, h, v, bias: v == 3 }, &LOSSES[5..], dtype);
}

/// One hidden unit; V large enough that dL/dlm_head, a sum over tokens, does not cancel in all its entries at once.
#[rstest]
fn one_hidden_unit(#[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype) {
    run("H1", Shape { b: 13, t: 11, h: 1, v: 257, bias: false }, &LOSSES, dtype);
}
