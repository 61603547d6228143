//! Packing of sequences into the rows of a micro-batch.
//!
//! Legend: B rows, T tokens of a row.

use std::cmp::Reverse;

/// Smallest number of tokens of a row, and of completion tokens of a micro-batch.
const FEWEST: usize = 16;

/// The rows of a micro-batch, each with its packed sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packing {
    /// Tokens T of a row.
    pub(super) length: usize,
    /// Indices of the sequences of each of the B rows. The last rows may be empty.
    pub(super) rows: Vec<Vec<usize>>,
}

impl Packing {
    /// Packs sequences of `lengths` tokens into rows as long as the longest sequence, rounded up.
    ///
    /// First-fit decreasing: sequences from the longest to the shortest, each into the first row with room. This needs at most 11/9 of the
    /// optimal number of rows plus 2/3 (Dósa 2007). Rows are sorted by their first sequence, and sequences of a row by index. The number of
    /// rows is rounded up, so that few programs are compiled. If it then reaches the number of sequences, nothing is packed: row i holds
    /// sequence i.
    pub(super) fn new(lengths: &[usize]) -> Self {
        let length = bucket(lengths.iter().copied().max().unwrap_or(0));
        let mut by_length: Vec<usize> = (0..lengths.len()).collect();
        by_length.sort_by_key(|sequence| Reverse(lengths[*sequence]));
        let mut rows: Vec<(usize, Vec<usize>)> = Vec::new();
        for sequence in by_length {
            let needed = lengths[sequence];
            match rows.iter_mut().find(|(room, _)| *room >= needed) {
                Some((room, sequences)) => {
                    *room -= needed;
                    sequences.push(sequence);
                }
                None => rows.push((length - needed, vec![sequence])),
            }
        }
        let mut rows: Vec<Vec<usize>> = rows.into_iter().map(|(_, sequences)| sequences).collect();
        rows.iter_mut().for_each(|sequences| sequences.sort_unstable());
        rows.sort_unstable_by_key(|sequences| sequences[0]);
        let count = rounded_up(rows.len());
        if count >= lengths.len() {
            return Self { length, rows: (0..lengths.len()).map(|sequence| vec![sequence]).collect() };
        }
        rows.resize(count, Vec::new());
        Self { length, rows }
    }

    /// Returns `true` if sequences share a row.
    pub(super) fn is_shared(&self) -> bool {
        self.rows.iter().any(|sequences| sequences.len() > 1)
    }
}

/// Rounds a number of tokens of a row, or of completion tokens, up.
pub(super) fn bucket(size: usize) -> usize {
    rounded_up(size.max(FEWEST))
}

/// Rounds `size` up to a power of two or 1.5 times a power of two.
pub(super) fn rounded_up(size: usize) -> usize {
    let power = size.next_power_of_two();
    let between = power / 4 * 3;
    if between >= size { between } else { power }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn sizes_are_rounded_to_few_values() {
        assert_eq!([1, 16, 17, 25, 33, 48, 49, 100].map(bucket), [16, 16, 24, 32, 48, 48, 64, 128]);
        assert_eq!([1, 2, 3, 4, 5, 6, 7, 9, 13, 17].map(rounded_up), [1, 2, 3, 4, 6, 6, 8, 12, 16, 24]);
    }

    #[test]
    fn long_sequences_are_placed_first_and_short_ones_fill_their_rows() {
        // Rows of 24 tokens: 20 + 4 and 12 + 12 fill a row exactly.
        let packing = Packing::new(&[12, 4, 20, 12, 9]);
        assert_eq!(packing, Packing { length: 24, rows: vec![vec![0, 3], vec![1, 2], vec![4]] });
        assert!(packing.is_shared() && !Packing::new(&[13, 16, 14]).is_shared());
        // Without packing, sequences keep their order.
        assert_eq!(Packing::new(&[13, 16, 14]).rows, [[0], [1], [2]]);
        // 5 rows are rounded up to 6: one for each of 6 sequences.
        assert_eq!(Packing::new(&[13, 16, 14, 9, 10]).rows.len(), 5);
        assert_eq!(Packing::new(&[13, 16, 14, 9, 10, 1]).rows, [[0], [1], [2], [3], [4], [5]]);
        let rounded = Packing::new(&[13, 16, 14, 9, 10, 1, 1]).rows;
        assert_eq!((&rounded[2], &rounded[5..]), (&vec![2, 5, 6], &[vec![]][..]));
        assert!(Packing::new(&[]).rows.is_empty());
    }

    proptest! {
        #[test]
        fn every_sequence_is_in_one_row_that_has_room(lengths in prop::collection::vec(1..200_usize, 1..40)) {
            let Packing { length, rows } = Packing::new(&lengths);
            let mut all: Vec<usize> = rows.iter().flatten().copied().collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..lengths.len()).collect::<Vec<_>>());
            let filled: Vec<usize> = rows.iter().map(|row| row.iter().map(|i| lengths[*i]).sum()).collect();
            prop_assert!(filled.iter().all(|tokens| *tokens <= length), "{filled:?} of {length}");
            let mut used: Vec<usize> = filled.into_iter().filter(|tokens| *tokens > 0).collect();
            used.sort_unstable();
            if rows.len() < lengths.len() {
                // No two rows could be merged.
                prop_assert!(used.len() < 2 || used[0] + used[1] > length, "{used:?} of {length}");
                prop_assert!(2 * rows.len() <= 3 * used.len());
            }
            let is_shared = rows.iter().any(|row| row.len() > 1);
            prop_assert_eq!(is_shared, rows.len() < lengths.len());
        }
    }

    /// Generates lengths of micro-batches of 32 sequences: prompts of 60 to 120 tokens, completions of 20 to 256.
    fn micro_batches(count: usize) -> impl Iterator<Item = (Vec<usize>, usize)> {
        (0..count as u64).map(|seed| {
            let random = |name, least: f32, most: f32| -> Vec<usize> {
                let within = grpo_rng::uniform_weights(32, 0.5, seed, name);
                within.iter().map(|x| (least + (x + 0.5) * (most - least)).round() as usize).collect()
            };
            let (prompts, completions) = (random("prompts", 60.0, 120.0), random("completions", 20.0, 256.0));
            let lengths = prompts.iter().zip(&completions).map(|(prompt, completion)| prompt + completion - 1);
            (lengths.collect(), completions.iter().sum())
        })
    }

    #[test]
    fn packing_random_lengths_needs_few_shapes_and_less_padding() {
        let (mut shapes, mut padded_shapes, mut packed, mut padded) = (BTreeSet::new(), BTreeSet::new(), 0, 0);
        for (lengths, completions) in micro_batches(500) {
            let packing = Packing::new(&lengths);
            shapes.insert((packing.rows.len(), packing.length, bucket(completions)));
            padded_shapes.insert((packing.length, bucket(completions)));
            packed += packing.rows.len() * packing.length;
            padded += lengths.len() * packing.length;
        }
        assert!(packed * 5 < padded * 4, "{packed} {padded}");
        assert!(shapes.len() <= padded_shapes.len() + 4 && shapes.len() <= 8, "{shapes:?}");
    }
}
