//! Checks of a [`PlanRequest`] before a backend plans for it, and of every call.

use crate::backend::{Implementation, PlanRequest};
use crate::batch::TokenBatch;
use crate::error::{Error, Result};
use crate::gradients::GradsMut;
use crate::memory_report::MemoryReport;
use crate::policy::PolicyInput;
use crate::policy::PolicySpec;
use crate::tensor::Dtype;

impl PlanRequest {
    /// Checks the fields that do not depend on the backend.
    ///
    /// # Errors
    /// [`Error::Config`] or [`Error::Shape`] that names the field.
    pub fn validate(&self) -> Result<()> {
        const OP: &str = "plan";
        self.loss.validate()?;
        if self.max_tokens == 0 {
            return Err(Error::shape(OP, "max_tokens", "at least 1", 0));
        }
        if self.policy.vocab() == 0 {
            return Err(Error::shape(OP, "vocab", "at least 1", 0));
        }
        for (name, block) in [("token_chunk", self.tiling.token_chunk), ("vocab_block", self.tiling.vocab_block)] {
            if block == Some(0) {
                return Err(Error::shape(OP, name, "at least 1", 0));
            }
        }
        let product = |a: usize, b: usize| {
            a.checked_mul(b)
                .and_then(|n| n.checked_mul(8))
                .ok_or_else(|| Error::shape(OP, "tensor size", "bytes that fit usize", format!("{a} x {b} elements")))
        };
        match self.policy {
            PolicySpec::Logits { vocab, .. } => {
                product(self.max_tokens, vocab)?;
            }
            PolicySpec::Hidden { hidden, vocab, bias, .. } => {
                if hidden == 0 {
                    return Err(Error::shape(OP, "hidden", "at least 1", 0));
                }
                product(self.max_tokens, hidden)?;
                product(vocab, hidden)?;
                if self.implementation != Implementation::Fused {
                    product(self.max_tokens, vocab)?;
                }
                if self.gradients.bias && !bias {
                    return Err(Error::Config("a bias gradient was requested, but the head has no bias".into()));
                }
            }
        }
        Ok(())
    }

    /// Returns the bytes of the policy's output at `max_tokens`: logits, or hidden states, head and bias.
    pub fn inputs_bytes(&self) -> usize {
        let n = self.max_tokens;
        let elements = match self.policy {
            PolicySpec::Logits { vocab, .. } => n.saturating_mul(vocab),
            PolicySpec::Hidden { hidden, vocab, bias, .. } => {
                let bias = if bias { vocab } else { 0 };
                n.saturating_mul(hidden).saturating_add(vocab.saturating_mul(hidden)).saturating_add(bias)
            }
        };
        elements.saturating_mul(self.policy.dtype().bytes())
    }

    /// Returns the bytes of the planned gradients (f32) and of logp and entropy at `max_tokens`. Gradients of logits are counted as a
    /// separate buffer; gradients in place need none.
    pub fn outputs_bytes(&self) -> usize {
        let (n, wanted) = (self.max_tokens, self.gradients);
        let elements = |wanted: bool, rows: usize, width: usize| if wanted { rows.saturating_mul(width) } else { 0 };
        let gradients = match self.policy {
            PolicySpec::Logits { vocab, .. } => elements(wanted.hidden, n, vocab),
            PolicySpec::Hidden { hidden, vocab, .. } => elements(wanted.hidden, n, hidden)
                .saturating_add(elements(wanted.lm_head, vocab, hidden))
                .saturating_add(elements(wanted.bias, vocab, 1)),
        };
        gradients.saturating_mul(4).saturating_add(n.saturating_mul(8))
    }

    /// Checks the memory of a call against [`crate::Tiling::memory_limit`], or against `available` bytes if no limit is set. Backends
    /// call it before they allocate.
    ///
    /// # Errors
    /// [`Error::Memory`] with the sizes.
    pub fn check_memory(&self, memory: &MemoryReport, available: Option<usize>) -> Result<()> {
        let (limit, is_of_machine) = match self.tiling.memory_limit {
            Some(limit) => (Some(limit), false),
            None => (available, true),
        };
        let least = match self.policy {
            // Without an explicit limit, count logits only once: their gradient may overwrite them.
            PolicySpec::Logits { .. } if is_of_machine => memory.inputs.saturating_add(memory.workspace),
            _ => memory.total(),
        };
        let shape = match self.policy {
            PolicySpec::Logits { vocab, .. } => format!("logits [{}, {vocab}]", self.max_tokens),
            PolicySpec::Hidden { hidden, vocab, .. } => {
                format!("hidden states [{}, {hidden}] and a head of {vocab} x {hidden}", self.max_tokens)
            }
        };
        match limit.filter(|limit| least > *limit) {
            None => Ok(()),
            Some(limit) => Err(Error::Memory {
                what: format!("`{}` on {shape} in {}", self.implementation.name(), self.policy.dtype().name()),
                memory: *memory,
                limit,
                is_of_machine,
            }),
        }
    }

    /// Checks a call against the plan: token count, lengths and dtypes of host tensors, presence of gradient buffers,
    /// and that every active target is in the vocabulary. `grads` is `None` for scores, and for logits that are
    /// overwritten.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Value`] or [`Error::Config`] that names the tensor.
    pub fn check_call(&self, policy: &PolicyInput<'_>, batch: &TokenBatch, grads: Option<&GradsMut<'_>>) -> Result<()> {
        const OP: &str = "loss call";
        let n = batch.tokens();
        if n > self.max_tokens {
            return Err(Error::shape(OP, "tokens N", format!("at most the planned {}", self.max_tokens), n));
        }
        let tensor = |name: &str, found: (Option<usize>, Dtype), elements: usize, dtype: Dtype| {
            if found.1 != dtype {
                return Err(Error::shape(OP, format!("dtype of {name}"), dtype.name(), found.1.name()));
            }
            match found.0 {
                Some(len) if len != elements => Err(Error::shape(OP, format!("{name} elements"), elements, len)),
                _ => Ok(()),
            }
        };
        let dtype = self.policy.dtype();
        // Expected gradient buffers: (name, planned, elements, given buffer).
        let buffers = |g: &GradsMut<'_>, sizes: [(bool, usize); 4]| {
            let given =
                [&g.hidden, &g.lm_head, &g.bias, &g.logits].map(|t| t.as_ref().map(|t| (t.host_len(), t.dtype())));
            for ((name, (planned, elements)), given) in
                ["hidden", "lm_head", "bias", "logits"].iter().zip(sizes).zip(given)
            {
                match given {
                    None if planned => {
                        return Err(Error::Config(format!(
                            "the plan makes a gradient for {name}, but no buffer was given for it"
                        )));
                    }
                    Some(_) if !planned => {
                        return Err(Error::Config(format!(
                            "a buffer was given for the gradient of {name}, which the plan does not make"
                        )));
                    }
                    // The backend checks device buffers, which have the dtype in which it accumulates.
                    Some((None, _)) | None => {}
                    Some(found) => tensor(&format!("gradient of {name}"), found, elements, Dtype::F32)?,
                }
            }
            Ok(())
        };
        match (self.policy, policy) {
            (PolicySpec::Logits { vocab, .. }, PolicyInput::Logits(logits)) => {
                tensor("logits [N, V]", (logits.host_len(), logits.dtype()), n * vocab, dtype)?;
                grads.map_or(Ok(()), |g| {
                    buffers(g, [(false, 0), (false, 0), (false, 0), (self.gradients.hidden, n * vocab)])
                })?;
            }
            (
                PolicySpec::Hidden { hidden: h, vocab: v, bias: has_bias, .. },
                PolicyInput::Hidden { hidden, lm_head, bias },
            ) => {
                tensor("hidden [N, H]", (hidden.host_len(), hidden.dtype()), n * h, dtype)?;
                // A head without a gradient may be bf16 with f32 hidden states: it is widened where it is used.
                let is_trained = self.gradients.lm_head && grads.is_some();
                let is_narrow = lm_head.dtype() == Dtype::Bf16 && !is_trained;
                let of_head = if is_narrow { Dtype::Bf16 } else { dtype };
                tensor("lm_head", (lm_head.host_len(), lm_head.dtype()), v * h, of_head)?;
                match (has_bias, bias) {
                    (true, Some(bias)) => tensor("bias [V]", (bias.host_len(), bias.dtype()), v, dtype)?,
                    (false, None) => {}
                    (planned, _) => {
                        let say = |b| if b { "a bias" } else { "no bias" };
                        return Err(Error::shape(OP, "bias", say(planned), say(!planned)));
                    }
                }
                let wanted = self.gradients;
                grads.map_or(Ok(()), |g| {
                    buffers(g, [(wanted.hidden, n * h), (wanted.lm_head, v * h), (wanted.bias, v), (false, 0)])
                })?;
            }
            (PolicySpec::Logits { .. }, PolicyInput::Hidden { .. }) => {
                return Err(Error::shape(OP, "policy", "logits, as planned", "hidden states and a head"));
            }
            (PolicySpec::Hidden { .. }, _) => {
                return Err(Error::shape(OP, "policy", "hidden states and a head, as planned", "logits"));
            }
        }
        batch.validate_targets(self.policy.vocab())
    }
}
