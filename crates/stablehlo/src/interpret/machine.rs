//! The interpreter's walk over operations and regions.

use super::array::{Array, Elements};
use super::collective::of_devices;
use super::contract::{Product, arg_max, reduce, sorted};
use super::{Fault, Interpreter, Rounding, elementwise, gather, shape};
use crate::error::Result;
use crate::graph::*;
use crate::sharding::Manual;
use crate::types::{Dtype, TensorType};
use std::rc::Rc;

/// The maximal nesting of regions; deeper programs are refused before the stack overflows.
const DEPTH: usize = 64;

pub(super) struct Machine<'a> {
    pub(super) settings: &'a Interpreter,
    pub(super) function: &'a Function,
    pub(super) replicas: usize,
    pub(super) partitions: usize,
    /// The replicas or devices, which run in lockstep, operation by operation.
    pub(super) lanes: Vec<Lane>,
    /// The manual computation whose body runs, with one lane per device.
    pub(super) manual: Option<&'a Manual>,
    work: u64,
    depth: usize,
}

/// One replica of the program, or one device of a manual computation.
pub(super) struct Lane {
    /// Values by id; `None` outside of the region that defines the value.
    pub(super) values: Vec<Option<Rc<Array>>>,
    pub(super) replica: usize,
    /// The coordinates along the axes of a manual computation's mesh.
    pub(super) coordinates: Vec<usize>,
}

pub(super) type Values = Vec<Rc<Array>>;

impl<'a> Machine<'a> {
    pub(super) fn new(
        settings: &'a Interpreter,
        function: &'a Function,
        replicas: usize,
        partitions: usize,
    ) -> Result<Self> {
        let machine = Self { settings, function, replicas, partitions, lanes: vec![], manual: None, work: 0, depth: 0 };
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

    /// Creates a replica that has not run yet.
    pub(super) fn lane(&self, replica: usize, coordinates: Vec<usize>) -> Lane {
        Lane { values: vec![None; self.function.types.len()], replica, coordinates }
    }

    /// Runs all replicas with their arguments and returns the results of each.
    pub(super) fn run(mut self, arguments: &[Vec<Array>]) -> Result<Vec<Vec<Array>>> {
        self.fits(self.function.types.iter(), arguments.len())?;
        self.lanes = (0..arguments.len()).map(|replica| self.lane(replica, vec![])).collect();
        let arguments = arguments.iter().map(|list| list.iter().cloned().map(Rc::new).collect()).collect();
        let function = self.function;
        let lanes: Vec<usize> = (0..self.lanes.len()).collect();
        let results = self.region(&function.body, &lanes, arguments, "func.func")?;
        drop(self);
        Ok(results.into_iter().map(|list| list.into_iter().map(Rc::unwrap_or_clone).collect()).collect())
    }

    /// Runs a region of the operation `name` on some of the lanes. Arguments and results are listed by lane.
    pub(super) fn region(
        &mut self,
        region: &'a Region,
        lanes: &[usize],
        arguments: Vec<Values>,
        name: &'static str,
    ) -> Result<Vec<Values>> {
        if self.depth == DEPTH {
            return Err(Fault::Limit(format!("regions in {DEPTH} others")).of(name));
        }
        self.depth += 1;
        for (lane, arguments) in lanes.iter().zip(arguments) {
            self.bind(*lane, &region.arguments, arguments).map_err(|fault| fault.of(name))?;
        }
        for operation in &region.operations {
            self.operation(operation, lanes)?;
        }
        let results = lanes.iter().map(|lane| self.values(*lane, &region.results)).collect::<Result<_, _>>();
        for lane in lanes {
            let defined = region.operations.iter().flat_map(|op| &op.results).chain(&region.arguments);
            defined.for_each(|id| self.lanes[*lane].values[id.0] = None);
        }
        self.depth -= 1;
        results.map_err(|fault: Fault| fault.of(name))
    }

    /// Defines values, after a check of their types.
    fn bind(&mut self, lane: usize, ids: &[ValueId], values: Values) -> Result<(), Fault> {
        let list = |types: Vec<&TensorType>| types.iter().map(|t| t.to_string()).collect::<Vec<_>>().join(", ");
        let types = ids.iter().map(|id| self.function.types.get(id.0)).collect::<Option<Vec<_>>>();
        let types = types.ok_or_else(|| Fault::malformed("a value without a type"))?;
        let found: Vec<&TensorType> = values.iter().map(|v| &v.ty).collect();
        if types != found {
            return Err(Fault::malformed(format!("({}) expected, got ({})", list(types), list(found))));
        }
        ids.iter().zip(values).for_each(|(id, value)| self.lanes[lane].values[id.0] = Some(value));
        Ok(())
    }

    fn values(&self, lane: usize, ids: &[ValueId]) -> Result<Values, Fault> {
        let value = |id: &ValueId| {
            let value = self.lanes[lane].values.get(id.0).cloned().flatten();
            value.ok_or_else(|| Fault::malformed(format!("%{} is read where it is not defined", id.0)))
        };
        ids.iter().map(value).collect()
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

    fn operation(&mut self, op: &'a Operation, lanes: &[usize]) -> Result<()> {
        let name = op.kind.name();
        let fail = |fault: Fault| fault.of(name);
        let operands = lanes.iter().map(|lane| self.values(*lane, &op.operands)).collect::<Result<Vec<_>, _>>();
        let operands = operands.map_err(fail)?;
        let types = op.results.iter().map(|id| self.function.types.get(id.0)).collect::<Option<Vec<_>>>();
        let types = types.ok_or_else(|| fail(Fault::malformed("a value without a type")))?;
        let read = operands.first().into_iter().flatten().map(|a| &a.ty);
        let touched = read.chain(types.iter().copied()).map(|ty| ty.elements() as u64).fold(1, u64::saturating_add);
        self.spend(touched.saturating_mul(lanes.len() as u64)).map_err(fail)?;
        let results = match &op.kind {
            Kind::While => self.repeat(op, lanes, operands)?,
            Kind::Case => self.choose(op, lanes, &operands)?,
            Kind::Scan(scan) => self.scan(scan, op, lanes, &operands)?,
            Kind::CustomVjp { .. } => self.inline(op, lanes, operands)?,
            Kind::Manual(manual) => self.manual(manual, op, lanes, &operands, &types)?,
            kind @ of_devices!() => {
                let elements = self.meet(kind, lanes, &operands, &types).map_err(fail)?;
                let typed = elements.into_iter().map(|elements| self.typed(vec![elements], &types));
                typed.collect::<Result<_, _>>().map_err(fail)?
            }
            kind => {
                let mut results = Vec::with_capacity(lanes.len());
                for operands in &operands {
                    let operands: Vec<&Array> = operands.iter().map(|a| &**a).collect();
                    let elements = self.compute(kind, &operands, &types).map_err(fail)?;
                    results.push(self.typed(elements, &types).map_err(fail)?);
                }
                results
            }
        };
        for (lane, results) in lanes.iter().zip(results) {
            self.bind(*lane, &op.results, results).map_err(fail)?;
        }
        Ok(())
    }

    /// Turns elements into tensors of these types.
    fn typed(&self, elements: Vec<Elements>, types: &[&TensorType]) -> Result<Values, Fault> {
        if elements.len() != types.len() {
            return Err(Fault::malformed(format!("{} results expected, got {}", types.len(), elements.len())));
        }
        let typed = elements.into_iter().zip(types).map(|(elements, ty)| {
            let array = Array::new((*ty).clone(), elements).map_err(|error| Fault::Malformed(error.to_string()))?;
            Ok(Rc::new(if self.settings.rounding == Rounding::Dtypes { array.rounded() } else { array }))
        });
        typed.collect()
    }

    /// Computes the elements of the results of an operation without regions.
    fn compute(&mut self, kind: &Kind, operands: &[&Array], types: &[&TensorType]) -> Result<Vec<Elements>, Fault> {
        let count = || miscounted(operands, types);
        let same = || operands.iter().map(|a| a.elements.clone()).collect::<Vec<_>>();
        let ty = types.first().copied().ok_or_else(count)?;
        let operand = |i: usize| operands.get(i).copied().ok_or_else(count);
        let one = match kind {
            Kind::Constant(literal) => exactly(operands, types, |[]| constant(literal, ty))?,
            Kind::Iota { dimension } => exactly(operands, types, |[]| shape::iota(*dimension, ty))?,
            Kind::Unary(unary) => exactly(operands, types, |[a]| elementwise::unary(*unary, a, ty))?,
            Kind::Binary(binary) => exactly(operands, types, |[a, b]| elementwise::binary(*binary, a, b, ty))?,
            Kind::Compare(direction) => exactly(operands, types, |[a, b]| elementwise::compare(*direction, a, b, ty))?,
            Kind::Select => exactly(operands, types, |[a, b, c]| elementwise::select(a, b, c, ty))?,
            Kind::Clamp => exactly(operands, types, |[a, b, c]| elementwise::clamp(a, b, c, ty))?,
            Kind::Convert => exactly(operands, types, |[a]| elementwise::convert(a, ty))?,
            Kind::BitcastConvert => exactly(operands, types, |[a]| elementwise::bitcast(a, ty))?,
            Kind::DotGeneral(dimensions, _) => exactly(operands, types, |[a, b]| {
                let product = Product::new(&a.ty, &b.ty, dimensions, ty)?;
                self.spend((ty.elements() as u64).saturating_mul(product.terms as u64))?;
                product.of(a, b, ty)
            })?,
            Kind::Reduce { reducers, dimensions } => {
                if operands.len() != 2 * reducers.len() || types.len() != reducers.len() {
                    return Err(count());
                }
                let each = reducers.iter().zip(types).enumerate().map(|(i, (reducer, ty))| {
                    reduce(operand(i)?, operand(reducers.len() + i)?, *reducer, dimensions, ty)
                });
                return each.collect();
            }
            Kind::BroadcastInDim { dimensions } => exactly(operands, types, |[a]| shape::broadcast(a, dimensions, ty))?,
            Kind::Reshape => exactly(operands, types, |[a]| shape::reshape(a, ty))?,
            Kind::Transpose { permutation } => exactly(operands, types, |[a]| shape::transpose(a, permutation, ty))?,
            Kind::Concatenate { dimension } => shape::concatenate(operands, *dimension, ty)?,
            Kind::Slice { start, limit, stride } => {
                exactly(operands, types, |[a]| shape::slice(a, start, limit, stride, ty))?
            }
            Kind::DynamicSlice { sizes } => {
                shape::dynamic_slice(operand(0)?, operands.get(1..).ok_or_else(count)?, sizes, ty)?
            }
            Kind::DynamicUpdateSlice => {
                let starts = operands.get(2..).ok_or_else(count)?;
                shape::dynamic_update_slice(operand(0)?, operand(1)?, starts, ty)?
            }
            Kind::Pad { low, high, interior } => {
                exactly(operands, types, |[a, b]| shape::pad(a, b, low, high, interior, ty))?
            }
            Kind::Gather(dimensions) => exactly(operands, types, |[a, b]| gather::gather(a, b, dimensions, ty))?,
            Kind::Scatter(dimensions, reducer) => {
                exactly(operands, types, |[a, b, c]| gather::scatter(a, b, c, dimensions, *reducer, ty))?
            }
            Kind::Sort { dimension, order, stable: _ } => {
                let keys = operand(0)?;
                if operands.iter().any(|a| a.ty.shape != keys.ty.shape) {
                    return Err(Fault::malformed("operands of one shape expected"));
                }
                let places = sorted(keys, *dimension, *order)?;
                return Ok(operands.iter().map(|a| a.take(&places)).collect());
            }
            Kind::ArgMax { dimension } => {
                return exactly(operands, types, |[a, b, c, d]| arg_max([a, b], [c, d], *dimension));
            }
            Kind::OptimizationBarrier | Kind::Named(_) | Kind::StopGradient | Kind::Constrain(_) => return Ok(same()),
            Kind::CustomCall(call) => {
                return Err(Fault::Uninterpreted(format!("custom call `{}`", call.target)));
            }
            of_devices!() => return Err(Fault::malformed("an operation of several devices")),
            Kind::While | Kind::Case | Kind::Scan(_) | Kind::CustomVjp { .. } | Kind::Manual(_) => {
                return Err(Fault::malformed("an operation with regions"));
            }
        };
        Ok(vec![one])
    }
}

fn miscounted(operands: &[&Array], types: &[&TensorType]) -> Fault {
    Fault::malformed(format!("{} operands and {} results", operands.len(), types.len()))
}

/// Calls `of` with the operands, if there are as many as it takes.
fn exactly<const N: usize, T>(
    operands: &[&Array],
    types: &[&TensorType],
    of: impl FnOnce([&Array; N]) -> Result<T, Fault>,
) -> Result<T, Fault> {
    of(operands.try_into().map_err(|_| miscounted(operands, types))?)
}

/// Returns zeros of a type.
pub(super) fn zeros(ty: &TensorType) -> Elements {
    let n = ty.elements();
    match ty.dtype {
        Dtype::Pred => Elements::Pred(vec![false; n]),
        dtype if dtype.is_float() => Elements::Float(vec![0.0; n]),
        _ => Elements::Int(vec![0; n]),
    }
}

fn constant(literal: &Literal, ty: &TensorType) -> Result<Elements, Fault> {
    let numbers = match literal {
        Literal::Splat(number) => vec![*number; ty.elements()],
        Literal::Dense(numbers) => numbers.clone(),
    };
    if numbers.len() != ty.elements() {
        return Err(Fault::malformed(format!("{} numbers for {ty}", numbers.len())));
    }
    if let Some(number) = numbers.iter().find(|n| !n.fits(ty.dtype)) {
        return Err(Fault::malformed(format!("{number:?} is no {}", ty.dtype)));
    }
    let float = |n: &Number| if let Number::Float(x) = n { *x } else { 0.0 };
    let int = |n: &Number| if let Number::Int(x) = n { *x } else { 0 };
    Ok(match ty.dtype {
        Dtype::Pred => Elements::Pred(numbers.iter().map(|n| *n == Number::Bool(true)).collect()),
        dtype if dtype.is_float() => Elements::Float(numbers.iter().map(float).collect()),
        _ => Elements::Int(numbers.iter().map(int).collect()),
    })
}
