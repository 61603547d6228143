//! Writes a model folder in the layout of `transformers`, tensor by tensor.

use super::config_json::ConfigJson;
use super::family::Family;
use super::fields::Fields;
use super::json_text::{with_field, with_field_of, without_field};
use super::{GenerationDefaults, ModelCard, ModelFolder};
use crate::config::ModelConfig;
use crate::error::{Error, Result, nearest};
use crate::names::TextNames;
use crate::weights::files::{INDEX, SINGLE, exists, shard_name};
use crate::weights::{Dtype, FileTensor, SafetensorsWriter, Weights};
use grpo_files::NewFolder;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Files of a model folder other than configuration and weights, which training does not change.
pub(crate) const CARRIED: &[&str] = &[
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tekken.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "USE_POLICY.md",
];
/// The folder of transformers 5 for templates other than the default.
const TEMPLATES: &str = "additional_chat_templates";

/// Options of a model folder to be written.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// The dtype of the weights in the files.
    pub dtype: Dtype,
    /// The size of a weight file in bytes above which a new file is started. A larger tensor has its own file.
    pub max_shard_size: u64,
    /// `true` if a folder of the same name is replaced.
    pub replace: bool,
    /// The `README.md`; `None` writes none.
    pub card: Option<ModelCard>,
    /// The `generation_config.json` of a model without a source folder that has one.
    pub generation: GenerationDefaults,
}

impl Default for ExportOptions {
    /// Returns bf16 in files of at most 5 GB (10^9 bytes), without replacing anything.
    fn default() -> Self {
        Self {
            dtype: Dtype::Bf16,
            max_shard_size: 5_000_000_000,
            replace: false,
            card: None,
            generation: GenerationDefaults::default(),
        }
    }
}

/// A model folder that is being written. The folder appears under its name when [`FolderWriter::finish`] returns. If the writer is
/// dropped before, nothing remains.
///
/// ```
/// use grpo_models::{ExportOptions, FolderWriter, ModelConfig, ModelFolder};
///
/// let place = tempfile::tempdir()?;
/// let target = place.path().join("model");
/// let config = ModelConfig::default();
/// let mut writer = FolderWriter::create(&target, &config, None, ExportOptions::default())?;
/// for parameter in config.parameters() {
///     writer.write(&parameter.name, &vec![0.5; parameter.len()])?;
/// }
/// writer.finish()?;
/// let folder = ModelFolder::open(&target)?;
/// folder.weights()?.check(folder.config())?;
/// assert_eq!(*folder.config(), config);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct FolderWriter {
    pub(crate) folder: NewFolder,
    pub(crate) shards: Vec<SafetensorsWriter>,
    /// The names of the tensors in the files, if they differ.
    pub(crate) names: Option<TextNames>,
}

impl FolderWriter {
    /// Creates the folder `target` for a model of `config`: all files, where weight files have their size but no content.
    ///
    /// `source` is the folder that the model was loaded from. Its `config.json` is copied with only the dtype changed, if it differs (and
    /// `tie_word_embeddings`, if the head was untied); the files of tokenizer, chat template, image processor, generation and licence, and
    /// tensors that the text decoder does not use (the vision tower of a [`super::Wrapper`], `mtp.*` of Qwen3.5), are copied byte for byte.
    /// Without `source`, `config.json` is that of the family with the features of `config`, in the layout of transformers 4, which 5 can read, too.
    ///
    /// # Errors
    /// [`Error::File`], also if `target` exists; [`Error::Config`] if no family has this configuration; [`Error::Field`] if the `config.json` of
    /// `source` describes another model than `config`.
    pub fn create(
        target: &Path,
        config: &ModelConfig,
        source: Option<&ModelFolder>,
        options: ExportOptions,
    ) -> Result<Self> {
        let ExportOptions { dtype, max_shard_size, replace, card, generation } = options;
        let config_json = match source {
            Some(source) => config_of_source(source, config, dtype)?,
            None => pretty(&config_of_family(config, dtype, &generation)?),
        };
        let folder = NewFolder::create(target, replace)?;
        let put = |name: &str, content: &str| put(&folder, name, content);
        put("config.json", &config_json)?;
        if let Some(source) = source {
            carry(source.path(), folder.path())?;
        }
        if generation != GenerationDefaults::default() && !exists(&folder.path().join("generation_config.json"))? {
            put("generation_config.json", &pretty(&generation.to_json().into()))?;
        }
        if let Some(card) = card {
            put("README.md", &card.render())?;
        }
        // Files of a wrapper have other names for the decoder's tensors. Files of wrappers and of some families have tensors to carry along.
        let has_more =
            |source: &&ModelFolder| source.wrapper().is_some() || source.family().carried_prefix(config).is_some();
        let wrapped = source.filter(has_more).map(ModelFolder::weights).transpose()?;
        let names = wrapped.as_ref().and_then(Weights::text_names);
        let mut tensors: Vec<FileTensor> =
            config.parameters().into_iter().map(|parameter| FileTensor::of(parameter, dtype)).collect();
        if let Some(names) = names {
            tensors.iter_mut().for_each(|tensor| tensor.name = names.stored(&tensor.name));
        }
        tensors.extend(wrapped.iter().flat_map(Weights::carried).map(|carried| carried.file));
        let parts = split(tensors, max_shard_size);
        let name = |number: usize| match parts.len() {
            1 => SINGLE.to_owned(),
            total => shard_name(number + 1, total),
        };
        if parts.len() > 1 {
            put(INDEX, &pretty(&index(&parts, name)))?;
        }
        let shards = parts
            .iter()
            .enumerate()
            .map(|(number, tensors)| SafetensorsWriter::create(&folder.path().join(name(number)), dtype, tensors));
        let mut shards = shards.collect::<Result<Vec<_>>>()?;
        for carried in wrapped.iter().flat_map(Weights::carried) {
            for shard in &mut shards {
                shard.copy(&carried.file.name, carried.bytes)?;
            }
        }
        Ok(Self { folder, shards, names })
    }

    /// Writes the tensor `name`, row-major. Tensors may be written in any order, each once.
    ///
    /// # Errors
    /// [`Error::UnknownTensor`] with the nearest name; [`Error::Length`] for a wrong number of values or a tensor that was already
    /// written; [`Error::NotFinite`] for a value that is NaN, infinite or too large for the dtype; [`Error::File`], such as for a full
    /// disk.
    pub fn write(&mut self, name: &str, values: &[f32]) -> Result<()> {
        let stored = self.names.map(|names| names.stored(name));
        for shard in &mut self.shards {
            if shard.write(stored.as_deref().unwrap_or(name), values)? {
                return Ok(());
            }
        }
        Err(Error::UnknownTensor {
            path: self.folder.target().to_owned(),
            what: "no place for the tensor",
            name: name.to_owned(),
            nearest: nearest(name, self.shards.iter().flat_map(SafetensorsWriter::names)),
        })
    }

    /// Syncs the folder to disk and renames it to its final name.
    ///
    /// # Errors
    /// [`Error::MissingTensors`] for tensors that were not written; [`Error::File`]. An existing folder is then kept.
    pub fn finish(self) -> Result<()> {
        let missing: Vec<&str> = self.shards.iter().flat_map(SafetensorsWriter::missing).collect();
        if !missing.is_empty() {
            return Err(Error::missing(self.folder.target(), &missing));
        }
        drop(self.shards);
        Ok(self.folder.finish()?)
    }
}

/// Writes a file of a new folder.
pub(crate) fn put(folder: &NewFolder, name: &str, content: &str) -> Result<()> {
    let path = folder.path().join(name);
    std::fs::write(&path, content).map_err(|e| Error::io("write", &path, e))
}

/// Splits tensors into files: a new one starts if a tensor would exceed `limit`, as in `huggingface_hub`.
fn split(tensors: Vec<FileTensor>, limit: u64) -> Vec<Vec<FileTensor>> {
    let mut parts: Vec<Vec<FileTensor>> = vec![Vec::new()];
    let mut size = 0;
    for tensor in tensors {
        if size > 0 && size + tensor.bytes > limit {
            parts.push(Vec::new());
            size = 0;
        }
        size += tensor.bytes;
        parts.last_mut().expect("there is one from the beginning").push(tensor);
    }
    parts
}

fn index(parts: &[Vec<FileTensor>], name: impl Fn(usize) -> String) -> Value {
    let tensors = || parts.iter().flatten();
    let count: usize = tensors().map(|tensor| tensor.shape.iter().product::<usize>()).sum();
    let size: u64 = tensors().map(|tensor| tensor.bytes).sum();
    let entries = parts.iter().enumerate().flat_map(|(number, tensors)| {
        let file = name(number);
        tensors.iter().map(move |tensor| (tensor.name.clone(), Value::from(file.as_str())))
    });
    let map = Map::from_iter(entries.collect::<Vec<_>>());
    json!({"metadata": {"total_parameters": count, "total_size": size}, "weight_map": map})
}

/// Returns the source's `config.json` with the dtype of the new files.
fn config_of_source(source: &ModelFolder, config: &ModelConfig, dtype: Dtype) -> Result<String> {
    let path = source.path().join("config.json");
    let (mut text, fields) = Fields::read_with_text(&path)?;
    let name = Value::from(dtype.torch_name());
    let nested = if source.wrapper().is_some() { fields.object("text_config")? } else { None };
    let mut is_missing = true;
    for key in ["dtype", "torch_dtype"] {
        let [outer, inner] = [fields.get(key), nested.as_ref().and_then(|text| text.get(key))];
        is_missing &= outer.is_none() && inner.is_none();
        if outer.is_some_and(|found| *found != name) {
            text = with_field(&text, key, &name);
        }
        if inner.is_some_and(|found| *found != name) {
            text = with_field_of(&text, "text_config", key, &name);
        }
    }
    if is_missing {
        // transformers 5 reads the older name, too.
        text = with_field(&text, "torch_dtype", &name);
    }
    // Written weights are not quantised.
    text = without_field(&text, "quantization_config");
    if source.config().tie_word_embeddings != config.tie_word_embeddings {
        let (key, tie) = ("tie_word_embeddings", config.tie_word_embeddings.into());
        text = with_field(&text, key, &tie);
        if nested.is_some_and(|text| text.get(key).is_some()) {
            text = with_field_of(&text, "text_config", key, &tie);
        }
    }
    let has_head = || Some(!config.tie_word_embeddings);
    let written = ConfigJson::read(&Fields::parse(&path, text.as_bytes())?, has_head)?.config;
    // The range of initial weights does not matter for a trained model.
    let expected = ModelConfig { initializer_range: written.initializer_range, ..config.clone() };
    if written != expected {
        let supported = format!("the configuration of the model that is written, {expected:?}");
        return Err(Error::Field { path, field: "(all)".into(), found: format!("{written:?}"), supported });
    }
    Ok(text)
}

/// Returns the `config.json` of a model without a source folder.
fn config_of_family(config: &ModelConfig, dtype: Dtype, generation: &GenerationDefaults) -> Result<Value> {
    config.validate()?;
    let mut json = Family::of(config)?.config_json(config, dtype);
    // The padding token of config.json is the padding index of the embedding.
    let is_token = |key: &str| key.ends_with("_token_id") && key != "pad_token_id";
    for (key, value) in generation.to_json().into_iter().filter(|(key, _)| is_token(key)) {
        json[key] = value;
    }
    Ok(json)
}

/// Copies the existing files of [`CARRIED`] and named templates.
pub(crate) fn carry(source: &Path, target: &Path) -> Result<()> {
    for name in CARRIED {
        copy(&source.join(name), &target.join(name))?;
    }
    let templates = source.join(TEMPLATES);
    if !exists(&templates)? {
        return Ok(());
    }
    let read = |e| Error::io("read the folder", &templates, e);
    let made = target.join(TEMPLATES);
    std::fs::create_dir(&made).map_err(|e| Error::io("create the folder", &made, e))?;
    for entry in std::fs::read_dir(&templates).map_err(read)? {
        let entry = entry.map_err(read)?;
        if entry.path().extension().is_some_and(|end| end == "jinja") {
            copy(&entry.path(), &made.join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// Copies a file, if it exists, with the permissions of a new one, because files of a cache may be read-only.
fn copy(source: &Path, target: &Path) -> Result<()> {
    if !exists(source)? {
        return Ok(());
    }
    let (mut from, _) = grpo_files::open_regular(source).map_err(|e| Error::io("read", source, e))?;
    let mut copy = || std::io::copy(&mut from, &mut std::fs::File::create_new(target)?);
    copy().map(drop).map_err(|e| Error::io("write", target, e))
}

/// Returns JSON as `transformers` formats it: indented by two spaces, with a final newline.
pub(crate) fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}
