//! Assignment of tensor dimensions to the axes of a device mesh.

use crate::decoder::{Axis, Parameter};
use grpo_models::ModelConfig;
use grpo_stablehlo::{Dtype, Error, Mesh, Result, Sharding, TensorType};

/// A table from logical axes ([`Axis`]) to axes of a mesh, as in MaxText: programs name logical axes, a run chooses the mesh axes. The default, as
/// every mesh of one device, shards nothing: programs are for one device.
///
/// ```
/// use grpo_policy_pjrt::decoder::{Axis, AxisRules, Role, parameters};
/// use grpo_stablehlo::Mesh;
///
/// let rules = AxisRules::new(&Mesh::new("mesh", [("data", 2), ("fsdp", 4), ("tensor", 2)])?);
/// let table = parameters(&grpo_models::ModelConfig::default());
/// let gate = table.iter().find(|parameter| parameter.role == Role::GateProj).unwrap();
/// // [L, I, H]: layers are not sharded.
/// let sharding = rules.parameter(gate)?;
/// assert_eq!([sharding.axes(0), sharding.axes(1), sharding.axes(2)], [vec![], vec!["tensor"], vec!["fsdp"]]);
/// // The batch dimension of activations uses `fsdp`, so their embed dimension cannot.
/// let hidden = rules.sharding(&[Axis::Batch, Axis::Embed]).expect("several devices");
/// assert_eq!([hidden.axes(0), hidden.axes(1)], [vec!["data", "fsdp"], vec![]]);
/// assert!(AxisRules::default().sharding(&[Axis::Batch]).is_none());
/// # Ok::<(), grpo_stablehlo::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AxisRules {
    mesh: Mesh,
    rules: Vec<(Axis, Vec<String>)>,
}

impl Default for AxisRules {
    fn default() -> Self {
        Self { mesh: legal(Mesh::new("mesh", [("data", 1)])), rules: vec![] }
    }
}

impl AxisRules {
    /// Creates the default table, restricted to the axes of the mesh: batch over `data` and `fsdp`, the embed dimension of weights over
    /// `fsdp`, heads (also of Gated DeltaNets) and MLP over `tensor`, experts and the vocabulary over `tensor` and `fsdp`: a device has
    /// whole experts, and none makes logits of the whole vocabulary. Biases of queries, keys and values are sharded like the rows of their
    /// matrices, and over `fsdp` if it divides them. The residual stream is sharded along the tokens of a row over `tensor`, Megatron's sequence
    /// parallelism (arXiv 2205.05198).
    pub fn new(mesh: &Mesh) -> Self {
        let usual: [(Axis, &[&str]); 9] = [
            (Axis::Batch, &["data", "fsdp"]),
            (Axis::Embed, &["fsdp"]),
            (Axis::Heads, &["tensor"]),
            (Axis::Kv, &["tensor"]),
            (Axis::LinearHeads, &["tensor"]),
            (Axis::Mlp, &["tensor"]),
            (Axis::Experts, &["tensor", "fsdp"]),
            (Axis::Vocab, &["tensor", "fsdp"]),
            (Axis::Length, &["tensor"]),
        ];
        let there = |axes: &[&str]| axes.iter().filter(|a| mesh.size(a).is_some()).map(|a| (*a).to_owned()).collect();
        Self { mesh: mesh.clone(), rules: usual.into_iter().map(|(axis, axes)| (axis, there(axes))).collect() }
    }

    /// Replaces the mesh axes of a logical axis; an empty list means that the dimension is not sharded.
    ///
    /// # Errors
    /// [`Error::Axis`] if the mesh has no such axis, if an axis is named twice, or for `Axis::Layer`, which a scan slices.
    pub fn with(mut self, axis: Axis, axes: &[&str]) -> Result<Self> {
        self.mesh.sharding(&[axes])?;
        if let (Axis::Layer, Some(name)) = (axis, axes.first()) {
            let reason = "layers are on every device: they run one after the other".into();
            return Err(Error::Axis { mesh: self.mesh.name().into(), axis: (*name).into(), reason });
        }
        self.rules.retain(|(other, _)| *other != axis);
        self.rules.push((axis, axes.iter().map(|axis| (*axis).to_owned()).collect()));
        Ok(self)
    }

    /// Returns the rules for a model, whose key/value heads may be fewer than their shards: devices then hold copies of a head, as in vLLM. The mesh
    /// axis that does not divide the heads becomes two axes of the same devices in the same order. The second one, with the suffix `_replica`,
    /// shards the query heads of a key/value head; its devices hold the same key/value heads.
    ///
    /// ```
    /// use grpo_policy_pjrt::decoder::{Axis, AxisRules};
    /// use grpo_stablehlo::Mesh;
    ///
    /// let config = grpo_models::ModelConfig { num_attention_heads: 8, num_key_value_heads: 2, ..Default::default() };
    /// let rules = AxisRules::new(&Mesh::new("mesh", [("fsdp", 2), ("tensor", 4)])?).for_model(&config);
    /// assert_eq!(rules.mesh().to_string(), "@mesh = <[\"fsdp\"=2, \"tensor\"=2, \"tensor_replica\"=2]>");
    /// assert_eq!((rules.parts(Axis::Kv), rules.parts(Axis::Heads)), (2, 4));
    /// # Ok::<(), grpo_stablehlo::Error>(())
    /// ```
    #[must_use]
    pub fn for_model(self, config: &ModelConfig) -> Self {
        let heads = config.heads_of_layers().map(|of| of.key_value);
        let Some(mut left) = heads.reduce(greatest_common_divisor) else { return self };
        let (names, mut own): (Vec<String>, _) = (self.rule(Axis::Kv).map(str::to_owned).collect(), vec![]);
        for name in names {
            let size = self.devices(&[&name]);
            let shards = greatest_common_divisor(left, size);
            if shards < size {
                return self.with_replicas(own, &name, [shards, size / shards]);
            }
            left /= size;
            own.push(name);
        }
        self
    }

    /// Returns the rules for programs that process one token per sequence: the residual stream is not sharded along tokens.
    pub(crate) fn for_rollout(&self) -> Self {
        legal(self.clone().with(Axis::Length, &[]))
    }

    /// Returns the rules with key/value heads over the axes `own`, and over the first of two axes of `sizes` into which the axis `name` is divided.
    fn with_replicas(self, mut own: Vec<String>, name: &str, [shards, copies]: [usize; 2]) -> Self {
        let mut rules = self;
        if shards > 1 {
            let replica = format!("{name}_replica");
            let divided = |axis: &(String, usize)| match axis.0 == name {
                true => vec![(name.to_owned(), shards), (replica.clone(), copies)],
                false => vec![axis.clone()],
            };
            let axes = rules.mesh.axes().iter().flat_map(divided).collect::<Vec<_>>();
            let Ok(mesh) = Mesh::new(rules.mesh.name(), axes) else { return rules };
            for (_, axes) in &mut rules.rules {
                if let Some(at) = axes.iter().position(|axis| axis == name) {
                    axes.insert(at + 1, replica.clone());
                }
            }
            rules.mesh = mesh;
            own.push(name.to_owned());
        }
        for (_, axes) in rules.rules.iter_mut().filter(|(axis, _)| *axis == Axis::Kv) {
            axes.clone_from(&own);
        }
        rules
    }

    /// Returns the mesh axes of a logical axis.
    fn axes(&self, axis: Axis) -> Vec<&str> {
        let has_rule = self.rules.iter().any(|(of, _)| *of == axis);
        let (like, columns) = match axis {
            Axis::HeadsBias { columns } if !has_rule => (Axis::Heads, columns),
            Axis::KvBias { columns } if !has_rule => (Axis::Kv, columns),
            Axis::Packed { of, size } => {
                let axes = self.axes(*of);
                return if size.is_multiple_of(self.devices(&axes)) { axes } else { vec![] };
            }
            _ => return self.rule(axis).collect(),
        };
        let axes: Vec<&str> = self.rule(like).collect();
        let more = self.rule(Axis::Embed).filter(|axis| !axes.contains(axis));
        let all: Vec<&str> = axes.iter().copied().chain(more).collect();
        if columns.is_multiple_of(self.devices(&all)) { all } else { axes }
    }

    /// Returns the mesh axes of a logical axis in the table.
    fn rule(&self, axis: Axis) -> impl Iterator<Item = &str> {
        let found = self.rules.iter().find(|(of, _)| *of == axis);
        found.into_iter().flat_map(|(_, axes)| axes.iter().map(String::as_str))
    }

    /// Returns the number of devices along these mesh axes.
    fn devices(&self, axes: &[&str]) -> usize {
        axes.iter().filter_map(|name| self.mesh.size(name)).product()
    }

    /// Returns the number of shards of a dimension with this logical axis.
    pub fn parts(&self, axis: Axis) -> usize {
        self.devices(&self.axes(axis))
    }

    /// Returns the device mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns `true` if there are several devices; otherwise no tensor has a sharding.
    pub fn is_sharded(&self) -> bool {
        self.mesh.devices() > 1
    }

    /// Returns the sharding of a tensor with these logical axes: each mesh axis shards the first dimension that requests it. Dimensions that
    /// are `None` are not sharded. `None` on one device.
    pub fn sharding<A: Copy + Into<Option<Axis>>>(&self, dimensions: &[A]) -> Option<Sharding> {
        self.is_sharded().then(|| self.sharding_in_order(dimensions, 0..dimensions.len()))
    }

    /// Like [`AxisRules::sharding`], but each mesh axis shards the last dimension that requests it.
    pub(super) fn sharding_from_the_last(&self, dimensions: &[Axis]) -> Option<Sharding> {
        self.is_sharded().then(|| self.sharding_in_order(dimensions, (0..dimensions.len()).rev()))
    }

    fn sharding_in_order<A: Copy + Into<Option<Axis>>>(
        &self,
        dimensions: &[A],
        order: impl Iterator<Item = usize>,
    ) -> Sharding {
        let mut used: Vec<&str> = vec![];
        let mut axes: Vec<Vec<&str>> = vec![vec![]; dimensions.len()];
        for place in order {
            let asked = dimensions[place].into().map_or(vec![], |axis| self.axes(axis)).into_iter();
            axes[place] = asked.filter(|axis| !used.contains(axis)).collect();
            used.extend(&axes[place]);
        }
        legal(self.mesh.sharding(&axes.iter().map(Vec::as_slice).collect::<Vec<_>>()))
    }

    /// Returns the number of rows of an embedding of `vocab` tokens on all devices together. If the mesh axes of the vocabulary do not divide it,
    /// it is padded to a multiple of the number of devices: other meshes of these devices have the same padding.
    pub fn padded_vocab(&self, vocab: usize) -> usize {
        match vocab.is_multiple_of(self.parts(Axis::Vocab)) {
            true => vocab,
            false => vocab.next_multiple_of(self.mesh.devices()),
        }
    }

    /// Returns the parameter with the padding that it has on this mesh ([`Parameter::padding`]).
    ///
    /// ```
    /// use grpo_policy_pjrt::decoder::{AxisRules, parameters};
    ///
    /// let rules = AxisRules::new(&grpo_stablehlo::Mesh::new("mesh", [("fsdp", 4)])?);
    /// let config = grpo_models::ModelConfig { vocab_size: 53, hidden_size: 64, ..Default::default() };
    /// let embedding = rules.padded(parameters(&config).swap_remove(0));
    /// assert_eq!((&embedding.shape[..], embedding.file_shape()), (&[56, 64][..], vec![53, 64]));
    /// # Ok::<(), grpo_stablehlo::Error>(())
    /// ```
    #[must_use]
    pub fn padded(&self, mut parameter: Parameter) -> Parameter {
        if let ([Axis::Vocab, ..], [rows, ..]) = (&parameter.axes[..], &mut parameter.shape[..]) {
            let vocab = *rows - parameter.padding;
            *rows = self.padded_vocab(vocab);
            parameter.padding = *rows - vocab;
        }
        parameter
    }

    /// Returns the sharding of a parameter, whose vocabulary may be padded.
    ///
    /// # Errors
    /// [`Error::Split`] if another dimension is not divisible by its mesh axes.
    pub fn parameter(&self, parameter: &Parameter) -> Result<Sharding> {
        let sharding = self.sharding_in_order(&parameter.axes, 0..parameter.axes.len());
        sharding.part(&TensorType::new(Dtype::F32, self.padded(parameter.clone()).shape))?;
        Ok(sharding)
    }

    /// Returns the parameters with their padding ([`AxisRules::padded`]).
    pub(crate) fn all_padded(&self, table: Vec<Parameter>) -> Vec<Parameter> {
        table.into_iter().map(|parameter| self.padded(parameter)).collect()
    }

    /// Returns the number of elements of a parameter on each device, with padding; all of them if the parameter does not shard evenly.
    pub fn elements(&self, parameter: &Parameter) -> usize {
        self.shard(&self.padded(parameter.clone())).into_iter().product()
    }

    /// Returns the shape of a parameter's shard; the whole shape if it does not shard evenly.
    pub(crate) fn shard(&self, parameter: &Parameter) -> Vec<usize> {
        let part = |sharding: Sharding| sharding.part(&TensorType::new(Dtype::F32, &parameter.shape[..])).ok();
        self.sharding(&parameter.axes).and_then(part).map_or_else(|| parameter.shape.clone(), |part| part.shape)
    }
}

/// Returns a mesh or a sharding that a table of axis rules makes.
pub(super) fn legal<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|_| unreachable!("a table names axes of its mesh, and each of them once"))
}

/// Returns the greatest common divisor.
pub(crate) fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::{Role, parameters};
    use grpo_models::ModelConfig;
    use grpo_stablehlo::Builder;

    fn mesh(axes: &[(&str, usize)]) -> Mesh {
        Mesh::new("mesh", axes.iter().copied()).expect("a mesh")
    }

    #[test]
    fn every_parameter_is_sharded_by_its_axes() {
        let config = ModelConfig {
            vocab_size: 64,
            tie_word_embeddings: false,
            qk_norm: true,
            attention_bias: true,
            ..ModelConfig::default()
        };
        let rules = AxisRules::new(&mesh(&[("fsdp", 2), ("tensor", 2)]));
        for parameter in parameters(&config) {
            let sharding = rules.parameter(&parameter).expect("an even split");
            let part = sharding.part(&TensorType::new(Dtype::F32, &parameter.shape[..])).expect("a part");
            for ((whole, part), axis) in parameter.shape.iter().zip(&part.shape).zip(&parameter.axes) {
                // The vocabulary and biases take both axes of the mesh.
                let expected = match axis {
                    Axis::Vocab | Axis::HeadsBias { .. } | Axis::KvBias { .. } => 4,
                    Axis::Embed if parameter.axes.contains(&Axis::Vocab) => 1,
                    Axis::Layer | Axis::HeadDim => 1,
                    _ => 2,
                };
                assert_eq!(whole / part, expected, "{axis:?} of {}", parameter.name());
            }
            assert_eq!(rules.elements(&parameter), part.elements(), "{}", parameter.name());
        }
    }

    #[test]
    fn a_padded_vocabulary_is_the_same_on_all_meshes_of_the_devices() {
        let rules = |axes: &[(&str, usize)]| AxisRules::new(&mesh(axes));
        let padded = |axes: &[(&str, usize)], vocab| rules(axes).padded_vocab(vocab);
        assert_eq!([padded(&[("fsdp", 8)], 53), padded(&[("data", 4), ("tensor", 2)], 53)], [56, 56]);
        assert_eq!([padded(&[("fsdp", 8)], 151_936), padded(&[("data", 8)], 53)], [151_936, 53]);
        let config = ModelConfig { vocab_size: 53, tie_word_embeddings: false, ..ModelConfig::default() };
        let (eight, one) = (rules(&[("fsdp", 8)]), rules(&[("data", 8)]));
        for parameter in parameters(&config) {
            let padded = eight.padded(parameter.clone());
            assert_eq!(padded.padding, if parameter.axes[0] == Axis::Vocab { 3 } else { 0 }, "{}", parameter.name());
            assert_eq!((padded.file_shape(), padded.count()), (parameter.file_shape(), parameter.count()));
            assert_eq!((eight.padded(padded.clone()), one.padded(padded.clone())), (padded, parameter));
        }
    }

    #[test]
    fn a_device_has_whole_experts() {
        let experts = grpo_models::Experts { num_experts: 8, ..grpo_models::Experts::default() };
        let rules = AxisRules::new(&mesh(&[("fsdp", 2), ("tensor", 4)]));
        for clamped in [None, Some(grpo_models::ClampedSwiglu::default())] {
            let experts = grpo_models::Experts { clamped, ..experts.clone() };
            let config = ModelConfig { experts: Some(experts), ..ModelConfig::default() };
            for parameter in parameters(&config).iter().filter(|parameter| parameter.role.is_of_experts()) {
                let sharding = rules.parameter(parameter).expect("an even split");
                let part = sharding.part(&TensorType::new(Dtype::F32, &parameter.shape[..])).expect("a part");
                let [layers, rest @ ..] = &parameter.shape[..] else { panic!("{parameter:?}") };
                assert_eq!(part.shape, [&[*layers, 1], &rest[1..]].concat(), "{}", parameter.name());
            }
        }
    }

    #[test]
    fn devices_hold_copies_of_key_value_heads_that_are_fewer_than_shards() {
        let of = |axes: &[(&str, usize)], num_attention_heads, num_key_value_heads| {
            let config = ModelConfig { num_attention_heads, num_key_value_heads, ..ModelConfig::default() };
            let rules = AxisRules::new(&mesh(axes));
            let found = rules.clone().for_model(&config);
            assert_eq!(found.clone().for_model(&config), found, "twice is once");
            let same = [Axis::Batch, Axis::Embed, Axis::Heads, Axis::Mlp, Axis::Vocab, Axis::Length];
            assert_eq!(same.map(|axis| rules.parts(axis)), same.map(|axis| found.parts(axis)));
            let axes: Vec<String> = found.mesh().axes().iter().map(|(name, size)| format!("{name} {size}")).collect();
            (axes.join(" x "), found.parts(Axis::Kv))
        };
        let found = |text: &str, parts: usize| (text.to_owned(), parts);
        assert_eq!(of(&[("fsdp", 2), ("tensor", 4)], 8, 4), found("fsdp 2 x tensor 4", 4));
        assert_eq!(of(&[("fsdp", 2), ("tensor", 4)], 8, 2), found("fsdp 2 x tensor 2 x tensor_replica 2", 2));
        assert_eq!(of(&[("tensor", 4), ("data", 2)], 8, 1), found("tensor 4 x data 2", 1));
        assert_eq!(of(&[("tensor", 4)], 12, 6), found("tensor 2 x tensor_replica 2", 2));
    }

    /// A device has its query heads and their key/value head, for every number of heads.
    #[test]
    fn query_heads_are_on_the_device_of_their_key_value_head() {
        for (heads, kv, tensor) in [(8, 2, 4), (8, 4, 8), (6, 1, 3), (8, 2, 8), (4, 4, 2)] {
            let config = ModelConfig { num_attention_heads: heads, num_key_value_heads: kv, ..ModelConfig::default() };
            let rules = AxisRules::new(&mesh(&[("fsdp", 2), ("tensor", tensor)])).for_model(&config);
            let range = |axes: &[Axis], shape: &[usize], device| {
                let sharding = rules.sharding(axes).expect("a sharding");
                sharding.range(&TensorType::new(Dtype::F32, shape), device).expect("an even split")
            };
            for device in 0..2 * tensor {
                let columns = range(&[Axis::Heads], &[heads], device)[0].clone();
                let grouped = range(&[Axis::Kv, Axis::Heads], &[kv, heads / kv], device);
                let own = range(&[Axis::Kv], &[kv], device)[0].clone();
                assert_eq!(grouped[0], own, "{heads} {kv} {tensor}");
                let of_groups: Vec<usize> =
                    own.flat_map(|group| grouped[1].clone().map(move |head| group * (heads / kv) + head)).collect();
                assert_eq!(of_groups, columns.collect::<Vec<_>>(), "{heads} {kv} {tensor}: device {device}");
            }
        }
    }

    #[test]
    fn biases_are_whole_along_axes_that_do_not_divide_them() {
        let config = ModelConfig {
            attention_bias: true,
            hidden_size: 48,
            num_attention_heads: 6,
            num_key_value_heads: 2,
            vocab_size: 60,
            ..ModelConfig::default()
        };
        let rules = AxisRules::new(&mesh(&[("fsdp", 3), ("tensor", 2)]));
        let table = parameters(&config);
        let axes = |role| {
            let bias = table.iter().find(|parameter| parameter.role == role).expect("a bias");
            let sharding = rules.parameter(bias).expect("an even split");
            (bias.shape[1], sharding.axes(1).into_iter().map(str::to_owned).collect::<Vec<_>>())
        };
        assert_eq!(axes(Role::QBias), (48, vec!["tensor".to_owned(), "fsdp".to_owned()]));
        assert_eq!(axes(Role::KBias), (16, vec!["tensor".to_owned()]));
        let rules = rules.clone().with(Axis::Embed, &[]).expect("a table");
        assert_eq!(rules.parts(Axis::HeadsBias { columns: 48 }), 2);
    }

    #[test]
    fn rules_use_the_axes_of_the_mesh() {
        let rules = AxisRules::new(&mesh(&[("data", 2)]));
        let axes = |rules: &AxisRules, axis| {
            let sharding = rules.sharding(&[axis]).expect("a sharding");
            sharding.axes(0).into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!((axes(&rules, Axis::Batch), axes(&rules, Axis::Mlp)), (vec!["data".to_owned()], vec![]));
        let rules = rules.with(Axis::Mlp, &["data"]).expect("a table");
        assert_eq!(axes(&rules, Axis::Mlp), ["data"]);
        let error = rules.clone().with(Axis::Mlp, &["tensor"]).expect_err("no such axis").to_string();
        assert_eq!(error, "axis `tensor` of mesh `mesh`: one of data expected");
        let error = rules.clone().with(Axis::Layer, &["data"]).expect_err("layers").to_string();
        assert!(error.starts_with("axis `data` of mesh `mesh`: layers are on every device"), "{error}");
        assert!(rules.with(Axis::Layer, &[]).is_ok());
        let seven = AxisRules::new(&mesh(&[("tensor", 7)]));
        let table = parameters(&ModelConfig::default());
        let sharded =
            |role| seven.parameter(table.iter().find(|parameter| parameter.role == role).expect("a parameter"));
        assert!(matches!(sharded(Role::GateProj), Err(Error::Split { .. })));
        assert!(sharded(Role::EmbedTokens).is_ok(), "a vocabulary is padded");
    }

    #[test]
    fn one_device_has_no_sharding_in_its_program() {
        let text = |devices: usize| {
            let rules = AxisRules::new(&mesh(&[("fsdp", devices), ("tensor", 1)]));
            let f = Builder::new();
            let x = f.argument("x", TensorType::new(Dtype::F32, [4, 8]));
            rules.argument(&x, &[Axis::Batch, Axis::Embed]);
            let y = rules.constrain(&x.tanh(), &[Axis::Batch, Axis::Embed]);
            rules.finish(f, "rows", [("y", &y)]).expect("a program").to_string()
        };
        assert!(text(2).contains("sdy.sharding_constraint %1 <@mesh, [{\"fsdp\"}, {}]>"), "{}", text(2));
        assert!(!text(1).contains("sdy") && text(1).contains("mhlo.num_partitions = 1"), "{}", text(1));
    }
}
