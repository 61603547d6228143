#![doc = include_str!("../README.md")]
//! [`RunPrograms`] builds the programs that a run of `grpo train` executes on a device, and reads a compiler's reports
//! ([`grpo_backend_tpu::aot::Report`]).
#![forbid(unsafe_code)]

mod error;
mod memory;
mod processes;
mod times;

pub use error::{Error, Result};
pub use memory::Memory;
pub use processes::ProcessShards;
pub use times::Times;

use grpo_backend_tpu::aot::{Chip, Floor, Target};
use grpo_backend_tpu::plugins::Kind;
use grpo_backend_tpu::program::Pass;
use grpo_models::{Hub, LayerSpec, ModelConfig, ModelFolder};
use grpo_planner::MeshRules;
use grpo_planner::{Devices, is_one_program, longest_prompt};
use grpo_policy_pjrt::decoder::{Adapters, Axis, AxisRules, Decoder, Parameter, check_quantization, parameters};
use grpo_policy_pjrt::{PjrtPolicyOptions, RequestOptions, RolloutPrograms, RolloutSizes, TrainPrograms, TrainShape};
use grpo_rng::Purpose;
use grpo_run_config::{ModelSource, PolicyDevice, TrainConfig};
use grpo_stablehlo::{Dtype, Module};
use std::collections::BTreeMap;
use std::path::Path;

/// The name of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ProgramName {
    /// Loss and gradients of a micro-batch, added to the gradient accumulators.
    Gradient,
    /// Log-probabilities and entropies of a micro-batch.
    Score,
    /// The AdamW update.
    Apply,
    /// [`ProgramName::Gradient`] and [`ProgramName::Apply`] in one program, for updates of a single micro-batch.
    Step,
    /// Prefill of the prompts in the slots of the cache.
    Prefill,
    /// The start of samples in slots.
    Admit,
    /// Decode steps that read this many columns of the cache.
    Decode(usize),
    /// The head of the loss alone, a part of [`ProgramName::Gradient`].
    Head,
    /// [`ProgramName::Gradient`] with half the MLP width. The time difference is half the time of the MLP.
    HalfMlp,
}

impl std::fmt::Display for ProgramName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Gradient => f.pad("gradient"),
            Self::Score => f.pad("score"),
            Self::Apply => f.pad("apply"),
            Self::Step => f.pad("step"),
            Self::Prefill => f.pad("prefill"),
            Self::Admit => f.pad("admit"),
            Self::Decode(columns) => f.pad(&format!("decode_{columns}")),
            Self::Head => f.pad("head"),
            Self::HalfMlp => f.pad("half_mlp"),
        }
    }
}

/// The sizes of a run. Sizes of tensors are for all devices, and bytes of arguments for each device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct RunSizes {
    /// The number of devices.
    pub devices: usize,
    /// The number of weights of the model.
    pub parameters: usize,
    /// The number of trained weights: of the model or its adapters, and of a value head.
    pub trained: usize,
    /// The number of trained weights on each device.
    pub trained_of_device: usize,
    /// The number of model weights that are matmul operands; a tied embedding counts once.
    pub matmul_parameters: usize,
    /// The number of layers.
    pub layers: usize,
    /// The number of rows of a micro-batch, if all sequences have full length; shorter sequences are packed.
    pub rows: usize,
    /// The number of tokens of a row.
    pub length: usize,
    /// The number of completion tokens of a micro-batch, rounded up.
    pub tokens: usize,
    /// The number of micro-batches of an update.
    pub micro_batches: usize,
    /// The number of updates of a step.
    pub updates: usize,
    /// The number of forward passes that score every completion before training: for the old policy and the reference.
    pub scorings: usize,
    /// The number of tokens of the longest prompt.
    pub prompt: usize,
    /// The number of tokens of the longest completion.
    pub completion: usize,
    /// The number of sequences that decode in parallel.
    pub slots: usize,
    /// The number of sequences of a step.
    pub sequences: usize,
    /// The number of tokens that a call of a decode program adds to a sequence.
    pub tokens_per_call: usize,
    /// The size of a matmul operand's element in bytes.
    pub operand_bytes: usize,
    /// The size of the weights on each device in bytes, as program arguments.
    pub weight_bytes: usize,
    /// The size in bytes, on each device, of the low bits that complete trained weights to f32; AdamW takes them as an extra argument.
    pub remainder_bytes: usize,
    /// The size in bytes, on each device, of a reference policy with weights of its own; 0 without one.
    pub ref_policy_bytes: usize,
    /// The size in bytes, on each device, of the weights in the layout of the rollout's mesh; 0 if it is the mesh of training.
    pub rollout_weight_bytes: usize,
    /// `true` if a second copy of weights and moments exists during an update.
    pub can_roll_back: bool,
}

/// The programs of a run.
///
/// ```
/// use grpo_backend_tpu::plugins::Kind;
/// use grpo_aot::{ProgramName, RunPrograms};
///
/// let programs = RunPrograms::new(&grpo_run_config::TrainConfig::built_in(), Kind::Tpu, 1)?;
/// let gradient = programs.module(ProgramName::Gradient)?;
/// assert!(gradient.to_string().contains("stablehlo.while"));
/// # Ok::<(), grpo_aot::Error>(())
/// ```
#[derive(Debug)]
pub struct RunPrograms {
    shape: ModelConfig,
    decoder: Decoder,
    /// `None` on one device.
    meshes: Option<MeshRules>,
    config: TrainConfig,
    micro_batch: TrainShape,
    rollout: RolloutPrograms,
    options: PjrtPolicyOptions,
    sizes: RunSizes,
}

impl RunPrograms {
    /// Returns the programs of `config` with its policy on devices of `kind`, ignoring `policy.device`: on the meshes of `config` with at most
    /// `available` devices, or on one device without `policy.mesh`. A pretrained model needs no weights: config.json suffices in its folder,
    /// and only it and generation_config.json are downloaded from Hugging Face. Without `data.max_prompt_length`, prompts take all of the
    /// model's context that `rollout.max_completion_length` leaves.
    ///
    /// # Errors
    /// The errors of [`TrainConfig::validate`]; [`Error::Model`] for a model that is missing or not supported;
    /// [`Error::Plan`] for a mesh with more devices, or one that does not divide the model's dimensions.
    pub fn new(config: &TrainConfig, kind: Kind, available: usize) -> Result<Self> {
        Self::on(config, kind, &Devices::assumed(kind, available))
    }

    /// Returns the programs of `config` on the devices of `target`; see [`RunPrograms::new`].
    ///
    /// # Errors
    /// The errors of [`RunPrograms::new`].
    pub fn of_target(config: &TrainConfig, target: &Target) -> Result<Self> {
        Self::on(config, target.kind(), &Devices::of(target))
    }

    fn on(config: &TrainConfig, kind: Kind, available: &Devices) -> Result<Self> {
        let (shape, config) = resolve(config, kind)?;
        let options = grpo_planner::policy_options(&config, &shape)?;
        let compute = options.compute;
        let completion = config.rollout.max_completion_length();
        let prompt = longest_prompt(&config, &shape);
        let rollout_sizes = RolloutSizes {
            prompts: config.grpo.prompts_per_step,
            longest_prompt: prompt,
            num_generations: config.grpo.num_generations,
            max_completion_length: completion,
            conversations: !config.environments.is_empty(),
        };
        let sampling = grpo_policy::Sampling::Random {
            temperature: config.rollout.temperature(),
            processors: config.rollout.processors(),
            seed: config.seed,
            purpose: Purpose::Rollout,
            step: 0,
            first: 0,
        };
        let meshes = MeshRules::within(&config, &shape, prompt, available)?;
        let MeshRules { training, rollout } = &meshes.clone().unwrap_or_default();
        let sampler = decoder(&config, &shape, &options, rollout)?;
        let decoder = decoder(&config, &shape, &options, training)?;
        let (replays, routed_experts) = (config.rollout.replay_sampling_mask, config.policy.replay_routing);
        let programs = RolloutPrograms::of(
            kind,
            &sampler,
            compute.dtype(),
            options.rollout,
            rollout_sizes,
            RequestOptions {
                return_sampling_mask: replays,
                return_routed_experts: routed_experts,
                ..RequestOptions::new(&sampling, 1)
            },
        );
        let programs = programs.map_err(grpo_policy::Error::from)?;
        let micro_batch = TrainShape::uniform(config.grpo.micro_batch_sequences(), prompt, completion);
        let micro_batch = TrainShape { sampling_mask: replays, routed_experts, ..micro_batch.sharded(training) };
        let table = parameters(&shape);
        let matrices = table.iter().filter(|p| p.has_matrices());
        let part = |p: &Parameter| decoder.axis_rules().elements(p);
        let bytes = |p: &Parameter| part(p) * p.dtype(compute.dtype()).bytes();
        let single = |p: &Parameter| part(p) * Dtype::F32.bytes();
        let embedding = if shape.tie_word_embeddings { 0 } else { shape.vocab_size * shape.hidden_size };
        let sizes = RunSizes {
            devices: training.mesh().devices(),
            parameters: table.iter().map(Parameter::count).sum(),
            trained: decoder.trained().iter().map(Parameter::count).sum(),
            trained_of_device: decoder.trained().iter().map(part).sum(),
            matmul_parameters: matrices.map(Parameter::count).sum::<usize>() - embedding,
            layers: shape.num_hidden_layers,
            rows: micro_batch.rows,
            length: micro_batch.length,
            tokens: micro_batch.tokens,
            micro_batches: config.grpo.gradient_accumulation_steps,
            updates: config.grpo.updates(),
            scorings: config.scorings(),
            prompt,
            completion,
            slots: (config.grpo.sequences()).min(config.rollout.batch_size),
            sequences: config.grpo.sequences(),
            tokens_per_call: options.rollout.tokens_per_call,
            operand_bytes: compute.dtype().bytes(),
            weight_bytes: decoder.parameter_bytes(),
            remainder_bytes: decoder.trained().iter().map(|p| single(p) - bytes(p)).sum(),
            // With adapters, the reference policy is the base model.
            ref_policy_bytes: match config.needs_ref_policy() && config.lora.is_none() {
                true if config.grpo.sync_ref_model => table.iter().map(single).sum(),
                true => table.iter().map(bytes).sum(),
                false => 0,
            },
            rollout_weight_bytes: if training == rollout { 0 } else { sampler.parameter_bytes() },
            can_roll_back: options.can_roll_back,
        };
        Ok(Self { shape, decoder, meshes, config, micro_batch, rollout: programs, options, sizes })
    }

    /// Returns the sizes.
    pub fn sizes(&self) -> RunSizes {
        self.sizes
    }

    /// Returns the meshes of the run; `None` on one device.
    pub fn meshes(&self) -> Option<&MeshRules> {
        self.meshes.as_ref()
    }

    /// Returns the programs that a run executes, then the partial programs from which shares of time are computed. [`ProgramName::HalfMlp`] is
    /// left out if half the width of the MLP does not shard evenly.
    pub fn names(&self) -> Vec<ProgramName> {
        use ProgramName::*;
        let (update_programs, apply): (&[ProgramName], &[ProgramName]) = match is_one_program(&self.config) {
            true => (&[Step, Score], &[Apply]),
            false => (&[Gradient, Score, Apply], &[]),
        };
        // Some meshes and blocks of quantised weights divide the width of the MLP, but not its half.
        let half_mlp: &[ProgramName] = if self.half_mlp().is_ok() { &[HalfMlp] } else { &[] };
        // On a mesh, the head has no program of its own.
        let head: &[ProgramName] = if self.meshes.is_none() { &[Head] } else { &[] };
        let decode = self.rollout.decode.iter().map(|(columns, _)| Decode(*columns));
        let runs = update_programs.iter().copied().chain([Prefill, Admit]).chain(decode);
        runs.chain(head.iter().chain(half_mlp).chain(apply).copied()).collect()
    }

    /// Returns `true` if no run executes the program: it only measures a part of another one.
    pub fn is_part(&self, name: ProgramName) -> bool {
        match name {
            ProgramName::Head | ProgramName::HalfMlp => true,
            ProgramName::Apply => is_one_program(&self.config),
            _ => false,
        }
    }

    /// Returns the programs of an update.
    pub fn names_of_update(&self) -> &'static [ProgramName] {
        match is_one_program(&self.config) {
            true => &[ProgramName::Step],
            false => &[ProgramName::Gradient, ProgramName::Apply],
        }
    }

    /// Returns the decode program that reads all columns of the cache, the slowest and largest one.
    pub fn longest_decode(&self) -> Option<ProgramName> {
        self.rollout.decode.iter().map(|(columns, _)| *columns).max().map(ProgramName::Decode)
    }

    /// Returns the module of a program.
    ///
    /// # Errors
    /// [`Error::Policy`] for a program that cannot be built.
    pub fn module(&self, name: ProgramName) -> Result<Module> {
        let (loss, shape) = (self.config.loss(), self.micro_batch);
        let module: grpo_policy_pjrt::Result<Module> = match name {
            ProgramName::Gradient => self.gradient(&self.decoder),
            ProgramName::HalfMlp => self.gradient(&self.half_mlp()?),
            ProgramName::Score => self.train(&self.decoder).score(&loss, shape),
            ProgramName::Apply => self.train(&self.decoder).optimizer(),
            ProgramName::Step => self.train(&self.decoder).step(&loss, self.config.grpo.value_loss().as_ref(), shape),
            ProgramName::Head => {
                let head = self.train(&self.decoder).head(&loss, shape.tokens);
                head.and_then(|spec| Ok(spec.program(Pass::Gradient)?.module))
            }
            ProgramName::Prefill => Ok(self.rollout.prefill.clone()),
            ProgramName::Admit => Ok(self.rollout.admit.clone()),
            ProgramName::Decode(columns) => {
                let found = self.rollout.decode.iter().find(|(c, _)| *c == columns);
                let Some((_, module)) = found else {
                    return Err(Error::Columns(columns));
                };
                Ok(module.clone())
            }
        };
        Ok(module.map_err(grpo_policy::Error::from)?)
    }

    /// Returns the decoder of [`ProgramName::HalfMlp`].
    ///
    /// # Errors
    /// [`Error::Model`] or [`Error::Policy`] if half the width of the MLP has no whole blocks of quantised weights, or does not shard evenly.
    fn half_mlp(&self) -> Result<Decoder> {
        let half = ModelConfig { intermediate_size: self.shape.intermediate_size / 2, ..self.shape.clone() };
        if let Some(quantization) = self.options.quantization {
            check_quantization(&half, quantization)?;
        }
        decoder(&self.config, &half, &self.options, self.decoder.axis_rules())
    }

    /// Returns a lower bound on the time of a program on each of the devices, `chip`s: its necessary matmul operations (none for
    /// rematerialisation), or its memory traffic.
    pub fn floor(&self, name: ProgramName, module: &Module, chip: Chip) -> Floor {
        let sizes = &self.sizes;
        let devices = sizes.devices as f64;
        let [layers, head] = self.forward_flops().map(|flops| flops / devices);
        match name {
            ProgramName::Gradient | ProgramName::Step => {
                Floor::of_module(module, self.passes() * (layers + head), chip)
            }
            ProgramName::Score => Floor::of_module(module, layers + head, chip),
            ProgramName::Head => Floor::of_module(module, self.passes() * head, chip),
            ProgramName::Decode(columns) => {
                // Every decode step reads all weights, of as many experts as its tokens can choose, and all keys and values inside the windows,
                // and reads and writes all states.
                let key_columns = |layer: LayerSpec| {
                    layer.sliding_window.map_or(columns, |window| window.min(columns))
                        * self.shape.heads(layer).key_columns()
                };
                let keys = self.shape.attention_layers().map(key_columns).sum::<usize>();
                let cache = 2 * sizes.slots * keys * sizes.operand_bytes;
                let state = self.shape.linear_attention.map_or(0, |linear| linear.state() * Dtype::F32.bytes());
                let states = 2 * self.shape.linear_attention_layers() * sizes.slots * state;
                let top = self.shape.experts.as_ref().map_or(0, |of| of.num_experts_per_tok);
                let weights = self.matmul_parameters_with(top * sizes.slots) * sizes.operand_bytes;
                let flops = 2.0 * (self.matmul_parameters_with(top) * sizes.slots) as f64;
                let turns = sizes.tokens_per_call as f64;
                let parts = |axis| self.meshes.as_ref().map_or(1, |meshes| meshes.rollout.parts(axis));
                // Each device reads its shards of weights and of heads.
                let caches = cache / parts(Axis::Kv) + states / parts(Axis::LinearHeads);
                let bytes = weights / parts(Axis::Mlp) + caches / parts(Axis::Batch);
                Floor::new(turns * flops / devices, turns * bytes as f64, chip)
            }
            ProgramName::Prefill | ProgramName::Admit | ProgramName::Apply | ProgramName::HalfMlp => {
                Floor::of_module(module, 0.0, chip)
            }
        }
    }

    /// Returns how often each decode program is called in a rollout whose completions all have full length.
    pub fn decode_calls(&self) -> BTreeMap<ProgramName, usize> {
        let sizes = &self.sizes;
        let mut calls = BTreeMap::new();
        for call in 0..sizes.completion.saturating_sub(1).div_ceil(sizes.tokens_per_call) {
            let filled = sizes.prompt + call * sizes.tokens_per_call;
            let all = &self.rollout.decode;
            let program = all.iter().find(|(columns, _)| *columns >= filled).or(all.last());
            if let Some((columns, _)) = program {
                *calls.entry(ProgramName::Decode(*columns)).or_default() += 1;
            }
        }
        calls
    }

    /// Returns the matmul FLOPs of a micro-batch's forward pass, of the layers and of the head: 2 per weight and token, of a token's own experts, and causal
    /// attention at half of all pairs.
    fn forward_flops(&self) -> [f64; 2] {
        let sizes = &self.sizes;
        let head = self.shape.vocab_size * self.shape.hidden_size;
        let (rows, length) = (sizes.rows as f64, sizes.length as f64);
        let width = self.shape.heads_of_layers().map(|of| of.query_columns() as f64).sum::<f64>();
        let top = self.shape.experts.as_ref().map_or(0, |of| of.num_experts_per_tok);
        let layers = 2.0 * (self.matmul_parameters_with(top) - head) as f64 * rows * length
            + 2.0 * rows * length * length * width;
        [layers, 2.0 * (head * sizes.tokens) as f64]
    }

    /// Returns the number of weights that are matmul operands, with `count` experts of each layer, or with all if there are fewer.
    fn matmul_parameters_with(&self, count: usize) -> usize {
        let ModelConfig { experts, hidden_size, .. } = &self.shape;
        let idle = experts.as_ref().map_or(0, |of| {
            of.num_experts.saturating_sub(count) * 3 * of.moe_intermediate_size * hidden_size * self.shape.routers()
        });
        self.sizes.matmul_parameters - idle
    }

    fn train(&self, decoder: &Decoder) -> TrainPrograms {
        let programs = TrainPrograms::new(decoder.clone(), self.options.save.clone());
        programs.with_optimizer(self.config.optimizer.settings.name)
    }

    /// Returns the matmul cost of forward and backward pass in units of the forward pass: one more for the derivative of inputs, and one more
    /// for trained weights. Adapters are negligible.
    fn passes(&self) -> f64 {
        if self.config.lora.is_some() { 2.0 } else { 3.0 }
    }

    /// Returns the program for loss and gradients of a micro-batch.
    fn gradient(&self, decoder: &Decoder) -> grpo_policy_pjrt::Result<Module> {
        let (loss, value_loss) = (self.config.loss(), self.config.grpo.value_loss());
        self.train(decoder).gradient(&loss, value_loss.as_ref(), self.micro_batch)
    }
}

/// Returns the decoder of a run for a model of this shape, with the configured adapters and value head, sharded by `rules`.
fn decoder(
    config: &TrainConfig,
    shape: &ModelConfig,
    options: &PjrtPolicyOptions,
    rules: &AxisRules,
) -> Result<Decoder> {
    let mut decoder = Decoder::new(shape, options.compute)
        .with_attention(options.attention)
        .with_quantization(options.quantization)
        .with_expert_products(options.expert_products);
    if let Some(lora) = &config.lora {
        decoder = decoder.with_adapters(Adapters::new(shape, lora)?);
    }
    if config.grpo.value_loss().is_some() {
        decoder = decoder.with_value_head();
    }
    if options.freeze_router {
        decoder = decoder.with_frozen_routers();
    }
    if options.router_aux_loss_coef > 0.0 {
        decoder = decoder.with_router_aux_loss();
    }
    Ok(decoder.with_axis_rules(rules.clone()).map_err(grpo_policy::Error::from)?)
}

/// Returns the shape of the model of `config`, and `config` with its policy on devices of `kind` and settings from the model's
/// generation_config.json.
///
/// # Errors
/// The errors of [`TrainConfig::validate`]; [`Error::Model`] for a model that is missing or not supported.
pub fn resolve(config: &TrainConfig, kind: Kind) -> Result<(ModelConfig, TrainConfig)> {
    let (shape, config) = shape_of(config)?;
    let mut config = config.with_context(shape.max_position_embeddings);
    config.policy.device = match kind {
        Kind::Cpu => PolicyDevice::PjrtCpu,
        Kind::Cuda => PolicyDevice::PjrtCuda,
        Kind::Tpu => PolicyDevice::PjrtTpu,
    };
    config.validate_for(shape.vocab_size, shape.max_position_embeddings)?;
    Ok((shape, config))
}

/// Returns the shape of the model of `config`, and `config` with settings from the model's generation_config.json.
fn shape_of(config: &TrainConfig) -> Result<(ModelConfig, TrainConfig)> {
    let name = match &config.model {
        ModelSource::New(shape) => return Ok((*shape.clone(), config.clone())),
        ModelSource::Pretrained(name) => name,
    };
    let path = Path::new(name);
    let folder = match path.file_name() {
        Some(file) if file == "config.json" && path.is_file() => ModelFolder::open(path.parent().unwrap_or(path))?,
        _ => ModelFolder::open(&Hub::from_env().locate_config(name, config.model_revision.as_deref())?)?,
    };
    Ok((folder.config().clone(), config.clone().with_generation_defaults(folder.generation())))
}
