//! The errors of this crate.

use crate::memory::{KNOBS, MemoryTable};
use grpo_core::readable_bytes;
use std::path::{Path, PathBuf};

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value of the model's configuration that is not legal.
    #[error("configuration key `{key}`: expected {expected}, got {found}")]
    Config {
        /// Dotted path of the key in a run's configuration, such as `model.hidden_size`.
        key: &'static str,
        /// The values that would be legal.
        expected: String,
        /// The value that was given.
        found: String,
    },
    /// A file or folder that cannot be read or written.
    #[error(transparent)]
    File(#[from] grpo_files::Error),
    /// A file of a model folder that is not JSON, or not the JSON object that it should be.
    #[error("{path}, line {line}, column {column}: {reason}", path = path.display())]
    Json {
        /// The path of the file that is not JSON, or not the object that it should be.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The column, from 1; 0 where the file ends.
        column: usize,
        /// What is wrong there.
        reason: String,
    },
    /// A field of a model folder's file that is missing, not legal, or asks for mathematics that is not computed here.
    #[error("{path}: `{field}` is {found}; supported: {supported}", path = path.display())]
    Field {
        /// The file, such as `config.json`.
        path: PathBuf,
        /// The name of the field; dots lead into objects.
        field: String,
        /// The value in JSON, or `missing`.
        found: String,
        /// The values that would be taken.
        supported: String,
    },
    /// Weights that cannot be used as a whole: no file, a damaged one, shards and index that contradict each other.
    #[error("weights of {path}: {reason}", path = path.display())]
    Weights {
        /// The folder or the file.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A tensor that the model does not have, or that a file does not have.
    #[error("{path} has {what} `{name}`{}", nearest_hint(nearest.as_deref()), path = path.display())]
    UnknownTensor {
        /// The file or folder.
        path: PathBuf,
        /// Who lacks it, in words.
        what: &'static str,
        /// The name.
        name: String,
        /// The name that comes nearest to it among those that would be known.
        nearest: Option<String>,
    },
    /// Tensors that the model wants and the weights lack.
    #[error("{path} lacks {count} of the model's tensors: {names}", path = path.display())]
    MissingTensors {
        /// The file or folder.
        path: PathBuf,
        /// The number of missing tensors.
        count: usize,
        /// The first of them.
        names: String,
    },
    /// A tensor whose shape is not the one that the configuration asks for.
    #[error("{path}: tensor `{name}` is {found:?}, but its configuration makes it {expected:?}", path = path.display())]
    TensorShape {
        /// The path of the safetensors file that holds the tensor.
        path: PathBuf,
        /// The tensor's name in that file.
        name: String,
        /// The shape by the configuration.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor of a number type that weights cannot have here.
    #[error("{path}: tensor `{name}` is {found}; supported: F32, BF16, F16", path = path.display())]
    TensorDtype {
        /// The path of the safetensors file that holds the tensor.
        path: PathBuf,
        /// The tensor's name in that file.
        name: String,
        /// The number type with safetensors' name.
        found: String,
    },
    /// A weight that is NaN or infinite.
    #[error("{path}: tensor `{name}` holds {value} at index {index} (row-major)", path = path.display())]
    NotFinite {
        /// The path of the safetensors file that holds the tensor.
        path: PathBuf,
        /// The tensor's name in that file.
        name: String,
        /// The first index at which it is so, in the flat tensor.
        index: usize,
        /// The value.
        value: f32,
    },
    /// As many values were handed in as a tensor does not have.
    #[error("tensor `{name}`: expected {expected}, got {found}")]
    Length {
        /// The name of the tensor that was to be written or read.
        name: String,
        /// The number of values that would fit, in words.
        expected: String,
        /// The number of values.
        found: usize,
    },
    /// A training that does not fit into memory.
    #[error(
        "{} of memory are needed and {} are free: {KNOBS}:\n{table}", readable_bytes(table.total()), readable_bytes(*available)
    )]
    TooLarge {
        /// The parts that need memory.
        table: MemoryTable,
        /// The memory that is available, in bytes.
        available: u64,
    },
    /// A target of LoRA that is not a matrix of the model, or none of them.
    #[error("LoRA target {target:?}: {reason}")]
    Target {
        /// The name or the pattern.
        target: String,
        /// What is wrong with it, and what would be taken.
        reason: String,
    },
    /// A model that is neither a folder nor in Hugging Face's cache, and that was not downloaded.
    #[error("model {model:?} was not found: {}", tried.join("; "))]
    NotFound {
        /// The name or the folder that was asked for.
        model: String,
        /// What was tried, in this order, and why it failed.
        tried: Vec<String>,
    },
    /// A character for which the tokenizer has no token.
    #[error("character {character:?} at position {position} of {text:?} is not in the tokenizer's alphabet")]
    UnknownCharacter {
        /// The character that has no token.
        character: char,
        /// Its index in the text, counted in characters.
        position: usize,
        /// The whole text.
        text: String,
    },
    /// A token id that is outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocab_size} tokens")]
    UnknownToken {
        /// The token id.
        id: u32,
        /// The number of tokens in the vocabulary.
        vocab_size: usize,
    },
    /// Messages for a model without a chat template.
    #[error(
        "the rows have messages, and the model has no chat template to render them with: name a Jinja file, as in `data: {{ chat_template: \
         chatml.jinja }}`, or give rows with texts as prompts"
    )]
    NoChatTemplate,
    /// A date for chat templates that is none.
    #[error("expected a date such as 2026-11-25 or 2026-11-25T09:30:00, got {text:?} ({reason})")]
    Date {
        /// The text that was given.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A chat template that does not parse, that raises, or that cannot be rendered for these messages.
    #[error("chat template ({origin}){}: {message}", line.map_or_else(String::new, |line| format!(", line {line}")))]
    ChatTemplate {
        /// The file of the template, or where else it comes from.
        origin: String,
        /// The line of the template, from 1, where it is known.
        line: Option<usize>,
        /// What the template raised, or what is wrong with it.
        message: String,
    },
    /// Messages that are no conversation.
    #[error("messages: {0}")]
    Messages(String),
    /// A file of a tokenizer that is missing, or that cannot be used with the model.
    #[error("{path}: {reason}", path = path.display())]
    TokenizerFile {
        /// The path of the file of the tokenizer, such as `tokenizer.json`.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A tokenizer of another crate that cannot encode or decode.
    #[error("tokenizer: {0}")]
    Tokenizer(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// An [`Error::File`].
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        grpo_files::Error::io(action, path, source).into()
    }

    /// An [`Error::Weights`].
    pub(crate) fn weights(path: &Path, reason: impl Into<String>) -> Self {
        Self::Weights { path: path.to_owned(), reason: reason.into() }
    }

    /// An [`Error::MissingTensors`] about `names`, of which it says the first.
    pub(crate) fn missing(path: &Path, names: &[&str]) -> Self {
        const SAID: usize = 4;
        let more = if names.len() > SAID { ", ..." } else { "" };
        let said: Vec<String> = names.iter().take(SAID).map(|name| format!("`{name}`")).collect();
        Self::MissingTensors { path: path.to_owned(), count: names.len(), names: said.join(", ") + more }
    }
}

fn nearest_hint(nearest: Option<&str>) -> String {
    nearest.map(|name| format!("; the nearest name is `{name}`")).unwrap_or_default()
}

/// The name among `known` that comes nearest to `name`, if any is near enough to be meant.
pub(crate) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let near = known.into_iter().map(|other| (strsim::normalized_levenshtein(name, other), other));
    near.filter(|(score, _)| *score > 0.6).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, other)| other.to_owned())
}

/// An [`Error::Config`] for `key` unless `ok`.
pub(crate) fn check(ok: bool, key: &'static str, expected: &str, found: impl ToString) -> Result<()> {
    if ok {
        return Ok(());
    }
    Err(Error::Config { key, expected: expected.to_owned(), found: found.to_string() })
}
