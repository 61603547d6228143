//! The errors of this crate.

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
        "the data has messages, and the model has no chat template to render them with; give one, or a text as prompt"
    )]
    NoChatTemplate,
    /// A tokenizer of another crate that cannot encode or decode.
    #[error("tokenizer: {0}")]
    Tokenizer(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// An [`Error::Config`] for `key` unless `ok`.
pub(crate) fn check(ok: bool, key: &'static str, expected: &str, found: impl ToString) -> Result<()> {
    if ok {
        return Ok(());
    }
    Err(Error::Config { key, expected: expected.to_owned(), found: found.to_string() })
}
