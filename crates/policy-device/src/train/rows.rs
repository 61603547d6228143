//! A micro-batch as rows of tokens, with the tokens that predict those of completions.

use super::TrainShape;
use super::packing::{Packing, bucket, rounded_up};
use models::ModelConfig;
use policy::{Error, Result, Sequence};

/// The sequences of a micro-batch in rows, several of them in one where they fit. Behind them a row is padded with token 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) shape: TrainShape,
    /// Token ids `[B, T]`. The last token of a sequence predicts nothing and is not among them.
    pub(crate) ids: Vec<i32>,
    /// The position of each token in its sequence, `[B, T]`; 0 where there is no token.
    pub(crate) positions: Vec<i32>,
    /// The index among the B T tokens of the one that predicts each completion token, `[N]`; 0 where there is none.
    pub(crate) predicting: Vec<i32>,
    /// The index among the N completion tokens of the one that each token predicts, `[B, T]`; N where it predicts none.
    pub(crate) predicts: Vec<i32>,
}

impl Rows {
    /// The rows of `sequences`.
    ///
    /// # Errors
    /// [`Error::Argument`] for no sequence, or an empty prompt or completion; [`Error::TooLong`]; [`Error::Model`] for an unknown token.
    pub(crate) fn new(config: &ModelConfig, sequences: &[Sequence]) -> Result<Self> {
        if sequences.iter().any(|s| s.prompt.is_empty() || s.completion.is_empty()) || sequences.is_empty() {
            let expected = "at least one sequence, with prompts and completions of at least one token";
            return Err(Error::argument("a micro-batch", expected, "an empty one"));
        }
        for sequence in sequences {
            let (length, limit) = (length(sequence), config.max_position_embeddings);
            if length > limit {
                return Err(Error::TooLong { what: "sequence", length, limit });
            }
            let mut tokens = sequence.prompt.iter().chain(&sequence.completion);
            if let Some(&id) = tokens.find(|id| **id as usize >= config.vocab_size) {
                return Err(models::Error::UnknownToken { id, vocab_size: config.vocab_size }.into());
            }
        }
        Ok(Self::packed(sequences, &Packing::of(sequences)))
    }

    /// The rows of `sequences` that `packing` says.
    pub(super) fn packed(sequences: &[Sequence], packing: &Packing) -> Self {
        let shape = packing.shape(sequences);
        let none = vec![0; shape.rows * shape.length];
        let [mut ids, mut positions] = [none.clone(), none];
        let mut begins = vec![0; sequences.len()];
        for (row, in_row) in packing.rows.iter().enumerate() {
            let mut begin = row * shape.length;
            for &i in in_row {
                let Sequence { prompt, completion } = &sequences[i];
                let end = begin + length(&sequences[i]);
                for (token, id) in (begin..end).zip(prompt.iter().chain(completion)) {
                    ids[token] = *id as i32;
                    positions[token] = (token - begin) as i32;
                }
                begins[i] = begin;
                begin = end;
            }
        }
        let of = |(sequence, begin): (&Sequence, usize)| {
            (begin + sequence.prompt.len() - 1..begin + length(sequence)).map(|token| token as i32)
        };
        let mut predicting: Vec<i32> = sequences.iter().zip(begins).flat_map(of).collect();
        let mut predicts = vec![shape.tokens as i32; shape.rows * shape.length];
        predicting.iter().zip(0..).for_each(|(token, n)| predicts[*token as usize] = n);
        predicting.resize(shape.tokens, 0);
        Self { shape, ids, positions, predicting, predicts }
    }
}

impl Packing {
    /// The rows of `sequences`.
    fn of(sequences: &[Sequence]) -> Self {
        Self::new(&sequences.iter().map(length).collect::<Vec<_>>())
    }

    /// The sizes of the program that takes them.
    fn shape(&self, sequences: &[Sequence]) -> TrainShape {
        let tokens: usize = sequences.iter().map(|s| s.completion.len()).sum();
        let (rows, length, tokens) = (self.rows.len().max(1), self.length, bucket(tokens));
        TrainShape { rows, length, tokens, shared: self.is_shared() }
    }
}

impl TrainShape {
    /// The sizes of the program for a micro-batch, whose sequences share rows where they fit: rounded up so that few programs come to be.
    /// They are largest where all sequences are as long as they may be, as nearly all of them then have a row of their own.
    pub fn of(sequences: &[Sequence]) -> Self {
        Packing::of(sequences).shape(sequences)
    }

    /// [`TrainShape::of`] for `count` sequences with prompts of `prompt` tokens and completions of `completion` tokens.
    ///
    /// ```
    /// use policy::Sequence;
    /// use policy_device::TrainShape;
    ///
    /// let sequences = vec![Sequence { prompt: vec![0; 20], completion: vec![0; 8] }; 12];
    /// assert_eq!(TrainShape::uniform(12, 20, 8), TrainShape::of(&sequences));
    /// ```
    pub fn uniform(count: usize, prompt: usize, completion: usize) -> Self {
        let tokens = (prompt + completion).saturating_sub(1);
        let length = bucket(tokens);
        // A row takes as many as fit, unless that leaves as many rows as sequences.
        let packed = rounded_up(count.div_ceil((length / tokens.max(1)).max(1)));
        let rows = packed.min(count).max(1);
        let shared = packed < count && length / tokens.max(1) > 1;
        Self { rows, length, tokens: bucket(count.saturating_mul(completion)), shared }
    }
}

/// The tokens of a sequence that stand in a row: the last one is a target, and nothing is predicted behind it.
fn length(sequence: &Sequence) -> usize {
    (sequence.prompt.len() + sequence.completion.len()).saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(prompt: &[u32], completion: &[u32]) -> Sequence {
        Sequence { prompt: prompt.to_vec(), completion: completion.to_vec() }
    }

    /// A sequence whose prompt and completion have so many tokens.
    fn of_lengths([prompt, completion]: [usize; 2]) -> Sequence {
        sequence(&vec![3; prompt], &vec![4; completion])
    }

    #[test]
    fn sizes_of_equal_sequences_are_those_of_their_rows() {
        for count in 1..40 {
            for (prompt, completion) in [(1, 1), (3, 2), (4, 4), (5, 12), (20, 8), (30, 3), (100, 29), (64, 64)] {
                let sequences = vec![of_lengths([prompt, completion]); count];
                let uniform = TrainShape::uniform(count, prompt, completion);
                assert_eq!(uniform, TrainShape::of(&sequences), "{count} of {prompt} and {completion}");
            }
        }
    }

    #[test]
    fn sequences_share_a_row_and_keep_their_places() {
        let sequences = [sequence(&[1, 5, 6], &[7, 8, 2]), sequence(&[9], &[2]), sequence(&[1, 4], &[3, 2])];
        let rows = Rows::new(&ModelConfig::default(), &sequences).unwrap();
        assert_eq!(rows.shape, TrainShape { rows: 1, length: 16, tokens: 16, shared: true });
        assert_eq!(rows.ids, [1, 5, 6, 7, 8, 9, 1, 4, 3, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(rows.positions, [0, 1, 2, 3, 4, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(rows.predicting, [2, 3, 4, 5, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(rows.predicts, [16, 16, 0, 1, 2, 3, 16, 4, 5, 16, 16, 16, 16, 16, 16, 16]);
    }

    #[test]
    fn rows_of_one_sequence_are_as_they_come() {
        let sequences = [sequence(&[1; 5], &[7; 8]), sequence(&[9; 9], &[2; 8])];
        let rows = Rows::new(&ModelConfig::default(), &sequences).unwrap();
        assert_eq!(rows.shape, TrainShape { rows: 2, length: 16, tokens: 16, shared: false });
        // The first is padded with 4 tokens, the second one fills its row.
        assert_eq!((&rows.ids[10..18], &rows.ids[31..]), (&[7, 7, 0, 0, 0, 0, 9, 9][..], &[2][..]));
        assert_eq!((&rows.positions[10..18], &rows.positions[31..]), (&[10, 11, 0, 0, 0, 0, 0, 1][..], &[15][..]));
        assert_eq!(rows.predicting, [4, 5, 6, 7, 8, 9, 10, 11, 24, 25, 26, 27, 28, 29, 30, 31]);
    }

    #[test]
    fn rows_that_round_their_number_up_are_empty() {
        let config = ModelConfig::default();
        // 4 + 1 rows, and two sequences that fit into the last one.
        let lengths = [[8, 9], [9, 8], [10, 6], [7, 9], [3, 5], [4, 3], [1, 3]];
        let rows = Rows::new(&config, &lengths.map(of_lengths)).unwrap();
        assert_eq!(rows.shape, TrainShape { rows: 6, length: 16, tokens: 48, shared: true });
        assert!([&rows.ids, &rows.positions].iter().all(|of| of[5 * 16..].iter().all(|x| *x == 0)));
        // The fifth is full to its last token, the end of the last sequence.
        assert_eq!(&rows.positions[4 * 16..][..16], [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 0, 1, 2]);
    }

    #[test]
    fn the_longest_sequences_need_the_largest_program() {
        let longest = [9, 24];
        let most = TrainShape::of(&vec![of_lengths(longest); 5]);
        assert_eq!(most, TrainShape { rows: 5, length: 32, tokens: 128, shared: false });
        for other in [[9, 1], [1, 24], [5, 12], [9, 23]] {
            for count in 0..5 {
                let sequences = [vec![of_lengths(longest); count], vec![of_lengths(other); 5 - count]].concat();
                let TrainShape { rows, length, tokens, .. } = TrainShape::of(&sequences);
                assert!(rows <= most.rows && length <= most.length && tokens <= most.tokens, "{other:?} {count}");
            }
        }
        assert_eq!(TrainShape::of(&[]), TrainShape { rows: 1, length: 16, tokens: 16, shared: false });
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
