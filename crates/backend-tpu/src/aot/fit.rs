//! Searches for the largest tile that fits into a device's memory, by compiling.

use super::compile::{Compiled, Compiler};
use super::report::Report;
use super::variant::Variant;
use crate::program::{Blocking, Spec};
use grpo_core::error::{Error, Result};
use std::collections::BTreeMap;

/// Tiles are multiples of this many rows or columns, as the devices' registers require.
const STEP: usize = 128;

/// The number of wrong guesses before the search bisects.
const GUESSES: usize = 4;

/// The largest tile that fits, with its cost.
#[derive(Clone, Debug)]
pub struct Fit {
    /// The report of the program with the largest tile that fits.
    pub best: Report,
    /// Reports with one loop iteration less, if possible (that one does not fit), and with one more.
    pub neighbours: Vec<Report>,
}

impl Compiler {
    /// Finds the smallest number of equal token chunks with which arguments, results, temporaries and code of `variant`
    /// take at most `memory` bytes of a device; if not even 128 tokens fit, panels of the vocabulary. A program without
    /// tiles is compiled once, to check whether it fits.
    ///
    /// # Errors
    /// [`Error::Budget`] if nothing fits; the errors of [`Compiler::report`].
    pub fn fit(&self, variant: &Variant, memory: u64) -> Result<Fit> {
        let spec = variant.spec()?;
        let mut smallest = u64::MAX;
        let chunks = |size| Blocking::TokenChunks(size);
        let panels = |size| Blocking::VocabPanels(size);
        let orders: [(&dyn Fn(usize) -> Blocking, usize); 2] =
            [(&chunks, spec.padded_tokens()), (&panels, spec.local_vocab())];
        // A program without tiles has one iteration.
        let (orders, step) = if variant.has_tiles() { (&orders[..], STEP) } else { (&orders[..1], usize::MAX) };
        for (order, length) in orders {
            let mut tried: BTreeMap<usize, Compiled> = BTreeMap::new();
            let with = |trips: usize| {
                let size = length.div_ceil(trips);
                Spec {
                    blocking: order(size.checked_next_multiple_of(step).unwrap_or(size).min(*length)),
                    ..spec.clone()
                }
            };
            let trips = fewest(length.div_ceil(step), &mut |trips| {
                let compiled = self.compile(variant, &with(trips))?;
                let Report { total_bytes, temp_bytes, .. } = compiled.report;
                tried.insert(trips, compiled);
                smallest = smallest.min(total_bytes);
                tracing::info!(trips, total_bytes, memory, "tried");
                // Only temporaries grow with the tile.
                let left = memory.saturating_sub(total_bytes - temp_bytes);
                let guess = if left == 0 {
                    usize::MAX
                } else {
                    (trips as f64 * temp_bytes as f64 / left as f64).ceil() as usize
                };
                Ok((total_bytes <= memory, guess))
            })?;
            let Some(trips) = trips else { continue };
            let mut report = |trips: usize| match tried.remove(&trips) {
                Some(compiled) => self.estimate(compiled, spec.mesh),
                None => self.estimate(self.compile(variant, &with(trips))?, spec.mesh),
            };
            let best = report(trips)?;
            let mut neighbours = vec![];
            for trips in [trips - 1, trips + 1].into_iter().filter(|t| (1..=length.div_ceil(step)).contains(t)) {
                neighbours.push(report(trips)?);
            }
            return Ok(Fit { best, neighbours });
        }
        Err(Error::Budget {
            what: format!("this loss on {} (arguments, results, temporaries, code)", self.target().name()),
            budget: usize::try_from(memory).unwrap_or(usize::MAX),
            minimum: usize::try_from(smallest).unwrap_or(usize::MAX),
        })
    }
}

/// Returns the smallest number from 1 to `all` that fits, if any; all larger numbers must fit, too. `try_it` returns
/// whether a number fits, and a guess of the smallest one that does.
fn fewest(all: usize, try_it: &mut impl FnMut(usize) -> Result<(bool, usize)>) -> Result<Option<usize>> {
    // Invariant: `low` does not fit; `high` fits, or is beyond `all`.
    let (mut low, mut high, mut guess) = (0, all + 1, 1);
    for tries in 0.. {
        if high - low <= 1 {
            break;
        }
        let next = if tries <= GUESSES { guess.clamp(low + 1, high - 1) } else { low.midpoint(high) };
        let (fits, better) = try_it(next)?;
        if fits {
            high = next;
        } else {
            low = next;
        }
        guess = better;
    }
    Ok(Some(high).filter(|trips| *trips <= all))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search(all: usize, limit: usize, guess: impl Fn(usize) -> usize) -> (Option<usize>, usize) {
        let mut calls = 0;
        let found = fewest(all, &mut |n| {
            calls += 1;
            Ok((n >= limit, guess(n)))
        });
        (found.expect("no error"), calls)
    }

    #[test]
    fn the_fewest_trips_are_found_for_any_guess() {
        for all in [1, 2, 3, 64, 1187] {
            for limit in 1..=all + 1 {
                let expected = Some(limit).filter(|limit| *limit <= all);
                for guess in
                    [&|n: usize| n - 1, &|n: usize| n + 1, &|_: usize| usize::MAX] as [&dyn Fn(usize) -> usize; 3]
                {
                    let (found, asked) = search(all, limit, guess);
                    assert_eq!(found, expected, "{all} {limit}");
                    assert!(asked <= GUESSES + 12, "{all} {limit}: {asked}");
                }
            }
        }
    }

    #[test]
    fn a_good_guess_takes_three_compilations() {
        assert_eq!(search(64, 1, |_| 1), (Some(1), 1));
        assert_eq!(search(64, 17, |_| 17), (Some(17), 3));
    }
}
