//! The parameters of a decoder as buffers on a device.

mod merge;
mod moves;
mod reshard;

pub use reshard::common_refinement;

use crate::decoder::{Format, Parameter, Role, check_quantization, parameters, quantized_parameters, words};
use crate::error::{Error, Result};
use crate::program::Programs;
use crate::runtime::Runtime;
use crate::storage::Storage;
use crate::{Argument, DeviceTensor};
use grpo_models::{MemoryTable, ModelConfig, NamedTensor, Quantization, WeightTensor, Weights};
use grpo_pjrt::Element;
use grpo_policy::{TensorSink, TensorSource};
use grpo_stablehlo::Dtype;
use half::{bf16, f16};
use moves::{Move, Step, position};
use std::collections::HashMap;
use std::sync::Arc;

/// The parameters of a decoder on the devices of a runtime, sharded by its axis rules, in the order of [`parameters`], followed by the parameters of its adapters and value head, if
/// any.
///
/// The model's matrices are f32 or bf16, its norms and biases always f32. A model that is trained with bf16 products also has the low 16
/// bits of each f32 weight as remainders, which no program of the decoder reads.
///
/// Tensors are uploaded and downloaded one by one. Uploads read from the memory-mapped files, so the host holds no copy, except of a tensor with a
/// padded vocabulary; a download holds one tensor at a time. Clones share the buffers.
#[derive(Clone, Debug)]
pub struct DeviceWeights {
    runtime: Runtime,
    table: Vec<Parameter>,
    /// Storage of the model.
    storage: Storage,
    tensors: Vec<Arc<DeviceTensor>>,
    /// Remainders of each parameter, if any.
    remainders: Vec<Option<Arc<DeviceTensor>>>,
}

impl DeviceWeights {
    /// Uploads the weights of a model folder; `dtype` on the device is f32 or bf16.
    ///
    /// # Errors
    /// [`Error::Model`] for weights that do not fit `config` or are not finite, [`Error::Dtype`]; [`Error::TooLarge`], before anything is
    /// copied; [`Error::OutOfMemory`], [`Error::Device`].
    pub fn from_weights(runtime: &Runtime, config: &ModelConfig, weights: &Weights, dtype: Dtype) -> Result<Self> {
        Self::from_files(runtime, config, weights, plain(dtype)?, None)
    }

    /// Like [`DeviceWeights::from_weights`], with a given storage, and with quantised matrices of layers if `quantization` is set.
    pub(crate) fn from_files(
        runtime: &Runtime,
        config: &ModelConfig,
        weights: &Weights,
        storage: Storage,
        quantization: Option<Quantization>,
    ) -> Result<Self> {
        config.validate()?;
        quantization.map_or(Ok(()), |quantization| check_quantization(config, quantization))?;
        weights.check(config)?;
        let runtime = &runtime.for_model(config);
        // Scales of the matrices of a stack, which are uploaded after all codes of the stack.
        let mut scales: HashMap<String, Vec<f32>> = HashMap::new();
        Self::build(runtime, quantized_parameters(config, quantization), storage, |name, parameter| {
            let tensor = weights.tensor(name)?;
            match parameter.format {
                Format::Values => {
                    tensor.check_finite()?;
                    upload_stored(runtime, &tensor, parameter)
                }
                Format::Codes(quantization) => {
                    tensor.check_finite()?;
                    let matrix = tensor.quantized(quantization)?;
                    scales.insert(name.to_owned(), matrix.scales().to_vec());
                    Ok((upload(runtime, &words(&matrix), parameter)?, Dtype::U32))
                }
                Format::Scales(quantization) => {
                    let scales = match scales.remove(name) {
                        Some(scales) => scales,
                        None => tensor.quantized(quantization)?.scales().to_vec(),
                    };
                    Ok((upload(runtime, &scales, parameter)?, Dtype::F32))
                }
            }
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
        Self::from_source(&runtime.for_model(config), parameters(config), storage, "", tensors)
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
        Self::build(runtime, table, storage, |name, parameter| {
            let (name, shape) = (format!("{prefix}{name}"), parameter.file_shape());
            let wrong = |found| grpo_policy::Error::state(&name, format!("a tensor of shape {shape:?}"), found);
            match shapes.get(&*name) {
                None => return Err(wrong("none".to_owned()).into()),
                Some(found) if *found != shape => return Err(wrong(format!("shape {found:?}")).into()),
                Some(_) => {}
            }
            let values = tensors.values(&name)?;
            if values.len() != shape.iter().product::<usize>() {
                return Err(wrong(format!("{} values", values.len())).into());
            }
            if storage == Storage::Plain(Dtype::U8) {
                let codes = grpo_policy::moment_codes(&name, &values)?;
                return Ok((upload(runtime, &codes, parameter)?, Dtype::U8));
            }
            Ok((upload(runtime, &values, parameter)?, Dtype::F32))
        })
    }

    /// Creates the parameters of `table`, with the padding of the runtime's mesh; `upload` copies the Hugging Face tensor of a name to the devices,
    /// sharded like the parameter.
    fn build(
        runtime: &Runtime,
        table: Vec<Parameter>,
        storage: Storage,
        mut upload: impl FnMut(&str, &Parameter) -> Result<(DeviceTensor, Dtype)>,
    ) -> Result<Self> {
        let table = runtime.axis_rules().all_padded(table);
        runtime.axis_rules().check_parameters(&table)?;
        let mut needed = MemoryTable::new();
        let bytes = |p: &Parameter| storage.of(p).bytes() * runtime.axis_rules().elements(p) as u64;
        needed.push(format!("weights ({})", storage.label()), table.iter().map(bytes).sum());
        runtime.check_memory(needed)?;
        let mut programs = Programs::new();
        let mut program = |parameter: &Parameter, step| Move::program(&mut programs, runtime, parameter, step);
        let mut tensors = Vec::with_capacity(table.len());
        for parameter in &table {
            let to = storage.of(parameter);
            let mut parts = match parameter.is_stacked() {
                true => program(parameter, Step::Zeros { to })?.run(vec![])?,
                false => vec![],
            };
            for (index, name) in parameter.tensors() {
                let (tensor, from) = upload(&name, parameter)?;
                parts = if parameter.is_stacked() {
                    let place = program(parameter, Step::Place { from, to })?;
                    let at = position(runtime, parameter, index)?;
                    place.run(parts.into_iter().chain([tensor]).chain(at).map(Argument::from).collect())?
                } else if to == Storage::Plain(from) {
                    vec![tensor]
                } else {
                    let from = Storage::Plain(from);
                    program(parameter, Step::Convert { from, to })?.run(vec![tensor.into()])?
                };
            }
            tensors.extend(parts);
        }
        Ok(Self::of_tensors(runtime, table, storage, tensors.into_iter().map(Arc::new)))
    }

    /// Passes every tensor to `sink` in f32, with the names of `transformers` (adapters: PEFT), in the order of [`DeviceWeights::table`]. With
    /// several processes, all of them call it, and get the same tensors.
    ///
    /// # Errors
    /// The sink's error, [`Error::Device`]; [`Error::Policy`] for quantised weights.
    pub fn export(&self, sink: &mut dyn TensorSink) -> Result<()> {
        self.export_prefixed("", sink)
    }

    /// Like [`DeviceWeights::export`], with `prefix` before the names.
    pub(crate) fn export_prefixed(&self, prefix: &str, sink: &mut dyn TensorSink) -> Result<()> {
        if let Some(parameter) = self.table.iter().find(|parameter| parameter.format != Format::Values) {
            let expected = "weights that are not quantised";
            return Err(grpo_policy::Error::argument("DeviceWeights::export", expected, parameter.name()).into());
        }
        let mut reader = self.reader();
        for (index, parameter) in self.table.iter().enumerate() {
            for (tensor, name) in parameter.tensors() {
                let (data, shape) = (reader.read(index, tensor, &name)?, parameter.file_shape());
                sink.tensor(NamedTensor { name: format!("{prefix}{name}"), shape, data })?;
            }
        }
        Ok(())
    }

    /// Returns a reader of single tensors.
    pub(crate) fn reader(&self) -> Reader<'_> {
        Reader { weights: self, programs: Programs::new() }
    }

    /// Returns the tensors of a parameter as arguments: the parameter, followed by its remainders, if any.
    pub(crate) fn parts(&self, parameter: usize) -> Vec<Argument<'_>> {
        let remainder = self.remainders[parameter].iter();
        std::iter::once(&self.tensors[parameter]).chain(remainder).map(|tensor| Argument::Borrowed(tensor)).collect()
    }

    /// Returns the parameters.
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

    /// Wraps tensors as the parameters of `table`: one tensor each, followed by its remainders, if any.
    pub(crate) fn of_tensors(
        runtime: &Runtime,
        table: Vec<Parameter>,
        storage: Storage,
        all: impl IntoIterator<Item = Arc<DeviceTensor>>,
    ) -> Self {
        let mut all = all.into_iter();
        let (mut tensors, mut remainders) = (Vec::with_capacity(table.len()), Vec::with_capacity(table.len()));
        for parameter in &table {
            tensors.extend(all.next());
            remainders.push(if storage.of(parameter) == Storage::Split { all.next() } else { None });
        }
        Self { runtime: runtime.clone(), table, storage, tensors, remainders }
    }

    /// Returns the same parameters in other tensors, which [`DeviceWeights::of_tensors`] lists.
    pub(crate) fn with_tensors(&self, all: impl IntoIterator<Item = Arc<DeviceTensor>>) -> Self {
        Self::of_tensors(&self.runtime, self.table.clone(), self.storage, all)
    }

    /// Returns the parameters whose roles `keep` selects. Tensors are shared.
    pub(crate) fn subset(&self, keep: impl Fn(Role) -> bool) -> Self {
        let kept: Vec<usize> = (0..self.table.len()).filter(|at| keep(self.table[*at].role)).collect();
        Self {
            runtime: self.runtime.clone(),
            storage: self.storage,
            table: kept.iter().map(|at| self.table[*at].clone()).collect(),
            tensors: kept.iter().map(|at| self.tensors[*at].clone()).collect(),
            remainders: kept.iter().map(|at| self.remainders[*at].clone()).collect(),
        }
    }

    /// Returns the weights without remainders. Tensors are shared.
    pub(crate) fn without_remainders(mut self) -> Self {
        self.storage = self.storage.without_remainders();
        self.remainders.fill(None);
        self
    }

    /// Appends the parameters of `more`.
    pub(crate) fn followed_by(mut self, more: Self) -> Self {
        self.table.extend(more.table);
        self.tensors.extend(more.tensors);
        self.remainders.extend(more.remainders);
        self
    }

    /// Returns the tensors, in the order of the table.
    pub fn tensors(&self) -> &[Arc<DeviceTensor>] {
        &self.tensors
    }

    /// Iterates over the remainders, i16: the low bits of f32 weights whose bf16 parts are in [`DeviceWeights::tensors`].
    pub fn remainders(&self) -> impl Iterator<Item = &Arc<DeviceTensor>> {
        self.remainders.iter().flatten()
    }

    /// Takes the tensors out of `self`.
    pub(crate) fn take(&mut self) -> Self {
        let (tensors, remainders) = (std::mem::take(&mut self.tensors), std::mem::take(&mut self.remainders));
        Self { tensors, remainders, ..self.clone() }
    }

    /// Removes and returns the parameters from index `at` on.
    pub(crate) fn split_off(&mut self, at: usize) -> Self {
        let (table, tensors) = (self.table.split_off(at), self.tensors.split_off(at));
        let remainders = self.remainders.split_off(at);
        Self { runtime: self.runtime.clone(), storage: self.storage, table, tensors, remainders }
    }

    /// Returns all tensors in the order of [`DeviceWeights::of_tensors`].
    pub(crate) fn into_tensors(self) -> Vec<Arc<DeviceTensor>> {
        let all = self.tensors.into_iter().zip(self.remainders);
        all.flat_map(|(tensor, remainder)| std::iter::once(tensor).chain(remainder)).collect()
    }

    /// Returns `true` if the tensors are present, not taken.
    pub(crate) fn are_there(&self) -> bool {
        !self.tensors.is_empty()
    }

    /// Returns the tensors as the first arguments of a program, borrowed, without remainders.
    pub fn arguments(&self) -> Vec<Argument<'_>> {
        self.tensors.iter().map(|tensor| Argument::Borrowed(tensor)).collect()
    }

    /// Returns the tensors as arguments, each followed by its remainders.
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
    /// Reads a tensor of a parameter, by its index in the stack, in f32; errors name it `name`.
    pub(crate) fn read(&mut self, index: usize, tensor: usize, name: &str) -> Result<Vec<f32>> {
        let DeviceWeights { runtime, table, storage, .. } = self.weights;
        let (parameter, mut arguments) = (&table[index], self.weights.parts(index));
        let from = storage.of(parameter);
        let step = match parameter.is_stacked() {
            true => Step::Take { from },
            false => Step::Convert { from, to: Storage::Plain(Dtype::F32) },
        };
        let program = Move::program(&mut self.programs, runtime, parameter, step)?;
        arguments.extend(position(runtime, parameter, tensor)?.into_iter().map(Argument::from));
        let mut values = runtime.read(&program.run_one(arguments)?, name)?;
        remove_padding(&mut values, parameter);
        Ok(values)
    }
}

/// Removes the padding behind the values of a tensor of this parameter.
fn remove_padding(values: &mut Vec<f32>, parameter: &Parameter) {
    values.truncate(parameter.file_shape().iter().product());
}

/// Returns the storage of weights in this dtype.
fn plain(dtype: Dtype) -> Result<Storage> {
    match dtype {
        Dtype::F32 | Dtype::Bf16 => Ok(Storage::Plain(dtype)),
        found => Err(Error::Dtype { what: "weights", expected: "f32 or bf16", found }),
    }
}

/// Copies a tensor of this parameter to the devices, with padding.
fn upload<T: Element + Default>(runtime: &Runtime, values: &[T], parameter: &Parameter) -> Result<DeviceTensor> {
    let (shape, axes) = (parameter.tensor_shape(), parameter.tensor_axes());
    if parameter.padding == 0 {
        return runtime.upload_sharded(values, shape, axes);
    }
    let mut padded = values.to_vec();
    padded.resize(shape.iter().product(), T::default());
    runtime.upload_sharded(&padded, shape, axes)
}

/// Copies a tensor of a mapped file to the devices in its dtype.
fn upload_stored(runtime: &Runtime, tensor: &WeightTensor<'_>, parameter: &Parameter) -> Result<(DeviceTensor, Dtype)> {
    let copy = Copying { runtime, tensor, parameter };
    Ok(match tensor.dtype() {
        grpo_models::Dtype::F32 => (copy.as_elements::<f32>()?, Dtype::F32),
        grpo_models::Dtype::Bf16 => (copy.as_elements::<bf16>()?, Dtype::Bf16),
        grpo_models::Dtype::F16 => (copy.as_elements::<f16>()?, Dtype::F16),
    })
}

/// A copy of a tensor of a mapped file to the devices.
struct Copying<'a> {
    runtime: &'a Runtime,
    tensor: &'a WeightTensor<'a>,
    parameter: &'a Parameter,
}

impl Copying<'_> {
    fn as_elements<T: Element + Default + bytemuck::Pod>(&self) -> Result<DeviceTensor> {
        let Self { runtime, tensor, parameter } = self;
        // Files align tensors to at most 8 bytes, and only by convention; unaligned tensors are copied first.
        match bytemuck::try_cast_slice::<u8, T>(tensor.bytes()) {
            Ok(values) if cfg!(target_endian = "little") => upload(runtime, values, parameter),
            _ => upload(runtime, &bytemuck::pod_collect_to_vec::<u8, T>(tensor.bytes()), parameter),
        }
    }
}
