//! A decoder: its configuration, its parameters and their sharding.

use super::adapters::{Adapters, value_head};
use super::{Attention, AxisRules, Compute, ExpertProducts, Parameter, ParameterValues, Role, quantized_parameters};
use grpo_models::{ModelConfig, Quantization};
use grpo_stablehlo::{Builder, Dtype};

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
    pub(super) config: ModelConfig,
    pub(super) compute: Compute,
    pub(super) attention: Attention,
    pub(super) expert_products: ExpertProducts,
    pub(super) adapters: Option<Adapters>,
    pub(super) value_head: bool,
    pub(super) frozen_routers: bool,
    pub(super) router_aux_loss: bool,
    pub(super) quantization: Option<Quantization>,
    pub(super) rules: AxisRules,
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

    /// Adds the load balancing loss of the routers of experts, with transformers' definition: [`RouterSums::aux_loss`](super::RouterSums::aux_loss).
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
        table.extend(self.value_head.then(|| value_head(&self.config)).into_iter().flatten());
        self.rules.all_padded(table)
    }

    /// Returns the trained parameters, which are the last ones of [`Decoder::parameters`]: all of them but factors of layers and frozen
    /// routers, or all but the model's if there are adapters.
    pub fn trained(&self) -> Vec<Parameter> {
        self.parameters().into_iter().filter(|p| self.trains(p.role)).collect()
    }

    /// Returns `true` if the parameter of this role is trained.
    pub fn trains(&self, role: Role) -> bool {
        let is_frozen = role.is_constant() || self.frozen_routers && role.is_of_router();
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
}
