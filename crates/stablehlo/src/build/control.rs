//! Loops, optimisation barriers and custom calls.

use super::trace::listed;
use super::{Builder, State, Value};
use crate::graph::{CustomCall, Kind, Region};
use crate::types::{Dtype, TensorType};
use std::panic::Location;

impl Builder {
    /// Repeats `body` while `condition` holds. Both take the carried values, which start as `initial`; `body` returns
    /// the next carried values, of the same types. Both may read values from the enclosing scope.
    #[track_caller]
    pub fn while_loop(
        &self,
        initial: &[&Value],
        condition: impl FnOnce(&[Value]) -> Value,
        body: impl FnOnce(&[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let types: Vec<TensorType> = initial.iter().map(|v| v.ty().clone()).collect();
        let carried: Vec<Value> = types.iter().map(|ty| self.bind(ty)).collect();
        let (test, condition) = self.region(&carried, |carried| vec![condition(carried)]);
        let (next, body) = self.region(&carried, body);
        let check = if test != [TensorType::scalar(Dtype::Pred)] {
            Err(format!("a condition of type {} expected, got {}", TensorType::scalar(Dtype::Pred), listed(&test)))
        } else if next != types {
            Err(format!("the body should return ({}), got ({})", listed(&types), listed(&next)))
        } else if initial.is_empty() {
            Err("nothing is carried".into())
        } else {
            Ok(types.clone())
        };
        self.emit_all(Kind::While, initial, vec![condition, body], check, || types)
    }

    /// Calls `body` for each index 0, 1, ... below `trips`. `body` takes the index, an i32 scalar, and the carried
    /// values.
    #[track_caller]
    pub fn for_loop(
        &self,
        trips: usize,
        initial: &[&Value],
        body: impl FnOnce(&Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let zero = self.scalar(0, Dtype::I32);
        let carried: Vec<&Value> = std::iter::once(&zero).chain(initial.iter().copied()).collect();
        let mut results = self.while_loop(
            &carried,
            |carried| carried[0].lt(&self.scalar(trips as i64, Dtype::I32)),
            |carried| {
                let next = &carried[0] + self.scalar(1, Dtype::I32);
                std::iter::once(next).chain(body(&carried[0], &carried[1..])).collect()
            },
        );
        results.remove(0);
        results
    }

    /// Returns the values unchanged; the compiler moves and fuses nothing across the barrier.
    #[track_caller]
    pub fn optimization_barrier(&self, values: &[&Value]) -> Vec<Value> {
        let types: Vec<TensorType> = values.iter().map(|v| v.ty().clone()).collect();
        let check = if values.is_empty() { Err("no operands".into()) } else { Ok(types.clone()) };
        self.emit_all(Kind::OptimizationBarrier, values, vec![], check, || types)
    }

    /// Calls code that the target provides under a name.
    #[track_caller]
    pub fn custom_call(&self, call: CustomCall, operands: &[&Value], results: &[TensorType]) -> Vec<Value> {
        let wrong = call.aliases.iter().find(|(result, operand)| {
            let types = results.get(*result).zip(operands.get(*operand));
            types.is_none_or(|(r, o)| r != o.ty())
        });
        let check = match wrong {
            Some((result, operand)) => Err(format!("result {result} and operand {operand} cannot share a buffer")),
            None if results.is_empty() => Err("no results".into()),
            None => Ok(results.to_vec()),
        };
        self.emit_all(Kind::CustomCall(call), operands, vec![], check, || results.to_vec())
    }

    /// Defines a value for a region to bind.
    #[track_caller]
    pub(super) fn bind(&self, ty: &TensorType) -> Value {
        let id = self.state.borrow_mut().define(ty.clone(), Location::caller());
        self.handle(id, ty.clone())
    }

    /// Builds a nested region that binds `arguments`; also returns the types of its results.
    fn region(&self, arguments: &[Value], build: impl FnOnce(&[Value]) -> Vec<Value>) -> (Vec<TensorType>, Region) {
        {
            let mut state = self.state.borrow_mut();
            state.enter();
            let State { homes, open, .. } = &mut *state;
            if let Some((serial, region)) = open.last_mut() {
                region.arguments = arguments.iter().map(|v| v.id).collect();
                // All regions of one operation bind the same values.
                region.arguments.iter().for_each(|id| homes[id.0] = *serial);
            }
        }
        let results = build(arguments);
        if let Err(reason) = self.in_scope(&results.iter().collect::<Vec<_>>()) {
            self.fail("stablehlo.return", reason);
        }
        let (_, mut region) = self.state.borrow_mut().open.pop().unwrap_or_default();
        region.results = results.iter().map(|v| v.id).collect();
        (results.iter().map(|v| v.ty().clone()).collect(), region)
    }
}
