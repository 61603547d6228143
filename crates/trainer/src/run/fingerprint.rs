//! What a run was begun with, beside its configuration: the model in its folder, and the rows of its files.
//!
//! `fingerprint.json` in the folder of the run has, of a model that is read, the values of `config.json` that the decoder is made of, the
//! tokens that end a completion, a SHA-256 of each part of the tokenizer, of the chat template, and of every tensor (dtype, shape and all of
//! its bytes); and of each data file its size and a SHA-256 of its bytes. A run goes on where all of this is the same. Names of
//! files do not count: weights in other shards are the same weights.
//!
//! All bytes of the weights are read, tensor by tensor on all threads: with LoRA a checkpoint holds the adapters alone, and a base with
//! one other value is another model.

use super::changes::Change;
use super::checkpoint::sha256;
use super::dir::RunDir;
use crate::error::{Error, Result};
use crate::pretrained::Pretrained;
use crate::train_config::TrainConfig;
use grpo_files::{open_regular, read_regular, write_atomically};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::Read;
use std::path::Path;

/// The name and version of the format.
const FORMAT: &str = "grpo-fingerprint/1";
/// The largest fingerprint.json that is read, in bytes; a tensor takes some 150 of them.
const LIMIT: u64 = 1 << 26;
/// The largest file of a tokenizer that is read, in bytes.
const TEXT_LIMIT: u64 = 1 << 30;
/// Tensors are hashed in blocks of so many bytes, on all threads; their digests are hashed again.
const BLOCK: usize = 1 << 24;
/// The number of differences that an error names.
const SHOWN: usize = 5;
/// The fields of tokenizer_config.json and special_tokens_map.json that are read; the chat template is looked at by itself.
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
/// The fields of generation_config.json that say which tokens may be sampled.
const GENERATION_FIELDS: [&str; 4] = ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"];

/// What a run was begun with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Fingerprint {
    /// The name and version of the format, [`FORMAT`].
    format: String,
    /// Of the model that is read, by file and field; empty for a new one.
    model: BTreeMap<String, Value>,
    /// Of every data file, by its path.
    data: BTreeMap<String, Value>,
}

impl Fingerprint {
    /// The present model and files of a configuration.
    ///
    /// # Errors
    /// Those of a model that is read, and [`Error::File`].
    pub(super) fn of(config: &TrainConfig) -> Result<Self> {
        Ok(Self { data: data(config)?, ..Self::of_model(config)? })
    }

    /// The present model alone.
    fn of_model(config: &TrainConfig) -> Result<Self> {
        let model = match Pretrained::of(config)? {
            Some(model) => of_folder(&model, config)?,
            None => BTreeMap::new(),
        };
        Ok(Self { format: FORMAT.to_owned(), model, data: BTreeMap::new() })
    }

    /// Writes it into the folder of a run.
    ///
    /// # Errors
    /// [`Error::File`].
    pub(super) fn write(&self, dir: &RunDir) -> Result<()> {
        let json = serde_json::to_vec_pretty(self).map_err(|e| Error::Text(format!("fingerprint.json: {e}")))?;
        Ok(write_atomically(&dir.fingerprint_path(), &json)?)
    }

    /// That of the beginning of a run.
    fn read(dir: &RunDir) -> Result<Self> {
        let path = dir.fingerprint_path();
        let refused = |reason: String| Error::RunDir { path: path.clone(), reason };
        if !path.is_file() {
            return Err(refused(
                "it is missing, so nothing says whether model and data are still the run's: restore it, or start a new run \
                 from config.yaml with `--config`"
                    .into(),
            ));
        }
        let bytes = read_regular(&path, LIMIT).map_err(|e| Error::io("read", &path, e))?;
        let found: Self =
            serde_json::from_slice(&bytes).map_err(|e| refused(format!("expected the fingerprint of a run: {e}")))?;
        match found.format == FORMAT {
            true => Ok(found),
            false => Err(refused(format!("expected the format {FORMAT}, found {}", found.format))),
        }
    }
}

/// Checks that the model of `config` is the one that the run in `dir` was begun with.
///
/// # Errors
/// [`Error::RunDir`] that names what has changed; those of [`Fingerprint::of`].
pub(super) fn check_model(dir: &RunDir, config: &TrainConfig) -> Result<()> {
    let now = Fingerprint::of_model(config)?;
    if now.model.is_empty() { Ok(()) } else { same_model(dir, &Fingerprint::read(dir)?, &now) }
}

/// Checks that model and data of `config` are what the run in `dir` was begun with, and returns what to record where
/// `run.allow_changed_data` lets the data be another: the fingerprint, and the changes.
///
/// # Errors
/// [`Error::RunDir`] that names what has changed; those of [`Fingerprint::of`].
pub(super) fn check(dir: &RunDir, config: &TrainConfig) -> Result<(Fingerprint, Vec<Change>)> {
    let now = Fingerprint::of(config)?;
    if now.model.is_empty() && now.data.is_empty() {
        return Ok((now, Vec::new()));
    }
    let before = Fingerprint::read(dir)?;
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
        return Err(Error::RunDir { path: dir.root().to_owned(), reason });
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
    Err(Error::RunDir { path: dir.root().to_owned(), reason })
}

/// What differs, by name; null where one side lacks it.
fn differences(before: &BTreeMap<String, Value>, now: &BTreeMap<String, Value>) -> Vec<Change> {
    let names = before.keys().chain(now.keys().filter(|name| !before.contains_key(*name)));
    let value = |map: &BTreeMap<String, Value>, name: &String| map.get(name).cloned().unwrap_or_default();
    let changes = names.map(|name| Change { key: name.clone(), from: value(before, name), to: value(now, name) });
    changes.filter(|change| change.from != change.to).collect()
}

/// The first changes, for people. A digest says nothing to them.
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

/// Of a model folder, by file and field.
fn of_folder(model: &Pretrained, config: &TrainConfig) -> Result<BTreeMap<String, Value>> {
    let (folder, path) = (&model.folder, model.folder.path());
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
        // Of training batches; they are not used.
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
    // Where both are there, the file decides.
    let template = text(&path.join("chat_template.jinja"))?.map(Value::from);
    if let Some(template) = template.or_else(|| tokenizer.get("chat_template").cloned()) {
        put("chat_template.jinja", "text", digest(template));
    }
    if let Some(template) = text(&path.join("additional_chat_templates").join("tool_use.jinja"))? {
        put("tool_use.jinja", "text", digest(template.into()));
    }
    if let Some(template) = config.data.chat_template.as_deref().map(text).transpose()?.flatten() {
        put("data.chat_template", "text", digest(template.into()));
    }
    let weights = folder.weights()?;
    let names: Vec<&str> = weights.names().collect();
    for name in names {
        let tensor = weights.tensor(name)?;
        let blocks: Vec<[u8; 32]> =
            tensor.bytes().par_chunks(BLOCK).map(|block| Sha256::digest(block).into()).collect();
        let content = sha256(&blocks.concat());
        put("weights", name, format!("{:?} {:?} sha256:{content}", tensor.dtype(), tensor.shape()).into());
    }
    Ok(found)
}

/// Of every data file, in their roles.
fn data(config: &TrainConfig) -> Result<BTreeMap<String, Value>> {
    let of = |role: &'static str, path: &Path| Ok((format!("{role} {}", path.display()), of_file(path)?));
    let data = &config.data;
    let files = data.files.iter().map(|file| ("data.files", file.path.as_path()));
    let held_out = data.eval_files.iter().map(|file| ("data.eval_files", file.path.as_path()));
    let tools = data.tools_file.iter().map(|path| ("data.tools_file", path.as_path()));
    files.chain(held_out).chain(tools).map(|(role, path)| of(role, path)).collect()
}

/// The size and the digest of a file, and its number of lines.
fn of_file(path: &Path) -> Result<Value> {
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
        let digest: [u8; 32] = hash.finalize().into();
        Ok((bytes, lines, digest))
    };
    let (bytes, lines, digest) = read().map_err(|e| Error::io("read", path, e))?;
    let digest = digest.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
    Ok(json!({ "bytes": bytes, "lines": lines, "sha256": digest }))
}

/// The object in a JSON file, if the file is there.
fn object(path: &Path) -> Result<Option<Map<String, Value>>> {
    let Some(text) = text(path)? else { return Ok(None) };
    let expected = |e: serde_json::Error| Error::Text(format!("{}: expected a JSON object: {e}", path.display()));
    serde_json::from_str(&text).map(Some).map_err(expected)
}

/// The text of a file, if it is there.
fn text(path: &Path) -> Result<Option<String>> {
    if !path.exists() {
        return Ok(None);
    }
    let bytes = read_regular(path, TEXT_LIMIT).map_err(|e| Error::io("read", path, e))?;
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

/// A digest of JSON, whatever the order of its keys and the spaces between them.
fn digest(mut value: Value) -> Value {
    value.sort_all_objects();
    format!("sha256:{}", sha256(value.to_string().as_bytes())).into()
}
