//! The soft penalty for completions that come near the length limit, in tokens.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// min(-(length - (max - cache)) / cache x penalty_factor, 0), never under -penalty_factor. DAPO, arXiv 2503.14476, eq.
/// 13.
///
/// TRL's `get_soft_overlong_punishment` has these names and a factor of 1. verl's and OpenRLHF's `overlong_buffer_len`
/// (`overlong_buffer.len`) is `soft_punish_cache`, and their limit is that of generation, which no length exceeds.
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
    /// Length of the last stretch before the limit, over which the penalty grows from 0 to its whole; 0 leaves only
    /// lengths beyond the limit penalised.
    pub soft_punish_cache: usize,
    /// The whole penalty.
    #[serde(default = "one")]
    pub penalty_factor: f64,
}

fn one() -> f64 {
    1.0
}

impl SoftOverlong {
    /// Penalties `[B]`, 0 or below, of completions of these lengths in tokens: to be added to the rewards, or a reward
    /// function of its own.
    ///
    /// # Errors
    /// [`Error::Config`] for a cache longer than the limit, or a factor that is negative or not finite.
    pub fn penalties(&self, lengths: &[usize]) -> Result<Vec<f32>> {
        if self.soft_punish_cache > self.max_completion_len {
            return Err(Error::Config(format!(
                "overlong penalty: soft_punish_cache ({}) must be at most max_completion_len ({})",
                self.soft_punish_cache, self.max_completion_len
            )));
        }
        if !(self.penalty_factor >= 0.0 && self.penalty_factor.is_finite()) {
            return Err(Error::Config(format!(
                "overlong penalty: penalty_factor must be finite and not negative, got {}",
                self.penalty_factor
            )));
        }
        let free = self.max_completion_len - self.soft_punish_cache;
        let share = |length: usize| match length.saturating_sub(free) {
            0 => 0.0,
            _ if length > self.max_completion_len => 1.0,
            excess => excess as f64 / self.soft_punish_cache as f64,
        };
        // 0 - x, so that no penalty is 0 and not -0.
        Ok(lengths.iter().map(|l| (0.0 - share(*l) * self.penalty_factor) as f32).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PENALTY: SoftOverlong = SoftOverlong { max_completion_len: 100, soft_punish_cache: 20, penalty_factor: 1.0 };

    #[test]
    fn grows_over_the_cache_and_stops_at_the_limit() {
        let penalties = PENALTY.penalties(&[0, 80, 81, 90, 100, 101, 1000]).unwrap();
        assert_eq!(penalties, [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0]);
        let halved = SoftOverlong { penalty_factor: 0.5, ..PENALTY }.penalties(&[90, 200]).unwrap();
        assert_eq!(halved, [-0.25, -0.5]);
        let hard = SoftOverlong { soft_punish_cache: 0, ..PENALTY }.penalties(&[100, 101]).unwrap();
        assert_eq!(hard, [0.0, -1.0]);
    }

    #[test]
    fn refuses_a_cache_beyond_the_limit_and_a_factor_that_rewards() {
        let long = SoftOverlong { soft_punish_cache: 101, ..PENALTY };
        assert!(long.penalties(&[1]).unwrap_err().to_string().contains("soft_punish_cache (101)"));
        for penalty_factor in [-1.0, f64::NAN] {
            let wrong = SoftOverlong { penalty_factor, ..PENALTY };
            assert!(wrong.penalties(&[1]).unwrap_err().to_string().contains("penalty_factor"));
        }
    }

    #[test]
    fn the_factor_may_be_left_out_of_a_configuration() {
        let read: SoftOverlong =
            serde_json::from_str(r#"{"max_completion_len": 100, "soft_punish_cache": 20}"#).unwrap();
        assert_eq!(read, PENALTY);
    }
}
