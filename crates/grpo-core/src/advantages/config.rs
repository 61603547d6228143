//! The configuration of advantages, and checks of its combinations.

use crate::error::{Error, Result};
use serde::de::{Deserializer, Unexpected, Visitor};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use std::fmt;

/// Estimators that turn rewards into advantages. r = reward, G = the rewards present in the group, all = the rewards present in the batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum AdvantageEstimator {
    /// (r - mean(G)) / (std + eps), with the std that `scale_rewards` selects. DeepSeekMath, arXiv 2402.03300; TRL's default;
    /// verl's `grpo` with eps 1e-6 and `group_of_one: keep`; MLLM-JAX's with ddof 0.
    #[default]
    #[serde(alias = "grpo")]
    Group,
    /// r - mean(G). Dr. GRPO, arXiv 2503.20783; TRL's `scale_rewards: none`; verl's `norm_adv_by_std_in_grpo: false`.
    MeanOnly,
    /// r - mean of the other rewards in G. RLOO, arXiv 2402.14740. TRL's `normalize_advantages` corresponds to `whiten: sequences`,
    /// MLLM-JAX's `reinforce++` to `whiten: sequences` with ddof 0.
    Rloo,
    /// Rewards whitened over the batch. REINFORCE++, arXiv 2501.03262. The default is over completions, which MLLM-JAX calls
    /// `reinforce`: (r - mean(all)) / (std(all) + eps). With `whiten: tokens` it is verl's: the return of each token,
    /// discounted by gamma, whitened over the tokens of the batch.
    ReinforcePlusPlus,
    /// r - mean(G), whitened over the tokens of the batch. REINFORCE++-baseline, arXiv 2501.03262, verl.
    ReinforcePlusPlusBaseline,
    /// r, without a baseline.
    Reinforce,
    /// r - sum(length r) / sum(length) over G, lengths in active tokens. OPO, arXiv 2505.23585, verl.
    Opo,
    /// r - reward of the greedy completion of the same prompt. If the rewards are per token, the return of each token replaces r.
    /// ReMax, arXiv 2310.10505, verl.
    Remax,
    /// (r - mean(G)) x number of rewards / number of rewards that are not 0. GPG, arXiv 2504.02546, verl.
    Gpg,
    /// The best completion of G gets its distance to the second best, divided by std(G) + eps unless `scale_rewards: none`; the
    /// other completions get 0. Pass@k, arXiv 2503.19595, verl.
    GrpoPassk,
    /// Each reward function alone: (r_k - mean(G_k)) / (std(G_k) + eps), summed with `reward_weights`, whitened
    /// over the batch. GDPO, arXiv 2601.05242. The default is over completions, TRL's `normalize_then_sum`;
    /// `whiten: tokens` is verl's.
    Gdpo,
    /// Generalised advantage estimation with `gamma` and `lam`, whitened over tokens. arXiv 1506.02438, verl.
    Gae,
    /// Return of a token - baseline of its position in the group, weighted by the cumulative squared norm of the scores.
    /// verl's `optimal_token_baseline`. Needs old log-probabilities and sums of squared probabilities. Equal
    /// rewards do not give zeros: a position that only one completion of the group reaches has baseline 0.
    OptimalTokenBaseline,
    /// As `optimal_token_baseline`, with positions counted in active tokens, so that tool output does not shift them.
    TirOptimalTokenBaseline,
    /// (r - mean(G)) / mean(G); 0 if mean(G) is not above 0. MaxRL, maximum likelihood reinforcement learning, arXiv 2602.02710;
    /// prime-rl's `max_rl`. For rewards of 0 and 1, n completions estimate the gradient of the paper's objective of order n,
    /// the sum of pass@k / k for k up to n; mean_only estimates the objective of order 1. `eps` is not used; the authors'
    /// code adds 1e-6 to the mean. In a group of one with `group_of_one: keep`, the advantage is the reward.
    #[serde(alias = "maxrl")]
    MaxRl,
    /// r - mean(all). FlashREINFORCE (2026), TRL's `experimental.flash_reinforce`, for one completion per prompt. Use it with the loss of the
    /// same name.
    FlashReinforce,
    /// (r - mean(G)) / (std(G) + eps) + global_weight (r - mean(all)) / (std(all) + eps). MLLM-JAX's `dapo`, with ddof
    /// set to 0.
    DapoMix,
}

/// The standard deviation that divides advantages; the mean is always the group's. TRL's `scale_rewards`, in files also its `true` (group)
/// and `false` (none).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ScaleRewards {
    /// std(G) + eps.
    Group,
    /// std(all) + eps. TRL, after arXiv 2508.08221.
    Batch,
    /// No division. verl's `norm_adv_by_std_in_grpo: false`.
    None,
}

impl<'de> Deserialize<'de> for ScaleRewards {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Choice;
        impl Visitor<'_> for Choice {
            type Value = ScaleRewards;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("one of group (true), batch, none (false)")
            }
            fn visit_bool<E: serde::de::Error>(self, is_scaled: bool) -> Result<ScaleRewards, E> {
                Ok(if is_scaled { ScaleRewards::Group } else { ScaleRewards::None })
            }
            fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<ScaleRewards, E> {
                match name {
                    "group" | "true" => Ok(ScaleRewards::Group),
                    "batch" => Ok(ScaleRewards::Batch),
                    "none" | "false" => Ok(ScaleRewards::None),
                    _ => Err(E::invalid_value(Unexpected::Str(name), &self)),
                }
            }
        }
        deserializer.deserialize_any(Choice)
    }
}

/// The set over which advantages are whitened, as the last step, to mean 0 and standard deviation 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Whitening {
    /// No whitening.
    None,
    /// (a - mean) / (std + eps) over completions. TRL, MLLM-JAX.
    Sequences,
    /// (a - mean) / sqrt(var + 1e-8) over active tokens. verl's masked_whiten.
    Tokens,
}

/// The advantage in a group with only one reward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum GroupOfOne {
    /// 0, because there is no reward to compare with. TRL, MLLM-JAX.
    #[default]
    Zero,
    /// The advantage in a group of mean 0 and standard deviation 1. verl.
    Keep,
}

/// Configuration of the advantages.
///
/// ```
/// use grpo_core::advantages::ScaleRewards;
/// use grpo_core::{AdvantageConfig, AdvantageEstimator};
///
/// // Two prompts with two completions each.
/// let rewards = [1.0, 0.0, 0.5, 0.5];
/// let dr_grpo = AdvantageConfig { scale_rewards: Some(ScaleRewards::None), ..AdvantageConfig::default() };
/// assert_eq!(dr_grpo.advantages(&rewards, 2)?, [0.5, -0.5, 0.0, 0.0]);
/// let rloo = AdvantageConfig { estimator: AdvantageEstimator::Rloo, ..dr_grpo };
/// assert_eq!(rloo.advantages(&rewards, 2)?, [1.0, -1.0, 0.0, 0.0]);
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdvantageConfig {
    /// The estimator.
    pub estimator: AdvantageEstimator,
    /// Divisor of `group` (default group), and of `grpo_passk` and `gdpo` (group or none, default group).
    pub scale_rewards: Option<ScaleRewards>,
    /// Weights of K reward functions, whose rewards are `[B, K]`; empty means one function with weight 1. The reward of a
    /// completion is the weighted sum of the rewards that are present (TRL).
    pub reward_weights: Vec<f64>,
    /// Delta degrees of freedom of the standard deviation: 1 (TRL, verl) or 0 (MLLM-JAX).
    #[default(1)]
    pub ddof: u8,
    /// Added to the standard deviation. TRL, MLLM-JAX: 1e-4; verl: 1e-6.
    #[default(1e-4)]
    pub eps: f64,
    /// The advantage in a group with only one reward.
    pub group_of_one: GroupOfOne,
    /// Whitening of the result; `None` selects the estimator's default, see [`AdvantageConfig::whitening`].
    pub whiten: Option<Whitening>,
    /// Discount per active token, for gae and for reinforce_plus_plus over tokens. verl: 1.
    #[default(1.0)]
    pub gamma: f64,
    /// Lambda of gae. verl: 1; MLLM-JAX: 0.95.
    #[default(1.0)]
    pub lam: f64,
    /// Weight of the batch term in dapo_mix. MLLM-JAX: 0.2.
    #[default(0.2)]
    pub global_weight: f64,
    /// Clamps the result, after whitening, to plus or minus this value. `None` turns it off.
    pub clip: Option<f64>,
}

impl AdvantageConfig {
    /// Returns the whitening: `whiten`, or by default sequences for reinforce_plus_plus and gdpo, tokens
    /// for reinforce_plus_plus_baseline and gae, none for all other estimators.
    pub fn whitening(&self) -> Whitening {
        self.whiten.unwrap_or(match self.estimator {
            AdvantageEstimator::ReinforcePlusPlus | AdvantageEstimator::Gdpo => Whitening::Sequences,
            AdvantageEstimator::ReinforcePlusPlusBaseline | AdvantageEstimator::Gae => Whitening::Tokens,
            _ => Whitening::None,
        })
    }

    /// Returns `true` if the estimator compares the completions of one prompt, so that groups need more than one.
    pub fn compares_within_groups(&self) -> bool {
        use AdvantageEstimator as E;
        !matches!(self.estimator, E::Reinforce | E::ReinforcePlusPlus | E::FlashReinforce | E::Remax | E::Gae)
    }

    /// Returns the inputs that the estimator needs in addition to one reward per completion ([`super::AdvantageInputs`]); `None` if it
    /// needs none.
    pub fn needs(&self) -> Option<&'static str> {
        use AdvantageEstimator as E;
        match self.estimator {
            E::Remax => Some("rewards of greedy completions"),
            E::Gae => Some("the tokens of the completions and their values"),
            E::OptimalTokenBaseline | E::TirOptimalTokenBaseline => {
                Some("the tokens of the completions, their old log-probabilities and sums of squared probabilities")
            }
            _ if self.reward_functions() > 1 => Some("the rewards of every function"),
            E::Opo => Some("the tokens of the completions"),
            _ if self.whitening() == Whitening::Tokens => Some("the tokens of the completions"),
            _ => None,
        }
    }

    /// Returns the number of reward functions K.
    pub fn reward_functions(&self) -> usize {
        self.reward_weights.len().max(1)
    }

    /// Returns the weight of a reward function.
    pub(super) fn reward_weight(&self, function: usize) -> f64 {
        self.reward_weights.get(function).copied().unwrap_or(1.0)
    }

    /// Returns the divisor, with the estimator's default resolved.
    pub(super) fn scale(&self) -> ScaleRewards {
        use AdvantageEstimator as E;
        self.scale_rewards.unwrap_or(match self.estimator {
            E::Group | E::GrpoPassk | E::Gdpo => ScaleRewards::Group,
            _ => ScaleRewards::None,
        })
    }

    /// Checks every field and every combination.
    ///
    /// # Errors
    /// [`Error::Key`] with the key and the reason.
    pub fn validate(&self) -> Result<()> {
        use AdvantageEstimator as E;
        let fail = |key: &str, message: String| Err(Error::of_key(key, format!("advantages: {message}")));
        if self.ddof > 1 {
            return fail("ddof", format!("ddof must be 0 or 1, got {}", self.ddof));
        }
        if !(self.eps >= 0.0 && self.eps.is_finite()) {
            return fail("eps", format!("eps must be finite and not negative, got {}", self.eps));
        }
        for (name, value) in [("gamma", self.gamma), ("lam", self.lam)] {
            if !(0.0..=1.0).contains(&value) {
                return fail(name, format!("{name} must lie in [0, 1], got {value}"));
            }
        }
        if !(self.global_weight >= 0.0 && self.global_weight.is_finite()) {
            return fail(
                "global_weight",
                format!("global_weight must be finite and not negative, got {}", self.global_weight),
            );
        }
        if let Some(clip) = self.clip.filter(|c| !(*c > 0.0 && c.is_finite())) {
            return fail("clip", format!("clip must be finite and above 0, got {clip}"));
        }
        if let Some(weight) = self.reward_weights.iter().find(|w| !w.is_finite()) {
            return fail("reward_weights", format!("reward_weights must be finite, got {weight}"));
        }
        let legal_scale = match (self.estimator, self.scale_rewards) {
            (_, None) | (E::Group, _) => true,
            (E::GrpoPassk | E::Gdpo, Some(scale)) => scale != ScaleRewards::Batch,
            (_, Some(scale)) => scale == ScaleRewards::None,
        };
        if !legal_scale {
            return fail(
                "scale_rewards",
                format!(
                    "{:?} has no divisor for scale_rewards: {:?}: leave it out, or use estimator group",
                    self.estimator, self.scale_rewards
                ),
            );
        }
        let discounts = self.estimator == E::Gae
            || (self.estimator == E::ReinforcePlusPlus && self.whitening() == Whitening::Tokens);
        let idle = [
            ("gamma", self.gamma != 1.0 && !discounts, "gae, or reinforce_plus_plus with whiten: tokens"),
            ("lam", self.lam != 1.0 && self.estimator != E::Gae, "gae"),
            ("global_weight", self.global_weight != 0.2 && self.estimator != E::DapoMix, "dapo_mix"),
        ];
        if let Some((name, _, owner)) = idle.into_iter().find(|(_, idle, _)| *idle) {
            return fail(name, format!("{name} is used by {owner} only, not by {:?}: leave it out", self.estimator));
        }
        if self.estimator == E::ReinforcePlusPlus && self.whitening() == Whitening::None {
            return fail("whiten", "reinforce_plus_plus without whitening: use estimator reinforce".into());
        }
        Ok(())
    }
}
