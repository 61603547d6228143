//! Character-level tokenizer over a fixed alphabet: what the built-in tasks need and no more.

use crate::error::{Error, Result};

/// Every character that has a token, in the order of their ids after the three special tokens.
const ALPHABET: &str = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=()<>,:?.";

/// Maps text to token ids and back. The alphabet is fixed, so there is nothing to save.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tokenizer;

impl Tokenizer {
    /// Fills unused places of a batch; never attended to, never trained on.
    pub const PAD: u32 = 0;
    /// Begins every prompt.
    pub const BOS: u32 = 1;
    /// Ends every completion.
    pub const EOS: u32 = 2;
    /// Number of tokens.
    pub const VOCAB_SIZE: usize = 3 + ALPHABET.len();

    /// Ids of `text`, without special tokens.
    ///
    /// # Errors
    /// [`Error::UnknownCharacter`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
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

    /// Ids of a prompt: BOS, then the text.
    ///
    /// # Errors
    /// [`Error::UnknownCharacter`].
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = vec![Self::BOS];
        ids.extend(self.encode(text)?);
        Ok(ids)
    }

    /// Ids of a reference completion: the text, then EOS.
    ///
    /// # Errors
    /// [`Error::UnknownCharacter`].
    pub fn encode_completion(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.encode(text)?;
        ids.push(Self::EOS);
        Ok(ids)
    }

    /// Text of `ids`. EOS leaves no trace; a stray PAD or BOS shows, so that no judge takes it for nothing.
    ///
    /// # Errors
    /// [`Error::UnknownToken`].
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
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
        let ids = Tokenizer.encode(ALPHABET).unwrap();
        assert_eq!(ids, (3..Tokenizer::VOCAB_SIZE as u32).collect::<Vec<_>>());
        assert_eq!(Tokenizer.decode(&ids).unwrap(), ALPHABET);
    }

    #[test]
    fn special_tokens_frame_and_strays_show() {
        let prompt = Tokenizer.encode_prompt("1+2=").unwrap();
        assert_eq!(prompt[0], Tokenizer::BOS);
        let completion = Tokenizer.encode_completion("3").unwrap();
        assert_eq!(completion.last(), Some(&Tokenizer::EOS));
        assert_eq!(Tokenizer.decode(&completion).unwrap(), "3");
        assert_eq!(Tokenizer.decode(&[prompt[1], Tokenizer::PAD, Tokenizer::BOS]).unwrap(), "1<pad><bos>");
    }

    #[test]
    fn unknown_input_is_an_error_that_says_where() {
        let error = Tokenizer.encode("1+é").unwrap_err().to_string();
        assert!(error.contains("'é' at position 2"), "{error}");
        assert!(matches!(Tokenizer.decode(&[3, 99]), Err(Error::UnknownToken { id: 99, .. })));
    }
}
