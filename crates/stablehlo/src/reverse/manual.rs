//! Computations on the devices' parts, there and back.
//!
//! Each device's copy of a value is a variable of its own on the way back. Where a result is the same on n devices, each of
//! these has an nth of its cotangent, and where several devices got the same operand, their cotangents add up: so the
//! derivative is that of the sum over devices, which is also what the rules of collectives take it for.

use super::partition::{Derivative, Wish};
use super::wide;
use crate::build::{Builder, Traced, Value};
use crate::error::Result;
use crate::graph::{Reducer, Save};
use crate::sharding::{Manual, Sharding};
use crate::types::TensorType;

/// Adds the computation, which also hands out what the way back reads. Returns its results, the way back as a function of
/// what was kept and the cotangents of the results that are `given` some, and what was kept.
pub(super) fn back(
    builder: &Builder,
    manual: &Manual,
    code: &Traced,
    operands: &[Value],
    to: &[usize],
    given: &[usize],
) -> Result<(Vec<Value>, Traced, Vec<Value>)> {
    // What is kept of a loop around this one is that loop's business: here nothing is computed again.
    let save = &Save::Everything;
    let wish = Wish { function: code, with_respect_to: to, given, save, barred: &[], invariant: &[] };
    let Derivative { forward, backward, arguments } = Derivative::of(&wish)?;

    let own = code.result_types().len();
    let saved: Vec<TensorType> = forward.result_types().split_off(own);
    let rows: Vec<Sharding> = saved.iter().map(|ty| manual.stacked(ty.rank().max(1))).collect();
    let body = crate::trace(&code.argument_types(), |f, a| {
        let mut results = f.call(&forward, &a.iter().collect::<Vec<_>>());
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
        let shares = cotangents.iter().zip(given).map(|(ct, i)| {
            let copies = manual.copied_along(&manual.outputs()[*i]).size();
            if copies == 1 { ct.clone() } else { ct / ct.like(copies as f64) }
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
