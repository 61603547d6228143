//! Export of weights with merged adapters.

use super::moves::{Position, position as place_of};
use super::{DeviceWeights, remove_padding};
use crate::Argument;
use crate::decoder::{AxisRules, Decoder, Dims, Matrix, Parameter, ParameterId, Role, layer_at};
use crate::error::Result;
use crate::program::Programs;
use crate::storage::Storage;
use grpo_models::NamedTensor;
use grpo_stablehlo::{Builder, Module, Value};

impl DeviceWeights {
    /// Passes every tensor of the model to `sink` in f32, one by one, with the names of `transformers`; adapters are merged as W + s B A.
    /// If the head is tied to the embedding and has an adapter, the merged head is a separate `lm_head.weight`, and the embedding is not
    /// changed.
    ///
    /// # Errors
    /// The sink's error; [`crate::Error::Device`].
    pub(crate) fn export_merged(&self, decoder: &Decoder, sink: &mut dyn grpo_policy::TensorSink) -> Result<()> {
        let position = |id| self.table.iter().position(|parameter| parameter.id() == id);
        let adapter_of =
            |matrix, number| position((Role::LoraA(matrix), number)).zip(position((Role::LoraB(matrix), number)));
        let (mut reader, mut programs) = (self.reader(), Programs::new());
        let mut merge =
            |id: ParameterId, at: usize, (a, b): (usize, usize), index: usize, name: &str| -> Result<Vec<f32>> {
                let parts = [at, a, b].map(|at| &self.table[at]);
                let program = programs
                    .get(&self.runtime, id, |_| module(decoder, parts, self.storage, self.runtime.axis_rules()))?;
                let mut arguments = [at, a, b].map(|at| self.parts(at)).into_iter().flatten().collect::<Vec<_>>();
                arguments.extend(place_of(&self.runtime, parts[0], index)?.into_iter().map(Argument::from));
                let mut values = self.runtime.read(&program.run_one(arguments)?, name)?;
                remove_padding(&mut values, parts[0]);
                Ok(values)
            };
        for (at, parameter) in self.table.iter().enumerate().filter(|(_, p)| p.role.is_of_model()) {
            let adapter = Matrix::adapting(parameter.role).and_then(|matrix| adapter_of(matrix, parameter.number));
            let of_layer: usize = parameter.shape[..parameter.stacked()].iter().skip(1).product();
            for (index, name) in parameter.tensors() {
                let layer = index / of_layer;
                let adapted = adapter.filter(|(a, _)| self.table[*a].has_tensor(layer));
                let data = match adapted {
                    None => reader.read(at, index, &name)?,
                    Some(adapter) => merge(parameter.id(), at, adapter, index, &name)?,
                };
                let shape = parameter.file_shape();
                sink.tensor(NamedTensor { name, shape, data })?;
            }
        }
        let tied = position((Role::EmbedTokens, 0)).filter(|_| position((Role::LmHead, 0)).is_none());
        if let Some((at, adapter)) = tied.zip(adapter_of(Matrix::LmHead, 0)) {
            let (name, shape) = ("lm_head.weight", self.table[at].file_shape());
            let data = merge((Role::LmHead, 0), at, adapter, 0, name)?;
            sink.tensor(NamedTensor { name: name.to_owned(), shape, data })?;
        }
        Ok(())
    }
}

/// Builds the program from a matrix (or its stack), A, B and the matrix's place in the stack to W + s B A in f32.
fn module(decoder: &Decoder, parts: [&Parameter; 3], storage: Storage, rules: &AxisRules) -> Result<Module> {
    let f = Builder::new();
    let stacks = parts.map(|p| storage.of(p).declare(&f, p.name(), &p.shape));
    let sharded = stacks.iter().zip(parts).flat_map(|(values, p)| values.iter().map(move |value| (value, p)));
    sharded.for_each(|(value, p)| rules.argument(value, &p.axes));
    let matrix = parts[0];
    rules.result(&f, 0, matrix.tensor_axes());
    let position = Position::declare(&f, &matrix.shape[..matrix.stacked()], &matrix.axes, rules);
    let weight = position.take(&stacks[0], storage.of(matrix));
    let [a, b] = [1, 2].map(|i| {
        let part = |stack: &Value| match position.starts.first() {
            Some(layer) => layer_at(stack, layer),
            None => stack.clone(),
        };
        storage.of(parts[i]).get(&stacks[i].iter().map(part).collect::<Vec<_>>())
    });
    let update = match (matrix.role.is_of_experts(), &position.starts[..]) {
        (false, _) => decoder.low_rank([&a, &b]),
        (true, [_, expert]) => {
            // The rows of up follow the rows of gate.
            let rows = matrix.tensor_shape()[0];
            let first = if matrix.role == Role::ExpertUpProj { rows } else { 0 };
            let zero = &position.zero;
            let [_, rank, input] = a.dims();
            let a = a.dynamic_slice(&[expert, zero, zero], &[1, rank, input]).reshape(&[rank, input]);
            let first = zero.like(first as i64);
            let b = b.dynamic_slice(&[&first, zero, expert], &[rows, rank, 1]).reshape(&[rows, rank]);
            decoder.low_rank([&a, &b])
        }
        (true, _) => decoder.low_rank_of_experts([&a, &b]),
    };
    rules.finish(f, "merge", [("merged", &(weight + update))])
}
