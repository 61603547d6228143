//! Gradients: their selection and their buffers.
//!
//! Legend: N tokens (rows), H hidden size, V vocabulary.

use crate::error::{Error, Result};
use crate::policy::PolicySpec;
use crate::tensor::TensorMut;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// Selection of the gradients that a plan computes. A frozen head saves one of three matrix products.
///
/// For logits, `hidden` selects the gradient of the logits, and the other fields are ignored.
#[derive(Clone, Copy, Debug, SmartDefault, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GradientSpec {
    /// Gradient with respect to the hidden states.
    #[default(true)]
    pub hidden: bool,
    /// Gradient with respect to the LM head.
    #[default(true)]
    pub lm_head: bool,
    /// Gradient with respect to the bias.
    pub bias: bool,
}

impl GradientSpec {
    /// Selects the gradient of every tensor of `policy`.
    pub fn all(policy: PolicySpec) -> Self {
        match policy {
            PolicySpec::Logits { .. } => Self { hidden: true, lm_head: false, bias: false },
            PolicySpec::Hidden { bias, .. } => Self { hidden: true, lm_head: true, bias },
        }
    }
}

/// Gradients with respect to the policy's output, in tensors of type `T`; `None` if there is no such gradient. Buffers of the
/// caller are [`GradsMut`], gradients that own their values are `Grads<Vec<f32>>`.
#[derive(Clone, Debug, PartialEq)]
pub struct Grads<T> {
    /// dL/dhidden `[N, H]`; 0 at masked tokens.
    pub hidden: Option<T>,
    /// dL/dlm_head, shaped as the head.
    pub lm_head: Option<T>,
    /// dL/dbias `[V]`.
    pub bias: Option<T>,
    /// dL/dlogits `[N, V]`, if the policy's output is logits.
    pub logits: Option<T>,
}

/// Buffers to which gradients are added, so that micro-batches accumulate. Rows of masked tokens do not change. Host buffers are f32 for
/// inputs of any dtype; device buffers have the dtype in which the plan accumulates.
///
/// ```
/// use grpo_core::{Grads, GradsMut};
///
/// let (mut dhidden, mut dlm_head, mut dbias) = (vec![0.0; 4 * 8], vec![0.0; 32 * 8], vec![0.0; 32]);
/// let grads: GradsMut<'_> = Grads::new(&mut dhidden, &mut dlm_head).with_bias(&mut dbias);
/// assert!(grads.bias.is_some());
/// let frozen_head = Grads::of_hidden(&mut dhidden);
/// assert!(frozen_head.lm_head.is_none());
/// ```
pub type GradsMut<'a> = Grads<TensorMut<'a>>;

// `derive(Default)` would require `T: Default`.
impl<T> Default for Grads<T> {
    fn default() -> Self {
        Self { hidden: None, lm_head: None, bias: None, logits: None }
    }
}

impl<T> Grads<T> {
    /// Applies `f` to each gradient.
    ///
    /// # Errors
    /// The first error of `f`.
    pub fn try_map<U, E>(self, mut f: impl FnMut(T) -> std::result::Result<U, E>) -> std::result::Result<Grads<U>, E> {
        let Self { hidden, lm_head, bias, logits } = self;
        let mut each = |gradient: Option<T>| gradient.map(&mut f).transpose();
        Ok(Grads { hidden: each(hidden)?, lm_head: each(lm_head)?, bias: each(bias)?, logits: each(logits)? })
    }
}

impl<'a> Grads<TensorMut<'a>> {
    /// Creates buffers for the gradients of hidden states `[N, H]` and of the head, shaped as the head.
    pub fn new(hidden: impl Into<TensorMut<'a>>, lm_head: impl Into<TensorMut<'a>>) -> Self {
        Self { lm_head: Some(lm_head.into()), ..Self::of_hidden(hidden) }
    }

    /// Creates a buffer for the gradient of hidden states `[N, H]`, for a frozen head.
    pub fn of_hidden(hidden: impl Into<TensorMut<'a>>) -> Self {
        Self { hidden: Some(hidden.into()), ..Self::default() }
    }

    /// Creates a buffer for the gradient of logits `[N, V]`.
    pub fn of_logits(logits: impl Into<TensorMut<'a>>) -> Self {
        Self { logits: Some(logits.into()), ..Self::default() }
    }

    /// Adds a buffer for the gradient of the bias `[V]`.
    #[must_use]
    pub fn with_bias(mut self, bias: impl Into<TensorMut<'a>>) -> Self {
        self.bias = Some(bias.into());
        self
    }
}

impl Grads<Vec<f32>> {
    /// Creates zeros for the selected gradients of `tokens` tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] if the number of elements of a gradient overflows.
    pub fn zeros(policy: PolicySpec, wanted: GradientSpec, tokens: usize) -> Result<Self> {
        let zeros = |wanted: bool, name: &str, rows: usize, columns: usize| {
            let elements = rows.checked_mul(columns).ok_or_else(|| {
                let expected = "a number of elements that fits usize";
                Error::shape("gradients", name, expected, format!("{rows} x {columns}"))
            })?;
            Ok(wanted.then(|| vec![0.0; elements]))
        };
        Ok(match policy {
            PolicySpec::Logits { vocab, .. } => {
                Self { logits: zeros(wanted.hidden, "logits [N, V]", tokens, vocab)?, ..Self::default() }
            }
            PolicySpec::Hidden { hidden, vocab, .. } => Self {
                hidden: zeros(wanted.hidden, "hidden [N, H]", tokens, hidden)?,
                lm_head: zeros(wanted.lm_head, "lm_head [V, H]", vocab, hidden)?,
                bias: zeros(wanted.bias, "bias [V]", vocab, 1)?,
                logits: None,
            },
        })
    }

    /// Returns buffers that add to these gradients.
    pub fn as_mut(&mut self) -> GradsMut<'_> {
        fn each(gradient: &mut Option<Vec<f32>>) -> Option<TensorMut<'_>> {
            gradient.as_mut().map(TensorMut::from)
        }
        Grads {
            hidden: each(&mut self.hidden),
            lm_head: each(&mut self.lm_head),
            bias: each(&mut self.bias),
            logits: each(&mut self.logits),
        }
    }
}
