//! Operations with regions. Devices can take different numbers of iterations; they synchronise after the operation.

use super::array::{Array, joined};
use super::machine::{Machine, Values};
use crate::error::Result;
use crate::graph::{Operation, Scan};
use std::rc::Rc;

impl<'a> Machine<'a> {
    /// Runs a loop: condition, then body, until the condition fails.
    pub(super) fn repeat(&mut self, op: &'a Operation, lanes: &[usize], carried: Vec<Values>) -> Result<Vec<Values>> {
        let name = op.kind.name();
        let [condition, body] = &op.regions[..] else { unreachable!("a condition and a body") };
        let mut results: Vec<Values> = vec![vec![]; lanes.len()];
        let mut turning: Vec<(usize, Values)> = carried.into_iter().enumerate().collect();
        while !turning.is_empty() {
            self.spend(turning.len() as u64).map_err(|fault| fault.of(name))?;
            let running: Vec<usize> = turning.iter().map(|(i, _)| lanes[*i]).collect();
            let carried = turning.iter().map(|(_, carried)| carried.clone()).collect();
            let tests = self.region(condition, &running, carried, name)?;
            let mut next = vec![];
            for ((i, carried), test) in turning.into_iter().zip(tests) {
                match test[0].predicate() {
                    true => next.push((i, carried)),
                    false => results[i] = carried,
                }
            }
            let running: Vec<usize> = next.iter().map(|(i, _)| lanes[*i]).collect();
            if running.is_empty() {
                break;
            }
            let (places, carried): (Vec<usize>, Vec<Values>) = next.into_iter().unzip();
            turning = places.into_iter().zip(self.region(body, &running, carried, name)?).collect();
        }
        Ok(results)
    }

    /// Runs the region inline and drops its residuals.
    pub(super) fn inline(&mut self, op: &'a Operation, lanes: &[usize], operands: Vec<Values>) -> Result<Vec<Values>> {
        let mut results = self.region(&op.regions[0], lanes, operands, op.kind.name())?;
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
        let (code, end) = (&op.regions[0], scan.carry + scan.xs);
        let mut carried: Vec<Values> = operands.iter().map(|operands| operands[..scan.carry].to_vec()).collect();
        // By lane, then by iteration.
        let mut parts: Vec<Vec<Values>> = vec![vec![]; lanes.len()];
        for turn in 0..scan.trips {
            self.spend(lanes.len() as u64).map_err(|fault| fault.of(name))?;
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
                let elements = joined(&list);
                let mut ty = parts[0][stack].ty.clone();
                ty.shape.insert(0, scan.trips);
                carried.push(Rc::new(Array { ty, elements }));
            }
        }
        Ok(carried)
    }
}
