//! The file-related types of the section `data`.

use crate::prompt::is_message;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// A file of rows, or a data set of several files.
///
/// In a configuration it is a path, or an object: `{path: gsm8k.jsonl, weight: 2, name: gsm8k}`, or `{path: openai/gsm8k, config: main}`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DataFile {
    /// The path of a file or of a folder, absolute or relative to the working folder; or the name of a data set on the Hugging Face Hub,
    /// `OWNER/NAME` or `hf://datasets/OWNER/NAME`. A file or folder takes precedence.
    pub path: PathBuf,
    /// The relative frequency of its rows, above 0. Without weights, every row of every file occurs once per epoch. Either all files have a
    /// weight or none. The files of a data set share its weight equally.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// The format; by default that of the file extension.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<FileFormat>,
    /// The name of its rows in metrics; by default the file name without extension, or the name of the data set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The configuration of a data set, which `load_dataset` calls `name`; by default its only or its default one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
    /// The split of a data set; by default `train`, and `test` in `data.eval_files`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<String>,
    /// The branch, tag or commit of a data set on the hub; by default `main`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
}

impl DataFile {
    /// Returns a file without a weight or a name.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), weight: None, format: None, name: None, config: None, split: None, revision: None }
    }

    /// Returns `format`, or else the format of the file extension.
    pub fn format(&self) -> FileFormat {
        self.format.unwrap_or(match self.path.extension().and_then(|ending| ending.to_str()) {
            Some("parquet") => FileFormat::Parquet,
            Some("json") => FileFormat::Json,
            _ => FileFormat::Jsonl,
        })
    }

    /// Returns the name of its rows in metrics.
    pub fn source(&self) -> String {
        let stem = |path: &Path| path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        self.name.clone().or_else(|| stem(&self.path)).unwrap_or_else(|| "data".into())
    }
}

impl<'de> Deserialize<'de> for DataFile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(
            untagged,
            deny_unknown_fields,
            expecting = "expected a path, or an object with `path` and perhaps `weight`, `format`, `name`, `config`, `split`, `revision`"
        )]
        enum Form {
            Path(PathBuf),
            Whole {
                path: PathBuf,
                weight: Option<f64>,
                format: Option<FileFormat>,
                name: Option<String>,
                config: Option<String>,
                split: Option<String>,
                revision: Option<String>,
            },
        }
        Ok(match Form::deserialize(deserializer)? {
            Form::Path(path) => Self::new(path),
            Form::Whole { path, weight, format, name, config, split, revision } => {
                Self { path, weight, format, name, config, split, revision }
            }
        })
    }
}

pub(super) fn one_or_more<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<DataFile>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a file (a path, or an object with `path`), or a list of files")]
    enum Form {
        List(Vec<DataFile>),
        One(DataFile),
    }
    Ok(match Form::deserialize(deserializer)? {
        Form::List(files) => files,
        Form::One(file) => vec![file],
    })
}

/// The format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileFormat {
    /// A JSON object per line, in UTF-8.
    Jsonl,
    /// A list of JSON objects, or a JSON object per line.
    Json,
    /// Parquet, in builds with the feature `parquet`.
    Parquet,
}

/// The treatment of conversations whose chat template rewrites earlier turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum History {
    /// A template that rewrites earlier turns is refused.
    #[default]
    Keep,
    /// A conversation is rendered anew after every turn, and goes on in another row if the tokens before have changed.
    Fork,
}

/// The choice of texts that become messages for the model's chat template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(into = "Value")]
pub enum ApplyChatTemplate {
    /// A `question` becomes a user message if the model has a chat template; a `prompt` text stays text, as in TRL. In files: `auto`.
    #[default]
    Auto,
    /// Every text becomes a user message; a model without a chat template is an error. In files: `true`.
    Always,
    /// Every text stays text. In files: `false`.
    Never,
}

impl From<ApplyChatTemplate> for Value {
    fn from(choice: ApplyChatTemplate) -> Self {
        match choice {
            ApplyChatTemplate::Auto => "auto".into(),
            ApplyChatTemplate::Always => true.into(),
            ApplyChatTemplate::Never => false.into(),
        }
    }
}

impl<'de> Deserialize<'de> for ApplyChatTemplate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::Bool(true) => Ok(Self::Always),
            Value::Bool(false) => Ok(Self::Never),
            // Values from the environment are strings.
            Value::String(text) if text == "auto" => Ok(Self::Auto),
            Value::String(text) if text == "true" => Ok(Self::Always),
            Value::String(text) if text == "false" => Ok(Self::Never),
            other => Err(serde::de::Error::custom(format!("expected auto, true or false, got {other}"))),
        }
    }
}

/// Examples before every prompt.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum FewShot {
    /// Text before the text of the prompt.
    Text(String),
    /// Messages before the user's message.
    Messages(Vec<Value>),
}

impl<'de> Deserialize<'de> for FewShot {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut value = Value::deserialize(deserializer)?;
        value.sort_all_objects();
        match value {
            Value::String(text) => Ok(Self::Text(text)),
            Value::Array(messages) => match messages.iter().find(|message| !is_message(message)) {
                None => Ok(Self::Messages(messages)),
                Some(other) => {
                    let expected = "messages with `role` and `content`, a user's and the assistant's in turn";
                    Err(serde::de::Error::custom(format!("expected {expected}, got {other}")))
                }
            },
            other => Err(serde::de::Error::custom(format!("expected a text or a list of messages, got {other}"))),
        }
    }
}

/// Deserialises a JSON object and sorts its keys, because merging layers of a configuration does not preserve their order.
pub(super) fn ordered_map<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Map<String, Value>, D::Error> {
    let mut map = Map::<String, Value>::deserialize(deserializer)?;
    map.values_mut().for_each(Value::sort_all_objects);
    map.sort_keys();
    Ok(map)
}
