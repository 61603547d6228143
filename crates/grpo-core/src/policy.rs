//! The output of a policy, which is the input of the loss.
//!
//! Legend: N tokens (rows), H hidden size, V vocabulary.

use crate::tensor::{Dtype, Tensor, TensorRef};
use serde::{Deserialize, Serialize};

/// Memory layout of the LM head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeadLayout {
    /// `[V, H]`: Hugging Face, tied embeddings.
    #[default]
    VocabHidden,
    /// `[H, V]`: burn's `Linear`.
    HiddenVocab,
}

/// Shapes and dtypes of a policy's output, for a plan. Its variants mirror [`PolicyOutput`](crate::PolicyOutput), but it needs no tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicySpec {
    /// Logits `[N, V]`.
    Logits {
        /// The size of the vocabulary, V.
        vocab: usize,
        /// Dtype of the logits.
        dtype: Dtype,
    },
    /// Hidden states `[N, H]`, LM head `[V, H]` or `[H, V]`, optional bias `[V]`.
    Hidden {
        /// Hidden size, H.
        hidden: usize,
        /// The size of the vocabulary, V.
        vocab: usize,
        /// Dtype of hidden states, head and bias. A head without a gradient may be bf16 if this
        /// is f32.
        dtype: Dtype,
        /// Layout of the head.
        layout: HeadLayout,
        /// `true` if the head has a bias.
        bias: bool,
    },
}

impl PolicySpec {
    /// Returns the size of the vocabulary, V.
    pub fn vocab(&self) -> usize {
        match *self {
            Self::Logits { vocab, .. } | Self::Hidden { vocab, .. } => vocab,
        }
    }

    /// Returns the dtype of the policy's output.
    pub fn dtype(&self) -> Dtype {
        match *self {
            Self::Logits { dtype, .. } | Self::Hidden { dtype, .. } => dtype,
        }
    }
}

/// The output of a policy in tensors of type `T`: logits, or hidden states and the LM head that turns them into logits.
/// Backends get views ([`PolicyInput`]), batch files own their tensors (`PolicyOutput<Tensor>`), the
/// float64 oracle reads slices.
///
/// ```
/// use grpo_core::{PolicyInput, PolicyOutput, Tensor};
///
/// let (hidden, lm_head) = (vec![0.1_f32; 4 * 8], vec![0.02_f32; 32 * 8]); // [N, H] and [V, H]
/// let views = PolicyInput::head(&hidden, &lm_head);
/// assert_eq!(views.tensors().map(|(name, _)| name).collect::<Vec<_>>(), ["hidden", "lm_head"]);
///
/// let logits = PolicyOutput::Logits(Tensor::F32(vec![0.0; 4 * 32])); // [N, V]
/// assert_eq!(logits.map(|tensor| tensor.len()), PolicyOutput::Logits(128));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyOutput<T> {
    /// Logits `[N, V]`.
    Logits(T),
    /// Hidden states and LM head.
    Hidden {
        /// Hidden states `[N, H]`.
        hidden: T,
        /// The head: `[V, H]` or `[H, V]`, according to its [`HeadLayout`].
        lm_head: T,
        /// The bias of the head `[V]`.
        bias: Option<T>,
    },
}

/// The policy's output in one call: host slices, or tensors on the backend's device.
pub type PolicyInput<'a> = PolicyOutput<TensorRef<'a>>;

impl<T> PolicyOutput<T> {
    /// Returns the output with references to its tensors.
    pub fn as_ref(&self) -> PolicyOutput<&T> {
        match self {
            Self::Logits(logits) => PolicyOutput::Logits(logits),
            Self::Hidden { hidden, lm_head, bias } => PolicyOutput::Hidden { hidden, lm_head, bias: bias.as_ref() },
        }
    }

    /// Applies `f` to each tensor.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> PolicyOutput<U> {
        match self {
            Self::Logits(logits) => PolicyOutput::Logits(f(logits)),
            Self::Hidden { hidden, lm_head, bias } => {
                PolicyOutput::Hidden { hidden: f(hidden), lm_head: f(lm_head), bias: bias.map(f) }
            }
        }
    }

    /// Applies `f` to each tensor, until it fails.
    ///
    /// # Errors
    /// The first error of `f`.
    pub fn try_map<U, E>(self, mut f: impl FnMut(T) -> Result<U, E>) -> Result<PolicyOutput<U>, E> {
        Ok(match self {
            Self::Logits(logits) => PolicyOutput::Logits(f(logits)?),
            Self::Hidden { hidden, lm_head, bias } => {
                PolicyOutput::Hidden { hidden: f(hidden)?, lm_head: f(lm_head)?, bias: bias.map(f).transpose()? }
            }
        })
    }

    /// Iterates over the tensors with their names: `logits`, or `hidden`, `lm_head` and, if present, `bias`.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, &T)> {
        let tensors = match self {
            Self::Logits(logits) => [Some(("logits", logits)), None, None],
            Self::Hidden { hidden, lm_head, bias } => {
                [Some(("hidden", hidden)), Some(("lm_head", lm_head)), bias.as_ref().map(|bias| ("bias", bias))]
            }
        };
        tensors.into_iter().flatten()
    }

    /// Returns `true` if there is a head with a bias.
    pub fn has_bias(&self) -> bool {
        matches!(self, Self::Hidden { bias: Some(_), .. })
    }
}

impl<'a> PolicyOutput<TensorRef<'a>> {
    /// Creates an output of hidden states `[N, H]` and an LM head without a bias.
    pub fn head(hidden: impl Into<TensorRef<'a>>, lm_head: impl Into<TensorRef<'a>>) -> Self {
        Self::Hidden { hidden: hidden.into(), lm_head: lm_head.into(), bias: None }
    }

    /// Creates an output of hidden states `[N, H]` and an LM head with a bias `[V]`.
    pub fn head_with_bias(
        hidden: impl Into<TensorRef<'a>>,
        lm_head: impl Into<TensorRef<'a>>,
        bias: impl Into<TensorRef<'a>>,
    ) -> Self {
        Self::Hidden { hidden: hidden.into(), lm_head: lm_head.into(), bias: Some(bias.into()) }
    }
}

impl PolicyOutput<Tensor> {
    /// Returns the output as the argument of a loss call.
    pub fn as_input(&self) -> PolicyInput<'_> {
        self.as_ref().map(Tensor::as_ref)
    }

    /// Returns shapes and dtypes for a plan, with a head `[V, H]`. `hidden` is H, ignored for logits; `vocab` is V.
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

    /// Converts the output to another dtype.
    pub fn to_dtype(&self, dtype: Dtype) -> Self {
        self.as_ref().map(|tensor| tensor.to_dtype(dtype))
    }
}
