//! The arguments and results of programs, by their role in the loss.

use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;

/// An argument or a result of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Role {
    /// Hidden states `[N, H]`.
    Hidden,
    /// LM head `[V, H]` or `[H, V]`.
    LmHead,
    /// Bias of the LM head `[V]`.
    Bias,
    /// Precomputed logits `[N, V]`.
    Logits,
    /// Targets and sequences of the tokens, i32 `[IDS, N]`.
    TokenIds,
    /// The numbers of the tokens, f32 `[TokenColumns::COUNT, N]`: a row per field of
    /// [`TokenColumns`](grpo_core::backend_api::token_columns::TokenColumns).
    TokenNumbers,
    /// `true` if the batch has no log-probabilities of an old policy, so that the current policy is the old one.
    OnPolicy,
    /// The ids that were kept at each token ([`SamplingMask`](grpo_core::batch::SamplingMask)), u32 `[N, W]`: a bit per vocabulary entry, with
    /// a spare word. Only of programs with [`Spec::sampling_mask`](super::Spec::sampling_mask).
    SamplingMask,
    /// Gradient of the hidden states `[N, H]`, an accumulator: argument and result.
    GradHidden,
    /// Gradient of the LM head, of its shape, an accumulator: argument and result.
    GradLmHead,
    /// Gradient of the bias `[V]`, an accumulator: argument and result.
    GradBias,
    /// Gradient of precomputed logits `[N, V]`, an accumulator: argument and result. In place, the gradient is the
    /// result `Logits`.
    GradLogits,
    /// The sums for loss and metrics, f32 `[LossSums::COUNT]`: an entry per field of
    /// [`LossSums`](grpo_core::backend_api::token_columns::LossSums).
    Sums,
    /// Log-probabilities of the targets in nats, f32 `[N]`.
    Logp,
    /// Entropies in nats, f32 `[N]`.
    Entropy,
}

impl Role {
    /// Returns the name of the role in the text of a program.
    pub fn name(self) -> &'static str {
        self.into()
    }
}
