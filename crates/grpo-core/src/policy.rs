//! What a policy hands over to the loss.
//!
//! Legend: N tokens (rows), H hidden size, V vocabulary.

use crate::tensor::{Dtype, Tensor, TensorRef};
use serde::{Deserialize, Serialize};

/// How the LM head lies in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeadLayout {
    /// `[V, H]`: Hugging Face, tied embeddings.
    #[default]
    VocabHidden,
    /// `[H, V]`: burn's `Linear`.
    HiddenVocab,
}

/// Shapes and dtypes of what the policy hands over, for a plan: known before there is a tensor, which is why it is a type
/// beside [`PolicyOutput`](crate::PolicyOutput), whose variants it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicySpec {
    /// Logits `[N, V]`.
    Logits {
        /// The size of the vocabulary, V.
        vocab: usize,
        /// Of the logits.
        dtype: Dtype,
    },
    /// Hidden states `[N, H]`, LM head `[V, H]` or `[H, V]`, optional bias `[V]`.
    Hidden {
        /// H.
        hidden: usize,
        /// The size of the vocabulary, V.
        vocab: usize,
        /// Of hidden states, head and bias alike. A head that a call makes no gradient for may be bf16 where this
        /// is f32.
        dtype: Dtype,
        /// Of the head.
        layout: HeadLayout,
        /// Whether the head has a bias.
        bias: bool,
    },
}

impl PolicySpec {
    /// The size of the vocabulary, V.
    pub fn vocab(&self) -> usize {
        match *self {
            Self::Logits { vocab, .. } | Self::Hidden { vocab, .. } => vocab,
        }
    }

    /// Dtype of what the policy hands over.
    pub fn dtype(&self) -> Dtype {
        match *self {
            Self::Logits { dtype, .. } | Self::Hidden { dtype, .. } => dtype,
        }
    }
}

/// The output of a policy, with tensors of the kind `T`: logits, or hidden states and the LM head that makes logits of
/// them. Views cross the seam to a backend ([`PolicyInput`]), batch files own their tensors (`PolicyOutput<Tensor>`), the
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
        /// The head: `[V, H]` or `[H, V]`, as its [`HeadLayout`] says.
        lm_head: T,
        /// The bias of the head `[V]`.
        bias: Option<T>,
    },
}

/// What the policy hands over in one call: host slices, or tensors that already live on the backend's device.
pub type PolicyInput<'a> = PolicyOutput<TensorRef<'a>>;

impl<T> PolicyOutput<T> {
    /// The same output with references to its tensors.
    pub fn as_ref(&self) -> PolicyOutput<&T> {
        match self {
            Self::Logits(logits) => PolicyOutput::Logits(logits),
            Self::Hidden { hidden, lm_head, bias } => PolicyOutput::Hidden { hidden, lm_head, bias: bias.as_ref() },
        }
    }

    /// The same output with `f` of each tensor.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> PolicyOutput<U> {
        match self {
            Self::Logits(logits) => PolicyOutput::Logits(f(logits)),
            Self::Hidden { hidden, lm_head, bias } => {
                PolicyOutput::Hidden { hidden: f(hidden), lm_head: f(lm_head), bias: bias.map(f) }
            }
        }
    }

    /// The same output with `f` of each tensor, unless one of them fails.
    ///
    /// # Errors
    /// The first one of `f`.
    pub fn try_map<U, E>(self, mut f: impl FnMut(T) -> Result<U, E>) -> Result<PolicyOutput<U>, E> {
        Ok(match self {
            Self::Logits(logits) => PolicyOutput::Logits(f(logits)?),
            Self::Hidden { hidden, lm_head, bias } => {
                PolicyOutput::Hidden { hidden: f(hidden)?, lm_head: f(lm_head)?, bias: bias.map(f).transpose()? }
            }
        })
    }

    /// The tensors with their names: `logits`, or `hidden`, `lm_head` and, where there is one, `bias`.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, &T)> {
        let tensors = match self {
            Self::Logits(logits) => [Some(("logits", logits)), None, None],
            Self::Hidden { hidden, lm_head, bias } => {
                [Some(("hidden", hidden)), Some(("lm_head", lm_head)), bias.as_ref().map(|bias| ("bias", bias))]
            }
        };
        tensors.into_iter().flatten()
    }

    /// Whether there is a head with a bias.
    pub fn has_bias(&self) -> bool {
        matches!(self, Self::Hidden { bias: Some(_), .. })
    }
}

impl<'a> PolicyOutput<TensorRef<'a>> {
    /// Hidden states `[N, H]` and an LM head without a bias.
    pub fn head(hidden: impl Into<TensorRef<'a>>, lm_head: impl Into<TensorRef<'a>>) -> Self {
        Self::Hidden { hidden: hidden.into(), lm_head: lm_head.into(), bias: None }
    }

    /// Hidden states `[N, H]` and an LM head with a bias `[V]`.
    pub fn head_with_bias(
        hidden: impl Into<TensorRef<'a>>,
        lm_head: impl Into<TensorRef<'a>>,
        bias: impl Into<TensorRef<'a>>,
    ) -> Self {
        Self::Hidden { hidden: hidden.into(), lm_head: lm_head.into(), bias: Some(bias.into()) }
    }
}

impl PolicyOutput<Tensor> {
    /// The output as a call of the loss takes it.
    pub fn as_input(&self) -> PolicyInput<'_> {
        self.as_ref().map(Tensor::as_ref)
    }

    /// Shapes and dtypes, for a plan, of a head `[V, H]`. `hidden` is H and of no meaning for logits, `vocab` is V.
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

    /// The same output in another dtype.
    pub fn to_dtype(&self, dtype: Dtype) -> Self {
        self.as_ref().map(|tensor| tensor.to_dtype(dtype))
    }
}
