//! AdamW with clipping by the norm of the whole gradient, as one program whose state stays on the device.

mod programs;

pub(crate) use programs::{Check, Numbers, StateValues, apply_module, update};

use crate::decoder::{Parameter, Split};
use crate::error::Result;
use crate::runtime::{Program, Runtime, read};
use crate::storage::Storage;
use crate::weights::DeviceWeights;
use pjrt::{Argument, Buffer};
use policy::{AdamWBounds, AdamWConfig};
use programs::{NUMBERS, drop_module, measure_module, numbers, zeros_module};
use stablehlo::Module;
use std::sync::Arc;

/// The optimizer programs for the trained parameters of a policy.
#[derive(Debug)]
pub(crate) struct AdamW {
    table: Vec<Parameter>,
    /// Storage of the model.
    storage: Storage,
    apply: Option<Arc<Program>>,
    apply_checked: Option<Arc<Program>>,
    measure: Option<Arc<Program>>,
    drop: Option<Arc<Program>>,
    zeros: Option<Arc<Program>>,
}

/// Exponential averages of gradients and of squared gradients, with one buffer per parameter.
#[derive(Clone, Debug)]
pub(crate) struct Moments {
    pub(crate) first: Vec<Arc<Buffer>>,
    pub(crate) second: Vec<Arc<Buffer>>,
    /// Upper bounds on moments and weights, if known.
    pub(crate) bounds: Option<AdamWBounds>,
}

/// The state that the optimizer updates.
pub(crate) struct State {
    /// One buffer per trained parameter, followed by its remainders, if any.
    parameters: Vec<Arc<Buffer>>,
    moments: Moments,
}

/// A state as arguments of a program that replaces it. Buffers without another owner are donated, and lost if the device fails; shared
/// buffers exist twice until their other owner drops them.
pub(crate) struct GivenState {
    owned: Vec<Option<Buffer>>,
    shared: Vec<Arc<Buffer>>,
    /// Number of buffers of the parameters and of each moment.
    counts: [usize; 2],
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
    /// Returns `true` if the state was updated.
    pub(crate) fn is_applied(&self) -> bool {
        self.within && self.finite && self.loss_is_finite
    }
}

/// Result of a dropped gradient.
#[derive(Debug)]
pub(crate) struct Dropped {
    pub(crate) grad_norm: f64,
    /// Zeroed accumulators.
    pub(crate) sums: Vec<Buffer>,
}

impl AdamW {
    /// Creates the optimizer of the parameters of `table`.
    pub(crate) fn new(table: Vec<Parameter>, storage: Storage) -> Self {
        Self { table, storage, apply: None, apply_checked: None, measure: None, drop: None, zeros: None }
    }

    /// Creates a buffer of zeros per parameter.
    pub(crate) fn zeros(&mut self, runtime: &Runtime) -> Result<Vec<Buffer>> {
        compiled(&mut self.zeros, runtime, || zeros_module(&self.table))?.run(vec![])
    }

    /// Creates moments of zero.
    pub(crate) fn fresh(&mut self, runtime: &Runtime) -> Result<Moments> {
        let mut zeros = || Ok::<_, crate::Error>(self.zeros(runtime)?.into_iter().map(Arc::new).collect());
        Ok(Moments { first: zeros()?, second: zeros()?, bounds: None })
    }

    /// Returns the scalars of step `step` (counted from 1) and, if possible, bounds on the state after it, valid for every finite gradient
    /// norm. `weights` are the trained weights. If a step can have bounds but the current ones are unknown, they are measured, which reads
    /// the state once.
    pub(crate) fn scalars(
        &mut self,
        runtime: &Runtime,
        config: &AdamWConfig,
        step: u64,
        learning_rate: f64,
        weights: &DeviceWeights,
        moments: &Moments,
    ) -> Result<Scalars> {
        let of_step = config.step(step, learning_rate);
        // A step without clipping has no bounds for any state.
        let can_be_known = AdamWBounds::of_largest(0.0).after(&of_step).is_some();
        let bounds = match moments.bounds {
            None if can_be_known => Some(self.measure(runtime, weights, moments)?),
            bounds => bounds,
        };
        let after = bounds.and_then(|bounds| bounds.after(&of_step));
        Ok(Scalars { numbers: runtime.upload(&numbers(&of_step), &[NUMBERS])?, after })
    }

    /// Measures the largest magnitudes of weights and moments.
    fn measure(&mut self, runtime: &Runtime, weights: &DeviceWeights, moments: &Moments) -> Result<AdamWBounds> {
        let program = compiled(&mut self.measure, runtime, || measure_module(&self.table, self.storage))?;
        let mut arguments = weights.arguments_with_remainders();
        arguments.extend(moments.first.iter().chain(&moments.second).map(|buffer| Argument::from(&**buffer)));
        let report = program.run_one(arguments)?;
        let [weights, moments] = read::<f32>(&report, "the largest weights and moments")?[..] else {
            unreachable!("the program returns two numbers")
        };
        Ok(AdamWBounds { weights: weights.into(), moments: moments.into() })
    }

    /// Prepares a step with these scalars, before any buffer is donated.
    pub(crate) fn prepare(&mut self, runtime: &Runtime, scalars: Scalars) -> Result<Prepared> {
        let (program, check) = match scalars.after {
            Some(_) => (&mut self.apply, Check::Bounds),
            None => (&mut self.apply_checked, Check::Results),
        };
        let module = || apply_module(&self.table, self.storage, check, &Split::default());
        Ok(Prepared { program: compiled(program, runtime, module)?, scalars })
    }

    /// Zeroes the accumulators.
    pub(crate) fn drop(&mut self, runtime: &Runtime, sums: Vec<Buffer>) -> Result<Dropped> {
        let program = compiled(&mut self.drop, runtime, || drop_module(&self.table))?;
        let mut outputs = program.run(sums.into_iter().map(Argument::from).collect())?;
        let norm: Vec<f32> = read(&outputs.split_off(outputs.len() - 1)[0], "the norm of the gradient")?;
        Ok(Dropped { grad_norm: norm[0].into(), sums: outputs })
    }
}

/// Returns the program in `place`; compiles it on first use.
fn compiled(
    place: &mut Option<Arc<Program>>,
    runtime: &Runtime,
    module: impl FnOnce() -> Result<Module>,
) -> Result<Arc<Program>> {
    match place {
        Some(program) => Ok(program.clone()),
        None => Ok(place.insert(Arc::new(runtime.compile(&module()?)?)).clone()),
    }
}

/// The scalars of a step on the device.
#[derive(Debug)]
pub(crate) struct Scalars {
    pub(crate) numbers: Buffer,
    /// Bounds of the next state, if known before the step.
    pub(crate) after: Option<AdamWBounds>,
}

/// An AdamW step, ready to run.
#[derive(Debug)]
pub(crate) struct Prepared {
    program: Arc<Program>,
    scalars: Scalars,
}

impl Prepared {
    /// Runs the step: returns the new state and zeroed accumulators. If the gradient is not applied, the state is unchanged.
    pub(crate) fn run(self, state: State, sums: Vec<Buffer>) -> Result<(State, (Vec<Buffer>, Applied))> {
        let mut given = state.give();
        let arguments = given.arguments().into_iter().chain(sums.into_iter().map(Argument::from));
        let arguments = arguments.chain([Argument::from(&self.scalars.numbers)]).collect();
        let mut outputs = self.program.run(arguments)?;
        let report: Vec<f32> = read(&outputs.split_off(outputs.len() - 1)[0], "the norm of the gradient")?;
        let sums = outputs.split_off(given.len());
        let [grad_norm, within, finite, of_checked @ ..] = &report[..] else {
            unreachable!("the report has three numbers at least")
        };
        let [within, finite] = [within, finite].map(|flag| *flag != 0.0);
        let applied = Applied { grad_norm: (*grad_norm).into(), within, finite, loss_is_finite: true };
        let bounds = match of_checked {
            [largest] if applied.is_applied() => Some(AdamWBounds::of_largest(f64::from(*largest))),
            // Bounds never shrink, so they also hold if the state is unchanged.
            _ => self.scalars.after,
        };
        Ok((given.replaced(outputs, bounds), (sums, applied)))
    }
}

impl Moments {
    /// Runs a step: `run` gets the frozen weights and the state, and returns the next state, which replaces that of `weights`. Buffers
    /// without another owner are donated: if the device fails, weights and moments are lost.
    pub(crate) fn step<T>(
        self,
        runtime: &Runtime,
        weights: &mut DeviceWeights,
        run: impl FnOnce(&DeviceWeights, State) -> Result<(State, T)>,
    ) -> Result<(Self, T)> {
        let mut frozen = weights.take();
        // Trained parameters come last.
        let trained = frozen.split_off(frozen.table().len() - self.first.len());
        let (table, storage) = (trained.table().to_vec(), trained.storage());
        let (state, result) = run(&frozen, State { parameters: trained.into_buffers(), moments: self })?;
        let trained = DeviceWeights::of_buffers(runtime, table, storage, state.parameters);
        *weights = frozen.followed_by(trained);
        Ok((state.moments, result))
    }
}

impl State {
    /// Converts the state to arguments of a program that replaces it.
    pub(crate) fn give(self) -> GivenState {
        let State { parameters, moments: Moments { first, second, .. } } = self;
        let counts = [parameters.len(), first.len()];
        let mut shared = Vec::new();
        let owned = parameters.into_iter().chain(first).chain(second).map(|buffer| match Arc::try_unwrap(buffer) {
            Ok(buffer) => Some(buffer),
            Err(buffer) => {
                shared.push(buffer);
                None
            }
        });
        GivenState { owned: owned.collect(), shared, counts }
    }
}

impl GivenState {
    /// Returns the number of buffers.
    pub(crate) fn len(&self) -> usize {
        self.owned.len()
    }

    /// Returns the buffers: parameters, each followed by its remainders, then first and second moments. Donated buffers are returned only
    /// once.
    pub(crate) fn arguments(&mut self) -> Vec<Argument<'_>> {
        let Self { owned, shared, .. } = self;
        let mut shared = shared.iter();
        let argument = |buffer: &mut Option<Buffer>| match buffer.take() {
            Some(buffer) => Argument::Donated(buffer),
            None => Argument::Borrowed(shared.next().expect("one for each that is not owned")),
        };
        owned.iter_mut().map(argument).collect()
    }

    /// Builds the next state from a program's results in the same order.
    pub(crate) fn replaced(self, buffers: Vec<Buffer>, bounds: Option<AdamWBounds>) -> State {
        let [parameters, count] = self.counts;
        let mut buffers = buffers.into_iter().map(Arc::new);
        let mut take = |count| buffers.by_ref().take(count).collect();
        State { parameters: take(parameters), moments: Moments { first: take(count), second: take(count), bounds } }
    }
}
