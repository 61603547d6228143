//! Builds a kernel operation by operation.
//!
//! As for programs, the builder records the first illegal operation with its line, and [`Builder::finish`] returns it.

use super::kernel::*;
use super::memory::Ref;
use crate::error::{Error, Result};
use crate::graph::{Number, ValueId};
use crate::types::{Dtype, TensorType};
use std::cell::RefCell;
use std::panic::Location;
use std::rc::Rc;

/// A kernel that is being built.
#[derive(Clone, Debug)]
pub struct Builder {
    state: Rc<RefCell<State>>,
}

/// A vector or scalar of a kernel that is being built; cheap to clone.
#[derive(Clone, Debug)]
pub struct Value {
    state: Rc<RefCell<State>>,
    pub(super) id: ValueId,
    ty: Rc<TensorType>,
}

#[derive(Debug)]
struct State {
    kernel: Kernel,
    /// For each value, the serial number of the block that defines it.
    homes: Vec<usize>,
    /// Open blocks with their serial numbers, outermost first.
    open: Vec<(usize, Block)>,
    blocks: usize,
    error: Option<Error>,
}

impl State {
    fn define(&mut self, ty: TensorType) -> ValueId {
        self.kernel.types.push(ty);
        self.homes.push(self.open.last().map_or(0, |(serial, _)| *serial));
        ValueId(self.kernel.types.len() - 1)
    }

    fn enter(&mut self, argument: Option<TensorType>) -> Option<ValueId> {
        self.blocks += 1;
        self.open.push((self.blocks, Block::default()));
        let id = argument.map(|ty| self.define(ty));
        if let Some((_, block)) = self.open.last_mut() {
            block.arguments.extend(id);
        }
        id
    }
}

impl Builder {
    /// Creates an empty kernel on a grid of these sizes, outermost first.
    #[track_caller]
    pub fn new(name: &str, grid: &[(usize, Semantics)]) -> Self {
        let kernel = Kernel {
            name: name.into(),
            grid: grid.to_vec(),
            inputs: vec![],
            outputs: vec![],
            scratch: vec![],
            aliases: vec![],
            vmem_limit: None,
            cost: None,
            has_side_effect: false,
            body: Block::default(),
            types: vec![],
        };
        let mut state = State { kernel, homes: vec![], open: vec![], blocks: 0, error: None };
        state.enter(None);
        for _ in grid {
            let id = state.define(TensorType::scalar(Dtype::I32));
            state.open[0].1.arguments.push(id);
        }
        let builder = Self { state: Rc::new(RefCell::new(state)) };
        if grid.is_empty() || grid.iter().any(|(size, _)| i32::try_from(*size).map_or(true, |s| s == 0)) {
            builder.fail("iteration_bounds", format!("a grid of i32 sizes above 0 expected, got {grid:?}"));
        }
        builder
    }

    /// Declares the next input, which is visible through `window` in VMEM.
    #[track_caller]
    pub fn input(&self, ty: TensorType, window: Window) -> Ref {
        self.operand(Operand { ty, window, space: Space::Vmem }, true)
    }

    /// Declares the next input of scalars, which is visible through `window` in SMEM.
    #[track_caller]
    pub fn scalar_input(&self, ty: TensorType, window: Window) -> Ref {
        self.operand(Operand { ty, window, space: Space::Smem }, true)
    }

    /// Declares the next output. All inputs must come before it.
    #[track_caller]
    pub fn output(&self, ty: TensorType, window: Window) -> Ref {
        self.operand(Operand { ty, window, space: Space::Vmem }, false)
    }

    #[track_caller]
    fn operand(&self, operand: Operand, input: bool) -> Ref {
        let (ty, space) = (TensorType::new(operand.ty.dtype, operand.window.block.clone()), operand.space);
        if let Err(reason) = self.check_window(&operand) {
            self.fail("window_params", reason);
        }
        let mut state = self.state.borrow_mut();
        let kernel = &mut state.kernel;
        let order = kernel.scratch.is_empty() && (!input || kernel.outputs.is_empty());
        if input { &mut kernel.inputs } else { &mut kernel.outputs }.push(operand);
        let id = RefId(kernel.inputs.len() + kernel.outputs.len() - 1);
        drop(state);
        if !order {
            self.fail("window_params", "inputs come first, then outputs, then scratch".into());
        }
        Ref { builder: self.clone(), id, ty: Rc::new(ty), space }
    }

    /// Declares memory that persists between points of the grid. All operands must come before it.
    #[track_caller]
    pub fn scratch(&self, ty: TensorType, space: Space) -> Ref {
        let shaped = if ty.shape.is_empty() { Err(format!("a shape expected, got {ty}")) } else { Ok(()) };
        if let Err(reason) = shaped.and(representable(&ty)) {
            self.fail("scratch_operands", reason);
        }
        let mut state = self.state.borrow_mut();
        state.kernel.scratch.push((ty.clone(), space));
        let id = RefId(state.kernel.inputs.len() + state.kernel.outputs.len() + state.kernel.scratch.len() - 1);
        Ref { builder: self.clone(), id, ty: Rc::new(ty), space }
    }

    fn check_window(&self, Operand { ty, window, space }: &Operand) -> Result<(), String> {
        let Window { block, index } = window;
        let dimensions = self.state.borrow().kernel.grid.len();
        if ty.shape.is_empty() || block.len() != ty.rank() || index.len() != ty.rank() {
            return Err(format!("block {block:?} and {} block indices for {ty}", index.len()));
        }
        if let Some((d, _)) = index.iter().flat_map(|i| &i.terms).find(|(d, _)| *d >= dimensions) {
            return Err(format!("dimension {d} of a grid of {dimensions} dimensions"));
        }
        representable(&TensorType::new(ty.dtype, block.clone()))?;
        // A copy between HBM and VMEM moves whole tiles, or a whole dimension. A block may be larger than its tensor.
        for (d, (block, size)) in block.iter().zip(&ty.shape).enumerate() {
            let unit = match (space, ty.rank() - 1 - d) {
                (Space::Vmem, 0) => 128,
                (Space::Vmem, 1) => 8,
                _ => 1,
            };
            if *block == 0 || (block != size && block % unit != 0) {
                return Err(format!("block {block} in dimension {d} of {ty} should be {size} or a multiple of {unit}"));
            }
        }
        Ok(())
    }

    /// Lets an output share the buffer of an input.
    #[track_caller]
    pub fn alias(&self, output: &Ref, input: &Ref) {
        let mut state = self.state.borrow_mut();
        let kernel = &state.kernel;
        let pair = output.id.0.checked_sub(kernel.inputs.len()).map(|output| (output, input.id.0));
        let types = pair.and_then(|(o, i)| Some((&kernel.outputs.get(o)?.ty, &kernel.inputs.get(i)?.ty)));
        match (pair, types) {
            (Some(pair), Some((output, input))) if output == input => state.kernel.aliases.push(pair),
            _ => {
                drop(state);
                let reason = format!("an output and an input of one type expected, got {} and {}", output.ty, input.ty);
                self.fail("output_operand_aliases", reason);
            }
        }
    }

    /// Limits the bytes of VMEM that the kernel may use.
    pub fn vmem_limit(&self, bytes: usize) {
        self.state.borrow_mut().kernel.vmem_limit = Some(bytes);
    }

    /// Sets the cost that the compiler assumes for the kernel.
    pub fn cost(&self, cost: Cost) {
        self.state.borrow_mut().kernel.cost = Some(cost);
    }

    /// Makes the kernel run even if its results are unused.
    pub fn has_side_effect(&self) {
        self.state.borrow_mut().kernel.has_side_effect = true;
    }

    /// Returns the index in a dimension of the grid, an i32 scalar.
    #[track_caller]
    pub fn program_id(&self, dimension: usize) -> Value {
        let id = self.state.borrow().open[0].1.arguments.get(dimension).copied();
        match id {
            Some(id) => self.handle(id, TensorType::scalar(Dtype::I32)),
            None => {
                self.fail("program_id", format!("dimension {dimension} of the grid"));
                self.scalar(0)
            }
        }
    }

    /// Makes a constant i32 scalar.
    #[track_caller]
    pub fn scalar(&self, number: i32) -> Value {
        self.splat(i64::from(number), TensorType::scalar(Dtype::I32))
    }

    /// Makes a constant whose elements are all `number`.
    #[track_caller]
    pub fn splat(&self, number: impl Into<Number>, ty: TensorType) -> Value {
        let number = number.into();
        let check = if !number.fits(ty.dtype) {
            Err(format!("{number:?} is no {}", ty.dtype))
        } else {
            representable(&ty).map(|()| Some(ty.clone()))
        };
        self.emit(Kind::Constant(number), &[], &[], check, ty)
    }

    /// Counts 0, 1, 2, ... along `dimension`, in i32.
    #[track_caller]
    pub fn iota(&self, dimension: usize, shape: &[usize]) -> Value {
        let ty = TensorType::new(Dtype::I32, shape);
        let inside = if dimension < shape.len() { Ok(()) } else { Err(format!("dimension {dimension} of {ty}")) };
        let check = inside.and(representable(&ty)).map(|()| Some(ty.clone()));
        self.emit(Kind::Iota(dimension), &[], &[], check, ty)
    }

    /// Runs the operations that `body` builds if `condition`, a scalar predicate, holds.
    #[track_caller]
    pub fn when(&self, condition: &Value, body: impl FnOnce()) {
        let check = if *condition.ty() == TensorType::scalar(Dtype::Pred) {
            Ok(None)
        } else {
            Err(format!("a scalar predicate expected, got {}", condition.ty()))
        };
        self.state.borrow_mut().enter(None);
        body();
        self.nest(Kind::If, &[condition], check);
    }

    /// Runs the operations that `body` builds for each index 0, 1, ... below `trips`; the index is an i32 scalar.
    #[track_caller]
    pub fn repeat(&self, trips: usize, body: impl FnOnce(&Value)) {
        let check =
            i32::try_from(trips).map(|_| None).map_err(|_| format!("{trips} trips are more than an i32 counts"));
        let index = self.state.borrow_mut().enter(Some(TensorType::scalar(Dtype::I32)));
        if let Some(id) = index {
            body(&self.handle(id, TensorType::scalar(Dtype::I32)));
        }
        self.nest(Kind::For(trips), &[], check);
    }

    /// Closes the innermost block and adds an operation that contains it.
    #[track_caller]
    fn nest(&self, kind: Kind, operands: &[&Value], check: Result<Option<TensorType>, String>) {
        let block = self.state.borrow_mut().open.pop().unwrap_or_default().1;
        self.emit(kind, operands, &[], check, TensorType::scalar(Dtype::I32));
        let mut state = self.state.borrow_mut();
        if let Some(operation) = state.open.last_mut().and_then(|(_, outer)| outer.operations.last_mut()) {
            operation.blocks.push(block);
        }
    }

    /// Finishes the kernel.
    ///
    /// # Errors
    /// Returns the first illegal operation.
    #[track_caller]
    pub fn finish(self) -> Result<Kernel> {
        if self.state.borrow().kernel.outputs.is_empty() {
            self.fail("func.return", "a kernel without outputs".into());
        }
        let mut state = self.state.borrow_mut();
        if let Some(error) = state.error.take() {
            return Err(error);
        }
        let mut kernel = state.kernel.clone();
        kernel.body = std::mem::take(&mut state.open[0].1);
        Ok(kernel)
    }

    #[track_caller]
    pub(super) fn fail(&self, operation: &'static str, reason: String) {
        let error = Error::Operation { operation, reason, at: Location::caller() };
        self.state.borrow_mut().error.get_or_insert(error);
    }

    fn handle(&self, id: ValueId, ty: TensorType) -> Value {
        Value { state: self.state.clone(), id, ty: Rc::new(ty) }
    }

    fn in_scope(&self, values: &[&Value]) -> Result<(), String> {
        let state = self.state.borrow();
        for value in values {
            let home = state.homes.get(value.id.0);
            if !Rc::ptr_eq(&value.state, &self.state) {
                return Err(format!("a {} of another kernel", value.ty));
            }
            if !state.open.iter().any(|(serial, _)| Some(serial) == home) {
                return Err(format!("a {} of a block that is closed", value.ty));
            }
        }
        Ok(())
    }

    /// Adds an operation. `check` has the type of its result, if it has one; otherwise the returned value has the type
    /// `fallback`, so that building can continue.
    #[track_caller]
    pub(super) fn emit(
        &self,
        kind: Kind,
        operands: &[&Value],
        offsets: &[&Value],
        check: Result<Option<TensorType>, String>,
        fallback: TensorType,
    ) -> Value {
        // Not a closure, so that `Location::caller` is the caller's line.
        let ty = match self.in_scope(operands).and(self.in_scope(offsets)).and(check) {
            Ok(ty) => ty,
            Err(reason) => {
                self.fail(kind.name(), reason);
                Some(fallback.clone())
            }
        };
        let mut state = self.state.borrow_mut();
        let result = ty.clone().map(|ty| state.define(ty));
        let operands = operands.iter().map(|value| value.id).collect();
        if let Some((_, block)) = state.open.last_mut() {
            block.operations.push(Operation { kind, operands, result, blocks: vec![] });
        }
        drop(state);
        self.handle(result.unwrap_or(ValueId(usize::MAX)), ty.unwrap_or(fallback))
    }
}

/// Checks that Mosaic supports the type: its dtype, and its number of elements as an i32.
pub(super) fn representable(ty: &TensorType) -> Result<(), String> {
    if !matches!(ty.dtype, Dtype::F32 | Dtype::Bf16 | Dtype::I32 | Dtype::Pred) {
        return Err(format!("elements of f32, bf16, i32 or i1 expected, got {ty}"));
    }
    let elements = ty.shape.iter().try_fold(1_usize, |n, size| n.checked_mul(*size));
    match elements.map(i32::try_from) {
        Some(Ok(1..)) => Ok(()),
        _ => Err(format!("a size between 1 and 2^31 - 1 expected, got {ty}")),
    }
}

impl Value {
    /// Returns the dtype and shape of the value; the shape of a scalar is empty.
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

    /// Makes a constant of the same type.
    #[track_caller]
    pub fn like(&self, number: impl Into<Number>) -> Self {
        self.builder().splat(number, (*self.ty).clone())
    }

    /// Returns the builder of the kernel that the value belongs to.
    pub fn builder(&self) -> Builder {
        Builder { state: self.state.clone() }
    }

    pub(super) fn is_index(&self) -> bool {
        *self.ty == TensorType::scalar(Dtype::I32)
    }

    /// Adds an operation on this value and `others`.
    #[track_caller]
    pub(super) fn then(&self, kind: Kind, others: &[&Self], ty: Result<TensorType, String>) -> Self {
        let operands: Vec<&Self> = std::iter::once(self).chain(others.iter().copied()).collect();
        self.builder().emit(kind, &operands, &[], ty.map(Some), (*self.ty).clone())
    }
}
