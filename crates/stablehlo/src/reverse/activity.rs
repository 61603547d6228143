//! Activity analysis: the values that a derivative passes through.

use super::rules::{Rule, rule};
use super::wide;
use crate::build::Traced;
use crate::error::{Error, Result};
use crate::graph::{Kind, Operation, Region, ValueId};
use crate::types::Dtype;
use std::collections::HashSet;

/// The activity of each value of a function, by id.
#[derive(Clone, Debug)]
pub(super) struct Activity {
    /// `true` if the value depends on an argument that needs a cotangent.
    active: Vec<bool>,
    /// `true` if, in addition, a result depends on the value, so that it needs a cotangent.
    wanted: Vec<bool>,
    /// The number of operations and results that contribute to the value's cotangent.
    uses: Vec<usize>,
    /// The dtype of the argument that the value was converted from.
    from: Vec<Option<Dtype>>,
    /// `true` if the value's cotangent is not rounded to its dtype.
    unrounded: Vec<bool>,
}

/// The arguments and results between which a function is differentiated.
#[derive(Clone, Copy)]
pub(super) struct Endpoints<'a> {
    /// Arguments that need cotangents.
    pub(super) with_respect_to: &'a [usize],
    /// The subset of `with_respect_to` whose cotangents are not rounded to the arguments' dtypes.
    pub(super) unrounded: &'a [usize],
    /// Results that have cotangents.
    pub(super) given: &'a [usize],
}

impl Activity {
    /// Finds the values on paths from `with_respect_to` arguments to `given` results.
    ///
    /// # Errors
    /// Returns an error if an operation on such a path has no derivative.
    pub(super) fn of(function: &Traced, ends: &Endpoints<'_>) -> Result<Self> {
        let n = function.function().types.len();
        let none = vec![false; n];
        let mut activity =
            Self { active: none.clone(), wanted: none.clone(), uses: vec![0; n], from: vec![None; n], unrounded: none };
        let body = &function.function().body;
        for index in ends.with_respect_to {
            activity.active[body.arguments[*index].0] = true;
        }
        for index in ends.unrounded {
            activity.unrounded[body.arguments[*index].0] = true;
        }
        activity.forward(function, body);
        for index in ends.given {
            activity.want(body.results[*index]);
        }
        activity.backward(function, body)?;
        activity.count(function, body);
        Ok(activity)
    }

    pub(super) fn wanted(&self, id: ValueId) -> bool {
        self.wanted[id.0]
    }

    /// Returns `true` if the value's cotangent is not rounded to its dtype.
    pub(super) fn unrounded(&self, id: ValueId) -> bool {
        self.unrounded[id.0]
    }

    /// Returns `true` if the value's cotangent passes to a consumer of higher precision than the value's dtype.
    pub(super) fn hands_digits_on(&self, function: &Traced, id: ValueId) -> bool {
        let bytes = function.function().type_of(id).dtype.bytes();
        self.unrounded[id.0] || self.from[id.0].is_some_and(|from| from.bytes() > bytes)
    }

    /// Returns the best dtype for the summands of the value's cotangent.
    pub(super) fn sum_dtype(&self, function: &Traced, id: ValueId) -> Dtype {
        let dtype = function.function().type_of(id).dtype;
        let dtype = if self.uses[id.0] > 1 || self.unrounded[id.0] { wide(dtype) } else { dtype };
        // Gradients of weights keep the argument's precision; gradients of activations, which are larger, stay narrow.
        self.from[id.0].filter(|from| from.bytes() > dtype.bytes()).unwrap_or(dtype)
    }

    fn want(&mut self, id: ValueId) -> bool {
        let new = self.active[id.0] && !self.wanted[id.0];
        self.wanted[id.0] |= self.active[id.0];
        new
    }

    fn activate(&mut self, function: &Traced, id: ValueId, active: bool) -> bool {
        let new = active && function.function().type_of(id).dtype.is_float() && !self.active[id.0];
        self.active[id.0] |= new;
        new
    }

    fn forward(&mut self, function: &Traced, region: &Region) {
        for operation in &region.operations {
            match &operation.kind {
                Kind::Scan(scan) => self.forward_scan(function, operation, scan.carry),
                kind => {
                    // Results of active values are active, unless the derivative is zero.
                    let constant = matches!(rule(kind), Rule::Constant);
                    let active = !constant && operation.reads().iter().any(|id| self.active[id.0]);
                    for id in &operation.results {
                        self.activate(function, *id, active);
                    }
                }
            }
        }
    }

    fn pass(&mut self, function: &Traced, from: &[ValueId], to: &[ValueId]) -> bool {
        from.iter().zip(to).fold(false, |new, (a, b)| self.activate(function, *b, self.active[a.0]) | new)
    }

    fn forward_scan(&mut self, function: &Traced, operation: &Operation, carry: usize) {
        let code = &operation.regions[0];
        self.pass(function, &operation.operands, &code.arguments);
        loop {
            self.forward(function, code);
            // Carried values are active in all iterations if they are active before or after any iteration.
            let mut new = self.pass(function, &code.results[..carry], &code.arguments[..carry]);
            new |= self.pass(function, &code.arguments[..carry], &code.results[..carry]);
            if !new {
                break;
            }
        }
        self.pass(function, &code.results, &operation.results);
    }

    fn backward(&mut self, function: &Traced, region: &Region) -> Result<()> {
        for operation in region.operations.iter().rev() {
            if !operation.results.iter().any(|id| self.wanted[id.0]) {
                continue;
            }
            match &operation.kind {
                Kind::Scan(scan) => {
                    let code = &operation.regions[0];
                    self.draw(&operation.results, &code.results);
                    loop {
                        self.backward(function, code)?;
                        let mut new = self.draw(&code.arguments[..scan.carry], &code.results[..scan.carry]);
                        new |= self.draw(&code.results[..scan.carry], &code.arguments[..scan.carry]);
                        if !new {
                            break;
                        }
                    }
                    self.draw(&code.arguments, &operation.operands);
                }
                kind => {
                    if let Rule::None(reason) = rule(kind) {
                        let at = function.line(operation.results[0]);
                        return Err(Error::NoDerivative { operation: kind.name(), reason: reason.into(), at });
                    }
                    for id in &operation.operands {
                        self.want(*id);
                    }
                }
            }
        }
        Ok(())
    }

    /// Marks `to[i]` as needing a cotangent if `from[i]` needs one.
    fn draw(&mut self, from: &[ValueId], to: &[ValueId]) -> bool {
        from.iter().zip(to).fold(false, |new, (a, b)| (self.wanted[a.0] && self.want(*b)) | new)
    }

    fn count(&mut self, function: &Traced, region: &Region) {
        region.results.iter().for_each(|id| self.uses[id.0] += 1);
        // Arguments, also after a concatenation, reshape, barrier or constraint.
        let mut given: HashSet<ValueId> = region.arguments.iter().copied().collect();
        for operation in &region.operations {
            if operation.results.iter().any(|id| self.wanted[id.0]) {
                operation.operands.iter().for_each(|id| self.uses[id.0] += 1);
                operation.regions.iter().for_each(|region| self.count(function, region));
            }
            match (&operation.kind, &operation.operands[..]) {
                (Kind::Convert, [from]) if given.contains(from) => {
                    self.from[operation.results[0].0] = Some(function.function().type_of(*from).dtype);
                }
                // A property of the concatenation holds if it holds for all operands.
                (Kind::Concatenate { .. }, [first, rest @ ..]) => {
                    let to = operation.results[0];
                    let from = self.from[first.0];
                    self.from[to.0] = from.filter(|_| rest.iter().all(|id| self.from[id.0] == from));
                    self.unrounded[to.0] = operation.operands.iter().all(|id| self.unrounded[id.0]);
                    given.extend(operation.operands.iter().all(|id| given.contains(id)).then_some(to));
                }
                (Kind::OptimizationBarrier | Kind::Constrain(_) | Kind::Reshape, operands) => {
                    for (from, to) in operands.iter().zip(&operation.results) {
                        self.from[to.0] = self.from[from.0];
                        self.unrounded[to.0] = self.unrounded[from.0];
                        given.extend(given.contains(from).then_some(*to));
                    }
                }
                _ => {}
            }
        }
    }
}
