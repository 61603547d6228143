//! The names of this decoder's parameters, and the tensors of transformers that they consist of.
//!
//! This decoder stores matrices `[in, out]`, and fuses queries, keys and values into one matrix, and gate and up into another; transformers
//! stores `[out, in]`, one matrix each. A parameter therefore consists of one or more transposed tensors, side by side. The table of
//! [`grpo_models::PARAMETERS`] has both names.

use grpo_models::{AdaptedMatrix, ModelConfig, PARAMETERS, ParameterSpec, Role};
use std::ops::Range;

/// A tensor of transformers as a part of a parameter of this decoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Name in transformers.
    pub(crate) name: String,
    /// Shape in transformers.
    pub(crate) shape: Vec<usize>,
    /// Its columns in the parameter; empty if it is the whole parameter.
    pub(crate) columns: Range<usize>,
    /// The index of its first row in the parameter, if it is transposed: matrices of experts are below each other.
    pub(crate) first_row: usize,
    /// `true` if the parameter's columns are the tensor's rows.
    pub(crate) transposed: bool,
}

/// Returns the layer of a parameter, and its name within the layer; `None` for a parameter that is not of layers.
pub(super) fn split(name: &str) -> Option<(usize, &str)> {
    let (layer, name) = name.strip_prefix("layers.")?.split_once('.')?;
    Some((layer.parse().ok()?, name))
}

/// Returns the tensors that the parameter `name` of a layer consists of, in the order of its columns.
fn rows(config: &ModelConfig, layer: usize, name: &str) -> Vec<&'static ParameterSpec> {
    ParameterSpec::of_layer(config, config.layer(layer)).filter(|row| row.fused == name).collect()
}

/// Returns the role of the tensors that the parameter `name` consists of; `None` for adapters and the value head.
fn role(name: &str) -> Option<Role> {
    let name = split(name).map_or(name, |(_, name)| name);
    PARAMETERS.iter().find(|row| row.fused == name).map(|row| row.role)
}

/// Returns `true` if a parameter with this name is never trained.
pub(super) fn is_constant(name: &str) -> bool {
    role(name).is_some_and(Role::is_constant)
}

/// Returns `true` if the parameter `name` belongs to a router.
pub(super) fn is_router(name: &str) -> bool {
    role(name).is_some_and(Role::is_of_router)
}

/// Returns the tensors of transformers that the parameter `name` consists of, in the order of its columns.
pub(crate) fn parts(config: &ModelConfig, adapted: &Adapted, name: &str, shape: &[usize]) -> Vec<Part> {
    let whole = |name: String, shape| Part { name, shape, columns: 0..0, first_row: 0, transposed: false };
    if let Some(matrix) = adapted.matrix(config, name) {
        let tensor = if name.ends_with(".a") { matrix.lora_a() } else { matrix.lora_b() };
        return vec![whole(tensor, shape.to_vec())];
    }
    let (layer, rows) = match split(name) {
        Some((layer, name)) => (layer, rows(config, layer, name)),
        None => (0, PARAMETERS.iter().filter(|row| row.fused == name).collect()),
    };
    if rows.is_empty() {
        // transformers' causal models have no value head.
        return vec![whole(name.to_owned(), shape.to_vec())];
    }
    let experts = config.experts.as_ref().filter(|_| rows[0].is_per_expert()).map_or(1, |experts| experts.num_experts);
    let mut parts = Vec::with_capacity(experts * rows.len());
    for expert in 0..experts {
        let mut end = 0;
        for row in &rows {
            let (transposed, part) = (row.is_transposed(), row.tensor_shape(config, config.layer(layer)));
            let first = end;
            end += part[0];
            let first_row = if transposed { expert * part[1] } else { 0 };
            let columns = if transposed || rows.len() > 1 { first..end } else { 0..0 };
            parts.push(Part { name: row.name(layer, expert), shape: part, columns, first_row, transposed });
        }
    }
    parts
}

/// The adapted matrices of a model.
#[derive(Clone, Debug, Default)]
pub(crate) struct Adapted {
    pub(crate) matrices: Vec<AdaptedMatrix>,
}

impl Adapted {
    /// Returns the matrix of the adapter parameter `name`, for example `layers.0.attn.qkv_proj.adapters.1.a`. The adapters of a layer are
    /// numbered in the order of its columns.
    pub(crate) fn matrix(&self, config: &ModelConfig, name: &str) -> Option<&AdaptedMatrix> {
        if name.starts_with("lora_head.") {
            return self.matrices.iter().find(|matrix| matrix.name == "lm_head");
        }
        let (layer, rest) = name.strip_prefix("layers.")?.split_once('.')?;
        if let Some(rest) = rest.strip_prefix("mlp.experts_") {
            let (parameter, _) = rest.split_once("_adapter.")?;
            return self.of_experts(layer, &format!("{parameter}_proj"));
        }
        let (module, rest) = rest.split_once(".adapters.")?;
        let index: usize = rest.split_once('.')?.0.parse().ok()?;
        self.of_layer(config, layer, module).get(index).map(|(matrix, _)| *matrix)
    }

    /// Returns the adapted parameter `gate_up_proj` or `down_proj` of a layer's experts.
    pub(crate) fn of_experts(&self, layer: &str, parameter: &str) -> Option<&AdaptedMatrix> {
        let name = format!("model.layers.{layer}.mlp.experts.{parameter}");
        self.matrices.iter().find(|matrix| matrix.name == name)
    }

    /// Returns the adapted matrices of a module of a layer, for example `attn.qkv_proj`, each with its first column.
    pub(crate) fn of_layer(&self, config: &ModelConfig, layer: &str, module: &str) -> Vec<(&AdaptedMatrix, usize)> {
        let Ok(layer) = layer.parse() else { return Vec::new() };
        let mut end = 0;
        let rows = rows(config, layer, &format!("{module}.weight"));
        let matrices = rows.into_iter().filter_map(|row| {
            let (name, width) = (row.name(layer, 0), row.shape(config, config.layer(layer))[0]);
            end += width;
            Some((
                self.matrices.iter().find(|matrix| name.strip_suffix(".weight") == Some(&*matrix.name))?,
                end - width,
            ))
        });
        matrices.collect()
    }
}

/// Returns `true` if the parameter `name` belongs to an adapter.
pub(crate) fn is_adapter(name: &str) -> bool {
    name.starts_with("lora_head.") || name.contains(".adapters.") || name.contains("_adapter.")
}

/// Returns `true` if the parameter `name` belongs to the value head.
pub(crate) fn is_value_head(name: &str) -> bool {
    name.starts_with("value_head.")
}
