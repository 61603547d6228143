//! AdamW as every policy computes it: its settings, the scalars of a step, and how large it can make the numbers of a training state.

mod bounds;

pub use bounds::AdamWBounds;

/// What is added to the norm of a gradient before the gradient is divided by it, as in PyTorch.
pub const CLIP_EPSILON: f64 = 1e-6;

/// The settings of AdamW (arXiv 1711.05101) that stay the same from step to step. The learning rate is an argument of
/// [`crate::Policy::apply`].
///
/// ```
/// let adamw = policy::AdamWConfig { skip_grad_norm: Some(10.0), ..Default::default() };
/// assert!(adamw.skips());
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct AdamWConfig {
    /// The decay of the first moment, in [0, 1).
    pub adam_beta1: f64,
    /// The decay of the second moment, in [0, 1).
    pub adam_beta2: f64,
    /// The number that is added to the root of the second moment, above 0.
    pub adam_epsilon: f64,
    /// The decoupled weight decay of matrices; norms and biases have none.
    pub weight_decay: f64,
    /// The largest 2-norm of the whole gradient; 0 switches clipping off.
    pub max_grad_norm: f64,
    /// The 2-norm, before clipping, above which a gradient is not applied; one that is not finite is not applied either.
    /// `None` applies every gradient that is finite, and one that is not is an error.
    pub skip_grad_norm: Option<f64>,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_epsilon: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: 1.0,
            skip_grad_norm: None,
        }
    }
}

impl AdamWConfig {
    /// Whether an update with too large a gradient, or with one that is not finite, is skipped instead of failing.
    pub fn skips(&self) -> bool {
        self.skip_grad_norm.is_some()
    }

    /// The scalars of step `step`, 1 for the first one.
    ///
    /// ```
    /// // f32 as PyTorch computes it: m = beta1 m + (1 - beta1) g; w = w decay - rate m / (sqrt(v) / root + epsilon).
    /// let first = policy::AdamWConfig::default().step(1, 1e-3);
    /// assert!((first.rate - 1e-2).abs() < 1e-8 && first.decay == 1.0);
    /// ```
    pub fn step(&self, step: u64, learning_rate: f64) -> AdamWStep {
        let correction = |beta: f64| 1.0 - beta.powf(step as f64);
        let max_grad_norm = if self.max_grad_norm > 0.0 { self.max_grad_norm } else { f64::INFINITY };
        AdamWStep {
            beta1: self.adam_beta1 as f32,
            beta2: self.adam_beta2 as f32,
            rate: (learning_rate / correction(self.adam_beta1)) as f32,
            root: correction(self.adam_beta2).sqrt() as f32,
            epsilon: self.adam_epsilon as f32,
            decay: (1.0 - learning_rate * self.weight_decay) as f32,
            max_grad_norm: max_grad_norm as f32,
            // Every finite norm is within it.
            limit: self.skip_grad_norm.unwrap_or(f64::from(f32::MAX)) as f32,
        }
    }
}

/// The scalars of one step of AdamW, in the f32 in which it is computed. [`AdamWConfig::step`] makes them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// The decay of the first moment.
    pub beta1: f32,
    /// The decay of the second moment.
    pub beta2: f32,
    /// The learning rate over the first moment's bias correction.
    pub rate: f32,
    /// The root of the second moment's bias correction.
    pub root: f32,
    /// The number that is added to the root of the second moment.
    pub epsilon: f32,
    /// The factor of weights that decay.
    pub decay: f32,
    /// The norm to which a larger gradient is clipped; infinite where none is.
    pub max_grad_norm: f32,
    /// The largest norm of a gradient that is applied.
    pub limit: f32,
}
