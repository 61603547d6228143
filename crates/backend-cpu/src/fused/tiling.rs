//! Selects the blocking of the fused head: the tokens per chunk, and the tiles per panel of the vocabulary.
//!
//! One scheme covers both loop orders. A chunk of C tokens is multiplied with panels of P vocabulary tiles:
//!
//! * token chunks: one panel is the whole vocabulary and stays in memory until the backward products: 3 products of
//!   2NHV flops;
//! * vocabulary panels: a pass for the statistics, then a pass that recomputes each panel's logits, replaces them by
//!   dlogits and finishes that part of dW: 4 products, but far less memory traffic if C is larger as a result.
//!
//! With hidden states, the implementation `logits` uses token chunks with all tokens in one chunk, for any budget.
//!
//! The cost is flops + [`Gemm::flops_per_byte`] x bytes moved.

use super::slot::{Slot, TILES_PER_SLOT, stride};
use super::token::TOKEN_BYTES;
use crate::arch::IsaToken;
use crate::gemm::Gemm;
use crate::plan::evaluator_bytes;
use crate::softmax::{Partial, TILE};
use crate::tokens::TokenState;
use grpo_core::error::{Error, Result};
use grpo_core::{Dtype, HeadLayout, Implementation, LoopOrder, PlanRequest};

/// The block sizes of the fused loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocking {
    pub(crate) order: LoopOrder,
    /// The tokens C of a chunk.
    pub(crate) chunk: usize,
    /// The tiles P of a panel.
    pub(crate) panel_tiles: usize,
    /// The number of concurrent tasks.
    pub(crate) slots: usize,
}

/// The inputs of the choice of a blocking.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    pub(crate) gemm: Gemm,
    pub(crate) n: usize,
    pub(crate) h: usize,
    pub(crate) v: usize,
    pub(crate) layout: HeadLayout,
    /// The bytes of an element of hidden states and head.
    element: usize,
    /// `true` if dlogits are rounded to bf16 before the gradients' products.
    pub(crate) rounds: bool,
    hidden_gradient: bool,
    head_gradient: bool,
    /// `true` if the state of all N tokens is kept (for ratios per sequence).
    keeps_all: bool,
}

impl Problem {
    /// `dlogits` is the dtype to which dL/dlogits is rounded before the gradients' products. If `rounding`, all operands of products are
    /// rounded to bf16.
    pub(crate) fn new(
        request: &PlanRequest,
        h: usize,
        layout: HeadLayout,
        isa: IsaToken,
        dlogits: Dtype,
        rounding: bool,
    ) -> Self {
        let dtype = request.policy.dtype();
        let is_exact = dtype == Dtype::Bf16 && dlogits == Dtype::Bf16;
        Self {
            gemm: if rounding { Gemm::rounding(isa) } else { Gemm::new(isa, is_exact) },
            n: request.max_tokens,
            h,
            v: request.policy.vocab(),
            layout,
            element: dtype.bytes(),
            rounds: dlogits == Dtype::Bf16,
            hidden_gradient: request.gradients.hidden,
            head_gradient: request.gradients.lm_head,
            keeps_all: !request.loss.is_token_level(),
        }
    }

    /// Returns the number of tiles of the vocabulary.
    pub(crate) fn tiles(&self) -> usize {
        self.v.div_ceil(TILE)
    }

    /// Returns the elements between rows of a tile of logits, with room for its words in any packing.
    pub(crate) fn stride(&self) -> usize {
        stride(self.gemm, self.v.min(TILE).next_multiple_of(32))
    }

    /// Returns the elements per token of a tile's block in the panel: logits, which packed dlogits replace; or only
    /// packed dlogits, if vocabulary panels have their logits in the cached block.
    pub(crate) fn row(&self, order: LoopOrder) -> usize {
        match (order, self.gemm.near_rows()) {
            (LoopOrder::VocabPanels, Some(_)) => self.gemm.words(self.v.min(TILE)),
            _ => self.stride(),
        }
    }

    /// Returns the elements between rows of a chunk's dH.
    pub(crate) fn dh_stride(&self) -> usize {
        stride(self.gemm, self.h)
    }

    /// Returns `true` if a tile of the head is packed as a whole, because a chunk's tokens are multiplied with it in
    /// several steps.
    pub(crate) fn packs_tiles(&self, blocking: &Blocking) -> bool {
        self.gemm.near_rows().is_some_and(|rows| rows < blocking.chunk)
    }

    /// Returns the elements of a tile's block for chunks of `chunk` tokens, rounded up to lhs panels.
    pub(crate) fn block(&self, chunk: usize, order: LoopOrder) -> usize {
        chunk.next_multiple_of(self.gemm.lhs_panel()) * self.row(order)
    }

    /// Returns the number of tokens whose state is kept.
    pub(crate) fn kept(&self, blocking: &Blocking) -> usize {
        if self.keeps_all { self.n } else { blocking.chunk }
    }

    /// Returns the elements of hidden states packed for logits and for the head's gradient, of the panel, and of dH.
    pub(crate) fn buffers(&self, blocking: &Blocking) -> [usize; 4] {
        let (a, c, h) = (self.gemm, blocking.chunk, self.h);
        let for_head = match self.layout {
            _ if !self.head_gradient => 0,
            HeadLayout::VocabHidden => a.rhs_words(h, c),
            HeadLayout::HiddenVocab => a.lhs_words(h, c),
        };
        let panel = self.block(c, blocking.order).saturating_mul(blocking.panel_tiles);
        [a.lhs_words(c, h), for_head, panel, if self.hidden_gradient { c * self.dh_stride() } else { 0 }]
    }

    /// Returns the bytes that the plan allocates, including tasks; saturates on overflow.
    pub(crate) fn workspace(&self, blocking: &Blocking) -> usize {
        let Blocking { chunk, panel_tiles, slots, .. } = *blocking;
        let buffers = self.buffers(blocking).into_iter().fold(0_usize, |sum, elements| sum.saturating_add(elements));
        buffers
            .saturating_add(self.gathered_dlogits(chunk))
            .saturating_mul(4)
            .saturating_add(chunk.saturating_mul(panel_tiles * size_of::<Partial>() + TOKEN_BYTES))
            .saturating_add(self.kept(blocking).saturating_mul(Self::KEPT))
            .saturating_add(slots.saturating_mul(Slot::bytes(self, blocking)))
            .saturating_add(evaluator_bytes(self.n))
    }

    /// The bytes of a token's statistics, logp, entropy, their derivatives, and its index among live tokens.
    const KEPT: usize = TokenState::BYTES + size_of::<usize>();

    /// Estimates the cost of one step.
    fn cost(&self, blocking: &Blocking) -> f64 {
        let (n, h, v) = (self.n as f64, self.h as f64, self.v as f64);
        let chunks = self.n.div_ceil(blocking.chunk) as f64;
        let again = if blocking.order == LoopOrder::VocabPanels { 1.0 } else { 0.0 };
        let (dh, dw) = (f64::from(u8::from(self.hidden_gradient)), f64::from(u8::from(self.head_gradient)));
        let flops = 2.0 * n * h * v * (1.0 + again + dh + dw);
        // Every product except for dW's reads the head; dW is read and written. Panels are written and read twice.
        let head = h * v * (self.element as f64 * (1.0 + again + dh) + 8.0 * dw);
        let panels = if again == 0.0 { 16.0 * n * v } else { 4.0 * n * v };
        flops + self.gemm.flops_per_byte() * (chunks * head + panels)
    }
}

/// Returns the blocking of `request`: its settings, and otherwise the cheapest blocking that fits the budget.
///
/// # Errors
/// [`Error::Budget`] if nothing fits.
pub(crate) fn choose(request: &PlanRequest, problem: &Problem, threads: usize) -> Result<Blocking> {
    let tiling = &request.tiling;
    if request.implementation == Implementation::Logits {
        let (order, slots) = (LoopOrder::TokenChunks, threads.max(1));
        return Ok(Blocking { order, chunk: problem.n, panel_tiles: problem.tiles(), slots });
    }
    let orders = match tiling.loop_order {
        Some(order) => vec![order],
        None => vec![LoopOrder::TokenChunks, LoopOrder::VocabPanels],
    };
    let budget = tiling.workspace_budget;
    let (mut best, mut minimum): (Option<Blocking>, usize) = (None, usize::MAX);
    for order in orders {
        let mut slots = threads.max(1);
        loop {
            let smallest = with_chunk(request, problem, order, slots, tiling.token_chunk.unwrap_or(1), budget);
            minimum = minimum.min(problem.workspace(&smallest));
            if problem.workspace(&smallest) <= budget {
                let found = largest(request, problem, order, slots, budget);
                if best.is_none_or(|best| problem.cost(&found) < problem.cost(&best)) {
                    best = Some(found);
                }
                break;
            }
            if slots == 1 {
                break;
            }
            // Fewer concurrent tasks need less memory.
            slots /= 2;
        }
    }
    best.ok_or_else(|| Error::Budget {
        what: format!("the fused loss of {} tokens, hidden {}, vocabulary {}", problem.n, problem.h, problem.v),
        budget,
        minimum,
    })
}

/// Returns the blocking with the largest chunk that fits.
fn largest(request: &PlanRequest, problem: &Problem, order: LoopOrder, slots: usize, budget: usize) -> Blocking {
    let with = |chunk| with_chunk(request, problem, order, slots, chunk, budget);
    if let Some(chunk) = request.tiling.token_chunk {
        return with(chunk);
    }
    // A chunk of 1 is known to fit, and the workspace grows with the chunk.
    let (mut fits, mut too_large) = (1, problem.n + 1);
    while too_large - fits > 1 {
        let middle = fits + (too_large - fits) / 2;
        if problem.workspace(&with(middle)) <= budget {
            fits = middle;
        } else {
            too_large = middle;
        }
    }
    // Equal chunks waste less of the last chunk, multiples of panels less of each.
    let (even, panel) = (problem.n.div_ceil(problem.n.div_ceil(fits)), problem.gemm.lhs_panel());
    with(if even.next_multiple_of(panel) <= fits { even.next_multiple_of(panel) } else { even })
}

fn with_chunk(
    request: &PlanRequest,
    problem: &Problem,
    order: LoopOrder,
    slots: usize,
    chunk: usize,
    budget: usize,
) -> Blocking {
    let tiles = problem.tiles();
    let with = |panel_tiles| Blocking { order, chunk: chunk.min(problem.n), panel_tiles, slots };
    match (order, request.tiling.vocab_block) {
        (LoopOrder::TokenChunks, _) => with(tiles),
        (LoopOrder::VocabPanels, Some(block)) => with(block.div_ceil(TILE).clamp(1, tiles)),
        (LoopOrder::VocabPanels, None) => {
            // At least one tile per task; up to eight per task, as long as the chunk does not shrink.
            let least = with(slots.min(tiles));
            let free = budget.saturating_sub(problem.workspace(&least));
            let tile = 4 * problem.block(least.chunk, order) + least.chunk * size_of::<Partial>();
            with((least.panel_tiles + free / tile).min(TILES_PER_SLOT * slots).clamp(least.panel_tiles, tiles))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::Isa;
    use grpo_core::{GradientSpec, LossConfig, PolicySpec, Tiling};

    fn request(n: usize, h: usize, v: usize, dtype: Dtype, tiling: Tiling) -> PlanRequest {
        PlanRequest {
            loss: LossConfig::default().into(),
            implementation: Implementation::Fused,
            tiling,
            max_tokens: n,
            policy: PolicySpec::Hidden { hidden: h, vocab: v, dtype, layout: HeadLayout::VocabHidden, bias: false },
            gradients: GradientSpec::default(),
        }
    }

    fn problem(request: &PlanRequest, h: usize) -> Problem {
        let isa = Isa::Portable.checked().unwrap();
        Problem::new(request, h, HeadLayout::VocabHidden, isa, request.policy.dtype(), false)
    }

    #[test]
    fn blockings_fit_the_budget_or_errors_name_a_sufficient_one() {
        for (n, h, v) in
            [(1, 64, 1), (7, 64, 1013), (2048, 2048, 32768), (8192, 4096, 151_936), (200_000, 8192, 262_144)]
        {
            for dtype in [Dtype::F32, Dtype::Bf16] {
                for budget in [1 << 16, 1 << 20, 8 << 20, 32 << 20, 128 << 20, 1 << 30] {
                    for order in [None, Some(LoopOrder::TokenChunks), Some(LoopOrder::VocabPanels)] {
                        for chunk in [None, Some(300)] {
                            let tiling = Tiling {
                                workspace_budget: budget,
                                loop_order: order,
                                token_chunk: chunk,
                                ..Tiling::default()
                            };
                            let request = request(n, h, v, dtype, tiling);
                            let vector_problem = problem(&request, h);
                            let tile_problem =
                                Problem { gemm: Gemm::of_tiles(vector_problem.gemm.isa(), 128), ..vector_problem };
                            fits_or_says_what_would(&request, &vector_problem);
                            fits_or_says_what_would(&request, &tile_problem);
                        }
                    }
                }
            }
        }
    }

    fn fits_or_says_what_would(request: &PlanRequest, problem: &Problem) {
        let budget = request.tiling.workspace_budget;
        match choose(request, problem, 16) {
            Ok(blocking) => assert!(problem.workspace(&blocking) <= budget, "{blocking:?}"),
            Err(Error::Budget { minimum, .. }) => {
                assert!(minimum > budget);
                let mut request = request.clone();
                request.tiling.workspace_budget = minimum;
                assert!(choose(&request, problem, 16).is_ok(), "{request:?} in {minimum}");
            }
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn loop_order_follows_from_the_cost_estimate() {
        let order = |n, h, v, budget| {
            let request = request(n, h, v, Dtype::F32, Tiling { workspace_budget: budget, ..Tiling::default() });
            let blocking = choose(&request, &problem(&request, h), 2).unwrap();
            blocking.order
        };
        assert_eq!(order(2048, 2048, 32_768, 128 << 20), LoopOrder::TokenChunks);
        // With chunks of a few tokens, the head would be read from memory too often.
        assert_eq!(order(1024, 896, 151_936, 16 << 20), LoopOrder::VocabPanels);
    }
}
