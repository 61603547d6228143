//! Tokenizers.

mod character;
mod growth;
mod hugging_face;
pub(crate) mod marks;
mod special;

pub use character::CharTokenizer;
pub use hugging_face::HfTokenizer;

use crate::error::{Error, Result};
use serde_json::Value;

/// A tokenizer. Implement it to train with the tokenizer of your own model.
///
/// ```
/// use models::{CharTokenizer, Tokenizer};
///
/// # fn main() -> models::Result<()> {
/// let tokenizer: &dyn Tokenizer = &CharTokenizer;
/// let completion = tokenizer.encode_completion("42")?;
/// assert_eq!(completion.last(), Some(&tokenizer.eos_id()));
/// # Ok(())
/// # }
/// ```
pub trait Tokenizer: Send + Sync {
    /// Returns the vocabulary size V; ids are less than V.
    fn vocab_size(&self) -> usize;

    /// Returns the id of the token that ends every completion (EOS).
    fn eos_id(&self) -> u32;

    /// Returns the ids of all tokens that end a completion when they are sampled; EOS is one of them.
    fn stop_ids(&self) -> Vec<u32> {
        vec![self.eos_id()]
    }

    /// Returns the id that pads batches. It is never attended to and never trained on.
    fn pad_id(&self) -> u32;

    /// Encodes `text` without adding or parsing special tokens.
    ///
    /// # Errors
    /// [`crate::Error::UnknownCharacter`]; [`crate::Error::Tokenizer`] from other implementations.
    fn encode(&self, text: &str) -> Result<Vec<u32>>;

    /// Encodes a prompt, including the special tokens at its start.
    ///
    /// # Errors
    /// The errors of [`Tokenizer::encode`].
    fn encode_prompt(&self, text: &str) -> Result<Vec<u32>>;

    /// The ids of a prompt that a chat template has rendered before: special tokens in it are special, and a BOS with which it begins is not put
    /// before it again.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    fn encode_rendered(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_prompt(text)
    }

    /// The first string in `text` that is written like a special token, which [`Tokenizer::encode`] takes as text.
    fn special_token<'a>(&self, text: &'a str) -> Option<&'a str> {
        let _ = text;
        None
    }

    /// Whether conversations can be encoded, see [`Tokenizer::encode_messages`].
    fn has_chat_template(&self) -> bool {
        false
    }

    /// Encodes a conversation, with the tools that it may call, in the model's chat template, up to the start of the answer.
    ///
    /// # Errors
    /// [`crate::Error::NoChatTemplate`] if the model has none; [`crate::Error::ChatTemplate`] if the template rejects the messages;
    /// [`crate::Error::Messages`] if they are not a conversation.
    fn encode_messages(&self, messages: &[Value], tools: Option<&Value>) -> Result<Vec<u32>> {
        let _ = (messages, tools);
        Err(Error::NoChatTemplate)
    }

    /// The number of tokens of a prompt, or a bound on it that is at most `limit`: prompts that are short in any case need not be encoded.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_prompt`].
    fn count_prompt(&self, text: &str, limit: usize) -> Result<usize> {
        let _ = limit;
        Ok(self.encode_prompt(text)?.len())
    }

    /// The same of a conversation.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_messages`].
    fn count_messages(&self, messages: &[Value], tools: Option<&Value>, limit: usize) -> Result<usize> {
        let _ = limit;
        Ok(self.encode_messages(messages, tools)?.len())
    }

    /// The ids of a whole completion: those of `text`, then EOS.
    ///
    /// # Errors
    /// The errors of [`Tokenizer::encode`].
    fn encode_completion(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.encode(text)?;
        ids.push(self.eos_id());
        Ok(ids)
    }

    /// The text of `ids` with special tokens in it, where the tokenizer has texts for them: stop texts are looked for in it.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    fn decode_with_special(&self, ids: &[u32]) -> Result<String> {
        self.decode(ids)
    }

    /// The text of `ids` as rewards read it. The tokens that end a completion leave no trace. Whether other special tokens do
    /// is the tokenizer's: with [`CharTokenizer`] they show, [`HfTokenizer`] leaves them out as TRL's rewards never see them.
    ///
    /// # Errors
    /// [`crate::Error::UnknownToken`]; [`crate::Error::Tokenizer`] from other implementations.
    fn decode(&self, ids: &[u32]) -> Result<String>;
}
