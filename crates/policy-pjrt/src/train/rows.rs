//! A micro-batch as rows of tokens, with the positions that predict completion tokens.

use super::TrainShape;
use super::packing::{Packing, bucket, rounded_up};
use crate::decoder::{Axis, AxisRules};
use crate::rollout::check_ids;
use grpo_models::ModelConfig;
use grpo_policy::{Error, Result, RoutedExperts, Sequence};

/// The sequences of a micro-batch, packed into rows and padded with token 0.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rows {
    pub(crate) shape: TrainShape,
    /// Token ids `[B, T]`, without the last token of each sequence, which predicts nothing.
    pub(crate) ids: Vec<i32>,
    /// Position of each token in its sequence, `[B, T]`; 0 for padding.
    pub(crate) positions: Vec<i32>,
    /// 1 for tokens and 0 for padding, `[B, T]`.
    pub(crate) counted: Vec<f32>,
    /// For each completion token, the index (among B T) of the position that predicts it, `[N]`; 0 for padding.
    pub(crate) predicting: Vec<i32>,
    /// For each position, the index (among N) of the completion token that it predicts, `[B, T]`; N if none.
    pub(crate) predicts: Vec<i32>,
    /// The experts of each token in each layer, `[L, B, T, k]`, -1 for tokens without; empty if none are recorded.
    pub(crate) routed_experts: Vec<i32>,
    /// The index (among B T) of the first token of each sequence.
    begins: Vec<usize>,
    /// The number of rows without a sequence.
    pub(crate) empty: usize,
}

impl Rows {
    /// Packs `sequences` into rows, padded so that they shard evenly by `rules`; the last ones may be empty.
    ///
    /// # Errors
    /// [`Error::Argument`] for an empty list, prompt or completion; [`Error::TooLong`]; [`Error::Model`] for an unknown token.
    pub(crate) fn new(config: &ModelConfig, sequences: &[Sequence], rules: &AxisRules) -> Result<Self> {
        if sequences.iter().any(|s| s.prompt.is_empty() || s.completion.is_empty()) || sequences.is_empty() {
            let expected = "at least one sequence, with prompts and completions of at least one token";
            return Err(Error::argument("a micro-batch", expected, "an empty one"));
        }
        for sequence in sequences {
            let (length, limit) = (length(sequence), config.max_position_embeddings);
            if length > limit {
                return Err(Error::TooLong { what: "sequence", length, limit });
            }
            check_ids(config, sequence.prompt.iter().chain(&sequence.completion))?;
        }
        let packing = Packing::of(sequences);
        Ok(Self::packed(sequences, &packing, packing.shape(sequences).sharded(rules)))
    }

    /// Creates the rows of `sequences` with this packing; rows of `shape` beyond it are empty.
    pub(super) fn packed(sequences: &[Sequence], packing: &Packing, shape: TrainShape) -> Self {
        let none = vec![0; shape.rows * shape.length];
        let mut counted = vec![0.0; none.len()];
        let [mut ids, mut positions] = [none.clone(), none];
        let mut begins = vec![0; sequences.len()];
        for (row, in_row) in packing.rows.iter().enumerate() {
            let mut begin = row * shape.length;
            for &i in in_row {
                let Sequence { prompt, completion } = &sequences[i];
                let end = begin + length(&sequences[i]);
                counted[begin..end].fill(1.0);
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
        let mut predicting: Vec<i32> = sequences.iter().zip(begins.iter().copied()).flat_map(of).collect();
        let mut predicts = vec![shape.tokens as i32; shape.rows * shape.length];
        predicting.iter().zip(0..).for_each(|(token, n)| predicts[*token as usize] = n);
        predicting.resize(shape.tokens, 0);
        let empty = shape.rows - packing.rows.iter().filter(|sequences| !sequences.is_empty()).count();
        Self { shape, ids, positions, counted, predicting, predicts, routed_experts: Vec::new(), begins, empty }
    }

    /// Adds the recorded experts of each of the `sequences`, or none.
    ///
    /// # Errors
    /// [`Error::Argument`] for a model without experts, if `routed` lacks a sequence or a layer, and for experts that the model does
    /// not have or that a token has twice.
    pub(crate) fn with_routed_experts(
        mut self,
        config: &ModelConfig,
        sequences: &[Sequence],
        routed: &[RoutedExperts],
    ) -> Result<Self> {
        if routed.is_empty() {
            return Ok(self);
        }
        let wrong = |expected: String, found: String| Err(Error::argument("routed_experts", expected, found));
        let Some(experts) = &config.experts else {
            return wrong("none, or a model with a mixture of experts".into(), "a model without".into());
        };
        if routed.len() != sequences.len() {
            return wrong(format!("those of {} sequences, or none", sequences.len()), routed.len().to_string());
        }
        let (layers, top) = (config.routers(), experts.num_experts_per_tok);
        let tokens = self.ids.len();
        self.routed_experts = vec![-1; layers * tokens * top];
        for ((of_sequence, sequence), begin) in routed.iter().zip(sequences).zip(&self.begins) {
            if of_sequence.width != layers * top {
                let expected = format!("for every sequence {} recorded experts per token, of all layers", layers * top);
                return wrong(expected, of_sequence.width.to_string());
            }
            for position in 0..length(sequence) {
                let of_layers = of_sequence.at(position).into_iter().flat_map(|ids| ids.chunks_exact(top)).enumerate();
                for (layer, ids) in of_layers {
                    let repeats = |i: usize| ids[..i].contains(&ids[i]);
                    if ids.iter().any(|id| usize::from(*id) >= experts.num_experts) || (0..top).any(repeats) {
                        let expected = format!("different experts below {} for each token", experts.num_experts);
                        return wrong(expected, format!("{ids:?}"));
                    }
                    let at = (layer * tokens + begin + position) * top;
                    let to = self.routed_experts[at..at + top].iter_mut();
                    to.zip(ids).for_each(|(to, id)| *to = i32::from(*id));
                }
            }
        }
        self.shape.routed_experts = true;
        Ok(self)
    }
}

impl Packing {
    /// Packs `sequences`.
    fn of(sequences: &[Sequence]) -> Self {
        Self::new(&sequences.iter().map(length).collect::<Vec<_>>())
    }

    /// Returns the sizes of the program for this packing.
    pub(super) fn shape(&self, sequences: &[Sequence]) -> TrainShape {
        let tokens: usize = sequences.iter().map(|s| s.completion.len()).sum();
        let (rows, length, tokens) = (self.rows.len().max(1), self.length, bucket(tokens));
        let shared = self.is_shared();
        TrainShape { rows, length, tokens, shared, ..TrainShape::default() }
    }
}

impl TrainShape {
    /// Returns the sizes of the program for a micro-batch with packed sequences, rounded up so that few programs are compiled. They are
    /// largest if all sequences have maximal length, because then nearly every sequence needs its own row.
    pub fn of(sequences: &[Sequence]) -> Self {
        Packing::of(sequences).shape(sequences)
    }

    /// [`TrainShape::of`] for `count` sequences with prompts of `prompt` tokens and completions of `completion` tokens.
    pub fn uniform(count: usize, prompt: usize, completion: usize) -> Self {
        let tokens = (prompt + completion).saturating_sub(1);
        let length = bucket(tokens);
        // A row takes as many as fit, unless that leaves as many rows as sequences.
        let packed = rounded_up(count.div_ceil((length / tokens.max(1)).max(1)));
        let rows = packed.min(count).max(1);
        let shared = packed < count && length / tokens.max(1) > 1;
        let tokens = bucket(count.saturating_mul(completion));
        Self { rows, length, tokens, shared, ..Self::default() }
    }

    /// Returns these sizes, padded so that rows, their tokens and completion tokens shard evenly by these rules.
    #[must_use]
    pub fn sharded(self, rules: &AxisRules) -> Self {
        let padded = |size: usize, axis| size.next_multiple_of(rules.parts(axis));
        let (rows, tokens) = (padded(self.rows, Axis::Batch), padded(self.tokens, Axis::Batch));
        Self { rows, tokens, length: padded(self.length, Axis::Length), ..self }
    }
}

/// Returns the number of tokens of a sequence in a row: all but the last one, which is only a target.
fn length(sequence: &Sequence) -> usize {
    (sequence.prompt.len() + sequence.completion.len()).saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(prompt: &[u32], completion: &[u32]) -> Sequence {
        Sequence { prompt: prompt.to_vec(), completion: completion.to_vec() }
    }

    /// Creates a sequence with this many tokens in prompt and completion.
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
    fn packed_sequences_keep_their_order() {
        let sequences = [sequence(&[1, 5, 6], &[7, 8, 2]), sequence(&[9], &[2]), sequence(&[1, 4], &[3, 2])];
        let rows = Rows::new(&ModelConfig::default(), &sequences, &AxisRules::default()).unwrap();
        assert_eq!(rows.shape, TrainShape { rows: 1, length: 16, tokens: 16, shared: true, ..TrainShape::default() });
        assert_eq!(rows.ids, [1, 5, 6, 7, 8, 9, 1, 4, 3, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(rows.positions, [0, 1, 2, 3, 4, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(rows.counted, [vec![1.0; 9], vec![0.0; 7]].concat());
        assert_eq!(rows.predicting, [2, 3, 4, 5, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(rows.predicts, [16, 16, 0, 1, 2, 3, 16, 4, 5, 16, 16, 16, 16, 16, 16, 16]);
    }

    #[test]
    fn recorded_experts_are_those_of_the_packed_tokens() {
        let experts =
            grpo_models::Experts { num_experts: 4, num_experts_per_tok: 1, ..grpo_models::Experts::default() };
        let config = ModelConfig { num_hidden_layers: 2, experts: Some(experts), ..ModelConfig::default() };
        let sequences = [sequence(&[1, 5, 6], &[7, 8, 2]), sequence(&[9], &[2]), sequence(&[1, 4], &[3, 2])];
        let of = |ids: &[u16]| RoutedExperts { width: 2, ids: ids.to_vec() };
        // The second sequence has no experts, the others none of their last tokens.
        let routed = [of(&[0, 1, 1, 2, 2, 3, 3, 0]), of(&[]), of(&[2, 2, 1, 0])];
        let rows = || Rows::new(&config, &sequences, &AxisRules::default()).unwrap();
        let with = |routed: &[RoutedExperts]| rows().with_routed_experts(&config, &sequences, routed);
        let found = with(&routed).unwrap();
        assert!(found.shape.routed_experts && !with(&[]).unwrap().shape.routed_experts);
        let padded = |ids: &[i32]| [ids, &vec![-1; 16 - ids.len()]].concat();
        let expected = [padded(&[0, 1, 2, 3, -1, -1, 2, 1]), padded(&[1, 2, 3, 0, -1, -1, 2, 0])].concat();
        assert_eq!(found.routed_experts, expected);
        let narrow = RoutedExperts { width: 1, ids: vec![0] };
        for (routed, words) in [
            (vec![of(&[0, 1])], "those of 3 sequences"),
            (vec![of(&[]), narrow, of(&[])], "2 recorded experts per token"),
            (vec![of(&[0, 4]), of(&[]), of(&[])], "different experts below 4"),
        ] {
            let error = with(&routed).unwrap_err().to_string();
            assert!(error.contains("routed_experts") && error.contains(words), "{error}");
        }
        let dense = rows().with_routed_experts(&ModelConfig::default(), &sequences, &routed).unwrap_err().to_string();
        assert!(dense.contains("a model with a mixture of experts"), "{dense}");
    }

    #[test]
    fn rows_of_one_sequence_each_are_not_packed() {
        let sequences = [sequence(&[1; 5], &[7; 8]), sequence(&[9; 9], &[2; 8])];
        let rows = Rows::new(&ModelConfig::default(), &sequences, &AxisRules::default()).unwrap();
        assert_eq!(rows.shape, TrainShape { rows: 2, length: 16, tokens: 16, ..TrainShape::default() });
        assert_eq!(rows.empty, 0);
        // The first row is padded with 4 tokens, the second one is full.
        assert_eq!((&rows.ids[10..18], &rows.ids[31..]), (&[7, 7, 0, 0, 0, 0, 9, 9][..], &[2][..]));
        assert_eq!((&rows.positions[10..18], &rows.positions[31..]), (&[10, 11, 0, 0, 0, 0, 0, 1][..], &[15][..]));
        assert_eq!(rows.predicting, [4, 5, 6, 7, 8, 9, 10, 11, 24, 25, 26, 27, 28, 29, 30, 31]);
    }

    #[test]
    fn rows_added_by_rounding_are_empty() {
        let config = ModelConfig::default();
        // 4 + 1 rows; the last two sequences fit into the fifth row.
        let lengths = [[8, 9], [9, 8], [10, 6], [7, 9], [3, 5], [4, 3], [1, 3]];
        let rows = Rows::new(&config, &lengths.map(of_lengths), &AxisRules::default()).unwrap();
        assert_eq!(rows.shape, TrainShape { rows: 6, length: 16, tokens: 48, shared: true, ..TrainShape::default() });
        assert_eq!(rows.empty, 1);
        assert!([&rows.ids, &rows.positions].iter().all(|of| of[5 * 16..].iter().all(|x| *x == 0)));
        // The fifth row is full.
        assert_eq!(&rows.positions[4 * 16..][..16], [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 0, 1, 2]);
    }

    #[test]
    fn sequences_of_maximal_length_need_the_largest_program() {
        let longest = [9, 24];
        let most = TrainShape::of(&vec![of_lengths(longest); 5]);
        assert_eq!(most, TrainShape { rows: 5, length: 32, tokens: 128, ..TrainShape::default() });
        for other in [[9, 1], [1, 24], [5, 12], [9, 23]] {
            for count in 0..5 {
                let sequences = [vec![of_lengths(longest); count], vec![of_lengths(other); 5 - count]].concat();
                let TrainShape { rows, length, tokens, .. } = TrainShape::of(&sequences);
                assert!(rows <= most.rows && length <= most.length && tokens <= most.tokens, "{other:?} {count}");
            }
        }
        assert_eq!(TrainShape::of(&[]), TrainShape { rows: 1, length: 16, tokens: 16, ..TrainShape::default() });
    }

    #[test]
    fn invalid_sequences_are_rejected() {
        let config = ModelConfig { vocab_size: 12, max_position_embeddings: 4, ..ModelConfig::default() };
        let of = |sequences: &[Sequence]| Rows::new(&config, sequences, &AxisRules::default()).unwrap_err();
        assert!(matches!(of(&[]), Error::Argument { .. }));
        assert!(matches!(of(&[sequence(&[], &[1])]), Error::Argument { .. }));
        assert!(matches!(of(&[sequence(&[1], &[])]), Error::Argument { .. }));
        assert!(matches!(of(&[sequence(&[1, 2, 3], &[1, 2, 3])]), Error::TooLong { length: 5, limit: 4, .. }));
        assert!(matches!(of(&[sequence(&[1], &[12])]), Error::Model(grpo_models::Error::UnknownToken { id: 12, .. })));
        assert!(Rows::new(&config, &[sequence(&[1, 2], &[1, 2, 3])], &AxisRules::default()).is_ok());
    }
}
