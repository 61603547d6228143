//! Packed sequences, without padding.

use super::autodiff_ops::Sequences;
use super::routers::{MISSING, Routers};
use grpo_backend_cpu::layers::Span;
use grpo_policy::{Error, Result, RoutedExperts, Sequence};
use std::collections::HashMap;
use std::sync::Arc;

/// Packed sequences as N rows. Completions of the same prompt share its rows.
///
/// ```
/// # fn main() -> grpo_policy::Result<()> {
/// let batch = grpo_policy_cpu::decoder::PackedBatch::new(&[vec![1, 5, 9], vec![1, 7]])?;
/// assert_eq!(batch.ids(), [1, 5, 9, 1, 7]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct PackedBatch {
    ids: Vec<u32>,
    /// The number of sequences of each row, `[N]`.
    counts: Arc<[f32]>,
    /// For each row, the index of a sequence that contains it and the row's position in that sequence, `[N]`.
    origins: Vec<(usize, usize)>,
    pub(super) sequences: Arc<Sequences>,
}

impl PackedBatch {
    /// Creates a batch of whole sequences.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no sequence, or an empty one.
    pub fn new<S: AsRef<[u32]>>(sequences: &[S]) -> Result<Self> {
        if sequences.is_empty() || sequences.iter().any(|s| s.as_ref().is_empty()) {
            let lengths: Vec<usize> = sequences.iter().map(|s| s.as_ref().len()).collect();
            let expected = "at least one sequence, none of them empty";
            return Err(Error::argument("PackedBatch", expected, format!("{lengths:?}")));
        }
        let mut rows = Rows::default();
        sequences.iter().enumerate().for_each(|(i, sequence)| rows.add(i, sequence.as_ref(), 0..0, 0));
        Ok(rows.into_batch())
    }

    /// Packs prompts and completions, each distinct prompt once. Also returns the rows `[N]` that predict the completion tokens,
    /// concatenated. `routed_experts` are those of each sequence, or none: prompts with other experts are distinct.
    ///
    /// # Errors
    /// [`Error::Argument`] for an empty prompt or completion, or another number of `routed_experts` than of sequences.
    pub fn of_completions(sequences: &[Sequence], routed_experts: &[RoutedExperts]) -> Result<(Self, Vec<usize>)> {
        if sequences.iter().any(|s| s.prompt.is_empty() || s.completion.is_empty()) {
            let expected = "prompts and completions of at least one token";
            return Err(Error::argument("PackedBatch", expected, "an empty one"));
        }
        if !routed_experts.is_empty() && routed_experts.len() != sequences.len() {
            let expected = format!("the recorded experts of {} sequences, or none", sequences.len());
            return Err(Error::argument("routed_experts", expected, routed_experts.len()));
        }
        let (mut rows, mut prompts, mut predicting) = (Rows::default(), HashMap::new(), Vec::new());
        for (i, Sequence { prompt, completion }) in sequences.iter().enumerate() {
            let routed = routed_experts.get(i).map(|routed| routed.first(prompt.len()));
            let prefix = prompts.entry((&prompt[..], routed)).or_insert_with(|| {
                rows.add(i, prompt, 0..0, 0);
                let added = rows.ids.len() - prompt.len()..rows.ids.len();
                rows.counts[added.clone()].fill(0.0);
                added
            });
            rows.counts[prefix.clone()].iter_mut().for_each(|count| *count += 1.0);
            predicting.push(prefix.end - 1);
            predicting.extend(rows.ids.len()..rows.ids.len() + completion.len() - 1);
            // The last token predicts nothing, so it has no row.
            rows.add(i, &completion[..completion.len() - 1], prefix.clone(), prompt.len());
        }
        Ok((rows.into_batch(), predicting))
    }

    /// Returns the token ids `[N]`.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Returns an observer of the routers, in which a row counts once for each of its sequences.
    pub(crate) fn routers(&self, with_aux_loss: bool) -> Routers {
        Routers::new(Arc::clone(&self.counts), with_aux_loss)
    }

    /// Returns the recorded experts `[N, L, k]` of the rows, `width` numbers per row; `None` if no sequence has any.
    ///
    /// # Errors
    /// [`Error::Argument`] if they do not fit the model.
    pub(super) fn recorded(&self, routed: &[RoutedExperts], width: usize) -> Result<Option<Vec<u16>>> {
        if routed.is_empty() {
            return Ok(None);
        }
        let missing = vec![MISSING; width];
        let rows = self.origins.iter().map(|(sequence, position)| match routed.get(*sequence) {
            Some(of_sequence) if of_sequence.width == width => Ok(of_sequence.at(*position).unwrap_or(&missing)),
            other => {
                let expected = format!("for every sequence {width} recorded experts per token, of all layers");
                let found = other.map_or("a sequence without".to_owned(), |other| other.width.to_string());
                Err(Error::argument("routed_experts", expected, found))
            }
        });
        Ok(Some(rows.collect::<Result<Vec<_>>>()?.concat()))
    }

    /// Returns the number of positions of the longest sequence.
    pub(super) fn longest(&self) -> usize {
        self.sequences.positions.iter().max().map_or(0, |position| position + 1)
    }
}

#[derive(Default)]
struct Rows {
    ids: Vec<u32>,
    counts: Vec<f32>,
    origins: Vec<(usize, usize)>,
    positions: Vec<usize>,
    spans: Vec<Span>,
}

impl Rows {
    /// Adds tokens of a sequence that attend to the rows `prefix` and to each other, with positions from `position` on.
    fn add(&mut self, sequence: usize, ids: &[u32], prefix: std::ops::Range<usize>, position: usize) {
        let first = self.ids.len();
        self.ids.extend_from_slice(ids);
        self.counts.resize(self.ids.len(), 1.0);
        self.origins.extend((position..position + ids.len()).map(|position| (sequence, position)));
        self.positions.extend(position..position + ids.len());
        self.spans.push(Span { rows: first..self.ids.len(), prefix });
    }

    fn into_batch(self) -> PackedBatch {
        let sequences = Sequences { spans: self.spans, positions: self.positions };
        PackedBatch { ids: self.ids, counts: self.counts.into(), origins: self.origins, sequences: Arc::new(sequences) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(prompt: &[u32], completion: &[u32]) -> Sequence {
        Sequence { prompt: prompt.to_vec(), completion: completion.to_vec() }
    }

    #[test]
    fn completions_share_the_rows_of_their_prompt() {
        let sequences = [sequence(&[1, 5, 6], &[7, 8, 2]), sequence(&[1, 9], &[2]), sequence(&[1, 5, 6], &[9, 2])];
        let (batch, rows) = PackedBatch::of_completions(&sequences, &[]).unwrap();
        assert_eq!(batch.ids(), [1, 5, 6, 7, 8, 1, 9, 9]);
        assert_eq!(batch.sequences.positions, [0, 1, 2, 3, 4, 0, 1, 3]);
        assert_eq!(*batch.counts, [2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(rows, [2, 3, 4, 6, 2, 7]);
        let spans: Vec<_> = batch.sequences.spans.iter().map(|s| (s.rows.clone(), s.prefix.clone())).collect();
        assert_eq!(spans, [(0..3, 0..0), (3..5, 0..3), (5..7, 0..0), (7..7, 5..7), (7..8, 0..3)]);
        assert_eq!(batch.longest(), 5);
    }

    #[test]
    fn empty_input_is_an_error() {
        assert!(PackedBatch::new::<Vec<u32>>(&[]).is_err());
        assert!(PackedBatch::new(&[vec![1], vec![]]).is_err());
        assert!(PackedBatch::of_completions(&[sequence(&[], &[1])], &[]).is_err());
        assert!(PackedBatch::of_completions(&[sequence(&[1], &[])], &[]).is_err());
        // Two records for one sequence.
        let routed = vec![RoutedExperts::default(); 2];
        let error = PackedBatch::of_completions(&[sequence(&[1], &[2])], &routed).unwrap_err().to_string();
        assert!(error.contains("experts of 1 sequences") && error.contains("got 2"), "{error}");
    }
}
