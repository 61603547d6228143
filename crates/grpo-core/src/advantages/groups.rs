//! Groups of completions of the same prompt.

use crate::error::{Error, Result};

/// Boundaries of groups; the completions of one prompt are contiguous.
///
/// ```
/// use grpo_core::advantages::{AdvantageConfig, AdvantageEstimator};
///
/// let config = AdvantageConfig { estimator: AdvantageEstimator::MeanOnly, ..AdvantageConfig::default() };
/// // Three completions of one prompt and one of another, whose group has nothing to compare it with.
/// assert_eq!(config.advantages(&[0.0, 1.0, 4.0, 2.0], 2)?, [-0.5, 0.5, 1.0, -1.0]);
/// // Three completions of one prompt and one of another, which has nothing to be compared with.
/// assert_eq!(config.advantages(&[0.0, 1.0, 5.0, 2.0], &[0, 3, 4][..])?, [-2.0, -1.0, 3.0, 0.0]);
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Groups<'a> {
    /// The same number of completions for every prompt (TRL's `num_generations`).
    OfSize(usize),
    /// `[P + 1]` for P prompts, from 0 to B: prompt p has the completions `offsets[p]..offsets[p + 1]`, at least one.
    Offsets(&'a [usize]),
}

impl From<usize> for Groups<'_> {
    fn from(size: usize) -> Self {
        Self::OfSize(size)
    }
}

impl<'a> From<&'a [usize]> for Groups<'a> {
    fn from(offsets: &'a [usize]) -> Self {
        Self::Offsets(offsets)
    }
}

impl<'a> From<&'a Vec<usize>> for Groups<'a> {
    fn from(offsets: &'a Vec<usize>) -> Self {
        Self::Offsets(offsets)
    }
}

impl Groups<'_> {
    /// Returns `[P + 1]`: the first completion of each of P groups, and the number of completions.
    ///
    /// # Errors
    /// [`Error::Shape`] if the number of completions is not a multiple of the size, or if the offsets do not rise from 0 to
    /// the number of completions.
    pub(super) fn offsets(self, operation: &'static str, completions: usize) -> Result<Vec<usize>> {
        match self {
            Self::OfSize(size) if size == 0 || !completions.is_multiple_of(size) => {
                let expected = format!("a multiple of the group size {size}");
                Err(Error::shape(operation, "rewards", expected, completions))
            }
            Self::OfSize(size) => Ok((0..=completions).step_by(size).collect()),
            Self::Offsets(offsets) => {
                if let Some(p) = offsets.windows(2).position(|pair| pair[0] >= pair[1]) {
                    let (what, expected) = (format!("end of group {p}"), format!("above its begin {}", offsets[p]));
                    return Err(Error::shape(operation, what, expected, offsets[p + 1]));
                }
                match (offsets.first(), offsets.last()) {
                    (Some(0), Some(end)) if *end == completions => Ok(offsets.to_vec()),
                    (Some(begin), Some(end)) => {
                        let expected = format!("0 to {completions}, the number of completions");
                        Err(Error::shape(operation, "offsets of groups", expected, format!("{begin} to {end}")))
                    }
                    _ => Err(Error::shape(operation, "offsets of groups", "one more than there are groups", 0)),
                }
            }
        }
    }
}
