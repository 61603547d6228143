//! The experts that the routers of a mixture of experts chose for a sequence.

/// The experts of the tokens of a sequence in all layers, as engines return them (`routed_experts` of vLLM).
///
/// Replaying them in training (R3, arXiv 2510.11370) sends every token to the experts that sampled it. A router's weights are then computed from its own
/// logits over these experts.
///
/// ```
/// use grpo_policy::RoutedExperts;
///
/// // Two tokens, two layers, one expert per token and layer.
/// let routed = RoutedExperts { width: 2, ids: vec![3, 0, 1, 2] };
/// assert_eq!((routed.at(1), routed.at(2)), (Some(&[1, 2][..]), None));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutedExperts {
    /// The number of experts of a token in all layers, L k.
    pub width: usize,
    /// The experts `[tokens, L, k]` of the tokens of prompt and completion, from the first one on. The last token of a sequence is no input of
    /// the model and has none.
    pub ids: Vec<u16>,
}

impl RoutedExperts {
    /// Returns the experts `[L, k]` of the token at a position of the sequence; `None` if they are not recorded.
    pub fn at(&self, position: usize) -> Option<&[u16]> {
        self.ids.get(position * self.width..(position + 1) * self.width).filter(|ids| !ids.is_empty())
    }

    /// Returns the recorded experts `[tokens, L, k]` of the first tokens.
    pub fn first(&self, tokens: usize) -> &[u16] {
        &self.ids[..self.ids.len().min(tokens.saturating_mul(self.width))]
    }

    /// Drops the experts of the last tokens.
    pub(crate) fn drop_last(&mut self, tokens: usize) {
        self.ids.truncate(self.ids.len().saturating_sub(tokens.saturating_mul(self.width)));
    }
}
