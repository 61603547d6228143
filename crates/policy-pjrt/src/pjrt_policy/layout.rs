//! The tensors of checkpoints, named and laid out as by the CPU policy, so that a run can resume on either policy.
//!
//! The CPU policy stores matrices `[in, out]`, and fuses queries, keys and values into one matrix, and gate and up into another. A tensor
//! of a checkpoint therefore consists of one or more transposed tensors of `transformers`, side by side. Adapters have PEFT's matrices,
//! named by the CPU policy's module that contains the adapted matrix, and their index in it.

use crate::decoder::{Adapters, Axis, Decoder};
use crate::error::Result;
use crate::weights::Reader;
use models::{AdaptedMatrix, ModelConfig, NamedTensor};
use policy::{Error, TensorSource};
use std::borrow::Cow;
use std::collections::HashMap;

/// One tensor of a checkpoint.
#[derive(Clone, Debug)]
struct Saved {
    name: String,
    /// Its tensors of `transformers`, in the order of its columns.
    parts: Vec<Part>,
    /// `true` for a matrix `[in, out]` with parts `[out, in]`.
    transposed: bool,
}

/// One tensor of `transformers`.
#[derive(Clone, Debug)]
struct Part {
    name: String,
    shape: Vec<usize>,
}

/// The modules of a layer of the CPU policy, with the modules of `transformers` that each contains.
const MODULES: [(&str, &[&str]); 8] = [
    ("input_norm", &["input_layernorm"]),
    ("attn.qkv_proj", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    ("attn.o_proj", &["self_attn.o_proj"]),
    ("attn.q_norm", &["self_attn.q_norm"]),
    ("attn.k_norm", &["self_attn.k_norm"]),
    ("post_norm", &["post_attention_layernorm"]),
    ("mlp.gate_up_proj", &["mlp.gate_proj", "mlp.up_proj"]),
    ("mlp.down_proj", &["mlp.down_proj"]),
];

/// The tensors of a checkpoint.
#[derive(Clone, Debug)]
pub(super) struct Layout(Vec<Saved>);

impl Layout {
    /// Creates the list of the trained tensors of `decoder`.
    pub(super) fn of_trained(decoder: &Decoder) -> Self {
        let mut saved = match decoder.adapters() {
            Some(adapters) => of_adapters(decoder.config(), adapters),
            None => of_model(decoder.config()),
        };
        let value_head = decoder.trained().into_iter().filter(|p| p.axes.contains(&Axis::Value));
        saved.extend(value_head.map(|p| Saved::whole(p.name().to_owned(), p.name().to_owned(), p.shape)));
        Self(saved)
    }

    /// Returns the checkpoint name of the tensor that `transformers` or PEFT call `name`, if it is not fused with others.
    pub(super) fn name_of(&self, name: &str) -> Option<&str> {
        let saved = self.0.iter().find(|saved| saved.parts.len() == 1 && saved.parts[0].name == name)?;
        Some(&saved.name)
    }

    /// Passes the tensors of a checkpoint to `sink`, one by one, with `prefix` before their names. Host memory holds one of them at a time
    /// and, if it is fused or transposed, one of its parts.
    pub(super) fn export(&self, prefix: &str, mut reader: Reader<'_>, sink: &mut dyn policy::TensorSink) -> Result<()> {
        for saved in &self.0 {
            let shape = saved.shape();
            let data = match &saved.parts[..] {
                [part] if !saved.transposed => reader.read(&part.name)?,
                parts => {
                    let mut data = vec![0.0; shape.iter().product()];
                    let mut first = 0;
                    for part in parts {
                        let values = reader.read(&part.name)?;
                        match saved.transposed {
                            true => put_columns(&values, part.shape[1], &mut data, shape[1], first),
                            false => data[first..first + values.len()].copy_from_slice(&values),
                        }
                        first += part.shape[0];
                    }
                    data
                }
            };
            sink.tensor(NamedTensor { name: format!("{prefix}{}", saved.name), shape, data })?;
        }
        Ok(())
    }

    /// Maps the tensors of `transformers` to the checkpoint tensors whose names begin with `prefix`, without reading values.
    ///
    /// # Errors
    /// [`Error::State`] if a tensor is missing, has another shape, or is not part of the model.
    pub(super) fn import<'a>(&'a self, prefix: &str, source: &'a dyn TensorSource) -> policy::Result<Imported<'a>> {
        let tensors = source.shapes().into_iter();
        let named: HashMap<&str, (&str, &[usize])> =
            tensors.filter_map(|(name, shape)| Some((name.strip_prefix(prefix)?, (name, shape)))).collect();
        let mut parts = HashMap::new();
        for saved in &self.0 {
            let (shape, found) = (saved.shape(), named.get(&*saved.name));
            let Some((whole, _)) = found.filter(|(_, found)| *found == shape) else {
                let found = found.map_or("none".into(), |(_, shape)| format!("shape {shape:?}"));
                let name = format!("{prefix}{}", saved.name);
                return Err(Error::state(name, format!("a tensor of shape {shape:?}"), found));
            };
            let mut first = 0;
            for part in &saved.parts {
                parts.insert(&*part.name, TensorLocation { saved, whole, first });
                first += part.shape[0];
            }
        }
        if named.len() != self.0.len() {
            let known = |name: &&str| self.0.iter().any(|saved| saved.name == **name);
            let extra = named.keys().find(|name| !known(name)).copied().unwrap_or_default();
            return Err(Error::state(extra, "a name that the model has", "a tensor that no parameter uses"));
        }
        Ok(Imported { source, parts })
    }
}

/// Lists the tensors of a model.
fn of_model(config: &ModelConfig) -> Vec<Saved> {
    let mut shapes: HashMap<String, Vec<usize>> =
        config.parameters().into_iter().map(|parameter| (parameter.name, parameter.shape)).collect();
    let mut saved = Vec::new();
    let mut add = |name: String, parts: &[String]| {
        let part = |name: &String| Some(Part { name: name.clone(), shape: shapes.remove(name)? });
        // Some models lack some of these tensors, for example biases.
        let parts: Vec<Part> = parts.iter().filter_map(part).collect();
        let transposed = name.starts_with("layers.") && parts.first().is_some_and(|part| part.shape.len() > 1);
        if !parts.is_empty() {
            saved.push(Saved { name, parts, transposed });
        }
    };
    add("embed_tokens".into(), &["model.embed_tokens.weight".into()]);
    for layer in 0..config.num_hidden_layers {
        for (module, parts) in MODULES {
            for kind in ["weight", "bias"] {
                let parts: Vec<String> =
                    parts.iter().map(|part| format!("model.layers.{layer}.{part}.{kind}")).collect();
                add(format!("layers.{layer}.{module}.{kind}"), &parts);
            }
        }
    }
    add("norm.weight".into(), &["model.norm.weight".into()]);
    add("lm_head".into(), &["lm_head.weight".into()]);
    saved
}

/// Lists the tensors of adapters: `layers.0.attn.qkv_proj.adapters.1.a` is A of the second adapted matrix of that module.
fn of_adapters(config: &ModelConfig, adapters: &Adapters) -> Vec<Saved> {
    let mut saved = Vec::new();
    let mut add = |name: String, matrix: &AdaptedMatrix| {
        let rank = adapters.rank();
        saved.push(Saved::whole(format!("{name}.a"), matrix.lora_a(), vec![rank, matrix.input]));
        saved.push(Saved::whole(format!("{name}.b"), matrix.lora_b(), vec![matrix.output, rank]));
    };
    for layer in 0..config.num_hidden_layers {
        for (module, parts) in MODULES {
            let adapted = parts.iter().filter_map(|part| adapters.matrix(&format!("model.layers.{layer}.{part}")));
            adapted.enumerate().for_each(|(i, matrix)| add(format!("layers.{layer}.{module}.adapters.{i}"), matrix));
        }
    }
    if let Some(matrix) = adapters.matrix("lm_head") {
        add("lora_head".into(), matrix);
    }
    saved
}

/// Tensors of `transformers` within the tensors of a checkpoint, read on demand.
pub(super) struct Imported<'a> {
    source: &'a dyn TensorSource,
    parts: HashMap<&'a str, TensorLocation<'a>>,
}

/// The location of a tensor of `transformers`.
struct TensorLocation<'a> {
    saved: &'a Saved,
    /// Name of the checkpoint's tensor in its source.
    whole: &'a str,
    /// First of its columns.
    first: usize,
}

impl<'a> Imported<'a> {
    /// Returns the values of the tensor `name`, of `shape`.
    pub(super) fn values(&self, name: &str, shape: &[usize]) -> policy::Result<Cow<'a, [f32]>> {
        let Some(&TensorLocation { saved, whole, first }) = self.parts.get(name) else {
            return Err(Error::state(name, "a tensor of the checkpoint", "none"));
        };
        let (of_whole, data) = (saved.shape(), self.source.values(whole)?);
        if data.len() != of_whole.iter().product::<usize>() {
            let found = format!("{} values", data.len());
            return Err(Error::state(whole, format!("the values of a tensor of shape {of_whole:?}"), found));
        }
        if !saved.transposed {
            let part = first..first + shape.iter().product::<usize>();
            return Ok(match data {
                Cow::Borrowed(data) => Cow::Borrowed(&data[part]),
                Cow::Owned(data) if part.len() == data.len() => Cow::Owned(data),
                Cow::Owned(data) => Cow::Owned(data[part].to_vec()),
            });
        }
        let (outputs, width) = (shape[0], of_whole[1]);
        let mut values = vec![0.0; of_whole[0] * outputs];
        for (input, row) in data.chunks_exact(width).enumerate() {
            let to = values[input..].iter_mut().step_by(shape[1]);
            to.zip(&row[first..first + outputs]).for_each(|(to, value)| *to = *value);
        }
        Ok(Cow::Owned(values))
    }
}

/// Writes a matrix `[out, inputs]` transposed into the columns of `data` `[inputs, width]`, from column `first` on.
fn put_columns(part: &[f32], inputs: usize, data: &mut [f32], width: usize, first: usize) {
    for (input, row) in data.chunks_exact_mut(width).enumerate() {
        let values = part[input..].iter().step_by(inputs);
        row[first..].iter_mut().zip(values).for_each(|(to, value)| *to = *value);
    }
}

impl Saved {
    /// Creates a tensor that is the same in both layouts.
    fn whole(name: String, part: String, shape: Vec<usize>) -> Self {
        Self { name, parts: vec![Part { name: part, shape }], transposed: false }
    }

    fn shape(&self) -> Vec<usize> {
        let outputs = self.parts.iter().map(|part| part.shape[0]).sum();
        match self.parts[0].shape[..] {
            [_, inputs] if self.transposed => vec![inputs, outputs],
            [_, inputs] => vec![outputs, inputs],
            _ => vec![outputs],
        }
    }
}
