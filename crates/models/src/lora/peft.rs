//! PEFT's adapter folder: `adapter_config.json` and `adapter_model.safetensors`.

use super::config::{AdaptedMatrix, LoraConfig, TargetModules};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::folder::export::{carry, pretty, put};
use crate::folder::fields::{Fields, Neutral};
use crate::folder::{FolderWriter, ModelCard, ModelFolder};
use crate::names::{EMBEDDING, HEAD, HEAD_MODULE, text_tensor, wrapped};
use crate::weights::files::exists;
use crate::weights::{Dtype, FileTensor, SafetensorsWriter, WeightTensor, Weights, first_difference};
use grpo_files::NewFolder;
use serde_json::{Value, json};
use std::path::Path;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// Features of PEFT that this crate does not support.
const NOT_SUPPORTED: &[(&str, Neutral, &str)] = &[
    ("use_dora", Neutral::Off, "false: LoRA without DoRA's magnitudes"),
    ("lora_bias", Neutral::Off, "false: adapters without biases"),
    ("rank_pattern", Neutral::Off, "{}: one rank for all matrices"),
    ("alpha_pattern", Neutral::Off, "{}: one alpha for all matrices"),
    ("modules_to_save", Neutral::Off, "null: only the adapters are trained"),
    ("exclude_modules", Neutral::Off, "null: a pattern in target_modules can say the same"),
    ("layers_to_transform", Neutral::Off, "null: a pattern in target_modules can say the same"),
    ("layers_pattern", Neutral::Off, "null: a pattern in target_modules can say the same"),
    ("layer_replication", Neutral::Off, "null: the layers of the model as they are"),
    ("fan_in_fan_out", Neutral::Off, "false: matrices [out, in]"),
    ("trainable_token_indices", Neutral::Off, "null: embeddings that are not trained"),
    ("ensure_weight_tying", Neutral::Off, "false: an adapter of the head is not one of the embedding"),
    ("use_qalora", Neutral::Off, "false"),
    ("use_bdlora", Neutral::Off, "null"),
    ("alora_invocation_tokens", Neutral::Off, "null: an adapter for every token"),
    ("arrow_config", Neutral::Off, "null"),
    ("kasa_config", Neutral::Off, "null"),
    ("velora_config", Neutral::Off, "null"),
    ("monteclora_config", Neutral::Off, "null"),
    ("megatron_config", Neutral::Off, "null"),
];

/// An adapter in PEFT's layout.
///
/// ```no_run
/// let base = grpo_models::ModelFolder::open("Qwen2.5-0.5B-Instruct".as_ref())?;
/// let adapter = grpo_models::Adapter::open("adapter".as_ref(), base.config())?;
/// adapter.check_base(&base.weights()?)?;
/// for matrix in adapter.matrices() {
///     println!("{}: A {:?}", matrix.name, adapter.lora_a(matrix)?.shape());
/// }
/// # Ok::<(), grpo_models::Error>(())
/// ```
#[derive(Debug)]
pub struct Adapter {
    config: LoraConfig,
    base_model: Option<String>,
    matrices: Vec<AdaptedMatrix>,
    weights: Weights,
}

impl Adapter {
    /// Reads the adapter in `folder` for a model with the configuration `model`: its configuration, and its tensors by name and shape.
    /// `lora_dropout`, which only affects training, is ignored.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Json`]; [`Error::Field`] for an unsupported feature of PEFT (DoRA, ranks by pattern, biases, ...);
    /// [`Error::Target`]; [`Error::Weights`] for a damaged file; [`Error::UnknownTensor`], [`Error::MissingTensors`],
    /// [`Error::TensorShape`], [`Error::TensorDtype`] and [`Error::NotFinite`] for tensors that do not match the configuration.
    pub fn open(folder: &Path, model: &ModelConfig) -> Result<Self> {
        let (config, base_model) = Self::read_config(folder)?;
        let matrices = config.resolve(model)?;
        let file = folder.join(WEIGHTS);
        if !exists(&file)? && exists(&folder.join("adapter_model.bin"))? {
            let reason = format!(
                "there is no {WEIGHTS}, only adapter_model.bin, which is not read here; PEFT's save_pretrained writes the first"
            );
            return Err(Error::weights(folder, reason));
        }
        let weights = Weights::open_file(&file)?.renamed(|name| text_tensor(name).into_owned());
        // PEFT stores the original head with an adapter of the head.
        let base_layer = matrices.iter().find(|matrix| matrix.name == HEAD_MODULE).map(AdaptedMatrix::base_layer);
        weights.check_parameters(&config.parameters(model)?, |name| base_layer.as_deref() == Some(name))?;
        weights.check_finite()?;
        Ok(Self { config, base_model, matrices, weights })
    }

    /// Returns `true` if the folder has an adapter, but no model.
    pub fn is_in(folder: &Path) -> bool {
        let has = |name: &str| folder.join(name).is_file();
        let has_model = has("config.json") && (has("model.safetensors") || has("model.safetensors.index.json"));
        has(CONFIG) && !has_model
    }

    /// Reads the configuration of the adapter in `folder`, and the name of its base model.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Json`], and [`Error::Field`] for the reasons of [`Adapter::open`].
    pub fn read_config(folder: &Path) -> Result<(LoraConfig, Option<String>)> {
        let fields = Fields::read(&folder.join(CONFIG))?;
        let base_model = fields.text("base_model_name_or_path")?.filter(|name| !name.is_empty()).map(str::to_owned);
        Ok((read_config(&fields)?, base_model))
    }

    /// Returns rank, alpha and targets.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// Returns the name of the base model in the adapter's configuration.
    pub fn base_model(&self) -> Option<&str> {
        self.base_model.as_deref()
    }

    /// Returns the adapted matrices.
    pub fn matrices(&self) -> &[AdaptedMatrix] {
        &self.matrices
    }

    /// Returns A `[r, in]` of a matrix, with r as in [`AdaptedMatrix::rank`].
    ///
    /// # Errors
    /// [`Error::UnknownTensor`] for a matrix that is not in [`Adapter::matrices`].
    pub fn lora_a(&self, matrix: &AdaptedMatrix) -> Result<WeightTensor<'_>> {
        self.weights.tensor(&matrix.lora_a())
    }

    /// Returns B `[out, r]` of a matrix, with r as in [`AdaptedMatrix::rank`].
    ///
    /// # Errors
    /// [`Error::UnknownTensor`] for a matrix that is not in [`Adapter::matrices`].
    pub fn lora_b(&self, matrix: &AdaptedMatrix) -> Result<WeightTensor<'_>> {
        self.weights.tensor(&matrix.lora_b())
    }

    /// Checks that the head that PEFT stores with an adapter of the head equals the model's.
    ///
    /// # Errors
    /// [`Error::Weights`] if they differ: the adapter belongs to a model with another head.
    pub fn check_base(&self, base: &Weights) -> Result<()> {
        let Some(head) = self.matrices.iter().find(|matrix| matrix.name == HEAD_MODULE) else { return Ok(()) };
        let name = head.base_layer();
        if !self.weights.contains(&name) {
            return Ok(());
        }
        let stored = self.weights.tensor(&name)?;
        let own = base.tensor(if base.contains(HEAD) { HEAD } else { EMBEDDING })?;
        if stored.shape() == own.shape() && first_difference(&stored, &own)?.is_none() {
            return Ok(());
        }
        let reason =
            format!("`{name}` differs from the head of {}: the adapter is another model's", base.path().display());
        Err(Error::weights(self.weights.path(), reason))
    }
}

fn read_config(fields: &Fields) -> Result<LoraConfig> {
    if fields.text("peft_type")? != Some("LORA") {
        return Err(fields.unsupported("peft_type", "LORA"));
    }
    if fields.text("task_type")?.is_some_and(|task| task != "CAUSAL_LM") {
        return Err(fields.unsupported("task_type", "CAUSAL_LM"));
    }
    if fields.text("bias")?.is_some_and(|bias| bias != "none") {
        return Err(fields.unsupported("bias", "none"));
    }
    // Other initialisations change the model's weights.
    let begins =
        |value: &Value| value.is_boolean() || ["gaussian", "orthogonal", "eva"].iter().any(|name| value == name);
    if fields.get("init_lora_weights").is_some_and(|value| !begins(value)) {
        return Err(fields.unsupported("init_lora_weights", "true, false, gaussian, orthogonal, eva"));
    }
    fields.refuse(NOT_SUPPORTED)?;
    let targets = fields.typed("target_modules", "a text or a list of texts", |value| match value {
        Value::String(pattern) => Some(TargetModules::Pattern(pattern.clone())),
        Value::Array(names) => {
            let names = names.iter().map(|name| name.as_str().map(str::to_owned)).collect::<Option<_>>()?;
            Some(TargetModules::Names(names))
        }
        _ => None,
    })?;
    let parameters = fields.typed("target_parameters", "a list of texts", |value| {
        value.as_array()?.iter().map(|name| name.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>()
    })?;
    Ok(LoraConfig {
        target_parameters: parameters.unwrap_or_default(),
        r: fields.required("r", fields.count("r")?, "a whole number above 0")?,
        lora_alpha: fields.required("lora_alpha", fields.number("lora_alpha")?, "a number above 0")?,
        target_modules: fields.required("target_modules", targets, "a text or a list of texts")?,
        use_rslora: fields.flag("use_rslora")?.unwrap_or(false),
        lora_dropout: 0.0,
        adapter: None,
    })
}

/// Options of an adapter folder to be written.
#[derive(Clone, Debug)]
pub struct AdapterOptions {
    /// The dtype of the tensors in the file.
    pub dtype: Dtype,
    /// The name or folder of the base model, from which PEFT loads it.
    pub base_model: Option<String>,
    /// `true` if a folder of the same name is replaced.
    pub replace: bool,
    /// The `README.md`, which also names the base model; `None` writes none.
    pub card: Option<ModelCard>,
    /// `true` if the files of tokenizer and chat template are copied.
    pub copies_tokenizer: bool,
}

impl Default for AdapterOptions {
    /// Returns f32 and a copy of the tokenizer, without replacing anything.
    fn default() -> Self {
        Self { dtype: Dtype::F32, base_model: None, replace: false, card: None, copies_tokenizer: true }
    }
}

/// An adapter folder that is being written. The folder appears when [`AdapterWriter::finish`] returns.
#[derive(Debug)]
pub struct AdapterWriter {
    files: FolderWriter,
    /// `true` if the model is the text decoder of a model of images and text.
    is_wrapped: bool,
}

impl AdapterWriter {
    /// Creates the folder `target` for the adapters of `lora` to a model with `config`. Tokenizer and template files are copied from the base
    /// model's folder `source`, so that the adapter folder suffices for chats. If `source` is a [`crate::Wrapper`], modules have its names.
    ///
    /// # Errors
    /// [`Error::File`], also if `target` exists; the errors of [`LoraConfig::resolve`].
    pub fn create(
        target: &Path,
        lora: &LoraConfig,
        config: &ModelConfig,
        source: Option<&ModelFolder>,
        options: AdapterOptions,
    ) -> Result<Self> {
        let AdapterOptions { dtype, base_model, replace, card, copies_tokenizer } = options;
        let is_wrapped = source.is_some_and(|source| source.wrapper().is_some());
        let mut tensors: Vec<FileTensor> =
            lora.parameters(config)?.into_iter().map(|parameter| FileTensor::of(parameter, dtype)).collect();
        let targets = match is_wrapped {
            // The last components of names would also select modules of the vision tower.
            true => lora.resolve(config)?.iter().filter(|m| m.experts.is_none()).map(|m| wrapped(&m.name)).collect(),
            false => lora.target_names(config)?,
        };
        if is_wrapped {
            tensors.iter_mut().for_each(|tensor| tensor.name = wrapped(&tensor.name));
        }
        let mut parameters = lora.parameter_names(config)?;
        if is_wrapped {
            parameters.iter_mut().for_each(|name| *name = wrapped(name));
        }
        let folder = NewFolder::create(target, replace)?;
        put(&folder, CONFIG, &pretty(&config_json(lora, [&targets, &parameters], base_model.as_deref())))?;
        if let Some(card) = card {
            put(&folder, "README.md", &card.render_for("peft"))?;
        }
        if let Some(source) = source.filter(|_| copies_tokenizer) {
            carry(source.path(), folder.path())?;
        }
        let shards = vec![SafetensorsWriter::create(&folder.path().join(WEIGHTS), dtype, &tensors)?];
        Ok(Self { files: FolderWriter { folder, shards, names: None }, is_wrapped })
    }

    /// Writes the tensor `name` ([`AdaptedMatrix::lora_a`], [`AdaptedMatrix::lora_b`]), row-major. Tensors may be written in any order, each once.
    ///
    /// # Errors
    /// The errors of [`crate::FolderWriter::write`].
    pub fn write(&mut self, name: &str, values: &[f32]) -> Result<()> {
        match self.is_wrapped {
            true => self.files.write(&wrapped(name), values),
            false => self.files.write(name, values),
        }
    }

    /// Syncs the folder to disk and renames it to its final name.
    ///
    /// # Errors
    /// [`Error::MissingTensors`] for tensors that were not written; [`Error::File`].
    pub fn finish(self) -> Result<()> {
        self.files.finish()
    }
}

/// Returns the `adapter_config.json`, with the fields that PEFT requires.
fn config_json(lora: &LoraConfig, [modules, parameters]: [&[String]; 2], base_model: Option<&str>) -> Value {
    // PEFT's alpha is an integer, so integers are written as such.
    let alpha = lora.lora_alpha;
    let alpha = if alpha.fract() == 0.0 { json!(alpha as u64) } else { json!(alpha) };
    json!({
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": lora.r,
        "target_modules": modules,
        "target_parameters": if parameters.is_empty() { Value::Null } else { json!(parameters) },
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": lora.use_rslora,
    })
}
