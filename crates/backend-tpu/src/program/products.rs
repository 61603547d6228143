//! The three products of the LM head.
//!
//! Legend: R rows, W columns: tokens and vocabulary entries of a tile.

use super::spec::{Spec, dtype};
use grpo_core::HeadLayout;
use grpo_stablehlo::{DotDimensions, Dtype, Precision, Sharding, Value};

/// The shardings of the operands of logits, in a program over a mesh. If both operands were sharded along H, every
/// tile's logits would need an all-reduce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadSplit {
    /// The sharding of hidden states `[R, H]`, in all products for logits.
    pub rows: Sharding,
    /// The sharding of the LM head's weight, in all products for logits.
    pub weight: Sharding,
}

/// The head of a tile: weight `[W, H]` or `[H, W]`, and bias `[W]`. The weight has the dtype of hidden states, or f32,
/// which products round.
#[derive(Debug)]
pub struct Head {
    /// The weight.
    pub weight: Value,
    /// The bias, if there is one.
    pub bias: Option<Value>,
    /// The layout of the weight.
    pub layout: HeadLayout,
    /// The shardings of the operands of logits over a mesh.
    pub split: Option<HeadSplit>,
}

impl Head {
    /// Returns the dimension of H in the weight.
    fn hidden_dimension(&self) -> usize {
        match self.layout {
            HeadLayout::VocabHidden => 1,
            HeadLayout::HiddenVocab => 0,
        }
    }

    /// Returns the dimension of W in the weight.
    pub(crate) fn vocab_dimension(&self) -> usize {
        1 - self.hidden_dimension()
    }

    /// Returns the number of shards of W in the weight.
    pub(crate) fn vocab_shards(&self) -> usize {
        self.split.as_ref().map_or(1, |split| split.weight.parts(self.vocab_dimension()))
    }

    /// Returns the head for an iteration of a loop with products of `rows`. If products round the weight, a barrier
    /// ties it to `rows`, which change in every iteration; otherwise the compiler would round the whole weight before
    /// the loop and keep the copy.
    pub(crate) fn beside(&self, rows: &Value) -> Self {
        let weight = match self.weight.dtype() == rows.dtype() {
            true => self.weight.clone(),
            false => rows.builder().optimization_barrier(&[&self.weight, rows]).swap_remove(0),
        };
        self.with(weight, self.bias.clone())
    }

    /// Returns the head of other columns, which are sharded like all columns.
    pub(crate) fn with(&self, weight: Value, bias: Option<Value>) -> Self {
        let weight = self.split.as_ref().map_or(weight.clone(), |split| weight.constrain(&split.weight));
        Self { weight, bias, layout: self.layout, split: self.split.clone() }
    }

    /// Computes logits `[R, W]` of `hidden [R, H]`, in the dtype of stored logits.
    pub fn logits(&self, spec: &Spec, hidden: &Value) -> Value {
        let held = dtype(spec.numerics.logits);
        let dimensions = DotDimensions::contract(1, self.hidden_dimension());
        let rows = self.split.as_ref().map(|split| hidden.constrain(&split.rows));
        let hidden = rows.as_ref().unwrap_or(hidden);
        let weight = self.weight.convert(hidden.dtype());
        match &self.bias {
            // Rounded once, after the accumulation.
            None => product(hidden, &weight, dimensions, held),
            Some(bias) => {
                let z = product(hidden, &weight, dimensions, Dtype::F32);
                (&z + bias.convert(Dtype::F32).broadcast_in_dim(z.shape(), &[1])).convert(held)
            }
        }
    }

    /// Computes dL/dhidden `[R, H]`, f32.
    pub fn hidden_gradient(&self, dlogits: &Value) -> Value {
        let weight = self.weight.convert(dlogits.dtype());
        product(dlogits, &weight, DotDimensions::contract(1, self.vocab_dimension()), Dtype::F32)
    }

    /// Computes dL/dlm_head, of the shape of the tile's weight, f32.
    pub fn weight_gradient(&self, dlogits: &Value, hidden: &Value) -> Value {
        let hidden = hidden.convert(dlogits.dtype());
        let over_rows = DotDimensions::contract(0, 0);
        match self.layout {
            HeadLayout::VocabHidden => product(dlogits, &hidden, over_rows, Dtype::F32),
            HeadLayout::HiddenVocab => product(&hidden, dlogits, over_rows, Dtype::F32),
        }
    }
}

/// A product with f32 accumulation. f32 operands are not rounded to a narrower dtype, as accelerators do by default.
fn product(a: &Value, b: &Value, dimensions: DotDimensions, result: Dtype) -> Value {
    let precision = if a.dtype() == Dtype::F32 { Precision::Highest } else { Precision::Default };
    a.dot_general(b, dimensions, result, precision)
}
