//! Splits a function with its derivative into a forward and a backward pass, and selects the residuals.

use super::activity::Endpoints;
use crate::build::{Builder, Traced, Value};
use crate::error::Result;
use crate::graph::{Kind, Operation, Region, Save, Scan, ValueId};
use crate::types::TensorType;
use std::collections::HashSet;

/// The forward and backward passes of a function.
#[derive(Clone, Debug)]
pub(super) struct Derivative {
    /// Takes the arguments and returns the results, then the residuals.
    pub(super) forward: Traced,
    /// Takes the `arguments` that it reads, the residuals, the cotangents of results and the accumulators, and returns
    /// the cotangents of arguments in the dtype of the summation, added to their accumulators.
    pub(super) backward: Traced,
    /// The arguments that `backward` takes.
    pub(super) arguments: Vec<usize>,
}

/// The specification of a [`Derivative`].
pub(super) struct DerivativeSpec<'a> {
    pub(super) function: &'a Traced,
    /// The arguments and results of the derivative.
    pub(super) ends: Endpoints<'a>,
    pub(super) save: &'a Save,
    /// Arguments that wait for the cotangents behind a barrier, so that the recomputation cannot start earlier.
    pub(super) barred: &'a [usize],
    /// Arguments that are equal in all calls: values that depend only on these are recomputed, not saved.
    pub(super) invariant: &'a [usize],
    /// Arguments whose cotangents are added to accumulators, in the order of `ends.with_respect_to`, and the types of the
    /// accumulators.
    pub(super) accumulated: &'a [(usize, TensorType)],
}

impl Derivative {
    pub(super) fn of(spec: &DerivativeSpec<'_>) -> Result<Self> {
        let body = &spec.function.function().body;
        let joint = Builder::new();
        let types = spec.function.argument_types();
        let arguments: Vec<Value> = types.iter().map(|ty| joint.argument("", ty.clone())).collect();
        let (results, pullback) =
            joint.differentiate(spec.function, &arguments.iter().collect::<Vec<_>>(), &spec.ends)?;
        let boundary = joint.length();
        let mut cotangents = vec![None; results.len()];
        for index in spec.ends.given {
            cotangents[*index] = Some(joint.argument("", results[*index].ty().clone()));
        }
        let accumulator = |i: &usize| {
            let (_, ty) = spec.accumulated.iter().find(|(of, _)| of == i)?;
            Some(joint.argument("", ty.clone()))
        };
        let begun: Vec<Option<Value>> = spec.ends.with_respect_to.iter().map(accumulator).collect();
        let pulled = pullback.pull(cotangents, &begun).into_iter().zip(spec.ends.with_respect_to);
        let pulled = pulled.map(|(ct, i)| ct.unwrap_or_else(|| joint.splat(0.0, types[*i].clone())));
        let results: Vec<Value> = results.into_iter().chain(pulled).collect();
        let joint = joint.traced(&results)?;
        let whole = &joint.function().body;
        // `cotangents` also has the accumulators, the last ones.
        let (arguments, cotangents) = whole.arguments.split_at(body.arguments.len());
        let (results, pulled) = whole.results.split_at(body.results.len());

        let before = &whole.operations[..boundary];
        let invariant = spec.invariant.iter().map(|i| arguments[*i]).collect();
        let candidates = candidates(&joint, before, spec.save, invariant);
        let ends: HashSet<ValueId> = candidates.iter().chain(&whole.arguments).copied().collect();
        let needs = Needs::of(whole, &ends, pulled);
        let kept: Vec<ValueId> = before
            .iter()
            .flat_map(|op| &op.results)
            .copied()
            .filter(|id| needs.reached.contains(id) && candidates.contains(id))
            .collect();
        let reads: Vec<usize> = (0..arguments.len()).filter(|i| needs.reached.contains(&arguments[*i])).collect();
        let again = needs.operations[..boundary].iter().zip(before).any(|(needed, op)| *needed && !free(&joint, op));

        let returned: Vec<ValueId> = results.iter().chain(&kept).copied().collect();
        let forward = slice(&joint, arguments, &returned, &[])?;
        let given: Vec<ValueId> =
            reads.iter().map(|i| arguments[*i]).chain(kept.iter().copied()).chain(cotangents.iter().copied()).collect();
        let held = reads.iter().enumerate().filter(|(_, i)| spec.barred.contains(i)).map(|(at, _)| at);
        let inputs = given.len() - spec.accumulated.len();
        let held: Vec<usize> = if again { held.chain(reads.len()..inputs).collect() } else { vec![] };
        let backward = slice(&joint, &given, pulled, &held)?;
        Ok(Self { forward, backward, arguments: reads })
    }
}

/// Returns the values that `save` allows to save.
fn candidates(joint: &Traced, before: &[Operation], save: &Save, mut invariant: HashSet<ValueId>) -> HashSet<ValueId> {
    let mut candidates = HashSet::new();
    for operation in before {
        // This includes constants, which read nothing.
        if operation.reads().iter().all(|id| invariant.contains(id)) {
            invariant.extend(&operation.results);
            continue;
        }
        match (save, &operation.kind) {
            (Save::Carry | Save::Every(_), _) => {}
            (Save::Named(names), Kind::Named(name)) if names.contains(name) => {
                candidates.extend(operation.operands.iter().filter(|id| !invariant.contains(id)));
            }
            (Save::Named(_), _) => {}
            (Save::Products, Kind::DotGeneral(..)) => candidates.extend(&operation.results),
            (Save::Products, _) => {}
            (Save::Everything, _) if free(joint, operation) => {}
            (Save::Everything, _) => candidates.extend(&operation.results),
        }
    }
    candidates
}

/// Returns `true` if recomputing the operation is better than saving its result: it does no arithmetic, and its operand
/// is no larger than its result.
fn free(joint: &Traced, operation: &Operation) -> bool {
    let bytes = |id: &ValueId| joint.function().type_of(*id).bytes();
    match &operation.kind {
        Kind::Constant(_)
        | Kind::Iota { .. }
        | Kind::BroadcastInDim { .. }
        | Kind::Reshape
        | Kind::Named(_)
        | Kind::StopGradient => true,
        Kind::Convert => bytes(&operation.operands[0]) <= bytes(&operation.results[0]),
        _ => false,
    }
}

/// The operations and values that some results require.
struct Needs {
    /// By operation.
    operations: Vec<bool>,
    /// The required values.
    reached: HashSet<ValueId>,
}

impl Needs {
    /// Finds the requirements of `results` if the values in `given` are available.
    fn of(region: &Region, given: &HashSet<ValueId>, results: &[ValueId]) -> Self {
        let mut reached: HashSet<ValueId> = results.iter().copied().collect();
        let mut operations = vec![false; region.operations.len()];
        for (index, operation) in region.operations.iter().enumerate().rev() {
            if !operation.results.iter().any(|id| reached.contains(id) && !given.contains(id)) {
                continue;
            }
            operations[index] = true;
            match &operation.kind {
                Kind::Scan(scan) => {
                    let used = Used::of(scan, operation, |id| reached.contains(id) && !given.contains(id));
                    reached.extend(used.operands.iter().map(|i| operation.operands[*i]));
                }
                _ => reached.extend(operation.reads()),
            }
        }
        Self { operations, reached }
    }
}

/// The operands and results of a scan that remain if some of its results are not required.
struct Used {
    operands: Vec<usize>,
    results: Vec<usize>,
}

impl Used {
    fn of(scan: &Scan, operation: &Operation, needed: impl Fn(&ValueId) -> bool) -> Self {
        let code = &operation.regions[0];
        let mut results: Vec<bool> = operation.results.iter().map(needed).collect();
        loop {
            let used_results: Vec<ValueId> =
                code.results.iter().zip(&results).filter(|(_, used)| **used).map(|(id, _)| *id).collect();
            let ends = code.arguments.iter().copied().collect();
            let reached = Needs::of(code, &ends, &used_results).reached;
            let operands: Vec<bool> = (0..code.arguments.len())
                .map(|i| reached.contains(&code.arguments[i]) || (i < scan.carry && results[i]))
                .collect();
            if (0..scan.carry).all(|i| results[i] || !operands[i]) {
                let of = |used: &[bool]| (0..used.len()).filter(|i| used[*i]).collect();
                return Self { operands: of(&operands), results: of(&results) };
            }
            (0..scan.carry).for_each(|i| results[i] |= operands[i]);
        }
    }
}

/// Returns the function from `given` to `results`, without operations that it does not require. The arguments in `held`
/// pass through one barrier.
fn slice(source: &Traced, given: &[ValueId], results: &[ValueId], held: &[usize]) -> Result<Traced> {
    let builder = Builder::new();
    let mut arguments: Vec<Value> =
        given.iter().map(|id| builder.argument("", source.function().type_of(*id).clone())).collect();
    if !held.is_empty() {
        let values: Vec<&Value> = held.iter().map(|i| &arguments[*i]).collect();
        let barred = builder.optimization_barrier(&values);
        held.iter().zip(barred).for_each(|(i, value)| arguments[*i] = value);
    }
    let body = &source.function().body;
    let ends: HashSet<ValueId> = given.iter().copied().collect();
    let needs = Needs::of(body, &ends, results);
    let mut names = source.names();
    let bind = |names: &mut Vec<Option<ValueId>>, only: &[ValueId]| {
        for (id, argument) in given.iter().zip(&arguments) {
            if only.contains(id) {
                names[id.0] = Some(argument.id());
            }
        }
    };
    bind(&mut names, given);
    for (operation, _) in body.operations.iter().zip(&needs.operations).filter(|(_, needed)| **needed) {
        match &operation.kind {
            Kind::Scan(scan) => {
                let used = Used::of(scan, operation, |id| needs.reached.contains(id) && !ends.contains(id));
                if used.operands.len() == operation.operands.len() && used.results.len() == operation.results.len() {
                    builder.copy(source, operation, &mut names);
                } else {
                    let code = source.region(&operation.regions[0])?;
                    let inner = &code.function().body;
                    let takes: Vec<ValueId> = used.operands.iter().map(|i| inner.arguments[*i]).collect();
                    let gives: Vec<ValueId> = used.results.iter().map(|i| inner.results[*i]).collect();
                    let code = slice(&code, &takes, &gives, &[])?;
                    let count =
                        |below: usize, from: usize| used.operands.iter().filter(|i| (from..below).contains(i)).count();
                    let less = Scan {
                        carry: count(scan.carry, 0),
                        xs: count(scan.carry + scan.xs, scan.carry),
                        ..scan.clone()
                    };
                    let operands: Vec<Value> =
                        used.operands.iter().map(|i| builder.copied(source, operation.operands[*i], &names)).collect();
                    let scanned = builder.scan_over(less, &code, &operands.iter().collect::<Vec<_>>());
                    let values = scanned.carry.iter().chain(&scanned.ys);
                    used.results.iter().zip(values).for_each(|(i, v)| names[operation.results[*i].0] = Some(v.id()));
                }
            }
            _ => builder.copy(source, operation, &mut names),
        }
        // Some results of an operation may be in `given`.
        bind(&mut names, &operation.results);
    }
    let results: Vec<Value> = results.iter().map(|id| builder.copied(source, *id, &names)).collect();
    builder.traced(&results)
}
