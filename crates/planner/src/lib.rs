#![doc = include_str!("../README.md")]
//! [`plan`] tries all of them for `grpo plan`; `policy.mesh: auto` ranks the meshes for the other settings of its run.
#![forbid(unsafe_code)]

mod cost;
mod devices;
mod error;
mod mesh;
mod model;
mod options;

pub use cost::Cost;
pub use devices::Devices;
pub use error::{Error, Result};
pub use mesh::{MeshRules, configured_devices, default_axis_rules};
pub use options::{policy_options, trained, training_sizes};

use grpo_core::readable_bytes;
use grpo_models::{Dtype, ModelConfig, Trained};
use grpo_policy::OptimizerBounds;
use grpo_policy_pjrt::decoder::AxisRules;
use grpo_policy_pjrt::{PjrtPolicyOptions, TrainShape};
use grpo_run_config::{MeshChoice, MeshConfig, PolicyDtype, RecomputeGranularity, TrainConfig};
use mesh::{can_move, checked};
use model::CostModel;
use options::sizes_of;
use serde::Serialize;
use serde_json::{Value, json};

/// The settings of a run that the planner chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Settings {
    /// `policy.mesh`.
    pub mesh: MeshConfig,
    /// `rollout.mesh`.
    pub rollout_mesh: MeshConfig,
    /// `grpo.gradient_accumulation_steps`, the number of micro-batches of an update.
    pub gradient_accumulation_steps: usize,
    /// `policy.recompute_granularity`.
    pub recompute_granularity: RecomputeGranularity,
    /// `policy.recompute_num_layers`.
    pub recompute_num_layers: usize,
}

/// Settings with their predicted cost on each device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Candidate {
    /// The settings.
    #[serde(flatten)]
    pub settings: Settings,
    /// The number of sequences of a micro-batch.
    pub micro_batch: usize,
    /// The cost of an update: the gradients of its micro-batches, and AdamW.
    pub update: Cost,
    /// The cost of the log-probabilities of a micro-batch.
    pub score: Cost,
    /// The cost of a rollout of as many sequences as decode in parallel, each of full length.
    pub rollout: Cost,
    /// The time of a step: rollouts, scores and updates, as often as configured.
    pub step_seconds: f64,
    /// The memory of each device.
    pub memory_bytes: u64,
    /// `true` if the memory fits.
    pub fits: bool,
}

/// Meshes that are illegal for the same reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Illegal {
    /// The meshes.
    pub meshes: Vec<MeshConfig>,
    /// The reason, with the legal sizes.
    pub reason: String,
}

/// The settings that the planner tried.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// The candidates that fit, fastest first; then those that do not, smallest first.
    pub candidates: Vec<Candidate>,
    /// The meshes that were left out.
    pub illegal: Vec<Illegal>,
}

impl Settings {
    /// Returns the settings of a configuration on these meshes.
    fn of(config: &TrainConfig, meshes: &MeshRules) -> Self {
        Self {
            mesh: mesh_config(&meshes.training),
            rollout_mesh: mesh_config(&meshes.rollout),
            gradient_accumulation_steps: config.grpo.gradient_accumulation_steps,
            recompute_granularity: config.policy.recompute_granularity,
            recompute_num_layers: config.policy.recompute_num_layers,
        }
    }

    /// Returns a configuration with these settings.
    #[must_use]
    pub fn applied_to(&self, config: &TrainConfig) -> TrainConfig {
        let mut config = config.clone();
        config.policy.mesh = Some(MeshChoice::Axes(self.mesh));
        config.rollout.mesh = Some(MeshChoice::Axes(self.rollout_mesh));
        config.policy.devices = None;
        config.grpo.gradient_accumulation_steps = self.gradient_accumulation_steps;
        config.policy.recompute_granularity = self.recompute_granularity;
        config.policy.recompute_num_layers = self.recompute_num_layers;
        config
    }

    /// Returns the keys of a configuration with these settings.
    pub fn keys(&self) -> Value {
        json!({
            "policy": {
                "mesh": self.mesh,
                "recompute_granularity": self.recompute_granularity,
                "recompute_num_layers": self.recompute_num_layers,
            },
            "rollout": { "mesh": self.rollout_mesh },
            "grpo": { "gradient_accumulation_steps": self.gradient_accumulation_steps },
        })
    }
}

impl Plan {
    /// Returns the best candidate of every mesh, in the order of [`Plan::candidates`].
    pub fn by_mesh(&self) -> Vec<&Candidate> {
        first_of_each_mesh(&self.candidates, |candidate| candidate.settings.mesh)
    }
}

/// Returns the first item of every mesh, in order.
pub fn first_of_each_mesh<T>(items: &[T], mesh: impl Fn(&T) -> MeshConfig) -> Vec<&T> {
    let is_first = |at: &usize| items[..*at].iter().all(|other| mesh(other) != mesh(&items[*at]));
    (0..items.len()).filter(is_first).map(|at| &items[at]).collect()
}

/// Ranks all legal meshes of all `devices`, micro-batches and recomputations for a run with prompts of up to `prompt` tokens. Meshes,
/// micro-batches and recomputation of `config` are ignored.
///
/// Recomputation is `full`, with every layer's input saved or with as few inputs as groups of layers allow, `except_attention` where
/// attention is blockwise, or, for whole weights, `selective` or `none`: [`grpo_policy_pjrt::saved_bytes`] does not count the products of adapters.
///
/// # Errors
/// [`crate::Error::Model`] for LoRA targets that the model does not have; [`crate::Error::Policy`] if the programs of the model cannot be built.
pub fn plan(config: &TrainConfig, shape: &ModelConfig, prompt: usize, devices: &Devices) -> Result<Plan> {
    let mut illegal: Vec<Illegal> = vec![];
    let (mut candidates, trained) = (vec![], trained(config, shape)?);
    let recomputations = recomputations(config, shape, prompt)?;
    for mesh in factorizations(devices.count) {
        let training = match checked("policy.mesh", mesh, shape, &config.policy.logical_axis_rules) {
            Ok(rules) => rules,
            Err(error) => {
                let reason = error.to_string();
                match illegal.iter_mut().find(|group| group.reason == reason) {
                    Some(group) => group.meshes.push(mesh),
                    None => illegal.push(Illegal { meshes: vec![mesh], reason }),
                }
                continue;
            }
        };
        let rollout = rollout_rules(config, shape, prompt, &training, devices)?;
        let meshes = MeshRules { training, rollout };
        for steps in divisors(sequences_of_update(config)) {
            let mut config = config.clone();
            config.grpo.gradient_accumulation_steps = steps;
            for recomputation in &recomputations {
                recomputation.apply_to(&mut config);
                let saved = recomputation.saved_bytes;
                candidates.push(candidate(&config, shape, prompt, trained, &meshes, devices, saved)?);
            }
        }
    }
    rank(&mut candidates);
    Ok(Plan { candidates, illegal })
}

/// Returns the axis rules of training for `policy.mesh: auto`, and logs the reason.
///
/// # Errors
/// The errors of [`plan`].
fn training_rules(config: &TrainConfig, shape: &ModelConfig, prompt: usize, devices: &Devices) -> Result<AxisRules> {
    let (table, saved) = (&config.policy.logical_axis_rules, saved_bytes(config, shape, prompt)?);
    let (mut candidates, trained) = (vec![], trained(config, shape)?);
    for mesh in factorizations(devices.count) {
        let Ok(training) = checked("policy.mesh", mesh, shape, table) else { continue };
        let rollout = rollout_rules(config, shape, prompt, &training, devices)?;
        let meshes = MeshRules { training, rollout };
        candidates.push(candidate(config, shape, prompt, trained, &meshes, devices, saved)?);
    }
    rank(&mut candidates);
    let text = |candidate: &Candidate| {
        let (mesh, seconds) = (candidate.settings.mesh, candidate.step_seconds);
        let bytes = readable_bytes(candidate.memory_bytes);
        let fits = if candidate.fits { "" } else { ", which does not fit" };
        format!("{mesh} ({seconds:.3} s per step and {bytes} per device{fits})")
    };
    let others: Vec<String> = candidates.iter().skip(1).take(2).map(&text).collect();
    // A copy of the weights on every device is legal for every model.
    let best = candidates.first().map_or(of_sizes([devices.count, 1, 1]), |best| best.settings.mesh);
    tracing::info!(
        "policy.mesh: auto is {}, predicted for {} devices like {}; next are {}",
        candidates.first().map_or_else(|| best.to_string(), text),
        devices.count,
        devices.chip.name,
        if others.is_empty() { "none".to_owned() } else { others.join(", ") }
    );
    checked("policy.mesh", best, shape, table)
}

/// Returns the axis rules on which sampling is predicted to be fastest. Weights are copied over `data` and sharded over `tensor`; a mesh that
/// the weights cannot be moved to is left out.
///
/// # Errors
/// The errors of [`plan`].
fn rollout_rules(
    config: &TrainConfig,
    shape: &ModelConfig,
    prompt: usize,
    training: &AxisRules,
    devices: &Devices,
) -> Result<AxisRules> {
    let (table, options) = (&config.policy.logical_axis_rules, policy_options(config, shape)?);
    let mut best: Option<(f64, AxisRules)> = None;
    for tensor in divisors(devices.count).into_iter().rev() {
        let mesh = of_sizes([devices.count / tensor, 1, tensor]);
        let Ok(rollout) = checked("rollout.mesh", mesh, shape, table) else { continue };
        if !can_move(shape, training, &rollout) {
            continue;
        }
        let meshes = MeshRules { training: training.clone(), rollout };
        let seconds = CostModel::new(config, shape, prompt, &meshes, devices, &options).rollout().seconds();
        if best.as_ref().is_none_or(|(least, _)| seconds < *least) {
            best = Some((seconds, meshes.rollout));
        }
    }
    // Without another legal mesh, sampling uses the mesh of training.
    Ok(best.map_or_else(|| training.clone(), |(_, rules)| rules))
}

/// Returns the number of tokens of the longest prompt as far as the configuration limits it: `data.max_prompt_length`, or what
/// `rollout.max_completion_length` leaves of the context.
pub fn longest_prompt(config: &TrainConfig, shape: &ModelConfig) -> usize {
    let room = shape.max_position_embeddings.saturating_sub(config.rollout.max_completion_length()).max(1);
    config.data.max_prompt_length.unwrap_or(room).min(room)
}

/// Returns `true` if an update is one program: it has one micro-batch, and gradient clipping bounds its values below overflow.
pub fn is_one_program(config: &TrainConfig) -> bool {
    let optimizer = &config.optimizer;
    let first = optimizer.settings.step(1, optimizer.learning_rate);
    config.grpo.gradient_accumulation_steps == 1 && OptimizerBounds::of_largest(0.0).after(&first).is_some()
}

/// Predicts the cost of a configuration on these meshes, whose layers save these bytes for a row.
fn candidate(
    config: &TrainConfig,
    shape: &ModelConfig,
    prompt: usize,
    trained: Trained,
    meshes: &MeshRules,
    devices: &Devices,
    saved_bytes: u64,
) -> Result<Candidate> {
    let options = PjrtPolicyOptions { rollout_rules: Some(meshes.rollout.clone()), ..policy_options(config, shape)? };
    let model = CostModel::new(config, shape, prompt, meshes, devices, &options).saving(saved_bytes);
    let weights = match config.policy.dtype {
        PolicyDtype::Bfloat16 if config.lora.is_some() => Dtype::Bf16,
        _ => Dtype::F32,
    };
    let sizes = sizes_of(config, weights, prompt, trained);
    let mut table = sizes.memory_with(shape, &options, &meshes.training, saved_bytes);
    table.push_in("micro-batches", "temporaries of a layer", model.temporary_bytes());
    let (update, score, rollout) = (model.update(), model.score(), model.rollout());
    let grpo = &config.grpo;
    let sequences = grpo.sequences();
    let rollouts = sequences.div_ceil(sequences.min(config.rollout.batch_size).max(1));
    let scores = config.scorings() * sequences.div_ceil(grpo.micro_batch_sequences().max(1));
    let step = rollout * rollouts + score * scores + update * grpo.updates();
    // Such an update leaves no gradients on the device for the rollout.
    let absent = if is_one_program(config) { model.gradient_bytes() } else { 0 };
    let sum = |rows: &[(String, u64)]| rows.iter().fold(0_u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
    let permanent = sum(table.rows());
    let phases = table.phases().iter().map(|(name, rows)| match name.as_str() {
        "sampling" => sum(rows).saturating_sub(absent),
        _ => sum(rows),
    });
    let memory_bytes = permanent.saturating_add(phases.max().unwrap_or(0));
    Ok(Candidate {
        settings: Settings::of(config, meshes),
        micro_batch: grpo.micro_batch_sequences(),
        update,
        score,
        rollout,
        step_seconds: step.seconds(),
        memory_bytes,
        fits: memory_bytes <= devices.memory,
    })
}

/// Sorts candidates that fit by time and the others by memory; of equal ones, those with more `fsdp` come first.
fn rank(candidates: &mut [Candidate]) {
    candidates.sort_by(|a, b| {
        let fits = b.fits.cmp(&a.fits);
        let by_time = || a.step_seconds.total_cmp(&b.step_seconds);
        let by_memory = || a.memory_bytes.cmp(&b.memory_bytes);
        let by_cost = || if a.fits { by_time().then_with(by_memory) } else { by_memory().then_with(by_time) };
        fits.then_with(by_cost).then_with(|| b.settings.mesh.fsdp.cmp(&a.settings.mesh.fsdp))
    });
}

/// Returns the meshes of `count` devices.
fn factorizations(count: usize) -> Vec<MeshConfig> {
    let with = |tensor: usize| {
        divisors(count / tensor).into_iter().map(move |data| of_sizes([data, count / tensor / data, tensor]))
    };
    divisors(count).into_iter().flat_map(with).collect()
}

/// Returns the divisors of a number, ascending.
fn divisors(number: usize) -> Vec<usize> {
    let small: Vec<usize> = (1..=number.isqrt()).filter(|divisor| number.is_multiple_of(*divisor)).collect();
    let large = small.iter().rev().map(|divisor| number / divisor).filter(|divisor| divisor * divisor > number);
    small.iter().copied().chain(large).collect()
}

/// Returns the number of sequences of an update.
fn sequences_of_update(config: &TrainConfig) -> usize {
    config.grpo.prompts_per_step.div_ceil(config.grpo.steps_per_generation) * config.grpo.num_generations
}

/// A recomputation setting and the activations that it saves.
#[derive(Clone, Copy, Debug)]
struct Recomputation {
    granularity: RecomputeGranularity,
    num_layers: usize,
    /// The bytes of the activations that the layers save for a row of a micro-batch, besides their inputs.
    saved_bytes: u64,
}

impl Recomputation {
    fn apply_to(&self, config: &mut TrainConfig) {
        config.policy.recompute_granularity = self.granularity;
        config.policy.recompute_num_layers = self.num_layers;
    }
}

/// Returns the recomputations to try.
fn recomputations(config: &TrainConfig, shape: &ModelConfig, prompt: usize) -> Result<Vec<Recomputation>> {
    use RecomputeGranularity::{ExceptAttention, Full, None, Selective};
    let layers = shape.num_hidden_layers;
    let mut all = vec![(Full, 1)];
    // The group size with the fewest saved inputs: one per group, and one per layer of a single group.
    let groups = divisors(layers).into_iter().filter(|group| *group > 1 && layers / group + group < layers);
    all.extend(groups.min_by_key(|group| layers / group + group).map(|group| (Full, group)));
    let attention = policy_options(config, shape)?.attention;
    all.extend(attention.block(row_length(config, prompt)).map(|_| (ExceptAttention, 1)));
    if config.lora.is_none() {
        all.extend([(Selective, 1), (None, 1)]);
    }
    let recomputation = |(granularity, num_layers)| {
        let mut recomputation = Recomputation { granularity, num_layers, saved_bytes: 0 };
        let mut config = config.clone();
        recomputation.apply_to(&mut config);
        recomputation.saved_bytes = saved_bytes(&config, shape, prompt)?;
        Ok(recomputation)
    };
    all.into_iter().map(recomputation).collect()
}

/// Returns the bytes of the activations that the layers save for a row of a micro-batch, without their inputs.
fn saved_bytes(config: &TrainConfig, shape: &ModelConfig, prompt: usize) -> Result<u64> {
    Ok(grpo_policy_pjrt::saved_bytes(shape, &policy_options(config, shape)?, row_length(config, prompt))?)
}

/// Returns the number of tokens of a row of a micro-batch, which does not depend on the number of rows.
fn row_length(config: &TrainConfig, prompt: usize) -> usize {
    TrainShape::uniform(1, prompt, config.rollout.max_completion_length()).length
}

/// Returns the axis sizes of axis rules.
fn mesh_config(rules: &AxisRules) -> MeshConfig {
    let size = |axis: &str| rules.mesh().size(axis).unwrap_or(1);
    of_sizes([size("data"), size("fsdp"), size("tensor")])
}

/// Returns a mesh with these sizes of data, fsdp and tensor.
pub(crate) fn of_sizes(sizes: [usize; 3]) -> MeshConfig {
    let [data, fsdp, tensor] = sizes.map(|size| i64::try_from(size).unwrap_or(i64::MAX));
    MeshConfig { data, fsdp, tensor }
}
