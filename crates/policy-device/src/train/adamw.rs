//! AdamW with clipping by the norm of the whole gradient, as one program whose state stays on the device.

use crate::decoder::{Parameter, Split, zeros};
use crate::error::Result;
use crate::runtime::{Program, Runtime, finish, read};
use crate::storage::Storage;
use pjrt::{Argument, Buffer};
use policy::{AdamWBounds, AdamWConfig, AdamWStep, CLIP_EPSILON};
use stablehlo::{Builder, Dtype, Module, Reducer, TensorType, Value};
use std::sync::Arc;

/// The scalars of a step, in the order in which the program takes them: f32 `[NUMBERS]`.
const NUMBERS: usize = 8;

/// The programs of the optimizer for the parameters of a policy that are trained.
#[derive(Debug)]
pub(crate) struct AdamW {
    table: Vec<Parameter>,
    /// How the model lies.
    storage: Storage,
    apply: Option<Arc<Program>>,
    apply_checked: Option<Arc<Program>>,
    drop: Option<Arc<Program>>,
    zeros: Option<Arc<Program>>,
}

/// What the optimizer changes.
#[derive(Clone, Debug)]
pub(crate) struct State {
    /// A buffer per parameter, and behind it that of its remainders where it has some.
    pub(crate) parameters: Vec<Arc<Buffer>>,
    /// Exponential averages of gradients and of their squares, each with a buffer per parameter.
    pub(crate) first: Vec<Arc<Buffer>>,
    pub(crate) second: Vec<Arc<Buffer>>,
    /// How large their numbers are, where that is known.
    pub(crate) bounds: Option<AdamWBounds>,
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
}

/// A gradient that is no longer there.
#[derive(Debug)]
pub(crate) struct Dropped {
    pub(crate) grad_norm: f64,
    /// Sums of zero.
    pub(crate) sums: Vec<Buffer>,
}

/// The scalars of a step, as values.
struct Numbers {
    beta1: Value,
    beta2: Value,
    /// The learning rate over the first moment's bias correction.
    rate: Value,
    /// The root of the second moment's bias correction.
    root: Value,
    epsilon: Value,
    /// The factor of weights that decay.
    decay: Value,
    max_grad_norm: Value,
    /// The largest norm of a gradient that is applied.
    limit: Value,
}

impl AdamW {
    /// The optimizer of the parameters of `table`, of a model that lies like this.
    pub(crate) fn new(table: Vec<Parameter>, storage: Storage) -> Self {
        Self { table, storage, apply: None, apply_checked: None, drop: None, zeros: None }
    }

    /// The number of parameters.
    pub(crate) fn parameters(&self) -> usize {
        self.table.len()
    }

    /// A buffer of zeros per parameter.
    pub(crate) fn zeros(&mut self, runtime: &Runtime) -> Result<Vec<Buffer>> {
        if self.zeros.is_none() {
            self.zeros = Some(Arc::new(runtime.compile(&zeros_module(&self.table)?)?));
        }
        match &self.zeros {
            Some(program) => program.run(vec![]),
            None => unreachable!("compiled above"),
        }
    }

    /// Step `step` (1 for the first one) of a state with these bounds, ready to run: nothing is given away before.
    pub(crate) fn prepare(
        &mut self,
        runtime: &Runtime,
        config: &AdamWConfig,
        step: u64,
        learning_rate: f64,
        bounds: Option<AdamWBounds>,
    ) -> Result<Prepared> {
        let scalars = config.step(step, learning_rate);
        let after = bounds.and_then(|bounds| bounds.after(&scalars));
        let (program, check) = match after {
            Some(_) => (&mut self.apply, Check::Bounds),
            None => (&mut self.apply_checked, Check::Results),
        };
        let program = match program {
            Some(program) => program.clone(),
            None => {
                let compiled =
                    Arc::new(runtime.compile(&apply_module(&self.table, self.storage, check, &Split::default())?)?);
                program.insert(compiled).clone()
            }
        };
        Ok(Prepared { program, numbers: runtime.upload(&numbers(&scalars), &[NUMBERS])?, after })
    }

    /// Sets `sums` to zero.
    pub(crate) fn drop(&mut self, runtime: &Runtime, sums: Vec<Buffer>) -> Result<Dropped> {
        if self.drop.is_none() {
            self.drop = Some(Arc::new(runtime.compile(&drop_module(&self.table)?)?));
        }
        let Some(program) = &self.drop else { unreachable!("compiled above") };
        let mut outputs = program.run(sums.into_iter().map(Argument::from).collect())?;
        let norm: Vec<f32> = read(&outputs.split_off(outputs.len() - 1)[0], "the norm of the gradient")?;
        Ok(Dropped { grad_norm: norm[0].into(), sums: outputs })
    }
}

/// A step of the optimizer.
#[derive(Debug)]
pub(crate) struct Prepared {
    program: Arc<Program>,
    numbers: Buffer,
    /// The bounds of the next state, where they are known before it is.
    after: Option<AdamWBounds>,
}

impl Prepared {
    /// Takes the step: `state` and `sums` become the new state and sums of zero. Where the gradient is not applied, the state is that of
    /// before.
    ///
    /// Buffers that nobody else holds are donated, and gone when the device fails; of the others there are two until they are dropped.
    pub(crate) fn run(self, state: State, sums: Vec<Buffer>) -> Result<(State, Vec<Buffer>, Applied)> {
        let State { parameters, first, second, .. } = state;
        let (buffers, count) = (parameters.len(), first.len());
        let owned: Vec<Result<Buffer, Arc<Buffer>>> =
            parameters.into_iter().chain(first).chain(second).map(Arc::try_unwrap).collect();
        let shared: Vec<Arc<Buffer>> = owned.iter().filter_map(|buffer| buffer.as_ref().err().cloned()).collect();
        let mut borrowed = shared.iter();
        let of_state = owned.into_iter().map(|buffer| match buffer {
            Ok(buffer) => Argument::Donated(buffer),
            Err(_) => Argument::Borrowed(borrowed.next().expect("one for each that is not owned")),
        });
        let sums = sums.into_iter().map(Argument::from);
        let arguments = of_state.chain(sums).chain([Argument::from(&self.numbers)]).collect();
        let mut outputs = self.program.run(arguments)?;
        let report: Vec<f32> = read(&outputs.split_off(outputs.len() - 1)[0], "the norm of the gradient")?;
        let sums = outputs.split_off(buffers + 2 * count);
        let mut outputs = outputs.into_iter().map(Arc::new);
        let mut take = |count| outputs.by_ref().take(count).collect();
        let (parameters, first, second) = (take(buffers), take(count), take(count));
        let [grad_norm, within, finite, of_checked @ ..] = &report[..] else {
            unreachable!("the report has three numbers at least")
        };
        let applied = Applied { grad_norm: (*grad_norm).into(), within: *within != 0.0, finite: *finite != 0.0 };
        let bounds = match of_checked {
            [largest] if applied.within && applied.finite => Some(AdamWBounds::of_largest(f64::from(*largest))),
            // They are no smaller than those of before, should that be the state that is there.
            _ => self.after,
        };
        Ok((State { parameters, first, second, bounds }, sums, applied))
    }
}

/// How a step makes sure that what it writes is finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// It is known before, by [`AdamWBounds::after`], of a gradient whose norm is finite.
    Bounds,
    /// By looking at it before anything is written, which reads weights, moments and gradients once more.
    Results,
}

/// The scalars of a step in the program's order.
fn numbers(step: &AdamWStep) -> [f32; NUMBERS] {
    let &AdamWStep { beta1, beta2, rate, root, epsilon, decay, max_grad_norm, limit } = step;
    [beta1, beta2, rate, root, epsilon, decay, max_grad_norm, limit]
}

impl Numbers {
    fn argument(f: &Builder) -> Self {
        let all = f.argument("numbers", TensorType::new(Dtype::F32, [NUMBERS]));
        let number = |i: usize| all.slice(&[i], &[i + 1]).reshape(&[]);
        Self {
            beta1: number(0),
            beta2: number(1),
            rate: number(2),
            root: number(3),
            epsilon: number(4),
            decay: number(5),
            max_grad_norm: number(6),
            limit: number(7),
        }
    }

    /// A parameter and its moments after the step, given them, the gradient and the factor that clips it.
    fn next(&self, decays: bool, clip: &Value, [value, first, second, gradient]: [&Value; 4]) -> [Value; 3] {
        let wide = |scalar: &Value| scalar.broadcast_in_dim(value.shape(), &[]);
        let one = self.beta1.like(1.0);
        let g = gradient * wide(clip);
        let first = wide(&self.beta1) * first + wide(&(&one - &self.beta1)) * &g;
        let second = wide(&self.beta2) * second + wide(&(&one - &self.beta2)) * &g * &g;
        let kept = if decays { value * wide(&self.decay) } else { value.clone() };
        let size = second.sqrt() / wide(&self.root) + wide(&self.epsilon);
        [kept - wide(&self.rate) * &first / size, first, second]
    }
}

/// The program of a step for parameters of a model that lies like this. Arguments, all donated but the last: parameters, each with its
/// remainders behind it where it has some, first and second moments, sums of gradients, and the scalars. Results: the same without the
/// scalars, and the norm of the gradient, whether it is within its limit and whether what comes of it is finite (0 or 1), f32 `[3]`; with
/// [`Check::Results`] `[4]`, the last one being the largest magnitude of a weight, a first moment or the root of a second one, infinite
/// where one is not finite. All but the scalars and the report are split as `split` says of parameters.
///
/// The step itself is made in f32, whatever the parameters are stored as.
pub(crate) fn apply_module(table: &[Parameter], storage: Storage, check: Check, split: &Split) -> Result<Module> {
    let f = Builder::new();
    let stored: Vec<Storage> = table.iter().map(|parameter| storage.of(parameter)).collect();
    let parameters = stored.iter().zip(table);
    let parameters: Vec<Vec<Value>> = parameters.map(|(of, p)| of.declare(&f, p.name(), &p.shape)).collect();
    let group = |suffix: &str| -> Vec<Value> { declare(&f, table, suffix) };
    let (first, second, sums) = (group(".exp_avg"), group(".exp_avg_sq"), group(".sum"));
    let of_parameters = parameters.iter().zip(table).flat_map(|(parts, p)| parts.iter().map(move |part| (part, p)));
    let of_state = [&first, &second, &sums].into_iter().flat_map(|group| group.iter().zip(table));
    for (i, (argument, parameter)) in of_parameters.chain(of_state).enumerate() {
        f.alias(argument, i);
        split.argument(argument, &parameter.axes);
        split.result(&f, i, &parameter.axes);
    }
    let numbers = Numbers::argument(&f);
    let norm = norm(&f, &sums);
    // NaN is within nothing.
    let within = norm.le(&numbers.limit);
    let clip = &numbers.max_grad_norm / (&norm + norm.like(CLIP_EPSILON));
    let clip = clip.min(&clip.like(1.0));

    // Looked at before anything is written: there is nothing to undo. Behind the barrier, so that what is looked at is not kept until it
    // is written.
    let mut largest = f.scalar(0.0, Dtype::F32);
    for (i, parameter) in table.iter().enumerate().filter(|_| check == Check::Results) {
        let before: Vec<&Value> = parameters[i].iter().chain([&first[i], &second[i], &sums[i]]).collect();
        let mut before = f.optimization_barrier(&before);
        let rest = before.split_off(parameters[i].len());
        let value = stored[i].get(&before);
        let [value, first, second] = numbers.next(decays(parameter), &clip, [&value, &rest[0], &rest[1], &rest[2]]);
        let finite = stored[i].finite(&value) & first.is_finite() & second.is_finite();
        let size = value.abs().max(&first.abs()).max(&second.sqrt());
        // One number of each, for one pass over all of them.
        let size = finite.select(&size, &size.like(f64::INFINITY));
        largest = largest.max(&size.reduce(Reducer::Max, &(0..size.shape().len()).collect::<Vec<_>>()));
    }
    let finite = largest.is_finite();
    let mut applies = &within & &finite;
    let mut results: [Vec<Value>; 3] = Default::default();
    for (i, parameter) in table.iter().enumerate() {
        let value = stored[i].get(&parameters[i]);
        let next = numbers.next(decays(parameter), &clip, [&value, &first[i], &second[i], &sums[i]]);
        let chosen = |next: &Value, old: &Value| applies.broadcast_in_dim(old.shape(), &[]).select(next, old);
        results[1].push(chosen(&next[1], &first[i]));
        results[2].push(chosen(&next[2], &second[i]));
        // Two barriers for libtpu: without this one it makes moments apart from weights, and reads everything twice. A weight that is
        // put together and taken apart again is what it was.
        let value = f.optimization_barrier(&[&chosen(&next[0], &value)]).swap_remove(0);
        let parts = stored[i].put(&value);
        // Without this one it makes the weights of several tensors in f32 before it takes the first of them apart.
        let before_next: Vec<&Value> = std::iter::once(&applies).chain(&parts).collect();
        applies = f.optimization_barrier(&before_next).swap_remove(0);
        results[0].extend(parts);
    }
    let none: Vec<Value> = sums.iter().map(|sum| zeros(&f, Dtype::F32, sum.shape())).collect();
    let flag = |predicate: &Value| predicate.convert(Dtype::F32).reshape(&[1]);
    let mut report = vec![norm.reshape(&[1]), flag(&within), flag(&finite)];
    if check == Check::Results {
        report.push(largest.reshape(&[1]));
    }
    let report = f.concatenate(&report.iter().collect::<Vec<_>>(), 0);
    let named = results.iter().flatten().chain(&none).map(|value| ("", value));
    let named: Vec<(&str, &Value)> = named.chain([("report", &report)]).collect();
    Ok(split.complete(finish(f.clone(), "adamw", &named)?))
}

/// The program that gives up a gradient: sums, which are donated, to zeros and the norm `[1]`.
fn drop_module(table: &[Parameter]) -> Result<Module> {
    let f = Builder::new();
    let sums = declare(&f, table, ".sum");
    sums.iter().enumerate().for_each(|(i, sum)| f.alias(sum, i));
    let norm = norm(&f, &sums).reshape(&[1]);
    let none: Vec<Value> = sums.iter().map(|sum| zeros(&f, Dtype::F32, sum.shape())).collect();
    let results: Vec<(&str, &Value)> = none.iter().map(|value| ("", value)).chain([("norm", &norm)]).collect();
    finish(f.clone(), "drop_gradient", &results)
}

/// The program that makes zeros for every parameter.
fn zeros_module(table: &[Parameter]) -> Result<Module> {
    let f = Builder::new();
    let all: Vec<Value> = table.iter().map(|parameter| zeros(&f, Dtype::F32, &parameter.shape)).collect();
    let results: Vec<(&str, &Value)> = table.iter().map(Parameter::name).zip(&all).collect();
    finish(f.clone(), "zeros", &results)
}

/// Declares an argument per parameter.
fn declare(f: &Builder, table: &[Parameter], suffix: &str) -> Vec<Value> {
    let argument =
        |p: &Parameter| f.argument(&format!("{}{suffix}", p.name()), TensorType::new(Dtype::F32, &p.shape[..]));
    table.iter().map(argument).collect()
}

/// Whether weight decay acts on a parameter: not on norms and biases.
fn decays(parameter: &Parameter) -> bool {
    parameter.has_matrices()
}

/// The 2-norm of all tensors together, an f32 scalar. Sums of rows are added up in f64.
fn norm(f: &Builder, tensors: &[Value]) -> Value {
    let mut total = f.scalar(0.0, Dtype::F64);
    for tensor in tensors {
        let last = tensor.shape().len() - 1;
        let of_rows = (tensor * tensor).reduce(Reducer::Add, &[last]).convert(Dtype::F64);
        let rest: Vec<usize> = (0..last).collect();
        total = total + if rest.is_empty() { of_rows } else { of_rows.reduce(Reducer::Add, &rest) };
    }
    total.convert(Dtype::F32).sqrt()
}
