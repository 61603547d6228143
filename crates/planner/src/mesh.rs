//! The meshes of a run on several devices: of training, and of sampling.

use crate::error::Result;
use crate::{Devices, of_sizes, rollout_rules, training_rules};
use grpo_models::ModelConfig;
use grpo_policy_pjrt::common_refinement;
use grpo_policy_pjrt::decoder::{Axis, AxisRules};
use grpo_run_config::{LogicalAxisRules, MeshAxis, MeshChoice, MeshConfig, PolicyConfig, TrainConfig, check};
use grpo_stablehlo::Mesh;

/// The meshes of a run and their axis rules. Both meshes have the same devices; by default one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MeshRules {
    /// The rules of training and scoring.
    pub training: AxisRules,
    /// The rules of sampling.
    pub rollout: AxisRules,
}

/// Returns the number of devices of a run's mesh, if the configuration says it: `policy.devices`, or the product of the axes.
pub fn configured_devices(policy: &PolicyConfig) -> Option<usize> {
    match (policy.devices, &policy.mesh) {
        (Some(devices), _) => Some(devices),
        (None, Some(MeshChoice::Axes(axes))) => axes.devices(),
        (None, _) => None,
    }
}

impl MeshRules {
    /// Returns the meshes of a run with this configuration and model, for prompts of up to `prompt` tokens, on `available` devices, of which it
    /// may use fewer; `None` without `policy.mesh`.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for a mesh of more devices, and for an axis that does not divide the model's dimensions, with its legal sizes.
    pub fn within(
        config: &TrainConfig,
        shape: &ModelConfig,
        prompt: usize,
        available: &Devices,
    ) -> Result<Option<Self>> {
        let count = configured_devices(&config.policy).unwrap_or(available.count);
        let expected = format!("at most {} devices", available.count);
        check(count <= available.count, "policy.mesh", &expected, format!("{count} devices"))?;
        Self::of(config, shape, prompt, &available.first(count))
    }

    /// Returns the meshes of a run on all of these devices; `None` without `policy.mesh`.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for an axis that does not divide the model's dimensions, with its legal sizes.
    pub fn of(config: &TrainConfig, shape: &ModelConfig, prompt: usize, devices: &Devices) -> Result<Option<Self>> {
        let Some(choice) = &config.policy.mesh else { return Ok(None) };
        let table = &config.policy.logical_axis_rules;
        let training = match choice {
            MeshChoice::Axes(mesh) => {
                checked("policy.mesh", mesh.on_devices("policy.mesh", devices.count)?, shape, table)?
            }
            MeshChoice::Auto => training_rules(config, shape, prompt, devices)?,
        };
        let rollout = match &config.rollout.mesh {
            Some(MeshChoice::Axes(mesh)) => {
                let rollout = checked("rollout.mesh", mesh.on_devices("rollout.mesh", devices.count)?, shape, table)?;
                let expected =
                    "a mesh whose groups of neighbouring devices contain, or are contained in, those of policy.mesh";
                check(can_move(shape, &training, &rollout), "rollout.mesh", expected, rollout.mesh())?;
                rollout
            }
            Some(MeshChoice::Auto) | None => rollout_rules(config, shape, prompt, &training, devices)?,
        };
        Ok(Some(Self { training, rollout }))
    }
}

/// Returns the default axis rules of a mesh without -1, for programs outside of a run. Errors name it `key`.
///
/// # Errors
/// [`crate::Error::Config`] for an axis that is -1.
pub fn default_axis_rules(key: &str, mesh: &MeshConfig) -> Result<AxisRules> {
    let devices = mesh.devices();
    check(devices.is_some(), key, "1 or more devices on every axis", "-1")?;
    rules(*mesh, &LogicalAxisRules::default())
}

/// Returns the rules of a mesh whose sizes divide the model's dimensions.
pub(crate) fn checked(key: &str, mesh: MeshConfig, shape: &ModelConfig, table: &LogicalAxisRules) -> Result<AxisRules> {
    for (axis, size) in mesh.axes() {
        let size = usize::try_from(size).unwrap_or(0);
        let alone = |size| rules(of_sizes(MeshAxis::ALL.map(|other| if other == axis { size } else { 1 })), table);
        if alone(size)?.check_model(shape).is_err() {
            let legal =
                (1..=size.max(64)).filter(|size| alone(*size).is_ok_and(|rules| rules.check_model(shape).is_ok()));
            let legal: Vec<String> = legal.map(|size| size.to_string()).collect();
            let expected = format!("a number that divides the model ({}): {}", dimensions(shape), legal.join(", "));
            check(false, &format!("{key}.{}", axis.name()), &expected, size)?;
        }
    }
    let all = rules(mesh, table)?;
    if let Err(error) = all.check_model(shape) {
        // Each axis fits alone, but a dimension does not divide by their product.
        let expected = format!(
            "axes whose product divides what they shard, or policy.logical_axis_rules such as {{expert: [tensor]}} ({error})"
        );
        check(false, key, &expected, all.mesh())?;
    }
    Ok(all)
}

/// Returns `true` if a program can move the weights of a model from one mesh to the other.
pub(crate) fn can_move(shape: &ModelConfig, from: &AxisRules, to: &AxisRules) -> bool {
    let [from, to] = [from, to].map(|rules| rules.clone().for_model(shape));
    common_refinement(from.mesh(), to.mesh()).is_ok()
}

fn dimensions(shape: &ModelConfig) -> String {
    let ModelConfig { hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, .. } = shape;
    let linear =
        shape.linear_attention.map(|sizes| format!(", {} key heads of Gated DeltaNets", sizes.linear_num_key_heads));
    let mlp = match &shape.experts {
        Some(experts) => {
            format!("{} experts, moe_intermediate_size {}", experts.num_experts, experts.moe_intermediate_size)
        }
        None => format!("intermediate_size {intermediate_size}"),
    };
    format!(
        "hidden_size {hidden_size}, {mlp}, {num_attention_heads} heads, {num_key_value_heads} key/value heads{}",
        linear.unwrap_or_default()
    )
}

/// Returns the axis rules of a mesh without -1.
fn rules(mesh: MeshConfig, table: &LogicalAxisRules) -> Result<AxisRules> {
    let mesh = Mesh::new("mesh", mesh.axes().map(|(axis, size)| (axis.name(), usize::try_from(size).unwrap_or(0))))?;
    let LogicalAxisRules { batch, embed, heads, kv, mlp, expert, vocab, length } = table;
    let changes = [
        (Axis::Batch, batch),
        (Axis::Embed, embed),
        (Axis::Heads, heads),
        (Axis::Kv, kv),
        (Axis::LinearHeads, heads),
        (Axis::Mlp, mlp),
        (Axis::Experts, expert),
        (Axis::Vocab, vocab),
        (Axis::Length, length),
    ];
    let mut rules = AxisRules::new(&mesh);
    for (axis, names) in changes.into_iter().filter_map(|(axis, names)| Some((axis, names.as_ref()?))) {
        let names: Vec<&str> = names.iter().map(|name| name.name()).collect();
        rules = rules.with(axis, &names)?;
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_backend_tpu::plugins::Kind;

    /// Tokens of a prompt.
    const PROMPT: usize = 1000;

    /// Returns the dimensions of Qwen2.5-7B.
    fn shape() -> ModelConfig {
        ModelConfig {
            vocab_size: 152_064,
            hidden_size: 3584,
            intermediate_size: 18_944,
            num_hidden_layers: 28,
            num_attention_heads: 28,
            num_key_value_heads: 4,
            ..ModelConfig::default()
        }
    }

    fn of(settings: &str, shape: &ModelConfig) -> Result<[Vec<usize>; 2]> {
        let layers = grpo_files::Layers::new()
            .text("a test", "{policy: {device: 'pjrt:tpu', dtype: bfloat16}, rollout: {max_completion_length: 1000}}")
            .unwrap();
        let config = TrainConfig::from_layers(layers.text("a test", settings).unwrap()).unwrap();
        let devices = configured_devices(&config.policy).unwrap_or(8);
        let devices = Devices::assumed(Kind::Tpu, devices);
        let MeshRules { training, rollout } = MeshRules::of(&config, shape, PROMPT, &devices)?.unwrap();
        let sizes = |rules: &AxisRules| rules.mesh().axes().iter().map(|(_, size)| *size).collect();
        Ok([sizes(&training), sizes(&rollout)])
    }

    #[test]
    fn a_mesh_has_the_sizes_of_its_keys_or_of_the_planner() {
        let of = |settings: &str| of(settings, &shape()).unwrap();
        assert_eq!(of("{policy: {mesh: {fsdp: -1}}}"), [[1, 8, 1], [2, 1, 4]]);
        assert_eq!(of("{policy: {mesh: {fsdp: 2, tensor: 4}}}"), [[1, 2, 4], [2, 1, 4]]);
        assert_eq!(of("{policy: {mesh: {data: 2, fsdp: 2}}}"), [[2, 2, 1], [1, 1, 4]]);
        assert_eq!(of("{policy: {mesh: {fsdp: 8}}, rollout: {mesh: {data: 4, tensor: 2}}}")[1], [4, 1, 2]);
        assert_eq!(of("{policy: {mesh: auto}}")[0], [1, 8, 1]);
        assert_eq!(of("{policy: {mesh: auto, devices: 16}}")[0], [1, 16, 1]);
        // Two rows of a micro-batch for eight devices.
        let few =
            "{policy: {mesh: auto}, grpo: {prompts_per_step: 1, num_generations: 2, gradient_accumulation_steps: 1}}";
        assert_eq!(of(few)[0], [1, 2, 4]);
        // One device is no mesh of several.
        assert_eq!(of("{policy: {mesh: {}}}"), [[1, 1, 1], [1, 1, 1]]);
    }

    #[test]
    fn a_mesh_that_does_not_divide_the_model_is_an_error_with_the_legal_sizes() {
        let of = |settings: &str, shape: &ModelConfig| of(settings, shape).unwrap_err().to_string();
        let error = of("{policy: {mesh: {tensor: 8}}}", &shape());
        assert!(
            error.contains("policy.mesh.tensor") && error.contains("4 key/value heads") && error.contains(": 1, 2, 4"),
            "{error}"
        );
        let mixed = ModelConfig {
            linear_attention: Some(grpo_models::LinearAttention::default()),
            layers: vec![grpo_models::LayerSpec::GATED_DELTA_NET, grpo_models::LayerSpec::default()],
            ..shape()
        };
        let error = of("{policy: {mesh: {tensor: 4}}}", &mixed);
        assert!(error.contains("2 key heads of Gated DeltaNets") && error.contains(": 1, 2"), "{error}");
        let experts = grpo_models::Experts { num_experts: 6, ..grpo_models::Experts::default() };
        let experts = ModelConfig { experts: Some(experts), ..shape() };
        for axis in ["fsdp", "tensor"] {
            let error = of(&format!("{{policy: {{mesh: {{{axis}: 4}}}}}}"), &experts);
            assert!(error.contains("6 experts") && error.ends_with(": 1, 2, got 4"), "{error}");
        }
        let rules = "{policy: {mesh: {fsdp: 4, tensor: 2}, logical_axis_rules: {expert: [tensor]}}}";
        assert!(self::of(rules, &experts).is_ok());
        let error = of("{policy: {mesh: {fsdp: 3}}}", &shape());
        assert!(error.contains("policy.mesh.fsdp") && error.contains(": 1, 2, 4, 7, 8, 14"), "{error}");
        let error = of("{policy: {mesh: {fsdp: 2}, devices: 2}, rollout: {mesh: {data: 4}}}", &shape());
        assert!(error.contains("rollout.mesh") && error.contains("number of devices, 2"), "{error}");
        let error = of("{policy: {mesh: {fsdp: 2, tensor: 2}}}", &experts);
        assert!(error.contains("policy.logical_axis_rules") && error.contains("experts.gate_proj"), "{error}");
        let six = ModelConfig {
            num_key_value_heads: 6,
            num_attention_heads: 6,
            hidden_size: 24,
            intermediate_size: 24,
            vocab_size: 36,
            ..ModelConfig::default()
        };
        let error = of("{policy: {mesh: {fsdp: 3, tensor: 2}}, rollout: {mesh: {data: 2, tensor: 3}}}", &six);
        assert!(error.contains("rollout.mesh") && error.contains("neighbouring devices"), "{error}");
    }

    #[test]
    fn tensor_shards_may_exceed_the_key_value_heads() {
        let few = ModelConfig { hidden_size: 1536, num_attention_heads: 12, num_key_value_heads: 2, ..shape() };
        let of = |settings: &str, shape: &ModelConfig| of(settings, shape).unwrap();
        assert_eq!(of("{policy: {mesh: {fsdp: 2, tensor: 4}}}", &few)[0], [1, 2, 4]);
        let two_rows =
            "{policy: {mesh: auto}, grpo: {prompts_per_step: 1, num_generations: 2, gradient_accumulation_steps: 1}}";
        assert_eq!(of(two_rows, &few)[0], [1, 2, 4]);
        let one = ModelConfig { num_attention_heads: 16, num_key_value_heads: 1, hidden_size: 2048, ..shape() };
        assert_eq!(of("{policy: {mesh: {tensor: 8}}, rollout: {mesh: {tensor: 8}}}", &one), [[1, 1, 8], [1, 1, 8]]);
    }

    #[test]
    fn a_vocabulary_that_no_mesh_divides_is_legal_on_every_mesh() {
        // The embeddings of Qwen2.5, resized to its tokenizer.
        let resized = ModelConfig { vocab_size: 151_665, ..shape() };
        let of = |settings: &str| of(settings, &resized).unwrap();
        assert_eq!(of("{policy: {mesh: {fsdp: -1}}}"), [[1, 8, 1], [2, 1, 4]]);
        assert_eq!(of("{policy: {mesh: {fsdp: 2, tensor: 4}, logical_axis_rules: {vocab: []}}}")[0], [1, 2, 4]);
        assert_eq!(of("{policy: {mesh: auto}}"), [[1, 8, 1], [2, 1, 4]]);
    }
}
