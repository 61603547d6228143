//! Which completions belong to the same prompt.

use crate::error::{Error, Result};

/// The completions of one prompt lie next to each other; this says where the next prompt begins.
///
/// ```
/// use grpo_core::advantages::{AdvantageConfig, AdvantageEstimator};
///
/// let config = AdvantageConfig { estimator: AdvantageEstimator::MeanOnly, ..AdvantageConfig::default() };
/// // Two prompts with two completions each.
/// assert_eq!(config.advantages(&[0.0, 1.0, 4.0, 2.0], 2)?, [-0.5, 0.5, 1.0, -1.0]);
/// // Three completions of one prompt and one of another, which has nothing to be compared with.
/// assert_eq!(config.advantages(&[0.0, 1.0, 5.0, 2.0], &[0, 3, 4][..])?, [-2.0, -1.0, 3.0, 0.0]);
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Groups<'a> {
    /// So many completions of every prompt (TRL's `num_generations`).
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
    /// `[P + 1]`: where each of P groups begins among so many completions, and where the last one ends.
    ///
    /// # Errors
    /// [`Error::Shape`] when the number of completions is not a multiple of the size, or when offsets do not rise from 0 to
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
