//! The parameters of a configuration: stacks of the tensors of layers.

use super::{Format, Names, Parameter};
use grpo_models::{Axis, LayerSpec, ModelConfig, PARAMETERS, ParameterSpec, Role};

/// Returns the parameters of a decoder, in the argument order of programs.
pub fn parameters(config: &ModelConfig) -> Vec<Parameter> {
    let of_row = |row: &'static ParameterSpec| match row.role.is_of_layers() {
        true => stacks(config, row),
        false if row.is_in(config, LayerSpec::default()) => vec![single(config, row)],
        false => Vec::new(),
    };
    PARAMETERS.iter().flat_map(of_row).collect()
}

/// Returns the stacks of a tensor of layers; a stack has the layers in which it has the same shape.
fn stacks(config: &ModelConfig, row: &'static ParameterSpec) -> Vec<Parameter> {
    let (role, experts) = (row.role, row.is_per_expert());
    // The shapes in the order of the first layer that has them.
    let mut stacks: Vec<(Vec<usize>, Vec<usize>)> = Vec::new();
    for layer in (0..config.num_hidden_layers).filter(|layer| row.is_in(config, config.layer(*layer))) {
        let shape = row.shape(config, config.layer(layer));
        match stacks.iter_mut().find(|(of, _)| *of == shape) {
            Some((_, layers)) => layers.push(layer),
            None => stacks.push((shape, vec![layer])),
        }
    }
    let parameter = |(number, (mut shape, layers)): (usize, (Vec<usize>, Vec<usize>))| {
        let names = Names::OfLayers { row, experts: if experts { shape[0] } else { 1 } };
        shape.insert(0, layers.len());
        let axes = row.axes.iter().zip(&shape[1..]).map(|(axis, size)| match (role, axis) {
            (Role::QBias, Axis::Heads) => Axis::HeadsBias { columns: *size },
            (Role::KBias | Role::VBias, Axis::Kv) => Axis::KvBias { columns: *size },
            (_, axis) => *axis,
        });
        let axes = std::iter::once(Axis::Layer).chain(axes).collect();
        let path = if number == 0 { row.path.to_owned() } else { format!("{}.{number}", row.path) };
        let (format, stacked) = (Format::Values, if experts { 2 } else { 1 });
        Parameter { role, number, layers, shape, axes, padding: 0, format, path, names, stacked }
    };
    stacks.into_iter().enumerate().map(parameter).collect()
}

/// Returns a tensor that is not of layers.
fn single(config: &ModelConfig, row: &ParameterSpec) -> Parameter {
    let (role, path, names) = (row.role, row.path.to_owned(), Names::Listed(vec![(0, row.path.to_owned())]));
    let (shape, axes, layers) = (row.shape(config, LayerSpec::default()), row.axes.to_vec(), Vec::new());
    Parameter { role, number: 0, layers, shape, axes, padding: 0, format: Format::Values, path, names, stacked: 0 }
}
