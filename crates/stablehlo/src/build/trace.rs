//! Functions that are built once and used any number of times.

use super::{Builder, State, Value};
use crate::error::{Error, Result};
use crate::graph::{Function, Operation, Region, ValueId};
use crate::types::TensorType;
use std::panic::Location;
use std::sync::Arc;

/// A function that reads only its arguments. [`Builder::call`] adds it to a program, [`Builder::scan`] repeats it, and
/// [`Builder::vjp`] differentiates it.
#[derive(Clone, Debug)]
pub struct Traced(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    function: Function,
    lines: Vec<&'static Location<'static>>,
}

/// Maps the value ids of a [`Traced`] to the ids of their copies in another function.
pub(crate) type Names = Vec<Option<ValueId>>;

/// Traces `body` into a function of `arguments`.
///
/// ```
/// use grpo_stablehlo::{Builder, Dtype, TensorType, trace};
///
/// let ty = TensorType::new(Dtype::F32, [8]);
/// let silu = trace(&[ty.clone()], |_, x| vec![&x[0] * x[0].unary(grpo_stablehlo::Unary::Logistic)])?;
/// let f = Builder::new();
/// let x = f.argument("x", ty);
/// let once = f.call(&silu, &[&x]).remove(0);
/// let twice = f.call(&silu, &[&once]).remove(0);
/// let module = f.finish("twice", &[("y", &twice)])?;
/// assert_eq!(module.to_string().matches("stablehlo.logistic").count(), 2);
/// # Ok::<(), grpo_stablehlo::Error>(())
/// ```
///
/// # Errors
/// Returns the first illegal operation. Reading a value of another function is illegal.
#[track_caller]
pub fn trace(arguments: &[TensorType], body: impl FnOnce(&Builder, &[Value]) -> Vec<Value>) -> Result<Traced> {
    try_trace(arguments, |builder, values| Ok(body(builder, values)))
}

/// Traces like [`trace`], with a `body` that can fail.
///
/// ```
/// use grpo_stablehlo::{Dtype, TensorType, try_trace};
///
/// let ty = TensorType::new(Dtype::F32, [8]);
/// let halves = |parts: usize| {
///     try_trace(&[ty.clone()], |_, x| match 8 % parts {
///         0 => Ok::<_, Box<dyn std::error::Error>>(vec![x[0].reshape(&[parts, 8 / parts])]),
///         _ => Err(format!("{parts} parts of 8").into()),
///     })
/// };
/// assert!(halves(2).is_ok());
/// assert_eq!(halves(3).unwrap_err().to_string(), "3 parts of 8");
/// ```
///
/// # Errors
/// The error of `body`, or the errors of [`trace`].
#[track_caller]
pub fn try_trace<E: From<Error>>(
    arguments: &[TensorType],
    body: impl FnOnce(&Builder, &[Value]) -> Result<Vec<Value>, E>,
) -> Result<Traced, E> {
    let builder = Builder::new();
    // Not a closure, so that `Location::caller` is the caller's line.
    let mut values = Vec::with_capacity(arguments.len());
    for ty in arguments {
        values.push(builder.argument("", ty.clone()));
    }
    let results = body(&builder, &values)?;
    Ok(builder.traced(&results)?)
}

impl Traced {
    /// Returns the function as data.
    pub fn function(&self) -> &Function {
        &self.0.function
    }

    /// Returns the types of the arguments.
    pub fn argument_types(&self) -> Vec<TensorType> {
        self.types(&self.0.function.body.arguments)
    }

    /// Returns the types of the results.
    pub fn result_types(&self) -> Vec<TensorType> {
        self.types(&self.0.function.body.results)
    }

    fn types(&self, ids: &[ValueId]) -> Vec<TensorType> {
        ids.iter().map(|id| self.0.function.type_of(*id).clone()).collect()
    }

    /// Returns the line of Rust that built a value.
    pub(crate) fn line(&self, id: ValueId) -> &'static Location<'static> {
        self.0.lines[id.0]
    }

    /// Returns an empty map for the ids of this function.
    pub(crate) fn names(&self) -> Names {
        vec![None; self.0.function.types.len()]
    }

    /// Turns a region of one of the function's operations, which reads only its arguments, into a function.
    pub(crate) fn region(&self, region: &Region) -> Result<Self> {
        let builder = Builder::new();
        let mut names = self.names();
        for id in &region.arguments {
            names[id.0] = Some(builder.argument("", self.0.function.type_of(*id).clone()).id);
        }
        for operation in &region.operations {
            builder.copy(self, operation, &mut names);
        }
        let results: Vec<Value> = region.results.iter().map(|id| builder.copied(self, *id, &names)).collect();
        builder.traced(&results)
    }
}

impl Builder {
    /// Calls `function` on `arguments` by adding its operations here.
    #[track_caller]
    pub fn call(&self, function: &Traced, arguments: &[&Value]) -> Vec<Value> {
        if let Err(reason) = self.takes(function, arguments) {
            self.fail("call", reason);
            let types = function.result_types();
            return types.into_iter().map(|ty| self.bind(&ty)).collect();
        }
        let mut names = function.names();
        let body = &function.function().body;
        for (id, argument) in body.arguments.iter().zip(arguments) {
            names[id.0] = Some(argument.id);
        }
        for operation in &body.operations {
            self.copy(function, operation, &mut names);
        }
        body.results.iter().map(|id| self.copied(function, *id, &names)).collect()
    }

    /// Checks that `function` takes `arguments`.
    pub(crate) fn takes(&self, function: &Traced, arguments: &[&Value]) -> Result<(), String> {
        let expected = function.argument_types();
        let fits = expected.len() == arguments.len() && expected.iter().zip(arguments).all(|(ty, v)| ty == v.ty());
        if fits {
            return self.in_scope(arguments);
        }
        let found: Vec<&TensorType> = arguments.iter().map(|v| v.ty()).collect();
        Err(format!("arguments ({}) expected, got ({})", listed(&expected), listed(found)))
    }

    /// Finishes the function that returns `results`.
    #[track_caller]
    pub(crate) fn traced(self, results: &[Value]) -> Result<Traced> {
        let results: Vec<(&str, &Value)> = results.iter().map(|v| ("", v)).collect();
        let (function, lines) = self.close(&results)?;
        Ok(Traced(Arc::new(Inner { function, lines })))
    }

    /// Adds a copy of an operation of `source`, whose operands are already in `names`.
    pub(crate) fn copy(&self, source: &Traced, operation: &Operation, names: &mut Names) {
        let mut state = self.state.borrow_mut();
        let operation = state.copy(source, operation, names);
        if let Some((_, region)) = state.open.last_mut() {
            region.operations.push(operation);
        }
    }

    /// Returns the number of operations in the innermost open region.
    pub(crate) fn length(&self) -> usize {
        self.state.borrow().open.last().map_or(0, |(_, region)| region.operations.len())
    }

    /// Returns the copy of a value of `source`.
    pub(crate) fn copied(&self, source: &Traced, id: ValueId, names: &Names) -> Value {
        let copy = names[id.0].expect("a value is defined before it is used");
        self.handle(copy, source.function().type_of(id).clone())
    }
}

impl State {
    fn copy(&mut self, source: &Traced, operation: &Operation, names: &mut Names) -> Operation {
        let operands = renamed(&operation.operands, names);
        let regions = operation.regions.iter().map(|region| self.copy_region(source, region, names)).collect();
        for id in &operation.results {
            names[id.0] = Some(self.define(source.function().type_of(*id).clone(), source.line(*id)));
        }
        Operation { kind: operation.kind.clone(), operands, results: renamed(&operation.results, names), regions }
    }

    fn copy_region(&mut self, source: &Traced, region: &Region, names: &mut Names) -> Region {
        // No handle of these values exists outside, so their home region does not matter.
        for id in &region.arguments {
            // Several regions of one operation may bind the same values.
            if names[id.0].is_none() {
                names[id.0] = Some(self.define(source.function().type_of(*id).clone(), source.line(*id)));
            }
        }
        let operations = region.operations.iter().map(|operation| self.copy(source, operation, names)).collect();
        Region { arguments: renamed(&region.arguments, names), operations, results: renamed(&region.results, names) }
    }

    /// Copies the body of a function into a region of an operation here.
    pub(super) fn body(&mut self, function: &Traced) -> Region {
        let mut names = function.names();
        self.copy_region(function, &function.function().body, &mut names)
    }
}

fn renamed(ids: &[ValueId], names: &Names) -> Vec<ValueId> {
    ids.iter().map(|id| names[id.0].expect("a value is defined before it is used")).collect()
}

/// Lists types, separated by commas.
pub(crate) fn listed<'a>(types: impl IntoIterator<Item = &'a TensorType>) -> String {
    types.into_iter().map(TensorType::to_string).collect::<Vec<_>>().join(", ")
}
