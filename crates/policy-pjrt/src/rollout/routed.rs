//! The experts that routers choose for tokens, copied to the host.
//!
//! Legend: L layers with experts, B rows, T tokens of a row, k experts of a token.

use grpo_models::ModelConfig;

/// Returns L k, the number of experts of a token in all layers; `None` for a model without experts.
pub(super) fn width(config: &ModelConfig) -> Option<usize> {
    config.experts.as_ref().map(|experts| config.routers() * experts.num_experts_per_tok)
}

/// Returns the experts `[count, L, k]` of the first `count` tokens of a row of `record` `[L, B, T, k]`; `shape` is `[L, B, T, k]`.
pub(super) fn of_row(record: &[i32], [layers, rows, tokens, top]: [usize; 4], row: usize, count: usize) -> Vec<u16> {
    let at = |token: usize, layer: usize| ((layer * rows + row) * tokens + token) * top;
    let of_token = |token: usize| (0..layers).flat_map(move |layer| &record[at(token, layer)..at(token, layer) + top]);
    // A model has at most 2^12 experts.
    (0..count).flat_map(of_token).map(|id| *id as u16).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_of_a_row_are_in_the_order_of_tokens() {
        let shape = [2, 3, 2, 2];
        let record: Vec<i32> = (0..24).collect();
        assert_eq!(of_row(&record, shape, 1, 2), [4, 5, 16, 17, 6, 7, 18, 19]);
        assert_eq!(of_row(&record, shape, 2, 1), [8, 9, 20, 21]);
    }
}
