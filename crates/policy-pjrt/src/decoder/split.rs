//! Sharding of a decoder's programs over a device mesh, by a table of axis rules.
//!
//! * Attention is sharded by rows and heads, including blocks of scores, so that none crosses devices.
//! * A device looks up the tokens of its shard of the vocabulary for all rows; the sum over devices has every row once. If the
//!   columns of the embedding are sharded (`vocab: []`), it looks up its columns, and devices exchange them.
//! * Rows that do not divide are padded with empty rows, and a vocabulary is padded with rows of zeros, whose logits are masked. Another
//!   dimension of the model that does not divide is an error.

use super::{Axis, AxisRules, Decoder, Matrix, Parameter, ParameterValues, Role};
use crate::error::{Error, Result};
use crate::program::finish;
use grpo_models::ModelConfig;
use grpo_stablehlo::{Builder, Dtype, Manual, Module, Sharding, TensorType, Value, ValueId};

/// Logical axes of the residual stream `[B, T, H]`.
pub(crate) const RESIDUAL: [Axis; 3] = [Axis::Batch, Axis::Length, Axis::Embed];

/// The axis rules of a program, if it is sharded. Without rules, all methods do nothing, and the program is for one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Split(Option<AxisRules>);

impl Split {
    /// Creates the sharding by these rules; a mesh of one device has none.
    pub(crate) fn of(rules: AxisRules) -> Self {
        Self((rules.mesh().devices() > 1).then_some(rules))
    }

    /// Returns these rules for programs that process one token per sequence: the residual stream is not sharded along tokens.
    pub(crate) fn of_rollout(&self) -> Self {
        Self(self.rules().cloned().map(|rules| legal(rules.with(Axis::Length, &[]))))
    }

    /// Returns these rules for a model ([`AxisRules::for_model`]).
    pub(crate) fn for_model(&self, config: &ModelConfig) -> Self {
        Self(self.0.clone().map(|rules| rules.for_model(config)))
    }

    /// Returns the number of shards of a dimension with this logical axis.
    pub(crate) fn parts(&self, axis: Axis) -> usize {
        self.rules().map_or(1, |rules| rules.parts(axis))
    }

    /// Returns the size of the vocabulary on the devices, which may be padded.
    pub(crate) fn padded_vocab(&self, vocab: usize) -> usize {
        self.rules().map_or(vocab, |rules| rules.padded_vocab(vocab))
    }

    /// Returns the parameters with the padding that they have on the devices.
    pub(crate) fn padded(&self, table: Vec<Parameter>) -> Vec<Parameter> {
        match self.rules() {
            Some(rules) => table.into_iter().map(|parameter| rules.padded(parameter)).collect(),
            None => table,
        }
    }

    /// Returns the number of elements of a parameter on each device.
    pub(crate) fn elements_of(&self, parameter: &Parameter) -> u64 {
        let elements = self.rules().map(|rules| rules.elements(parameter));
        elements.unwrap_or_else(|| parameter.shape.iter().product()) as u64
    }

    /// Returns the shape of a parameter's shard; the whole shape if it does not shard evenly.
    pub(crate) fn shard_of(&self, parameter: &Parameter) -> Vec<usize> {
        let part = |sharding: Sharding| sharding.part(&TensorType::new(Dtype::F32, &parameter.shape[..])).ok();
        self.sharding(&parameter.axes).and_then(part).map_or_else(|| parameter.shape.clone(), |part| part.shape)
    }

    /// Returns the axis rules.
    pub(crate) fn rules(&self) -> Option<&AxisRules> {
        self.0.as_ref()
    }

    /// Returns the sharding of a tensor with these logical axes, if there are rules; dimensions that are `None` are not sharded.
    pub(crate) fn sharding<A: Copy + Into<Option<Axis>>>(&self, dimensions: &[A]) -> Option<Sharding> {
        self.rules().map(|rules| legal(rules.sharding(dimensions)))
    }

    /// Constrains the sharding of `value`, and of its cotangent, by these logical axes.
    #[track_caller]
    pub(crate) fn constrain<A: Copy + Into<Option<Axis>>>(&self, value: &Value, dimensions: &[A]) -> Value {
        match self.sharding(dimensions) {
            Some(sharding) => value.constrain(&sharding),
            None => value.clone(),
        }
    }

    /// Like [`Split::constrain`], but mesh axes are assigned from the last dimension to the first.
    #[track_caller]
    pub(crate) fn constrain_from_the_last(&self, value: &Value, dimensions: &[Axis]) -> Value {
        match self.rules().map(|rules| rules.sharding_from_the_last(dimensions)) {
            Some(sharding) => value.constrain(&legal(sharding)),
            None => value.clone(),
        }
    }

    /// Like [`Split::constrain`], for a tensor without the dimension that has the mesh axes of `taken`: these axes shard none of its dimensions.
    #[track_caller]
    pub(crate) fn constrain_after(&self, value: &Value, taken: Axis, dimensions: &[Option<Axis>]) -> Value {
        match self.sharding(&[&[Some(taken)], dimensions].concat()) {
            Some(all) => {
                let axes: Vec<Vec<&str>> = (1..all.rank()).map(|dimension| all.axes(dimension)).collect();
                let sharding = all.mesh().sharding(&axes.iter().map(Vec::as_slice).collect::<Vec<_>>());
                value.constrain(&legal(sharding))
            }
            None => value.clone(),
        }
    }

    /// Shards an argument of a program by these logical axes.
    #[track_caller]
    pub(crate) fn argument<A: Copy + Into<Option<Axis>>>(&self, argument: &Value, dimensions: &[A]) {
        if let Some(sharding) = self.sharding(dimensions) {
            argument.builder().shard(argument, &sharding);
        }
    }

    /// Shards result `index` of a program by these logical axes.
    #[track_caller]
    pub(crate) fn result<A: Copy + Into<Option<Axis>>>(&self, f: &Builder, index: usize, dimensions: &[A]) {
        if let Some(sharding) = self.sharding(dimensions) {
            f.shard_result(index, &sharding);
        }
    }

    /// Runs `body` on every device with the device's shards of `operands`, without communication. Operands and results have these logical
    /// axes; an operand whose axes differ is resharded first. Without rules, `body` takes the whole operands.
    ///
    /// # Errors
    /// [`grpo_stablehlo::Error::Split`] if an operand does not shard evenly; the first illegal operation of `body`.
    pub(crate) fn on_shards(
        &self,
        f: &Builder,
        operands: &[(&Value, &[Option<Axis>])],
        results: &[&[Option<Axis>]],
        body: impl FnOnce(&Builder, &[Value]) -> Vec<Value>,
    ) -> grpo_stablehlo::Result<Vec<Value>> {
        let (values, axes): (Vec<&Value>, Vec<&[Option<Axis>]>) = operands.iter().copied().unzip();
        let Some(rules) = self.rules() else {
            return Ok(body(f, &values.into_iter().cloned().collect::<Vec<_>>()));
        };
        let shardings =
            |axes: &[&[Option<Axis>]]| axes.iter().map(|axes| rules.sharding(axes)).collect::<Result<Vec<_>, _>>();
        let manual = Manual::new(rules.mesh(), &shardings(&axes)?, &shardings(results)?)?;
        let types: Vec<TensorType> = values.iter().map(|value| value.ty().clone()).collect();
        let body = manual.trace(&types, body)?;
        Ok(f.manual(&manual, &body, &values))
    }

    /// Finishes a program. All arguments and results without a sharding are replicated.
    pub(crate) fn finish<'a>(
        &self,
        f: Builder,
        name: &str,
        results: impl IntoIterator<Item = (&'a str, &'a Value)>,
    ) -> Result<Module> {
        let mut module = finish(f, name, results)?;
        let Some(rules) = self.rules() else { return Ok(module) };
        let main = &module.main;
        let whole = |id: &ValueId| rules.mesh().replicated(main.type_of(*id).rank());
        let [arguments, results] =
            [&main.body().arguments, &main.body().results].map(|ids| ids.iter().map(whole).collect::<Vec<_>>());
        for (argument, whole) in module.main.arguments.iter_mut().zip(arguments) {
            argument.sharding.get_or_insert(whole);
        }
        for (result, whole) in module.main.results.iter_mut().zip(results) {
            result.sharding.get_or_insert(whole);
        }
        Ok(module)
    }

    /// Checks that all parameters of `table` shard evenly.
    ///
    /// # Errors
    /// [`Error::Split`] with the name of the parameter.
    pub(crate) fn check_parameters(&self, table: &[Parameter]) -> Result<()> {
        table.iter().try_for_each(|parameter| {
            let dimensions: Vec<(Axis, usize)> =
                parameter.axes.iter().copied().zip(parameter.shape.iter().copied()).collect();
            self.check(&format!("the parameter `{}`", parameter.name()), &dimensions)
        })
    }

    /// Checks that a tensor with these dimensions shards evenly.
    ///
    /// # Errors
    /// [`Error::Split`] with the name `what`.
    pub(crate) fn check(&self, what: &str, dimensions: &[(Axis, usize)]) -> Result<()> {
        let (axes, shape): (Vec<Axis>, Vec<usize>) = dimensions.iter().copied().unzip();
        let Some(sharding) = self.sharding(&axes) else { return Ok(()) };
        let part = sharding.part(&TensorType::new(Dtype::F32, shape));
        part.map(|_| ()).map_err(|source| Error::Split { what: what.into(), source })
    }
}

fn legal<T>(result: grpo_stablehlo::Result<T>) -> T {
    result.unwrap_or_else(|_| unreachable!("a table names axes of its mesh, and each of them once"))
}

impl Decoder {
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
    /// [`Error::Split`] if a parameter, the query heads or the key heads of Gated DeltaNets do not shard evenly.
    pub fn with_axis_rules(self, rules: AxisRules) -> Result<Self> {
        self.with_split(&Split::of(rules))
    }

    /// Like [`Decoder::with_axis_rules`].
    pub(crate) fn with_split(self, split: &Split) -> Result<Self> {
        let decoder = Self { split: split.for_model(&self.config), ..self };
        decoder.split.check_parameters(&decoder.parameters())?;
        for grpo_models::AttentionHeads { query, key_value: kv, .. } in decoder.config.heads_of_layers() {
            decoder
                .split
                .check("the query heads of key/value heads", &[(Axis::Kv, kv), (Axis::Heads, query / kv.max(1))])?;
        }
        if let Some(linear) = decoder.config.linear_attention {
            let heads = linear.linear_num_key_heads;
            split.check("the key heads of Gated DeltaNets", &[(Axis::LinearHeads, heads)])?;
        }
        Ok(decoder)
    }

    /// Returns the axis rules, if programs are sharded over several devices.
    pub fn axis_rules(&self) -> Option<&AxisRules> {
        self.split.rules()
    }

    /// Returns the sharding of the programs.
    pub(crate) fn split(&self) -> &Split {
        &self.split
    }

    /// Constrains a layer's slice of a parameter of this role, whose dimensions in files have these logical axes, to the sharding of the
    /// parameter.
    #[track_caller]
    pub(super) fn split_slice(&self, weights: &ParameterValues, role: Role, axes: &[Axis], slice: &Value) -> Value {
        let mut axes = axes.to_vec();
        if Matrix::of(role).is_some() && weights.summed(role) == 0 {
            axes.reverse();
        }
        self.split.constrain(slice, &axes)
    }
}
