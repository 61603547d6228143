//! AdamW on the host, with clipping by the norm of the whole gradient.
//!
//! burn's own optimizer clips tensor by tensor and keys its state by run-time ids. This one clips globally, names its
//! state after the parameters and keeps it as plain f32, so that saving and restoring it is exact.

use crate::decoder::{Decoder, Which, for_each_parameter, update_parameters};
use crate::gradients::GradientSum;
use models::NamedTensor;
use policy::{AdamWConfig, Error, Result, TensorSink, UpdateReport};
use rayon::prelude::*;
use std::sync::Arc;

/// Entries that one task updates.
const CHUNK: usize = 1 << 15;

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
    /// Shared with a copy of the optimizer until the next step writes it.
    first: Arc<Vec<f32>>,
    second: Arc<Vec<f32>>,
}

const FIRST: &str = "exp_avg.";
const SECOND: &str = "exp_avg_sq.";

impl AdamW {
    /// An optimizer that has done no step.
    pub fn new(config: &AdamWConfig) -> Self {
        Self { config: config.clone(), step: 0, moments: Vec::new() }
    }

    /// Forgets all steps; the settings stay.
    pub(crate) fn reset(&mut self) {
        (self.step, self.moments) = (0, Vec::new());
    }

    /// The number of steps done; a skipped update is none.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Applies one step to `model`, in place where nobody else holds its weights. Tensors with one dimension (norms, biases) are not
    /// decayed.
    ///
    /// With `skip_grad_norm` a gradient whose norm is above it or not finite is skipped: weights, moments and the count of
    /// steps stay as they are.
    ///
    /// # Errors
    /// [`Error::NotFinite`] when the gradient is not finite, or the weights or moments that it leads to;
    /// [`Error::Argument`] when the gradient is of another model. The optimizer is then unchanged.
    pub fn step(&mut self, model: &mut Decoder, gradients: &GradientSum, learning_rate: f64) -> Result<UpdateReport> {
        let grad_norm = gradients.norm();
        match self.config.skip_grad_norm {
            Some(limit) if grad_norm.is_nan() || grad_norm > limit => {
                return Ok(UpdateReport { grad_norm, applied: false });
            }
            None if !grad_norm.is_finite() => {
                return Err(Error::NotFinite { what: "the gradient".into(), step: self.step });
            }
            _ => {}
        }
        self.fits(gradients)?;
        if self.moments.is_empty() {
            self.moments = gradients.parameters.iter().map(Moments::zeros).collect();
        }
        let rule = self.rule(grad_norm, learning_rate);
        // Looked at before anything is written: there is nothing to undo.
        let (mut index, mut finite) = (0, true);
        for_each_parameter(model, Which::Trained, |_, _, values| {
            finite &= rule.is_finite(values, &gradients.parameters[index].data, &self.moments[index]);
            index += 1;
            Ok(())
        })?;
        if !finite {
            if self.step == 0 {
                self.moments.clear();
            }
            let what = "the weights, or the optimizer's moments, after the update".to_owned();
            return Err(Error::NotFinite { what, step: self.step + 1 });
        }
        let mut index = 0;
        // Taken out: a weight that is held twice would be copied.
        *model = update_parameters(model.take(), |_, values| {
            rule.apply(values, &gradients.parameters[index].data, &mut self.moments[index]);
            index += 1;
        });
        self.step += 1;
        Ok(UpdateReport { grad_norm, applied: true })
    }

    /// Whether the gradients are of the model whose moments these are.
    fn fits(&self, gradients: &GradientSum) -> Result<()> {
        let fits = |(m, g): (&Moments, &NamedTensor)| m.name == g.name && m.shape == g.shape;
        let known = self.moments.iter().zip(&gradients.parameters).all(fits);
        if self.moments.is_empty() || self.moments.len() == gradients.parameters.len() && known {
            return Ok(());
        }
        let found = format!("{} tensors of other names or shapes", gradients.parameters.len());
        Err(Error::argument("AdamW::step", "gradients of the model that it has seen before", found))
    }

    /// The scalars of the next step.
    fn rule(&self, grad_norm: f64, learning_rate: f64) -> Rule {
        let AdamWConfig { adam_beta1, adam_beta2, adam_epsilon, weight_decay, max_grad_norm, .. } = self.config;
        // PyTorch adds 1e-6 to the norm too.
        let clip = if max_grad_norm > 0.0 { (max_grad_norm / (grad_norm + 1e-6)).min(1.0) } else { 1.0 };
        let correction = |beta: f64| 1.0 - beta.powf((self.step + 1) as f64);
        Rule {
            clip: clip as f32,
            beta1: adam_beta1 as f32,
            beta2: adam_beta2 as f32,
            rate: (learning_rate / correction(adam_beta1)) as f32,
            root: correction(adam_beta2).sqrt() as f32,
            epsilon: adam_epsilon as f32,
            decay: (1.0 - learning_rate * weight_decay) as f32,
        }
    }

    /// The state as named tensors; with [`AdamW::steps`] it is the whole state.
    pub fn state(&self) -> Vec<NamedTensor> {
        let mut tensors = Vec::new();
        // A list takes every tensor.
        let _ = self.export(&mut tensors);
        tensors
    }

    /// Hands the tensors of the state to `sink`, one by one.
    ///
    /// # Errors
    /// That of the sink.
    pub fn export(&self, sink: &mut dyn TensorSink) -> Result<()> {
        for moments in &self.moments {
            for (prefix, data) in [(FIRST, &moments.first), (SECOND, &moments.second)] {
                let name = format!("{prefix}{}", moments.name);
                sink.tensor(NamedTensor { name, shape: moments.shape.clone(), data: data.to_vec() })?;
            }
        }
        Ok(())
    }

    /// Continues from `steps` and a state that [`AdamW::state`] exported, for `model`.
    ///
    /// # Errors
    /// [`Error::State`] when a tensor is missing or does not fit.
    pub fn restore(&mut self, steps: u64, state: &[NamedTensor], model: &Decoder) -> Result<()> {
        let mut moments = Vec::new();
        if steps > 0 {
            // In the order of the decoder's fields: a saved state may list its tensors in any order.
            for_each_parameter(model, Which::Trained, |parameter, shape, values| {
                let find = |prefix: &str| {
                    let name = format!("{prefix}{parameter}");
                    let expected = format!("shape {shape:?}");
                    match state.iter().find(|t| t.name == name) {
                        Some(t) if t.shape == shape && t.data.len() == values.len() => Ok(Arc::new(t.data.clone())),
                        Some(t) => Err(Error::state(name, expected, format!("shape {:?}", t.shape))),
                        None => Err(Error::state(name, expected, "no such tensor")),
                    }
                };
                let (first, second) = (find(FIRST)?, find(SECOND)?);
                moments.push(Moments { name: parameter.to_owned(), shape: shape.to_vec(), first, second });
                Ok(())
            })?;
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
        let zeros = || Arc::new(vec![0.0; like.data.len()]);
        Self { name: like.name.clone(), shape: like.shape.clone(), first: zeros(), second: zeros() }
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
    /// The factor of weights that decay.
    decay: f32,
}

impl Rule {
    /// The decay of a tensor: those with one dimension, norms and biases, have none.
    fn decay_of(&self, moments: &Moments) -> f32 {
        if moments.shape.len() > 1 { self.decay } else { 1.0 }
    }

    /// Value and moments after the step.
    #[inline(always)]
    fn next(&self, decay: f32, value: f32, gradient: f32, first: f32, second: f32) -> [f32; 3] {
        let g = gradient * self.clip;
        let first = self.beta1 * first + (1.0 - self.beta1) * g;
        let second = self.beta2 * second + (1.0 - self.beta2) * g * g;
        [value * decay - self.rate * first / (second.sqrt() / self.root + self.epsilon), first, second]
    }

    /// Whether the values and moments of one tensor are finite after the step.
    fn is_finite(&self, values: &[f32], gradient: &[f32], moments: &Moments) -> bool {
        let decay = self.decay_of(moments);
        let chunks = values.par_chunks(CHUNK).zip(gradient.par_chunks(CHUNK));
        let moments = moments.first.par_chunks(CHUNK).zip(moments.second.par_chunks(CHUNK));
        chunks.zip(moments).all(|((values, gradient), (first, second))| {
            let entries = values.iter().zip(gradient).zip(first.iter().zip(second));
            entries.fold(true, |finite, ((value, gradient), (first, second))| {
                let next = self.next(decay, *value, *gradient, *first, *second);
                finite & next[0].is_finite() & next[1].is_finite() & next[2].is_finite()
            })
        })
    }

    /// Updates the values and moments of one tensor.
    fn apply(&self, values: &mut [f32], gradient: &[f32], moments: &mut Moments) {
        let decay = self.decay_of(moments);
        let (first, second) = (Arc::make_mut(&mut moments.first), Arc::make_mut(&mut moments.second));
        let chunks = values.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK));
        let moments = first.par_chunks_mut(CHUNK).zip(second.par_chunks_mut(CHUNK));
        chunks.zip(moments).for_each(|((values, gradient), (first, second))| {
            let entries = values.iter_mut().zip(gradient).zip(first.iter_mut().zip(second));
            for ((value, gradient), (first, second)) in entries {
                [*value, *first, *second] = self.next(decay, *value, *gradient, *first, *second);
            }
        });
    }
}

#[cfg(test)]
mod tests;
