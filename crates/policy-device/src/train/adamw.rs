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

/// The programs of the optimizer for the parameters of a policy that are trained.
#[derive(Debug)]
pub(crate) struct AdamW {
    table: Vec<Parameter>,
    /// How the model lies.
    storage: Storage,
    apply: Option<Arc<Program>>,
    apply_checked: Option<Arc<Program>>,
    measure: Option<Arc<Program>>,
    drop: Option<Arc<Program>>,
    zeros: Option<Arc<Program>>,
}

/// Exponential averages of gradients and of their squares, each with a buffer per parameter.
#[derive(Clone, Debug)]
pub(crate) struct Moments {
    pub(crate) first: Vec<Arc<Buffer>>,
    pub(crate) second: Vec<Arc<Buffer>>,
    /// How large their numbers and those of the weights are, where that is known.
    pub(crate) bounds: Option<AdamWBounds>,
}

/// What the optimizer changes.
pub(crate) struct State {
    /// A buffer per parameter that is trained, and behind it that of its remainders where it has some.
    parameters: Vec<Arc<Buffer>>,
    moments: Moments,
}

/// A state on its way into a program that replaces it. Buffers that nobody else holds are donated, and gone when the device fails; of the
/// others there are two until they are dropped.
pub(crate) struct GivenState {
    owned: Vec<Option<Buffer>>,
    shared: Vec<Arc<Buffer>>,
    /// The numbers of buffers of the parameters and of a moment.
    counts: [usize; 2],
}

/// What became of a gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Applied {
    /// The 2-norm of the gradient before clipping.
    pub(crate) grad_norm: f64,
    /// The norm is a number and at most the limit.
    pub(crate) within: bool,
    /// Parameters and moments after the update are finite.
    pub(crate) finite: bool,
    /// The loss and what it was made of are finite, as far as the program looks at them.
    pub(crate) loss_is_finite: bool,
}

impl Applied {
    /// Whether the state is a new one.
    pub(crate) fn is_applied(&self) -> bool {
        self.within && self.finite && self.loss_is_finite
    }
}

/// A gradient that is no longer there.
#[derive(Debug)]
pub(crate) struct Dropped {
    pub(crate) grad_norm: f64,
    /// Sums of zero.
    pub(crate) sums: Vec<Buffer>,
}

impl AdamW {
    /// The optimizer of the parameters of `table`, of a model that lies like this.
    pub(crate) fn new(table: Vec<Parameter>, storage: Storage) -> Self {
        Self { table, storage, apply: None, apply_checked: None, measure: None, drop: None, zeros: None }
    }

    /// A buffer of zeros per parameter.
    pub(crate) fn zeros(&mut self, runtime: &Runtime) -> Result<Vec<Buffer>> {
        compiled(&mut self.zeros, runtime, || zeros_module(&self.table))?.run(vec![])
    }

    /// Moments of zero.
    pub(crate) fn fresh(&mut self, runtime: &Runtime) -> Result<Moments> {
        let mut zeros = || Ok::<_, crate::Error>(self.zeros(runtime)?.into_iter().map(Arc::new).collect());
        Ok(Moments { first: zeros()?, second: zeros()?, bounds: None })
    }

    /// The scalars of step `step` (1 for the first one) of `weights`, those that are trained, and their moments, and what its numbers stay
    /// within if the norm of the gradient is finite, where that is known: bounds that a step needs and nobody has carried along are measured,
    /// which reads the state once.
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
        // Of a step that is not clipped nothing is known whatever the state is.
        let can_be_known = AdamWBounds::of_largest(0.0).after(&of_step).is_some();
        let bounds = match moments.bounds {
            None if can_be_known => Some(self.measure(runtime, weights, moments)?),
            bounds => bounds,
        };
        let after = bounds.and_then(|bounds| bounds.after(&of_step));
        Ok(Scalars { numbers: runtime.upload(&numbers(&of_step), &[NUMBERS])?, after })
    }

    /// The largest magnitudes of weights and moments.
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

    /// A step with these scalars, ready to run: nothing is given away before.
    pub(crate) fn prepare(&mut self, runtime: &Runtime, scalars: Scalars) -> Result<Prepared> {
        let (program, check) = match scalars.after {
            Some(_) => (&mut self.apply, Check::Bounds),
            None => (&mut self.apply_checked, Check::Results),
        };
        let module = || apply_module(&self.table, self.storage, check, &Split::default());
        Ok(Prepared { program: compiled(program, runtime, module)?, scalars })
    }

    /// Sets `sums` to zero.
    pub(crate) fn drop(&mut self, runtime: &Runtime, sums: Vec<Buffer>) -> Result<Dropped> {
        let program = compiled(&mut self.drop, runtime, || drop_module(&self.table))?;
        let mut outputs = program.run(sums.into_iter().map(Argument::from).collect())?;
        let norm: Vec<f32> = read(&outputs.split_off(outputs.len() - 1)[0], "the norm of the gradient")?;
        Ok(Dropped { grad_norm: norm[0].into(), sums: outputs })
    }
}

/// The program in `place`, which is compiled when it is first asked for.
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
    /// The bounds of the next state, where they are known before it is.
    pub(crate) after: Option<AdamWBounds>,
}

/// A step of the optimizer.
#[derive(Debug)]
pub(crate) struct Prepared {
    program: Arc<Program>,
    scalars: Scalars,
}

impl Prepared {
    /// Takes the step: `state` and `sums` become the new state and sums of zero. Where the gradient is not applied, the state is that of
    /// before.
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
            // They are no smaller than those of before, should that be the state that is there.
            _ => self.scalars.after,
        };
        Ok((given.replaced(outputs, bounds), (sums, applied)))
    }
}

impl Moments {
    /// Takes a step by `run`, from the weights that are not trained and the state to the next state, which becomes that of `weights`. From
    /// here on the device owns what nobody else holds: weights and moments are gone when it fails.
    pub(crate) fn step<T>(
        self,
        runtime: &Runtime,
        weights: &mut DeviceWeights,
        run: impl FnOnce(&DeviceWeights, State) -> Result<(State, T)>,
    ) -> Result<(Self, T)> {
        let mut frozen = weights.take();
        // What is trained comes last.
        let trained = frozen.split_off(frozen.table().len() - self.first.len());
        let (table, storage) = (trained.table().to_vec(), trained.storage());
        let (state, result) = run(&frozen, State { parameters: trained.into_buffers(), moments: self })?;
        let trained = DeviceWeights::of_buffers(runtime, table, storage, state.parameters);
        *weights = frozen.followed_by(trained);
        Ok((state.moments, result))
    }
}

impl State {
    /// The state as arguments of a program that replaces it.
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
    /// The number of buffers.
    pub(crate) fn len(&self) -> usize {
        self.owned.len()
    }

    /// The buffers: parameters, each with its remainders behind it, first and second moments. Those that are donated are given once.
    pub(crate) fn arguments(&mut self) -> Vec<Argument<'_>> {
        let Self { owned, shared, .. } = self;
        let mut shared = shared.iter();
        let argument = |buffer: &mut Option<Buffer>| match buffer.take() {
            Some(buffer) => Argument::Donated(buffer),
            None => Argument::Borrowed(shared.next().expect("one for each that is not owned")),
        };
        owned.iter_mut().map(argument).collect()
    }

    /// The state in the place of this one, of buffers in the same order.
    pub(crate) fn replaced(self, buffers: Vec<Buffer>, bounds: Option<AdamWBounds>) -> State {
        let [parameters, count] = self.counts;
        let mut buffers = buffers.into_iter().map(Arc::new);
        let mut take = |count| buffers.by_ref().take(count).collect();
        State { parameters: take(parameters), moments: Moments { first: take(count), second: take(count), bounds } }
    }
}
