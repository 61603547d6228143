//! The input and output of the oracle.

use grpo_core::backend_api::real::Scalar;
use grpo_core::batch::TokenBatch;
use grpo_core::error::{Error, Result};
use grpo_core::{HeadLayout, Metrics, PolicyOutput};

/// A policy's output in the precision `R`, row-major, with the shape that the slices do not determine.
#[derive(Clone, Copy, Debug)]
pub struct Policy<'a, R> {
    /// Logits `[N, V]`, or hidden states `[N, H]`, head and bias `[V]`.
    pub output: PolicyOutput<&'a [R]>,
    /// The size of the vocabulary, V.
    pub vocab: usize,
    /// The layout of the head; unused for logits.
    pub layout: HeadLayout,
}

/// Loss, per-token values and all gradients. Entries of masked tokens are 0; gradients of inputs that the policy does
/// not have are empty.
#[derive(Clone, Debug, Default)]
pub struct Evaluation<R> {
    /// The sum over tokens of weight x token loss.
    pub loss: f64,
    /// The part of the loss that comes from the policy term.
    pub policy_loss: f64,
    /// The sum of |weight x token loss|, the scale of the loss's rounding error.
    pub magnitude: f64,
    /// Log-probabilities `[N]`, in nats.
    pub logp: Vec<R>,
    /// Entropies `[N]`, in nats.
    pub entropy: Vec<R>,
    /// dL/dlogits `[N, V]`, also for hidden states.
    pub grad_logits: Vec<R>,
    /// dL/dhidden `[N, H]`.
    pub grad_hidden: Vec<R>,
    /// dL/dlm_head, of the shape of the head.
    pub grad_lm_head: Vec<R>,
    /// dL/dbias `[V]`; empty without a bias.
    pub grad_bias: Vec<R>,
    /// TRL's metrics.
    pub metrics: Metrics,
}

impl<'a, R> Policy<'a, R> {
    /// Makes a policy of logits `[N, V]` with V = `vocab`.
    pub fn logits(logits: &'a [R], vocab: usize) -> Self {
        Self { output: PolicyOutput::Logits(logits), vocab, layout: HeadLayout::default() }
    }

    /// Makes a policy of hidden states `[N, H]`, a head of that layout, and its bias `[V]`, with V = `vocab`.
    pub fn hidden(hidden: &'a [R], lm_head: &'a [R], bias: Option<&'a [R]>, layout: HeadLayout, vocab: usize) -> Self {
        Self { output: PolicyOutput::Hidden { hidden, lm_head, bias }, vocab, layout }
    }

    /// Checks lengths and targets.
    pub(super) fn check(&self, batch: &TokenBatch) -> Result<()> {
        const OP: &str = "dense loss";
        let n = batch.tokens();
        let vocab = self.vocab;
        let (what, found, width) = match self.output {
            PolicyOutput::Logits(logits) => ("logits [N, V]", logits.len(), vocab),
            PolicyOutput::Hidden { hidden, lm_head, bias } => {
                let h = lm_head.len() / vocab.max(1);
                if lm_head.is_empty() || lm_head.len() != h * vocab {
                    return Err(Error::shape(
                        OP,
                        "lm_head elements",
                        format!("a multiple of V {vocab}"),
                        lm_head.len(),
                    ));
                }
                if let Some(bias) = bias.filter(|b| b.len() != vocab) {
                    return Err(Error::shape(OP, "bias [V]", vocab, bias.len()));
                }
                ("hidden [N, H]", hidden.len(), h)
            }
        };
        if vocab == 0 || n.checked_mul(width.max(vocab)).is_none() || found != n * width {
            return Err(Error::shape(OP, what, format!("{n} x {width}"), found));
        }
        batch.validate_targets(vocab)
    }
}

/// Returns the index of the weight between hidden unit k and vocabulary entry j.
pub(super) fn head_index(layout: HeadLayout, j: usize, k: usize, v: usize, h: usize) -> usize {
    match layout {
        HeadLayout::VocabHidden => j * h + k,
        HeadLayout::HiddenVocab => k * v + j,
    }
}

/// Returns zeros `[N, V]`. A small file can describe a batch whose logits do not fit into memory: that must be an
/// error, not an abort.
pub(super) fn dense<R: Scalar>(n: usize, v: usize) -> Result<Vec<R>> {
    let mut values = Vec::new();
    values.try_reserve_exact(n * v).map_err(|_| Error::Backend {
        backend: crate::error::NAME.into(),
        message: format!("no memory for dense logits [{n}, {v}], {} bytes", (n * v).saturating_mul(size_of::<R>())),
    })?;
    values.resize(n * v, R::from_f64(0.0));
    Ok(values)
}
