//! Grouped products of experts: tokens are grouped by expert, in blocks of rows of one expert, so that only the experts of a token compute it.
//!
//! ```text
//! for each block, in the order of experts:
//!     e = expert of the block;  t = tokens of the block's rows, the next ones that chose e
//!     y[t] += down_e(activation(gate_e(x[t])) * up_e(x[t]) * weights[t, e])
//! ```
//!
//! The last block of an expert is padded with rows of weight 0. Every token is computed by all of its experts, however many tokens an expert has,
//! and the number of blocks does not depend on the choices of the router: n tokens with k experts each need at most E + (n k - E) / R blocks of R rows.
//!
//! Tokens are sorted without a sort: the rank of a token among the tokens of its expert is a cumulative sum, and the token of a rank is found by counting the
//! smaller sums, first over chunks of tokens, then within a chunk. A sort or a scatter of all pairs of tokens and experts would read and write
//! more.
//!
//! On a mesh, each group of devices with the same tokens loops over its blocks, and each device computes the blocks of its experts; the sum over devices
//! follows the loop. The loop adds to the outputs, and its derivative to the gradients of tokens and experts, in place.
//!
//! Legend: G groups of tokens, D devices that share the experts for the same tokens, n tokens of a group, E experts of a device, k experts of a token, M
//! blocks, R rows of a block, C chunks of Q tokens, H hidden size, I width of an expert's MLP, O columns of a matrix.

use super::super::layer_ops::{Broadcast, last_columns};
use super::super::{Axis, Compute, Decoder, Matrix, Parameter, ParameterValues, Role, zeros};
use super::adapters::rows_of;
use super::blocks::Blocks;
use crate::leaves::first;
use grpo_models::Experts;
use grpo_stablehlo::{
    DotDimensions, Dtype, GatherDimensions, Reducer, Result, Save, ScatterDimensions, TensorType, Value, trace,
};
use std::ops::Range;

/// The loop over blocks of a layer, in a program.
pub(super) struct BlockLoop<'a> {
    pub(super) decoder: &'a Decoder,
    pub(super) blocks: Blocks,
    pub(super) experts: &'a Experts,
}

/// The tokens of each expert. Dimensions `[G, D, E]`, i32.
struct Assignment {
    /// The number of an expert's tokens up to and including a token, `[G, D, E, n]`, i32.
    ranks: Value,
    /// The number of an expert's tokens.
    counts: Value,
    /// The number of blocks of all experts before this one.
    begins: Value,
    /// The number of blocks of this expert and of all experts before it.
    ends: Value,
}

/// The rows of a block.
struct Rows {
    /// 1 for the expert of the block, else 0, `[G, D, E]`, i32.
    is_expert: Value,
    /// The number of the expert, `[G, D]`, i32.
    expert: Value,
    /// The token of each row, `[G, D, R]`, i32.
    tokens: Value,
    /// `true` for rows that are not padding, `[G, D, R]`.
    valid: Value,
}

impl BlockLoop<'_> {
    /// Returns the weighted sum `[B, T, H]`, f32, of the outputs of each token's experts for `x` `[B, T, H]`. `chosen` and `weights` `[B, T, E]`
    /// are 0 for experts that the router has not chosen.
    ///
    /// # Errors
    /// An operation cannot be built.
    pub(super) fn outputs(&self, layer: &ParameterValues, x: &Value, [chosen, weights]: [&Value; 2]) -> Result<Value> {
        let Blocks { groups, devices, tokens, experts, .. } = self.blocks;
        let (f, rules, hidden) = (x.builder(), self.decoder.axis_rules(), self.decoder.config().hidden_size);
        let of_groups = |value: &Value| rules.constrain(value, &[Some(Axis::Batch), None, None]);
        let inputs = of_groups(&of_groups(x).reshape(&[groups, tokens, hidden]));
        let by_device = |pairs: &Value| {
            self.by_device(&pairs.reshape(&[groups, tokens, devices, experts]).transpose(&[0, 2, 1, 3]))
        };
        let Assignment { ranks, counts, begins, ends } = self.assign(&by_device(chosen));
        let matrices = self.matrices(layer);
        let weights = by_device(weights);
        let constants: Vec<&Value> = [&inputs, &weights, &ranks, &counts, &begins, &ends]
            .into_iter()
            .chain(matrices.iter().map(|(_, matrix)| matrix))
            .collect();
        let sum = self.by_device(&zeros(&f, Dtype::F32, &[groups, devices, tokens, hidden]));
        let types = std::iter::once(sum.ty().clone()).chain([TensorType::scalar(Dtype::I32)]);
        let types: Vec<TensorType> = types.chain(constants.iter().map(|value| value.ty().clone())).collect();
        let body = trace(&types, |_, values| {
            let ([sum, number, inputs, weights, ranks, counts, begins, ends], of_experts) = first(values);
            let [ranks, counts, begins, ends] = [ranks, counts, begins, ends].map(Value::clone);
            let rows = self.rows(number, &Assignment { ranks, counts, begins, ends });
            let of_expert = |((role, _), all): (&(Role, Value), &Value)| (*role, at(all, &rows.expert, &[1]));
            let layer = layer.of_layer(matrices.iter().zip(of_experts).map(of_expert));
            let outputs = self.block(&layer, &at(inputs, &rows.tokens, &[0]), &self.weights(weights, &rows));
            vec![self.by_device(&add_at(sum, &rows.tokens, &self.by_device(&outputs)))]
        })?;
        let numbers = f.iota(0, TensorType::new(Dtype::I32, [self.blocks.count()]));
        let sums = f.scan(self.blocks.count(), &body, &[&sum], &[&numbers], &constants, Save::Carry).carry;
        let sum = of_groups(&sums[0].reduce(Reducer::Add, &[1]));
        Ok(of_groups(&sum.reshape(x.shape())))
    }

    /// Shards a value `[G, D, ...]`.
    fn by_device(&self, value: &Value) -> Value {
        let mut dimensions = vec![None; value.shape().len()];
        dimensions[..2].copy_from_slice(&[Some(Axis::Batch), Some(Axis::Experts)]);
        self.decoder.axis_rules().constrain(value, &dimensions)
    }

    /// Returns the matrices, biases and adapters of the experts, `[D, E, ...]`. Each device holds its own experts whole. B is `[D, E, O, r]`.
    fn matrices(&self, layer: &ParameterValues) -> Vec<(Role, Value)> {
        let Blocks { devices, experts, .. } = self.blocks;
        let table = self.decoder.parameters();
        let of_experts = table.iter().filter(|parameter| parameter.role.is_of_experts());
        let matrix = |parameter: &Parameter| {
            let value = layer.get(parameter.role)?.convert(self.decoder.compute().dtype());
            let (value, of_expert) = match parameter.role {
                Role::LoraB(_) => (value.transpose(&[2, 0, 1]), &parameter.axes[1..3]),
                _ => (value, &parameter.axes[2..]),
            };
            let value = value.reshape(&[&[devices, experts], &value.shape()[1..]].concat());
            let axes: Vec<Option<Axis>> =
                [Some(Axis::Experts), None].into_iter().chain(of_expert.iter().copied().map(Some)).collect();
            Some((parameter.role, self.decoder.axis_rules().constrain_after(&value, Axis::Batch, &axes)))
        };
        of_experts.filter_map(matrix).collect()
    }

    /// Assigns tokens to experts, for `chosen` `[G, D, n, E]`.
    fn assign(&self, chosen: &Value) -> Assignment {
        let Blocks { groups, devices, tokens, experts, rows, .. } = self.blocks;
        let chunk = self.blocks.chunk();
        let chunks = [groups, devices, experts, tokens / chunk, chunk];
        let within = sums_along_last(&chosen.transpose(&[0, 1, 3, 2]).reshape(&chunks), true);
        let before = sums_along_last(&last(&within), false);
        let ranks = (&within + before.along_first(&within)).convert(Dtype::I32);
        let ranks = self.by_device(&ranks.reshape(&[groups, devices, experts, tokens]));
        let counts = last(&ranks);
        let blocks = (&counts + counts.like(rows as i64 - 1)) / counts.like(rows as i64);
        let ends = sums_along_last(&blocks.convert(Dtype::F32), true).convert(Dtype::I32);
        Assignment { begins: &ends - blocks, ranks, counts, ends }
    }

    /// Returns the rows of the block with this number, a scalar.
    fn rows(&self, number: &Value, assignment: &Assignment) -> Rows {
        let Assignment { ranks, counts, begins, ends } = assignment;
        let Blocks { groups, devices, tokens, experts, rows, .. } = self.blocks;
        let f = number.builder();
        let before = ends.le(&number.broadcast_in_dim(ends.shape(), &[])).convert(Dtype::I32);
        let expert = before.reduce(Reducer::Add, &[2]);
        // Blocks behind the last one have the last expert, and ranks that it does not have.
        let expert = expert.min(&expert.like(experts as i64 - 1));
        let is_expert = f.iota(2, ends.ty().clone()).eq(&expert.along_first(ends)).convert(Dtype::I32);
        let of_expert = |values: &Value| (values * &is_expert).reduce(Reducer::Add, &[2]);

        let shape = [groups, devices, rows];
        let begin = of_expert(begins);
        let first = number.broadcast_in_dim(begin.shape(), &[]) - &begin;
        let first = (&first * first.like(rows as i64)).broadcast_in_dim(&shape, &[0, 1]);
        let rank = f.iota(2, first.ty().clone()) + first;
        let valid = rank.lt(&of_expert(counts).along_first(&rank));

        let chunk = self.blocks.chunk();
        let of_chunks = at(ranks, &expert, &[0, 1]).reshape(&[groups, devices, tokens / chunk, chunk]);
        let ends = last(&of_chunks);
        let ends = ends.broadcast_in_dim(&[&shape[..], &[tokens / chunk]].concat(), &[0, 1, 3]);
        let in_chunk = smaller(&ends, &rank);
        let in_chunk = in_chunk.min(&in_chunk.like((tokens / chunk) as i64 - 1));
        let within = smaller(&at(&of_chunks, &in_chunk, &[0, 1]), &rank);
        let within = within.min(&within.like(chunk as i64 - 1));
        Rows { is_expert, expert, tokens: &in_chunk * in_chunk.like(chunk as i64) + within, valid }
    }

    /// Returns the weights `[G, D, R]` of the rows of a block, 0 for padding.
    fn weights(&self, weights: &Value, rows: &Rows) -> Value {
        let of_tokens = at(weights, &rows.tokens, &[0, 1]);
        let is_expert = rows.is_expert.convert(Dtype::F32).broadcast_in_dim(of_tokens.shape(), &[0, 1, 3]);
        let weights = (of_tokens * is_expert).reduce(Reducer::Add, &[3]);
        rows.valid.select(&weights, &weights.like(0.0))
    }

    /// Returns the outputs `[G, D, R, H]`, f32, of a block's expert for `x` `[G, D, R, H]`, times `weights` `[G, D, R]`.
    fn block(&self, layer: &ParameterValues, x: &Value, weights: &Value) -> Value {
        let (compute, width) = (self.decoder.compute(), self.experts.moe_intermediate_size);
        let product = |x: &Value, weight: &Value, contracted: usize, dtype: Dtype| {
            let batch = (vec![0, 1], vec![0, 1]);
            let dimensions = DotDimensions { batch, contract: (vec![3], vec![contracted]) };
            x.convert(compute.dtype()).dot_general(weight, dimensions, dtype, compute.precision())
        };
        // s x A^T `[G, D, R, r]`, if the matrix has adapters.
        let low = |x: &Value, matrix: Matrix| {
            let [a, _] = layer.adapter(matrix)?;
            Some(self.decoder.scaled_low(&product(x, a, 3, Dtype::F32)))
        };
        let low_of_input = low(x, Matrix::ExpertGateUpProj);
        // Gate, up or both, with the output of these rows of B.
        let columns = |role: Role, contracted: usize, rows: Range<usize>| {
            let axes = [Some(Axis::Batch), Some(Axis::Experts), None, Some(Axis::Mlp)];
            let columns = product(x, &layer[role], contracted, compute.dtype()).convert(Dtype::F32);
            let columns = match &low_of_input {
                Some(low) => {
                    let b = rows_of(&layer[Role::LoraB(Matrix::ExpertGateUpProj)], 2, rows);
                    columns + product(low, &b, 3, Dtype::F32)
                }
                None => columns,
            };
            self.decoder.axis_rules().constrain(&columns, &axes)
        };
        let bias = |role: Role, like: &Value| {
            let bias = layer.get(role)?.convert(Dtype::F32);
            Some(bias.broadcast_in_dim(like.shape(), &[0, 1, 3]))
        };
        let mixed = match self.experts.clamped {
            Some(clamped) => {
                let both = columns(Role::ExpertGateUpProj, 2, 0..2 * width);
                let both = bias(Role::ExpertGateUpBias, &both).map_or(both.clone(), |bias| &both + bias);
                super::clamped(&both, clamped)
            }
            None => {
                let gate = columns(Role::ExpertGateProj, 3, 0..width);
                self.decoder.activated(&gate) * columns(Role::ExpertUpProj, 3, width..2 * width)
            }
        };
        let mixed = &mixed * weights.along_first(&mixed);
        let contracted = if self.experts.clamped.is_some() { 2 } else { 3 };
        let y = product(&mixed, &layer[Role::ExpertDownProj], contracted, Dtype::F32);
        let y = match low(&mixed, Matrix::ExpertDownProj) {
            Some(low) => y + product(&low, &layer[Role::LoraB(Matrix::ExpertDownProj)], 3, Dtype::F32),
            None => y,
        };
        match bias(Role::ExpertDownBias, &y) {
            Some(bias) => &y + bias * weights.along_first(&y),
            None => y,
        }
    }
}

/// Returns the entries of `table` `[..., N, ...]` at `indices`, in place of the dimension N. The first dimensions of `table`, up to N, are also dimensions of
/// the indices, which `batch` lists.
fn at(table: &Value, indices: &Value, batch: &[usize]) -> Value {
    let (shape, rank) = (table.shape(), indices.shape().len());
    let window = &shape[batch.len() + 1..];
    let dimensions = GatherDimensions {
        offset_dims: (rank..rank + window.len()).collect(),
        collapsed_slice_dims: vec![batch.len()],
        operand_batching_dims: (0..batch.len()).collect(),
        start_indices_batching_dims: batch.to_vec(),
        start_index_map: vec![batch.len()],
        index_vector_dim: rank,
        slice_sizes: [&vec![1; batch.len() + 1], window].concat(),
    };
    table.gather(indices, dimensions, &[indices.shape(), window].concat())
}

/// Adds `rows` `[G, D, R, H]` to `sum` `[G, D, n, H]` at `tokens` `[G, D, R]`.
fn add_at(sum: &Value, tokens: &Value, rows: &Value) -> Value {
    let dimensions = ScatterDimensions {
        update_window_dims: vec![3],
        inserted_window_dims: vec![2],
        input_batching_dims: vec![0, 1],
        scatter_indices_batching_dims: vec![0, 1],
        scatter_dims_to_operand_dims: vec![2],
        index_vector_dim: 3,
    };
    sum.scatter(tokens, rows, dimensions, Reducer::Add)
}

/// Returns the last entry along the last dimension, `[...]` of `[..., N]`.
fn last(values: &Value) -> Value {
    let rest = values.shape().len() - 1;
    let count = values.shape()[rest];
    last_columns(values, count - 1..count).reshape(&values.shape()[..rest])
}

/// Returns cumulative sums along the last dimension, with or without the entry itself. They are exact below 2^24.
fn sums_along_last(values: &Value, inclusive: bool) -> Value {
    let dimension = values.shape().len() - 1;
    let square = TensorType::new(Dtype::I32, [values.shape()[dimension]; 2]);
    let [from, to] = [0, 1].map(|dimension| values.builder().iota(dimension, square.clone()));
    let summed = if inclusive { from.le(&to) } else { from.lt(&to) };
    let dimensions = DotDimensions::contract(dimension, 0);
    values.dot_general(&summed.convert(Dtype::F32), dimensions, Dtype::F32, Compute::F32.precision())
}

/// Returns how many of `sums` `[G, D, R, N]` are at most `ranks` `[G, D, R]`.
fn smaller(sums: &Value, ranks: &Value) -> Value {
    sums.le(&ranks.along_first(sums)).convert(Dtype::I32).reduce(Reducer::Add, &[3])
}
