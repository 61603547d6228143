//! Optimizers on the CPU, with clipping by the norm of the whole gradient. [`grpo_policy::UpdateRule`] has the arithmetic of a step.
//!
//! burn's own optimizers clip each tensor separately and identify their state by run-time ids. This one clips globally, names its state
//! after the parameters and stores it as f32 or as codes of 8 bits, so that saving and restoring it is exact.

mod eight_bit;
mod matrices;

use crate::decoder::{Decoder, Tensors, Which, export_parts, for_each_parameter, trained_tensors, update_parameters};
use crate::gradients::GradientSum;
use eight_bit::TensorMoments;
use grpo_models::NamedTensor;
use grpo_policy::{
    CLIP_EPSILON, Error, OptimizerBounds, OptimizerName, OptimizerSettings, OptimizerStep, Result, Rule, TensorSink,
    TensorSource, UpdateReport, check_moments,
};
use rayon::prelude::*;
use std::sync::Arc;

/// Number of elements per parallel task.
const CHUNK: usize = 1 << 15;

/// An optimizer in f32, as in PyTorch.
#[derive(Clone, Debug)]
pub(crate) struct Optimizer {
    pub(crate) config: OptimizerSettings,
    /// Number of steps done; skipped updates do not count.
    pub(crate) steps: u64,
    /// Moments of each parameter, in the order of the decoder's fields; empty before the first step.
    moments: Vec<Moments>,
    /// Upper bound on first moments and on roots of second moments.
    largest_moment: f64,
}

#[derive(Clone, Debug)]
struct Moments {
    name: String,
    shape: Vec<usize>,
    /// The rule of elements.
    rule: Rule,
    values: MomentValues,
}

/// The state of a parameter, shared with clones of the optimizer until the next step writes them.
#[derive(Clone, Debug)]
enum MomentValues {
    /// f32, in the order of the parameter, for each slot of the rule.
    Single(Vec<Arc<Vec<f32>>>),
    /// One entry for each tensor of transformers in the parameter; at least one has 8-bit moments or a rule of matrices.
    OfTensors(Arc<Vec<TensorMoments>>),
}

impl Optimizer {
    /// Creates an optimizer before its first step.
    pub(crate) fn new(config: &OptimizerSettings) -> Self {
        Self { config: config.clone(), steps: 0, moments: Vec::new(), largest_moment: 0.0 }
    }

    /// Applies one step to `model`, in place if the weights have no other owner. Tensors with one dimension (norms, biases) have no weight
    /// decay.
    ///
    /// With `skip_grad_norm`, a gradient whose norm exceeds the limit or is not finite is skipped: weights, moments and the step count stay
    /// the same.
    ///
    /// # Errors
    /// [`Error::NotFinite`] if the gradient, or the resulting weights or moments, are not finite. The optimizer is then unchanged.
    pub(crate) fn step(
        &mut self,
        model: &mut Decoder,
        gradients: &GradientSum,
        learning_rate: f64,
    ) -> Result<UpdateReport> {
        let grad_norm = gradients.norm();
        match self.config.skip_grad_norm {
            Some(limit) if grad_norm.is_nan() || grad_norm > limit => {
                return Ok(UpdateReport { grad_norm, applied: false });
            }
            None if !grad_norm.is_finite() => {
                return Err(Error::NotFinite { what: "the gradient".into(), step: self.steps });
            }
            _ => {}
        }
        if self.moments.is_empty() {
            let (of_model, optimizer) = (&*model, self.config.name);
            let zeros =
                |parameter: &NamedTensor| Moments::zeros(of_model, &parameter.name, &parameter.shape, optimizer);
            self.moments = gradients.parameters.iter().map(zeros).collect();
        }
        let rule = Update::new(&self.config, self.steps + 1, grad_norm, learning_rate);
        // Weights may have been replaced since the last step, so they are measured; moments have no other writer.
        let mut largest_weight = Largest::default();
        for_each_parameter(model, Which::Trained, |_, _, values| {
            largest_weight = largest_weight.max(Largest::of(values));
            Ok(())
        })?;
        let bounds = OptimizerBounds { weights: largest_weight.get(), moments: self.largest_moment };
        let largest_moment = match bounds.after(&rule.step) {
            Some(bounds) => bounds.moments,
            // Check the results before the first write, so that there is nothing to undo.
            None => match self.look(&rule, model, gradients)? {
                (weight, moment) if weight.is_finite() && moment.is_finite() => moment.get(),
                _ => {
                    if self.steps == 0 {
                        self.moments.clear();
                    }
                    let what = "the weights, or the optimizer's moments, after the update".to_owned();
                    return Err(Error::NotFinite { what, step: self.steps + 1 });
                }
            },
        };
        let mut index = 0;
        // `take` avoids a second reference to the weights, which would force a copy.
        *model = update_parameters(model.take(), |_, _, values| {
            rule.apply(values, &gradients.parameters[index].data, &mut self.moments[index]);
            index += 1;
        });
        (self.steps, self.largest_moment) = (self.steps + 1, largest_moment);
        Ok(UpdateReport { grad_norm, applied: true })
    }

    /// Returns the largest weight, and the largest first moment or root of a second moment, after a step.
    fn look(&self, rule: &Update, model: &Decoder, gradients: &GradientSum) -> Result<(Largest, Largest)> {
        let (mut index, mut largest) = (0, (Largest::default(), Largest::default()));
        for_each_parameter(model, Which::Trained, |_, _, values| {
            let (weight, moment) = rule.look(values, &gradients.parameters[index].data, &self.moments[index]);
            largest = (largest.0.max(weight), largest.1.max(moment));
            index += 1;
            Ok(())
        })?;
        Ok(largest)
    }

    /// Passes the moments of `model` to `sink`, one by one, with the names of [`grpo_policy::moment_tensors`]; together with the number of steps
    /// they are the whole state.
    pub(crate) fn export(&self, model: &Decoder, sink: &mut dyn TensorSink) -> Result<()> {
        for Moments { name, shape, rule, values } in &self.moments {
            match values {
                MomentValues::Single(moments) => {
                    for (slot, data) in rule.slots().iter().zip(moments) {
                        export_parts(model, slot.single, (name, shape, data), sink)?;
                    }
                }
                MomentValues::OfTensors(tensors) => tensors.iter().try_for_each(|tensor| tensor.export(sink))?,
            }
        }
        Ok(())
    }

    /// Restores `steps` and a state of [`Optimizer::export`], for `model`.
    ///
    /// # Errors
    /// [`Error::State`] if a tensor is missing or does not fit, or if it is of another optimizer.
    pub(crate) fn restore(&mut self, steps: u64, state: &dyn TensorSource, model: &Decoder) -> Result<()> {
        check_moments(&trained_tensors(model), steps, self.config.name, state)?;
        let mut moments = Vec::new();
        if steps > 0 {
            for_each_parameter(model, Which::Trained, |name, shape, _| {
                let mut zeros = Moments::zeros(model, name, shape, self.config.name);
                zeros.read(model, state)?;
                moments.push(zeros);
                Ok(())
            })?;
        }
        let largest = moments.iter().map(Moments::largest).fold(Largest::default(), Largest::max);
        (self.steps, self.moments, self.largest_moment) = (steps, moments, largest.get());
        Ok(())
    }
}

impl Moments {
    /// Returns `true` if weight decay applies: not to tensors with one dimension (norms, biases).
    fn decays(&self) -> bool {
        self.shape.len() > 1
    }

    fn zeros(model: &Decoder, name: &str, shape: &[usize], optimizer: OptimizerName) -> Self {
        let rule = Rule::of_elements(optimizer);
        let values = match TensorMoments::zeros(model, name, shape, optimizer) {
            Some(tensors) => MomentValues::OfTensors(Arc::new(tensors)),
            None => {
                let zeros = |_: &_| Arc::new(vec![0.0; shape.iter().product()]);
                MomentValues::Single(rule.slots().iter().map(zeros).collect())
            }
        };
        Self { name: name.to_owned(), shape: shape.to_vec(), rule, values }
    }

    /// Reads a state of [`Optimizer::export`].
    fn read(&mut self, model: &Decoder, state: &dyn TensorSource) -> Result<()> {
        match &mut self.values {
            MomentValues::Single(moments) => {
                for (slot, data) in self.rule.slots().iter().zip(moments) {
                    let (config, adapted, prefix) = (model.config(), &model.adapted, slot.single);
                    let tensors = Tensors { config, adapted, prefix, tensors: state };
                    tensors.read(&self.name, &self.shape, Arc::make_mut(data).as_mut_slice())?;
                }
                Ok(())
            }
            MomentValues::OfTensors(tensors) => {
                Arc::make_mut(tensors).iter_mut().try_for_each(|tensor| tensor.read(state))
            }
        }
    }

    /// Returns the largest magnitude of a moment, or of the root of one of squares.
    fn largest(&self) -> Largest {
        match &self.values {
            MomentValues::Single(moments) => Largest::of_slots(self.rule, moments.iter().map(|values| &values[..])),
            MomentValues::OfTensors(tensors) => {
                tensors.iter().map(TensorMoments::largest).fold(Largest::default(), Largest::max)
            }
        }
    }
}

/// Maximum absolute value as f32 bits: bit order is numeric order, with infinity and then NaN as the largest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Largest(i32);

impl Largest {
    #[inline(always)]
    fn with(self, number: f32) -> Self {
        self.max(Self(number.abs().to_bits() as i32))
    }

    /// Returns the maximum over `numbers`.
    fn of(numbers: &[f32]) -> Self {
        let of_chunk = |chunk: &[f32]| chunk.iter().fold(Self::default(), |largest, number| largest.with(*number));
        numbers.par_chunks(CHUNK).map(of_chunk).max().unwrap_or_default()
    }

    /// Returns the maximum over the slots of a rule, with the roots of squares.
    fn of_slots<'a>(rule: Rule, slots: impl Iterator<Item = &'a [f32]>) -> Self {
        let largest = slots.zip(rule.slots()).map(|(values, slot)| match slot.is_squared {
            true => values.iter().map(|value| value.sqrt()).fold(Self::default(), Self::with),
            false => Self::of(values),
        });
        largest.fold(Self::default(), Self::max)
    }

    fn is_finite(self) -> bool {
        f32::from_bits(self.0 as u32).is_finite()
    }

    fn get(self) -> f64 {
        f32::from_bits(self.0 as u32).into()
    }
}

/// One step of an optimizer, for a given gradient norm.
struct Update {
    /// Clip factor of the gradient.
    clip: f32,
    step: OptimizerStep,
}

impl Update {
    fn new(config: &OptimizerSettings, step: u64, grad_norm: f64, learning_rate: f64) -> Self {
        let step = config.step(step, learning_rate);
        let clip = (f64::from(step.max_grad_norm) / (grad_norm + CLIP_EPSILON)).min(1.0) as f32;
        Self { clip, step }
    }

    /// Returns the largest value, and the largest moment or root of a moment of squares, of one parameter after the step.
    fn look(&self, values: &[f32], gradient: &[f32], moments: &Moments) -> (Largest, Largest) {
        let MomentValues::Single(slots) = &moments.values else {
            let (mut values, mut moments) = (values.to_vec(), moments.clone());
            self.apply(&mut values, gradient, &mut moments);
            return (Largest::of(&values), moments.largest());
        };
        let decays = moments.decays();
        let largest = (0..values.len().div_ceil(CHUNK)).into_par_iter().map(|chunk| {
            let chunk = chunk * CHUNK..((chunk + 1) * CHUNK).min(values.len());
            let mut values = values[chunk.clone()].to_vec();
            let mut slots: Vec<Vec<f32>> = slots.iter().map(|slot| slot[chunk.clone()].to_vec()).collect();
            self.update(decays, &mut values, &gradient[chunk], slots.iter_mut().map(|slot| &mut slot[..]).collect());
            (Largest::of(&values), Largest::of_slots(moments.rule, slots.iter().map(|slot| &slot[..])))
        });
        largest.reduce(Default::default, |a, b| (a.0.max(b.0), a.1.max(b.1)))
    }

    /// Updates the values and moments of one parameter.
    fn apply(&self, values: &mut [f32], gradient: &[f32], moments: &mut Moments) {
        let (decays, columns) = (moments.decays(), moments.shape.last().copied().unwrap_or(1));
        match &mut moments.values {
            MomentValues::Single(slots) => {
                let slots = chunks(slots.iter_mut().map(|slot| &mut Arc::make_mut(slot)[..]), CHUNK);
                let of_values = values.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK));
                of_values.zip(slots).for_each(|((values, gradient), slots)| {
                    self.update(decays, values, gradient, slots);
                });
            }
            MomentValues::OfTensors(tensors) => {
                for tensor in Arc::make_mut(tensors) {
                    tensor.apply(self, decays, values, gradient, columns);
                }
            }
        }
    }

    /// Updates contiguous values and moments.
    fn update(&self, decays: bool, values: &mut [f32], gradient: &[f32], mut slots: Vec<&mut [f32]>) {
        self.step.update(decays, self.clip, values, gradient, &mut slots);
    }
}

/// Returns the chunks of `length` values of the slots: a slice of every slot for each chunk.
fn chunks<'a, T: 'a>(slots: impl Iterator<Item = &'a mut [T]>, length: usize) -> Vec<Vec<&'a mut [T]>> {
    let mut chunks: Vec<Vec<&mut [T]>> = Vec::new();
    for slot in slots {
        chunks.resize_with(slot.len().div_ceil(length), Vec::new);
        slot.chunks_mut(length).zip(&mut chunks).for_each(|(part, chunk)| chunk.push(part));
    }
    chunks
}

#[cfg(test)]
mod tests;
