//! An optimizer as operations and programs: the step, its state, and other programs on gradients.

use super::eight_bit::{MomentFormat, MomentKind, MomentTensor};
use super::element::Element;
use crate::decoder::{Axis, Parameter, zeros};
use crate::error::Result;
use crate::modules::unnamed;
use crate::sharding::AxisRules;
use crate::storage::Storage;
use grpo_policy::{CLIP_EPSILON, OptimizerName, OptimizerStep, Rule, Slot};
use grpo_stablehlo::{Builder, Dtype, Module, Reducer, TensorType, Value};
use std::ops::Range;

/// The scalars of a step, as values of a program.
pub(crate) struct Numbers(OptimizerStep<Element>);

/// How a step ensures that its results are finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Check {
    /// [`grpo_policy::OptimizerBounds::after`] has proved it for every finite gradient norm.
    Bounds,
    /// The program computes the results and checks them before it writes, which reads weights, moments and gradients twice.
    Results,
}

impl Numbers {
    /// Declares the scalars of a step of `optimizer` as the next argument.
    pub(crate) fn argument(f: &Builder, optimizer: OptimizerName) -> Self {
        let count = OptimizerStep::<Element>::count(optimizer);
        let all = f.argument("numbers", TensorType::new(Dtype::F32, [count]));
        let scalar = |i: usize| Element(all.slice(&[i], &[i + 1]).reshape(&[]));
        Self(OptimizerStep::of_list(optimizer, (0..count).map(scalar).collect()))
    }

    /// Returns a parameter and its moments after the step, given the old ones, the gradient and the clip factor.
    fn next(
        &self,
        rule: Rule,
        decays: bool,
        clip: &Value,
        value: &Value,
        moments: &[Value],
        gradient: &Value,
    ) -> (Value, Vec<Value>) {
        let gradient = Element(gradient.clone()) * Element(clip.clone());
        if let (true, [buffer]) = (rule.is_of_matrices(), moments) {
            let (value, buffer) = self.0.next_matrices(Element(value.clone()), gradient, Element(buffer.clone()));
            return (value.0, vec![buffer.0]);
        }
        let moments = moments.iter().cloned().map(Element).collect();
        let (value, moments) = self.0.next(decays, Element(value.clone()), gradient, moments);
        (value.0, moments.into_iter().map(|moment| moment.0).collect())
    }
}

/// The optimizer state, as values of a program.
pub(crate) struct StateValues {
    /// The stored values of each parameter.
    pub(crate) parameters: Vec<Vec<Value>>,
    /// The rule of each parameter.
    rules: Vec<Rule>,
    /// The tensors of the first, second, ... slot of each parameter; none if its rule has fewer slots.
    moments: Vec<Vec<Vec<Value>>>,
    /// Storage of each parameter.
    stored: Vec<Storage>,
    /// Format of the moments of each parameter.
    formats: Vec<MomentFormat>,
}

impl StateValues {
    /// Declares the state of the parameters of `table` as the next arguments, aliased to the program's first results. `storage` is the
    /// storage of the model; arguments and results are sharded like the parameters.
    pub(crate) fn declare(
        f: &Builder,
        table: &[Parameter],
        storage: Storage,
        optimizer: OptimizerName,
        axis_rules: &AxisRules,
    ) -> Self {
        let state = Self::read(f, table, storage, optimizer, axis_rules);
        for (i, (argument, axes)) in state.with_axes(table).into_iter().enumerate() {
            f.alias(argument, i);
            axis_rules.result(f, i, &axes);
        }
        state
    }

    /// Declares the state as read-only arguments, sharded like the parameters.
    fn read(
        f: &Builder,
        table: &[Parameter],
        storage: Storage,
        optimizer: OptimizerName,
        axis_rules: &AxisRules,
    ) -> Self {
        let stored: Vec<Storage> = table.iter().map(|parameter| storage.of(parameter)).collect();
        let formats: Vec<_> =
            table.iter().map(|parameter| MomentFormat::of(parameter, optimizer, axis_rules)).collect();
        let parameters = stored.iter().zip(table).map(|(of, p)| of.declare(f, p.name(), &p.shape)).collect();
        let rules: Vec<Rule> = table.iter().map(|parameter| rule_of(parameter, optimizer)).collect();
        let moments = positions(optimizer).map(|position| {
            let of_parameter = |((format, rule), parameter): ((&MomentFormat, &Rule), &Parameter)| {
                let Some(slot) = rule.slots().get(position) else { return vec![] };
                let declared = format.tensors(parameter).into_iter().map(|MomentTensor { parameter, kind }| {
                    let suffix = kind.prefix(slot).trim_end_matches('.');
                    let ty = TensorType::new(kind.dtype(), &parameter.shape[..]);
                    f.argument(&format!("{}.{suffix}", parameter.name()), ty)
                });
                declared.collect()
            };
            formats.iter().zip(&rules).zip(table).map(of_parameter).collect()
        });
        let moments = moments.collect();
        let state = Self { parameters, rules, moments, stored, formats };
        state.with_axes(table).iter().for_each(|(argument, axes)| axis_rules.argument(argument, axes));
        state
    }

    /// Returns all values with their logical axes, in the order of arguments and results.
    fn with_axes(&self, table: &[Parameter]) -> Vec<(&Value, Vec<Axis>)> {
        let of_parameters = self.parameters.iter().zip(table);
        let of_parameters = of_parameters.flat_map(|(parts, p)| parts.iter().map(|value| (value, p.axes.clone())));
        let of_moments = self.moments.iter().flat_map(|moment| {
            let of_parameters = moment.iter().zip(self.formats.iter().zip(table));
            of_parameters.flat_map(|(values, (format, parameter))| {
                values.iter().zip(format.tensors(parameter).into_iter().map(|tensor| tensor.parameter.axes))
            })
        });
        of_parameters.chain(of_moments).collect()
    }

    /// Iterates over all values in the order of arguments and results.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Value> {
        self.parameters.iter().chain(self.moments.iter().flatten()).flatten()
    }

    fn parameter(&self, i: usize) -> Value {
        self.stored[i].get(&self.parameters[i])
    }

    /// Returns the f32 moments of a parameter from the tensors of each.
    fn moments<'a>(&self, i: usize, tensors: impl Iterator<Item = &'a [Value]>) -> Vec<Value> {
        let slots = self.rules[i].slots().iter().zip(tensors);
        slots.map(|(slot, tensors)| self.formats[i].get(slot.book, tensors)).collect()
    }
}

/// Returns the rule of a parameter, which all tensors of a stack share.
pub(super) fn rule_of(parameter: &Parameter, optimizer: OptimizerName) -> Rule {
    let name = parameter.tensors().next().map(|(_, name)| name).unwrap_or_default();
    Rule::of(optimizer, &name, &parameter.file_shape())
}

/// Returns the positions of slots.
pub(super) fn positions(optimizer: OptimizerName) -> Range<usize> {
    0..Rule::of_optimizer(optimizer).iter().map(|rule| rule.slots().len()).max().unwrap_or_default()
}

/// Builds the program of a step. `storage` is the storage of the model. Arguments, all donated except the last: parameters, each followed
/// by its remainders, if any; first and second moments; gradient accumulators; scalars. Results: the same without the scalars, and a
/// report, f32 `[3]`: the gradient norm, whether it is within the limit, and whether the results are finite (0 or 1). With
/// [`Check::Results`], the report is `[4]`; its last number is the largest magnitude of all weights, first moments and roots of second
/// moments, infinite if one of them is not finite. All but the scalars and the report are sharded by `axis_rules`.
pub(crate) fn apply_module(
    table: &[Parameter],
    storage: Storage,
    optimizer: OptimizerName,
    check: Check,
    axis_rules: &AxisRules,
) -> Result<Module> {
    let f = Builder::new();
    let state = StateValues::declare(&f, table, storage, optimizer, axis_rules);
    let sums = declare_sums(&f, table, state.all().count(), axis_rules);
    let numbers = Numbers::argument(&f, optimizer);
    let (results, report) = update(&f, table, &state, &sums, &numbers, None, check);
    let none: Vec<Value> = sums.iter().map(|sum| zeros(&f, Dtype::F32, sum.shape())).collect();
    axis_rules.finish(f.clone(), "adamw", unnamed(results.iter().chain(&none)).chain([("report", &report)]))
}

/// Builds the operations of a step: returns the next state, in the order of [`StateValues::all`], and the report of [`apply_module`]. If
/// the predicate `allowed` is given, a false value leaves the state unchanged, and the report ends with it.
///
/// The step is computed in f32 for every storage.
pub(crate) fn update(
    f: &Builder,
    table: &[Parameter],
    state: &StateValues,
    sums: &[Value],
    numbers: &Numbers,
    allowed: Option<&Value>,
    check: Check,
) -> (Vec<Value>, Value) {
    let StateValues { parameters, rules, moments, stored, formats } = state;
    let (Element(max_grad_norm), Element(limit)) = (&numbers.0.max_grad_norm, &numbers.0.limit);
    let norm = norm(f, sums);
    // Comparisons with NaN are false.
    let within = norm.le(limit);
    let clip = max_grad_norm / (&norm + norm.like(CLIP_EPSILON));
    let clip = clip.min(&clip.like(1.0));

    // Check the results before the first write, so that there is nothing to undo. The barrier keeps compilers from storing the checked
    // values until they are written.
    let mut largest = f.scalar(0.0, Dtype::F32);
    for (i, parameter) in table.iter().enumerate().filter(|_| check == Check::Results) {
        let of_moments = moments.iter().map(|moment| &moment[i]);
        let before = parameters[i].iter().chain(of_moments.clone().flatten()).chain([&sums[i]]);
        let before = f.optimization_barrier(&before.collect::<Vec<_>>());
        let (parts, mut rest) = before.split_at(parameters[i].len());
        let mut before = Vec::new();
        for moment in of_moments {
            let (tensors, others) = rest.split_at(moment.len());
            before.push(tensors);
            rest = others;
        }
        let (value, before) = (stored[i].get(parts), state.moments(i, before.into_iter()));
        let (value, after) = numbers.next(rules[i], decays(parameter), &clip, &value, &before, &rest[0]);
        let mut finite = stored[i].finite(&value);
        let mut size = value.abs();
        for moment in &after {
            finite = finite & moment.is_finite();
        }
        for (slot, moment) in rules[i].slots().iter().zip(&after) {
            size = size.max(&if slot.is_squared { moment.sqrt() } else { moment.abs() });
        }
        // One reduction per parameter instead of three.
        let size = finite.select(&size, &size.like(f64::INFINITY));
        largest = largest.max(&size.reduce(Reducer::Max, &(0..size.shape().len()).collect::<Vec<_>>()));
    }
    let finite = largest.is_finite();
    let mut applies = &within & &finite;
    if let Some(allowed) = allowed {
        applies = applies & allowed;
    }
    let mut results: Vec<Vec<Value>> = vec![Vec::new(); 1 + moments.len()];
    for (i, parameter) in table.iter().enumerate() {
        let (value, before) = (state.parameter(i), state.moments(i, moments.iter().map(|moment| &moment[i][..])));
        let (next, after) = numbers.next(rules[i], decays(parameter), &clip, &value, &before, &sums[i]);
        let chosen = |next: &Value, old: &Value| applies.broadcast_in_dim(old.shape(), &[]).select(next, old);
        let slots = rules[i].slots().iter().zip(moments.iter().map(|moment| &moment[i]));
        for (moment, (slot, old)) in slots.enumerate() {
            let parts = formats[i].put(slot.book, &after[moment]);
            results[moment + 1].extend(parts.iter().zip(old).map(|(next, old)| chosen(next, old)));
        }
        // This barrier and the next one are for libtpu. Without this one, it computes moments and weights in separate passes and reads
        // everything twice. Splitting the joined value of an unchanged weight restores its parts exactly.
        let value = f.optimization_barrier(&[&chosen(&next, &value)]).swap_remove(0);
        let parts = stored[i].put(&value);
        // Without this one, it computes the f32 weights of several tensors before it splits the first.
        let before_next: Vec<&Value> = std::iter::once(&applies).chain(&parts).collect();
        applies = f.optimization_barrier(&before_next).swap_remove(0);
        results[0].extend(parts);
    }
    let flag = |predicate: &Value| predicate.convert(Dtype::F32).reshape(&[1]);
    let mut report = vec![norm.reshape(&[1]), flag(&within), flag(&finite)];
    if check == Check::Results {
        report.push(largest.reshape(&[1]));
    }
    report.extend(allowed.map(flag));
    let report = f.concatenate(&report.iter().collect::<Vec<_>>(), 0);
    (results.into_iter().flatten().collect(), report)
}

/// Builds the program that measures the largest magnitudes of a state. Arguments: as of [`apply_module`], without accumulators and
/// scalars. Result: f32 `[2]`, the largest weight, and the largest first moment or root of a second moment; infinite if one is not finite.
pub(super) fn measure_module(
    table: &[Parameter],
    storage: Storage,
    optimizer: OptimizerName,
    axis_rules: &AxisRules,
) -> Result<Module> {
    let f = Builder::new();
    let state = StateValues::read(&f, table, storage, optimizer, axis_rules);
    let [mut weights, mut moments] = [0, 1].map(|_| f.scalar(0.0, Dtype::F32));
    let largest = |size: Value| size.reduce(Reducer::Max, &(0..size.shape().len()).collect::<Vec<_>>());
    for i in 0..table.len() {
        let value = state.parameter(i);
        let size = state.stored[i].finite(&value).select(&value.abs(), &value.like(f64::INFINITY));
        weights = weights.max(&largest(size));
        let sizes = state.rules[i].slots().iter().zip(&state.moments).map(|(slot, moment)| {
            let size = state.formats[i].sizes(&moment[i]);
            if slot.is_squared { size.sqrt() } else { size.abs() }
        });
        let Some(size) = sizes.reduce(|a, b| a.max(&b)) else { continue };
        let size = size.is_finite().select(&size, &size.like(f64::INFINITY));
        moments = moments.max(&largest(size));
    }
    let report = f.concatenate(&[&weights.reshape(&[1]), &moments.reshape(&[1])], 0);
    axis_rules.finish(f.clone(), "measure", [("largest", &report)])
}

/// Builds the program that drops a gradient: donated accumulators to zeros and the norm `[1]`.
pub(super) fn drop_module(table: &[Parameter], axis_rules: &AxisRules) -> Result<Module> {
    let f = Builder::new();
    let sums = declare_sums(&f, table, 0, axis_rules);
    let norm = norm(&f, &sums).reshape(&[1]);
    let none: Vec<Value> = sums.iter().map(|sum| zeros(&f, Dtype::F32, sum.shape())).collect();
    axis_rules.finish(f.clone(), "drop_gradient", unnamed(&none).chain([("norm", &norm)]))
}

/// Builds the program that creates zeros for every parameter.
pub(super) fn zeros_module(table: &[Parameter], axis_rules: &AxisRules) -> Result<Module> {
    let f = Builder::new();
    table.iter().enumerate().for_each(|(i, parameter)| axis_rules.result(&f, i, &parameter.axes));
    let all: Vec<Value> = table.iter().map(|parameter| zeros(&f, Dtype::F32, &parameter.shape)).collect();
    axis_rules.finish(f.clone(), "zeros", table.iter().map(Parameter::name).zip(&all))
}

/// Builds the program that creates the moments before the first step: all of them of the first slot, then of the next.
pub(super) fn fresh_module(table: &[Parameter], optimizer: OptimizerName, axis_rules: &AxisRules) -> Result<Module> {
    let f = Builder::new();
    let all = positions(optimizer).flat_map(|position| moment_tensors(table, optimizer, position, axis_rules));
    let zeros = all.enumerate().map(|(i, (slot, MomentTensor { parameter, kind }))| {
        axis_rules.result(&f, i, &parameter.axes);
        let zeros = zeros(&f, kind.dtype(), &parameter.shape);
        if kind == MomentKind::Codes { zeros.like(i64::from(slot.book.zero())) } else { zeros }
    });
    axis_rules.finish(f.clone(), "moments", unnamed(&zeros.collect::<Vec<_>>()))
}

/// Returns the tensors of the slots at this position, in the order of the parameters that have one.
pub(super) fn moment_tensors(
    table: &[Parameter],
    optimizer: OptimizerName,
    position: usize,
    axis_rules: &AxisRules,
) -> Vec<(&'static Slot, MomentTensor)> {
    let of = |parameter: &Parameter| {
        let slot = rule_of(parameter, optimizer).slots().get(position)?;
        let tensors = MomentFormat::of(parameter, optimizer, axis_rules).tensors(parameter);
        Some(tensors.into_iter().map(move |tensor| (slot, tensor)))
    };
    table.iter().filter_map(of).flatten().collect()
}

/// Declares gradient accumulators as the next arguments, sharded like the parameters and aliased to the results from index `first` on.
fn declare_sums(f: &Builder, table: &[Parameter], first: usize, axis_rules: &AxisRules) -> Vec<Value> {
    let sum = |p: &Parameter| f.argument(&format!("{}.sum", p.name()), TensorType::new(Dtype::F32, &p.shape[..]));
    let sums: Vec<Value> = table.iter().map(sum).collect();
    for (i, (sum, parameter)) in sums.iter().zip(table).enumerate() {
        f.alias(sum, first + i);
        axis_rules.argument(sum, &parameter.axes);
        axis_rules.result(f, first + i, &parameter.axes);
    }
    sums
}

/// Returns `true` if weight decay applies to a parameter: not to norms and biases.
fn decays(parameter: &Parameter) -> bool {
    parameter.has_matrices()
}

/// Computes the 2-norm of all tensors together, an f32 scalar. Sums are hierarchical, over rows, then over the rows of a matrix, so each
/// f32 sum has few terms. Only the last sum is in f64, because TPU compilers generate five times the code for f64.
fn norm(f: &Builder, tensors: &[Value]) -> Value {
    let sums: Vec<Value> = tensors.iter().map(|tensor| sums_of_squares(f, tensor)).collect();
    let sums = f.concatenate(&sums.iter().collect::<Vec<_>>(), 0).convert(Dtype::F64);
    sums.reduce(Reducer::Add, &[0]).convert(Dtype::F32).sqrt()
}

/// Returns partial sums `[S]` of the squares of a tensor.
fn sums_of_squares(f: &Builder, tensor: &Value) -> Value {
    /// Group size of partial sums, for matrices with many rows, such as embeddings.
    const GROUP: usize = 128;
    let last = |value: &Value| value.shape().len() - 1;
    let mut sums = (tensor * tensor).reduce(Reducer::Add, &[last(tensor)]);
    while sums.shape().len() > 1 {
        // Without the barrier, compilers merge nested sums into one long sum.
        let apart = f.optimization_barrier(&[&sums]).swap_remove(0);
        sums = apart.reduce(Reducer::Add, &[last(&apart)]);
    }
    let count = sums.shape().iter().product::<usize>();
    if count <= GROUP {
        return sums.reshape(&[count]);
    }
    let groups = count.div_ceil(GROUP);
    let apart = f.optimization_barrier(&[&sums]).swap_remove(0);
    let padded = apart.pad(&f.scalar(0.0, Dtype::F32), &[0], &[groups * GROUP - count]);
    padded.reshape(&[groups, GROUP]).reduce(Reducer::Add, &[1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::parameters;
    use grpo_models::ModelConfig;
    use grpo_policy::OptimizerSettings;
    use grpo_stablehlo::Array;
    use grpo_testkit::optimizer_steps::OptimizerSteps;

    #[test]
    fn steps_match_torch() {
        let table = parameters(&ModelConfig::default());
        for case in OptimizerSteps::<OptimizerSettings>::all() {
            let settings = &case.settings;
            // A matrix or a vector of one layer.
            let shape = [&[1], &case.shape[..]].concat();
            let axes = [Axis::Layer, Axis::Mlp, Axis::Embed][..shape.len()].to_vec();
            let up_proj = table.iter().find(|parameter| parameter.name().contains("up_proj")).unwrap();
            let table = [up_proj.with_shape(shape.clone(), axes)];
            let (storage, check) = (Storage::Plain(Dtype::F32), Check::Results);
            let module = apply_module(&table, storage, settings.name, check, &AxisRules::default()).unwrap();
            let tensor = |values: &[f64]| Array::floats(Dtype::F32, shape.clone(), values.iter().copied()).unwrap();
            let slots = rule_of(&table[0], settings.name).slots();
            let mut tensors = vec![tensor(&case.weight)];
            tensors.extend(slots.iter().map(|_| tensor(&vec![0.0; case.weight.len()])));
            for (step, gradient) in (1..).zip(&case.gradients) {
                let numbers = settings.step(step, case.learning_rate).to_list();
                let numbers = Array::floats(Dtype::F32, [numbers.len()], numbers.iter().copied().map(f64::from));
                tensors.extend([tensor(gradient), numbers.unwrap()]);
                tensors = module.interpret(&tensors).unwrap();
                tensors.truncate(1 + slots.len());
                case.assert_weight(step as usize, &tensors[0].to_floats());
            }
            for (slot, found) in slots.iter().zip(&tensors[1..]) {
                case.assert_state(slot.single.trim_end_matches('.'), &found.to_floats());
            }
        }
    }

    #[test]
    fn measure_finds_the_largest_weight_and_moment() {
        let table = parameters(&ModelConfig { hidden_size: 8, intermediate_size: 8, ..ModelConfig::default() });
        let module =
            measure_module(&table, Storage::Plain(Dtype::F32), OptimizerName::AdamW, &AxisRules::default()).unwrap();
        let places = 3 * table.len();
        // One tensor has one element that differs from all others.
        let measured = |place: usize, number: f64| {
            let tensor = |i: usize| {
                let parameter = &table[i % table.len()];
                let mut numbers = vec![if i < 2 * table.len() { -0.25 } else { 0.01 }; parameter.count()];
                if i == place {
                    *numbers.last_mut().unwrap() = number;
                }
                Array::floats(Dtype::F32, parameter.shape.clone(), numbers).unwrap()
            };
            module.interpret(&(0..places).map(tensor).collect::<Vec<_>>()).unwrap()[0].to_floats()
        };
        assert_eq!(measured(places, 0.0), [0.25, 0.25]);
        for i in 0..table.len() {
            assert_eq!(measured(i, -3.0), [3.0, 0.25], "{}", table[i].name());
            assert_eq!(measured(table.len() + i, -3.0), [0.25, 3.0]);
            // Second moments count by their square roots.
            assert_eq!(measured(2 * table.len() + i, 16.0), [0.25, 4.0]);
        }
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert_eq!(measured(1, bad), [f64::INFINITY, 0.25]);
            assert_eq!(measured(table.len() + 2, bad), [0.25, f64::INFINITY]);
        }
    }
}
