//! Fingerprints of a run's model and data files. A resume is refused if they have changed.
//!
//! `fingerprint.json` in the run folder holds:
//!
//! * for a pretrained model: the values of `config.json` that define the decoder, the EOS tokens, and a SHA-256 of each part of the
//!   tokenizer, of the chat template, and of every tensor (dtype, shape and all bytes);
//! * for each data file: its size and a SHA-256 of its bytes;
//! * the working folder of the run, from which relative paths of its configuration are resolved.
//!
//! Names of weight files are not included: the same weights in other shards are the same model. All bytes of the weights are hashed,
//! because a LoRA checkpoint holds only the adapters, and one changed value makes a different base model. Data files are hashed on every
//! resume, too: `cp -p`, `rsync -t` and `touch -r` keep the time of modification, so equal size and time do not mean equal content.

use super::changes::{Change, differences};
use super::digest::{hex, sha256};
use super::dir::{RunDir, write_json};
use crate::error::{Error, Result};
use grpo_files::{open_regular, read_regular};
use grpo_models::ModelFolder;
use grpo_run_config::TrainConfig;
use grpo_setup::open_model;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The name and version of the format.
const FORMAT: &str = "grpo-fingerprint/1";
/// The name of the file in the run folder.
const FILE: &str = "fingerprint.json";
/// The largest fingerprint.json that is read, in bytes; each tensor takes about 150.
const LIMIT: u64 = 1 << 26;
/// The largest file of a tokenizer that is read, in bytes.
const TEXT_LIMIT: u64 = 1 << 30;
/// Tensors are hashed in blocks of this many bytes, on all threads; the digests of the blocks are then hashed.
const BLOCK: usize = 1 << 24;
/// The number of differences that an error lists.
const SHOWN: usize = 5;
/// The fields of tokenizer_config.json and special_tokens_map.json that are compared; the chat template is compared separately.
const TOKENIZER_FIELDS: [&str; 12] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
    "extra_special_tokens",
    "added_tokens_decoder",
    "add_bos_token",
    "chat_control_tokens",
];
/// The fields of generation_config.json that restrict which tokens may be sampled.
const GENERATION_FIELDS: [&str; 4] = ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"];

/// The model and the data files of a run, as names and digests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Fingerprint {
    /// The name and version of the format, [`FORMAT`].
    format: String,
    /// Values and digests of a pretrained model, by file and field; empty for a new model.
    model: BTreeMap<String, Value>,
    /// Size and digest of every data file, by path.
    data: BTreeMap<String, Value>,
    /// The working folder of the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    folder: Option<PathBuf>,
}

/// Returns the working folder of the run in `run`, from which relative paths are resolved; `None` if it was not recorded.
///
/// # Errors
/// [`Error::RunDir`] for a damaged fingerprint.json; [`Error::File`].
pub fn start_folder(run: &Path) -> Result<Option<PathBuf>> {
    let path = run.join(FILE);
    if path.is_file() { Ok(Fingerprint::read(&path)?.folder) } else { Ok(None) }
}

impl Fingerprint {
    /// Computes the fingerprint of a configuration's model and data files.
    ///
    /// # Errors
    /// The errors of reading the model; [`Error::File`].
    pub(super) fn of(config: &TrainConfig) -> Result<Self> {
        Ok(Self { data: data(config)?, ..Self::of_model(config)? })
    }

    /// Computes the fingerprint of the model alone.
    fn of_model(config: &TrainConfig) -> Result<Self> {
        let model = match open_model(config)? {
            Some(model) => folder_digests(&model, config)?,
            None => BTreeMap::new(),
        };
        let folder = std::env::current_dir().ok();
        Ok(Self { format: FORMAT.to_owned(), model, data: BTreeMap::new(), folder })
    }

    /// Returns the SHA-256 of the model and the data.
    ///
    /// # Errors
    /// [`Error::Text`] if the fingerprint cannot be serialised.
    pub(super) fn digest(&self) -> Result<String> {
        let bytes = serde_json::to_vec(&(&self.model, &self.data));
        bytes.map(|bytes| sha256(&bytes)).map_err(|e| Error::Text(format!("{FILE}: {e}")))
    }

    /// Writes the fingerprint into a run folder.
    ///
    /// # Errors
    /// [`Error::File`].
    pub(super) fn write(&self, dir: &RunDir) -> Result<()> {
        write_json(&dir.fingerprint_path(), self)
    }

    /// Returns the part of the fingerprint that prompts depend on: everything except the weights.
    pub(super) fn of_prompts(&self) -> Value {
        let model: BTreeMap<_, _> = self.model.iter().filter(|(name, _)| !name.starts_with("weights: ")).collect();
        json!({ "model": model, "data": self.data })
    }

    /// Reads the fingerprint that was written when the run started.
    fn read(path: &Path) -> Result<Self> {
        if !path.is_file() {
            let reason = "it is missing, so nothing says whether model and data are still the run's: restore it, or start \
                          a new run from config.yaml with `--config`";
            return Err(Error::run_dir(path, reason));
        }
        let bytes = read_regular(path, LIMIT).map_err(|e| Error::io("read", path, e))?;
        let found: Self = serde_json::from_slice(&bytes)
            .map_err(|e| Error::run_dir(path, format!("expected the fingerprint of a run: {e}")))?;
        match found.format == FORMAT {
            true => Ok(found),
            false => Err(Error::run_dir(path, format!("expected the format {FORMAT}, found {}", found.format))),
        }
    }
}

/// Checks that the model of `config` has not changed since the start of the run in `dir`.
///
/// # Errors
/// [`Error::RunDir`] with a list of the changes; the errors of [`Fingerprint::of`].
pub(super) fn check_model(dir: &RunDir, config: &TrainConfig) -> Result<()> {
    let now = Fingerprint::of_model(config)?;
    if now.model.is_empty() { Ok(()) } else { same_model(dir, &Fingerprint::read(&dir.fingerprint_path())?, &now) }
}

/// Checks that model and data of `config` have not changed since the start of the run in `dir`. With `run.allow_changed_data`, data may
/// change. Returns the new fingerprint and the changes of the data, which the run records.
///
/// # Errors
/// [`Error::RunDir`] with a list of the changes; the errors of [`Fingerprint::of`].
pub(super) fn check(dir: &RunDir, config: &TrainConfig) -> Result<(Fingerprint, Vec<Change>)> {
    let now = Fingerprint::of(config)?;
    if now.model.is_empty() && now.data.is_empty() {
        return Ok((now, Vec::new()));
    }
    let before = Fingerprint::read(&dir.fingerprint_path())?;
    same_model(dir, &before, &now)?;
    let changes = differences(&before.data, &now.data);
    if changes.is_empty() {
        return Ok((now, changes));
    }
    let list = list(&changes);
    if !config.run.allow_changed_data {
        let reason = format!(
            "the data is not what the run was begun with: {list}; restore it, or go on with the rows as they are now: \
             --set run.allow_changed_data=true"
        );
        return Err(Error::run_dir(dir.root(), reason));
    }
    tracing::warn!("the data is not what the run was begun with, which run.allow_changed_data allows: {list}");
    Ok((now, changes))
}

fn same_model(dir: &RunDir, before: &Fingerprint, now: &Fingerprint) -> Result<()> {
    let changes = differences(&before.model, &now.model);
    if changes.is_empty() {
        return Ok(());
    }
    let reason = format!(
        "the model is not the one that the run was begun with; what has changed is {}; restore the model, or start a new run",
        list(&changes)
    );
    Err(Error::run_dir(dir.root(), reason))
}

/// Returns the first changes as text, without digests.
fn list(changes: &[Change]) -> String {
    let is_digest = |value: &Value| value.as_str().is_some_and(|text| text.contains("sha256:"));
    let one = |change: &Change| match (&change.from, &change.to) {
        (Value::Null, _) => format!("{} (not there at the start)", change.key),
        (_, Value::Null) => format!("{} (not there now)", change.key),
        (from, to) if is_digest(from) && is_digest(to) => format!("{} (other content)", change.key),
        (from, to) => format!("{} (from {from} to {to})", change.key),
    };
    let mut text = changes.iter().take(SHOWN).map(one).collect::<Vec<_>>().join(", ");
    if changes.len() > SHOWN {
        let _ = write!(text, " and {} more", changes.len() - SHOWN);
    }
    text
}

/// Returns the values and digests of a model folder, by file and field.
fn folder_digests(folder: &ModelFolder, config: &TrainConfig) -> Result<BTreeMap<String, Value>> {
    let path = folder.path();
    let mut found = BTreeMap::new();
    let mut put = |file: &str, field: &str, value: Value| found.insert(format!("{file}: {field}"), value);
    put("config.json", "architectures", folder.family().to_string().into());
    let shape = serde_json::to_value(folder.config()).map_err(|e| Error::Text(format!("config.json: {e}")))?;
    for (field, value) in shape.as_object().into_iter().flatten() {
        put("config.json", field, value.clone());
    }
    put("generation_config.json", "eos_token_id", folder.generation().eos_token_id.clone().into());
    let generation = object(&path.join("generation_config.json"))?.unwrap_or_default();
    for field in GENERATION_FIELDS {
        if let Some(value) = generation.get(field).filter(|value| !value.is_null()) {
            put("generation_config.json", field, value.clone());
        }
    }
    for (field, value) in object(&path.join("tokenizer.json"))?.unwrap_or_default() {
        // Defaults for padding and truncation of batches are not used.
        if field != "truncation" && field != "padding" {
            put("tokenizer.json", &field, digest(value));
        }
    }
    let tokenizer = object(&path.join("tokenizer_config.json"))?.unwrap_or_default();
    let special = object(&path.join("special_tokens_map.json"))?.unwrap_or_default();
    for (file, fields) in [("tokenizer_config.json", &tokenizer), ("special_tokens_map.json", &special)] {
        for field in TOKENIZER_FIELDS {
            if let Some(value) = fields.get(field).filter(|value| !value.is_null()) {
                put(file, field, digest(value.clone()));
            }
        }
    }
    // The template file takes precedence over the field of tokenizer_config.json.
    let template = text(&path.join("chat_template.jinja"))?.map(Value::from);
    if let Some(template) = template.or_else(|| tokenizer.get("chat_template").cloned()) {
        put("chat_template.jinja", "text", digest(template));
    }
    if let Some(template) = text(&path.join("additional_chat_templates").join("tool_use.jinja"))? {
        put("tool_use.jinja", "text", digest(template.into()));
    }
    for (key, path) in [
        ("data.chat_template", &config.data.chat_template),
        ("data.training_chat_template", &config.data.training_chat_template),
    ] {
        // A template that comes with grpo has no file.
        if let Some(template) = path.as_deref().map(text).transpose()?.flatten() {
            put(key, "text", digest(template.into()));
        }
    }
    let weights = folder.weights()?;
    for name in weights.names() {
        let tensor = weights.tensor(name)?;
        let blocks: Vec<[u8; 32]> =
            tensor.bytes().par_chunks(BLOCK).map(|block| Sha256::digest(block).into()).collect();
        // Otherwise the whole file would count as memory of this process.
        tensor.release();
        let content = sha256(&blocks.concat());
        put("weights", name, format!("{:?} {:?} sha256:{content}", tensor.dtype(), tensor.shape()).into());
    }
    Ok(found)
}

/// Returns size and digest of every data file, by its use and path.
fn data(config: &TrainConfig) -> Result<BTreeMap<String, Value>> {
    let of = |role: &'static str, path: &Path| Ok((format!("{role} {}", path.display()), file_digest(path)?));
    let data = &config.data;
    let files = data.files.iter().map(|file| ("data.files", file.path.as_path()));
    let held_out = data.eval_files.iter().map(|file| ("data.eval_files", file.path.as_path()));
    let tools = data.tools_file.iter().map(|path| ("data.tools_file", path.as_path()));
    files.chain(held_out).chain(tools).map(|(role, path)| of(role, path)).collect()
}

/// Returns the size, the number of lines and the digest of a file.
fn file_digest(path: &Path) -> Result<Value> {
    let read = || {
        let (mut file, _) = open_regular(path)?;
        let (mut hash, mut block, mut bytes, mut lines) = (Sha256::new(), vec![0; 1 << 20], 0_u64, 0_u64);
        loop {
            let count = file.read(&mut block)?;
            if count == 0 {
                break;
            }
            hash.update(&block[..count]);
            bytes += count as u64;
            lines += block[..count].iter().filter(|byte| **byte == b'\n').count() as u64;
        }
        Ok(json!({ "bytes": bytes, "lines": lines, "sha256": hex(&hash.finalize()) }))
    };
    read().map_err(|e| Error::io("read", path, e))
}

/// Reads the object in a JSON file; `None` if there is no file.
fn object(path: &Path) -> Result<Option<Map<String, Value>>> {
    let Some(text) = text(path)? else { return Ok(None) };
    let expected = |e: serde_json::Error| Error::Text(format!("{}: expected a JSON object: {e}", path.display()));
    grpo_models::from_python_json(text.as_bytes()).map(Some).map_err(expected)
}

/// Reads the text of a file; `None` if there is no file.
fn text(path: &Path) -> Result<Option<String>> {
    if !path.exists() {
        return Ok(None);
    }
    let bytes = read_regular(path, TEXT_LIMIT).map_err(|e| Error::io("read", path, e))?;
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

/// Returns a digest of JSON that does not depend on the order of keys or on white space.
fn digest(mut value: Value) -> Value {
    value.sort_all_objects();
    format!("sha256:{}", sha256(value.to_string().as_bytes())).into()
}
