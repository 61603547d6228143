//! Sequences of different lengths in one rectangle.

use policy::{Error, Result};

/// The token id in padding, which nothing attends to: any id that every vocabulary has.
pub(crate) const PADDING: u32 = 0;

/// B sequences in T columns: row b's tokens stand at columns `start[b]..start[b] + len[b]`, the rest is padding on
/// either side. Positions count from each row's own start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PaddedBatch {
    /// The token ids `[B, T]`, row-major.
    pub ids: Vec<u32>,
    /// The first column `[B]` of each row that is no padding.
    pub start: Vec<usize>,
    /// The number of columns `[B]` of each row that are no padding.
    pub len: Vec<usize>,
    /// T, the number of columns.
    pub columns: usize,
}

impl PaddedBatch {
    /// A batch with padding behind: every row starts at column 0.
    ///
    /// # Errors
    /// [`Error::Argument`] when there is no sequence or one is empty.
    pub fn right_padded<S: AsRef<[u32]>>(sequences: &[S]) -> Result<Self> {
        Self::new(sequences, |_, _| 0)
    }

    /// A batch with padding in front: every row ends at column T, where decoding goes on.
    ///
    /// # Errors
    /// [`Error::Argument`] when there is no sequence or one is empty.
    pub fn left_padded<S: AsRef<[u32]>>(sequences: &[S]) -> Result<Self> {
        Self::new(sequences, |columns, len| columns - len)
    }

    fn new<S: AsRef<[u32]>>(sequences: &[S], place: impl Fn(usize, usize) -> usize) -> Result<Self> {
        let len: Vec<usize> = sequences.iter().map(|s| s.as_ref().len()).collect();
        let columns = len.iter().copied().max().unwrap_or(0);
        if len.contains(&0) || columns == 0 {
            return Err(Error::argument(
                "PaddedBatch",
                "at least one sequence, none of them empty",
                format!("{len:?}"),
            ));
        }
        let start: Vec<usize> = len.iter().map(|&l| place(columns, l)).collect();
        let mut ids = vec![PADDING; sequences.len() * columns];
        for (b, sequence) in sequences.iter().enumerate() {
            let first = b * columns + start[b];
            ids[first..first + len[b]].copy_from_slice(sequence.as_ref());
        }
        Ok(Self { ids, start, len, columns })
    }

    /// B, the number of rows.
    pub fn rows(&self) -> usize {
        self.start.len()
    }

    /// The position `[B, T]` of every column in its sequence; 0 for padding, which nothing attends to.
    pub(crate) fn positions(&self) -> Vec<usize> {
        let mut positions = Vec::with_capacity(self.ids.len());
        for (&start, &len) in self.start.iter().zip(&self.len) {
            positions.extend((0..self.columns).map(|t| if t < start + len { t.saturating_sub(start) } else { 0 }));
        }
        positions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pads_on_either_side_and_counts_positions_from_each_start() {
        let rows = [vec![5, 6, 7], vec![8]];
        let right = PaddedBatch::right_padded(&rows).unwrap();
        assert_eq!(right.ids, [5, 6, 7, 8, 0, 0]);
        assert_eq!(right.positions(), [0, 1, 2, 0, 0, 0]);
        let left = PaddedBatch::left_padded(&rows).unwrap();
        assert_eq!(left.ids, [5, 6, 7, 0, 0, 8]);
        assert_eq!(left.start, [0, 2]);
        assert_eq!(left.positions(), [0, 1, 2, 0, 0, 0]);
    }

    #[test]
    fn empty_input_is_an_error() {
        assert!(PaddedBatch::right_padded::<Vec<u32>>(&[]).is_err());
        assert!(PaddedBatch::left_padded(&[vec![1], vec![]]).is_err());
    }
}
