//! Forward and backward passes of manual computations.
//!
//! Each device's copy of a value counts as a variable of its own in the backward pass. If a result is replicated on n
//! devices, each copy gets 1/n of its cotangent; if an operand is replicated, the cotangents of its copies are summed.
//! So the result is the derivative of the sum over devices, as the rules of collectives assume, too.

use super::partition::{Derivative, DerivativeSpec};
use super::{activity, wide};
use crate::build::{Builder, Traced, Value};
use crate::error::Result;
use crate::graph::{Binary, Kind, Operation, Reducer, Region, Save, ValueId};
use crate::sharding::{Groups, Manual, MeshAxes, Sharding};
use crate::types::TensorType;
use std::collections::{BTreeMap, HashSet};

/// Adds the computation, which also returns residuals. Returns its results, the backward pass as a function of the
/// residuals and the cotangents of the `given` results, and the residuals.
pub(super) fn back(
    builder: &Builder,
    manual: &Manual,
    code: &Traced,
    operands: &[Value],
    ends: &activity::Endpoints<'_>,
) -> Result<(Vec<Value>, Traced, Vec<Value>)> {
    let &activity::Endpoints { with_respect_to: to, unrounded, given } = ends;
    // Nothing is recomputed here; an enclosing loop has its own policy.
    let save = &Save::Everything;
    let CotangentInputs { function, asked, shares } = CotangentInputs::of(manual, code, given)?;
    let ends = activity::Endpoints { with_respect_to: to, unrounded, given: &asked };
    let spec = DerivativeSpec { function: &function, ends, save, barred: &[], invariant: &[] };
    let Derivative { forward, backward, arguments } = Derivative::of(&spec)?;

    let (own, all) = (code.result_types().len(), function.result_types().len());
    let saved: Vec<TensorType> = forward.result_types().split_off(all);
    let rows: Vec<Sharding> = saved.iter().map(|ty| manual.stacked(ty.rank().max(1))).collect();
    let body = crate::trace(&code.argument_types(), |f, a| {
        let mut results = f.call(&forward, &a.iter().collect::<Vec<_>>());
        results.drain(own..all);
        // Scalars become rows of one element, to be stacked over devices.
        results[own..].iter_mut().filter(|v| v.shape().is_empty()).for_each(|v| *v = v.reshape(&[1]));
        results
    })?;
    let there = Manual::new(manual.axes(), manual.inputs(), &[manual.outputs(), &rows].concat())?;
    let mut results = builder.manual(&there, &body, &operands.iter().collect::<Vec<_>>());
    let rest = results.split_off(own.min(results.len()));
    let kept: Vec<Value> = arguments.iter().map(|i| operands[*i].clone()).chain(rest).collect();

    let pick = |shardings: &[Sharding], of: &[usize]| of.iter().map(|i| shardings[*i].clone()).collect::<Vec<_>>();
    let inputs = [pick(manual.inputs(), &arguments), rows, pick(manual.outputs(), given)].concat();
    let way = Manual::new(manual.axes(), &inputs, &pick(manual.inputs(), to))?;
    let types: Vec<TensorType> =
        kept.iter().map(|v| v.ty().clone()).chain(given.iter().map(|i| results[*i].ty().clone())).collect();
    let body = way.trace(&types, |f, parts| {
        let (read, cotangents) = parts.split_at(kept.len());
        let (read, saved_rows) = read.split_at(arguments.len());
        let shaped =
            saved_rows.iter().zip(&saved).map(|(v, ty)| if ty.rank() == 0 { v.reshape(&[]) } else { v.clone() });
        let shares = shares.iter().map(|(i, copies)| {
            let ct = &cotangents[*i];
            if *copies == 1 { ct.clone() } else { ct / ct.like(*copies as f64) }
        });
        let taken: Vec<Value> = read.iter().cloned().chain(shaped).chain(shares).collect();
        let pulled = f.call(&backward, &taken.iter().collect::<Vec<_>>());
        let summed = pulled.into_iter().zip(to).map(|(ct, i)| {
            let axes = manual.copied_along(&manual.inputs()[*i]);
            if axes.size() == 1 { ct } else { ct.convert(wide(ct.dtype())).all_reduce(Reducer::Add, &axes) }
        });
        summed.collect()
    })?;
    let backward = crate::trace(&types, |f, a| f.manual(&way, &body, &a.iter().collect::<Vec<_>>()))?;
    Ok((results, backward, kept))
}

/// The values at which cotangents enter the backward pass.
///
/// If a result is an all-reduced sum over the devices that have copies of it, each summand gets the whole cotangent:
/// the rule of the all-reduce would divide the cotangent among devices and sum it again. So the cotangent enters before
/// the sum, which saves the communication.
struct CotangentInputs {
    /// The function, with these values as additional results.
    function: Traced,
    /// The indices of the additional results.
    asked: Vec<usize>,
    /// For each, the index of the cotangent that enters, and the number of devices among which it is divided.
    shares: Vec<(usize, usize)>,
}

impl CotangentInputs {
    fn of(manual: &Manual, code: &Traced, given: &[usize]) -> Result<Self> {
        let body = &code.function().body;
        let defined = body.operations.iter().flat_map(|op| op.results.iter().map(move |id| (*id, op)));
        let defined: BTreeMap<ValueId, &Operation> = defined.collect();
        let (mut results, mut asked, mut shares) = (body.results.clone(), vec![], vec![]);
        for (place, index) in given.iter().enumerate() {
            let copies = manual.copied_along(&manual.outputs()[*index]);
            for (id, devices) in summands(&defined, body.results[*index], &copies) {
                asked.push(results.len());
                results.push(id);
                shares.push((place, devices));
            }
        }
        let (arguments, operations) = (body.arguments.clone(), body.operations.clone());
        let function = code.region(&Region { arguments, operations, results })?;
        Ok(Self { function, asked, shares })
    }
}

/// Returns the values whose sum is a result, on this device or over all devices with copies of the result. Each comes
/// with the number of devices among which its cotangent is divided.
fn summands(defined: &BTreeMap<ValueId, &Operation>, result: ValueId, copies: &MeshAxes) -> Vec<(ValueId, usize)> {
    let (mut open, mut found, mut sums) = (vec![result], vec![], false);
    // A sum is expanded once: repeated doubling would give exponentially many terms.
    let mut apart = HashSet::new();
    while let Some(id) = open.pop() {
        let operation = defined.get(&id).map(|op| (&op.kind, &op.operands[..]));
        match operation {
            Some((Kind::Binary(Binary::Add), operands)) if apart.insert(id) => open.extend(operands),
            Some((Kind::AllReduce { reducer: Reducer::Add, groups: Groups::Axes(axes) }, [part]))
                if axes.within(copies) =>
            {
                sums = true;
                found.push((*part, copies.size() / axes.size()));
            }
            _ => found.push((id, copies.size())),
        }
    }
    if sums { found } else { vec![(result, copies.size())] }
}
