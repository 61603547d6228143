//! Checks of tokenizer.json that the library `tokenizers` lacks.

use super::growth::{Growth, MAX_TOKEN, Parts};
use serde_json::Value;
use std::collections::HashMap;

/// The contents of tokenizer.json that are checked.
#[derive(serde::Deserialize)]
pub(super) struct TokenizerFile {
    #[serde(flatten)]
    parts: Parts,
    #[serde(default)]
    added_tokens: Vec<Added>,
}

#[derive(serde::Deserialize)]
struct Added {
    content: String,
    /// A number, which only [`TokenizerFile::check_added_ids`] requires.
    #[serde(default)]
    id: Value,
}

impl TokenizerFile {
    /// Checks the parts before a tokenizer is built from them, and returns the bound on the growth of texts.
    pub(super) fn growth(&self) -> Result<Growth, String> {
        let growth = self.parts.growth()?;
        self.added_tokens.iter().try_for_each(|token| check_added(&token.content, &growth))?;
        Ok(growth)
    }

    /// Checks that `inner` kept the ids of added tokens: the library silently renumbers added tokens outside the vocabulary without gaps.
    pub(super) fn check_added_ids(&self, inner: &tokenizers::Tokenizer) -> Result<(), String> {
        // The library drops empty tokens.
        let named = self.added_tokens.iter().filter(|token| !token.content.is_empty());
        let added = named.map(|Added { content, id }| match id.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) => Ok((content, id)),
            None => Err(format!("expected the added token {content:?} with a whole number as id, got {id}")),
        });
        let mut contents = HashMap::new();
        for (content, id) in added.collect::<Result<Vec<_>, _>>()? {
            if let Some(other) = contents.insert(id, content).filter(|other| *other != content) {
                return Err(format!(
                    "the added tokens {other:?} and {content:?} both have the id {id}: expected an id of its own for each"
                ));
            }
            match inner.token_to_id(content) {
                Some(found) if found != id => {
                    return Err(format!(
                        "the added token {content:?} has the id {id}, and the library `tokenizers` gives it {found}: expected the \
                         vocabulary's own id, or the ids behind it without a gap"
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Checks the length of an added token, before and after normalization.
pub(super) fn check_added(content: &str, growth: &Growth) -> Result<(), String> {
    check_length(content)?;
    growth.check(content)
}

fn check_length(token: &str) -> Result<(), String> {
    if token.len() > MAX_TOKEN {
        let begin: String = token.chars().take(20).collect();
        return Err(format!(
            "expected tokens of at most {MAX_TOKEN} bytes, got one of {} that begins with {begin:?}",
            token.len()
        ));
    }
    Ok(())
}

/// Calls the library, and turns a panic into an error. Some damaged tables make it panic.
pub(super) fn caught<T>(work: impl FnOnce() -> Result<T, tokenizers::Error>) -> Result<T, tokenizers::Error> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err("the library `tokenizers` failed: tokenizer.json is damaged".into()))
}

/// Checks that ids in the vocabulary are unique, that no token is too long, and that the model knows every token that a text can have. Added
/// tokens may be unknown to it: tokenizers are shared with larger models (Gemma 3's has a token for images).
pub(super) fn check_tokens(inner: &tokenizers::Tokenizer, vocab_size: usize) -> Result<(), String> {
    let mut tokens = HashMap::new();
    for (token, id) in inner.get_vocab(false) {
        check_length(&token)?;
        if let Some(other) = tokens.insert(id, token.clone()) {
            let (first, second) = if other < token { (other, token) } else { (token, other) };
            return Err(format!(
                "the tokens {first:?} and {second:?} both have the id {id}: expected an id of its own for each"
            ));
        }
    }
    let added = inner.get_added_tokens_decoder();
    match tokens.into_iter().filter(|(id, _)| !added.contains_key(id)).max_by_key(|(id, _)| *id) {
        Some((id, last)) if id as usize >= vocab_size => Err(beyond(&last, id, vocab_size)),
        _ => Ok(()),
    }
}

/// Returns the error text for a token id outside the model's vocabulary.
pub(super) fn beyond(token: &str, id: u32, vocab_size: usize) -> String {
    format!(
        "token {token:?} has the id {id}, but the model knows ids below {vocab_size} only (vocab_size of config.json): tokenizer and \
         weights are not of the same model, or tokens were added without resizing it"
    )
}
