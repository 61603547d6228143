//! The batch file `grpo-batch/1`: one safetensors file with all inputs of one loss evaluation and, optionally, its expected
//! results. Any trainer that can write safetensors can store its batch and have its loss checked.
//!
//! Legend: B sequences, T tokens each (padded), N tokens in all, H hidden size, V vocabulary. A packed file has the tensor `offsets`, and
//! `[N]` in the place of `[B, T]`.
//!
//! | tensor | dtype | shape |
//! |---|---|---|
//! | `hidden` and `lm_head`, or `logits` | F32, BF16 | `[B, T, H]` and `[V, H]`, or `[B, T, V]` |
//! | `bias` (optional) | as `hidden` | `[V]` |
//! | `targets` | I64, I32, U32 | `[B, T]` |
//! | `offsets` (packed only: the bounds of the sequences, from 0 to N) | I64, I32 | `[B + 1]` |
//! | `mask` (packed: optional) | F32, BOOL, U8, I32, I64 | `[B, T]` |
//! | `advantages` | F32, F64 (rounded) | `[B]`, `[B, 1]` or `[B, T]` |
//! | `old_logp` (optional; without it the ratio is 1), `ref_logp` (if beta is not 0) | F32, F64 (rounded) | `[B, T]` |
//! | `sampler_logp` (optional, for the sampler correction; NaN if unknown: ratio 1) | F32, F64 (rounded) | `[B, T]` |
//! | `temperatures` (optional; replaces the configuration's `temperature`) | F32 | `[B]`, `[B, 1]` or `[B, T]` |
//! | `sampling_mask.ids`, `sampling_mask.offsets` (optional; the ids that the sampler kept at each token, [`SamplingMask`](crate::batch::SamplingMask)) | I64, I32 | `[M]`, `[N + 1]` |
//! | `expected.{loss,logp,entropy,grad_hidden,grad_lm_head,grad_bias,grad_logits}` (optional) | F64, F32 | shape of the tensor or result |
//!
//! `__metadata__`: `format` = `grpo-batch/1`, `loss` = the loss configuration and the data of the step as JSON
//! ([`BatchLoss`]), optional `name` and `source`.

mod batch_loss;
mod metadata;
mod read;
mod write;

use crate::batch::TokenBatch;
use crate::config::LossConfig;
use crate::error::Result;
use crate::parity::Values;
use crate::policy::PolicyOutput;
use crate::policy::PolicySpec;
use crate::tensor::Tensor;
pub use batch_loss::BatchLoss;
pub use metadata::with_metadata;

/// Name and version of the format.
pub const FORMAT: &str = "grpo-batch/1";

/// A parsed and checked batch file.
///
/// ```
/// use grpo_core::parity::Values;
/// use grpo_core::{BatchFile, LossConfig, PolicyOutput, Tensor, TokenBatch};
///
/// let (b, t, h, v) = (2, 2, 4, 8); // sequences, tokens of each, hidden size, vocabulary
/// let (hidden, lm_head) = (Tensor::F32(vec![0.1; b * t * h]), Tensor::F32(vec![0.02; v * h]));
/// let file = BatchFile {
///     name: "two completions".into(),
///     source: String::new(),
///     loss: LossConfig::default(),
///     hidden: h,
///     vocab: v,
///     policy: PolicyOutput::Hidden { hidden, lm_head, bias: None },
///     batch: TokenBatch::padded(&[3, 7, 1, 0], &[1.0, 1.0, 1.0, 0.0], [b, t])?.with_advantages(vec![1.0, -0.5])?,
///     expected: Values::default(),
/// };
/// let bytes = file.to_bytes()?; // what `grpo parity` reads
/// assert_eq!(BatchFile::parse(&bytes)?.policy, file.policy);
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct BatchFile {
    /// Name of the case; empty if the file has none.
    pub name: String,
    /// Origin of the values; empty if the file does not name one.
    pub source: String,
    /// The loss configuration.
    pub loss: LossConfig,
    /// H (0 if the file has logits).
    pub hidden: usize,
    /// The size of the vocabulary, V.
    pub vocab: usize,
    /// The policy's output: logits `[N, V]`, or hidden states `[N, H]` with a head `[V, H]` and its bias `[V]`.
    pub policy: PolicyOutput<Tensor>,
    /// Targets, mask, advantages, recorded log-probabilities, and data of the step.
    pub batch: TokenBatch,
    /// Expected results, as far as the file has them.
    pub expected: Values,
}

impl BatchFile {
    /// Returns the loss and the data of the step, as in the file's metadata.
    pub fn batch_loss(&self) -> BatchLoss {
        BatchLoss { loss: self.loss.clone(), step: self.batch.step().clone() }
    }

    /// Replaces the loss and the data of the step.
    ///
    /// # Errors
    /// The errors of [`TokenBatch::with_step`].
    pub fn with_loss(self, loss: BatchLoss) -> Result<Self> {
        Ok(Self { loss: loss.loss, batch: self.batch.with_step(loss.step)?, ..self })
    }

    /// Returns the shape of the tokens in the file: `[B, T]` if all sequences have T tokens, else `[N]`, which is packed.
    pub fn token_shape(&self) -> Vec<usize> {
        let lengths = |sequence| self.batch.range(sequence).len();
        let width = if self.batch.sequences() == 0 { 0 } else { lengths(0) };
        match (1..self.batch.sequences()).all(|sequence| lengths(sequence) == width) {
            true => vec![self.batch.sequences(), width],
            false => vec![self.batch.tokens()],
        }
    }

    /// Returns the policy's shapes and dtypes, for a plan.
    pub fn policy_spec(&self) -> PolicySpec {
        self.policy.spec(self.hidden, self.vocab)
    }
}

/// Returns names and shapes of the optional results other than the scalar loss, for tokens of this shape.
fn expected_shapes(tokens: &[usize], h: usize, v: usize) -> [(&'static str, Vec<usize>); 6] {
    [
        ("expected.logp", tokens.to_vec()),
        ("expected.entropy", tokens.to_vec()),
        ("expected.grad_hidden", with_columns(tokens, h)),
        ("expected.grad_lm_head", vec![v, h]),
        ("expected.grad_bias", vec![v]),
        ("expected.grad_logits", with_columns(tokens, v)),
    ]
}

/// Returns the shape of a tensor with `columns` numbers per token.
fn with_columns(tokens: &[usize], columns: usize) -> Vec<usize> {
    [tokens, &[columns]].concat()
}
