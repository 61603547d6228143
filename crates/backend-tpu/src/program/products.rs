//! The three products of the LM head.
//!
//! Legend: R rows, W columns: tokens and vocabulary entries of a tile.

use super::spec::{Spec, dtype};
use grpo_core::HeadLayout;
use stablehlo::{DotDimensions, Dtype, Precision, Sharding, Value};

/// How the operands of logits are split over a mesh, where a program is. Columns H that are split in both would make of every tile's logits
/// sums of what all devices have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadSplit {
    /// Hidden states `[R, H]`, wherever logits are made of some of them.
    pub rows: Sharding,
    /// The weight of the LM head, wherever logits of the whole vocabulary are made with it.
    pub weight: Sharding,
}

/// The head of a tile: `[W, H]` or `[H, W]`, and `[W]`. The weight is of the number type of hidden states, or f32, which products round.
pub(crate) struct Head {
    pub(crate) weight: Value,
    pub(crate) bias: Option<Value>,
    pub(crate) layout: HeadLayout,
    /// How operands of logits are split over a mesh.
    pub(crate) split: Option<HeadSplit>,
}

impl Head {
    /// Dimension of H in the weight.
    fn hidden_dimension(&self) -> usize {
        match self.layout {
            HeadLayout::VocabHidden => 1,
            HeadLayout::HiddenVocab => 0,
        }
    }

    /// Dimension of W in the weight.
    pub(crate) fn vocab_dimension(&self) -> usize {
        1 - self.hidden_dimension()
    }

    /// The head in a turn of a loop that makes products of `rows`. One that products round is rounded there: held beside what changes from
    /// turn to turn, it is not rounded before the loop, and no copy of it lies beside it.
    pub(crate) fn beside(&self, rows: &Value) -> Self {
        let weight = match self.weight.dtype() == rows.dtype() {
            true => self.weight.clone(),
            false => rows.builder().optimization_barrier(&[&self.weight, rows]).swap_remove(0),
        };
        let weight = self.split.as_ref().map_or(weight.clone(), |split| weight.constrain(&split.weight));
        Self { weight, bias: self.bias.clone(), layout: self.layout, split: self.split.clone() }
    }

    /// Columns `start` to before `start + width` (an i32 scalar), of a head of the whole vocabulary.
    pub(crate) fn panel(&self, start: &Value, width: usize) -> Self {
        let mut sizes = self.weight.shape().to_vec();
        sizes[self.vocab_dimension()] = width;
        Self {
            weight: self.weight.dynamic_slice(&self.at(start).each_ref(), &sizes),
            bias: self.bias.as_ref().map(|b| b.dynamic_slice(&[start], &[width])),
            layout: self.layout,
            split: self.split.clone(),
        }
    }

    /// Indices of the column `start` in the weight.
    pub(crate) fn at(&self, start: &Value) -> [Value; 2] {
        match self.layout {
            HeadLayout::VocabHidden => [start.clone(), start.like(0)],
            HeadLayout::HiddenVocab => [start.like(0), start.clone()],
        }
    }

    /// Logits `[R, W]` of `hidden [R, H]`, in the dtype in which they are held.
    pub(crate) fn logits(&self, spec: &Spec, hidden: &Value) -> Value {
        let held = dtype(spec.numerics.logits);
        let dimensions = DotDimensions::contract(1, self.hidden_dimension());
        let rows = self.split.as_ref().map(|split| hidden.constrain(&split.rows));
        let hidden = rows.as_ref().unwrap_or(hidden);
        let weight = self.weight.convert(hidden.dtype());
        match &self.bias {
            // Rounded once, after the sum.
            None => product(hidden, &weight, dimensions, held),
            Some(bias) => {
                let z = product(hidden, &weight, dimensions, Dtype::F32);
                (&z + bias.convert(Dtype::F32).broadcast_in_dim(z.shape(), &[1])).convert(held)
            }
        }
    }

    /// dL/dhidden `[R, H]`, f32.
    pub(crate) fn hidden_gradient(&self, dlogits: &Value) -> Value {
        let weight = self.weight.convert(dlogits.dtype());
        product(dlogits, &weight, DotDimensions::contract(1, self.vocab_dimension()), Dtype::F32)
    }

    /// dL/dlm_head, shaped as the tile's weight, f32.
    pub(crate) fn weight_gradient(&self, dlogits: &Value, hidden: &Value) -> Value {
        let hidden = hidden.convert(dlogits.dtype());
        let over_rows = DotDimensions::contract(0, 0);
        match self.layout {
            HeadLayout::VocabHidden => product(dlogits, &hidden, over_rows, Dtype::F32),
            HeadLayout::HiddenVocab => product(&hidden, dlogits, over_rows, Dtype::F32),
        }
    }
}

/// A product that sums in f32. Operands in f32 are not rounded to anything narrower, as accelerators do by default.
fn product(a: &Value, b: &Value, dimensions: DotDimensions, result: Dtype) -> Value {
    let precision = if a.dtype() == Dtype::F32 { Precision::Highest } else { Precision::Default };
    a.dot_general(b, dimensions, result, precision)
}
