//! An interpreter that runs kernels on the CPU, to check their numbers without a TPU.
//!
//! It exposes errors that hardware may hide. Undefined memory (initial scratch, outputs before they are written, the
//! part of a block beyond the edge of its tensor) holds NaN, or integers that are not valid indices. Scratch is reset
//! between points of the grid that may run in parallel. An output's block is reset when the window leaves it.

use super::kernel::*;
use super::tensor::{Data, Tensor, round};
use crate::error::{Error, Result};
use crate::graph::{Comparison, Number};
use crate::types::{Dtype, TensorType};
use std::panic::Location;
use std::rc::Rc;

/// Runs the kernel on these inputs and returns its outputs. An aliased output starts as its input. bf16 values are
/// rounded by the operation that makes them.
///
/// # Errors
/// Returns an error if inputs differ from the kernel's types, a load or store is out of bounds, an integer is divided
/// by 0, or an output block is visited again after the window left it.
#[track_caller]
pub fn interpret(kernel: &Kernel, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    let at = Location::caller();
    let fail = |reason| Error::Operation { operation: "mosaic::interpret", reason, at };
    Machine::new(kernel, inputs).and_then(Machine::run).map_err(fail)
}

struct Machine<'k> {
    kernel: &'k Kernel,
    /// The inputs without an aliased output, then the outputs.
    tensors: Vec<Tensor>,
    /// For each operand, its index in `tensors`.
    storage: Vec<usize>,
    memories: Vec<Tensor>,
    /// The current block of each operand; `left` has the blocks that an output's window has left.
    shown: Vec<Option<Vec<usize>>>,
    left: Vec<std::collections::HashSet<Vec<usize>>>,
    values: Vec<Option<Rc<Tensor>>>,
}

impl<'k> Machine<'k> {
    fn new(kernel: &'k Kernel, inputs: &[Tensor]) -> Result<Self, String> {
        let types = kernel.operand_types();
        if types.len() != inputs.len() || types.iter().zip(inputs).any(|(ty, input)| *ty != input.ty) {
            let list = |types: Vec<&TensorType>| types.iter().map(|t| t.to_string()).collect::<Vec<_>>().join(", ");
            let found = list(inputs.iter().map(|i| &i.ty).collect());
            return Err(format!("inputs ({}) expected, got ({found})", list(types.iter().collect())));
        }
        let mut tensors = inputs.to_vec();
        let mut storage: Vec<usize> = (0..inputs.len()).collect();
        for (i, output) in kernel.outputs.iter().enumerate() {
            match kernel.aliases.iter().find(|(o, _)| *o == i) {
                Some((_, input)) => storage.push(*input),
                None => {
                    storage.push(tensors.len());
                    tensors.push(Tensor::poison(output.ty.clone()));
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
        machine.memories = (0..).map_while(|i| Some(Tensor::poison(kernel.memory(RefId(i))?.0))).collect();
        Ok(machine)
    }

    fn run(mut self) -> Result<Vec<Tensor>, String> {
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
                self.memories[operands..].iter_mut().for_each(|m| *m = Tensor::poison(m.ty.clone()));
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
                tensor.copy(&begin, &self.memories[operand], &origin, &size);
            }
            self.left[operand].insert(index);
        }
        self.memories[operand] = Tensor::poison(self.memories[operand].ty.clone());
        if let Some(index) = &next {
            if self.left[operand].contains(index) {
                return Err(format!("block {index:?} of output {} is visited again", operand - inputs));
            }
            let (begin, size) = place(index, &tensor.ty.shape);
            if !is_output && size.iter().all(|n| *n > 0) {
                self.memories[operand].copy(&origin, tensor, &begin, &size);
            }
        }
        self.shown[operand] = next;
        Ok(())
    }

    fn block(&mut self, block: &Block) -> Result<(), String> {
        block.operations.iter().try_for_each(|operation| self.operation(operation))
    }

    fn value(&self, id: ValueId) -> Result<Rc<Tensor>, String> {
        self.values.get(id.0).cloned().flatten().ok_or(format!("value {} is read before it is defined", id.0))
    }

    fn operation(&mut self, op: &Operation) -> Result<(), String> {
        let operands = op.operands.iter().map(|id| self.value(*id)).collect::<Result<Vec<_>, _>>()?;
        let ty = op.result.and_then(|id| self.kernel.types.get(id.0));
        let result = match (&op.kind, operands.as_slice(), ty) {
            (Kind::Load(id, offsets), [], Some(ty)) => {
                let memory = &self.memories[id.0];
                let (begin, size) = self.part(memory, offsets, &ty.shape)?;
                let mut loaded = Tensor::poison(TensorType::new(ty.dtype, size.clone()));
                loaded.copy(&vec![0; size.len()], memory, &begin, &size);
                Tensor { ty: ty.clone(), ..loaded }
            }
            (Kind::Store(id, offsets), [value], None) => {
                let (begin, size) = self.part(&self.memories[id.0], offsets, &value.ty.shape)?;
                let source = Tensor { ty: TensorType::new(value.ty.dtype, size.clone()), data: value.data.clone() };
                self.memories[id.0].copy(&begin, &source, &vec![0; size.len()], &size);
                return Ok(());
            }
            (Kind::If, [condition], None) => {
                if condition.data == Data::Pred(vec![true]) {
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
                let operands: Vec<&Tensor> = operands.iter().map(|o| &**o).collect();
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
        memory: &Tensor,
        offsets: &[Offset<ValueId>],
        shape: &[usize],
    ) -> Result<(Vec<usize>, Vec<usize>), String> {
        let size = if shape.is_empty() { vec![1; offsets.len()] } else { shape.to_vec() };
        let mut begin = vec![];
        for ((offset, size), limit) in offsets.iter().zip(&size).zip(&memory.ty.shape) {
            let offset = match offset {
                Offset::Fixed(at) => Some(*at),
                Offset::Value(id) => match &self.value(*id)?.data {
                    Data::Int(at) => at.first().and_then(|at| usize::try_from(*at).ok()),
                    _ => None,
                },
            };
            match offset {
                Some(at) if at.checked_add(*size).is_some_and(|end| end <= *limit) => begin.push(at),
                at => return Err(format!("{size} entries at {at:?} of {}", memory.ty)),
            }
        }
        Ok((begin, size))
    }
}

fn scalar(index: usize) -> Tensor {
    Tensor { ty: TensorType::scalar(Dtype::I32), data: Data::Int(vec![index as i32]) }
}

/// Computes an operation that accesses no memory.
fn compute(kind: &Kind, operands: &[&Tensor], ty: &TensorType) -> Result<Tensor, String> {
    let data = match (kind, operands) {
        (Kind::Constant(number), []) => match number {
            Number::Bool(value) => Data::Pred(vec![*value; ty.elements()]),
            Number::Int(value) => Data::Int(vec![*value as i32; ty.elements()]),
            Number::Float(value) => Data::Float(vec![round(*value as f32, ty.dtype); ty.elements()]),
        },
        (Kind::Iota(d), []) => {
            let inner: usize = ty.shape[d + 1..].iter().product();
            Data::Int((0..ty.elements()).map(|i| (i / inner % ty.shape[*d]) as i32).collect())
        }
        (Kind::Unary(unary), [Tensor { data: Data::Float(x), .. }]) => {
            Data::Float(x.iter().map(|x| round(unary.of(*x), ty.dtype)).collect())
        }
        (Kind::Binary(binary), [a, b]) => match (&a.data, &b.data) {
            (Data::Float(a), Data::Float(b)) => {
                Data::Float(a.iter().zip(b).map(|(a, b)| round(binary.of_floats(*a, *b), ty.dtype)).collect())
            }
            (Data::Int(a), Data::Int(b)) => {
                let all: Option<_> = a.iter().zip(b).map(|(a, b)| binary.of_ints(*a, *b)).collect();
                Data::Int(all.ok_or("division of an integer by 0")?)
            }
            (Data::Pred(a), Data::Pred(b)) => {
                let either = *binary == Binary::Or;
                Data::Pred(a.iter().zip(b).map(|(a, b)| if either { a | b } else { a & b }).collect())
            }
            _ => return Err(format!("{kind:?} of {} and {}", a.ty, b.ty)),
        },
        (Kind::Compare(direction), [a, b]) => match (&a.data, &b.data) {
            (Data::Int(a), Data::Int(b)) => Data::Pred(a.iter().zip(b).map(|(a, b)| holds(*direction, a, b)).collect()),
            (Data::Float(a), Data::Float(b)) => {
                Data::Pred(a.iter().zip(b).map(|(a, b)| holds(*direction, a, b)).collect())
            }
            _ => return Err(format!("{kind:?} of {} and {}", a.ty, b.ty)),
        },
        (Kind::Select, [Tensor { data: Data::Pred(p), .. }, a, b]) => match (&a.data, &b.data) {
            (Data::Float(a), Data::Float(b)) => Data::Float(choose(p, a, b)),
            (Data::Int(a), Data::Int(b)) => Data::Int(choose(p, a, b)),
            (Data::Pred(a), Data::Pred(b)) => Data::Pred(choose(p, a, b)),
            _ => return Err(format!("{kind:?} of {} and {}", a.ty, b.ty)),
        },
        (Kind::Convert, [x]) => match (&x.data, ty.dtype) {
            (Data::Float(x), Dtype::I32) => Data::Int(x.iter().map(|x| *x as i32).collect()),
            (Data::Pred(x), Dtype::I32) => Data::Int(x.iter().map(|x| i32::from(*x)).collect()),
            (_, dtype) => Data::Float(x.to_floats().into_iter().map(|x| round(x, dtype)).collect()),
        },
        (Kind::Reshape, [x]) => x.data.clone(),
        (Kind::Reduce(reducer, d), [Tensor { data: Data::Float(x), ty: from }]) => {
            let inner: usize = from.shape[d + 1..].iter().product();
            let size = from.shape[*d];
            let start = if *reducer == Reducer::Add { 0.0 } else { f32::NEG_INFINITY };
            let combine = if *reducer == Reducer::Add { Binary::Add } else { Binary::Maximum };
            let one = |i: usize| {
                let first = i / inner * inner * size + i % inner;
                (0..size).fold(start, |sum, j| combine.of_floats(sum, x[first + j * inner]))
            };
            Data::Float((0..ty.elements()).map(one).collect())
        }
        (Kind::Broadcast, [x]) => gather(x, ty, |index, shape| {
            let one = |(i, size): (&usize, &usize)| if *size == 1 { 0 } else { *i };
            index.iter().zip(shape).map(one).collect()
        }),
        (Kind::Transpose, [x]) => gather(x, ty, |index, _| index.iter().rev().copied().collect()),
        (Kind::Slice(start), [x]) => gather(x, ty, |index, _| index.iter().zip(start).map(|(i, s)| i + s).collect()),
        _ => return Err(format!("malformed {kind:?}")),
    };
    Ok(Tensor { ty: ty.clone(), data })
}

/// Returns a tensor of type `ty` whose element at an index is the element of `x` at `from(index, shape of x)`.
fn gather(x: &Tensor, ty: &TensorType, from: impl Fn(&[usize], &[usize]) -> Vec<usize>) -> Data {
    let mut index = vec![0; ty.rank()];
    let mut places = Vec::with_capacity(ty.elements());
    for mut flat in 0..ty.elements() {
        for (i, size) in index.iter_mut().zip(&ty.shape).rev() {
            (*i, flat) = (flat % size, flat / size);
        }
        places.push(from(&index, &x.ty.shape).iter().zip(&x.ty.shape).fold(0, |at, (i, size)| at * size + i));
    }
    match &x.data {
        Data::Float(x) => Data::Float(places.into_iter().map(|i| x[i]).collect()),
        Data::Int(x) => Data::Int(places.into_iter().map(|i| x[i]).collect()),
        Data::Pred(x) => Data::Pred(places.into_iter().map(|i| x[i]).collect()),
    }
}

fn choose<T: Copy>(p: &[bool], a: &[T], b: &[T]) -> Vec<T> {
    p.iter().zip(a.iter().zip(b)).map(|(p, (a, b))| if *p { *a } else { *b }).collect()
}

fn holds<T: PartialOrd>(direction: Comparison, a: &T, b: &T) -> bool {
    match direction {
        Comparison::Eq => a == b,
        Comparison::Ne => a != b,
        Comparison::Lt => a < b,
        Comparison::Le => a <= b,
        Comparison::Gt => a > b,
        Comparison::Ge => a >= b,
    }
}

impl Unary {
    fn of(self, x: f32) -> f32 {
        match self {
            Self::Negate => -x,
            Self::Abs => x.abs(),
            Self::Exp => x.exp(),
            Self::Exp2 => x.exp2(),
            Self::Log => x.ln(),
        }
    }
}

impl Binary {
    fn of_floats(self, a: f32, b: f32) -> f32 {
        match self {
            Self::Add => a + b,
            Self::Subtract => a - b,
            Self::Multiply => a * b,
            Self::Divide => a / b,
            _ if a.is_nan() || b.is_nan() => f32::NAN,
            Self::Minimum => a.min(b),
            Self::Maximum | Self::And | Self::Or => a.max(b),
        }
    }

    /// Returns `None` for a division by 0.
    fn of_ints(self, a: i32, b: i32) -> Option<i32> {
        Some(match self {
            Self::Add => a.wrapping_add(b),
            Self::Subtract => a.wrapping_sub(b),
            Self::Multiply => a.wrapping_mul(b),
            Self::Divide if b == 0 => return None,
            Self::Divide => a.wrapping_div(b),
            Self::Maximum => a.max(b),
            Self::Minimum => a.min(b),
            Self::And => a & b,
            Self::Or => a | b,
        })
    }
}
