//! The policy's output as a file holds it.

use crate::backend::{HeadLayout, PolicyInput, PolicySpec};
use crate::tensor::{Dtype, TensorRef};
use half::bf16;

/// A tensor that owns its values.
#[derive(Clone, Debug, PartialEq)]
pub enum Tensor {
    /// f32.
    F32(Vec<f32>),
    /// bf16.
    Bf16(Vec<bf16>),
}

impl Tensor {
    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.as_ref().dtype()
    }

    /// As a view.
    pub fn as_ref(&self) -> TensorRef<'_> {
        match self {
            Self::F32(v) => TensorRef::F32(v),
            Self::Bf16(v) => TensorRef::Bf16(v),
        }
    }

    /// The values in another dtype: widened exactly, or rounded to nearest even.
    pub fn to_dtype(&self, dtype: Dtype) -> Self {
        match (self, dtype) {
            (Self::F32(v), Dtype::Bf16) => Self::Bf16(v.iter().map(|x| bf16::from_f32(*x)).collect()),
            (Self::Bf16(v), Dtype::F32) => Self::F32(v.iter().map(|x| x.to_f32()).collect()),
            (same, _) => same.clone(),
        }
    }
}

/// The policy's output.
#[derive(Clone, Debug, PartialEq)]
pub enum Policy {
    /// Logits `[B, T, V]`.
    Logits(Tensor),
    /// Hidden states `[B, T, H]`, head `[V, H]`, bias `[V]`.
    Hidden {
        /// `[B, T, H]`.
        hidden: Tensor,
        /// `[V, H]`.
        lm_head: Tensor,
        /// `[V]`.
        bias: Option<Tensor>,
    },
}

impl Policy {
    /// As the input of a loss call.
    pub fn as_input(&self) -> PolicyInput<'_> {
        match self {
            Self::Logits(logits) => PolicyInput::Logits(logits.as_ref()),
            Self::Hidden { hidden, lm_head, bias } => PolicyInput::Hidden {
                hidden: hidden.as_ref(),
                lm_head: lm_head.as_ref(),
                bias: bias.as_ref().map(Tensor::as_ref),
            },
        }
    }

    /// Shapes and dtypes, for a plan. `hidden` and `vocab` are those of the file that holds the policy.
    pub fn spec(&self, hidden: usize, vocab: usize) -> PolicySpec {
        match self {
            Self::Logits(logits) => PolicySpec::Logits { vocab, dtype: logits.dtype() },
            Self::Hidden { hidden: states, bias, .. } => PolicySpec::Hidden {
                hidden,
                vocab,
                dtype: states.dtype(),
                layout: HeadLayout::VocabHidden,
                bias: bias.is_some(),
            },
        }
    }

    /// The same in another dtype.
    pub fn to_dtype(&self, dtype: Dtype) -> Self {
        match self {
            Self::Logits(logits) => Self::Logits(logits.to_dtype(dtype)),
            Self::Hidden { hidden, lm_head, bias } => Self::Hidden {
                hidden: hidden.to_dtype(dtype),
                lm_head: lm_head.to_dtype(dtype),
                bias: bias.as_ref().map(|b| b.to_dtype(dtype)),
            },
        }
    }
}
