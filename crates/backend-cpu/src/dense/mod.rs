//! The implementation `reference`: the oracle's evaluation in f32.
//!
//! Widens inputs to f32, evaluates, and adds the gradients to the caller's accumulators.

use crate::host::{Slice, SliceMut, Tensors};
use crate::oracle::{Policy, gradient, score};
use crate::plan::evaluator_bytes;
use grpo_core::backend_api::evaluate::Evaluator;
use grpo_core::backend_api::plan::Head;
use grpo_core::backend_api::token_columns::LossSums;
use grpo_core::batch::TokenBatch;
use grpo_core::error::{Error, Result};
use grpo_core::{Dtype, HeadLayout, PlanRequest, PolicyOutput, PolicySpec, Scores};
use half::bf16;
use std::borrow::Cow;

/// The dense implementation. It allocates in every call: it is a reference for tests, not optimised.
pub(crate) struct DenseHead {
    request: PlanRequest,
}

impl DenseHead {
    pub(crate) fn new(request: &PlanRequest) -> Self {
        Self { request: request.clone() }
    }

    /// Calls `f` with the policy, widened to f32.
    fn with_policy<T>(&self, policy: PolicyOutput<Slice<'_>>, f: impl FnOnce(&Policy<'_, f32>) -> T) -> T {
        let layout = match self.request.policy {
            PolicySpec::Hidden { layout, .. } => layout,
            PolicySpec::Logits { .. } => HeadLayout::default(),
        };
        let widened = policy.map(widen);
        f(&Policy { output: widened.as_ref().map(|values| &**values), vocab: self.request.policy.vocab(), layout })
    }
}

impl Head for DenseHead {
    type Tensors<'a> = Tensors<'a>;
    type Scores = Scores;
    type Error = Error;

    fn score(&mut self, tensors: &Tensors<'_>, batch: &TokenBatch) -> Result<Scores> {
        let out = self.with_policy(tensors.policy(), |policy| score(&self.request.loss, policy, batch))?;
        Ok(Scores { logp: out.logp, entropy: out.entropy })
    }

    fn gradient(&mut self, tensors: Tensors<'_>, loss: &Evaluator<'_>) -> Result<(LossSums<f64>, Scores)> {
        let (sums, out) = self.with_policy(tensors.policy(), |policy| gradient::<f32>(policy, loss))?;
        match tensors {
            Tensors::InPlace(SliceMut::F32(logits)) => logits.copy_from_slice(&out.grad_logits),
            Tensors::InPlace(SliceMut::Bf16(logits)) => {
                logits.iter_mut().zip(&out.grad_logits).for_each(|(to, from)| *to = bf16::from_f32(*from));
            }
            Tensors::Separate(_, grads) => {
                let batch = loss.batch();
                for (buffer, made) in [(grads.logits, &out.grad_logits), (grads.hidden, &out.grad_hidden)] {
                    let Some(buffer) = buffer else { continue };
                    let width = buffer.len() / batch.tokens().max(1);
                    for &i in batch.active_rows() {
                        add(&mut buffer[i * width..(i + 1) * width], &made[i * width..(i + 1) * width]);
                    }
                }
                for (buffer, made) in [(grads.lm_head, &out.grad_lm_head), (grads.bias, &out.grad_bias)] {
                    buffer.into_iter().for_each(|buffer| add(buffer, made));
                }
            }
        }
        Ok((sums, Scores { logp: out.logp, entropy: out.entropy }))
    }
}

/// Returns the bytes that a call allocates: inputs widened to f32, logits and their gradient, gradients of hidden
/// states and head, and per token 32 bytes of statistics and 32 of derivatives. Saturates on overflow.
pub(crate) fn workspace(request: &PlanRequest) -> usize {
    let n = request.max_tokens;
    let widened = if request.policy.dtype() == Dtype::Bf16 { request.inputs_bytes().saturating_mul(2) } else { 0 };
    let grads = match request.policy {
        PolicySpec::Logits { .. } => 0,
        PolicySpec::Hidden { hidden, vocab, bias, .. } => n
            .saturating_mul(hidden)
            .saturating_add(vocab.saturating_mul(hidden))
            .saturating_add(if bias { vocab } else { 0 })
            .saturating_mul(4),
    };
    let dense = n.saturating_mul(request.policy.vocab()).saturating_mul(4).saturating_add(n.saturating_mul(64));
    [dense, grads, evaluator_bytes(n)].into_iter().fold(widened, usize::saturating_add)
}

fn add(to: &mut [f32], from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += from;
    }
}

fn widen(tensor: Slice<'_>) -> Cow<'_, [f32]> {
    match tensor {
        Slice::F32(t) => Cow::Borrowed(t),
        Slice::Bf16(t) => Cow::Owned(t.iter().map(|x| x.to_f32()).collect()),
    }
}
