//! Building a program operation by operation.
//!
//! Shapes and dtypes are checked when an operation is built. An illegal operation neither panics nor returns a
//! `Result`: the builder records the first one, with the line of Rust that built it, and [`Builder::finish`] returns it
//! as an error.

mod contract;
mod control;
mod derivative;
pub(crate) mod elementwise;
mod manual;
mod scan;
mod shape;
mod trace;

pub(crate) use contract::distinct;
pub use scan::Scanned;
pub(crate) use trace::{Names, listed};
pub use trace::{Traced, trace, try_trace};

use crate::error::{Error, Result};
use crate::graph::*;
use crate::sharding::{self, Mesh, Sharding};
use crate::types::{Dtype, TensorType};
use std::cell::RefCell;
use std::panic::Location;
use std::rc::Rc;

/// A function that is being built.
#[derive(Clone, Debug)]
pub struct Builder {
    state: Rc<RefCell<State>>,
}

/// A value of a function that is being built; cheap to clone.
#[derive(Clone, Debug)]
pub struct Value {
    state: Rc<RefCell<State>>,
    id: ValueId,
    ty: Rc<TensorType>,
}

#[derive(Debug, Default)]
struct State {
    types: Vec<TensorType>,
    /// For each value, the serial number of the region that defines it.
    homes: Vec<usize>,
    /// For each value, the line of Rust that made it.
    lines: Vec<&'static Location<'static>>,
    arguments: Vec<Argument>,
    /// Shardings of results by their number, with the line of Rust that set each.
    shardings: Vec<(usize, Sharding, &'static Location<'static>)>,
    /// Open regions with their serial numbers, outermost first.
    open: Vec<(usize, Region)>,
    regions: usize,
    error: Option<Error>,
}

impl State {
    fn define(&mut self, ty: TensorType, at: &'static Location<'static>) -> ValueId {
        self.types.push(ty);
        self.homes.push(self.open.last().map_or(0, |(serial, _)| *serial));
        self.lines.push(at);
        ValueId(self.types.len() - 1)
    }

    fn enter(&mut self) {
        self.regions += 1;
        self.open.push((self.regions, Region::default()));
    }
}

impl Default for Builder {
    fn default() -> Self {
        Self::new()
    }
}

impl Builder {
    /// Creates an empty function.
    pub fn new() -> Self {
        let mut state = State::default();
        state.enter();
        Self { state: Rc::new(RefCell::new(state)) }
    }

    /// Declares the next argument of the function.
    #[track_caller]
    pub fn argument(&self, name: &str, ty: TensorType) -> Value {
        if self.state.borrow().open.len() != 1 {
            self.fail("func.func", format!("argument `{name}` inside a nested region"));
        }
        let mut state = self.state.borrow_mut();
        let id = state.define(ty.clone(), Location::caller());
        state.arguments.push(Argument { name: name.into(), ..Argument::default() });
        if let Some((_, region)) = state.open.first_mut() {
            region.arguments.push(id);
        }
        drop(state);
        self.handle(id, ty)
    }

    /// Makes a constant whose elements are all `number`.
    #[track_caller]
    pub fn splat(&self, number: impl Into<Number>, ty: TensorType) -> Value {
        let number = number.into();
        let check = if number.fits(ty.dtype) { Ok(ty.clone()) } else { Err(format!("{number:?} is no {}", ty.dtype)) };
        self.emit(Kind::Constant(Literal::Splat(number)), &[], check, &ty)
    }

    /// Makes a scalar constant.
    #[track_caller]
    pub fn scalar(&self, number: impl Into<Number>, dtype: Dtype) -> Value {
        self.splat(number, TensorType::scalar(dtype))
    }

    /// Makes a constant from all of its elements, row-major.
    #[track_caller]
    pub fn dense<N: Into<Number>>(&self, numbers: impl IntoIterator<Item = N>, ty: TensorType) -> Value {
        let numbers: Vec<Number> = numbers.into_iter().map(Into::into).collect();
        let check = if numbers.len() != ty.elements() {
            Err(format!("{} numbers for {ty}", numbers.len()))
        } else if let Some(number) = numbers.iter().find(|n| !n.fits(ty.dtype)) {
            Err(format!("{number:?} is no {}", ty.dtype))
        } else {
            Ok(ty.clone())
        };
        self.emit(Kind::Constant(Literal::Dense(numbers)), &[], check, &ty)
    }

    /// Counts 0, 1, 2, ... along `dimension`.
    #[track_caller]
    pub fn iota(&self, dimension: usize, ty: TensorType) -> Value {
        let check = if dimension >= ty.rank() {
            Err(format!("dimension {dimension} of {ty}"))
        } else if ty.dtype == Dtype::Pred {
            Err("numbers expected, got predicates".into())
        } else {
            Ok(ty.clone())
        };
        self.emit(Kind::Iota { dimension }, &[], check, &ty)
    }

    /// Lets result `result` reuse the buffer of `argument`, which the caller then has to donate.
    #[track_caller]
    pub fn alias(&self, argument: &Value, result: usize) {
        self.annotate("tf.aliasing_output", argument, |a| a.alias = Some(result));
    }

    /// Shards `argument` over devices. The partitioner chooses a sharding for arguments without one; the compiled
    /// executable reports it.
    #[track_caller]
    pub fn shard(&self, argument: &Value, sharding: &Sharding) {
        match sharding.part(argument.ty()) {
            Ok(_) => self.annotate("sdy.sharding", argument, |a| a.sharding = Some(sharding.clone())),
            Err(error) => self.fail("sdy.sharding", error.to_string()),
        }
    }

    /// Shards result `result` of the function over devices.
    #[track_caller]
    pub fn shard_result(&self, result: usize, sharding: &Sharding) {
        self.state.borrow_mut().shardings.push((result, sharding.clone(), Location::caller()));
    }

    #[track_caller]
    fn annotate(&self, operation: &'static str, argument: &Value, set: impl FnOnce(&mut Argument)) {
        let mut state = self.state.borrow_mut();
        let own = Rc::ptr_eq(&argument.state, &self.state);
        let arguments = state.open.first().filter(|_| own).map(|(_, region)| &region.arguments[..]);
        let index = arguments.unwrap_or_default().iter().position(|id| *id == argument.id);
        match index {
            Some(index) => set(&mut state.arguments[index]),
            None => {
                drop(state);
                self.fail(operation, "the value is not an argument of the function".into());
            }
        }
    }

    /// Finishes the module, whose `main` returns `results`, each with a name for readers. The module has as many
    /// partitions as its mesh has devices.
    ///
    /// # Errors
    /// Returns the first illegal operation, or one in an illegal place: a sharding inside a manual computation, or meshes
    /// with different numbers of devices.
    #[track_caller]
    pub fn finish(self, name: &str, results: &[(&str, &Value)]) -> Result<Module> {
        if results.is_empty() {
            self.fail("return", "no results".into());
        }
        let (main, _) = self.close(results)?;
        if let Err((operation, reason)) = sharding::check(&main) {
            return Err(Error::Operation { operation, reason, at: Location::caller() });
        }
        let partitions = main.meshes().first().map_or(1, Mesh::devices);
        Ok(Module { name: name.into(), partitions, main })
    }

    /// Finishes the function that returns `results`; also returns the line of Rust that made each value.
    #[track_caller]
    fn close(self, results: &[(&str, &Value)]) -> Result<(Function, Vec<&'static Location<'static>>)> {
        let values: Vec<&Value> = results.iter().map(|(_, v)| *v).collect();
        if let Err(reason) = self.in_scope(&values) {
            self.fail("return", reason);
        }
        if self.state.borrow().open.len() != 1 {
            self.fail(
                "return",
                "the end of a function expected, got a nested region or a function that is finished".into(),
            );
        }
        let mut state = self.state.borrow_mut();
        let bound = state.open.first().map(|(_, region)| region.arguments.clone()).unwrap_or_default();
        let mut outputs: Vec<Output> =
            results.iter().map(|(name, _)| Output { name: (*name).into(), ..Output::default() }).collect();
        for (index, sharding, at) in std::mem::take(&mut state.shardings) {
            let reason = match values.get(index).map(|v| sharding.part(v.ty())) {
                None => format!("one of {} results expected, got {index}", values.len()),
                Some(Err(error)) => error.to_string(),
                Some(Ok(_)) => {
                    outputs[index].sharding = Some(sharding);
                    continue;
                }
            };
            state.error.get_or_insert(Error::Operation { operation: "sdy.sharding", reason, at });
        }
        for (i, argument) in state.arguments.iter().enumerate() {
            let Some(result) = argument.alias else { continue };
            let Some(ty) = bound.get(i).and_then(|id| state.types.get(id.0)) else { continue };
            let found = values.get(result).map(|v| &*v.ty);
            let taken = state.arguments[..i].iter().any(|a| a.alias == Some(result));
            let sharding = outputs.get(result).and_then(|output| output.sharding.as_ref());
            let reason = match (&argument.sharding, sharding) {
                (Some(one), Some(other)) if one.part(ty) != other.part(ty) => {
                    format!("argument `{}` is split by {one}, and result {result} by {other}", argument.name)
                }
                _ if found != Some(ty) || taken => {
                    let found = found.map_or("no such result".into(), |t| t.to_string());
                    format!("argument `{}` of type {ty} cannot become result {result}: {found}", argument.name)
                }
                _ => continue,
            };
            let error = Error::Operation { operation: "tf.aliasing_output", reason, at: Location::caller() };
            state.error.get_or_insert(error);
            break;
        }
        if let Some(error) = state.error.take() {
            return Err(error);
        }
        // With no open region, remaining clones of the builder cannot add operations.
        let (_, mut body) = state.open.pop().unwrap_or_default();
        body.results = values.iter().map(|v| v.id).collect();
        let (arguments, types) = (std::mem::take(&mut state.arguments), std::mem::take(&mut state.types));
        let lines = std::mem::take(&mut state.lines);
        Ok((Function { arguments, results: outputs, body, types }, lines))
    }

    #[track_caller]
    pub(crate) fn fail(&self, operation: &'static str, reason: String) {
        let error = Error::Operation { operation, reason, at: Location::caller() };
        self.state.borrow_mut().error.get_or_insert(error);
    }

    fn handle(&self, id: ValueId, ty: TensorType) -> Value {
        Value { state: self.state.clone(), id, ty: Rc::new(ty) }
    }

    /// Checks that the values may be read here: they belong to this function and to a region that is still open.
    fn in_scope(&self, values: &[&Value]) -> Result<(), String> {
        let state = self.state.borrow();
        for value in values {
            if !Rc::ptr_eq(&value.state, &self.state) {
                return Err(format!("a {} of another function", value.ty));
            }
            let home = state.homes.get(value.id.0);
            if !state.open.iter().any(|(serial, _)| Some(serial) == home) {
                return Err(format!("a {} of a region that is closed", value.ty));
            }
        }
        Ok(())
    }

    /// Adds an operation with one result. If `ty` is an error, the result gets the type `fallback`.
    #[track_caller]
    pub(crate) fn emit(
        &self,
        kind: Kind,
        operands: &[&Value],
        ty: Result<TensorType, String>,
        fallback: &TensorType,
    ) -> Value {
        self.emit_all(kind, operands, vec![], ty.map(|ty| vec![ty]), || vec![fallback.clone()]).swap_remove(0)
    }

    /// Adds an operation to the innermost open region.
    #[track_caller]
    pub(crate) fn emit_all(
        &self,
        kind: Kind,
        operands: &[&Value],
        regions: Vec<Region>,
        types: Result<Vec<TensorType>, String>,
        fallback: impl FnOnce() -> Vec<TensorType>,
    ) -> Vec<Value> {
        // Not a closure, so that `Location::caller` is the caller's line.
        let types = match self.in_scope(operands).and(types) {
            Ok(types) => types,
            Err(reason) => {
                self.fail(kind.name(), reason);
                fallback()
            }
        };
        let at = Location::caller();
        let mut state = self.state.borrow_mut();
        let results: Vec<ValueId> = types.iter().map(|ty| state.define(ty.clone(), at)).collect();
        let operands = operands.iter().map(|v| v.id).collect();
        let operation = Operation { kind, operands, results: results.clone(), regions };
        // The outermost region stays open until `finish`; operations on values kept after that are dropped.
        if let Some((_, region)) = state.open.last_mut() {
            region.operations.push(operation);
        }
        drop(state);
        results.into_iter().zip(types).map(|(id, ty)| self.handle(id, ty)).collect()
    }
}

impl Value {
    /// Returns the dtype and shape of the value.
    pub fn ty(&self) -> &TensorType {
        &self.ty
    }

    /// Returns the sizes of the value, outermost dimension first.
    pub fn shape(&self) -> &[usize] {
        &self.ty.shape
    }

    /// Returns the dtype of the value's elements.
    pub fn dtype(&self) -> Dtype {
        self.ty.dtype
    }

    /// Returns the builder of the function that the value belongs to.
    pub fn builder(&self) -> Builder {
        Builder { state: self.state.clone() }
    }

    /// Makes a constant of the same type whose elements are all `number`.
    #[track_caller]
    pub fn like(&self, number: impl Into<Number>) -> Self {
        self.builder().splat(number, (*self.ty).clone())
    }

    /// Returns the id of the value in [`Function`](crate::Function).
    pub(crate) fn id(&self) -> ValueId {
        self.id
    }

    /// Adds an operation with one result, on this value and `others`.
    #[track_caller]
    fn then(&self, kind: Kind, others: &[&Self], ty: Result<TensorType, String>) -> Self {
        let operands: Vec<&Self> = std::iter::once(self).chain(others.iter().copied()).collect();
        self.builder().emit(kind, &operands, ty, &self.ty)
    }
}
