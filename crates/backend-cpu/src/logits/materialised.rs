//! The materialised baseline: logits `[N, V]` from hidden states and head, the logits kernel over them, then the two
//! products.
//!
//! Avoids nothing but work on masked rows; it is what the fused head is measured against. The same tiles and products
//! as the fused head, so the same log-probabilities to the bit.
//!
//! Memory: logits `[N, V]` f32 (their gradient overwrites them), gathered hidden states and dH `[N, H]` f32, whatever
//! the workspace budget says.
//!
//! Legend: N tokens (A active), H hidden, V vocabulary, T entries of a tile.

use super::{Access, LogitsKernel};
use crate::gemm::View;
use crate::head::{HIDDEN_BLOCK, Head, HeadGradient, Slot, drain, gather, slot_bytes};
use crate::host::{Grads, Policy};
use crate::plan::{Kernel, evaluator_bytes, inputs_bytes, outputs_bytes};
use crate::softmax::TILE;
use grpo_core::batch::TokenBatch;
use grpo_core::error::Result;
use grpo_core::{Dtype, HeadLayout, LossOutput, MemoryReport, PlanRequest, Scores};

/// Rows of logits that a task makes: few enough to spread, enough to pay for packing a tile of the head.
const ROW_BLOCK: usize = 128;

/// Logits made and kept, then handled as if they had been given.
pub(crate) struct MaterialisedPlan {
    request: PlanRequest,
    kernel: LogitsKernel,
    h: usize,
    layout: HeadLayout,
    /// `[N, H]`.
    x: Vec<f32>,
    /// `[N, V]`.
    logits: Vec<f32>,
    /// Blocks `[A, <= HIDDEN_BLOCK]`.
    dh: Vec<f32>,
    /// 0, 1, ...: active tokens lie without gaps.
    places: Vec<usize>,
    slots: Vec<Slot>,
}

impl MaterialisedPlan {
    pub(crate) fn new(request: &PlanRequest, h: usize, layout: HeadLayout, threads: usize) -> Self {
        let (n, v) = (request.max_tokens, request.policy.vocab());
        let bf16 = request.policy.dtype() == Dtype::Bf16;
        Self {
            request: request.clone(),
            kernel: LogitsKernel::new(request),
            h,
            layout,
            x: vec![0.0; n * h],
            logits: vec![0.0; n * v],
            dh: vec![0.0; if request.gradients.hidden { n * h } else { 0 }],
            places: (0..n).collect(),
            slots: (0..threads).map(|_| Slot::new(h, v, bf16)).collect(),
        }
    }

    /// Fills `logits` with those of the active tokens.
    fn materialise<'a>(&mut self, policy: Policy<'a>, batch: &TokenBatch) -> Head<'a> {
        let Policy::Hidden { hidden, lm_head, bias } = policy else {
            unreachable!("the wrapper has checked the policy against the plan")
        };
        let (h, v) = (self.h, self.kernel.v);
        let head = Head { weight: lm_head, bias, layout: self.layout, h, v };
        let a = batch.active_tokens();
        gather(hidden, batch.active_rows(), h, &mut self.x);
        let blocks = self.logits[..a * v].chunks_mut(ROW_BLOCK * v).zip(self.x[..a * h].chunks(ROW_BLOCK * h));
        drain(&mut self.slots, blocks, |slot, (out, x)| {
            let rows = x.len() / h;
            for index in 0..v.div_ceil(TILE) {
                let tile = head.tile(index);
                head.logits(index, View::new(x, rows, h, h), &mut out[tile.start..], v, slot);
            }
        });
        head
    }

    fn products(&mut self, head: &Head<'_>, batch: &TokenBatch, grads: Grads<'_>) {
        let (h, v, a) = (self.h, self.kernel.v, batch.active_tokens());
        if a == 0 {
            return;
        }
        let (tiles, x) = (0..v.div_ceil(TILE), View::new(&self.x, a, h, h));
        let dlogits = &self.logits[..a * v];
        if let Some(bias) = grads.bias {
            drain(&mut self.slots, bias.chunks_mut(TILE).enumerate(), |_, (index, bias)| {
                for row in dlogits.chunks(v) {
                    bias.iter_mut().zip(&row[index * TILE..]).for_each(|(b, z)| *b += z);
                }
            });
        }
        if let Some(grad) = grads.lm_head {
            // A tile of row-major logits is a block that starts T entries after the last one.
            let (layout, tiles) = (self.layout, tiles.clone());
            HeadGradient { layout, h, v, tiles, panel: dlogits, block: TILE, stride: v, x }
                .add_to(grad, &mut self.slots);
        }
        if let Some(grad) = grads.hidden {
            let blocks = self.dh[..a * h].chunks_mut(a * HIDDEN_BLOCK).enumerate();
            drain(&mut self.slots, blocks, |slot, (i, out)| {
                let units = i * HIDDEN_BLOCK..h.min((i + 1) * HIDDEN_BLOCK);
                for index in tiles.clone() {
                    let tile = head.tile(index);
                    let dlogits = View::new(&dlogits[tile.start..], a, tile.len(), v);
                    head.hidden_gradient(index, units.clone(), dlogits, out, index > 0, slot);
                }
            });
            for (i, out) in self.dh[..a * h].chunks(a * HIDDEN_BLOCK).enumerate() {
                let width = out.len() / a;
                for (from, row) in out.chunks(width).zip(batch.active_rows()) {
                    let to = &mut grad[row * h + i * HIDDEN_BLOCK..][..width];
                    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
                }
            }
        }
    }
}

impl Kernel for MaterialisedPlan {
    fn score(&mut self, policy: Policy<'_>, batch: &TokenBatch) -> Result<Scores> {
        self.materialise(policy, batch);
        let mut scores = crate::tokens::empty_scores(batch);
        let chunk = self.kernel.chunk;
        for (rows, places) in batch.active_rows().chunks(chunk).zip(self.places.chunks(chunk)) {
            self.kernel.statistics(&self.logits, rows, &places[..rows.len()], batch, 0);
            self.kernel.state.publish(0..rows.len(), rows, &mut scores);
        }
        Ok(scores)
    }

    fn value_and_grad(&mut self, policy: Policy<'_>, batch: &TokenBatch, grads: Grads<'_>) -> Result<LossOutput> {
        let head = self.materialise(policy, batch);
        let a = batch.active_tokens();
        let mut access = Access::InPlace(&mut self.logits[..a * self.kernel.v]);
        let out = self.kernel.value_and_grad(&mut access, &self.places[..a], batch)?;
        self.products(&head, batch, grads);
        Ok(out)
    }

    fn memory(&self) -> MemoryReport {
        let bf16 = matches!(self.request.policy.dtype(), Dtype::Bf16);
        let floats = self.x.len() + self.logits.len() + self.dh.len();
        let slot = slot_bytes(self.request.max_tokens, self.h, self.kernel.v, bf16, self.layout);
        let workspace = 4 * floats
            + self.places.len() * size_of::<usize>()
            + self.slots.len() * slot
            + self.kernel.workspace()
            + evaluator_bytes(self.request.max_tokens);
        MemoryReport { inputs: inputs_bytes(&self.request), outputs: outputs_bytes(&self.request), workspace }
    }
}
