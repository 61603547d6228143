//! The largest tile with which everything fits into a device's memory, by asking the compiler.

use super::compile::Compiled;
use super::compile::Compiler;
use super::report::Report;
use super::variant::Variant;
use crate::program::{Blocking, Spec};
use grpo_core::error::{Error, Result};
use std::collections::BTreeMap;

/// Tiles are whole numbers of this many rows or columns, as the devices' registers are.
const STEP: usize = 128;

/// Guesses that may be wrong before the search halves instead.
const GUESSES: usize = 4;

/// A tile that fits, and what it costs.
#[derive(Clone, Debug)]
pub struct Fit {
    /// The report of the program with the largest tile that fits.
    pub best: Report,
    /// Reports with one iteration of the loop less, where there is one (it does not fit), and with one more.
    pub neighbours: Vec<Report>,
}

impl Compiler {
    /// The fewest chunks of tokens, all of one size, with which arguments, results, temporaries and code of `variant` take
    /// at most `memory` bytes of a device; panels of the vocabulary when not even 128 tokens fit. A program without
    /// tiles is compiled once, to see whether it fits.
    ///
    /// # Errors
    /// [`Error::Budget`] when nothing fits; otherwise those of [`Compiler::report`].
    pub fn fit(&self, variant: &Variant, memory: u64) -> Result<Fit> {
        let spec = variant.spec()?;
        let mut smallest = u64::MAX;
        let chunks = |size| Blocking::TokenChunks(size);
        let panels = |size| Blocking::VocabPanels(size);
        let orders: [(&dyn Fn(usize) -> Blocking, usize); 2] =
            [(&chunks, spec.local_tokens()), (&panels, spec.local_vocab())];
        // Without tiles, one iteration is all there is.
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
                // Temporaries grow with the tile, the rest does not.
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

/// The smallest number from 1 to `all` that fits, if any; larger ones fit too. `try_it` says whether a number fits, and
/// guesses the smallest that does.
fn fewest(all: usize, try_it: &mut impl FnMut(usize) -> Result<(bool, usize)>) -> Result<Option<usize>> {
    // Invariant: `low` does not fit, `high` does, or is beyond all that are asked for.
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
        let mut asked = 0;
        let found = fewest(all, &mut |n| {
            asked += 1;
            Ok((n >= limit, guess(n)))
        });
        (found.expect("no error"), asked)
    }

    #[test]
    fn the_fewest_trips_are_found_whatever_is_guessed() {
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
    fn a_good_guess_takes_three_questions() {
        assert_eq!(search(64, 1, |_| 1), (Some(1), 1));
        assert_eq!(search(64, 17, |_| 17), (Some(17), 3));
    }
}
