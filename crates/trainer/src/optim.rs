//! AdamW on the host, with clipping by the norm of the whole gradient and a learning-rate schedule.
//!
//! burn's own optimizer clips tensor by tensor and keys its state by run-time ids. This one clips globally, names its
//! state after the parameters and keeps it as plain f32, so that saving and restoring it is exact.

use crate::error::{Error, Result};
use crate::model::{Decoder, NamedTensor, ParameterVisitor, to_host, update_parameters, visit_parameters};
use crate::train_config::{LrSchedulerType, OptimizerConfig};
use burn::module::Param;
use burn::tensor::{Gradients, Tensor};

/// The sum of the gradients of one optimizer step, parameter by parameter in walk order.
#[derive(Clone, Debug, Default)]
pub struct GradientSum {
    parameters: Vec<NamedTensor>,
}

impl GradientSum {
    /// No gradient yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the gradients of one micro-batch. A parameter that the loss does not depend on adds nothing.
    pub fn add(&mut self, model: &Decoder, gradients: Gradients) {
        struct Collect<'a> {
            sum: &'a mut Vec<NamedTensor>,
            gradients: Gradients,
            index: usize,
        }
        impl ParameterVisitor for Collect<'_> {
            fn visit<const D: usize>(&mut self, name: &str, parameter: &Param<Tensor<D>>) {
                let value = parameter.val();
                if self.index == self.sum.len() {
                    let shape = value.dims().to_vec();
                    let zeros = vec![0.0; shape.iter().product()];
                    self.sum.push(NamedTensor { name: name.to_owned(), shape, data: zeros });
                }
                if let Some(gradient) = value.grad_remove(&mut self.gradients) {
                    for (sum, g) in self.sum[self.index].data.iter_mut().zip(to_host(gradient)) {
                        *sum += g;
                    }
                }
                self.index += 1;
            }
        }
        visit_parameters(model, &mut Collect { sum: &mut self.parameters, gradients, index: 0 });
    }

    /// Adds the sum of other micro-batches of the same model.
    pub fn merge(&mut self, other: Self) {
        if self.parameters.is_empty() {
            *self = other;
            return;
        }
        for (mine, theirs) in self.parameters.iter_mut().zip(other.parameters) {
            for (a, b) in mine.data.iter_mut().zip(theirs.data) {
                *a += b;
            }
        }
    }

    /// 2-norm over all parameters together.
    pub fn norm(&self) -> f64 {
        // f64, in a fixed order: the same bits on every run.
        self.parameters.iter().flat_map(|p| &p.data).map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt()
    }

    /// The gradients by parameter name.
    pub fn parameters(&self) -> &[NamedTensor] {
        &self.parameters
    }
}

/// What one optimizer step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerReport {
    /// Norm of the whole gradient before clipping.
    pub grad_norm: f64,
    /// Learning rate used.
    pub learning_rate: f64,
    /// Whether nothing was updated, because `skip_grad_norm` is set and the gradient is above it or not finite.
    pub skipped: bool,
}

/// AdamW (arXiv 1711.05101) in f32, as PyTorch computes it.
#[derive(Clone, Debug)]
pub struct AdamW {
    config: OptimizerConfig,
    total_steps: u64,
    step: u64,
    /// Updates skipped since the last one that was applied.
    skipped_in_a_row: u64,
    /// First and second moments per parameter in walk order; empty until the first step.
    moments: Vec<Moments>,
}

#[derive(Clone, Debug)]
struct Moments {
    name: String,
    shape: Vec<usize>,
    first: Vec<f32>,
    second: Vec<f32>,
}

const FIRST: &str = "exp_avg.";
const SECOND: &str = "exp_avg_sq.";

impl AdamW {
    /// An optimizer at step 0 of a schedule over `total_steps`.
    pub fn new(config: &OptimizerConfig, total_steps: u64) -> Self {
        Self { config: config.clone(), total_steps, step: 0, skipped_in_a_row: 0, moments: Vec::new() }
    }

    /// Steps done; a skipped update is none.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Updates skipped since the last one that was applied.
    pub fn skipped_in_a_row(&self) -> u64 {
        self.skipped_in_a_row
    }

    /// Learning rate of the step after `step` steps.
    pub fn learning_rate_at(&self, step: u64) -> f64 {
        let OptimizerConfig { learning_rate, warmup_ratio, lr_scheduler_type, min_lr_ratio, .. } = self.config;
        let rise = (warmup_ratio * self.total_steps as f64).ceil();
        if (step as f64) < rise {
            return learning_rate * (step + 1) as f64 / rise;
        }
        let done = ((step as f64 - rise) / (self.total_steps as f64 - rise).max(1.0)).min(1.0);
        let share = match lr_scheduler_type {
            LrSchedulerType::Constant => return learning_rate,
            LrSchedulerType::Linear => 1.0 - done,
            LrSchedulerType::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
        };
        learning_rate * (min_lr_ratio + (1.0 - min_lr_ratio) * share)
    }

    /// Applies one step and returns the new model. Tensors with one dimension (norms, biases) are not decayed.
    ///
    /// With `skip_grad_norm` a gradient whose norm is above it or not finite is skipped: weights, moments, the count of steps
    /// and with it the learning-rate schedule stay as they are.
    ///
    /// # Errors
    /// [`Error::NotFinite`] when the gradient is not finite, or the weights or moments that it leads to;
    /// [`Error::TooManySkips`]; [`Error::Argument`] when the gradient is of another model. The optimizer is then unchanged.
    pub fn step(&mut self, model: Decoder, gradients: &GradientSum) -> Result<(Decoder, OptimizerReport)> {
        let grad_norm = gradients.norm();
        match self.config.skip_grad_norm {
            Some(limit) if grad_norm.is_nan() || grad_norm > limit => return Ok((model, self.skip(grad_norm)?)),
            None if !grad_norm.is_finite() => {
                return Err(Error::NotFinite { what: "the gradient".into(), step: self.step });
            }
            _ => {}
        }
        let before = self.clone();
        self.apply(model, gradients, grad_norm).inspect_err(|_| *self = before)
    }

    /// Whether an update that is not finite is skipped.
    pub fn skips(&self) -> bool {
        self.config.skip_grad_norm.is_some()
    }

    /// Skips an update whose gradient has this norm.
    ///
    /// # Errors
    /// [`Error::TooManySkips`] when it is the last one that is allowed, `max_consecutive_skips`.
    pub fn skip(&mut self, grad_norm: f64) -> Result<OptimizerReport> {
        let skipped = self.skipped_in_a_row + 1;
        if skipped >= self.config.max_consecutive_skips {
            let limit = self.config.skip_grad_norm.unwrap_or(f64::INFINITY);
            return Err(Error::TooManySkips { skipped, grad_norm, limit });
        }
        self.skipped_in_a_row = skipped;
        Ok(OptimizerReport { grad_norm, learning_rate: self.learning_rate_at(self.step), skipped: true })
    }

    fn apply(&mut self, model: Decoder, gradients: &GradientSum, grad_norm: f64) -> Result<(Decoder, OptimizerReport)> {
        if self.moments.is_empty() {
            self.moments = gradients.parameters.iter().map(Moments::zeros).collect();
        }
        let fits = |(m, g): (&Moments, &NamedTensor)| m.name == g.name && m.shape == g.shape;
        if self.moments.len() != gradients.parameters.len() || !self.moments.iter().zip(&gradients.parameters).all(fits)
        {
            let found = format!("{} tensors of other names or shapes", gradients.parameters.len());
            return Err(Error::argument("AdamW::step", "gradients of the model that it has seen before", found));
        }

        let learning_rate = self.learning_rate_at(self.step);
        self.step += 1;
        self.skipped_in_a_row = 0;
        let OptimizerConfig { adam_beta1, adam_beta2, adam_epsilon, weight_decay, max_grad_norm, .. } = self.config;
        // PyTorch adds 1e-6 to the norm too.
        let clip = if max_grad_norm > 0.0 { (max_grad_norm / (grad_norm + 1e-6)).min(1.0) } else { 1.0 };
        let correction = |beta: f64| 1.0 - beta.powf(self.step as f64);
        let rule = Rule {
            clip: clip as f32,
            beta1: adam_beta1 as f32,
            beta2: adam_beta2 as f32,
            rate: (learning_rate / correction(adam_beta1)) as f32,
            root: correction(adam_beta2).sqrt() as f32,
            epsilon: adam_epsilon as f32,
        };
        let (mut index, mut finite) = (0, true);
        let model = update_parameters(model, |_, values| {
            let (moments, gradient) = (&mut self.moments[index], &gradients.parameters[index]);
            index += 1;
            let decay = if moments.shape.len() > 1 { (1.0 - learning_rate * weight_decay) as f32 } else { 1.0 };
            finite &= rule.apply(values, &gradient.data, decay, moments);
        });
        if !finite {
            let what = "the weights, or the optimizer's moments, after the update".to_owned();
            return Err(Error::NotFinite { what, step: self.step });
        }
        Ok((model, OptimizerReport { grad_norm, learning_rate, skipped: false }))
    }

    /// The state as named tensors; together with [`AdamW::steps`] all there is.
    pub fn state(&self) -> Vec<NamedTensor> {
        let tensor = |prefix: &str, m: &Moments, data: &[f32]| NamedTensor {
            name: format!("{prefix}{}", m.name),
            shape: m.shape.clone(),
            data: data.to_vec(),
        };
        self.moments.iter().flat_map(|m| [tensor(FIRST, m, &m.first), tensor(SECOND, m, &m.second)]).collect()
    }

    /// Continues after this many updates that were skipped one after the other.
    #[must_use]
    pub fn with_skipped_in_a_row(mut self, skipped: u64) -> Self {
        self.skipped_in_a_row = skipped;
        self
    }

    /// Continues from `steps` and a state that [`AdamW::state`] exported, for a model with these `parameters`.
    ///
    /// # Errors
    /// [`Error::State`] when a tensor is missing or does not fit.
    pub fn restore(&mut self, steps: u64, state: &[NamedTensor], parameters: &[NamedTensor]) -> Result<()> {
        let mut moments = Vec::new();
        if steps > 0 {
            for parameter in parameters {
                let find = |prefix: &str| {
                    let name = format!("{prefix}{}", parameter.name);
                    let expected = format!("shape {:?}", parameter.shape);
                    match state.iter().find(|t| t.name == name) {
                        Some(t) if t.shape == parameter.shape && t.data.len() == parameter.data.len() => {
                            Ok(t.data.clone())
                        }
                        Some(t) => Err(Error::state(name, expected, format!("shape {:?}", t.shape))),
                        None => Err(Error::state(name, expected, "no such tensor")),
                    }
                };
                let (name, shape) = (parameter.name.clone(), parameter.shape.clone());
                moments.push(Moments { name, shape, first: find(FIRST)?, second: find(SECOND)? });
            }
        }
        if state.len() != 2 * moments.len() {
            let expected = format!("{} tensors", 2 * moments.len());
            return Err(Error::state("the optimizer", expected, state.len()));
        }
        self.step = steps;
        self.moments = moments;
        Ok(())
    }
}

impl Moments {
    fn zeros(like: &NamedTensor) -> Self {
        let zeros = vec![0.0; like.data.len()];
        Self { name: like.name.clone(), shape: like.shape.clone(), first: zeros.clone(), second: zeros }
    }
}

/// The scalars of one step.
struct Rule {
    clip: f32,
    beta1: f32,
    beta2: f32,
    /// Learning rate over the first moment's bias correction.
    rate: f32,
    /// Root of the second moment's bias correction.
    root: f32,
    epsilon: f32,
}

impl Rule {
    /// Whether all that was updated is finite.
    fn apply(&self, values: &mut [f32], gradient: &[f32], decay: f32, moments: &mut Moments) -> bool {
        let mut finite = true;
        let moments = moments.first.iter_mut().zip(&mut moments.second);
        for ((value, gradient), (first, second)) in values.iter_mut().zip(gradient).zip(moments) {
            let g = gradient * self.clip;
            *first = self.beta1 * *first + (1.0 - self.beta1) * g;
            *second = self.beta2 * *second + (1.0 - self.beta2) * g * g;
            *value = *value * decay - self.rate * *first / (second.sqrt() / self.root + self.epsilon);
            finite &= value.is_finite() & first.is_finite() & second.is_finite();
        }
        finite
    }
}

#[cfg(test)]
mod tests;
