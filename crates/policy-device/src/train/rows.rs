//! A micro-batch as rows of tokens, with the positions that predict completion tokens.

use super::TrainShape;
use models::ModelConfig;
use policy::{Error, Result, Sequence};

/// The fewest tokens of a row, and the fewest completion tokens of a micro-batch.
const FEWEST: usize = 16;

/// The sequences of a micro-batch, padded on the right with token 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) shape: TrainShape,
    /// Token ids `[B, T]`. The last token of a sequence predicts nothing and is not among them.
    pub(crate) ids: Vec<i32>,
    /// The index among the B T positions that predicts each completion token, `[N]`; 0 where there is none.
    pub(crate) positions: Vec<i32>,
}

impl Rows {
    /// The rows of `sequences`.
    ///
    /// # Errors
    /// [`Error::Argument`] for no sequence, or an empty prompt or completion; [`Error::TooLong`]; [`Error::Model`] for an unknown token.
    pub(crate) fn new(config: &ModelConfig, sequences: &[Sequence]) -> Result<Self> {
        let shape = TrainShape::of(sequences);
        if sequences.iter().any(|s| s.prompt.is_empty() || s.completion.is_empty()) || sequences.is_empty() {
            let expected = "at least one sequence, with prompts and completions of at least one token";
            return Err(Error::argument("a micro-batch", expected, "an empty one"));
        }
        let (mut ids, mut positions) = (vec![0; shape.rows * shape.length], Vec::with_capacity(shape.tokens));
        for (row, Sequence { prompt, completion }) in sequences.iter().enumerate() {
            // The last token is a target, and nothing is predicted behind it.
            let length = prompt.len() + completion.len() - 1;
            let limit = config.max_position_embeddings;
            if length > limit {
                return Err(Error::TooLong { what: "sequence", length, limit });
            }
            let tokens = prompt.iter().chain(completion);
            if let Some(&id) = tokens.clone().find(|id| **id as usize >= config.vocab_size) {
                return Err(models::Error::UnknownToken { id, vocab_size: config.vocab_size }.into());
            }
            let first = row * shape.length;
            ids[first..first + length].iter_mut().zip(tokens).for_each(|(to, id)| *to = *id as i32);
            positions.extend((first + prompt.len() - 1..first + length).map(|position| position as i32));
        }
        positions.resize(shape.tokens, 0);
        Ok(Self { shape, ids, positions })
    }
}

impl TrainShape {
    /// The sizes of the program for a micro-batch: those of the sequences, rounded up so that few programs come to be.
    pub fn of(sequences: &[Sequence]) -> Self {
        let length = |s: &Sequence| (s.prompt.len() + s.completion.len()).saturating_sub(1);
        let tokens: usize = sequences.iter().map(|s| s.completion.len()).sum();
        Self {
            rows: sequences.len().max(1),
            length: bucket(sequences.iter().map(length).max().unwrap_or(0)),
            tokens: bucket(tokens),
        }
    }
}

/// `size` rounded up to a power of two, or to one and a half of one.
fn bucket(size: usize) -> usize {
    let power = size.max(FEWEST).next_power_of_two();
    let between = power / 4 * 3;
    if between >= size.max(FEWEST) { between } else { power }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(prompt: &[u32], completion: &[u32]) -> Sequence {
        Sequence { prompt: prompt.to_vec(), completion: completion.to_vec() }
    }

    #[test]
    fn positions_are_those_before_the_completion_tokens() {
        let sequences = [sequence(&[1, 5, 6], &[7, 8, 2]), sequence(&[9], &[2])];
        let rows = Rows::new(&ModelConfig::default(), &sequences).unwrap();
        assert_eq!(rows.shape, TrainShape { rows: 2, length: 16, tokens: 16 });
        assert_eq!(rows.ids[..6], [1, 5, 6, 7, 8, 0]);
        assert_eq!(rows.ids[16..18], [9, 0]);
        assert_eq!(rows.positions[..5], [2, 3, 4, 16, 0]);
    }

    #[test]
    fn sizes_grow_in_few_steps() {
        assert_eq!([1, 16, 17, 25, 33, 48, 49, 100].map(bucket), [16, 16, 24, 32, 48, 48, 64, 128]);
    }

    #[test]
    fn what_no_model_computes_is_refused() {
        let config = ModelConfig { vocab_size: 12, max_position_embeddings: 4, ..ModelConfig::default() };
        let of = |sequences: &[Sequence]| Rows::new(&config, sequences).unwrap_err();
        assert!(matches!(of(&[]), Error::Argument { .. }));
        assert!(matches!(of(&[sequence(&[], &[1])]), Error::Argument { .. }));
        assert!(matches!(of(&[sequence(&[1], &[])]), Error::Argument { .. }));
        assert!(matches!(of(&[sequence(&[1, 2, 3], &[1, 2, 3])]), Error::TooLong { length: 5, limit: 4, .. }));
        assert!(matches!(of(&[sequence(&[1], &[12])]), Error::Model(models::Error::UnknownToken { id: 12, .. })));
        assert!(Rows::new(&config, &[sequence(&[1, 2], &[1, 2, 3])]).is_ok());
    }
}
