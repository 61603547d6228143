//! How a decoder's programs are split over a mesh of devices: by the table that it was given, or not at all.

use super::{Axis, AxisRules, Decoder, Matrix, ParameterValues, Role};
use crate::error::{Error, Result};
use stablehlo::{Builder, Dtype, Function, Module, Sharding, TensorType, Value, ValueId};

/// What the dimensions of the residual stream `[B, T, H]` count.
pub(crate) const RESIDUAL: [Axis; 3] = [Axis::Batch, Axis::Length, Axis::Embed];

/// The table by which a program is split, where there is one. Without it all of this does nothing: the program is that of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Split(Option<AxisRules>);

impl Split {
    /// The table.
    pub(crate) fn rules(&self) -> Option<&AxisRules> {
        self.0.as_ref()
    }

    /// `value`, whose dimensions count these, split like that. Its cotangent is split likewise.
    #[track_caller]
    pub(crate) fn constrain(&self, value: &Value, dimensions: &[Axis]) -> Value {
        match self.rules() {
            Some(rules) => value.constrain(&sharding(rules, dimensions)),
            None => value.clone(),
        }
    }

    /// [`Split::constrain`] where the last dimension is the first to ask for axes.
    #[track_caller]
    pub(crate) fn constrain_from_the_last(&self, value: &Value, dimensions: &[Axis]) -> Value {
        match self.rules().map(|rules| rules.sharding_from_the_last(dimensions)) {
            Some(sharding) => value.constrain(&legal(sharding)),
            None => value.clone(),
        }
    }

    /// Splits the dimensions of `value` that have a name here; the others are whole.
    #[track_caller]
    pub(crate) fn constrain_named(&self, value: &Value, dimensions: &[Option<Axis>]) -> Value {
        match self.named(dimensions) {
            Some(sharding) => value.constrain(&sharding),
            None => value.clone(),
        }
    }

    /// How a tensor is split, where there is a table, of whose dimensions those without a name are whole.
    pub(crate) fn named(&self, dimensions: &[Option<Axis>]) -> Option<Sharding> {
        self.rules().map(|rules| legal(rules.sharding_of_named(dimensions)))
    }

    /// Splits an argument of a program, whose dimensions count these.
    #[track_caller]
    pub(crate) fn argument(&self, argument: &Value, dimensions: &[Axis]) {
        if let Some(rules) = self.rules() {
            argument.builder().shard(argument, &sharding(rules, dimensions));
        }
    }

    /// Splits the dimensions of an argument of a program that have a name here; the others are whole.
    #[track_caller]
    pub(crate) fn named_argument(&self, argument: &Value, dimensions: &[Option<Axis>]) {
        if let Some(sharding) = self.named(dimensions) {
            argument.builder().shard(argument, &sharding);
        }
    }

    /// Splits the dimensions of result `index` of a program that have a name here; the others are whole.
    #[track_caller]
    pub(crate) fn named_result(&self, f: &Builder, index: usize, dimensions: &[Option<Axis>]) {
        if let Some(sharding) = self.named(dimensions) {
            f.shard_result(index, &sharding);
        }
    }

    /// Splits result `index` of a program, whose dimensions count these.
    #[track_caller]
    pub(crate) fn result(&self, f: &Builder, index: usize, dimensions: &[Axis]) {
        if let Some(rules) = self.rules() {
            f.shard_result(index, &sharding(rules, dimensions));
        }
    }

    /// The program in which every device has the whole of the arguments and results that nothing was said about.
    pub(crate) fn complete(&self, mut module: Module) -> Module {
        let Some(rules) = self.rules() else { return module };
        let Function { arguments, results, body, types } = &mut module.main;
        let whole = |id: &ValueId| rules.mesh().replicated(types[id.0].rank());
        for (argument, id) in arguments.iter_mut().zip(&body.arguments) {
            argument.sharding.get_or_insert_with(|| whole(id));
        }
        for (result, id) in results.iter_mut().zip(&body.results) {
            result.sharding.get_or_insert_with(|| whole(id));
        }
        module
    }

    /// Checks that a tensor of these dimensions splits evenly.
    ///
    /// # Errors
    /// [`Error::Split`], which calls it `what`.
    pub(crate) fn check(&self, what: &str, dimensions: &[(Axis, usize)]) -> Result<()> {
        let Some(rules) = self.rules() else { return Ok(()) };
        let (axes, shape): (Vec<Axis>, Vec<usize>) = dimensions.iter().copied().unzip();
        let part = sharding(rules, &axes).part(&TensorType::new(Dtype::F32, shape));
        part.map(|_| ()).map_err(|source| Error::Split { what: what.into(), source })
    }
}

fn sharding(rules: &AxisRules, dimensions: &[Axis]) -> Sharding {
    legal(rules.sharding(dimensions))
}

fn legal(sharding: stablehlo::Result<Sharding>) -> Sharding {
    sharding.unwrap_or_else(|_| unreachable!("a table names axes of its mesh, and each of them once"))
}

impl Decoder {
    /// Splits its programs over the devices of a mesh, by the names of what dimensions count: parameters wherever they are arguments or
    /// results, with their gradients and moments; within every layer the residual stream, queries, keys and values, what attention
    /// and the MLP make of them, and the slices of the layer's weights, with the gradients of all of these. Layers are never split. A mesh
    /// of one device changes nothing.
    ///
    /// The partitioner does the rest: compile with [`pjrt::CompileOptions::shardy`]. The head of the loss takes hidden states
    /// and its weight with all their columns ([`backend_tpu::program::HeadSplit`]); devices make the logits of all tokens, of their vocabulary.
    ///
    /// ```
    /// use policy_device::decoder::{AxisRules, Compute, Decoder};
    /// use policy_device::{TrainModules, TrainShape};
    /// use stablehlo::{Mesh, Save};
    ///
    /// # fn main() -> policy_device::Result<()> {
    /// let mesh = Mesh::new("mesh", [("fsdp", 2), ("tensor", 2)]).expect("a mesh");
    /// let decoder = Decoder::new(&models::ModelConfig { vocab_size: 64, ..Default::default() }, Compute::F32);
    /// let decoder = decoder.with_axis_rules(AxisRules::new(&mesh))?;
    /// let shape = TrainShape { rows: 2, length: 32, tokens: 48, shared: false };
    /// let module = TrainModules::new(decoder, Save::Carry).gradient(&grpo_core::LossConfig::default(), shape)?;
    /// assert_eq!(module.partitions, 4);
    /// assert!(module.to_string().contains("sdy.sharding_constraint"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Split`] for a parameter, or for key/value heads and their groups of query heads, that do not split evenly.
    pub fn with_axis_rules(self, rules: AxisRules) -> Result<Self> {
        let split = Split((rules.mesh().devices() > 1).then_some(rules));
        for parameter in self.parameters() {
            let dimensions: Vec<(Axis, usize)> =
                parameter.axes.iter().copied().zip(parameter.shape.iter().copied()).collect();
            split.check(&format!("the parameter `{}`", parameter.name()), &dimensions)?;
        }
        let (heads, kv) = (self.config.num_attention_heads, self.config.num_key_value_heads);
        split.check(
            "key/value heads and the query heads of each",
            &[(Axis::Kv, kv), (Axis::Heads, heads / kv.max(1))],
        )?;
        Ok(Self { split, ..self })
    }

    /// The table by which its programs are split over a mesh of several devices.
    pub fn axis_rules(&self) -> Option<&AxisRules> {
        self.split.rules()
    }

    /// How its programs are split.
    pub(crate) fn split(&self) -> &Split {
        &self.split
    }

    /// A layer's slice of the parameter of this role, split as the parameter is.
    #[track_caller]
    pub(super) fn split_slice(&self, weights: &ParameterValues, role: Role, slice: &Value) -> Value {
        if self.axis_rules().is_none() {
            return slice.clone();
        }
        let table = self.parameters();
        let Some(parameter) = table.iter().find(|parameter| parameter.role == role) else { return slice.clone() };
        let mut dimensions = parameter.axes[1..].to_vec();
        if Matrix::of(role).is_some() && weights.summed(role) == 0 {
            dimensions.reverse();
        }
        self.split.constrain(slice, &dimensions)
    }
}
