//! The parameters of a decoder as buffers of a device.

mod merge;

use crate::decoder::{Parameter, ParameterValues, Role, parameters, zeros};
use crate::error::{Error, Result};
use crate::runtime::{Programs, Runtime, finish, read};
use half::{bf16, f16};
use models::{MemoryTable, ModelConfig, NamedTensor, WeightTensor, Weights};
use pjrt::{Argument, Buffer};
use stablehlo::{Builder, Dtype, Module, TensorType};
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

/// The parameters of a decoder on a device, in the order of [`parameters`], and behind them those of its adapters and value head, where it
/// has some.
///
/// They come and go tensor by tensor: of a model that is read from a folder, the host holds no tensor at all, because the device reads
/// the mapped file; of one that is written, one tensor at a time.
/// Clones share the buffers.
#[derive(Clone, Debug)]
pub struct DeviceWeights {
    runtime: Runtime,
    table: Vec<Parameter>,
    dtype: Dtype,
    buffers: Vec<Arc<Buffer>>,
}

/// A program that moves one tensor between the host's form and the stack of all layers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Move {
    /// Zeros of a shape.
    Zeros(Vec<usize>),
    /// A tensor of the host's number type becomes part of a stack.
    Place { stack: Vec<usize>, from: Dtype },
    /// A tensor of the host's number type, in that of the weights.
    Convert { shape: Vec<usize>, from: Dtype, to: Dtype },
    /// A part of a stack, as f32.
    Take { stack: Vec<usize> },
}

impl DeviceWeights {
    /// Copies the weights of a folder to the device, which holds them as `dtype`: f32 or bf16.
    ///
    /// # Errors
    /// [`Error::Model`] for weights that are not those of `config` or not finite, [`Error::Dtype`]; [`Error::TooLarge`] before any of them
    /// is copied; [`Error::OutOfMemory`], [`Error::Device`].
    pub fn from_weights(runtime: &Runtime, config: &ModelConfig, weights: &Weights, dtype: Dtype) -> Result<Self> {
        config.validate()?;
        weights.check(config)?;
        Self::build(runtime, parameters(config), dtype, |name, _| {
            let tensor = weights.tensor(name)?;
            tensor.check_finite()?;
            upload_stored(runtime, &tensor)
        })
    }

    /// Copies tensors with the names of `transformers` to the device, which holds them as `dtype`: f32 or bf16.
    ///
    /// # Errors
    /// [`Error::Policy`] when one is missing or has another shape, [`Error::Dtype`], [`Error::Device`].
    pub fn from_tensors(
        runtime: &Runtime,
        config: &ModelConfig,
        tensors: &[NamedTensor],
        dtype: Dtype,
    ) -> Result<Self> {
        config.validate()?;
        Self::from_values(runtime, parameters(config), dtype, |name, shape| {
            let found = tensors.iter().find(|tensor| tensor.name == name);
            match found {
                Some(tensor) if tensor.shape == shape && tensor.data.len() == shape.iter().product::<usize>() => {
                    Ok(Cow::Borrowed(&tensor.data[..]))
                }
                _ => {
                    let found = found.map_or("none".into(), |tensor| format!("shape {:?}", tensor.shape));
                    Err(policy::Error::state(name, format!("a tensor of shape {shape:?}"), found))
                }
            }
        })
    }

    /// Copies what `values` makes of each name and shape of the tensors of `table` to the device, which holds the model as `dtype`: f32 or
    /// bf16.
    ///
    /// # Errors
    /// Those of `values`, [`Error::Dtype`], [`Error::Device`].
    pub(crate) fn from_values<'a>(
        runtime: &Runtime,
        table: Vec<Parameter>,
        dtype: Dtype,
        values: impl Fn(&str, &[usize]) -> policy::Result<Cow<'a, [f32]>>,
    ) -> Result<Self> {
        Self::build(runtime, table, dtype, |name, shape| {
            Ok((runtime.upload(&values(name, shape)?, shape)?, Dtype::F32))
        })
    }

    /// The parameters, of which `upload` brings each tensor of Hugging Face to the device, by name and shape.
    fn build(
        runtime: &Runtime,
        table: Vec<Parameter>,
        dtype: Dtype,
        upload: impl Fn(&str, &[usize]) -> Result<(Buffer, Dtype)>,
    ) -> Result<Self> {
        if !matches!(dtype, Dtype::F32 | Dtype::Bf16) {
            return Err(Error::Dtype { what: "weights", expected: "f32 or bf16", found: dtype });
        }
        let mut needed = MemoryTable::new();
        let label = if dtype == Dtype::F32 { "weights (float32)" } else { "weights (bfloat16)" };
        let bytes =
            |p: &Parameter| p.dtype(dtype).bytes() as u64 * p.shape.iter().map(|size| *size as u64).product::<u64>();
        needed.push(label, table.iter().map(bytes).sum());
        runtime.check_memory(needed)?;
        let mut programs = Programs::new();
        let mut program = |key: Move, to| programs.get(runtime, (key, to), |(key, to)| key.module(*to));
        let mut buffers = Vec::with_capacity(table.len());
        for parameter in &table {
            let (shape, to) = (parameter.shape.clone(), parameter.dtype(dtype));
            let mut stack = match parameter.is_stacked() {
                true => Some(program(Move::Zeros(shape.clone()), to)?.run_one(vec![])?),
                false => None,
            };
            for (layer, name) in parameter.tensors() {
                let (tensor, from) = upload(name, parameter.tensor_shape())?;
                stack = Some(match stack {
                    Some(stack) => {
                        let place = program(Move::Place { stack: shape.clone(), from }, to)?;
                        let layer = runtime.upload(&[layer as i32], &[])?;
                        place.run_one(vec![stack.into(), tensor.into(), layer.into()])?
                    }
                    None if from == to => tensor,
                    None => {
                        program(Move::Convert { shape: shape.clone(), from, to }, to)?.run_one(vec![tensor.into()])?
                    }
                });
            }
            buffers.extend(stack);
        }
        let buffers = buffers.into_iter().map(Arc::new).collect();
        Ok(Self { runtime: runtime.clone(), table, dtype, buffers })
    }

    /// A copy of the model's weights in another number type, f32 or bf16. Adapters and a value head are shared as they are.
    ///
    /// # Errors
    /// [`Error::Dtype`], [`Error::Device`].
    pub fn converted(&self, dtype: Dtype) -> Result<Self> {
        if !matches!(dtype, Dtype::F32 | Dtype::Bf16) {
            return Err(Error::Dtype { what: "weights", expected: "f32 or bf16", found: dtype });
        }
        let mut programs = Programs::new();
        let convert = |(parameter, buffer): (&Parameter, &Arc<Buffer>)| {
            if !parameter.role.is_of_model() {
                return Ok(buffer.clone());
            }
            let key = Move::Convert { shape: parameter.shape.clone(), from: self.dtype, to: dtype };
            programs.get(&self.runtime, key, |key| key.module(dtype))?.run_one(vec![(&**buffer).into()]).map(Arc::new)
        };
        let buffers = self.table.iter().zip(&self.buffers).map(convert).collect::<Result<_>>()?;
        Ok(Self { runtime: self.runtime.clone(), table: self.table.clone(), dtype, buffers })
    }

    /// Hands every tensor to `sink` in f32, under the names of `transformers`, in the order of [`DeviceWeights::table`]; those of adapters
    /// under PEFT's.
    ///
    /// # Errors
    /// That of the sink, [`Error::Device`].
    pub fn export(&self, sink: &mut dyn policy::TensorSink) -> Result<()> {
        let mut reader = self.reader();
        for parameter in &self.table {
            for (_, name) in parameter.tensors() {
                let (name, shape) = (name.to_owned(), parameter.tensor_shape().to_vec());
                let data = reader.read(&name)?;
                sink.tensor(NamedTensor { name, shape, data })?;
            }
        }
        Ok(())
    }

    /// Reads tensors one by one.
    pub(crate) fn reader(&self) -> Reader<'_> {
        let named = |(index, parameter): (usize, &Parameter)| {
            parameter.tensors().map(|(layer, name)| (name.to_owned(), (index, layer))).collect::<Vec<_>>()
        };
        Reader {
            weights: self,
            places: self.table.iter().enumerate().flat_map(named).collect(),
            programs: Programs::new(),
        }
    }

    /// What the buffers are.
    pub fn table(&self) -> &[Parameter] {
        &self.table
    }

    /// The number type of those of the model.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// What `buffers` holds of the parameters of `table`, in f32.
    pub(crate) fn of_buffers(runtime: &Runtime, table: Vec<Parameter>, buffers: Vec<Arc<Buffer>>) -> Self {
        Self { runtime: runtime.clone(), table, dtype: Dtype::F32, buffers }
    }

    /// The parameters whose roles `keep` picks. Buffers are shared.
    pub(crate) fn subset(&self, keep: impl Fn(Role) -> bool) -> Self {
        let kept = |(parameter, buffer): (&Parameter, &Arc<Buffer>)| {
            keep(parameter.role).then(|| (parameter.clone(), buffer.clone()))
        };
        let (table, buffers) = self.table.iter().zip(&self.buffers).filter_map(kept).unzip();
        Self { runtime: self.runtime.clone(), table, dtype: self.dtype, buffers }
    }

    /// These parameters, and those of `more` behind them.
    pub(crate) fn followed_by(mut self, more: Self) -> Self {
        self.table.extend(more.table);
        self.buffers.extend(more.buffers);
        self
    }

    /// The same parameters with other buffers, in the order of the table.
    pub(crate) fn with_buffers(&self, buffers: Vec<Arc<Buffer>>) -> Self {
        Self { buffers, ..self.clone() }
    }

    /// The buffers, in the order of the table.
    pub fn buffers(&self) -> &[Arc<Buffer>] {
        &self.buffers
    }

    /// The buffers, which are no longer here.
    pub(crate) fn take_buffers(&mut self) -> Vec<Arc<Buffer>> {
        std::mem::take(&mut self.buffers)
    }

    /// Whether the buffers are here.
    pub(crate) fn are_there(&self) -> bool {
        !self.buffers.is_empty()
    }

    /// The buffers as the first arguments of a program that leaves them as they are.
    pub fn arguments(&self) -> Vec<Argument<'_>> {
        self.buffers.iter().map(|buffer| Argument::Borrowed(buffer)).collect()
    }

    /// Declares the arguments of such a program, of a model without adapters and value head.
    pub fn declare(builder: &Builder, config: &ModelConfig, dtype: Dtype) -> ParameterValues {
        ParameterValues::arguments(builder, &parameters(config), dtype)
    }
}

/// Reads tensors of [`DeviceWeights`] by the names of `transformers`.
pub(crate) struct Reader<'a> {
    weights: &'a DeviceWeights,
    /// The parameter and the layer of each name.
    places: HashMap<String, (usize, usize)>,
    programs: Programs<(Move, Dtype)>,
}

impl Reader<'_> {
    /// The tensor `name`, in f32.
    ///
    /// # Errors
    /// [`Error::Policy`] for a name that the model does not have, [`Error::Device`].
    pub(crate) fn read(&mut self, name: &str) -> Result<Vec<f32>> {
        let DeviceWeights { runtime, table, dtype, buffers } = self.weights;
        let Some(&(index, layer)) = self.places.get(name) else {
            return Err(policy::Error::state(name, "a name that the model has", "another one").into());
        };
        let (parameter, mut arguments) = (&table[index], vec![Argument::Borrowed(&buffers[index])]);
        let from = parameter.dtype(*dtype);
        let key = match parameter.is_stacked() {
            true => Move::Take { stack: parameter.shape.clone() },
            false => Move::Convert { shape: parameter.shape.clone(), from, to: Dtype::F32 },
        };
        let program = self.programs.get(runtime, (key, from), |(key, from)| key.module(*from))?;
        if parameter.is_stacked() {
            arguments.push(runtime.upload(&[layer as i32], &[])?.into());
        }
        read(&program.run_one(arguments)?, name)
    }
}

impl Move {
    /// The program, for weights of number type `dtype`.
    fn module(&self, dtype: Dtype) -> Result<Module> {
        let f = Builder::new();
        let zero = f.scalar(0, Dtype::I32);
        let index = |rank: usize, layer| {
            let mut starts = vec![&zero; rank];
            starts[0] = layer;
            starts
        };
        let (name, result) = match self {
            Self::Zeros(shape) => ("zeros", zeros(&f, dtype, shape)),
            Self::Convert { shape, from, to } => {
                let tensor = f.argument("tensor", TensorType::new(*from, &shape[..]));
                // A copy, where the number type stays.
                ("convert", tensor.convert(*to))
            }
            Self::Place { stack, from } => {
                let all = f.argument("stack", TensorType::new(dtype, &stack[..]));
                let tensor = f.argument("tensor", TensorType::new(*from, &stack[1..]));
                let layer = f.argument("layer", TensorType::scalar(Dtype::I32));
                f.alias(&all, 0);
                let update = tensor.convert(dtype).reshape(&[&[1], &stack[1..]].concat());
                ("place", all.dynamic_update_slice(&update, &index(stack.len(), &layer)))
            }
            Self::Take { stack } => {
                let all = f.argument("stack", TensorType::new(dtype, &stack[..]));
                let layer = f.argument("layer", TensorType::scalar(Dtype::I32));
                let part = all.dynamic_slice(&index(stack.len(), &layer), &[&[1], &stack[1..]].concat());
                ("take", part.reshape(&stack[1..]).convert(Dtype::F32))
            }
        };
        drop(zero);
        finish(f, name, &[("", &result)])
    }
}

/// Copies a tensor of a mapped file to the device, with the number type that it has.
fn upload_stored(runtime: &Runtime, tensor: &WeightTensor<'_>) -> Result<(Buffer, Dtype)> {
    fn copy<T: pjrt::Element + bytemuck::Pod>(runtime: &Runtime, tensor: &WeightTensor<'_>) -> Result<Buffer> {
        // Files align their tensors to 8 bytes at best by custom: one that does not is copied.
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
