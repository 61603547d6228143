//! Rows of tokens.
//!
//! Legend: B rows, T tokens of a row, L layers, k experts of a token.

#[cfg(doc)]
use super::RouterSums;
use grpo_stablehlo::Value;

/// Rows of tokens as values of a program.
#[derive(Clone, Debug)]
pub struct Rows {
    /// Token ids `[B, T]`, i32.
    pub ids: Value,
    /// The position of each token in its sequence, `[B, T]`, i32.
    pub positions: Value,
    /// `true` if a row may hold several packed sequences. A token then attends to itself and to the `position` tokens before it, which
    /// belong to its sequence; padding has position 0 and attends to itself only. If `false`, a row is one sequence, and causal
    /// attention never sees its padding, which is on the right.
    pub shared: bool,
    /// 1 for tokens and 0 for padding, `[B, T]`, f32; the tokens that count in [`RouterSums`]. `None` computes no sums.
    pub counted: Option<Value>,
    /// Experts `[L, B, T, k]`, i32, that replace the choices of routers; -1 for tokens whose experts are chosen.
    pub routed: Option<Value>,
}

impl Rows {
    /// Creates rows of one sequence each, which begin at position 0; `ids` `[B, T]`.
    pub fn of_sequences(ids: &Value) -> Self {
        let positions = ids.builder().iota(1, ids.ty().clone());
        Self { ids: ids.clone(), positions, shared: false, counted: None, routed: None }
    }

    /// Returns the positions `[B, T]`, or `[1, T]` if every row is one sequence: all rows then have the same.
    pub(crate) fn distinct_positions(&self) -> Value {
        match self.shared {
            true => self.positions.clone(),
            false => self.positions.slice(&[0, 0], &[1, self.positions.shape()[1]]),
        }
    }
}
