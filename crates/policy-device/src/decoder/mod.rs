//! A decoder of the families Qwen2, Qwen3 and Llama 3 as part of a program.
//!
//! [`Decoder`] adds its operations to a program that somebody else builds: the forward pass over rows of whole sequences, or a block
//! whose attention the caller makes. [`parameters()`] lists what it needs to be given.
//!
//! Legend: B rows, T tokens of a row, L layers, V vocabulary, H residual stream, I MLP, A query heads, K key/value heads, R = A / K
//! query heads that share one of them, D width of a head.

mod attention;
mod block;
mod ops;
mod parameters;
mod rope;

pub use attention::{Heads, Mask};
pub use parameters::{Axis, Parameter, ParameterValues, Role, parameters};
pub use rope::Rotary;

pub(crate) use ops::{Broadcast, dot};

use models::ModelConfig;
use stablehlo::{Dtype, GatherDimensions, Precision, TensorType, Value};

/// The number type in which products take their operands. Sums, norms and softmax are f32 in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compute {
    /// All digits of f32.
    F32,
    /// bfloat16 operands, residual stream and cache.
    Bf16,
}

impl Compute {
    /// The number type of operands.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::Bf16,
        }
    }

    /// The precision of products: TPUs would round f32 operands.
    pub fn precision(self) -> Precision {
        match self {
            Self::F32 => Precision::Highest,
            Self::Bf16 => Precision::Default,
        }
    }
}

/// Rows of tokens as values of a program.
#[derive(Clone, Debug)]
pub struct Rows {
    /// Token ids `[B, T]`, i32.
    pub ids: Value,
    /// The position of each token in its sequence, `[B, T]`, i32.
    pub positions: Value,
    /// The sequence that each token belongs to, `[B, T]`, i32, where a row has several: tokens attend to earlier ones of their own
    /// sequence. Without it a row is one sequence, and what pads it on the right is not seen by what is before.
    pub segments: Option<Value>,
}

impl Rows {
    /// Rows of one sequence each, which begin at position 0; `ids` `[B, T]`.
    pub fn of_sequences(ids: &Value) -> Self {
        let positions = ids.builder().iota(1, ids.ty().clone());
        Self { ids: ids.clone(), positions, segments: None }
    }
}

/// Writes the operations of a decoder. It holds no weights: they are values of the program.
///
/// ```
/// use policy_device::decoder::{Compute, Decoder, ParameterValues, Rows, parameters};
/// use stablehlo::{Builder, Dtype, TensorType};
///
/// let config = models::ModelConfig::default();
/// let f = Builder::new();
/// let weights = ParameterValues::arguments(&f, &parameters(&config), Dtype::F32);
/// let ids = f.argument("ids", TensorType::new(Dtype::I32, [2, 16]));
/// let decoder = Decoder::new(&config, Compute::F32);
/// let hidden = decoder.hidden(&weights, &Rows::of_sequences(&ids));
/// assert_eq!(hidden.shape(), [2, 16, 64]);
/// f.finish("forward", &[("hidden", &hidden)])?;
/// # Ok::<(), stablehlo::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Decoder {
    config: ModelConfig,
    compute: Compute,
}

impl Decoder {
    /// A decoder of this configuration.
    pub fn new(config: &ModelConfig, compute: Compute) -> Self {
        Self { config: config.clone(), compute }
    }

    /// The configuration of the decoder.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The number type of operands.
    pub fn compute(&self) -> Compute {
        self.compute
    }

    /// Hidden states `[B, T, H]` after the final norm.
    pub fn hidden(&self, weights: &ParameterValues, rows: &Rows) -> Value {
        let rotary = self.rotary(&rows.positions);
        let mask = Mask::of(rows);
        let x = self.embed(weights, &rows.ids);
        let x = self.over_layers(weights, &[&x], |_, layer, carried| {
            vec![self.block(layer, &carried[0], &rotary, |heads| self.attend(heads, &mask))]
        });
        self.final_norm(weights, &x[0])
    }

    /// The residual stream `[B, T, H]` before the first layer, of token ids `[B, T]`.
    pub fn embed(&self, weights: &ParameterValues, ids: &Value) -> Value {
        let h = self.config.hidden_size;
        let dimensions = GatherDimensions {
            offset_dims: vec![2],
            collapsed_slice_dims: vec![0],
            start_index_map: vec![0],
            index_vector_dim: 2,
            slice_sizes: vec![1, h],
            ..GatherDimensions::default()
        };
        let rows = weights[Role::EmbedTokens].gather(ids, dimensions, &[ids.shape()[0], ids.shape()[1], h]);
        rows.convert(self.compute.dtype())
    }

    /// The norm behind the last layer, of `x` `[..., H]`.
    pub fn final_norm(&self, weights: &ParameterValues, x: &Value) -> Value {
        self.norm(x, &weights[Role::Norm]).convert(self.compute.dtype())
    }

    /// Logits `[..., V]` in f32, of hidden states `[..., H]` after the final norm.
    pub fn logits(&self, weights: &ParameterValues, hidden: &Value) -> Value {
        self.project(hidden, weights.head(), None)
    }

    /// One loop over the layers. `body` gets the number of the layer (an i32 scalar), its parameters and what is carried, and
    /// returns what is carried on. Weights are sliced from their stacks within the loop, and rounded there to the number type of
    /// operands: no rounded copy of all of them comes to be.
    pub(crate) fn over_layers(
        &self,
        weights: &ParameterValues,
        carried: &[&Value],
        body: impl FnOnce(&Value, &ParameterValues, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let builder = weights[Role::InputLayernorm].builder();
        let stacks: Vec<(Role, &Value)> = weights.iter().filter(|(role, _)| role.is_of_layers()).collect();
        builder.for_loop(self.config.num_hidden_layers, carried, |layer, carried| {
            let slices = stacks.iter().map(|(_, stack)| slice_layer(stack, layer)).collect::<Vec<_>>();
            // Without it compilers round the whole stack before the loop.
            let slices = builder.optimization_barrier(&slices.iter().collect::<Vec<_>>());
            let of_layer = ParameterValues::new(stacks.iter().map(|(role, _)| *role).zip(slices));
            body(layer, &of_layer, carried)
        })
    }
}

/// Part `layer`, an i32 scalar, of `stack` `[L, ...]`.
pub(crate) fn slice_layer(stack: &Value, layer: &Value) -> Value {
    let zero = stack.builder().scalar(0, Dtype::I32);
    let mut sizes = stack.shape().to_vec();
    sizes[0] = 1;
    let mut starts = vec![&zero; sizes.len()];
    starts[0] = layer;
    stack.dynamic_slice(&starts, &sizes).reshape(&stack.shape()[1..])
}

/// A tensor of zeros.
pub(crate) fn zeros(builder: &stablehlo::Builder, dtype: Dtype, shape: &[usize]) -> Value {
    let ty = TensorType::new(dtype, shape);
    match dtype {
        Dtype::Pred => builder.splat(false, ty),
        dtype if dtype.is_integer() => builder.splat(0, ty),
        _ => builder.splat(0.0, ty),
    }
}
