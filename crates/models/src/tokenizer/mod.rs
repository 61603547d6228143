//! Tokenizers.

mod character;
mod checks;
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
/// use grpo_models::{CharTokenizer, Tokenizer};
///
/// # fn main() -> grpo_models::Result<()> {
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

    /// Encodes a prompt that a chat template has already rendered: special tokens in it are parsed, and a leading BOS is not repeated.
    ///
    /// # Errors
    /// The errors of [`Tokenizer::encode`].
    fn encode_rendered(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_prompt(text)
    }

    /// Returns the first special-token string in `text`, which [`Tokenizer::encode`] encodes as text.
    fn special_token<'a>(&self, text: &'a str) -> Option<&'a str> {
        let _ = text;
        None
    }

    /// Returns `true` if conversations can be encoded, see [`Tokenizer::encode_messages`].
    fn has_chat_template(&self) -> bool {
        false
    }

    /// Encodes a conversation in the model's chat template, up to the start of the answer. `tools` are the functions that it may call, and
    /// `documents` the texts that it refers to: the arguments of `apply_chat_template` in `transformers`.
    ///
    /// # Errors
    /// [`crate::Error::NoChatTemplate`] if the model has none; [`crate::Error::ChatTemplate`] if the template rejects the messages;
    /// [`crate::Error::Messages`] if they are not a conversation.
    fn encode_messages(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        documents: Option<&Value>,
    ) -> Result<Vec<u32>> {
        let _ = (messages, tools, documents);
        Err(Error::NoChatTemplate)
    }

    /// Renders a conversation to the text that [`Tokenizer::encode_messages`] encodes, before special-token strings in messages are marked.
    ///
    /// # Errors
    /// The errors of [`Tokenizer::encode_messages`].
    fn render_messages(&self, messages: &[Value], tools: Option<&Value>) -> Result<String> {
        let _ = (messages, tools);
        Err(Error::NoChatTemplate)
    }

    /// Returns the name of the chat template, such as its file, for errors.
    fn chat_template_name(&self, with_tools: bool) -> String {
        let _ = with_tools;
        "the chat template".into()
    }

    /// Counts the tokens of a prompt. May return an upper bound if the bound is at most `limit`, so that short prompts need not be encoded.
    ///
    /// # Errors
    /// The errors of [`Tokenizer::encode_prompt`].
    fn count_prompt(&self, text: &str, limit: usize) -> Result<usize> {
        let _ = limit;
        Ok(self.encode_prompt(text)?.len())
    }

    /// Counts the tokens of a conversation, like [`Tokenizer::count_prompt`].
    ///
    /// # Errors
    /// The errors of [`Tokenizer::encode_messages`].
    fn count_messages(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        documents: Option<&Value>,
        limit: usize,
    ) -> Result<usize> {
        let _ = limit;
        Ok(self.encode_messages(messages, tools, documents)?.len())
    }

    /// Encodes a whole completion: the ids of `text`, then EOS.
    ///
    /// # Errors
    /// The errors of [`Tokenizer::encode`].
    fn encode_completion(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.encode(text)?;
        ids.push(self.eos_id());
        Ok(ids)
    }

    /// Decodes `ids`, including special tokens if the tokenizer has strings for them. Stop texts are searched in the result.
    ///
    /// # Errors
    /// The errors of [`Tokenizer::decode`].
    fn decode_with_special(&self, ids: &[u32]) -> Result<String> {
        self.decode(ids)
    }

    /// Decodes `ids` for rewards. Stop tokens at the end are removed. Other special tokens depend on the tokenizer: [`CharTokenizer`] shows
    /// them; [`HfTokenizer`] removes them, as TRL does before rewards.
    ///
    /// # Errors
    /// [`crate::Error::UnknownToken`]; [`crate::Error::Tokenizer`] from other implementations.
    fn decode(&self, ids: &[u32]) -> Result<String>;
}
