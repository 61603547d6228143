//! An interpreter that runs kernels on the CPU, to check their numbers without a TPU.
//!
//! It exposes errors that hardware may hide. Undefined memory (initial scratch, outputs before they are written, the
//! part of a block beyond the edge of its tensor) holds NaN, or integers that are not valid indices. Scratch is reset
//! between points of the grid that may run in parallel. An output's block is reset when the window leaves it.

use super::kernel::*;
use crate::build::listed;
use crate::error::{Error, Result};
use crate::graph::{Binary, Literal, Reducer, ValueId};
use crate::interpret::array::{Array, Elements, each_index, offsets, place, put, strides};
use crate::interpret::contract::rest;
use crate::interpret::elementwise::{combine, compare, convert, select, unary};
use crate::interpret::machine::constant;
use crate::interpret::shape;
use crate::types::{Dtype, TensorType};
use std::panic::Location;
use std::rc::Rc;

/// Runs the kernel on these inputs and returns its outputs. An aliased output starts as its input. Inputs, and the
/// result of every operation, are rounded to their dtypes.
///
/// # Errors
/// Returns an error if inputs differ from the kernel's types, a load or store is out of bounds, an integer is divided
/// by 0, or an output block is visited again after the window left it.
#[track_caller]
pub fn interpret(kernel: &Kernel, inputs: &[Array]) -> Result<Vec<Array>> {
    let at = Location::caller();
    let fail = |reason| Error::Operation { operation: "mosaic::interpret", reason, at };
    Machine::new(kernel, inputs).and_then(Machine::run).map_err(fail)
}

/// The value of undefined integers: never a valid index.
const POISON: i64 = -0x5A5A_5A5B;

/// Returns undefined memory: NaN, or [`POISON`].
fn poison(ty: TensorType) -> Array {
    let n = ty.elements();
    let elements = match ty.dtype {
        Dtype::Pred => Elements::Pred(vec![true; n]),
        dtype if dtype.is_float() => Elements::Float(vec![f64::NAN; n]),
        _ => Elements::Int(vec![POISON; n]),
    };
    Array { ty, elements }
}

/// Copies a box of `size` from `source` at `from` to `target` at `to`. The box must be inside of both, which must have
/// one dtype and rank.
fn copy(target: &mut Array, to: &[usize], source: &Array, from: &[usize], size: &[usize]) {
    let (there, here) = (strides(&target.ty.shape), strides(&source.ty.shape));
    let (to, from) = (place(to, &there), place(from, &here));
    let Some((row, outer)) = size.split_last() else { return };
    each_index(outer, |index| {
        put(&mut target.elements, to + place(index, &there), &source.elements, from + place(index, &here), *row);
    });
}

struct Machine<'k> {
    kernel: &'k Kernel,
    /// The inputs without an aliased output, then the outputs.
    tensors: Vec<Array>,
    /// For each operand, its index in `tensors`.
    storage: Vec<usize>,
    memories: Vec<Array>,
    /// The current block of each operand; `left` has the blocks that an output's window has left.
    shown: Vec<Option<Vec<usize>>>,
    left: Vec<std::collections::HashSet<Vec<usize>>>,
    values: Vec<Option<Rc<Array>>>,
}

impl<'k> Machine<'k> {
    fn new(kernel: &'k Kernel, inputs: &[Array]) -> Result<Self, String> {
        let types = kernel.operand_types();
        if types.len() != inputs.len() || types.iter().zip(inputs).any(|(ty, input)| *ty != input.ty) {
            let found = listed(inputs.iter().map(Array::ty));
            return Err(format!("inputs ({}) expected, got ({found})", listed(&types)));
        }
        let mut tensors: Vec<Array> = inputs.iter().cloned().map(Array::rounded).collect();
        let mut storage: Vec<usize> = (0..inputs.len()).collect();
        for (i, output) in kernel.outputs.iter().enumerate() {
            match kernel.aliases.iter().find(|(o, _)| *o == i) {
                Some((_, input)) => storage.push(*input),
                None => {
                    storage.push(tensors.len());
                    tensors.push(poison(output.ty.clone()));
                }
            }
        }
        let operands = storage.len();
        let mut machine = Self {
            kernel,
            tensors,
            storage,
            memories: vec![],
            shown: vec![None; operands],
            left: vec![Default::default(); operands],
            values: vec![None; kernel.types.len()],
        };
        machine.memories = (0..).map_while(|i| Some(poison(kernel.memory(RefId(i))?.0))).collect();
        Ok(machine)
    }

    fn run(mut self) -> Result<Vec<Array>, String> {
        let sizes: Vec<usize> = self.kernel.grid.iter().map(|(size, _)| *size).collect();
        let mut last: Option<Vec<usize>> = None;
        for step in 0..sizes.iter().product() {
            let mut rest = step;
            let mut point = vec![0; sizes.len()];
            for (index, size) in point.iter_mut().zip(&sizes).rev() {
                (*index, rest) = (rest % size, rest / size);
            }
            let apart = |(d, (_, semantics)): (usize, &(usize, Semantics))| {
                *semantics == Semantics::Parallel && last.as_ref().is_some_and(|last| last[d] != point[d])
            };
            if self.kernel.grid.iter().enumerate().any(apart) {
                let operands = self.storage.len();
                self.memories[operands..].iter_mut().for_each(|m| *m = poison(m.ty.clone()));
            }
            for operand in 0..self.storage.len() {
                self.show(operand, Some(&point))?;
            }
            for (id, index) in self.kernel.body.arguments.iter().zip(&point) {
                self.values[id.0] = Some(Rc::new(scalar(*index)));
            }
            self.block(&self.kernel.body)?;
            last = Some(point);
        }
        for operand in 0..self.storage.len() {
            self.show(operand, None)?;
        }
        let outputs = self.storage[self.kernel.inputs.len()..].iter();
        Ok(outputs.map(|i| self.tensors[*i].clone()).collect())
    }

    /// Moves a window to its block at `point`; `None` closes the window.
    fn show(&mut self, operand: usize, point: Option<&[usize]>) -> Result<(), String> {
        let inputs = self.kernel.inputs.len();
        let is_output = operand >= inputs;
        let Some(Operand { window, .. }) = self.kernel.inputs.iter().chain(&self.kernel.outputs).nth(operand) else {
            return Ok(());
        };
        let next: Option<Vec<usize>> = point.map(|point| window.index.iter().map(|i| i.at(point)).collect());
        if self.shown[operand] == next {
            return Ok(());
        }
        // The start of a block in its tensor, and the size of its part inside the tensor.
        let place = |index: &[usize], shape: &[usize]| -> (Vec<usize>, Vec<usize>) {
            let begin: Vec<usize> = index.iter().zip(&window.block).map(|(i, block)| i * block).collect();
            let inside = |((b, size), block): ((&usize, &usize), &usize)| size.saturating_sub(*b).min(*block);
            let size = begin.iter().zip(shape).zip(&window.block).map(inside).collect();
            (begin, size)
        };
        let origin = vec![0; window.block.len()];
        let tensor = &mut self.tensors[self.storage[operand]];
        if let Some(index) = self.shown[operand].take().filter(|_| is_output) {
            let (begin, size) = place(&index, &tensor.ty.shape);
            if size.iter().all(|n| *n > 0) {
                copy(tensor, &begin, &self.memories[operand], &origin, &size);
            }
            self.left[operand].insert(index);
        }
        self.memories[operand] = poison(self.memories[operand].ty.clone());
        if let Some(index) = &next {
            if self.left[operand].contains(index) {
                return Err(format!("block {index:?} of output {} is visited again", operand - inputs));
            }
            let (begin, size) = place(index, &tensor.ty.shape);
            if !is_output && size.iter().all(|n| *n > 0) {
                copy(&mut self.memories[operand], &origin, tensor, &begin, &size);
            }
        }
        self.shown[operand] = next;
        Ok(())
    }

    fn block(&mut self, block: &Block) -> Result<(), String> {
        block.operations.iter().try_for_each(|operation| self.operation(operation))
    }

    fn value(&self, id: ValueId) -> Result<Rc<Array>, String> {
        self.values.get(id.0).cloned().flatten().ok_or(format!("value {} is read before it is defined", id.0))
    }

    fn operation(&mut self, op: &Operation) -> Result<(), String> {
        let operands = op.operands.iter().map(|id| self.value(*id)).collect::<Result<Vec<_>, _>>()?;
        let ty = op.result.and_then(|id| self.kernel.types.get(id.0));
        let result = match (&op.kind, operands.as_slice(), ty) {
            (Kind::Load(id, offsets), [], Some(ty)) => {
                let memory = &self.memories[id.0];
                let (begin, size) = self.part(memory, offsets, &ty.shape)?;
                let mut loaded = poison(TensorType::new(ty.dtype, size.clone()));
                copy(&mut loaded, &vec![0; size.len()], memory, &begin, &size);
                Array { ty: ty.clone(), ..loaded }
            }
            (Kind::Store(id, offsets), [value], None) => {
                let (begin, size) = self.part(&self.memories[id.0], offsets, &value.ty.shape)?;
                let ty = TensorType::new(value.ty.dtype, size.clone());
                let source = Array { ty, elements: value.elements.clone() };
                copy(&mut self.memories[id.0], &begin, &source, &vec![0; size.len()], &size);
                return Ok(());
            }
            (Kind::If, [condition], None) => {
                if condition.predicate() {
                    op.blocks.iter().try_for_each(|block| self.block(block))?;
                }
                return Ok(());
            }
            (Kind::For(trips), [], None) => {
                for index in 0..*trips {
                    for block in &op.blocks {
                        for id in &block.arguments {
                            self.values[id.0] = Some(Rc::new(scalar(index)));
                        }
                        self.block(block)?;
                    }
                }
                return Ok(());
            }
            (kind, operands, Some(ty)) => {
                let operands: Vec<&Array> = operands.iter().map(|o| &**o).collect();
                compute(kind, &operands, ty)?
            }
            (kind, ..) => return Err(format!("malformed {kind:?}")),
        };
        if let Some(id) = op.result {
            self.values[id.0] = Some(Rc::new(result));
        }
        Ok(())
    }

    /// Returns the offsets and sizes of a part of a memory; sizes are 1 in every dimension for a scalar.
    fn part(
        &self,
        memory: &Array,
        offsets: &[Offset<ValueId>],
        shape: &[usize],
    ) -> Result<(Vec<usize>, Vec<usize>), String> {
        let size = if shape.is_empty() { vec![1; offsets.len()] } else { shape.to_vec() };
        let mut begin = vec![];
        for ((offset, size), limit) in offsets.iter().zip(&size).zip(&memory.ty.shape) {
            let offset = match offset {
                Offset::Fixed(at) => Some(*at),
                Offset::Value(id) => usize::try_from(self.value(*id)?.integers()[0]).ok(),
            };
            match offset {
                Some(at) if at.checked_add(*size).is_some_and(|end| end <= *limit) => begin.push(at),
                at => return Err(format!("{size} entries at {at:?} of {}", memory.ty)),
            }
        }
        Ok((begin, size))
    }
}

fn scalar(index: usize) -> Array {
    Array { ty: TensorType::scalar(Dtype::I32), elements: Elements::Int(vec![index as i64]) }
}

/// Computes an operation that accesses no memory.
fn compute(kind: &Kind, operands: &[&Array], ty: &TensorType) -> Result<Array, String> {
    let elements = match (kind, operands) {
        (Kind::Constant(number), []) => constant(&Literal::Splat(*number), ty),
        (Kind::Iota(dimension), []) => shape::iota(*dimension, ty),
        (Kind::Unary(operation), [x]) => unary(*operation, x),
        (Kind::Exp2, [x]) => Elements::Float(x.to_floats().into_iter().map(f64::exp2).collect()),
        (Kind::Binary(Binary::Divide), [a, b]) if a.ty.dtype.is_integer() && b.integers().contains(&0) => {
            return Err("division of an integer by 0".into());
        }
        (Kind::Binary(operation), [a, b]) => combine(*operation, &a.elements, &b.elements, ty.dtype),
        (Kind::Compare(direction), [a, b]) => compare(*direction, a, b),
        (Kind::Select, [p, a, b]) => select(p, a, b),
        (Kind::Convert, [x]) => convert(x, ty.dtype),
        (Kind::Reshape, [x]) => x.elements.clone(),
        (Kind::Reduce(reducer, dimension), [x]) => reduce(x, *reducer, *dimension),
        (Kind::Broadcast, [x]) => shape::broadcast(x, &(0..x.ty.rank()).collect::<Vec<_>>(), ty),
        (Kind::Transpose, [x]) => shape::transpose(x, &[1, 0], ty),
        (Kind::Slice(start), [x]) => shape::slice(x, start, ty),
        _ => return Err(format!("malformed {kind:?}")),
    };
    Ok(Array { ty: ty.clone(), elements }.rounded())
}

/// Reduces along a dimension; every partial result is rounded, as on the device.
fn reduce(x: &Array, reducer: Reducer, dimension: usize) -> Elements {
    let kept = offsets(&x.ty.shape, &rest(x.ty.rank(), &[dimension]));
    let parts = offsets(&x.ty.shape, &[dimension]).into_iter().map(|at| {
        let elements = x.take(&kept.iter().map(|k| k + at).collect::<Vec<_>>());
        Array { ty: TensorType::new(x.ty.dtype, [kept.len()]), elements }
    });
    let sum = parts.reduce(|a, b| {
        let elements = combine(reducer.binary(), &a.elements, &b.elements, a.ty.dtype);
        Array { ty: a.ty, elements }.rounded()
    });
    sum.expect("dimensions have elements").elements
}
