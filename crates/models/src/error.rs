//! The errors of this crate.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid value of the model's configuration.
    #[error("configuration key `{key}`: expected {expected}, got {found}")]
    Config {
        /// The dotted path of the key in a run's configuration, such as `model.hidden_size`.
        key: &'static str,
        /// The valid values.
        expected: String,
        /// The value found.
        found: String,
    },
    /// A file or folder cannot be read or written.
    #[error(transparent)]
    File(#[from] grpo_files::Error),
    /// A file of a model folder is not JSON, or not the expected JSON object.
    #[error("{path}, line {line}, column {column}: {reason}", path = path.display())]
    Json {
        /// The path of the file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The column, from 1; 0 at the end of the file.
        column: usize,
        /// The problem.
        reason: String,
    },
    /// A field of a model folder's file is missing, invalid, or asks for an unsupported computation.
    #[error("{path}: `{field}` is {found}; supported: {supported}", path = path.display())]
    Field {
        /// The file, such as `config.json`.
        path: PathBuf,
        /// The name of the field; dots separate nested keys.
        field: String,
        /// The value in JSON, or `missing`.
        found: String,
        /// The supported values.
        supported: String,
    },
    /// Weights are unusable as a whole: no file, a damaged file, or shards that contradict the index.
    #[error("weights of {path}: {reason}", path = path.display())]
    Weights {
        /// The folder or the file.
        path: PathBuf,
        /// The problem and its fix.
        reason: String,
    },
    /// A tensor is missing in the model, or in a file.
    #[error("{path} has {what} `{name}`{}", nearest_hint(nearest.as_deref()), path = path.display())]
    UnknownTensor {
        /// The file or folder.
        path: PathBuf,
        /// The role of the missing tensor in words.
        what: &'static str,
        /// The name.
        name: String,
        /// The most similar known name.
        nearest: Option<String>,
    },
    /// The weights lack tensors of the model.
    #[error("{path} lacks {count} of the model's tensors: {names}", path = path.display())]
    MissingTensors {
        /// The file or folder.
        path: PathBuf,
        /// The number of missing tensors.
        count: usize,
        /// The first missing names.
        names: String,
    },
    /// The shape of a tensor differs from the configuration.
    #[error("{path}: tensor `{name}` is {found:?}, but its configuration makes it {expected:?}", path = path.display())]
    TensorShape {
        /// The path of the safetensors file that holds the tensor.
        path: PathBuf,
        /// The tensor's name in that file.
        name: String,
        /// The shape according to the configuration.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// The dtype of a tensor is not supported.
    #[error("{path}: tensor `{name}` is {found}; supported: F32, BF16, F16", path = path.display())]
    TensorDtype {
        /// The path of the safetensors file that holds the tensor.
        path: PathBuf,
        /// The tensor's name in that file.
        name: String,
        /// The dtype by safetensors' name.
        found: String,
    },
    /// A weight is NaN or infinite.
    #[error("{path}: tensor `{name}` holds {value} at index {index} (row-major)", path = path.display())]
    NotFinite {
        /// The path of the safetensors file that holds the tensor.
        path: PathBuf,
        /// The tensor's name in that file.
        name: String,
        /// The first such index in the flat tensor.
        index: usize,
        /// The value.
        value: f32,
    },
    /// The number of values differs from the tensor's.
    #[error("tensor `{name}`: expected {expected}, got {found}")]
    Length {
        /// The name of the tensor.
        name: String,
        /// The expected number of values in words.
        expected: String,
        /// The number of values found.
        found: usize,
    },
    /// A LoRA target is not a matrix of the model, or matches none.
    #[error("LoRA target {target:?}: {reason}")]
    Target {
        /// The name or the pattern.
        target: String,
        /// The problem, and valid targets.
        reason: String,
    },
    /// A model is neither a folder nor in Hugging Face's cache, and was not downloaded.
    #[error("model {model:?} was not found: {}", tried.join("; "))]
    NotFound {
        /// The requested name or folder.
        model: String,
        /// The attempts in order, with the reasons of their failure.
        tried: Vec<String>,
    },
    /// A data set is not in Hugging Face's cache, and was not downloaded.
    #[error("data set {name:?} was not found: {}", tried.join("; "))]
    DatasetNotFound {
        /// The requested name.
        name: String,
        /// The attempts in order, with the reasons of their failure.
        tried: Vec<String>,
    },
    /// The hub was not asked, or does not respond.
    #[error("{reason}")]
    HubAccess {
        /// The reason, with the address.
        reason: String,
    },
    /// The tokenizer has no token for a character.
    #[error("character {character:?} at position {position} of {text:?} is not in the tokenizer's alphabet")]
    UnknownCharacter {
        /// The character that has no token.
        character: char,
        /// Its index in the text in characters.
        position: usize,
        /// The whole text.
        text: String,
    },
    /// A token id is outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocab_size} tokens")]
    UnknownToken {
        /// The token id.
        id: u32,
        /// The number of tokens in the vocabulary.
        vocab_size: usize,
    },
    /// A text has an added token of the tokenizer that the model lacks.
    #[error(
        "the token {token:?} has the id {id}, but the model knows ids below {vocab_size} only (vocab_size of config.json): expected a text and \
         a chat template without it, or a model with this token"
    )]
    MissingToken {
        /// The token's text.
        token: String,
        /// The token id.
        id: u32,
        /// The number of tokens in the model's vocabulary.
        vocab_size: usize,
    },
    /// The rows have messages, but the model has no chat template.
    #[error(
        "the rows have messages, and the model has no chat template to render them with: name a Jinja file, as in `data: {{ chat_template: \
         chatml.jinja }}`, or give rows with texts as prompts"
    )]
    NoChatTemplate,
    /// An invalid date for chat templates.
    #[error("expected a date such as 2026-11-25 or 2026-11-25T09:30:00, got {text:?} ({reason})")]
    Date {
        /// The text found.
        text: String,
        /// The problem.
        reason: String,
    },
    /// A chat template does not parse, raises an error, or cannot render the messages.
    #[error("chat template ({origin}){}: {message}", line.map_or_else(String::new, |line| format!(", line {line}")))]
    ChatTemplate {
        /// The file or other origin of the template.
        origin: String,
        /// The line in the template, from 1, if known.
        line: Option<usize>,
        /// The template's own message, or the problem.
        message: String,
    },
    /// A chat template cannot be used for conversations of several turns.
    #[error(
        "chat template ({template}): {reason}; name a template for conversations of several turns, a file or one of {}, as in \
         `data: {{ training_chat_template: {} }}`{}",
        crate::TRAINING_TEMPLATES.map(|(name, _)| name).join(", "), crate::TRAINING_TEMPLATES[0].0,
        if *can_fork { ", or render conversations anew with `data: { history: fork }`" } else { "" }
    )]
    Turns {
        /// The name of the template, such as its file.
        template: String,
        /// The change that it makes to a conversation.
        reason: String,
        /// `true` if [`TurnTokens::forking`](crate::TurnTokens::forking) takes the template.
        can_fork: bool,
    },
    /// Messages are not a valid conversation.
    #[error("messages: {0}")]
    Messages(String),
    /// A tokenizer file is missing or does not match the model.
    #[error("{path}: {reason}", path = path.display())]
    TokenizerFile {
        /// The path of the file, such as `tokenizer.json`.
        path: PathBuf,
        /// The problem and its fix.
        reason: String,
    },
    /// The encoding or decoding error of another crate's tokenizer.
    #[error("tokenizer: {0}")]
    Tokenizer(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Returns an [`Error::File`].
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        grpo_files::Error::io(action, path, source).into()
    }

    /// Returns an [`Error::Weights`].
    pub(crate) fn weights(path: &Path, reason: impl Into<String>) -> Self {
        Self::Weights { path: path.to_owned(), reason: reason.into() }
    }

    /// Returns an [`Error::MissingTensors`] that lists the first of `names`.
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

/// Returns a text, truncated after `longest` characters.
pub(crate) fn shortened(text: &str, longest: usize) -> String {
    match text.char_indices().nth(longest) {
        Some((end, _)) => format!("{} ...", &text[..end]),
        None => text.to_owned(),
    }
}

/// Returns the expected value of a number in a range.
pub(crate) fn between(range: &RangeInclusive<f64>) -> String {
    format!("a number between {:?} and {:?}", range.start(), range.end())
}

/// Returns the name in `known` that is most similar to `name`, if it is similar enough.
pub(crate) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let near = known.into_iter().map(|other| (strsim::normalized_levenshtein(name, other), other));
    near.filter(|(score, _)| *score > 0.6).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, other)| other.to_owned())
}

/// Returns an [`Error::Config`] for `key` unless `ok`.
pub(crate) fn check(ok: bool, key: &'static str, expected: &str, found: impl ToString) -> Result<()> {
    if ok {
        return Ok(());
    }
    Err(Error::Config { key, expected: expected.to_owned(), found: found.to_string() })
}
