//! The arguments and results of programs, by what they are to the loss.

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
    /// Given logits `[N, V]`.
    Logits,
    /// Targets and sequences of the tokens of all devices, i32 `[IDS, G]`.
    TokenIds,
    /// What is known of every token of all devices, f32 `[TokenColumns::COUNT, G]`: a row per field of
    /// [`TokenColumns`](grpo_core::backend_api::columns::TokenColumns).
    TokenNumbers,
    /// A predicate: whether the batch has no old policy, so that the policy is its own.
    OnPolicy,
    /// Gradient of the hidden states `[N, H]`, accumulated: argument and result.
    GradHidden,
    /// Gradient of the LM head, shaped as it is, accumulated: argument and result.
    GradLmHead,
    /// Gradient of the bias `[V]`, accumulated: argument and result.
    GradBias,
    /// Gradient of given logits `[N, V]`, accumulated: argument and result. In place, they are the result `Logits`.
    GradLogits,
    /// The loss and its metrics as sums, f32 `[LossSums::COUNT]`: an entry per field of
    /// [`LossSums`](grpo_core::backend_api::columns::LossSums).
    Sums,
    /// Log-probabilities of the targets in nats, f32 `[N]`.
    Logp,
    /// Entropies in nats, f32 `[N]`.
    Entropy,
}

impl Role {
    /// The name of the role in the text of a program.
    pub fn name(self) -> &'static str {
        self.into()
    }
}
