//! Shapes of real models, scaled down, and unusual shapes.

use crate::assert_parity;
use crate::synthetic::{Shape, case};
use grpo_check::parity::Check;
use grpo_core::format::BatchLoss;
use grpo_core::{Backend, Dtype};

/// Losses by name, with different requirements on a head; the last one has sequence-level ratios.
pub const LOSSES: [(&str, &str); 6] = [
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

/// H / 64 and V / 64 of common models (Hugging Face configurations), which keep the ratio of the two and
/// the divisibility of V; and whether there is a bias.
pub const MODELS: [(&str, usize, usize, bool); 7] = [
    ("Qwen2.5 0.5B", 14, 2374, false),
    ("Qwen2.5 1.5B", 24, 2374, false),
    ("Qwen2.5 7B", 56, 2376, false),
    ("Qwen3 8B", 64, 2374, false),
    ("Llama 3.1 8B", 64, 2004, false),
    ("Gemma 2 2B", 36, 4000, false),
    ("with a bias", 32, 1013, true),
];

/// Returns the shapes of [`MODELS`].
pub fn models() -> impl Iterator<Item = (String, Shape)> {
    MODELS.into_iter().map(|(name, h, v, bias)| (name.to_owned(), Shape { b: 4, t: 7, h, v, bias }))
}

/// Returns shapes with one token, one long sequence, sequences of one token, and many sequences; no block size divides V or H.
pub fn ugly() -> impl Iterator<Item = (String, Shape)> {
    let sizes = [(1, 1), (1, 67), (9, 1), (13, 11)].into_iter();
    let sizes = sizes.flat_map(|size| [2, 3, 257, 1013].map(|v| (size, v)));
    sizes.flat_map(|((b, t), v)| [5, 33].map(|h| (format!("B{b} T{t} H{h} V{v}"), Shape { b, t, h, v, bias: v == 3 })))
}

/// One hidden unit; V is large enough that dL/dlm_head, a sum over tokens, does not cancel in all entries.
pub const ONE_HIDDEN_UNIT: Shape = Shape { b: 13, t: 11, h: 1, v: 257, bias: false };

/// Compares every implementation of `backend` with the oracle on `shape` with `losses`.
pub fn assert_shape(backend: &dyn Backend, name: &str, shape: Shape, losses: &[(&str, &str)], dtype: Dtype) {
    for (seed, (loss, json)) in losses.iter().enumerate() {
        let of = BatchLoss::from_json(json).unwrap();
        let file = case(shape, &of.loss, dtype, seed as u64).with_loss(of).unwrap();
        assert_parity(backend, &format!("{name}/{loss}"), &file, &Check::default());
    }
}
