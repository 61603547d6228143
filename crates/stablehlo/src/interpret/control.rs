//! Operations with regions.

use super::Fault;
use super::array::{Array, joined};
use super::machine::{Machine, Values};
use crate::error::Result;
use crate::graph::{Operation, Region, Scan};
use std::rc::Rc;

impl Machine<'_> {
    /// A loop: condition, then body, until the condition fails.
    pub(super) fn repeat(&mut self, op: &Operation, mut carried: Values) -> Result<Values> {
        let name = op.kind.name();
        let [condition, body] = &op.regions[..] else {
            return Err(Fault::malformed("two regions expected").of(name));
        };
        loop {
            self.spend(1).map_err(|fault| fault.of(name))?;
            let test = self.region(condition, carried.clone(), name)?;
            let [test] = &test[..] else { return Err(Fault::malformed("a predicate expected").of(name)) };
            if !test.predicate().map_err(|fault| fault.of(name))? {
                return Ok(carried);
            }
            carried = self.region(body, carried, name)?;
        }
    }

    /// The region that a scalar picks.
    pub(super) fn choose(&mut self, op: &Operation, operands: &[Rc<Array>]) -> Result<Values> {
        let name = op.kind.name();
        let fail = |reason: &str| Fault::malformed(reason).of(name);
        let [index] = operands else { return Err(fail("an index expected")) };
        let index = index.integers().map_err(|fault| fault.of(name))?;
        let ([index], Some(last)) = (index, op.regions.last()) else {
            return Err(fail("a scalar and regions expected"));
        };
        let region = usize::try_from(*index).ok().and_then(|i| op.regions.get(i)).unwrap_or(last);
        self.region(region, vec![], name)
    }

    /// The region in place, of which residuals are not results.
    pub(super) fn inline(&mut self, op: &Operation, operands: Values) -> Result<Values> {
        let code = code(op)?;
        let mut results = self.region(code, operands, op.kind.name())?;
        results.truncate(op.results.len());
        Ok(results)
    }

    /// One turn per slice, first to last or last to first.
    pub(super) fn scan(&mut self, scan: &Scan, op: &Operation, operands: &[Rc<Array>]) -> Result<Values> {
        let name = op.kind.name();
        let fail = |fault: Fault| fault.of(name);
        let code = code(op)?;
        let slices = scan.carry.checked_add(scan.xs).filter(|end| *end <= operands.len());
        let Some(end) = slices.filter(|_| scan.carry <= code.results.len() && scan.trips > 0) else {
            return Err(fail(Fault::malformed("turns, values to carry and operands to slice expected")));
        };
        let (xs, constants) = (&operands[scan.carry..end], &operands[end..]);
        if let Some(x) = xs.iter().find(|x| x.ty.shape.first() != Some(&scan.trips)) {
            return Err(fail(Fault::malformed(format!("{} slices expected, got {}", scan.trips, x.ty))));
        }
        let mut carried: Values = operands[..scan.carry].to_vec();
        let mut parts: Vec<Values> = vec![];
        for turn in 0..scan.trips {
            self.spend(1).map_err(fail)?;
            let at = if scan.reverse { scan.trips - 1 - turn } else { turn };
            let arguments = carried.into_iter().chain(xs.iter().map(|x| Rc::new(x.slice(at))));
            let mut results = self.region(code, arguments.chain(constants.iter().cloned()).collect(), name)?;
            parts.push(results.split_off(scan.carry));
            carried = results;
        }
        if scan.reverse {
            parts.reverse();
        }
        for stack in 0..code.results.len() - scan.carry {
            let list: Vec<_> = parts.iter().map(|turn| &turn[stack].elements).collect();
            let elements = joined(&list).map_err(fail)?;
            let mut ty = parts[0][stack].ty.clone();
            ty.shape.insert(0, scan.trips);
            carried.push(Rc::new(Array { ty, elements }));
        }
        Ok(carried)
    }
}

fn code(op: &Operation) -> Result<&Region> {
    op.regions.first().ok_or_else(|| Fault::malformed("a region expected").of(op.kind.name()))
}
