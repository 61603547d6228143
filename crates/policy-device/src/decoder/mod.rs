//! A decoder of the families Qwen2, Qwen3 and Llama 3 as part of a program.
//!
//! [`Decoder`] adds its operations to a program that somebody else builds: the forward pass over rows of whole sequences, or a block
//! whose attention the caller makes. [`parameters()`] lists what it needs to be given.
//!
//! Legend: B rows, T tokens of a row, L layers, V vocabulary, H residual stream, I MLP, A query heads, K key/value heads, R = A / K
//! query heads that share one of them, D width of a head.

mod adapters;
mod attention;
mod axis_rules;
mod block;
mod blockwise;
mod ops;
mod parameters;
mod rope;
mod split;

pub use adapters::{Adapters, Matrix};
pub use attention::{Attention, Heads, Mask};
pub use axis_rules::AxisRules;
pub use blockwise::ATTENTION;
pub use parameters::{Axis, Parameter, ParameterValues, Role, parameters};
pub use rope::Rotary;

pub(crate) use attention::MASKED;
pub(crate) use ops::{Broadcast, dot};
use split::RESIDUAL;
pub(crate) use split::Split;

use models::ModelConfig;
use stablehlo::{Builder, Dtype, GatherDimensions, Precision, Result, Save, Scanned, TensorType, Traced, Value, trace};

/// The number type in which products take their operands, and the layers' leave their results. Sums, norms and softmax are f32 in both.
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
    /// Whether a row may have several sequences, end to end. A token then attends to as many tokens before it as its position says, which are
    /// those of its own sequence; what pads the row is at position 0 and sees itself only. Otherwise a row is one sequence, and what
    /// pads it on the right is not seen by what is before.
    pub shared: bool,
}

impl Rows {
    /// Rows of one sequence each, which begin at position 0; `ids` `[B, T]`.
    pub fn of_sequences(ids: &Value) -> Self {
        let positions = ids.builder().iota(1, ids.ty().clone());
        Self { ids: ids.clone(), positions, shared: false }
    }
}

/// Writes the operations of a decoder. It holds no weights: they are values of the program.
///
/// ```
/// use policy_device::decoder::{Compute, Decoder, ParameterValues, Rows, parameters};
/// use stablehlo::{Builder, Dtype, Save, TensorType};
///
/// let config = models::ModelConfig::default();
/// let f = Builder::new();
/// let weights = ParameterValues::arguments(&f, &parameters(&config), Dtype::F32);
/// let ids = f.argument("ids", TensorType::new(Dtype::I32, [2, 16]));
/// let decoder = Decoder::new(&config, Compute::F32);
/// let hidden = decoder.hidden(&weights, &Rows::of_sequences(&ids), Save::Carry)?;
/// assert_eq!(hidden.shape(), [2, 16, 64]);
/// f.finish("forward", &[("hidden", &hidden)])?;
/// # Ok::<(), stablehlo::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Decoder {
    config: ModelConfig,
    compute: Compute,
    attention: Attention,
    adapters: Option<Adapters>,
    value_head: bool,
    split: Split,
}

impl Decoder {
    /// A decoder of this configuration.
    pub fn new(config: &ModelConfig, compute: Compute) -> Self {
        Self {
            config: config.clone(),
            compute,
            attention: Attention::default(),
            adapters: None,
            value_head: false,
            split: Split::default(),
        }
    }

    /// Adds adapters to matrices, which are then all that is trained of the model.
    #[must_use]
    pub fn with_adapters(self, adapters: Adapters) -> Self {
        Self { adapters: Some(adapters), ..self }
    }

    /// Adds a value head: a linear layer on the hidden states after the final norm.
    #[must_use]
    pub fn with_value_head(self) -> Self {
        Self { value_head: true, ..self }
    }

    /// The decoder without its value head, as tokens are sampled with it.
    #[must_use]
    pub fn without_value_head(&self) -> Self {
        Self { value_head: false, ..self.clone() }
    }

    /// The model itself: without adapters and value head.
    #[must_use]
    pub fn model(&self) -> Self {
        Self { adapters: None, value_head: false, ..self.clone() }
    }

    /// The adapters, where there are any.
    pub fn adapters(&self) -> Option<&Adapters> {
        self.adapters.as_ref()
    }

    /// Whether there is a value head.
    pub fn has_value_head(&self) -> bool {
        self.value_head
    }

    /// Its parameters in the order in which programs take them: those of the model ([`parameters()`]), then those of adapters, then those
    /// of the value head.
    pub fn parameters(&self) -> Vec<Parameter> {
        let mut table = parameters(&self.config);
        table.extend(self.adapters.iter().flat_map(|adapters| adapters.parameters(&self.config)));
        table.extend(self.value_head.then(|| adapters::value_head(&self.config)).into_iter().flatten());
        table
    }

    /// Those of [`Decoder::parameters`] that are trained, which are the last ones: all of them, or with adapters all but those of the model.
    pub fn trained(&self) -> Vec<Parameter> {
        self.parameters().into_iter().filter(|p| self.trains(p.role)).collect()
    }

    /// Whether the parameter of this role is trained.
    pub fn trains(&self, role: Role) -> bool {
        self.adapters.is_none() || !role.is_of_model()
    }

    /// Declares its parameters as the next arguments of a program, of a model in `model` ([`Parameter::dtype`]).
    pub fn declare(&self, builder: &Builder, model: Dtype) -> ParameterValues {
        let table = self.parameters();
        let values = ParameterValues::arguments(builder, &table, model);
        table.iter().for_each(|parameter| self.split.argument(&values[parameter.role], &parameter.axes));
        values
    }

    /// Attends among the tokens of rows as `attention` says.
    #[must_use]
    pub fn with_attention(self, attention: Attention) -> Self {
        Self { attention, ..self }
    }

    /// The configuration of the decoder.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The number type of operands.
    pub fn compute(&self) -> Compute {
        self.compute
    }

    /// Hidden states `[B, T, H]` after the final norm. Their derivative keeps what `save` says of every layer.
    ///
    /// # Errors
    /// Weights or rows that do not fit the configuration.
    pub fn hidden(&self, weights: &ParameterValues, rows: &Rows, save: Save) -> Result<Value> {
        Ok(self.final_norm(weights, &self.residual(weights, rows, save)?))
    }

    /// The residual stream `[B, T, H]` behind the last layer, as [`Decoder::hidden`] before the final norm.
    ///
    /// # Errors
    /// As [`Decoder::hidden`].
    pub fn residual(&self, weights: &ParameterValues, rows: &Rows, save: Save) -> Result<Value> {
        let rotary = self.rotary(&rows.positions);
        let mask = self.mask(rows);
        let x = self.embed(weights, &rows.ids);
        let constants = [&[rotary.cos(), rotary.sin()], &mask.values()[..]].concat();
        let mut layers = self.over_layers(weights, &[&x], &[], &constants, Layers::Loop(save), |layer, values| {
            let [cos, sin, of_mask @ ..] = values.constants else { unreachable!("as many as were handed over") };
            let (rotary, mask) = (Rotary::new(cos, sin), mask.with(of_mask));
            vec![self.block(layer, &values.carry[0], &rotary, |heads| self.attend(heads, &mask))]
        })?;
        Ok(layers.carry.swap_remove(0))
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
        let shape = [ids.shape()[0], ids.shape()[1], h];
        let rows = weights[Role::EmbedTokens].gather(ids, dimensions, &shape);
        let rows = match self.config.pad_token_id {
            // Reading the padding token trains nothing.
            Some(pad) => {
                let is_padding = ids.eq(&ids.like(pad as i64)).broadcast_in_dim(&shape, &[0, 1]);
                is_padding.select(&rows.stop_gradient(), &rows)
            }
            None => rows,
        };
        // A device looks up its columns for the rows of its neighbours, too. These then send each other what is theirs.
        let rows = self.split.constrain_from_the_last(&rows.convert(self.compute.dtype()), &RESIDUAL);
        self.split.constrain(&rows, &RESIDUAL)
    }

    /// The norm behind the last layer, of `x` `[..., H]`.
    pub fn final_norm(&self, weights: &ParameterValues, x: &Value) -> Value {
        self.norm(x, &weights[Role::Norm]).convert(self.compute.dtype())
    }

    /// Logits `[..., V]` in f32, of hidden states `[..., H]` after the final norm.
    pub fn logits(&self, weights: &ParameterValues, hidden: &Value) -> Value {
        let logits = self.product(weights, hidden, weights.head_role(), Dtype::F32);
        let logits = self.adapted(weights, hidden, Matrix::LmHead, logits);
        let dimensions = [Axis::Batch, Axis::Length, Axis::Vocab];
        match hidden.shape().len() {
            2 => self.split.constrain(&logits, &[dimensions[0], dimensions[2]]),
            3 => self.split.constrain(&logits, &dimensions),
            _ => logits,
        }
    }

    /// All layers, in one loop or one after the other as `layers` says. `body` gets the parameters of the layer and [`LayerValues`], and
    /// returns what is carried on, then what is stacked over all layers. Weights are sliced from their stacks where the layer is, and rounded there to the number
    /// type of operands: no rounded copy of all of them comes to be in a loop.
    ///
    /// # Errors
    /// An operation of `body` that cannot be built.
    pub fn over_layers(
        &self,
        weights: &ParameterValues,
        carry: &[&Value],
        xs: &[&Value],
        constants: &[&Value],
        layers: Layers,
        body: impl FnOnce(&ParameterValues, &LayerValues<'_>) -> Vec<Value>,
    ) -> Result<Scanned> {
        let (count, builder) = (self.config.num_hidden_layers, weights[Role::InputLayernorm].builder());
        let (roles, stacks): (Vec<Role>, Vec<&Value>) = weights.iter().filter(|(role, _)| role.is_of_layers()).unzip();
        let all_xs: Vec<&Value> = xs.iter().copied().chain(stacks).collect();
        let slice = |stack: &&Value| TensorType::new(stack.dtype(), &stack.shape()[1..]);
        let whole = |value: &&Value| value.ty().clone();
        let types = carry.iter().map(whole).chain(all_xs.iter().map(slice)).chain(constants.iter().map(whole));
        let body = trace(&types.collect::<Vec<_>>(), |builder, values| {
            let (carry, rest) = values.split_at(carry.len());
            let (xs, rest) = rest.split_at(xs.len());
            let (slices, constants) = rest.split_at(roles.len());
            let slices: Vec<Value> =
                roles.iter().zip(slices).map(|(role, slice)| self.split_slice(weights, *role, slice)).collect();
            let matrix = |slice: &Value| slice.shape().len() > 1;
            let slices = match slices.iter().any(|slice| matrix(slice) && slice.dtype() != self.compute.dtype()) {
                true => {
                    let of_products =
                        |slice: &Value| if matrix(slice) { slice.convert(self.compute.dtype()) } else { slice.clone() };
                    let rounded: Vec<Value> = slices.iter().map(of_products).collect();
                    // Without it compilers round once for every product, from slices that they have copied.
                    builder.optimization_barrier(&rounded.iter().collect::<Vec<_>>())
                }
                false => slices,
            };
            let of_layer = weights.of_layer(roles.iter().copied().zip(slices));
            body(&of_layer, &LayerValues { carry, xs, constants })
        })?;
        Ok(match layers {
            Layers::Loop(save) => builder.scan(count, &body, carry, &all_xs, constants, save),
            Layers::Unrolled => unrolled(&builder, count, &body, carry, &all_xs, constants),
        })
    }
}

/// How a program goes over the layers.
#[derive(Clone, Debug, PartialEq)]
pub enum Layers {
    /// In a loop, whose derivative keeps what this says of every layer.
    Loop(Save),
    /// One after the other. Within another loop the slices of their weights do not change, so that compilers make them before it.
    Unrolled,
}

/// [`Builder::scan`] without a loop.
fn unrolled(
    builder: &Builder,
    count: usize,
    body: &Traced,
    carry: &[&Value],
    xs: &[&Value],
    constants: &[&Value],
) -> Scanned {
    let mut carried: Vec<Value> = carry.iter().copied().cloned().collect();
    let mut ys: Vec<Vec<Value>> = Vec::new();
    for layer in 0..count {
        let slices: Vec<Value> = xs.iter().map(|stack| slice(stack, layer)).collect();
        let arguments: Vec<&Value> = carried.iter().chain(&slices).chain(constants.iter().copied()).collect();
        let mut results = builder.call(body, &arguments);
        ys.push(results.split_off(carry.len()));
        carried = results;
    }
    let stacked = |i: usize| {
        let rows: Vec<Value> =
            ys.iter().map(|of_layer| of_layer[i].reshape(&[&[1], of_layer[i].shape()].concat())).collect();
        builder.concatenate(&rows.iter().collect::<Vec<_>>(), 0)
    };
    let ys = (0..ys.first().map_or(0, Vec::len)).map(stacked).collect();
    Scanned { carry: carried, ys }
}

/// What a stack `[L, ...]` has of a layer, `[...]`.
fn slice(stack: &Value, layer: usize) -> Value {
    let (mut start, mut limit) = (vec![0; stack.shape().len()], stack.shape().to_vec());
    (start[0], limit[0]) = (layer, layer + 1);
    stack.slice(&start, &limit).reshape(&stack.shape()[1..])
}

/// What the body of a loop over layers computes with, besides the parameters of the layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerValues<'a> {
    /// What the layer before has handed on.
    pub carry: &'a [Value],
    /// The layer's slices of what is stacked over all layers.
    pub xs: &'a [Value],
    /// What is the same for all layers.
    pub constants: &'a [Value],
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
