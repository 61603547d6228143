//! A character-level tokenizer over a fixed alphabet that covers the texts of the built-in tasks.

use super::Tokenizer;
use crate::error::{Error, Result};

/// The characters, in the order of their ids after the three special tokens.
const ALPHABET: &str = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=()<>,:?.";

/// A tokenizer with one token per character of a fixed alphabet; there is nothing to load or save.
///
/// ```
/// use grpo_models::{CharTokenizer, Tokenizer};
///
/// # fn main() -> grpo_models::Result<()> {
/// let prompt = CharTokenizer.encode_prompt("1+2=")?;
/// assert_eq!((prompt[0], prompt.len()), (CharTokenizer::BOS, 5));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct CharTokenizer;

impl CharTokenizer {
    /// The id that pads batches. It is never attended to and never trained on.
    pub const PAD: u32 = 0;
    /// The id that begins every prompt.
    pub const BOS: u32 = 1;
    /// The id that ends every completion.
    pub const EOS: u32 = 2;
    /// The number of tokens.
    pub const VOCAB_SIZE: usize = 3 + ALPHABET.len();
}

impl Tokenizer for CharTokenizer {
    fn vocab_size(&self) -> usize {
        Self::VOCAB_SIZE
    }

    fn eos_id(&self) -> u32 {
        Self::EOS
    }

    fn pad_id(&self) -> u32 {
        Self::PAD
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        text.chars()
            .enumerate()
            .map(|(position, character)| {
                // The alphabet is ASCII, so byte offsets are indices.
                ALPHABET.find(character).map(|i| i as u32 + 3).ok_or_else(|| Error::UnknownCharacter {
                    character,
                    position,
                    text: text.to_owned(),
                })
            })
            .collect()
    }

    /// Returns BOS and the ids of the text.
    fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = vec![Self::BOS];
        ids.extend(self.encode(text)?);
        Ok(ids)
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        let mut text = String::with_capacity(ids.len());
        for &id in ids {
            match id {
                Self::PAD => text.push_str("<pad>"),
                Self::BOS => text.push_str("<bos>"),
                Self::EOS => {}
                _ => match ALPHABET.as_bytes().get(id as usize - 3) {
                    Some(&byte) => text.push(char::from(byte)),
                    None => return Err(Error::UnknownToken { id, vocab_size: Self::VOCAB_SIZE }),
                },
            }
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_character_round_trips_to_a_distinct_id() {
        let ids = CharTokenizer.encode(ALPHABET).unwrap();
        assert_eq!(ids, (3..CharTokenizer::VOCAB_SIZE as u32).collect::<Vec<_>>());
        assert_eq!(CharTokenizer.decode(&ids).unwrap(), ALPHABET);
    }

    #[test]
    fn completions_end_with_eos_and_other_special_tokens_are_visible() {
        let prompt = CharTokenizer.encode_prompt("1+2=").unwrap();
        assert_eq!(prompt[0], CharTokenizer::BOS);
        let completion = CharTokenizer.encode_completion("3").unwrap();
        assert_eq!(completion.last(), Some(&CharTokenizer::EOS));
        assert_eq!(CharTokenizer.decode(&completion).unwrap(), "3");
        assert_eq!(CharTokenizer.decode(&[prompt[1], CharTokenizer::PAD, CharTokenizer::BOS]).unwrap(), "1<pad><bos>");
    }

    #[test]
    fn unknown_characters_and_ids_are_errors_with_their_position() {
        let error = CharTokenizer.encode("1+é").unwrap_err().to_string();
        assert!(error.contains("'é' at position 2"), "{error}");
        assert!(matches!(CharTokenizer.decode(&[3, 99]), Err(Error::UnknownToken { id: 99, .. })));
    }
}
