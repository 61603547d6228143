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
}

/// AdamW (arXiv 1711.05101) in f32, as PyTorch computes it.
#[derive(Clone, Debug)]
pub struct AdamW {
    config: OptimizerConfig,
    total_steps: u64,
    step: u64,
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
        Self { config: config.clone(), total_steps, step: 0, moments: Vec::new() }
    }

    /// Steps done.
    pub fn steps(&self) -> u64 {
        self.step
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
    /// # Errors
    /// [`Error::NotFinite`] when the gradient is not finite; [`Error::Argument`] when it is of another model.
    pub fn step(&mut self, model: Decoder, gradients: &GradientSum) -> Result<(Decoder, OptimizerReport)> {
        let grad_norm = gradients.norm();
        if !grad_norm.is_finite() {
            return Err(Error::NotFinite { what: "the gradient", step: self.step });
        }
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
        let mut index = 0;
        let model = update_parameters(model, |_, values| {
            let (moments, gradient) = (&mut self.moments[index], &gradients.parameters[index]);
            index += 1;
            let decay = if moments.shape.len() > 1 { (1.0 - learning_rate * weight_decay) as f32 } else { 1.0 };
            rule.apply(values, &gradient.data, decay, moments);
        });
        Ok((model, OptimizerReport { grad_norm, learning_rate }))
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
    fn apply(&self, values: &mut [f32], gradient: &[f32], decay: f32, moments: &mut Moments) {
        let moments = moments.first.iter_mut().zip(&mut moments.second);
        for ((value, gradient), (first, second)) in values.iter_mut().zip(gradient).zip(moments) {
            let g = gradient * self.clip;
            *first = self.beta1 * *first + (1.0 - self.beta1) * g;
            *second = self.beta2 * *second + (1.0 - self.beta2) * g * g;
            *value = *value * decay - self.rate * *first / (second.sqrt() / self.root + self.epsilon);
        }
    }
}

#[cfg(test)]
mod tests;
