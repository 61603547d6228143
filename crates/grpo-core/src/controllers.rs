//! Controllers that adapt coefficients to measurements. Their state serialises, so that a checkpoint contains
//! it.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The coefficient of the KL in the reward. verl's `algorithm.kl_ctrl`, with its names.
///
/// ```
/// use grpo_core::controllers::{AdaptiveKl, KlController};
///
/// let mut controller = KlController::Adaptive(AdaptiveKl { kl_coef: 0.01, target_kl: 0.1, horizon: 1000.0 });
/// controller.update(0.5, 100)?; // five times the target: increased by 0.2 x 100 / 1000
/// assert!((controller.coef() - 0.0102).abs() < 1e-12);
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum KlController {
    /// A constant coefficient.
    Fixed(FixedKl),
    /// A coefficient that adapts to a target.
    Adaptive(AdaptiveKl),
}

/// A constant coefficient.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FixedKl {
    /// The coefficient. verl: 0.001.
    #[default(1e-3)]
    pub kl_coef: f64,
}

/// Multiplies the coefficient by 1 + clip(kl / target_kl - 1, -0.2, 0.2) x n / horizon after every n completions. arXiv 1909.08593; verl.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdaptiveKl {
    /// Current coefficient. verl starts at 0.001.
    #[default(1e-3)]
    pub kl_coef: f64,
    /// Target KL, in nats per token. verl: 0.1.
    #[default(0.1)]
    pub target_kl: f64,
    /// Number of completions over which the coefficient changes by at most 20 %. verl: 10 000.
    #[default(10_000.0)]
    pub horizon: f64,
}

impl KlController {
    /// Returns the current coefficient.
    pub fn coef(&self) -> f64 {
        match self {
            Self::Fixed(fixed) => fixed.kl_coef,
            Self::Adaptive(adaptive) => adaptive.kl_coef,
        }
    }

    /// Updates the coefficient with the mean KL of `completions` ([`crate::rewards::KlRewards::kl`]), after their rewards were computed.
    ///
    /// # Errors
    /// The errors of [`AdaptiveKl::update`].
    pub fn update(&mut self, kl: f64, completions: usize) -> Result<()> {
        match self {
            Self::Fixed(_) => Ok(()),
            Self::Adaptive(adaptive) => adaptive.update(kl, completions),
        }
    }
}

impl AdaptiveKl {
    /// Updates the coefficient with the mean KL of `completions`.
    ///
    /// # Errors
    /// [`Error::Key`] for a target or horizon that is not above 0, or for so many completions that the coefficient
    /// could change its sign (5 x horizon); [`Error::Value`] for a KL that is not finite.
    pub fn update(&mut self, kl: f64, completions: usize) -> Result<()> {
        for (name, value) in [("target_kl", self.target_kl), ("horizon", self.horizon)] {
            if !(value > 0.0 && value.is_finite()) {
                return Err(Error::of_key(
                    name,
                    format!("KL controller: {name} must be finite and above 0, got {value}"),
                ));
            }
        }
        let n = completions as f64;
        if n >= 5.0 * self.horizon {
            return Err(Error::of_key(
                "horizon",
                format!(
                    "KL controller: {completions} completions at once need a horizon above {}, got {}",
                    n / 5.0,
                    self.horizon
                ),
            ));
        }
        if !kl.is_finite() {
            return Err(Error::value("KL", "the controller's update", format!("{kl} is not finite")));
        }
        let error = (kl / self.target_kl - 1.0).clamp(-0.2, 0.2);
        self.kl_coef *= 1.0 + error * n / self.horizon;
        Ok(())
    }
}

/// The coefficient of the entropy bonus, which moves by `delta` per optimizer step. It applies only if the last measured
/// entropy is at most the target. Skywork-OR1, arXiv 2505.22312; TRL's `use_adaptive_entropy`, with
/// its defaults.
///
/// ```
/// use grpo_core::controllers::AdaptiveEntropy;
///
/// let mut controller = AdaptiveEntropy { entropy_target: 0.3, ..AdaptiveEntropy::default() };
/// controller.observe(10.0, 100.0)?; // a micro-batch: 100 tokens, whose entropies sum to 10 nats
/// assert_eq!(controller.step()?, Some(0.1));
/// assert_eq!(controller.coef(), 0.005); // below the target, so increased once
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdaptiveEntropy {
    /// Current coefficient; TRL starts at 0.
    pub entropy_coef: f64,
    /// Smallest coefficient.
    pub entropy_coef_min: f64,
    /// Largest coefficient.
    #[default(1.0)]
    pub entropy_coef_max: f64,
    /// Change of the coefficient per step.
    #[default(0.005)]
    pub entropy_coef_delta: f64,
    /// Target of the mean entropy per token, in nats.
    #[default(0.2)]
    pub entropy_target: f64,
    /// Mean entropy of the last optimizer step, in nats; `None` before the first step, which has no bonus.
    pub last_entropy: Option<f64>,
    /// Sum of entropies since the last optimizer step, in nats.
    pub window_sum: f64,
    /// Tokens since the last optimizer step.
    pub window_count: f64,
}

impl AdaptiveEntropy {
    /// Checks the numbers and bounds.
    ///
    /// # Errors
    /// [`Error::Key`] with the field.
    pub fn validate(&self) -> Result<()> {
        let fail = |key: &str, message: String| Err(Error::of_key(key, format!("entropy controller: {message}")));
        for (name, value) in [
            ("entropy_coef", self.entropy_coef),
            ("entropy_coef_min", self.entropy_coef_min),
            ("entropy_coef_max", self.entropy_coef_max),
            ("entropy_coef_delta", self.entropy_coef_delta),
            ("entropy_target", self.entropy_target),
        ] {
            if !(value >= 0.0 && value.is_finite()) {
                return fail(name, format!("{name} must be finite and not negative, got {value}"));
            }
        }
        let (min, max) = (self.entropy_coef_min, self.entropy_coef_max);
        if min > max {
            return fail(
                "entropy_coef_min",
                format!("entropy_coef_min ({min}) must be at most entropy_coef_max ({max})"),
            );
        }
        Ok(())
    }

    /// Returns the coefficient for every micro-batch of this optimizer step.
    pub fn coef(&self) -> f64 {
        if self.last_entropy.is_some_and(|entropy| entropy <= self.entropy_target) { self.entropy_coef } else { 0.0 }
    }

    /// Adds a micro-batch: the sum of its tokens' entropies in nats and their number, over all ranks. The
    /// tokens are those to which the bonus applies.
    ///
    /// # Errors
    /// [`Error::Value`] if either is not finite or negative; the window is then unchanged.
    pub fn observe(&mut self, sum: f64, count: f64) -> Result<()> {
        for (name, value) in [("entropy sum", sum), ("entropy token count", count)] {
            if !(value >= 0.0 && value.is_finite()) {
                let reason = format!("{value} must be finite and not negative");
                return Err(Error::value(name, "the controller's window", reason));
            }
        }
        self.window_sum += sum;
        self.window_count += count;
        Ok(())
    }

    /// Ends an optimizer step: measures the window, updates the coefficient for the next step and starts a new window.
    /// Returns the measured mean entropy. For a window without tokens it returns `None` and the coefficient does not change (TRL treats such
    /// a window as entropy 0).
    ///
    /// # Errors
    /// The errors of [`AdaptiveEntropy::validate`].
    pub fn step(&mut self) -> Result<Option<f64>> {
        self.validate()?;
        let (sum, count) = (std::mem::take(&mut self.window_sum), std::mem::take(&mut self.window_count));
        if count == 0.0 {
            return Ok(None);
        }
        let entropy = sum / count.max(1.0);
        self.entropy_coef = if entropy <= self.entropy_target {
            (self.entropy_coef + self.entropy_coef_delta).min(self.entropy_coef_max)
        } else {
            (self.entropy_coef - self.entropy_coef_delta).max(self.entropy_coef_min)
        };
        self.last_entropy = Some(entropy);
        Ok(Some(entropy))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adaptive_kl_changes_by_at_most_20_percent_and_fixed_kl_is_constant() {
        let read = |json: &str| serde_json::from_str::<KlController>(json).unwrap();
        let mut fixed = read(r#"{"type": "fixed", "kl_coef": 0.01}"#);
        fixed.update(1e9, 10).unwrap();
        assert_eq!(fixed.coef(), 0.01);
        let mut adaptive = read(r#"{"type": "adaptive", "kl_coef": 1.0, "target_kl": 0.5, "horizon": 100}"#);
        adaptive.update(5.0, 50).unwrap();
        assert_eq!(adaptive.coef(), 1.0 + 0.2 * 0.5);
        adaptive.update(-5.0, 50).unwrap();
        assert_eq!(adaptive.coef(), 1.1 * 0.9);
        let KlController::Adaptive(state) = read(&serde_json::to_string(&adaptive).unwrap()) else {
            panic!("another kind came back")
        };
        approx::assert_relative_eq!(state.kl_coef, adaptive.coef(), max_relative = 1e-15);
        assert_eq!((state.target_kl, state.horizon), (0.5, 100.0));
    }

    #[test]
    fn kl_controller_refuses_illegal_targets_and_measurements() {
        let refusal = |config: AdaptiveKl, kl, n| {
            let mut moved = config.clone();
            let message = moved.update(kl, n).unwrap_err().to_string();
            assert_eq!(moved, config);
            message
        };
        let plain = AdaptiveKl::default();
        assert!(refusal(plain.clone(), f64::NAN, 1).contains("NaN is not finite"));
        assert!(refusal(plain.clone(), 0.1, 50_000).contains("horizon above 10000"));
        assert!(refusal(AdaptiveKl { target_kl: 0.0, ..plain.clone() }, 0.1, 1).contains("target_kl"));
        assert!(refusal(AdaptiveKl { horizon: -1.0, ..plain }, 0.1, 1).contains("horizon"));
    }

    #[test]
    fn entropy_window_without_tokens_keeps_the_coefficient() {
        let mut controller = AdaptiveEntropy { entropy_coef: 0.5, ..AdaptiveEntropy::default() };
        let before = controller.clone();
        assert_eq!(controller.step().unwrap(), None);
        assert_eq!(controller, before);
        for (sum, count) in [(f64::NAN, 1.0), (1.0, -1.0)] {
            assert!(controller.observe(sum, count).is_err());
            assert_eq!(controller, before);
        }
        let wrong = AdaptiveEntropy { entropy_coef_min: 2.0, ..before };
        assert!(wrong.clone().step().unwrap_err().to_string().contains("entropy_coef_min (2)"));
    }
}
