//! Operations with regions.

use super::array::{Array, ill_typed, joined};
use super::machine::{Machine, Values};
use crate::error::Result;
use crate::graph::{Operation, Scan};
use std::rc::Rc;

impl<'a> Machine<'a> {
    /// Runs a loop: condition, then body, until the condition fails.
    pub(super) fn repeat(&mut self, op: &'a Operation, mut carried: Values) -> Result<Values> {
        let name = op.kind.name();
        let [condition, body] = &op.regions[..] else { ill_typed("a condition and a body") };
        loop {
            self.spend(1).map_err(|fault| fault.of(name))?;
            if !self.region(condition, carried.clone(), name)?[0].predicate() {
                return Ok(carried);
            }
            carried = self.region(body, carried, name)?;
        }
    }

    /// Runs the region inline and drops its residuals.
    pub(super) fn inline(&mut self, op: &'a Operation, operands: Values) -> Result<Values> {
        let mut results = self.region(&op.regions[0], operands, op.kind.name())?;
        results.truncate(op.results.len());
        Ok(results)
    }

    /// Runs one iteration per slice, from first to last or from last to first.
    pub(super) fn scan(&mut self, scan: &Scan, op: &'a Operation, operands: &[Rc<Array>]) -> Result<Values> {
        let name = op.kind.name();
        let (code, end) = (&op.regions[0], scan.carry + scan.xs);
        let mut carried = operands[..scan.carry].to_vec();
        let mut parts: Vec<Values> = vec![];
        for turn in 0..scan.trips {
            self.spend(1).map_err(|fault| fault.of(name))?;
            let at = if scan.reverse { scan.trips - 1 - turn } else { turn };
            let slices = operands[scan.carry..end].iter().map(|x| Rc::new(x.slice(at)));
            let arguments = carried.into_iter().chain(slices).chain(operands[end..].iter().cloned()).collect();
            let mut results = self.region(code, arguments, name)?;
            parts.push(results.split_off(scan.carry));
            carried = results;
        }
        if scan.reverse {
            parts.reverse();
        }
        for stack in 0..code.results.len() - scan.carry {
            let list: Vec<_> = parts.iter().map(|turn| &turn[stack].elements).collect();
            let elements = joined(&list);
            let mut ty = parts[0][stack].ty.clone();
            ty.shape.insert(0, scan.trips);
            carried.push(Rc::new(Array { ty, elements }));
        }
        Ok(carried)
    }
}
