//! AdamW on the host, with clipping by the norm of the whole gradient.
//!
//! burn's own optimizer clips tensor by tensor and keys its state by run-time ids. This one clips globally, names its
//! state after the parameters and keeps it as plain f32, so that saving and restoring it is exact.

use crate::decoder::{Decoder, update_parameters};
use crate::gradients::GradientSum;
use models::NamedTensor;
use policy::{AdamWConfig, Error, Result, UpdateReport};

/// AdamW (arXiv 1711.05101) in f32, as PyTorch computes it.
#[derive(Clone, Debug)]
pub struct AdamW {
    config: AdamWConfig,
    step: u64,
    /// The moments of each parameter, in the order of the decoder's fields; empty until the first step.
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
    /// An optimizer that has done no step.
    pub fn new(config: &AdamWConfig) -> Self {
        Self { config: config.clone(), step: 0, moments: Vec::new() }
    }

    /// The number of steps done; a skipped update is none.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Applies one step and returns the new model. Tensors with one dimension (norms, biases) are not decayed.
    ///
    /// With `skip_grad_norm` a gradient whose norm is above it or not finite is skipped: weights, moments and the count of
    /// steps stay as they are.
    ///
    /// # Errors
    /// [`Error::NotFinite`] when the gradient is not finite, or the weights or moments that it leads to;
    /// [`Error::Argument`] when the gradient is of another model. The optimizer is then unchanged.
    pub fn step(
        &mut self,
        model: Decoder,
        gradients: &GradientSum,
        learning_rate: f64,
    ) -> Result<(Decoder, UpdateReport)> {
        let grad_norm = gradients.norm();
        match self.config.skip_grad_norm {
            Some(limit) if grad_norm.is_nan() || grad_norm > limit => {
                return Ok((model, UpdateReport { grad_norm, applied: false }));
            }
            None if !grad_norm.is_finite() => {
                return Err(Error::NotFinite { what: "the gradient".into(), step: self.step });
            }
            _ => {}
        }
        let before = self.clone();
        self.apply(model, gradients, grad_norm, learning_rate).inspect_err(|_| *self = before)
    }

    fn apply(
        &mut self,
        model: Decoder,
        gradients: &GradientSum,
        grad_norm: f64,
        learning_rate: f64,
    ) -> Result<(Decoder, UpdateReport)> {
        if self.moments.is_empty() {
            self.moments = gradients.parameters.iter().map(Moments::zeros).collect();
        }
        let fits = |(m, g): (&Moments, &NamedTensor)| m.name == g.name && m.shape == g.shape;
        if self.moments.len() != gradients.parameters.len() || !self.moments.iter().zip(&gradients.parameters).all(fits)
        {
            let found = format!("{} tensors of other names or shapes", gradients.parameters.len());
            return Err(Error::argument("AdamW::step", "gradients of the model that it has seen before", found));
        }

        self.step += 1;
        let AdamWConfig { adam_beta1, adam_beta2, adam_epsilon, weight_decay, max_grad_norm, .. } = self.config;
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
        Ok((model, UpdateReport { grad_norm, applied: true }))
    }

    /// The state as named tensors; with [`AdamW::steps`] it is the whole state.
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

/// The scalars of one step of AdamW.
struct Rule {
    clip: f32,
    beta1: f32,
    beta2: f32,
    /// The learning rate over the first moment's bias correction.
    rate: f32,
    /// The root of the second moment's bias correction.
    root: f32,
    epsilon: f32,
}

impl Rule {
    /// Updates the values and moments of one tensor; whether all of them are finite.
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
