//! The programs of a run whose policy is on a device: to be compiled for devices that are not here, without weights.

mod memory;
mod times;

pub use memory::Memory;
pub use times::Times;

use crate::error::Result;
use crate::train_config::{ModelSource, PolicyDevice, TrainConfig};
use backend_tpu::aot::{Chip, Floor};
use backend_tpu::plugins::Kind;
use backend_tpu::program::Pass;
use models::{ModelConfig, ModelFolder};
use policy::AdamWBounds;
pub use policy_device::KNOBS;
use policy_device::decoder::{Adapters, Compute, Decoder, Parameter, parameters};
use policy_device::{RolloutModules, RolloutOptions, RolloutSizes, TrainModules, TrainShape};
use rng::Purpose;
use stablehlo::{Dtype, Module, Save};
use std::collections::BTreeMap;
use std::path::Path;

/// A program of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ProgramName {
    /// Loss and gradients of a micro-batch, added to the sums.
    Gradient,
    /// Log-probabilities and entropies of a micro-batch.
    Score,
    /// The update of AdamW.
    Apply,
    /// [`ProgramName::Gradient`] and [`ProgramName::Apply`] in one, where a micro-batch is all of an update.
    Step,
    /// Keys and values of the prompts that fill the slots.
    Prefill,
    /// The beginning of samples in slots.
    Admit,
    /// A call of the decode loop that reads so many columns of the cache.
    Decode(usize),
    /// The head of the loss alone: a part of [`ProgramName::Gradient`].
    Head,
    /// [`ProgramName::Gradient`] with an MLP of half the width: the difference is half of what the MLP takes.
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

/// The sizes of a run on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct RunSizes {
    /// Weights of the model.
    pub parameters: usize,
    /// Weights that are trained: those of the model or those of its adapters, and those of a value head.
    pub trained: usize,
    /// Those of them that are factors of products; a tied embedding is one.
    pub matmul_parameters: usize,
    /// The number of layers.
    pub layers: usize,
    /// Rows of a micro-batch whose sequences are as long as they may be: shorter ones share rows.
    pub rows: usize,
    /// Tokens of a row.
    pub length: usize,
    /// Completion tokens of a micro-batch, rounded up.
    pub tokens: usize,
    /// Micro-batches of an update.
    pub micro_batches: usize,
    /// Updates of a step.
    pub updates: usize,
    /// How often log-probabilities are computed of every completion before it is trained on: of the old policy, of the reference.
    pub scorings: usize,
    /// Tokens of the longest prompt.
    pub prompt: usize,
    /// Tokens of the longest completion.
    pub completion: usize,
    /// Sequences that decode side by side.
    pub slots: usize,
    /// Sequences of a step.
    pub sequences: usize,
    /// Tokens that a call of a decode program adds to a sequence.
    pub tokens_per_call: usize,
    /// Bytes of a number as products take it.
    pub operand_bytes: usize,
    /// Bytes of all weights as programs take them.
    pub weight_bytes: usize,
    /// Bytes that weights which are trained lack of f32 there, and that updates take beside them.
    pub remainder_bytes: usize,
    /// Bytes of a reference policy with weights of its own; 0 without one.
    pub ref_policy_bytes: usize,
    /// Whether there are weights and moments twice during an update.
    pub can_roll_back: bool,
}

/// The programs of a run, as values.
///
/// ```
/// use backend_tpu::plugins::Kind;
/// use trainer::programs::{ProgramName, RunPrograms};
///
/// let programs = RunPrograms::new(&trainer::TrainConfig::built_in(), Kind::Tpu)?;
/// let gradient = programs.module(ProgramName::Gradient)?;
/// assert!(gradient.to_string().contains("stablehlo.while"));
/// # Ok::<(), trainer::Error>(())
/// ```
#[derive(Debug)]
pub struct RunPrograms {
    shape: ModelConfig,
    decoder: Decoder,
    config: TrainConfig,
    micro_batch: TrainShape,
    rollout: RolloutModules,
    save: Save,
    sizes: RunSizes,
}

impl RunPrograms {
    /// The programs of `config` with its policy on a device of `kind`, whatever its `policy.device` is. A model that is named needs no
    /// weights: its folder may have a config.json and nothing else, and of a name on Hugging Face no more than that and
    /// generation_config.json is downloaded. Without `data.max_prompt_length` a prompt has all tokens of the model's context that
    /// `rollout.max_completion_length` leaves.
    ///
    /// # Errors
    /// Those of [`TrainConfig::validate`]; [`crate::Error::Model`] for a model that is not found, or is none that can be computed.
    pub fn new(config: &TrainConfig, kind: Kind) -> Result<Self> {
        let (shape, config) = shape_of(config)?;
        let mut config = config.with_context(shape.max_position_embeddings);
        config.policy.device = match kind {
            Kind::Cpu => PolicyDevice::PjrtCpu,
            Kind::Cuda => PolicyDevice::PjrtCuda,
            Kind::Tpu => PolicyDevice::PjrtTpu,
        };
        config.validate_for(shape.vocab_size, shape.max_position_embeddings)?;
        let compute = config.policy.compute();
        let completion = config.rollout.max_completion_length();
        let room = shape.max_position_embeddings.saturating_sub(completion).max(1);
        let prompt = config.data.max_prompt_length.unwrap_or(room).min(room);
        let options = RolloutOptions { slots: config.rollout.batch_size, ..RolloutOptions::default() };
        let rollout_sizes = RolloutSizes {
            prompts: config.grpo.prompts_per_step,
            longest_prompt: prompt,
            num_generations: config.grpo.num_generations,
            max_completion_length: completion,
        };
        let sampling = policy::Sampling::Random {
            temperature: config.rollout.temperature(),
            processors: config.rollout.processors(),
            seed: config.seed,
            purpose: Purpose::Rollout,
            step: 0,
            first: 0,
        };
        let decoder = decoder(&config, &shape, compute)?;
        let of_rollout = RolloutModules::of(&decoder, compute.dtype(), options, rollout_sizes, &sampling, 1);
        let rollout = of_rollout.map_err(policy::Error::from)?;
        let micro_batch = TrainShape::uniform(config.grpo.micro_batch_sequences(), prompt, completion);
        let table = parameters(&shape);
        let matrices = table.iter().filter(|p| p.has_matrices());
        let bytes = |p: &Parameter| p.count() * p.dtype(compute.dtype()).bytes();
        let of_embedding = if shape.tie_word_embeddings { 0 } else { shape.vocab_size * shape.hidden_size };
        let sizes = RunSizes {
            parameters: table.iter().map(Parameter::count).sum(),
            trained: decoder.trained().iter().map(Parameter::count).sum(),
            matmul_parameters: matrices.map(Parameter::count).sum::<usize>() - of_embedding,
            layers: shape.num_hidden_layers,
            rows: micro_batch.rows,
            length: micro_batch.length,
            tokens: micro_batch.tokens,
            micro_batches: config.grpo.gradient_accumulation_steps,
            updates: config.grpo.updates(),
            scorings: usize::from(config.grpo.updates() > 1) + usize::from(config.needs_ref_policy()),
            prompt,
            completion,
            slots: (config.grpo.sequences()).min(config.rollout.batch_size),
            sequences: config.grpo.sequences(),
            tokens_per_call: options.tokens_per_call,
            operand_bytes: compute.dtype().bytes(),
            weight_bytes: decoder.parameters().iter().map(bytes).sum(),
            remainder_bytes: decoder.trained().iter().map(|p| p.count() * Dtype::F32.bytes() - bytes(p)).sum(),
            // Beneath adapters it is the model that is there.
            ref_policy_bytes: match config.needs_ref_policy() && config.lora.is_none() {
                true if config.grpo.sync_ref_model => table.iter().map(|p| p.count() * Dtype::F32.bytes()).sum(),
                true => table.iter().map(bytes).sum(),
                false => 0,
            },
            can_roll_back: config.keeps_state_to_roll_back(),
        };
        let save = config.policy.save(&shape)?;
        Ok(Self { shape, decoder, config, micro_batch, rollout, save, sizes })
    }

    /// Its sizes.
    pub fn sizes(&self) -> RunSizes {
        self.sizes
    }

    /// The programs that a run runs, then the parts of them of which shares of the time are made.
    pub fn names(&self) -> Vec<ProgramName> {
        use ProgramName::*;
        let (of_update, parts): (&[ProgramName], &[ProgramName]) = match self.steps_at_once() {
            true => (&[Step, Score], &[Head, HalfMlp, Apply]),
            false => (&[Gradient, Score, Apply], &[Head, HalfMlp]),
        };
        let decode = self.rollout.decode.iter().map(|(columns, _)| Decode(*columns));
        let runs = of_update.iter().copied().chain([Prefill, Admit]).chain(decode);
        runs.chain(parts.iter().copied()).collect()
    }

    /// Whether no run runs the program: it tells what a part of another one takes.
    pub fn is_part(&self, name: ProgramName) -> bool {
        match name {
            ProgramName::Head | ProgramName::HalfMlp => true,
            ProgramName::Apply => self.steps_at_once(),
            _ => false,
        }
    }

    /// Whether an update is one program: of one micro-batch, if clipping tells before that nothing in it overflows.
    fn steps_at_once(&self) -> bool {
        let optimizer = &self.config.optimizer;
        let first = optimizer.adamw().step(1, optimizer.learning_rate);
        self.sizes.micro_batches == 1 && AdamWBounds::of_largest(0.0).after(&first).is_some()
    }

    /// The program.
    ///
    /// # Errors
    /// [`crate::Error::Policy`] for one that cannot be built.
    pub fn module(&self, name: ProgramName) -> Result<Module> {
        let (loss, shape) = (self.config.loss(), self.micro_batch);
        let module: policy_device::Result<Module> = match name {
            ProgramName::Gradient => self.gradient(&self.decoder),
            ProgramName::HalfMlp => {
                let half = ModelConfig { intermediate_size: self.shape.intermediate_size / 2, ..self.shape.clone() };
                self.gradient(&decoder(&self.config, &half, self.decoder.compute())?)
            }
            ProgramName::Score => self.train(&self.decoder).score(&loss, shape),
            ProgramName::Apply => self.train(&self.decoder).adamw(),
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
                    let expected = "a number of columns that a program of the run reads";
                    return Err(crate::Error::argument("decode", expected, columns));
                };
                Ok(module.clone())
            }
        };
        Ok(module.map_err(policy::Error::from)?)
    }

    /// What no program with these results can beat on `chip`: the products that a result needs (nothing for what is computed again),
    /// or the bytes that have to move.
    pub fn floor(&self, name: ProgramName, module: &Module, chip: Chip) -> Floor {
        let sizes = &self.sizes;
        let [layers, head] = self.forward_flops();
        match name {
            ProgramName::Gradient | ProgramName::Step => {
                Floor::of_module(module, self.passes() * (layers + head), chip)
            }
            ProgramName::Score => Floor::of_module(module, layers + head, chip),
            ProgramName::Head => Floor::of_module(module, self.passes() * head, chip),
            ProgramName::Decode(columns) => {
                // Every turn reads all weights, and the keys and values that there may be.
                let heads = self.shape.num_key_value_heads * self.shape.head_dim();
                let cache = 2 * sizes.layers * sizes.slots * columns * heads * sizes.operand_bytes;
                let weights = sizes.matmul_parameters * sizes.operand_bytes;
                let flops = 2.0 * (sizes.matmul_parameters * sizes.slots) as f64;
                let turns = sizes.tokens_per_call as f64;
                Floor::new(turns * flops, turns * (weights + cache) as f64, chip)
            }
            ProgramName::Prefill | ProgramName::Admit | ProgramName::Apply | ProgramName::HalfMlp => {
                Floor::of_module(module, 0.0, chip)
            }
        }
    }

    /// The calls of decode programs of a rollout in which every completion is as long as it may be: how often each runs.
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

    /// Operations of the products of a micro-batch's forward pass, in the layers and in the head: 2 per weight and token, and of causal
    /// attention those of the half of all pairs that see each other.
    fn forward_flops(&self) -> [f64; 2] {
        let sizes = &self.sizes;
        let head = self.shape.vocab_size * self.shape.hidden_size;
        let (rows, length) = (sizes.rows as f64, sizes.length as f64);
        let width = (self.shape.num_attention_heads * self.shape.head_dim() * sizes.layers) as f64;
        let layers =
            2.0 * (sizes.matmul_parameters - head) as f64 * rows * length + 2.0 * rows * length * length * width;
        [layers, 2.0 * (head * sizes.tokens) as f64]
    }

    fn train(&self, decoder: &Decoder) -> TrainModules {
        TrainModules::new(decoder.clone(), self.save.clone())
    }

    /// Whether the model is frozen beneath adapters.
    fn is_frozen(&self) -> bool {
        self.config.lora.is_some()
    }

    /// How often the products of a forward pass come again in a step: for the derivative with respect to what they multiply, and with respect
    /// to weights that are trained. Adapters are small.
    fn passes(&self) -> f64 {
        if self.is_frozen() { 2.0 } else { 3.0 }
    }

    /// Loss and gradients of a micro-batch.
    fn gradient(&self, decoder: &Decoder) -> policy_device::Result<Module> {
        let (loss, modules) = (self.config.loss(), self.train(decoder));
        match self.config.grpo.value_loss() {
            Some(of_values) => modules.gradient_with_values(&loss, &of_values, self.micro_batch),
            None => modules.gradient(&loss, self.micro_batch),
        }
    }
}

/// The decoder of a run whose model has this shape, with the adapters and the value head that the configuration asks for.
fn decoder(config: &TrainConfig, shape: &ModelConfig, compute: Compute) -> Result<Decoder> {
    let mut decoder = Decoder::new(shape, compute).with_attention(config.policy.attention());
    if let Some(lora) = &config.lora {
        decoder = decoder.with_adapters(Adapters::new(shape, lora)?);
    }
    Ok(if config.grpo.value_loss().is_some() { decoder.with_value_head() } else { decoder })
}

/// The shape of the model that `config` is about, and `config` with what it takes from the model's generation_config.json.
fn shape_of(config: &TrainConfig) -> Result<(ModelConfig, TrainConfig)> {
    let name = match &config.model {
        ModelSource::New(shape) => return Ok((shape.clone(), config.clone())),
        ModelSource::Pretrained(name) => name,
    };
    let path = Path::new(name);
    let folder = match path.file_name() {
        Some(file) if file == "config.json" && path.is_file() => ModelFolder::open(path.parent().unwrap_or(path))?,
        _ => ModelFolder::open(&models::locate_config(name, config.model_revision.as_deref())?)?,
    };
    Ok((folder.config().clone(), config.clone().with_generation_defaults(folder.generation())))
}
