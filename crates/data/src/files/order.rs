//! The order of rows: a function of the seed and the position.

use grpo_rng::{Purpose, stream};
use rand::seq::SliceRandom;

/// A shuffled order of `0..length` for every epoch. The last order is cached.
#[derive(Debug)]
pub(super) struct Epochs {
    seed: u64,
    purpose: Purpose,
    /// The number of this order; different orders use disjoint random streams.
    index: u64,
    length: u64,
    /// `false` for ascending order.
    is_shuffled: bool,
    kept: Option<(u64, Vec<u32>)>,
}

impl Epochs {
    pub(super) fn new(seed: u64, purpose: Purpose, index: u64, length: u64, is_shuffled: bool) -> Self {
        Self { seed, purpose, index, length, is_shuffled, kept: None }
    }

    /// Returns the number at `position` in the concatenation of all epochs.
    pub(super) fn at(&mut self, position: u64) -> u64 {
        let (epoch, place) = (position / self.length, position % self.length);
        if !self.is_shuffled {
            return place;
        }
        if self.kept.as_ref().is_none_or(|(kept, _)| *kept != epoch) {
            let mut order: Vec<u32> = (0..self.length as u32).collect();
            order.shuffle(&mut stream(self.seed, self.purpose, epoch, self.index));
            self.kept = Some((epoch, order));
        }
        self.kept.as_ref().map_or(place, |(_, order)| u64::from(order[place as usize]))
    }
}

/// The file and row at each position.
///
/// An epoch has as many rows as all files together. A file's share of them is its weight or, without weights, its number of rows. A file
/// fills its share from its own epochs, so no row repeats before all rows of the file were drawn.
#[derive(Debug)]
pub(super) struct Schedule {
    /// The shuffled slots of an epoch.
    places: Epochs,
    /// For each file: its first slot, its number of slots, and the order of its rows.
    files: Vec<(u64, u64, Epochs)>,
}

impl Schedule {
    /// Creates a schedule for files with these numbers of rows, each above 0, and weights. All numbers fit into 32 bits.
    pub(super) fn new(files: &[(u64, Option<f64>)], seed: u64, purpose: Purpose, is_shuffled: bool) -> Self {
        let total: u64 = files.iter().map(|(rows, _)| rows).sum();
        let weights: f64 = files.iter().filter_map(|(_, weight)| *weight).sum();
        let mut first = 0;
        let files = files.iter().enumerate().map(|(index, (rows, weight))| {
            let share = match weight {
                Some(weight) => ((total as f64 * weight / weights).round() as u64).max(1),
                None => *rows,
            };
            let file = (first, share, Epochs::new(seed, purpose, index as u64 + 1, *rows, is_shuffled));
            first += share;
            file
        });
        let files: Vec<_> = files.collect();
        Self { places: Epochs::new(seed, purpose, 0, first, is_shuffled), files }
    }

    pub(super) fn at(&mut self, position: u64) -> (usize, usize) {
        let (epoch, place) = (position / self.places.length, self.places.at(position));
        let file = self.files.partition_point(|(first, _, _)| *first <= place).saturating_sub(1);
        let (first, share, rows) = &mut self.files[file];
        (file, rows.at(epoch * *share + (place - *first)) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn rows(schedule: &mut Schedule, positions: std::ops::Range<u64>) -> Vec<(usize, usize)> {
        positions.map(|position| schedule.at(position)).collect()
    }

    #[test]
    fn file_weights_are_shares_and_rows_repeat_only_after_all_were_drawn() {
        let mut schedule = Schedule::new(&[(10, Some(3.0)), (90, Some(1.0))], 0, Purpose::TrainProblem, true);
        let epoch = rows(&mut schedule, 0..100);
        assert_eq!(epoch.iter().filter(|(file, _)| *file == 0).count(), 75);
        let mut counts = BTreeMap::new();
        for row in rows(&mut schedule, 0..400) {
            *counts.entry(row).or_insert(0) += 1;
        }
        let of = |file: usize| counts.iter().filter(move |((f, _), _)| *f == file).map(|(_, count)| *count);
        assert!(of(0).all(|count| count == 30) && of(0).count() == 10);
        assert!(of(1).all(|count| count == 1 || count == 2) && of(1).sum::<i32>() == 100);
    }
}
