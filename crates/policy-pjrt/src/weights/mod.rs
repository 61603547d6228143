//! The parameters of a decoder as buffers on a device.

mod merge;

use crate::decoder::{Parameter, Role, parameters, zeros};
use crate::error::{Error, Result};
use crate::runtime::{Programs, Runtime, finish, read, unnamed};
use crate::storage::Storage;
use half::{bf16, f16};
use models::{MemoryTable, ModelConfig, NamedTensor, WeightTensor, Weights};
use pjrt::{Argument, Buffer};
use policy::{TensorSink, TensorSource};
use stablehlo::{Builder, Dtype, Module, TensorType, Value};
use std::collections::HashMap;
use std::sync::Arc;

/// The parameters of a decoder on a device, in the order of [`parameters`], followed by the parameters of its adapters and value head, if
/// any.
///
/// The model's matrices are f32 or bf16, its norms and biases always f32. A model that is trained with bf16 products also has the low 16
/// bits of each f32 weight as remainders, which no program of the decoder reads.
///
/// Tensors are uploaded and downloaded one by one. Uploads read from the memory-mapped files, so the host holds no copy; a download holds
/// one tensor at a time. Clones share the buffers.
#[derive(Clone, Debug)]
pub struct DeviceWeights {
    runtime: Runtime,
    table: Vec<Parameter>,
    /// Storage of the model.
    storage: Storage,
    buffers: Vec<Arc<Buffer>>,
    /// Remainders of each parameter, if any.
    remainders: Vec<Option<Arc<Buffer>>>,
}

/// Programs that move one tensor into or out of the stack of all layers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Move {
    /// Creates zeros of a shape.
    Zeros { shape: Vec<usize>, to: Storage },
    /// Writes a tensor with the dtype of its file into a stack.
    Place { stack: Vec<usize>, from: Dtype, to: Storage },
    /// Converts a whole tensor to another storage.
    Convert { shape: Vec<usize>, from: Storage, to: Storage },
    /// Reads one layer of a stack as f32.
    Take { stack: Vec<usize>, from: Storage },
}

impl DeviceWeights {
    /// Uploads the weights of a model folder; `dtype` on the device is f32 or bf16.
    ///
    /// # Errors
    /// [`Error::Model`] for weights that do not fit `config` or are not finite, [`Error::Dtype`]; [`Error::TooLarge`], before anything is
    /// copied; [`Error::OutOfMemory`], [`Error::Device`].
    pub fn from_weights(runtime: &Runtime, config: &ModelConfig, weights: &Weights, dtype: Dtype) -> Result<Self> {
        Self::from_files(runtime, config, weights, plain(dtype)?)
    }

    /// Like [`DeviceWeights::from_weights`], with a given storage.
    pub(crate) fn from_files(
        runtime: &Runtime,
        config: &ModelConfig,
        weights: &Weights,
        storage: Storage,
    ) -> Result<Self> {
        config.validate()?;
        weights.check(config)?;
        Self::build(runtime, parameters(config), storage, |name, _| {
            let tensor = weights.tensor(name)?;
            tensor.check_finite()?;
            upload_stored(runtime, &tensor)
        })
    }

    /// Uploads tensors with the names of `transformers`, one by one; `dtype` on the device is f32 or bf16.
    ///
    /// # Errors
    /// [`Error::Policy`] if a tensor is missing or has another shape, [`Error::Dtype`], [`Error::Device`].
    pub fn from_tensors(
        runtime: &Runtime,
        config: &ModelConfig,
        tensors: &dyn TensorSource,
        dtype: Dtype,
    ) -> Result<Self> {
        let storage = plain(dtype)?;
        config.validate()?;
        Self::from_source(runtime, parameters(config), storage, "", tensors)
    }

    /// Uploads the tensors of `table`, whose names in `tensors` begin with `prefix`.
    ///
    /// # Errors
    /// [`Error::Policy`] if a tensor is missing or has another shape, errors of the source, [`Error::Device`].
    pub(crate) fn from_source(
        runtime: &Runtime,
        table: Vec<Parameter>,
        storage: Storage,
        prefix: &str,
        tensors: &dyn TensorSource,
    ) -> Result<Self> {
        let shapes: HashMap<&str, &[usize]> = tensors.shapes().into_iter().collect();
        Self::build(runtime, table, storage, |name, shape| {
            let name = format!("{prefix}{name}");
            let wrong = |found| policy::Error::state(&name, format!("a tensor of shape {shape:?}"), found);
            match shapes.get(&*name) {
                None => return Err(wrong("none".to_owned()).into()),
                Some(found) if *found != shape => return Err(wrong(format!("shape {found:?}")).into()),
                Some(_) => {}
            }
            let values = tensors.values(&name)?;
            if values.len() != shape.iter().product::<usize>() {
                return Err(wrong(format!("{} values", values.len())).into());
            }
            Ok((runtime.upload(&values, shape)?, Dtype::F32))
        })
    }

    /// Creates the parameters of `table`; `upload` copies the Hugging Face tensor of a name and a shape to the device.
    fn build(
        runtime: &Runtime,
        table: Vec<Parameter>,
        storage: Storage,
        upload: impl Fn(&str, &[usize]) -> Result<(Buffer, Dtype)>,
    ) -> Result<Self> {
        let mut needed = MemoryTable::new();
        let bytes = |p: &Parameter| storage.of(p).bytes() * p.shape.iter().map(|size| *size as u64).product::<u64>();
        needed.push(format!("weights ({})", storage.label()), table.iter().map(bytes).sum());
        runtime.check_memory(needed)?;
        let mut programs = Programs::new();
        let mut program = |key: Move| programs.get(runtime, key, Move::module);
        let mut buffers = Vec::with_capacity(table.len());
        for parameter in &table {
            let (shape, to) = (parameter.shape.clone(), storage.of(parameter));
            let mut parts = match parameter.is_stacked() {
                true => program(Move::Zeros { shape: shape.clone(), to })?.run(vec![])?,
                false => vec![],
            };
            for (layer, name) in parameter.tensors() {
                let (tensor, from) = upload(name, parameter.tensor_shape())?;
                parts = if parameter.is_stacked() {
                    let place = program(Move::Place { stack: shape.clone(), from, to })?;
                    let layer = runtime.upload(&[layer as i32], &[])?;
                    place.run(parts.into_iter().chain([tensor, layer]).map(Argument::from).collect())?
                } else if to == Storage::Plain(from) {
                    vec![tensor]
                } else {
                    let from = Storage::Plain(from);
                    program(Move::Convert { shape: shape.clone(), from, to })?.run(vec![tensor.into()])?
                };
            }
            buffers.extend(parts);
        }
        Ok(Self::of_buffers(runtime, table, storage, buffers.into_iter().map(Arc::new)))
    }

    /// Passes every tensor to `sink` in f32, with the names of `transformers` (adapters: PEFT), in the order of [`DeviceWeights::table`].
    ///
    /// # Errors
    /// The sink's error, [`Error::Device`].
    pub fn export(&self, sink: &mut dyn TensorSink) -> Result<()> {
        self.export_prefixed("", sink)
    }

    /// Like [`DeviceWeights::export`], with `prefix` before the names.
    pub(crate) fn export_prefixed(&self, prefix: &str, sink: &mut dyn TensorSink) -> Result<()> {
        let mut reader = self.reader();
        for (index, parameter) in self.table.iter().enumerate() {
            for (layer, name) in parameter.tensors() {
                let (data, shape) = (reader.read(index, layer, name)?, parameter.tensor_shape().to_vec());
                sink.tensor(NamedTensor { name: format!("{prefix}{name}"), shape, data })?;
            }
        }
        Ok(())
    }

    /// Returns a reader of single tensors.
    pub(crate) fn reader(&self) -> Reader<'_> {
        Reader { weights: self, programs: Programs::new() }
    }

    /// Returns the buffers of a parameter as arguments: the parameter, followed by its remainders, if any.
    pub(crate) fn parts(&self, parameter: usize) -> Vec<Argument<'_>> {
        let remainder = self.remainders[parameter].iter();
        std::iter::once(&self.buffers[parameter]).chain(remainder).map(|buffer| Argument::Borrowed(buffer)).collect()
    }

    /// Returns the parameters that the buffers hold.
    pub fn table(&self) -> &[Parameter] {
        &self.table
    }

    /// Returns the dtype of the model's matrices in programs.
    pub fn dtype(&self) -> Dtype {
        self.storage.dtype()
    }

    /// Returns the storage of the model.
    pub(crate) fn storage(&self) -> Storage {
        self.storage
    }

    /// Wraps buffers as the parameters of `table`: one buffer each, followed by its remainders, if any.
    pub(crate) fn of_buffers(
        runtime: &Runtime,
        table: Vec<Parameter>,
        storage: Storage,
        all: impl IntoIterator<Item = Arc<Buffer>>,
    ) -> Self {
        let mut all = all.into_iter();
        let (mut buffers, mut remainders) = (Vec::with_capacity(table.len()), Vec::with_capacity(table.len()));
        for parameter in &table {
            buffers.extend(all.next());
            remainders.push(if storage.of(parameter) == Storage::Split { all.next() } else { None });
        }
        Self { runtime: runtime.clone(), table, storage, buffers, remainders }
    }

    /// Returns the same parameters in other buffers, which [`DeviceWeights::of_buffers`] lists.
    pub(crate) fn with_buffers(&self, all: impl IntoIterator<Item = Arc<Buffer>>) -> Self {
        Self::of_buffers(&self.runtime, self.table.clone(), self.storage, all)
    }

    /// Returns the parameters whose roles `keep` selects. Buffers are shared.
    pub(crate) fn subset(&self, keep: impl Fn(Role) -> bool) -> Self {
        let kept: Vec<usize> = (0..self.table.len()).filter(|at| keep(self.table[*at].role)).collect();
        Self {
            runtime: self.runtime.clone(),
            storage: self.storage,
            table: kept.iter().map(|at| self.table[*at].clone()).collect(),
            buffers: kept.iter().map(|at| self.buffers[*at].clone()).collect(),
            remainders: kept.iter().map(|at| self.remainders[*at].clone()).collect(),
        }
    }

    /// Returns the weights without remainders. Buffers are shared.
    pub(crate) fn without_remainders(mut self) -> Self {
        self.storage = self.storage.without_remainders();
        self.remainders.fill(None);
        self
    }

    /// Appends the parameters of `more`.
    pub(crate) fn followed_by(mut self, more: Self) -> Self {
        self.table.extend(more.table);
        self.buffers.extend(more.buffers);
        self.remainders.extend(more.remainders);
        self
    }

    /// Returns the buffers, in the order of the table.
    pub fn buffers(&self) -> &[Arc<Buffer>] {
        &self.buffers
    }

    /// Iterates over the remainders, i16: the low bits of f32 weights whose bf16 parts are in [`DeviceWeights::buffers`].
    pub fn remainders(&self) -> impl Iterator<Item = &Arc<Buffer>> {
        self.remainders.iter().flatten()
    }

    /// Takes the buffers out of `self`.
    pub(crate) fn take(&mut self) -> Self {
        let (buffers, remainders) = (std::mem::take(&mut self.buffers), std::mem::take(&mut self.remainders));
        Self { buffers, remainders, ..self.clone() }
    }

    /// Removes and returns the parameters from index `at` on.
    pub(crate) fn split_off(&mut self, at: usize) -> Self {
        let (table, buffers) = (self.table.split_off(at), self.buffers.split_off(at));
        let remainders = self.remainders.split_off(at);
        Self { runtime: self.runtime.clone(), storage: self.storage, table, buffers, remainders }
    }

    /// Returns all buffers in the order of [`DeviceWeights::of_buffers`].
    pub(crate) fn into_buffers(self) -> Vec<Arc<Buffer>> {
        let all = self.buffers.into_iter().zip(self.remainders);
        all.flat_map(|(buffer, remainder)| std::iter::once(buffer).chain(remainder)).collect()
    }

    /// Returns `true` if the buffers are present, not taken.
    pub(crate) fn are_there(&self) -> bool {
        !self.buffers.is_empty()
    }

    /// Returns the buffers as the first arguments of a program, borrowed, without remainders.
    pub fn arguments(&self) -> Vec<Argument<'_>> {
        self.buffers.iter().map(|buffer| Argument::Borrowed(buffer)).collect()
    }

    /// Returns the buffers as arguments, each followed by its remainders.
    pub(crate) fn arguments_with_remainders(&self) -> Vec<Argument<'_>> {
        (0..self.table.len()).flat_map(|parameter| self.parts(parameter)).collect()
    }
}

/// A reader of single tensors of [`DeviceWeights`].
pub(crate) struct Reader<'a> {
    weights: &'a DeviceWeights,
    programs: Programs<Move>,
}

impl Reader<'_> {
    /// Reads the tensor of a parameter and a layer in f32; errors name it `name`.
    pub(crate) fn read(&mut self, index: usize, layer: usize, name: &str) -> Result<Vec<f32>> {
        let DeviceWeights { runtime, table, storage, .. } = self.weights;
        let (parameter, mut arguments) = (&table[index], self.weights.parts(index));
        let (shape, from) = (parameter.shape.clone(), storage.of(parameter));
        let key = match parameter.is_stacked() {
            true => Move::Take { stack: shape, from },
            false => Move::Convert { shape, from, to: Storage::Plain(Dtype::F32) },
        };
        let program = self.programs.get(runtime, key, Move::module)?;
        if parameter.is_stacked() {
            arguments.push(runtime.upload(&[layer as i32], &[])?.into());
        }
        read(&program.run_one(arguments)?, name)
    }
}

impl Move {
    /// Builds the program. A weight is one argument or result per buffer of its storage.
    fn module(&self) -> Result<Module> {
        let f = Builder::new();
        let zero = f.scalar(0, Dtype::I32);
        let (name, results): (_, Vec<Value>) = match self {
            Self::Zeros { shape, to } => ("zeros", to.dtypes().map(|dtype| zeros(&f, dtype, shape)).collect()),
            // A copy if both storages are equal.
            Self::Convert { shape, from, to } => ("convert", to.put(&from.get(&from.declare(&f, "tensor", shape)))),
            Self::Place { stack, from, to } => {
                let all = to.declare(&f, "stack", stack);
                let tensor = f.argument("tensor", TensorType::new(*from, &stack[1..]));
                let layer = f.argument("layer", TensorType::scalar(Dtype::I32));
                all.iter().enumerate().for_each(|(i, stack)| f.alias(stack, i));
                let place = |(all, part): (&Value, Value)| {
                    let part = part.reshape(&[&[1], &stack[1..]].concat());
                    all.dynamic_update_slice(&part, &starts(stack.len(), &layer, &zero))
                };
                ("place", all.iter().zip(to.put(&tensor)).map(place).collect())
            }
            Self::Take { stack, from } => {
                let all = from.declare(&f, "stack", stack);
                let layer = f.argument("layer", TensorType::scalar(Dtype::I32));
                let parts: Vec<Value> = all.iter().map(|all| layer_of(all, &layer, &zero)).collect();
                ("take", vec![from.get(&parts)])
            }
        };
        drop(zero);
        finish(f.clone(), name, unnamed(&results))
    }
}

/// Returns the slice of a layer, i32, of a stack `[L, ...]`.
fn layer_of(stack: &Value, layer: &Value, zero: &Value) -> Value {
    let size = [&[1], &stack.shape()[1..]].concat();
    stack.dynamic_slice(&starts(size.len(), layer, zero), &size).reshape(&size[1..])
}

/// Returns the start indices of a layer in a stack of this rank.
fn starts<'a>(rank: usize, layer: &'a Value, zero: &'a Value) -> Vec<&'a Value> {
    std::iter::once(layer).chain(std::iter::repeat_n(zero, rank - 1)).collect()
}

/// Returns the storage of weights in this dtype.
fn plain(dtype: Dtype) -> Result<Storage> {
    match dtype {
        Dtype::F32 | Dtype::Bf16 => Ok(Storage::Plain(dtype)),
        found => Err(Error::Dtype { what: "weights", expected: "f32 or bf16", found }),
    }
}

/// Copies a tensor of a mapped file to the device in its dtype.
fn upload_stored(runtime: &Runtime, tensor: &WeightTensor<'_>) -> Result<(Buffer, Dtype)> {
    fn copy<T: pjrt::Element + bytemuck::Pod>(runtime: &Runtime, tensor: &WeightTensor<'_>) -> Result<Buffer> {
        // Files align tensors to at most 8 bytes, and only by convention; unaligned tensors are copied first.
        match bytemuck::try_cast_slice::<u8, T>(tensor.bytes()) {
            Ok(values) if cfg!(target_endian = "little") => runtime.upload(values, tensor.shape()),
            _ => {
                let values = bytemuck::pod_collect_to_vec::<u8, T>(tensor.bytes());
                runtime.upload(&values, tensor.shape())
            }
        }
    }
    Ok(match tensor.dtype() {
        models::Dtype::F32 => (copy::<f32>(runtime, tensor)?, Dtype::F32),
        models::Dtype::Bf16 => (copy::<bf16>(runtime, tensor)?, Dtype::Bf16),
        models::Dtype::F16 => (copy::<f16>(runtime, tensor)?, Dtype::F16),
    })
}
