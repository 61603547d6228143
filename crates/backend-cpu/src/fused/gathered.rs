//! The head for tokens with a sampling mask of few ids: products with single rows of the head instead of vocabulary tiles.
//!
//! The log-probabilities of a token with a sampling mask are a softmax over its K kept ids. If K is small
//! ([`Problem::max_gathered_ids`]), the logits of the other V - K ids are not computed. Such a token is called gathered:
//!
//! ```text
//! statistics, in parallel over tokens:
//!     z[k] = x . W[id_k] + b[id_k]              for each kept id; then the sums of the softmax over z
//! gradients, for groups of tokens whose dlogits fit the buffer:
//!     in parallel over tokens:
//!         recompute z;  d[k] = dL/dz[k];  dx += sum over k of d[k] W[id_k]
//!     in parallel over blocks of hidden units:
//!         for each token of the group, in order:  dW[id_k] += d[k] x      for each kept id
//! ```
//!
//! Nothing is packed: a row of the head is read once for logits and once for dx, so packing would only add a copy. With
//! [`HeadLayout::HiddenVocab`], W[id] is a column.
//!
//! Sums run over k, and over tokens in the order of the batch. Results depend neither on the number of threads nor on the groups. The head's gradient of a
//! batch that also has tokens with tile products depends on the chunks, as it does without gathered tokens.
//!
//! Legend: K kept ids of a token, H hidden, V vocabulary, x hidden states `[H]` of a token, W and b weight and bias of the head.

use super::head::LmHead;
use super::slot::{Slot, for_each_with_slot, unit_block};
use super::tiling::Problem;
use super::token::{Token, within};
use crate::arch::{MulAdd, simd_dispatch};
use crate::convert::{Element, rounded};
use crate::gemm::{Cut, MatMut};
use crate::host::{Grads, Slice};
use crate::profile::{Work, timed};
use crate::softmax::{Partial, RowSums, TILE, Transform, gradient_to};
use grpo_core::{HeadLayout, TokenBatch};
use std::mem::take;
use std::ops::Range;

/// The number of gathered tokens with the maximum number of ids whose dlogits fit the buffer.
const GROUP: usize = 8;
/// The maximum number of ids of a gathered token in any vocabulary: its logits stay in a core's cache.
const MAX_IDS: usize = 8192;

impl Problem {
    /// Returns the largest number of kept ids for which a token is gathered. At this number, gathered products and tile products have the same
    /// estimated time for logits and both gradients: tile products compute all V ids, and gathered products read and write the rows of the
    /// head for one token, where tile products share them between many tokens.
    ///
    /// The number depends on the kernel, the vocabulary and the layout only, so the bits of a token's log-probabilities depend neither on the
    /// batch nor on the requested gradients.
    pub(super) fn max_gathered_ids(&self) -> usize {
        // Flops per id and hidden unit: two for the logit, two for dx, two for dW.
        const FLOPS: f64 = 6.0;
        let element = match self.layout {
            HeadLayout::VocabHidden => size_of::<f32>(),
            // The cache line of the element: neighbours in memory belong to other ids.
            HeadLayout::HiddenVocab => 64,
        };
        // The weight is read for the logit and for dx, and dW is read and written.
        let bytes = (4 * element) as f64;
        MAX_IDS.min((FLOPS * self.v as f64 / (FLOPS + self.gemm.flops_per_byte() * bytes)) as usize)
    }

    /// Returns the length of the buffer for dlogits of gathered tokens, for chunks of `chunk` tokens.
    pub(super) fn gathered_dlogits(&self, chunk: usize) -> usize {
        self.max_gathered_ids() * chunk.min(GROUP)
    }

    /// Returns `true` if the token at `row` of the batch is gathered.
    pub(super) fn is_gathered(&self, batch: &TokenBatch, row: usize) -> bool {
        batch.kept(row).is_some_and(|ids| ids.len() <= self.max_gathered_ids())
    }
}

/// The inputs of a call, for its gathered tokens.
#[derive(Clone, Copy)]
pub(super) struct Gathered<'a> {
    pub(super) hidden: Slice<'a>,
    pub(super) head: &'a LmHead<'a>,
    pub(super) batch: &'a TokenBatch,
    pub(super) transform: Option<Transform>,
    /// `true` if dlogits are rounded to bf16 before their products.
    pub(super) rounds_dlogits: bool,
}

impl<'a> Gathered<'a> {
    /// Computes the sums of the softmax of each of `tokens`.
    pub(super) fn statistics(&self, tokens: &[Token], sums: &mut [RowSums], slots: &mut [Slot]) {
        let isa = self.head.gemm.isa();
        for_each_with_slot(slots, tokens.iter().zip(sums), |slot, (token, sums)| {
            let (z, target) = self.kept_logits(token, slot);
            timed(Work::Statistics, || {
                *sums = RowSums::EMPTY;
                for (i, z) in z.chunks(TILE).enumerate() {
                    let target = within(target, &(i * TILE..i * TILE + z.len()));
                    let partial = Partial::new(isa, z, target, token.scales.logit);
                    sums.merge(&partial, target.is_some(), token.scales.logit);
                }
            });
        });
    }

    /// Adds the gradients of `tokens`, in ascending order of rows, to `grads`. `dlogits` is a buffer of [`Problem::gathered_dlogits`], which holds
    /// the dlogits of a group of tokens, concatenated.
    pub(super) fn gradients(
        &self,
        mut tokens: &[Token],
        dlogits: &mut [f32],
        grads: &mut Grads<'_>,
        slots: &mut [Slot],
    ) {
        while !tokens.is_empty() {
            let ends = tokens.iter().scan(0, |end, token| {
                *end += self.ids(token).len();
                Some(*end)
            });
            // At least one: the buffer has room for the maximum number of ids.
            let count = ends.take_while(|end| *end <= dlogits.len()).count();
            let (group, later) = tokens.split_at(count);
            self.compute_dlogits(group, dlogits, grads.hidden.as_deref_mut(), slots);
            if let Some(bias) = &mut grads.bias {
                // A sum, not a product, so it uses unrounded dlogits.
                for (token, dlogits) in self.with_dlogits(group, dlogits) {
                    self.ids(token).iter().zip(dlogits).for_each(|(id, d)| bias[*id as usize] += d);
                }
            }
            if let Some(grad) = &mut grads.lm_head {
                self.add_head_gradient(group, dlogits, grad, slots);
            }
            tokens = later;
        }
    }

    /// Writes the dlogits of `tokens` to `dlogits`, and adds dx of each token to its row of `dhidden` `[N, H]`, if it is requested.
    fn compute_dlogits(&self, tokens: &[Token], dlogits: &mut [f32], dhidden: Option<&mut [f32]>, slots: &mut [Slot]) {
        let (isa, h) = (self.head.gemm.isa(), self.head.h);
        let mut rest = dlogits;
        let with_dlogits = tokens.iter().map(|token| {
            let (dlogits, later) = take(&mut rest).split_at_mut(self.ids(token).len());
            rest = later;
            (token, dlogits)
        });
        let mut rows = dhidden.map(|dhidden| dhidden.chunks_mut(h).enumerate());
        let items = with_dlogits.map(move |(token, dlogits)| {
            let row = rows.as_mut().and_then(|rows| rows.find(|(row, _)| *row == token.row));
            (token, dlogits, row.map(|(_, row)| row))
        });
        for_each_with_slot(slots, items, |slot, (token, dlogits, dx)| {
            let (z, target) = self.kept_logits(token, slot);
            timed(Work::Gradients, || {
                let (target, scale) = (Some(target), token.scales.logit);
                match &self.transform {
                    None => gradient_to(isa, z, target, &token.row_grad, scale, dlogits, false),
                    Some(transform) => transform.gradient_to(isa, z, target, &token.row_grad, scale, dlogits, false),
                }
            });
            if let Some(dx) = dx {
                timed(Work::Products, || {
                    let sums = &mut slot.gathered_hidden[..];
                    self.weighted_rows(token, dlogits, sums);
                    dx.iter_mut().zip(sums).for_each(|(dx, sum)| *dx += *sum);
                });
            }
        });
    }

    /// Adds the products of dlogits and hidden states of `tokens` to the head's gradient `grad`.
    fn add_head_gradient(&self, tokens: &[Token], dlogits: &[f32], grad: &mut [f32], slots: &mut [Slot]) {
        let LmHead { gemm, layout, h, v, .. } = *self.head;
        let units = unit_block(h, slots.len());
        let (shape, cut) = match layout {
            HeadLayout::VocabHidden => ([v, h], Cut::Columns),
            HeadLayout::HiddenVocab => ([h, v], Cut::Rows),
        };
        let blocks = MatMut::split(grad, shape, cut, units, 0..h.div_ceil(units));
        for_each_with_slot(slots, blocks.enumerate(), |slot, (i, mut out)| {
            let units = i * units..h.min((i + 1) * units);
            timed(Work::Products, || {
                for (token, dlogits) in self.with_dlogits(tokens, dlogits) {
                    let x = &mut slot.gathered_hidden[..units.len()];
                    self.copy_hidden(token, units.clone(), x);
                    let entries = self.ids(token).iter().zip(dlogits).map(|(id, d)| (*id as usize, self.factor(*d)));
                    match layout {
                        HeadLayout::VocabHidden => {
                            entries.for_each(|(id, d)| add_scaled(gemm.isa(), d, x, false, out.row(id)));
                        }
                        HeadLayout::HiddenVocab => {
                            for (unit, x) in x.iter().enumerate() {
                                let out = out.row(unit);
                                entries.clone().for_each(|(id, d)| out[id] += d * *x);
                            }
                        }
                    }
                }
            });
        });
    }

    /// Returns the kept ids of a token.
    fn ids(&self, token: &Token) -> &'a [u32] {
        self.batch.kept(token.row).unwrap_or_default()
    }

    /// Returns each of `tokens` with its dlogits, which are concatenated in `dlogits`.
    fn with_dlogits<'b>(
        &self,
        tokens: &'b [Token],
        dlogits: &'b [f32],
    ) -> impl Iterator<Item = (&'b Token, &'b [f32])> {
        let mut rest = dlogits;
        tokens.iter().map(move |token| {
            let (dlogits, later) = rest.split_at(self.ids(token).len());
            rest = later;
            (token, dlogits)
        })
    }

    /// Returns a dlogit as an operand of a product, rounded to bf16 if the plan says so.
    fn factor(&self, dlogit: f32) -> f32 {
        if self.rounds_dlogits { rounded(dlogit) } else { dlogit }
    }

    /// Copies the `units` of a token's hidden states to `out`, as operands of products.
    fn copy_hidden(&self, token: &Token, units: Range<usize>, out: &mut [f32]) {
        let (hidden, start, rounds) = (self.hidden, token.row * self.head.h, self.head.gemm.rounds());
        let units = start + units.start..start + units.end;
        match hidden {
            Slice::F32(hidden) => copy_operands(&hidden[units], rounds, out),
            Slice::Bf16(hidden) => copy_operands(&hidden[units], rounds, out),
        }
    }

    /// Returns the logits of a token's kept ids after [`Transform`], and the index of its target among them.
    fn kept_logits<'b>(&self, token: &Token, slot: &'b mut Slot) -> (&'b [f32], usize) {
        let LmHead { gemm, weight, bias, h, .. } = *self.head;
        let (ids, x) = (self.ids(token), &mut slot.gathered_hidden[..]);
        let z = &mut slot.kept_logits[..ids.len()];
        timed(Work::Products, || {
            self.copy_hidden(token, 0..h, x);
            match weight {
                Slice::F32(weight) => self.products_of(weight, ids, x, z),
                Slice::Bf16(weight) => self.products_of(weight, ids, x, z),
            }
        });
        match bias {
            Some(Slice::F32(bias)) => z.iter_mut().zip(ids).for_each(|(z, id)| *z += bias[*id as usize]),
            Some(Slice::Bf16(bias)) => z.iter_mut().zip(ids).for_each(|(z, id)| *z += bias[*id as usize].widened()),
            None => {}
        }
        if let Some(transform) = &self.transform {
            transform.apply(gemm.isa(), z);
        }
        // The batch has checked that the target is among the ids, which ascend.
        let target = ids.partition_point(|id| (*id as usize) < token.target);
        (&*z, target)
    }

    /// Computes `out[k]` = x . W[id_k].
    fn products_of<E: Element>(&self, weight: &[E], ids: &[u32], x: &[f32], out: &mut [f32]) {
        let LmHead { gemm, layout, h, v, .. } = *self.head;
        let entries = out.iter_mut().zip(ids.iter().map(|id| *id as usize));
        match layout {
            HeadLayout::VocabHidden => {
                entries.for_each(|(out, id)| *out = dot(gemm.isa(), &weight[id * h..][..h], x, gemm.rounds()));
            }
            HeadLayout::HiddenVocab => {
                out.fill(0.0);
                for (weight, x) in weight.chunks(v).zip(x) {
                    for (out, id) in out.iter_mut().zip(ids) {
                        *out += operand(weight[*id as usize], gemm.rounds()) * *x;
                    }
                }
            }
        }
    }

    /// Computes `out` = the sum over k of dlogits[k] W[id_k].
    fn weighted_rows(&self, token: &Token, dlogits: &[f32], out: &mut [f32]) {
        let weight = self.head.weight;
        match weight {
            Slice::F32(weight) => self.weighted_rows_of(weight, self.ids(token), dlogits, out),
            Slice::Bf16(weight) => self.weighted_rows_of(weight, self.ids(token), dlogits, out),
        }
    }

    /// Like [`Gathered::weighted_rows`], for a weight of this element type.
    fn weighted_rows_of<E: Element>(&self, weight: &[E], ids: &[u32], dlogits: &[f32], out: &mut [f32]) {
        let LmHead { gemm, layout, h, v, .. } = *self.head;
        let entries = ids.iter().zip(dlogits).map(|(id, d)| (*id as usize, self.factor(*d)));
        match layout {
            HeadLayout::VocabHidden => {
                out.fill(0.0);
                entries.for_each(|(id, d)| add_scaled(gemm.isa(), d, &weight[id * h..][..h], gemm.rounds(), out));
            }
            HeadLayout::HiddenVocab => {
                for (weight, out) in weight.chunks(v).zip(out) {
                    *out = entries.clone().map(|(id, d)| d * operand(weight[id], gemm.rounds())).sum();
                }
            }
        }
    }
}

/// Returns an element as an operand of a product, rounded to bf16 if `rounds`.
#[inline(always)]
fn operand(value: impl Element, rounds: bool) -> f32 {
    if rounds { rounded(value.widened()) } else { value.widened() }
}

/// Copies elements as operands of products.
fn copy_operands<E: Element>(from: &[E], rounds: bool, to: &mut [f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = operand(*from, rounds));
}

simd_dispatch! {
    /// Returns the dot product of a row of the head and hidden states.
    fn dot[E: Element](row: &[E], x: &[f32], rounds: bool) -> f32 = dot_body
}

simd_dispatch! {
    /// Adds `factor` times `row` to `out`.
    fn add_scaled[E: Element](factor: f32, row: &[E], rounds: bool, out: &mut [f32]) = add_scaled_body
}

#[inline(always)]
fn dot_body<M: MulAdd>(row: &[impl Element], x: &[f32], rounds: bool) -> f32 {
    /// Four chains of additions in AVX-512 registers.
    const LANES: usize = 64;
    let ((rows, row_rest), (xs, x_rest)) = (row.as_chunks::<LANES>(), x.as_chunks::<LANES>());
    let mut sums = [0.0_f32; LANES];
    for (row, x) in rows.iter().zip(xs) {
        for lane in 0..LANES {
            sums[lane] = M::mul_add(operand(row[lane], rounds), x[lane], sums[lane]);
        }
    }
    for (sum, (row, x)) in sums.iter_mut().zip(row_rest.iter().zip(x_rest)) {
        *sum = M::mul_add(operand(*row, rounds), *x, *sum);
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
    }
    sums[0]
}

#[inline(always)]
fn add_scaled_body<M: MulAdd>(factor: f32, row: &[impl Element], rounds: bool, out: &mut [f32]) {
    out.iter_mut().zip(row).for_each(|(out, row)| *out = M::mul_add(factor, operand(*row, rounds), *out));
}
