//! The transform of logits before the temperature: w = cap tanh(logit_scale z / cap), or logit_scale z without a
//! softcap.
//!
//! Transformed logits are not stored: every operation that reads logits applies the transform.

use grpo_core::LossConfig;
use grpo_stablehlo::{Dtype, Value};

/// The transform of a logit before the temperature.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transform {
    logit_scale: f64,
    cap: Option<f64>,
}

impl Transform {
    pub(crate) fn new(loss: &LossConfig) -> Self {
        Self { logit_scale: loss.logit_scale, cap: loss.final_logit_softcapping }
    }

    /// Transforms f32 logits `z`.
    pub(crate) fn apply(&self, z: &Value) -> Value {
        match self.cap {
            None if self.logit_scale == 1.0 => z.clone(),
            None => z * z.like(self.logit_scale),
            Some(cap) => z.like(cap) * (z * z.like(self.logit_scale / cap)).tanh(),
        }
    }

    /// Like [`Transform::apply`], but shares no operation with an earlier call on the same logits; otherwise a compiler
    /// would keep the transformed tile between statistics and gradient.
    pub(crate) fn apply_again(&self, z: &Value) -> Value {
        let Some(cap) = self.cap else { return self.apply(z) };
        let f = z.builder();
        let inner = f.scalar(self.logit_scale / cap, Dtype::F32);
        let inner = f.optimization_barrier(&[&inner]).swap_remove(0).broadcast_in_dim(z.shape(), &[]);
        z.like(cap) * (z * inner).tanh()
    }

    /// Computes dL/dz from dL/dw, for transformed logits w.
    pub(crate) fn pull_back(&self, w: &Value, gradient: Value) -> Value {
        match self.cap {
            None if self.logit_scale == 1.0 => gradient,
            None => &gradient * gradient.like(self.logit_scale),
            // The factored form of 1 - (w / cap)^2 is exactly 0 at the cap.
            Some(cap) => {
                let all = w.like(cap);
                gradient * w.like(self.logit_scale / (cap * cap)) * ((&all - w) * (&all + w))
            }
        }
    }
}
