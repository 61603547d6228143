//! Programs that move single tensors into and out of parameters.

use crate::DeviceTensor;
use crate::decoder::{Axis, AxisRules, Parameter, zeros};
use crate::error::Result;
use crate::modules::unnamed;
use crate::program::{Program, Programs};
use crate::runtime::Runtime;
use crate::storage::Storage;
use grpo_stablehlo::{Builder, Dtype, Module, Reducer, TensorType, Value};
use std::sync::Arc;

/// A program that moves one tensor into or out of a parameter of this shape, which may be the stack of all layers, or of all experts of all
/// layers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Move {
    shape: Vec<usize>,
    axes: Vec<Axis>,
    /// The number of leading dimensions that stack tensors.
    stacked: usize,
    step: Step,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Step {
    /// Creates zeros.
    Zeros { to: Storage },
    /// Writes a tensor with the dtype of its file into a stack.
    Place { from: Dtype, to: Storage },
    /// Converts a whole tensor to another storage.
    Convert { from: Storage, to: Storage },
    /// Reads one tensor of a stack as f32.
    Take { from: Storage },
}

impl Move {
    /// Returns the program that does `step` on a parameter; compiles it on first use.
    pub(super) fn program(
        programs: &mut Programs<Self>,
        runtime: &Runtime,
        parameter: &Parameter,
        step: Step,
    ) -> Result<Arc<Program>> {
        let (shape, axes) = (parameter.shape.clone(), parameter.axes.clone());
        let key = Self { shape, axes, stacked: parameter.stacked(), step };
        programs.get(runtime, key, |key| key.module(runtime.axis_rules()))
    }

    /// Builds the program, sharded like the parameter. A weight is one argument or result per tensor of its storage.
    fn module(&self, rules: &AxisRules) -> Result<Module> {
        let Self { shape, axes, stacked, step } = self;
        let f = Builder::new();
        let declare = |storage: Storage, name| {
            let values = storage.declare(&f, name, shape);
            values.iter().for_each(|value| rules.argument(value, axes));
            values
        };
        let position = || Position::declare(&f, &shape[..*stacked], axes, rules);
        let (name, results, of_results): (_, Vec<Value>, _) = match step {
            Step::Zeros { to } => ("zeros", to.dtypes().map(|dtype| zeros(&f, dtype, shape)).collect(), &axes[..]),
            // A copy if both storages are equal.
            Step::Convert { from, to } => ("convert", to.put(&from.get(&declare(*from, "tensor"))), &axes[..]),
            Step::Place { from, to } => {
                let all = declare(*to, "stack");
                let tensor = f.argument("tensor", TensorType::new(*from, &shape[*stacked..]));
                rules.argument(&tensor, &axes[*stacked..]);
                let position = position();
                all.iter().enumerate().for_each(|(i, stack)| f.alias(stack, i));
                let place = |(all, part): (&Value, Value)| position.put(all, &part);
                ("place", all.iter().zip(to.put(&tensor)).map(place).collect(), &axes[..])
            }
            Step::Take { from } => {
                let all = declare(*from, "stack");
                let position = position();
                ("take", vec![position.take(&all, *from)], &axes[*stacked..])
            }
        };
        (0..results.len()).for_each(|i| rules.result(&f, i, of_results));
        rules.finish(f.clone(), name, unnamed(&results))
    }
}

/// The place of a tensor in a stack: its layer and, if each expert has a tensor, its expert, as i32 scalars.
///
/// If experts are sharded, a slice of one expert would make the partitioner gather all of them. The expert is therefore selected from all
/// experts of the layer by its number, which each device does for its own experts.
pub(super) struct Position {
    pub(super) zero: Value,
    pub(super) starts: Vec<Value>,
    is_sharded: bool,
}

impl Position {
    /// Declares the place in a stack with the leading dimensions `stacked` and these logical axes as the next arguments of a program.
    pub(super) fn declare(f: &Builder, stacked: &[usize], axes: &[Axis], rules: &AxisRules) -> Self {
        let is_sharded = stacked.len().checked_sub(1).is_some_and(|last| rules.parts(axes[last]) > 1);
        let names = ["layer", "expert"].into_iter().take(stacked.len());
        let starts = names.map(|name| f.argument(name, TensorType::scalar(Dtype::I32))).collect();
        Self { zero: f.scalar(0, Dtype::I32), starts, is_sharded }
    }

    /// Returns the part of a stack that contains the tensor, `[1, 1, ...]` or, with sharded experts, `[1, E, ...]`, and its start.
    fn window(&self, stack: &Value) -> (Vec<usize>, Vec<&Value>) {
        let sliced = if self.is_sharded { self.starts.len() - 1 } else { self.starts.len() };
        let sizes = [&vec![1; sliced], &stack.shape()[sliced..]].concat();
        let starts = self.starts[..sliced].iter().chain(std::iter::repeat_n(&self.zero, sizes.len() - sliced));
        (sizes, starts.collect())
    }

    /// Returns 1 for the elements of the expert in a window `[1, E, ...]`.
    fn of_expert(&self, window: &Value) -> Value {
        let last = self.starts.len() - 1;
        let numbers = self.zero.builder().iota(last, window.ty().with_dtype(Dtype::I32));
        numbers.eq(&self.starts[last].broadcast_in_dim(window.shape(), &[]))
    }

    /// Returns the stack with `tensor` in this place.
    pub(super) fn put(&self, stack: &Value, tensor: &Value) -> Value {
        let (sizes, starts) = self.window(stack);
        let window = match self.is_sharded {
            true => {
                let window = stack.dynamic_slice(&starts, &sizes);
                let dimensions: Vec<usize> = (self.starts.len()..sizes.len()).collect();
                self.of_expert(&window).select(&tensor.broadcast_in_dim(&sizes, &dimensions), &window)
            }
            false => tensor.reshape(&sizes),
        };
        stack.dynamic_update_slice(&window, &starts)
    }

    /// Returns the tensor in this place, f32, of a stack in this storage.
    pub(super) fn take(&self, stack: &[Value], storage: Storage) -> Value {
        let window = |stack: &Value| {
            let (sizes, starts) = self.window(stack);
            stack.dynamic_slice(&starts, &sizes)
        };
        let window = storage.get(&stack.iter().map(window).collect::<Vec<_>>());
        let tensor = &window.shape()[self.starts.len()..];
        if !self.is_sharded {
            return window.reshape(tensor);
        }
        // A sum of bits with zeros is exact for every number.
        let bits = window.bitcast_convert(Dtype::I32);
        let bits = self.of_expert(&bits).select(&bits, &bits.like(0));
        let stacked: Vec<usize> = (0..self.starts.len()).collect();
        bits.reduce(Reducer::Add, &stacked).bitcast_convert(Dtype::F32)
    }
}

/// Uploads the place of the tensor with this index in the stack of a parameter, one scalar per stacked dimension.
pub(super) fn position(runtime: &Runtime, parameter: &Parameter, index: usize) -> Result<Vec<DeviceTensor>> {
    let stacked = &parameter.shape[..parameter.stacked()];
    let number = |dimension: usize| index / stacked[dimension + 1..].iter().product::<usize>() % stacked[dimension];
    (0..stacked.len()).map(|dimension| runtime.upload(&[number(dimension) as i32], &[])).collect()
}
