//! Operations with regions. Replicas can take different branches; they synchronise after the operation.

use super::Fault;
use super::array::{Array, joined};
use super::machine::{Machine, Values};
use crate::error::Result;
use crate::graph::{Operation, Region, Scan};
use std::rc::Rc;

impl<'a> Machine<'a> {
    /// Runs a loop: condition, then body, until the condition fails.
    pub(super) fn repeat(&mut self, op: &'a Operation, lanes: &[usize], carried: Vec<Values>) -> Result<Vec<Values>> {
        let name = op.kind.name();
        let [condition, body] = &op.regions[..] else {
            return Err(Fault::malformed("two regions expected").of(name));
        };
        let mut results: Vec<Values> = vec![vec![]; lanes.len()];
        let mut turning: Vec<(usize, Values)> = carried.into_iter().enumerate().collect();
        while !turning.is_empty() {
            self.spend(turning.len() as u64).map_err(|fault| fault.of(name))?;
            let running: Vec<usize> = turning.iter().map(|(i, _)| lanes[*i]).collect();
            let carried = turning.iter().map(|(_, carried)| carried.clone()).collect();
            let tests = self.region(condition, &running, carried, name)?;
            let mut next = vec![];
            for ((i, carried), test) in turning.into_iter().zip(tests) {
                let [test] = &test[..] else { return Err(Fault::malformed("a predicate expected").of(name)) };
                match test.predicate().map_err(|fault| fault.of(name))? {
                    true => next.push((i, carried)),
                    false => results[i] = carried,
                }
            }
            let running: Vec<usize> = next.iter().map(|(i, _)| lanes[*i]).collect();
            let (places, carried): (Vec<usize>, Vec<Values>) = next.into_iter().unzip();
            if running.is_empty() {
                break;
            }
            turning = places.into_iter().zip(self.region(body, &running, carried, name)?).collect();
        }
        Ok(results)
    }

    /// Runs the region that a scalar selects.
    pub(super) fn choose(&mut self, op: &'a Operation, lanes: &[usize], operands: &[Values]) -> Result<Vec<Values>> {
        let name = op.kind.name();
        let fail = |reason: &str| Fault::malformed(reason).of(name);
        let last = op.regions.len().checked_sub(1).ok_or_else(|| fail("a scalar and regions expected"))?;
        let mut picked = Vec::with_capacity(lanes.len());
        for operands in operands {
            let [index] = &operands[..] else { return Err(fail("an index expected")) };
            let [index] = index.integers().map_err(|fault| fault.of(name))? else {
                return Err(fail("a scalar and regions expected"));
            };
            picked.push(usize::try_from(*index).unwrap_or(last).min(last));
        }
        let mut results: Vec<Values> = vec![vec![]; lanes.len()];
        for (at, region) in op.regions.iter().enumerate() {
            let places: Vec<usize> = (0..lanes.len()).filter(|i| picked[*i] == at).collect();
            if places.is_empty() {
                continue;
            }
            let running: Vec<usize> = places.iter().map(|i| lanes[*i]).collect();
            let found = self.region(region, &running, vec![vec![]; running.len()], name)?;
            places.into_iter().zip(found).for_each(|(i, found)| results[i] = found);
        }
        Ok(results)
    }

    /// Runs the region inline and drops its residuals.
    pub(super) fn inline(&mut self, op: &'a Operation, lanes: &[usize], operands: Vec<Values>) -> Result<Vec<Values>> {
        let code = code(op)?;
        let mut results = self.region(code, lanes, operands, op.kind.name())?;
        results.iter_mut().for_each(|results| results.truncate(op.results.len()));
        Ok(results)
    }

    /// Runs one iteration per slice, from first to last or from last to first.
    pub(super) fn scan(
        &mut self,
        scan: &Scan,
        op: &'a Operation,
        lanes: &[usize],
        operands: &[Values],
    ) -> Result<Vec<Values>> {
        let name = op.kind.name();
        let fail = |fault: Fault| fault.of(name);
        let code = code(op)?;
        let slices = scan.carry.checked_add(scan.xs).filter(|end| *end <= op.operands.len());
        let Some(end) = slices.filter(|_| scan.carry <= code.results.len() && scan.trips > 0) else {
            return Err(fail(Fault::malformed("turns, values to carry and operands to slice expected")));
        };
        for operands in operands {
            if let Some(x) = operands[scan.carry..end].iter().find(|x| x.ty.shape.first() != Some(&scan.trips)) {
                return Err(fail(Fault::malformed(format!("{} slices expected, got {}", scan.trips, x.ty))));
            }
        }
        let mut carried: Vec<Values> = operands.iter().map(|operands| operands[..scan.carry].to_vec()).collect();
        // By lane, then by iteration.
        let mut parts: Vec<Vec<Values>> = vec![vec![]; lanes.len()];
        for turn in 0..scan.trips {
            self.spend(lanes.len() as u64).map_err(fail)?;
            let at = if scan.reverse { scan.trips - 1 - turn } else { turn };
            let arguments = carried.into_iter().zip(operands).map(|(carried, operands)| {
                let slices = operands[scan.carry..end].iter().map(|x| Rc::new(x.slice(at)));
                carried.into_iter().chain(slices).chain(operands[end..].iter().cloned()).collect()
            });
            let mut results = self.region(code, lanes, arguments.collect(), name)?;
            for (results, parts) in results.iter_mut().zip(&mut parts) {
                parts.push(results.split_off(scan.carry));
            }
            carried = results;
        }
        for (carried, mut parts) in carried.iter_mut().zip(parts) {
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
        }
        Ok(carried)
    }
}

fn code(op: &Operation) -> Result<&Region> {
    op.regions.first().ok_or_else(|| Fault::malformed("a region expected").of(op.kind.name()))
}
