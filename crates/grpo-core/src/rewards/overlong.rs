//! The soft penalty for completions close to the length limit.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// The penalty min(-(length - (max - cache)) / cache x penalty_factor, 0), at least -penalty_factor. DAPO, arXiv 2503.14476, eq.
/// 13.
///
/// TRL's `get_soft_overlong_punishment` has the same names and a factor of 1. verl's and OpenRLHF's `overlong_buffer_len`
/// (`overlong_buffer.len`) is `soft_punish_cache`; their limit is the generation limit, which no length exceeds.
///
/// ```
/// use grpo_core::rewards::SoftOverlong;
///
/// let overlong = SoftOverlong { max_completion_len: 100, soft_punish_cache: 20, penalty_factor: 1.0 };
/// assert_eq!(overlong.penalties(&[80, 90, 100])?, [0.0, -0.5, -1.0]);
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SoftOverlong {
    /// Generation limit in tokens.
    pub max_completion_len: usize,
    /// Length of the range before the limit over which the penalty grows from 0 to its maximum; with 0, only
    /// lengths beyond the limit are penalised.
    pub soft_punish_cache: usize,
    /// The maximum of the penalty.
    #[serde(default = "one")]
    pub penalty_factor: f64,
}

fn one() -> f64 {
    1.0
}

impl SoftOverlong {
    /// Returns the penalties `[B]`, 0 or below, of completions of these lengths in tokens. Add them to the rewards, or use them as a separate
    /// reward function.
    ///
    /// # Errors
    /// [`Error::Key`] for a cache longer than the limit, or a factor that is negative or not finite.
    pub fn penalties(&self, lengths: &[usize]) -> Result<Vec<f32>> {
        if self.soft_punish_cache > self.max_completion_len {
            return Err(Error::of_key(
                "soft_punish_cache",
                format!(
                    "overlong penalty: soft_punish_cache ({}) must be at most max_completion_len ({})",
                    self.soft_punish_cache, self.max_completion_len
                ),
            ));
        }
        if !(self.penalty_factor >= 0.0 && self.penalty_factor.is_finite()) {
            return Err(Error::of_key(
                "penalty_factor",
                format!(
                    "overlong penalty: penalty_factor must be finite and not negative, got {}",
                    self.penalty_factor
                ),
            ));
        }
        let free = self.max_completion_len - self.soft_punish_cache;
        let share = |length: usize| match length.saturating_sub(free) {
            0 => 0.0,
            _ if length > self.max_completion_len => 1.0,
            excess => excess as f64 / self.soft_punish_cache as f64,
        };
        // 0 - x, so that a zero penalty is 0 and not -0.
        Ok(lengths.iter().map(|l| (0.0 - share(*l) * self.penalty_factor) as f32).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PENALTY: SoftOverlong = SoftOverlong { max_completion_len: 100, soft_punish_cache: 20, penalty_factor: 1.0 };

    #[test]
    fn penalty_grows_over_the_cache_and_stops_at_the_limit() {
        let penalties = PENALTY.penalties(&[0, 80, 81, 90, 100, 101, 1000]).unwrap();
        assert_eq!(penalties, [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0]);
        let halved = SoftOverlong { penalty_factor: 0.5, ..PENALTY }.penalties(&[90, 200]).unwrap();
        assert_eq!(halved, [-0.25, -0.5]);
        let hard = SoftOverlong { soft_punish_cache: 0, ..PENALTY }.penalties(&[100, 101]).unwrap();
        assert_eq!(hard, [0.0, -1.0]);
    }

    #[test]
    fn penalty_refuses_a_cache_beyond_the_limit_and_a_negative_factor() {
        let long = SoftOverlong { soft_punish_cache: 101, ..PENALTY };
        assert!(long.penalties(&[1]).unwrap_err().to_string().contains("soft_punish_cache (101)"));
        for penalty_factor in [-1.0, f64::NAN] {
            let wrong = SoftOverlong { penalty_factor, ..PENALTY };
            assert!(wrong.penalties(&[1]).unwrap_err().to_string().contains("penalty_factor"));
        }
    }

    #[test]
    fn penalty_factor_is_optional() {
        let read: SoftOverlong =
            serde_json::from_str(r#"{"max_completion_len": 100, "soft_punish_cache": 20}"#).unwrap();
        assert_eq!(read, PENALTY);
    }
}
