//! A decoder of the families of [`grpo_models::Family`] as operations of a StableHLO program.
//!
//! [`Decoder`] adds its operations to a program that the caller builds: a forward pass over rows of whole sequences, or one layer with
//! attention from the caller. [`parameters()`] lists its parameters.
//!
//! Legend: B rows, T tokens of a row, L layers, V vocabulary, H hidden size, I intermediate size of the MLP, A query heads, K key/value
//! heads, R = A / K query heads per key/value head, D head dimension.

mod adapters;
mod attention;
mod blockwise;
mod delta_net;
mod experts;
mod layer_loop;
mod layer_ops;
mod parameters;
mod quantized;
mod rope;
mod traced;

pub use crate::sharding::AxisRules;
pub use adapters::{Adapters, Matrix};
pub use attention::{Attention, Heads, Mask};
pub use blockwise::ATTENTION;
use experts::RouterCounts;
pub use experts::{ExpertProducts, RouterSums, Routing};
pub use parameters::{Axis, Format, Parameter, ParameterId, ParameterValues, Role, parameters};
pub use quantized::{check_quantization, quantized_parameters};
pub use rope::{Rotaries, Rotary};

pub(crate) use attention::{ByWindow, MASKED, of_groups};
pub(crate) use delta_net::{DELTA, DeltaStates, NextTokens};
pub(crate) use layer_loop::{Layer, Layers};
pub(crate) use layer_ops::{Broadcast, Dims, dot, layer_at, put_layer, rows_at};
pub(crate) use quantized::words;
pub(crate) use traced::LayerCache;
use traced::RESIDUAL;

use crate::leaves::leaves;
use grpo_models::{ModelConfig, Quantization};
use grpo_stablehlo::{Builder, Dtype, Precision, Result, Save, TensorType, Value};

/// The dtype of the operands of matrix products and of the layers' results. Sums, norms and softmax are always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compute {
    /// f32 operands in full precision.
    F32,
    /// bfloat16 operands, residual stream and KV cache.
    Bf16,
}

impl Compute {
    /// Returns the dtype of operands.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::Bf16,
        }
    }

    /// Returns the precision of products; TPUs round f32 operands by default.
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
    /// `true` if a row may hold several packed sequences. A token then attends to itself and to the `position` tokens before it, which
    /// belong to its sequence; padding has position 0 and attends to itself only. If `false`, a row is one sequence, and causal
    /// attention never sees its padding, which is on the right.
    pub shared: bool,
    /// 1 for tokens and 0 for padding, `[B, T]`, f32; the tokens that count in [`RouterSums`]. `None` computes no sums.
    pub counted: Option<Value>,
    /// Experts `[L, B, T, k]`, i32, that replace the choices of routers; -1 for tokens whose experts are chosen.
    pub routed: Option<Value>,
}

impl Rows {
    /// Creates rows of one sequence each, which begin at position 0; `ids` `[B, T]`.
    pub fn of_sequences(ids: &Value) -> Self {
        let positions = ids.builder().iota(1, ids.ty().clone());
        Self { ids: ids.clone(), positions, shared: false, counted: None, routed: None }
    }

    /// Returns the positions `[B, T]`, or `[1, T]` if every row is one sequence: all rows then have the same.
    pub(crate) fn distinct_positions(&self) -> Value {
        match self.shared {
            true => self.positions.clone(),
            false => self.positions.slice(&[0, 0], &[1, self.positions.shape()[1]]),
        }
    }
}

/// The inputs of all layers for rows of whole sequences.
struct WholeRows {
    rotaries: Rotaries,
    masks: ByWindow<Mask>,
    /// The positions `[B, T]`, i32, for a model with Gated DeltaNets.
    positions: Option<Value>,
    /// The tokens that count in the statistics of routers ([`Rows::counted`]).
    counted: Option<Value>,
    /// The recorded experts of the tokens ([`Rows::routed`]).
    routed: Option<Value>,
}

leaves!(WholeRows { rotaries, masks, positions, counted, routed });

/// The values that a loop over layers carries.
struct Carry {
    /// The residual stream `[B, T, H]`.
    x: Value,
    counts: Option<RouterCounts>,
}

leaves!(Carry { x, counts });

/// A layer's view of rows of whole sequences: no token is in a cache.
struct LayerOfRows<'a> {
    tokens: &'a WholeRows,
    /// The recorded experts of the layer, `[B, T, k]`.
    recorded: Option<Value>,
}

impl LayerCache for LayerOfRows<'_> {
    fn rotaries(&self) -> &Rotaries {
        &self.tokens.rotaries
    }

    fn recorded_experts(&self) -> Option<&Value> {
        self.recorded.as_ref()
    }

    fn attend(&mut self, decoder: &Decoder, layer: &Layer<'_>, heads: &Heads) -> Value {
        decoder.attend(heads, self.tokens.masks.of(layer.spec.sliding_window), layer.parameters.get(Role::Sinks))
    }

    fn gated_delta_net(&mut self, decoder: &Decoder, layer: &Layer<'_>, x: &Value) -> Result<Value> {
        decoder.delta_net(layer.parameters, x, self.tokens.positions.as_ref())
    }
}

/// A builder of the decoder's operations. It holds no weights: they are values of the program.
///
/// ```
/// use grpo_policy_pjrt::decoder::{Compute, Decoder, ParameterValues, Rows, parameters};
/// use grpo_stablehlo::{Builder, Dtype, Save, TensorType};
///
/// let config = grpo_models::ModelConfig::default();
/// let f = Builder::new();
/// let weights = ParameterValues::arguments(&f, &parameters(&config), Dtype::F32);
/// let ids = f.argument("ids", TensorType::new(Dtype::I32, [2, 16]));
/// let decoder = Decoder::new(&config, Compute::F32);
/// let hidden = decoder.hidden(&weights, &Rows::of_sequences(&ids), Save::Carry)?;
/// assert_eq!(hidden.shape(), [2, 16, 64]);
/// f.finish("forward", &[("hidden", &hidden)])?;
/// # Ok::<(), grpo_stablehlo::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Decoder {
    config: ModelConfig,
    compute: Compute,
    attention: Attention,
    expert_products: ExpertProducts,
    adapters: Option<Adapters>,
    value_head: bool,
    frozen_routers: bool,
    router_aux_loss: bool,
    quantization: Option<Quantization>,
    rules: AxisRules,
}

impl Decoder {
    /// Creates a decoder of this configuration.
    pub fn new(config: &ModelConfig, compute: Compute) -> Self {
        Self {
            config: config.clone(),
            compute,
            attention: Attention::default(),
            expert_products: ExpertProducts::default(),
            adapters: None,
            value_head: false,
            frozen_routers: false,
            router_aux_loss: false,
            quantization: None,
            rules: AxisRules::default(),
        }
    }

    /// Adds adapters to matrices; the model's own weights are then frozen.
    #[must_use]
    pub fn with_adapters(self, adapters: Adapters) -> Self {
        Self { adapters: Some(adapters), ..self }
    }

    /// Adds a value head: a linear layer on the hidden states after the final norm.
    #[must_use]
    pub fn with_value_head(self) -> Self {
        Self { value_head: true, ..self }
    }

    /// Freezes the routers of experts.
    #[must_use]
    pub fn with_frozen_routers(self) -> Self {
        Self { frozen_routers: true, ..self }
    }

    /// Adds the load balancing loss of the routers of experts, with transformers' definition: [`RouterSums::aux_loss`].
    #[must_use]
    pub fn with_router_aux_loss(self) -> Self {
        Self { router_aux_loss: true, ..self }
    }

    /// Returns `true` if the model has experts and training adds their load balancing loss.
    pub fn has_router_aux_loss(&self) -> bool {
        self.router_aux_loss && self.config.experts.is_some()
    }

    /// Returns the decoder without its value head, for sampling.
    #[must_use]
    pub fn without_value_head(&self) -> Self {
        Self { value_head: false, ..self.clone() }
    }

    /// Returns the base model: no adapters, no value head.
    #[must_use]
    pub fn model(&self) -> Self {
        Self { adapters: None, value_head: false, ..self.clone() }
    }

    /// Returns the adapters, if any.
    pub fn adapters(&self) -> Option<&Adapters> {
        self.adapters.as_ref()
    }

    /// Returns `true` if there is a value head.
    pub fn has_value_head(&self) -> bool {
        self.value_head
    }

    /// Returns the parameters in the argument order of programs, with the padding that they have on the decoder's mesh: the model
    /// ([`quantized_parameters`]), then adapters, then the value head.
    pub fn parameters(&self) -> Vec<Parameter> {
        let mut table = quantized_parameters(&self.config, self.quantization);
        table.extend(self.adapters.iter().flat_map(|adapters| adapters.parameters(&self.config)));
        table.extend(self.value_head.then(|| adapters::value_head(&self.config)).into_iter().flatten());
        self.rules.all_padded(table)
    }

    /// Returns the trained parameters, which are the last ones of [`Decoder::parameters`]: all of them but factors of layers and frozen
    /// routers, or all but the model's if there are adapters.
    pub fn trained(&self) -> Vec<Parameter> {
        self.parameters().into_iter().filter(|p| self.trains(p.role)).collect()
    }

    /// Returns `true` if the parameter of this role is trained.
    pub fn trains(&self, role: Role) -> bool {
        let is_router = matches!(role, Role::Router | Role::RouterBias);
        let is_constant = matches!(role, Role::LayerScalar | Role::CorrectionBias);
        let is_frozen = is_constant || self.frozen_routers && is_router;
        !is_frozen && (self.adapters.is_none() || !role.is_of_model())
    }

    /// Declares the parameters as the next arguments of a program. `model` is the dtype of the model's matrices ([`Parameter::dtype`]).
    pub fn declare(&self, builder: &Builder, model: Dtype) -> ParameterValues {
        self.declare_table(builder, &self.parameters(), model)
    }

    /// Declares the parameters of `table` only.
    pub(crate) fn declare_table(&self, builder: &Builder, table: &[Parameter], model: Dtype) -> ParameterValues {
        let values = ParameterValues::arguments(builder, table, model);
        table.iter().for_each(|parameter| self.rules.argument(values.of(parameter.id()), &parameter.axes));
        values
    }

    /// Sets how attention is computed.
    #[must_use]
    pub fn with_attention(self, attention: Attention) -> Self {
        Self { attention, ..self }
    }

    /// Sets how the products of experts are computed.
    #[must_use]
    pub fn with_expert_products(self, expert_products: ExpertProducts) -> Self {
        Self { expert_products, ..self }
    }

    /// Shards the decoder's programs over a device mesh by logical axes. Sharded are: parameters, gradients and moments, as arguments or
    /// results; in every layer, the residual stream, queries, keys and values, the outputs of attention and MLP, and the slices of the
    /// layer's weights, with the gradients of all of these. The layer axis is never sharded. A mesh of one device changes nothing.
    ///
    /// The partitioner does the rest: compile with [`grpo_pjrt::CompileOptions::shardy`]. The head of the loss takes hidden states and its
    /// weight with all columns ([`grpo_backend_tpu::program::HeadSplit`]); each device computes the logits of all tokens for its shard of the
    /// vocabulary.
    ///
    /// ```
    /// use grpo_policy_pjrt::decoder::{AxisRules, Compute, Decoder};
    /// use grpo_policy_pjrt::{TrainPrograms, TrainShape};
    /// use grpo_stablehlo::{Mesh, Save};
    ///
    /// # fn main() -> grpo_policy_pjrt::Result<()> {
    /// let mesh = Mesh::new("mesh", [("fsdp", 2), ("tensor", 2)]).expect("a mesh");
    /// let decoder = Decoder::new(&grpo_models::ModelConfig { vocab_size: 64, ..Default::default() }, Compute::F32);
    /// let decoder = decoder.with_axis_rules(AxisRules::new(&mesh))?;
    /// let shape = TrainShape { rows: 2, length: 32, tokens: 48, ..TrainShape::default() };
    /// let module = TrainPrograms::new(decoder, Save::Carry).gradient(&grpo_core::LossConfig::default(), None, shape)?;
    /// assert_eq!(module.partitions, 4);
    /// assert!(module.to_string().contains("sdy.sharding_constraint"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Split`] if a parameter, the query heads or the key heads of Gated DeltaNets do not shard evenly.
    pub fn with_axis_rules(self, rules: AxisRules) -> crate::Result<Self> {
        let decoder = Self { rules: rules.for_model(&self.config), ..self };
        decoder.rules.check_decoder(&decoder.config, &decoder.parameters())?;
        Ok(decoder)
    }

    /// Returns the axis rules of the programs.
    pub fn axis_rules(&self) -> &AxisRules {
        &self.rules
    }

    /// Returns the configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the dtype of matrix products.
    pub fn compute(&self) -> Compute {
        self.compute
    }

    /// Returns the hidden states `[B, T, H]` after the final norm. `save` selects the activations of each layer that are saved for the
    /// backward pass.
    ///
    /// # Errors
    /// Weights or rows do not fit the configuration.
    pub fn hidden(&self, weights: &ParameterValues, rows: &Rows, save: Save) -> Result<Value> {
        Ok(self.final_norm(weights, &self.residual(weights, rows, save)?.0))
    }

    /// Returns the residual stream `[B, T, H]` after the last layer, before the final norm. Also returns the sums of the routers of experts
    /// if [`Rows::counted`] requests them.
    ///
    /// # Errors
    /// See [`Decoder::hidden`].
    pub fn residual(&self, weights: &ParameterValues, rows: &Rows, save: Save) -> Result<(Value, Option<RouterSums>)> {
        let tokens = WholeRows {
            rotaries: self.rotaries(&rows.distinct_positions()),
            masks: self.masks(rows),
            positions: self.config.linear_attention.map(|_| rows.positions.clone()),
            counted: rows.counted.clone(),
            routed: rows.routed.clone(),
        };
        let x = self.embed(weights, &rows.ids);
        let counts = rows.counted.as_ref().and_then(|counted| RouterCounts::new(self, counted, rows.routed.is_some()));
        let carry = Carry { x, counts };
        let carry = self.over_layers(weights, &carry, &tokens, Layers::Loop(save), |layer, carry: Carry, tokens| {
            let recorded = tokens.routed.as_ref().map(|routed| layer_at(routed, &layer.router()));
            let (x, _, routing) = self.block(layer, &carry.x, LayerOfRows { tokens: &tokens, recorded })?;
            let counts = match (carry.counts, routing, &tokens.counted) {
                (Some(counts), Some(routing), Some(counted)) => Some(counts.with(&routing, counted)),
                (counts, ..) => counts,
            };
            Ok(Carry { x, counts })
        })?;
        let sums = carry.counts.zip(rows.counted.as_ref());
        Ok((carry.x, sums.map(|(counts, counted)| RouterSums::new(&counts, counted, rows.routed.as_ref()))))
    }

    /// Returns the token embeddings `[B, T, H]` of token ids `[B, T]`.
    pub fn embed(&self, weights: &ParameterValues, ids: &Value) -> Value {
        let rows = rows_at(&weights[Role::EmbedTokens], ids);
        let rows = match self.config.pad_token_id {
            // The padding token's embedding is not trained.
            Some(pad) => {
                let is_padding = ids.eq(&ids.like(pad as i64)).broadcast_in_dim(rows.shape(), &[0, 1]);
                is_padding.select(&rows.stop_gradient(), &rows)
            }
            None => rows,
        };
        let rows = match self.config.embedding_multiplier {
            1.0 => rows,
            factor => traced::scaled(rows.convert(Dtype::F32), factor),
        };
        let rows = rows.convert(self.compute.dtype());
        // If the columns of the embedding are sharded, a device first looks up its columns for all rows; devices then exchange them.
        let table = self.rules.sharding(&[Axis::Vocab, Axis::Embed]);
        let rows = match table.is_some_and(|table| !table.axes(1).is_empty()) {
            true => self.rules.constrain_from_the_last(&rows, &RESIDUAL),
            false => rows,
        };
        self.rules.constrain(&rows, &RESIDUAL)
    }

    /// Applies the final norm to `x` `[..., H]`, and divides by the divisor of logits.
    pub fn final_norm(&self, weights: &ParameterValues, x: &Value) -> Value {
        let hidden = self.norm(x, &weights[Role::Norm]);
        traced::scaled(hidden, 1.0 / self.config.logits_scaling).convert(self.compute.dtype())
    }

    /// Returns the number of columns of logits: the size of the vocabulary, which may be padded.
    pub(crate) fn logit_columns(&self) -> usize {
        self.rules.padded_vocab(self.config.vocab_size)
    }

    /// Returns the columns of logits `[N, V]` that belong to the vocabulary.
    pub(crate) fn without_padding(&self, logits: &Value) -> Value {
        match self.config.vocab_size {
            vocab if vocab < logits.shape()[1] => logits.slice(&[0, 0], &[logits.shape()[0], vocab]),
            _ => logits.clone(),
        }
    }

    /// Returns the logits `[..., V]` in f32, with the model's softcap, of hidden states `[..., H]` after the final norm. If the vocabulary is
    /// padded, columns behind it are -inf, so that they have no probability.
    pub fn logits(&self, weights: &ParameterValues, hidden: &Value) -> Value {
        let logits = self.product(weights, hidden, weights.head_role(), Dtype::F32);
        let logits = self.adapted(weights, hidden, Matrix::LmHead, logits);
        let logits = match self.config.final_logit_softcapping {
            Some(cap) => (&logits * logits.like(1.0 / cap)).tanh() * logits.like(cap),
            None => logits,
        };
        let logits = match self.config.vocab_size {
            vocab if vocab < self.logit_columns() => {
                let columns = logits.builder().iota(logits.shape().len() - 1, logits.ty().with_dtype(Dtype::I32));
                columns.lt(&columns.like(vocab as i64)).select(&logits, &logits.like(f64::NEG_INFINITY))
            }
            _ => logits,
        };
        let [rows, columns] = [Axis::Batch, Axis::Vocab].map(Some);
        match hidden.shape().len() {
            2 => self.rules.constrain(&logits, &[rows, columns]),
            3 => self.rules.constrain(&logits, &[rows, None, columns]),
            _ => logits,
        }
    }
}

/// Creates a tensor of zeros.
pub(crate) fn zeros(builder: &grpo_stablehlo::Builder, dtype: Dtype, shape: &[usize]) -> Value {
    let ty = TensorType::new(dtype, shape);
    match dtype {
        Dtype::Pred => builder.splat(false, ty),
        dtype if dtype.is_integer() => builder.splat(0, ty),
        _ => builder.splat(0.0, ty),
    }
}
