//! An optimizer with clipping by the norm of the whole gradient, as one program whose state stays on the device.

mod eight_bit;
mod element;
mod programs;

pub(crate) use programs::{Check, Numbers, StateValues, apply_module, update};

use crate::decoder::Parameter;
use crate::error::Result;
use crate::program::{Program, Programs};
use crate::runtime::Runtime;
use crate::storage::Storage;
use crate::weights::DeviceWeights;
use crate::{Argument, DeviceTensor};
use eight_bit::{MomentKind, MomentTensor};
use grpo_policy::{OptimizerBounds, OptimizerName, OptimizerSettings, Slot, TensorSink, TensorSource};
use programs::{drop_module, fresh_module, measure_module, moment_tensors, positions, zeros_module};
use std::sync::Arc;

/// The optimizer programs for the trained parameters of a policy.
#[derive(Debug)]
pub(crate) struct Optimizer {
    table: Vec<Parameter>,
    /// Storage of the model.
    storage: Storage,
    name: OptimizerName,
    programs: Programs<Key>,
}

/// Identifies a program of the optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Key {
    Apply(Check),
    Measure,
    Drop,
    Zeros,
    /// The moments before the first step.
    Fresh,
}

/// The state of the update rule, with one tensor per parameter and slot, or two for 8-bit moments.
#[derive(Clone, Debug)]
pub(crate) struct Moments {
    /// The number of trained parameters.
    pub(crate) parameters: usize,
    /// The tensors of each slot.
    pub(crate) slots: Vec<Vec<Arc<DeviceTensor>>>,
    /// Upper bounds on moments and weights, if known.
    pub(crate) bounds: Option<OptimizerBounds>,
}

/// The scalars of a step on the device.
#[derive(Debug)]
pub(crate) struct Scalars {
    pub(crate) numbers: DeviceTensor,
    /// Bounds of the next state, if known before the step.
    pub(crate) after: Option<OptimizerBounds>,
}

/// Result of a gradient's update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Applied {
    /// 2-norm of the gradient before clipping.
    pub(crate) grad_norm: f64,
    /// `true` if the norm is not NaN and at most the limit.
    pub(crate) within: bool,
    /// `true` if parameters and moments after the update are finite.
    pub(crate) finite: bool,
    /// `true` if the loss, and the scores that the program checks, are finite.
    pub(crate) loss_is_finite: bool,
}

impl Applied {
    /// Returns the result of a program with this report.
    pub(crate) fn of(report: &[f32], loss_is_finite: bool) -> Self {
        let [grad_norm, within, finite] = [0, 1, 2].map(|i| report.get(i).copied().unwrap_or(0.0));
        Self { grad_norm: grad_norm.into(), within: within != 0.0, finite: finite != 0.0, loss_is_finite }
    }

    /// Returns `true` if the state was updated.
    pub(crate) fn is_applied(&self) -> bool {
        self.within && self.finite && self.loss_is_finite
    }
}

impl Optimizer {
    /// Creates the optimizer of the parameters of `table`.
    pub(crate) fn new(table: Vec<Parameter>, storage: Storage, name: OptimizerName) -> Self {
        Self { table, storage, name, programs: Programs::new() }
    }

    /// Changes the optimizer; moments of another one do not fit.
    pub(crate) fn set_name(&mut self, name: OptimizerName) {
        if name != self.name {
            (self.name, self.programs) = (name, Programs::new());
        }
    }

    /// Returns the tensors of the slots at this position, each with its slot.
    fn tensors(&self, runtime: &Runtime, position: usize) -> Vec<(&'static Slot, MomentTensor)> {
        moment_tensors(&self.table, self.name, position, runtime.axis_rules())
    }

    /// Returns the program of `key`; compiles it on first use.
    fn program(&mut self, runtime: &Runtime, key: Key) -> Result<Arc<Program>> {
        let Self { table, storage, name, programs } = self;
        programs.get(runtime, key, |key| match *key {
            Key::Apply(check) => apply_module(table, *storage, *name, check, runtime.axis_rules()),
            Key::Measure => measure_module(table, *storage, *name, runtime.axis_rules()),
            Key::Fresh => fresh_module(table, *name, runtime.axis_rules()),
            Key::Drop => drop_module(table, runtime.axis_rules()),
            Key::Zeros => zeros_module(table, runtime.axis_rules()),
        })
    }

    /// Creates a tensor of zeros per parameter.
    pub(crate) fn zeros(&mut self, runtime: &Runtime) -> Result<Vec<DeviceTensor>> {
        self.program(runtime, Key::Zeros)?.run(vec![])
    }

    /// Creates moments of zero.
    pub(crate) fn fresh(&mut self, runtime: &Runtime) -> Result<Moments> {
        let mut tensors = self.program(runtime, Key::Fresh)?.run(vec![])?.into_iter().map(Arc::new);
        let lengths = positions(self.name).map(|position| self.tensors(runtime, position).len());
        let slots = lengths.map(|length| tensors.by_ref().take(length).collect()).collect();
        Ok(Moments { parameters: self.table.len(), slots, bounds: None })
    }

    /// Passes the moments to `sink`, one by one, with the names of [`grpo_policy::moment_tensors`].
    pub(crate) fn export(&self, runtime: &Runtime, moments: &Moments, sink: &mut dyn TensorSink) -> Result<()> {
        for (position, tensors) in moments.slots.iter().enumerate() {
            let all = self.tensors(runtime, position);
            for (prefix, kind) in groups(&all) {
                let of_group =
                    all.iter().zip(tensors).filter(|((slot, of), _)| of.kind == kind && of.kind.prefix(slot) == prefix);
                let (table, tensors): (Vec<_>, Vec<_>) =
                    of_group.map(|((_, of), tensor)| (of.parameter.clone(), Arc::clone(tensor))).unzip();
                let tensors = DeviceWeights::of_tensors(runtime, table, Storage::Plain(kind.dtype()), tensors);
                tensors.export_prefixed(prefix, sink)?;
            }
        }
        Ok(())
    }

    /// Uploads exported moments, whose names and shapes fit.
    pub(crate) fn import(&self, runtime: &Runtime, source: &dyn TensorSource) -> Result<Moments> {
        let of_position = |position: usize| -> Result<Vec<Arc<DeviceTensor>>> {
            let all = self.tensors(runtime, position);
            let mut of_groups = Vec::new();
            for (prefix, kind) in groups(&all) {
                let of_group = all.iter().filter(|(slot, of)| of.kind == kind && of.kind.prefix(slot) == prefix);
                let table = of_group.map(|(_, of)| of.parameter.clone()).collect();
                let tensors = DeviceWeights::from_source(runtime, table, Storage::Plain(kind.dtype()), prefix, source)?;
                of_groups.push((prefix, tensors.into_tensors().into_iter()));
            }
            let next = |(slot, of): &(&Slot, MomentTensor)| {
                let (_, tensors) = of_groups.iter_mut().find(|(prefix, _)| *prefix == of.kind.prefix(slot))?;
                tensors.next()
            };
            Ok(all.iter().filter_map(next).collect())
        };
        let slots = positions(self.name).map(of_position).collect::<Result<_>>()?;
        Ok(Moments { parameters: self.table.len(), slots, bounds: None })
    }

    /// Returns the scalars of step `step` (counted from 1) and, if possible, bounds on the state after it, valid for every finite gradient
    /// norm. `weights` are the trained weights. If a step can have bounds but the current ones are unknown, they are measured, which reads
    /// the state once.
    pub(crate) fn scalars(
        &mut self,
        runtime: &Runtime,
        config: &OptimizerSettings,
        step: u64,
        learning_rate: f64,
        weights: &DeviceWeights,
        moments: &Moments,
    ) -> Result<Scalars> {
        let of_step = config.step(step, learning_rate);
        // A step without clipping has no bounds for any state.
        let can_be_known = OptimizerBounds::of_largest(0.0).after(&of_step).is_some();
        let bounds = match moments.bounds {
            None if can_be_known => Some(self.measure(runtime, weights, moments)?),
            bounds => bounds,
        };
        let after = bounds.and_then(|bounds| bounds.after(&of_step));
        let numbers = of_step.to_list();
        Ok(Scalars { numbers: runtime.upload(&numbers, &[numbers.len()])?, after })
    }

    /// Measures the largest magnitudes of weights and moments.
    fn measure(&mut self, runtime: &Runtime, weights: &DeviceWeights, moments: &Moments) -> Result<OptimizerBounds> {
        let mut arguments = weights.arguments_with_remainders();
        arguments.extend(moments.slots.iter().flatten().map(|tensor| Argument::from(&**tensor)));
        let report = self.program(runtime, Key::Measure)?.run_one(arguments)?;
        let largest = report.read::<f32>("the largest weights and moments")?;
        let [weights, moments] = [0, 1].map(|i| largest.get(i).copied().unwrap_or(f32::INFINITY).into());
        Ok(OptimizerBounds { weights, moments })
    }

    /// Returns the program of a step with these scalars, before any tensor is donated.
    pub(crate) fn prepare(&mut self, runtime: &Runtime, scalars: &Scalars) -> Result<Arc<Program>> {
        let check = if scalars.after.is_some() { Check::Bounds } else { Check::Results };
        self.program(runtime, Key::Apply(check))
    }

    /// Zeroes the accumulators, and returns them after the 2-norm of the dropped gradient.
    pub(crate) fn drop(&mut self, runtime: &Runtime, sums: Vec<DeviceTensor>) -> Result<(f64, Vec<DeviceTensor>)> {
        let mut outputs = self.program(runtime, Key::Drop)?.run(sums.into_iter().map(Argument::from).collect())?;
        let norm: Vec<f32> = outputs.split_off(outputs.len() - 1)[0].read("the norm of the gradient")?;
        Ok((norm[0].into(), outputs))
    }
}

/// Returns the prefixes of the names of tensors, each with their kind, in the order of their first tensors.
fn groups(all: &[(&'static Slot, MomentTensor)]) -> Vec<(&'static str, MomentKind)> {
    let mut groups = Vec::new();
    for (slot, tensor) in all {
        let group = (tensor.kind.prefix(slot), tensor.kind);
        if !groups.contains(&group) {
            groups.push(group);
        }
    }
    groups
}

impl Moments {
    /// Takes the moments, or the `fresh` ones of a first step.
    pub(crate) fn taken(moments: &mut Option<Self>, fresh: Option<Self>) -> Self {
        moments.take().or(fresh).unwrap_or_else(|| unreachable!("a first step has fresh moments"))
    }

    /// Runs a step of the prepared `program` on the gradient in `sums`: replaces the trained ones of `weights`, and returns the next
    /// moments, the result, and zeroed accumulators. If the gradient is not applied, the state is unchanged.
    pub(crate) fn apply(
        self,
        weights: &mut DeviceWeights,
        program: &Program,
        scalars: &Scalars,
        sums: Vec<DeviceTensor>,
    ) -> Result<(Self, Applied, Vec<DeviceTensor>)> {
        let report_at = sums.len();
        let rest = sums.into_iter().map(Argument::from).chain([Argument::from(&scalars.numbers)]).collect();
        let (mut moments, report, sums) = self.step(weights, program, false, rest, report_at)?;
        let applied = Applied::of(&report, true);
        moments.bounds = match report[..] {
            [_, _, _, largest] if applied.is_applied() => Some(OptimizerBounds::of_largest(largest.into())),
            // Bounds never shrink, so they also hold if the state is unchanged.
            _ => scalars.after,
        };
        Ok((moments, applied, sums))
    }

    /// Runs a program that replaces the trained ones of `weights`, each followed by its remainders, if any, and the moments. Its arguments
    /// are the frozen weights if it `reads_frozen` ones, this state, and the `rest`. Returns the next moments, the program's report, which is
    /// at index `report_at` behind the state, and its other results.
    ///
    /// Tensors without another owner are donated: if the device fails, weights and moments are lost. Shared tensors exist twice until their
    /// other owner drops them.
    pub(crate) fn step(
        self,
        weights: &mut DeviceWeights,
        program: &Program,
        reads_frozen: bool,
        rest: Vec<Argument<'_>>,
        report_at: usize,
    ) -> Result<(Self, Vec<f32>, Vec<DeviceTensor>)> {
        let Self { parameters: count, slots, .. } = self;
        let mut frozen = weights.take();
        // Trained parameters come last.
        let mut trained = frozen.split_off(frozen.table().len() - count);
        let lengths: Vec<usize> = slots.iter().map(Vec::len).collect();
        let parameters = trained.take().into_tensors();
        let of_parameters = parameters.len();
        let state = parameters.into_iter().chain(slots.into_iter().flatten());
        let (owned, shared): (Vec<Option<DeviceTensor>>, Vec<Option<Arc<DeviceTensor>>>) = state
            .map(|tensor| match Arc::try_unwrap(tensor) {
                Ok(tensor) => (Some(tensor), None),
                Err(tensor) => (None, Some(tensor)),
            })
            .unzip();
        let state = owned
            .into_iter()
            .zip(&shared)
            .filter_map(|(owned, shared)| owned.map(Argument::Donated).or(shared.as_deref().map(Argument::Borrowed)));
        let mut arguments = if reads_frozen { frozen.arguments() } else { vec![] };
        arguments.extend(state);
        arguments.extend(rest);
        let mut outputs = program.run(arguments)?;
        let mut others = outputs.split_off(shared.len());
        let report = others.remove(report_at).read("the norm of the gradient")?;
        let mut outputs = outputs.into_iter().map(Arc::new);
        let trained = trained.with_tensors(outputs.by_ref().take(of_parameters));
        *weights = frozen.followed_by(trained);
        let slots = lengths.into_iter().map(|length| outputs.by_ref().take(length).collect()).collect();
        Ok((Self { parameters: count, slots, bounds: None }, report, others))
    }
}
