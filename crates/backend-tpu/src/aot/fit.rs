//! The largest tile with which everything fits into a device's memory, by asking the compiler.

use super::{Compiler, Report, Variant};
use crate::program::{Blocking, Spec};
use grpo_core::error::{Error, Result};

/// Tiles are whole numbers of this many rows or columns, as the devices' registers are.
const STEP: usize = 128;

/// A tile that fits, and what it costs.
#[derive(Clone, Debug)]
pub struct Fit {
    /// With the largest tile that fits.
    pub best: Report,
    /// With half and twice the tile, where there are such; the larger one may not fit.
    pub neighbours: Vec<Report>,
}

impl Compiler {
    /// The largest chunk of tokens with which arguments, results, temporaries and code of `variant` take at most `memory`
    /// bytes of a device; panels of the vocabulary when not even [`STEP`] tokens fit. A program without tiles is compiled
    /// once, to see whether it fits.
    ///
    /// # Errors
    /// [`Error::Budget`] when nothing fits; otherwise those of [`Compiler::report`].
    pub fn fit(&self, variant: &Variant, memory: u64) -> Result<Fit> {
        let spec = variant.spec()?;
        let with = |blocking: Blocking| Spec { blocking, ..spec.clone() };
        let too_large = |minimum: u64| Error::Budget {
            what: format!("this loss on {} (arguments, results, temporaries, code)", self.target().name()),
            budget: usize::try_from(memory).unwrap_or(usize::MAX),
            minimum: usize::try_from(minimum).unwrap_or(usize::MAX),
        };
        if !variant.has_tiles() {
            let best = self.report_of(variant, &spec)?;
            return match best.total_bytes <= memory {
                true => Ok(Fit { best, neighbours: vec![] }),
                false => Err(too_large(best.total_bytes)),
            };
        }
        let mut smallest = u64::MAX;
        let orders: [(fn(usize) -> Blocking, usize); 2] =
            [(Blocking::TokenChunks, spec.local_tokens()), (Blocking::VocabPanels, spec.local_vocab())];
        for (order, length) in orders {
            let blocking = |steps: usize| order((steps * STEP).min(length));
            let mut fits = |steps: usize| -> Result<bool> {
                let total = self.total_bytes(variant, &with(blocking(steps)))?;
                smallest = smallest.min(total);
                tracing::info!(blocking = ?blocking(steps), total, memory, "tried");
                Ok(total <= memory)
            };
            let all = length.div_ceil(STEP);
            let Some(steps) = largest(all, &mut fits)? else { continue };
            let best = self.report_of(variant, &with(blocking(steps)))?;
            let around = [steps / 2, steps * 2].into_iter().filter(|s| (1..=all).contains(s) && *s != steps);
            let neighbours = around.map(|steps| self.report_of(variant, &with(blocking(steps)))).collect::<Result<_>>();
            return Ok(Fit { best, neighbours: neighbours? });
        }
        Err(too_large(smallest))
    }
}

/// The largest number from 1 to `all` that fits, if any; smaller ones fit too.
fn largest(all: usize, fits: &mut impl FnMut(usize) -> Result<bool>) -> Result<Option<usize>> {
    if fits(all)? {
        return Ok(Some(all));
    }
    // Invariant: `low` fits or is 0, `high` does not.
    let (mut low, mut high) = (0, all);
    while high - low > 1 {
        // The first question is whether the smallest fits: if not, no other has to be asked.
        let middle = if low == 0 { 1 } else { low.midpoint(high) };
        match fits(middle)? {
            true => low = middle,
            false if middle == 1 => return Ok(None),
            false => high = middle,
        }
    }
    Ok(Some(low).filter(|low| *low > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bisection_finds_the_largest_in_few_questions() {
        for all in [1, 2, 3, 64, 1187] {
            for limit in 0..=all + 1 {
                let mut asked = 0;
                let mut fits = |n| {
                    asked += 1;
                    Ok(n <= limit)
                };
                let expected = Some(limit.min(all)).filter(|limit| *limit > 0);
                assert_eq!(largest(all, &mut fits).expect("no error"), expected, "{all} {limit}");
                assert!(asked <= 13, "{all} {limit}: {asked}");
            }
        }
    }
}
