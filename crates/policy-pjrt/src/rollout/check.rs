//! Checks of token ids.

use crate::error::Result;
use grpo_models::ModelConfig;

/// Checks that ids are within the vocabulary.
pub(crate) fn check_ids<'a>(config: &ModelConfig, ids: impl IntoIterator<Item = &'a u32>) -> grpo_models::Result<()> {
    match ids.into_iter().find(|id| **id as usize >= config.vocab_size) {
        Some(&id) => Err(grpo_models::Error::UnknownToken { id, vocab_size: config.vocab_size }),
        None => Ok(()),
    }
}

/// Checks that sequences are not empty, fit the model's context length, and have only tokens of the vocabulary.
pub(crate) fn check_sequences(config: &ModelConfig, sequences: &[&[u32]]) -> Result<()> {
    if sequences.iter().any(|ids| ids.is_empty()) || sequences.is_empty() {
        return Err(grpo_policy::Error::argument("logits", "sequences of at least one token", "an empty one").into());
    }
    let limit = config.max_position_embeddings;
    if let Some(length) = sequences.iter().map(|ids| ids.len()).find(|length| *length > limit) {
        return Err(grpo_policy::Error::TooLong { what: "sequence", length, limit }.into());
    }
    Ok(check_ids(config, sequences.iter().copied().flatten())?)
}
