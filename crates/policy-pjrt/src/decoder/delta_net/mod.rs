//! Gated DeltaNet (arXiv 2412.06464): linear attention with a state per head instead of keys and values per token.
//!
//! [`grpo_models::LinearAttention`] has the formulas. A row of packed sequences begins each of them with a state of zeros, and the convolution reads
//! no token of another sequence.
//!
//! Legend: B rows, T tokens of a row, H hidden size, Hk key heads, R value heads of a key head, Hv = Hk R, Dk and Dv widths of keys and values,
//! L tokens of the convolution, W = 2 Dk + R Dv channels of a key head: its queries, its keys and the values of its value heads.

mod inverse;
mod rule;

use super::layer_ops::{Broadcast, Dims, dot, last_columns, layer_at, put_layer};
use super::{Axis, Compute, Decoder, Layer, Matrix, ParameterValues, Role, zeros};
use crate::leaves::leaves;
use grpo_models::{LinearAttention, ModelConfig};
use grpo_stablehlo::{DotDimensions, Dtype, Reducer, Result, TensorType, Unary, Value};
use rule::{Rule, Tokens, no_state};

/// The constant of the norms of queries and keys, as in `transformers`.
const NORM_EPS: f64 = 1e-6;
/// The input above which softplus is the identity, as in torch.
const LINEAR_ABOVE: f64 = 20.0;

/// The states of sequences in the N layers with a Gated DeltaNet: all that later tokens read of the tokens before them.
#[derive(Clone, Debug)]
pub(crate) struct DeltaStates {
    /// The inputs of the convolution of the last L - 1 tokens, 0 before the first token: `[N, B, Hk, L - 1, W]`, in the compute dtype.
    pub(crate) inputs: Value,
    /// The states of the heads, `[N, B, Hk, Dk, R Dv]`, f32.
    pub(crate) memory: Value,
}

leaves!(DeltaStates { inputs, memory });

/// Logical axes of the tensors of [`DeltaStates`].
pub(crate) const DELTA: [Option<Axis>; 5] = [None, Some(Axis::Batch), Some(Axis::LinearHeads), None, None];

/// Tokens that follow the tokens of a state.
#[derive(Clone, Debug)]
pub(crate) struct NextTokens {
    /// The position of each token in its sequence, `[B, T]`, i32.
    pub(crate) positions: Value,
    /// The number of tokens of each row that are not padding, `[B]`, i32. Padding is on the right and does not change the state.
    pub(crate) counts: Value,
}

leaves!(NextTokens { positions, counts });

impl DeltaStates {
    /// Returns the types of `inputs` and `memory` for `rows` sequences; `None` for a model without Gated DeltaNets.
    pub(crate) fn types(config: &ModelConfig, rows: usize, compute: Compute) -> Option<[TensorType; 2]> {
        let sizes = config.linear_attention?;
        let heads = sizes.linear_num_key_heads;
        let layers = config.linear_attention_layers();
        let (width, before) = (sizes.linear_key_head_dim, sizes.linear_conv_kernel_dim - 1);
        Some([
            TensorType::new(compute.dtype(), [layers, rows, heads, before, sizes.conv_channels() / heads]),
            TensorType::new(Dtype::F32, [layers, rows, heads, width, sizes.values() / heads]),
        ])
    }
}

/// A layer's state before the tokens of rows: tensors of [`DeltaStates`] without the layers.
#[derive(Clone, Copy)]
struct Before<'a> {
    inputs: &'a Value,
    memory: &'a Value,
    /// See [`NextTokens::counts`].
    counts: &'a Value,
}

impl Decoder {
    /// Returns the gated outputs `[B, T, Hv Dv]`, f32, of a layer's Gated DeltaNet, before the output projection, for its normalised input `x`
    /// `[B, T, H]`, at `positions` `[B, T]`, i32, in the sequences, which begin in these rows.
    ///
    /// # Errors
    /// Weights or rows do not fit the configuration.
    ///
    /// # Panics
    /// Panics without positions.
    pub(crate) fn delta_net(&self, layer: &ParameterValues, x: &Value, positions: Option<&Value>) -> Result<Value> {
        Ok(self.delta_net_from(layer, x, present(positions), None)?.0)
    }

    /// Like [`Decoder::delta_net`], for tokens that follow the state of a layer. The state is replaced by the one after these tokens.
    ///
    /// # Errors
    /// See [`Decoder::delta_net`].
    ///
    /// # Panics
    /// Panics without tokens or states.
    pub(crate) fn continue_delta_net(
        &self,
        layer: &Layer<'_>,
        x: &Value,
        tokens: Option<NextTokens>,
        states: &mut Option<DeltaStates>,
    ) -> Result<Value> {
        let (states, tokens) = (present(states.as_mut()), present(tokens));
        let [inputs, memory] = [&states.inputs, &states.memory].map(|stack| layer_at(stack, layer.number));
        let before = Before { inputs: &inputs, memory: &memory, counts: &tokens.counts };
        let (output, next, inputs) = self.delta_net_from(layer.parameters, x, &tokens.positions, Some(before))?;
        let inputs = self.last_inputs(&inputs, &tokens.counts);
        states.inputs = put_layer(&states.inputs, layer.number, &inputs);
        states.memory = put_layer(&states.memory, layer.number, &next.reshape(memory.shape()));
        Ok(output)
    }

    /// Returns the gated outputs, the states of the heads, `[B, Hk, Dk, R, Dv]`, and the inputs of the convolution `[B, L - 1 + T, Hk, ...]` of
    /// queries, keys and values.
    fn delta_net_from(
        &self,
        layer: &ParameterValues,
        x: &Value,
        positions: &Value,
        from: Option<Before<'_>>,
    ) -> Result<(Value, Value, [Value; 3])> {
        let sizes = self.linear_attention();
        let [b, t] = [0, 1].map(|d| x.shape()[d]);
        let (hk, dk, dv) = (sizes.linear_num_key_heads, sizes.linear_key_head_dim, sizes.linear_value_head_dim);
        let r = sizes.linear_num_value_heads / hk;
        let heads = [b, t, hk, r];

        let before = self.earlier_inputs(&sizes, b, from.map(|from| from.inputs), &x.builder());
        let new = self.convolved_columns(layer, x);
        let taps = self.taps(layer);
        let inputs: [Value; 3] = std::array::from_fn(|i| x.builder().concatenate(&[&before[i], &new[i]], 1));
        let [queries, keys, values] = std::array::from_fn(|i| convolution(&inputs[i], &taps[i], positions));
        let queries = normalised(&queries);
        let queries = &queries * queries.like((dk as f64).powf(-0.5));

        let of_heads = |matrix| self.linear(layer, x, matrix, None).reshape(&heads);
        let strengths = of_heads(Matrix::InProjB).unary(Unary::Logistic);
        let of_layer = |role| {
            let parameter: &Value = &layer[role];
            parameter.convert(Dtype::F32).reshape(&[hk, r]).broadcast_in_dim(&heads, &[2, 3])
        };
        let decays = -(of_layer(Role::ALog).exp() * softplus(&(of_heads(Matrix::InProjA) + of_layer(Role::DtBias))));
        let [strengths, decays] = [strengths, decays].map(|x| match from {
            Some(from) => {
                let index = x.builder().iota(1, TensorType::new(Dtype::I32, heads));
                index.lt(&from.counts.along_first(&index)).select(&x, &x.like(0.0))
            }
            None => x,
        });

        let shape = [b, hk, dk, r, dv];
        let state = match from {
            Some(from) => from.memory.reshape(&shape),
            None => no_state(&x.builder(), shape),
        };
        let values = values.reshape(&[b, t, hk, r, dv]);
        let tokens = Tokens { queries, keys: normalised(&keys), values, strengths, decays };
        let rule = Rule { chunk: rule::CHUNK, compute: self.compute(), rules: self.axis_rules() };
        let [outputs, memory] = rule.apply(&tokens, positions, &state)?;
        let gates = self.linear(layer, x, Matrix::InProjZ, None).reshape(outputs.shape());
        let gated = self.gated_norm(&outputs, &layer[Role::LinearNorm], &gates).reshape(&[b, t, sizes.values()]);
        Ok((gated, memory, inputs))
    }

    /// Returns the sizes of the model's Gated DeltaNets.
    fn linear_attention(&self) -> LinearAttention {
        self.config().linear_attention.unwrap_or_default()
    }

    /// Returns the columns of queries, keys and values of a key head's channels, and their numbers over all heads.
    fn channels(sizes: &LinearAttention) -> [usize; 3] {
        let keys = sizes.linear_key_head_dim;
        [keys, keys, sizes.values() / sizes.linear_num_key_heads]
    }

    /// Returns queries, keys and values before the convolution: `[B, T, Hk, Dk]`, `[B, T, Hk, Dk]` and `[B, T, Hk, R Dv]`, f32.
    fn convolved_columns(&self, layer: &ParameterValues, x: &Value) -> [Value; 3] {
        let sizes = self.linear_attention();
        let [b, t, hk] = [x.shape()[0], x.shape()[1], sizes.linear_num_key_heads];
        let mut from = 0;
        let columns = Self::channels(&sizes).map(|width| {
            let first = from;
            from += hk * width;
            first..from
        });
        // The columns of queries, of keys and of values are not sharded by heads. With many tokens, each device computes the columns of its
        // heads.
        let parts = match t == 1 || self.axis_rules().parts(Axis::LinearHeads) == 1 {
            true => {
                let all = self.linear(layer, x, Matrix::InProjQkv, None);
                columns.map(|columns| last_columns(&all, columns))
            }
            false => {
                let low = self.low(layer, x, Matrix::InProjQkv);
                columns.map(|columns| {
                    let rows = |role: Role| rows_of(&layer[role], columns.clone());
                    let narrow = |x: &Value| x.convert(self.compute().dtype());
                    let product = |x: &Value, weight: &Value, result| {
                        let dimensions = DotDimensions::contract(2, 1);
                        narrow(x).dot_general(&narrow(weight), dimensions, result, self.compute().precision())
                    };
                    let part = product(x, &rows(Role::InProjQkv), self.compute().dtype()).convert(Dtype::F32);
                    match &low {
                        Some(low) => part + product(low, &rows(Role::LoraB(Matrix::InProjQkv)), Dtype::F32),
                        None => part,
                    }
                })
            }
        };
        parts.map(|part| {
            let part = part.reshape(&[b, t, hk, part.shape()[2] / hk]);
            self.axis_rules().constrain(&part, &[Some(Axis::Batch), None, Some(Axis::LinearHeads), None])
        })
    }

    /// Returns the weights of the convolution for queries, keys and values, `[Hk, ..., L]`, f32.
    fn taps(&self, layer: &ParameterValues) -> [Value; 3] {
        let sizes = self.linear_attention();
        let (hk, taps) = (sizes.linear_num_key_heads, sizes.linear_conv_kernel_dim);
        let all = layer[Role::Conv1d].convert(Dtype::F32).reshape(&[sizes.conv_channels(), taps]);
        let mut from = 0;
        Self::channels(&sizes).map(|width| {
            let first = from;
            from += hk * width;
            rows_of(&all, first..from).reshape(&[hk, width, taps])
        })
    }

    /// Returns the inputs `[B, L - 1, Hk, ...]`, f32, of the convolution before the first token of queries, keys and values.
    fn earlier_inputs(
        &self,
        sizes: &LinearAttention,
        rows: usize,
        earlier: Option<&Value>,
        f: &grpo_stablehlo::Builder,
    ) -> [Value; 3] {
        let (hk, before) = (sizes.linear_num_key_heads, sizes.linear_conv_kernel_dim - 1);
        let mut from = 0;
        Self::channels(sizes).map(|width| {
            let first = from;
            from += width;
            match earlier {
                Some(inputs) => last_columns(inputs, first..from).transpose(&[0, 2, 1, 3]).convert(Dtype::F32),
                None => zeros(f, Dtype::F32, &[rows, before, hk, width]),
            }
        })
    }

    /// Returns the last L - 1 of the inputs `[B, L - 1 + T, Hk, ...]` that end after `counts` `[B]` of T tokens, as
    /// [`DeltaStates::inputs`] of a layer.
    fn last_inputs(&self, inputs: &[Value; 3], counts: &Value) -> Value {
        let before = self.linear_attention().linear_conv_kernel_dim - 1;
        let f = counts.builder();
        let [b, all] = [0, 1].map(|d| inputs[0].shape()[d]);
        // One token, as in decoding, shifts the window or leaves it.
        let shifted = |part: &Value| {
            let [_, _, hk, width] = part.dims();
            let [old, new] = [0, 1].map(|first| part.slice(&[0, first, 0, 0], &[b, first + before, hk, width]));
            counts.gt(&counts.like(0)).along_first(&new).select(&new, &old)
        };
        let of_rows = TensorType::new(Dtype::I32, [b, before, all]);
        // A product with rows of an identity matrix, which does not mix the rows of several devices as a gather would.
        let place = f.iota(1, of_rows.clone()) + counts.broadcast_in_dim(&of_rows.shape, &[0]);
        let chosen = place.eq(&f.iota(2, of_rows)).convert(Dtype::F32);
        let parts = inputs.each_ref().map(|part| {
            // [B, L - 1, Hk, ...]
            let last = match all - before {
                1 => shifted(part),
                _ => dot(&chosen, part, (&[0], &[0]), (2, 1), self.compute()),
            };
            last.convert(self.compute().dtype())
        });
        let inputs = f.concatenate(&parts.each_ref(), 3).transpose(&[0, 2, 1, 3]);
        self.axis_rules().constrain(&inputs, &[Some(Axis::Batch), Some(Axis::LinearHeads), None, None])
    }

    /// Returns the normalised `x` `[..., Dv]` times `weight` and `silu(gates)`, f32. The weight is never centred at 0.
    fn gated_norm(&self, x: &Value, weight: &Value, gates: &Value) -> Value {
        let last = x.shape().len() - 1;
        let squares = (x * x).reduce(Reducer::Add, &[last]);
        let mean = &squares * squares.like(1.0 / x.shape()[last] as f64);
        let scale = (&mean + mean.like(self.config().rms_norm_eps)).unary(Unary::Rsqrt);
        x * scale.along_first(x) * weight.convert(Dtype::F32).along_last(x) * silu(gates)
    }
}

/// Returns what every program of a model with Gated DeltaNets has: positions and states.
#[track_caller]
fn present<T>(part: Option<T>) -> T {
    part.unwrap_or_else(|| unreachable!("a program of a model with Gated DeltaNets has their states and positions"))
}

/// Returns the given rows of a matrix.
fn rows_of(matrix: &Value, rows: std::ops::Range<usize>) -> Value {
    matrix.slice(&[rows.start, 0], &[rows.end, matrix.shape()[1]])
}

/// Computes the causal depthwise convolution with SiLU, `[B, T, Hk, ...]`, of the inputs `[B, L - 1 + T, Hk, ...]` with the weights
/// `[Hk, ..., L]`. A token reads no input of another sequence.
fn convolution(inputs: &Value, weights: &Value, positions: &Value) -> Value {
    let [hk, width, taps] = weights.dims();
    let [b, t] = positions.dims();
    let shape = [b, t, hk, width];
    let term = |back: usize| {
        let first = taps - 1 - back;
        let input = inputs.slice(&[0, first, 0, 0], &[b, first + t, hk, width]);
        let weight = weights.slice(&[0, 0, first], &[hk, width, first + 1]).reshape(&[hk, width]);
        let is_there = positions.ge(&positions.like(back as i64)).broadcast_in_dim(&shape, &[0, 1]);
        let term = &input * weight.broadcast_in_dim(&shape, &[2, 3]);
        is_there.select(&term, &term.like(0.0))
    };
    silu(&(1..taps).fold(term(0), |sum, back| sum + term(back)))
}

fn silu(x: &Value) -> Value {
    x * x.unary(Unary::Logistic)
}

/// Computes log(1 + exp(x)) as torch does.
fn softplus(x: &Value) -> Value {
    let bound = x.like(LINEAR_ABOVE);
    x.gt(&bound).select(x, &x.min(&bound).exp().log1p())
}

/// Divides vectors `[..., D]` by their lengths.
fn normalised(x: &Value) -> Value {
    let squares = (x * x).reduce(Reducer::Add, &[x.shape().len() - 1]);
    let scale = (&squares + squares.like(NORM_EPS)).unary(Unary::Rsqrt);
    x * scale.along_first(x)
}

#[cfg(test)]
mod tests;
