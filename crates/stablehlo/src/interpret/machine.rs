//! The interpreter's walk over operations and regions.

use super::array::{Array, Elements, ill_typed};
use super::contract::{arg_max, dot, reduce, terms};
use super::elementwise::combine;
use super::{Fault, Interpreter, Rounding, elementwise, gather, shape};
use crate::build::listed;
use crate::error::Result;
use crate::graph::*;
use crate::types::{Dtype, TensorType};
use std::rc::Rc;

/// The maximal nesting of regions; deeper programs are refused before the stack overflows.
const DEPTH: usize = 64;

pub(super) struct Machine<'a> {
    pub(super) settings: &'a Interpreter,
    pub(super) function: &'a Function,
    /// Values by id; `None` outside of the region that defines the value.
    values: Vec<Option<Rc<Array>>>,
    work: u64,
    depth: usize,
}

pub(super) type Values = Vec<Rc<Array>>;

impl<'a> Machine<'a> {
    pub(super) fn new(settings: &'a Interpreter, function: &'a Function) -> Result<Self> {
        let machine = Self { settings, function, values: vec![None; function.types.len()], work: 0, depth: 0 };
        machine.fits(function.types.iter(), 1)?;
        Ok(machine)
    }

    /// Checks that this number of copies of values of these types stays within the limit of elements.
    pub(super) fn fits<'t>(&self, types: impl Iterator<Item = &'t TensorType> + Clone, copies: usize) -> Result<()> {
        let elements = types.clone().fold(0_usize, |sum, ty| sum.saturating_add(ty.elements()));
        let elements = elements.max(1).saturating_mul(copies);
        if elements <= self.settings.elements {
            return Ok(());
        }
        let largest = types.max_by_key(|ty| ty.elements());
        let largest = largest.map_or(String::new(), |ty| format!(", the largest a {ty}"));
        let limit = self.settings.elements;
        let reason = format!("values of {elements} elements{largest}, and `Interpreter::elements` is {limit}");
        Err(Fault::Limit(reason).of("func.func"))
    }

    /// Runs the function and returns its results.
    pub(super) fn run(mut self, arguments: &[Array]) -> Result<Vec<Array>> {
        let function = self.function;
        let expected = listed(function.body.arguments.iter().map(|id| function.type_of(*id)));
        let found = listed(arguments.iter().map(Array::ty));
        if expected != found {
            return Err(Fault::Malformed(format!("({expected}) expected, got ({found})")).of("func.func"));
        }
        let arguments = arguments.iter().cloned().map(Rc::new).collect();
        let results = self.region(&function.body, arguments, "func.func")?;
        drop(self);
        Ok(results.into_iter().map(Rc::unwrap_or_clone).collect())
    }

    /// Runs a region of the operation `name`.
    pub(super) fn region(&mut self, region: &'a Region, arguments: Values, name: &'static str) -> Result<Values> {
        if self.depth == DEPTH {
            return Err(Fault::Limit(format!("regions in {DEPTH} others")).of(name));
        }
        self.depth += 1;
        self.bind(&region.arguments, arguments);
        for operation in &region.operations {
            self.operation(operation)?;
        }
        let results = self.read(&region.results);
        let defined = region.operations.iter().flat_map(|op| &op.results).chain(&region.arguments);
        defined.for_each(|id| self.values[id.0] = None);
        self.depth -= 1;
        Ok(results)
    }

    fn bind(&mut self, ids: &[ValueId], values: Values) {
        ids.iter().zip(values).for_each(|(id, value)| self.values[id.0] = Some(value));
    }

    fn read(&self, ids: &[ValueId]) -> Values {
        ids.iter().map(|id| self.values[id.0].clone().expect("a value is defined before it is read")).collect()
    }

    /// Adds an operation to the count of work, and fails beyond the limit.
    pub(super) fn spend(&mut self, work: u64) -> Result<(), Fault> {
        self.work = self.work.saturating_add(work);
        if self.work <= self.settings.work {
            return Ok(());
        }
        let limit = self.settings.work;
        Err(Fault::Limit(format!("the program reads and writes more than {limit} elements (`Interpreter::work`)")))
    }

    fn operation(&mut self, op: &'a Operation) -> Result<()> {
        let fail = |fault: Fault| fault.of(op.kind.name());
        let operands = self.read(&op.operands);
        let types: Vec<&TensorType> = op.results.iter().map(|id| self.function.type_of(*id)).collect();
        let read = operands.iter().map(|a| &a.ty);
        let touched = read.chain(types.iter().copied()).map(|ty| ty.elements() as u64).fold(1, u64::saturating_add);
        self.spend(touched).map_err(fail)?;
        let results = match &op.kind {
            Kind::While => self.repeat(op, operands)?,
            Kind::Scan(scan) => self.scan(scan, op, &operands)?,
            Kind::CustomVjp { .. } => self.inline(op, operands)?,
            Kind::Manual(manual) => self.manual(manual, op, &operands, &types)?,
            kind => {
                let operands: Vec<&Array> = operands.iter().map(|a| &**a).collect();
                let elements = self.compute(kind, &operands, &types).map_err(fail)?;
                self.typed(elements, &types)
            }
        };
        self.bind(&op.results, results);
        Ok(())
    }

    /// Turns elements into tensors of these types.
    fn typed(&self, elements: Vec<Elements>, types: &[&TensorType]) -> Values {
        let typed = elements.into_iter().zip(types).map(|(elements, ty)| {
            debug_assert_eq!(elements.len(), ty.elements(), "{ty}");
            let array = Array { ty: (*ty).clone(), elements };
            Rc::new(if self.settings.rounding == Rounding::Dtypes { array.rounded() } else { array })
        });
        typed.collect()
    }

    /// Computes the elements of the results of an operation without regions.
    fn compute(&mut self, kind: &Kind, operands: &[&Array], types: &[&TensorType]) -> Result<Vec<Elements>, Fault> {
        let ty = types[0];
        Ok(vec![match (kind, operands) {
            (Kind::Constant(literal), _) => constant(literal, ty),
            (Kind::Iota { dimension }, _) => shape::iota(*dimension, ty),
            (Kind::Unary(unary), [a]) => elementwise::unary(*unary, a),
            (Kind::Binary(binary), [a, b]) => combine(*binary, &a.elements, &b.elements, ty.dtype),
            (Kind::Compare(direction), [a, b]) => elementwise::compare(*direction, a, b),
            (Kind::Select, [p, a, b]) => elementwise::select(p, a, b),
            (Kind::Clamp, [low, a, high]) => elementwise::clamp(low, a, high),
            (Kind::Convert, [a]) => elementwise::convert(a, ty.dtype),
            (Kind::BitcastConvert, [a]) => elementwise::bitcast(a, ty.dtype),
            (Kind::DotGeneral(dimensions, _), [a, b]) => {
                self.spend((ty.elements() as u64).saturating_mul(terms(&a.ty, dimensions) as u64))?;
                dot(a, b, dimensions, ty)
            }
            (Kind::Reduce { reducers, dimensions }, all) => {
                let (values, inits) = all.split_at(reducers.len());
                let each = values.iter().zip(inits).zip(reducers).zip(types);
                return Ok(each.map(|(((a, init), reducer), ty)| reduce(a, init, *reducer, dimensions, ty)).collect());
            }
            (Kind::BroadcastInDim { dimensions }, [a]) => shape::broadcast(a, dimensions, ty),
            (Kind::Reshape | Kind::Named(_) | Kind::StopGradient | Kind::Constrain(_), [a]) => a.elements.clone(),
            (Kind::Transpose { permutation }, [a]) => shape::transpose(a, permutation, ty),
            (Kind::Concatenate { dimension }, all) => shape::concatenate(all, *dimension, ty),
            (Kind::Slice { start, .. }, [a]) => shape::slice(a, start, ty),
            (Kind::DynamicSlice { .. }, [a, starts @ ..]) => shape::dynamic_slice(a, starts, ty),
            (Kind::DynamicUpdateSlice, [a, update, starts @ ..]) => shape::dynamic_update_slice(a, update, starts),
            (Kind::Pad { low, .. }, [a, value]) => shape::pad(a, value, low, ty),
            (Kind::Gather(dimensions), [a, indices]) => gather::gather(a, indices, dimensions, ty)?,
            (Kind::Scatter(dimensions, reducer), [a, indices, updates]) => {
                gather::scatter(a, indices, updates, dimensions, *reducer)?
            }
            (Kind::ArgMax { dimension }, [a, b, c, d]) => return Ok(arg_max([a, b], [c, d], *dimension)),
            (Kind::OptimizationBarrier, all) => return Ok(all.iter().map(|a| a.elements.clone()).collect()),
            (Kind::CustomCall(call), _) => return Err(Fault::Uninterpreted(format!("custom call `{}`", call.target))),
            (kind, _) => ill_typed(kind.name()),
        }])
    }
}

pub(crate) fn constant(literal: &Literal, ty: &TensorType) -> Elements {
    let numbers = match literal {
        Literal::Splat(number) => vec![*number; ty.elements()],
        Literal::Dense(numbers) => numbers.clone(),
    };
    let float = |n: &Number| if let Number::Float(x) = n { *x } else { 0.0 };
    let int = |n: &Number| if let Number::Int(x) = n { *x } else { 0 };
    match ty.dtype {
        Dtype::Pred => Elements::Pred(numbers.iter().map(|n| *n == Number::Bool(true)).collect()),
        dtype if dtype.is_float() => Elements::Float(numbers.iter().map(float).collect()),
        _ => Elements::Int(numbers.iter().map(int).collect()),
    }
}
