//! Selects the blocking of the fused loops within a budget.

use crate::program::{Blocking, MeshShape, Numerics};
use grpo_core::error::{Error, Result};
use grpo_core::{Implementation, LoopOrder, PlanRequest, PolicySpec};

/// Chunks of fewer rows make inefficient products; panels are better then.
const LEAST_CHUNK: usize = 64;

/// Returns the blocking that `request` sets, or the largest that should fit its budget: chunks of tokens if they are
/// large enough, panels of the vocabulary otherwise. The compiler determines the actual memory.
///
/// # Errors
/// [`Error::Budget`] if not even a panel of one column fits; [`Error::Unsupported`] for a tile size that the loop order
/// does not use.
pub(crate) fn choose(request: &PlanRequest, numerics: &Numerics, mesh: MeshShape) -> Result<Blocking> {
    let (Implementation::Fused, PolicySpec::Hidden { hidden, vocab, .. }) = (request.implementation, request.policy)
    else {
        // No blocking.
        return Ok(Blocking::TokenChunks(1));
    };
    let (n, v) = (mesh.padded_tokens(request.max_tokens), mesh.local_vocab(vocab));
    let tiling = &request.tiling;
    let budget = tiling.workspace_budget;
    // A tile, and the product of its gradient before accumulation.
    let logit = numerics.logits.bytes();
    let chunk = (budget / v.saturating_mul(logit).saturating_add(4 * hidden)).min(n);
    let panel = (budget.saturating_sub(4 * hidden) / n.saturating_mul(logit).saturating_add(4 * hidden)).min(v);
    let order = match (tiling.loop_order, tiling.token_chunk, tiling.vocab_block) {
        (Some(order), ..) => order,
        (None, Some(_), _) => LoopOrder::TokenChunks,
        (None, None, Some(_)) => LoopOrder::VocabPanels,
        (None, None, None) if chunk >= LEAST_CHUNK.min(n) => LoopOrder::TokenChunks,
        (None, None, None) => LoopOrder::VocabPanels,
    };
    let (size, given, other) = match order {
        LoopOrder::TokenChunks => (chunk, tiling.token_chunk, tiling.vocab_block.map(|_| "vocab_block")),
        LoopOrder::VocabPanels => (panel, tiling.vocab_block, tiling.token_chunk.map(|_| "token_chunk")),
    };
    if let Some(other) = other {
        let what = format!("`{other}` with loops in the order {order:?}");
        return Err(crate::error::unsupported(&what, "a tile spans the other dimension here: leave it out"));
    }
    if size == 0 && given.is_none() {
        let minimum = match order {
            LoopOrder::TokenChunks => v * logit + 4 * hidden,
            LoopOrder::VocabPanels => n * logit + 8 * hidden,
        };
        return Err(Error::Budget { what: "a fused tile".into(), budget, minimum });
    }
    Ok(match order {
        LoopOrder::TokenChunks => Blocking::TokenChunks(given.unwrap_or_else(|| even(n, size))),
        LoopOrder::VocabPanels => Blocking::VocabPanels(given.unwrap_or_else(|| even(v, size))),
    })
}

/// Returns `size`, or less, so that the same number of windows over `length` overlap as little as possible; a multiple
/// of the devices' register tiles if the number of windows allows it.
pub(crate) fn even(length: usize, size: usize) -> usize {
    let windows = length.div_ceil(size);
    let width = length.div_ceil(windows);
    [128, 8].into_iter().map(|tile| width.next_multiple_of(tile)).find(|w| *w <= size).unwrap_or(width)
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_core::{Dtype, GradientSpec, HeadLayout, LossConfig, Tiling};

    fn chosen(budget: usize, tiling: Tiling) -> Result<Blocking> {
        let bf16 = Numerics { logits: Dtype::Bf16, dlogits: Dtype::Bf16, ..Numerics::default() };
        let request = PlanRequest {
            loss: LossConfig::default().into(),
            implementation: Implementation::Fused,
            tiling: Tiling { workspace_budget: budget, ..tiling },
            max_tokens: 8192,
            policy: PolicySpec::Hidden {
                hidden: 4096,
                vocab: 151_936,
                dtype: Dtype::Bf16,
                layout: HeadLayout::VocabHidden,
                bias: false,
            },
            gradients: GradientSpec::default(),
        };
        choose(&request, &bf16, MeshShape::default())
    }

    #[test]
    fn a_budget_decides_the_chunk_and_then_the_order() {
        assert_eq!(chosen(656_000_000, Tiling::default()), Ok(Blocking::TokenChunks(2048)));
        assert_eq!(chosen(630_000_000, Tiling::default()), Ok(Blocking::TokenChunks(1664)));
        assert!(matches!(chosen(15 << 20, Tiling::default()), Ok(Blocking::VocabPanels(w)) if w > 0));
        assert!(matches!(chosen(1000, Tiling::default()), Err(Error::Budget { budget: 1000, .. })));
    }

    #[test]
    fn set_tile_sizes_are_used() {
        let chunk = Tiling { token_chunk: Some(1000), ..Tiling::default() };
        assert_eq!(chosen(1, chunk), Ok(Blocking::TokenChunks(1000)));
        let both = Tiling { token_chunk: Some(1000), vocab_block: Some(4096), ..Tiling::default() };
        assert!(matches!(chosen(1 << 30, both), Err(Error::Unsupported { .. })));
        let block = Tiling { vocab_block: Some(4096), ..Tiling::default() };
        assert_eq!(chosen(1 << 30, block), Ok(Blocking::VocabPanels(4096)));
    }

    #[test]
    fn even_windows_overlap_little() {
        assert_eq!(even(8192, 3000), 2816); // three windows, not 3000 + 3000 + 2192
        assert_eq!(even(10, 4), 4);
        assert_eq!(even(7, 7), 7);
    }
}
