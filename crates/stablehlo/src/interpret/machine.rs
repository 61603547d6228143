//! The walk over operations and regions.

use super::array::{Array, Elements};
use super::contract::{Product, reduce, reduce_window, sorted};
use super::{Fault, Interpreter, Rounding, elementwise, gather, shape};
use crate::error::Result;
use crate::graph::*;
use crate::types::{Dtype, TensorType};
use std::rc::Rc;

/// Regions in regions beyond which a program is refused, before the stack ends.
const DEPTH: usize = 64;

pub(super) struct Machine<'a> {
    settings: &'a Interpreter,
    function: &'a Function,
    replicas: usize,
    partitions: usize,
    /// By id; none outside of the region that defines it.
    values: Vec<Option<Rc<Array>>>,
    work: u64,
    depth: usize,
}

pub(super) type Values = Vec<Rc<Array>>;

impl<'a> Machine<'a> {
    pub(super) fn new(
        settings: &'a Interpreter,
        function: &'a Function,
        replicas: usize,
        partitions: usize,
    ) -> Result<Self> {
        let elements = function.types.iter().fold(0_usize, |sum, ty| sum.saturating_add(ty.elements()));
        if elements > settings.elements {
            let largest = function.types.iter().max_by_key(|ty| ty.elements());
            let largest = largest.map_or(String::new(), |ty| format!(", the largest a {ty}"));
            let limit = settings.elements;
            let reason = format!("values of {elements} elements{largest}, and `Interpreter::elements` is {limit}");
            return Err(Fault::Limit(reason).of("func.func"));
        }
        let values = vec![None; function.types.len()];
        Ok(Self { settings, function, replicas, partitions, values, work: 0, depth: 0 })
    }

    pub(super) fn run(mut self, arguments: &[Array]) -> Result<Vec<Array>> {
        let arguments = arguments.iter().cloned().map(Rc::new).collect();
        let function = self.function;
        let results = self.region(&function.body, arguments, "func.func")?;
        drop(self);
        Ok(results.into_iter().map(Rc::unwrap_or_clone).collect())
    }

    /// The results of a region that belongs to the operation of this name.
    pub(super) fn region(&mut self, region: &Region, arguments: Values, name: &'static str) -> Result<Values> {
        if self.depth == DEPTH {
            return Err(Fault::Limit(format!("regions in {DEPTH} others")).of(name));
        }
        self.depth += 1;
        self.bind(&region.arguments, arguments).map_err(|fault| fault.of(name))?;
        for operation in &region.operations {
            self.operation(operation)?;
        }
        let results = region.results.iter().map(|id| self.value(*id)).collect::<Result<_, _>>();
        let defined = region.operations.iter().flat_map(|op| &op.results).chain(&region.arguments);
        defined.for_each(|id| self.values[id.0] = None);
        self.depth -= 1;
        results.map_err(|fault| fault.of(name))
    }

    /// Defines values, which have to be of the types that the function says.
    fn bind(&mut self, ids: &[ValueId], values: Values) -> Result<(), Fault> {
        let list = |types: Vec<&TensorType>| types.iter().map(|t| t.to_string()).collect::<Vec<_>>().join(", ");
        let types = ids.iter().map(|id| self.function.types.get(id.0)).collect::<Option<Vec<_>>>();
        let types = types.ok_or_else(|| Fault::malformed("a value without a type"))?;
        let found: Vec<&TensorType> = values.iter().map(|v| &v.ty).collect();
        if types != found {
            return Err(Fault::malformed(format!("({}) expected, got ({})", list(types), list(found))));
        }
        ids.iter().zip(values).for_each(|(id, value)| self.values[id.0] = Some(value));
        Ok(())
    }

    fn value(&self, id: ValueId) -> Result<Rc<Array>, Fault> {
        let value = self.values.get(id.0).cloned().flatten();
        value.ok_or_else(|| Fault::malformed(format!("%{} is read where it is not defined", id.0)))
    }

    /// Counts what an operation does.
    pub(super) fn spend(&mut self, work: u64) -> Result<(), Fault> {
        self.work = self.work.saturating_add(work);
        if self.work <= self.settings.work {
            return Ok(());
        }
        let limit = self.settings.work;
        Err(Fault::Limit(format!("the program reads and writes more than {limit} elements (`Interpreter::work`)")))
    }

    fn operation(&mut self, op: &Operation) -> Result<()> {
        let name = op.kind.name();
        let fail = |fault: Fault| fault.of(name);
        let operands = op.operands.iter().map(|id| self.value(*id)).collect::<Result<Values, _>>().map_err(fail)?;
        let types = op.results.iter().map(|id| self.function.types.get(id.0)).collect::<Option<Vec<_>>>();
        let types = types.ok_or_else(|| fail(Fault::malformed("a value without a type")))?;
        let touched = operands.iter().map(|a| &a.ty).chain(types.iter().copied()).map(|ty| ty.elements() as u64);
        let touched = touched.fold(1_u64, u64::saturating_add);
        self.spend(touched).map_err(fail)?;
        let results = match &op.kind {
            Kind::While => self.repeat(op, operands)?,
            Kind::Case => self.choose(op, &operands)?,
            Kind::Scan(scan) => self.scan(scan, op, &operands)?,
            Kind::Remat(_) | Kind::CustomVjp { .. } => self.inline(op, operands)?,
            kind => {
                let operands: Vec<&Array> = operands.iter().map(|a| &**a).collect();
                let results = self.compute(kind, &operands, &types).map_err(fail)?;
                if results.len() != types.len() {
                    let reason = format!("{} results expected, got {}", results.len(), types.len());
                    return Err(fail(Fault::Malformed(reason)));
                }
                let typed = results.into_iter().zip(types).map(|(elements, ty)| {
                    let array =
                        Array::new(ty.clone(), elements).map_err(|error| Fault::Malformed(error.to_string()))?;
                    let rounded = if self.settings.rounding == Rounding::Dtypes { array.rounded() } else { array };
                    Ok(Rc::new(rounded))
                });
                typed.collect::<Result<Values, Fault>>().map_err(fail)?
            }
        };
        self.bind(&op.results, results).map_err(fail)
    }

    /// The elements of the results of an operation without regions.
    fn compute(&mut self, kind: &Kind, operands: &[&Array], types: &[&TensorType]) -> Result<Vec<Elements>, Fault> {
        let count = || Fault::malformed(format!("{} operands and {} results", operands.len(), types.len()));
        let same = || operands.iter().map(|a| a.elements.clone()).collect::<Vec<_>>();
        let (first, ty) = (operands.first().copied(), types.first().copied().ok_or_else(count)?);
        let operand = |i: usize| operands.get(i).copied().ok_or_else(count);
        let exactly = |n: usize| if operands.len() == n { Ok(()) } else { Err(count()) };
        let one = match kind {
            Kind::Constant(literal) => {
                exactly(0)?;
                constant(literal, ty)?
            }
            Kind::Iota { dimension } => {
                exactly(0)?;
                shape::iota(*dimension, ty)?
            }
            Kind::Unary(unary) => {
                exactly(1)?;
                elementwise::unary(*unary, operand(0)?, ty)?
            }
            Kind::Binary(binary) => {
                exactly(2)?;
                elementwise::binary(*binary, operand(0)?, operand(1)?, ty)?
            }
            Kind::Compare(direction) => {
                exactly(2)?;
                elementwise::compare(*direction, operand(0)?, operand(1)?, ty)?
            }
            Kind::Select => {
                exactly(3)?;
                elementwise::select(operand(0)?, operand(1)?, operand(2)?, ty)?
            }
            Kind::Clamp => {
                exactly(3)?;
                elementwise::clamp(operand(0)?, operand(1)?, operand(2)?, ty)?
            }
            Kind::Convert => {
                exactly(1)?;
                elementwise::convert(operand(0)?, ty)?
            }
            Kind::BitcastConvert => {
                exactly(1)?;
                elementwise::bitcast(operand(0)?, ty)?
            }
            Kind::DotGeneral(dimensions, _) => {
                exactly(2)?;
                let (a, b) = (operand(0)?, operand(1)?);
                let product = Product::new(&a.ty, &b.ty, dimensions, ty)?;
                self.spend((ty.elements() as u64).saturating_mul(product.terms as u64))?;
                product.of(a, b, ty)?
            }
            Kind::Reduce { reducers, dimensions } => {
                exactly(2 * reducers.len())?;
                if types.len() != reducers.len() {
                    return Err(count());
                }
                let each = reducers.iter().zip(types).enumerate().map(|(i, (reducer, ty))| {
                    reduce(operand(i)?, operand(reducers.len() + i)?, *reducer, dimensions, ty)
                });
                return each.collect();
            }
            Kind::BroadcastInDim { dimensions } => {
                exactly(1)?;
                shape::broadcast(operand(0)?, dimensions, ty)?
            }
            Kind::Reshape => {
                exactly(1)?;
                shape::reshape(operand(0)?, ty)?
            }
            Kind::Transpose { permutation } => {
                exactly(1)?;
                shape::transpose(operand(0)?, permutation, ty)?
            }
            Kind::Concatenate { dimension } => shape::concatenate(operands, *dimension, ty)?,
            Kind::Slice { start, limit, stride } => {
                exactly(1)?;
                shape::slice(operand(0)?, start, limit, stride, ty)?
            }
            Kind::DynamicSlice { sizes } => {
                shape::dynamic_slice(operand(0)?, operands.get(1..).ok_or_else(count)?, sizes, ty)?
            }
            Kind::DynamicUpdateSlice => {
                let starts = operands.get(2..).ok_or_else(count)?;
                shape::dynamic_update_slice(operand(0)?, operand(1)?, starts, ty)?
            }
            Kind::Pad { low, high, interior } => {
                exactly(2)?;
                shape::pad(operand(0)?, operand(1)?, low, high, interior, ty)?
            }
            Kind::Gather(dimensions) => {
                exactly(2)?;
                gather::gather(operand(0)?, operand(1)?, dimensions, ty)?
            }
            Kind::Scatter(dimensions, reducer) => {
                exactly(3)?;
                gather::scatter(operand(0)?, operand(1)?, operand(2)?, dimensions, *reducer, ty)?
            }
            Kind::Sort { dimension, order, stable: _ } => {
                let keys = operand(0)?;
                if operands.iter().any(|a| a.ty.shape != keys.ty.shape) {
                    return Err(Fault::malformed("operands of one shape expected"));
                }
                let places = sorted(keys, *dimension, *order)?;
                return Ok(operands.iter().map(|a| a.take(&places)).collect());
            }
            Kind::ReduceWindow(window, reducer) => {
                exactly(2)?;
                let places = window.sizes.iter().fold(1_u64, |n, size| n.saturating_mul(*size as u64));
                self.spend((ty.elements() as u64).saturating_mul(places))?;
                reduce_window(operand(0)?, operand(1)?, window, *reducer, ty)?
            }
            Kind::OptimizationBarrier | Kind::Named(_) | Kind::StopGradient => return Ok(same()),
            Kind::AllReduce { groups, .. }
            | Kind::ReduceScatter { groups, .. }
            | Kind::AllGather { groups, .. }
            | Kind::AllToAll { groups, .. } => {
                exactly(1)?;
                alone(groups.iter().all(|group| group.len() == 1))?;
                operand(0)?.elements.clone()
            }
            Kind::CollectivePermute { pairs } => {
                exactly(1)?;
                alone(pairs.iter().all(|pair| *pair == (0, 0)))?;
                match pairs.is_empty() {
                    true => zeros(ty),
                    false => operand(0)?.elements.clone(),
                }
            }
            Kind::ReplicaId | Kind::PartitionId => {
                let copies = if *kind == Kind::ReplicaId { self.replicas } else { self.partitions };
                alone(copies == 1)?;
                zeros(ty)
            }
            Kind::CustomCall(call) => match (call.target.as_str(), first) {
                // It says where a value lives, and leaves it as it is.
                ("Sharding", Some(a)) => a.elements.clone(),
                _ => return Err(Fault::Uninterpreted(format!("the target's own code `{}`", call.target))),
            },
            Kind::While | Kind::Case | Kind::Scan(_) | Kind::Remat(_) | Kind::CustomVjp { .. } => {
                return Err(Fault::malformed("an operation with regions"));
            }
        };
        Ok(vec![one])
    }
}

fn alone(alone: bool) -> Result<(), Fault> {
    if alone { Ok(()) } else { Err(Fault::Uninterpreted("it takes part of several copies of the program".into())) }
}

fn zeros(ty: &TensorType) -> Elements {
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
