//! Computations on the devices' parts, there and back.
//!
//! Each device's copy of a value is a variable of its own on the way back. Where a result is the same on n devices, each of
//! these has an nth of its cotangent, and where several devices got the same operand, their cotangents add up: so the
//! derivative is that of the sum over devices, which is also what the rules of collectives take it for.

use super::partition::{Derivative, Wish};
use super::{activity, wide};
use crate::build::{Builder, Traced, Value};
use crate::error::Result;
use crate::graph::{Binary, Kind, Operation, Reducer, Region, Save, ValueId};
use crate::sharding::{Groups, Manual, MeshAxes, Sharding};
use crate::types::TensorType;
use std::collections::{BTreeMap, HashSet};

/// Adds the computation, which also hands out what the way back reads. Returns its results, the way back as a function of
/// what was kept and the cotangents of the results that are `given` some, and what was kept.
pub(super) fn back(
    builder: &Builder,
    manual: &Manual,
    code: &Traced,
    operands: &[Value],
    ends: &activity::Ends<'_>,
) -> Result<(Vec<Value>, Traced, Vec<Value>)> {
    let &activity::Ends { with_respect_to: to, unrounded, given } = ends;
    // What is kept of a loop around this one is that loop's business: here nothing is computed again.
    let save = &Save::Everything;
    let Ends { function, asked, shares } = Ends::of(manual, code, given)?;
    let ends = activity::Ends { with_respect_to: to, unrounded, given: &asked };
    let wish = Wish { function: &function, ends, save, barred: &[], invariant: &[] };
    let Derivative { forward, backward, arguments } = Derivative::of(&wish)?;

    let (own, all) = (code.result_types().len(), function.result_types().len());
    let saved: Vec<TensorType> = forward.result_types().split_off(all);
    let rows: Vec<Sharding> = saved.iter().map(|ty| manual.stacked(ty.rank().max(1))).collect();
    let body = crate::trace(&code.argument_types(), |f, a| {
        let mut results = f.call(&forward, &a.iter().collect::<Vec<_>>());
        results.drain(own..all);
        // A scalar of each device is a row of one.
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

/// Where cotangents enter the way back.
///
/// A result that is a sum over the devices that all have it hands each summand its whole cotangent: what the rule of the sum
/// would add up of the shares again. So the cotangent enters before the sum, and the devices need not meet.
struct Ends {
    /// The function with these values as further results.
    function: Traced,
    /// The further results.
    asked: Vec<usize>,
    /// For each, which of the cotangents enters, and among how many devices it is divided.
    shares: Vec<(usize, usize)>,
}

impl Ends {
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

/// The values that a result adds up, of this device or of all that have copies of the result, each with the number of devices
/// among which its cotangent is divided.
fn summands(defined: &BTreeMap<ValueId, &Operation>, result: ValueId, copies: &MeshAxes) -> Vec<(ValueId, usize)> {
    let (mut open, mut found, mut sums) = (vec![result], vec![], false);
    // A sum that is a term twice is taken apart once: doubled again and again, it would have no end.
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
