//! What can be configured about advantages, and which settings go together.

use crate::error::{Error, Result};
use serde::de::{Deserializer, Unexpected, Visitor};
use serde::{Deserialize, Serialize};
use std::fmt;

/// How rewards become advantages. r = reward, G = the rewards present in the group, all = those of the batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageEstimator {
    /// (r - mean(G)) / (std + eps), std of what `scale_rewards` says. DeepSeekMath, arXiv 2402.03300; TRL's default;
    /// verl's `grpo` with eps 1e-6 and `group_of_one: keep`; MLLM-JAX's with ddof 0.
    #[default]
    #[serde(alias = "grpo")]
    Group,
    /// r - mean(G). Dr. GRPO, arXiv 2503.20783; TRL's `scale_rewards: none`; verl's `norm_adv_by_std_in_grpo: false`.
    MeanOnly,
    /// r - mean of the others in G. RLOO, arXiv 2402.14740. TRL's `normalize_advantages` is `whiten: sequences`, and so
    /// is MLLM-JAX's `reinforce++` with ddof 0.
    Rloo,
    /// Whitened over the batch. REINFORCE++, arXiv 2501.03262. By default over completions, which MLLM-JAX calls
    /// `reinforce`: (r - mean(all)) / (std(all) + eps). With `whiten: tokens` it is verl's: the return of each token,
    /// discounted by gamma, whitened over the tokens of the batch.
    ReinforcePlusPlus,
    /// r - mean(G), whitened over the tokens of the batch. REINFORCE++-baseline, arXiv 2501.03262, verl.
    ReinforcePlusPlusBaseline,
    /// r itself, without a baseline.
    Reinforce,
    /// r - sum(length r) / sum(length) over G, lengths in active tokens. OPO, arXiv 2505.23585, verl.
    Opo,
    /// r - reward of the greedy completion of the same prompt; where tokens have rewards of their own, the return of
    /// each takes the place of r. ReMax, arXiv 2310.10505, verl.
    Remax,
    /// (r - mean(G)) x number of rewards / number of rewards that are not 0. GPG, arXiv 2504.02546, verl.
    Gpg,
    /// The best of G gets its distance to the second best, divided by std(G) + eps unless `scale_rewards: none`; the
    /// others get 0. Pass@k, arXiv 2503.19595, verl.
    GrpoPassk,
    /// Each reward function on its own: (r_k - mean(G_k)) / (std(G_k) + eps), summed with `reward_weights`, whitened
    /// over the batch. GDPO, arXiv 2601.05242. By default over completions, TRL's `normalize_then_sum`; with
    /// `whiten: tokens` verl's.
    Gdpo,
    /// Generalised advantage estimation with `gamma` and `lam`, whitened over tokens. arXiv 1506.02438, verl.
    Gae,
    /// Return of a token - baseline of its position in the group, weighted by the summed squared norm of the scores so
    /// far. verl's `optimal_token_baseline`. Needs old log-probabilities and sums of squared probabilities. Equal
    /// rewards do not give zeros here: beyond its second longest completion a group has no baseline.
    OptimalTokenBaseline,
    /// As `optimal_token_baseline`, with positions counted in active tokens, so that tool output shifts nothing.
    TirOptimalTokenBaseline,
    /// (r - mean(G)) / mean(G); 0 where mean(G) is not above 0. MaxRL, maximum likelihood reinforcement learning, arXiv 2602.02710;
    /// prime-rl's `max_rl`. For rewards of 0 and 1, n completions estimate the gradient of the paper's objective of order n,
    /// the sum of pass@k / k for k up to n; mean_only estimates the objective of order 1. `eps` is not used; the authors'
    /// code adds 1e-6 to the mean. In a group of one kept reward, the advantage is that reward.
    #[serde(alias = "maxrl")]
    MaxRl,
    /// r - mean(all). FlashREINFORCE (2026), TRL's `experimental.flash_reinforce`, for one completion per prompt; the loss of that
    /// name belongs to it.
    FlashReinforce,
    /// (r - mean(G)) / (std(G) + eps) + global_weight (r - mean(all)) / (std(all) + eps). MLLM-JAX's `dapo`, with ddof
    /// set to 0.
    DapoMix,
}

/// Whose standard deviation divides; the mean is always the group's. TRL's `scale_rewards`, in files also its `true` (group) and `false`
/// (none).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleRewards {
    /// std(G) + eps.
    Group,
    /// std(all) + eps. TRL, after arXiv 2508.08221.
    Batch,
    /// Nothing. verl's `norm_adv_by_std_in_grpo: false`.
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

/// What advantages are whitened over, last of all: mean 0 and standard deviation 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Whitening {
    /// Advantages are not whitened.
    None,
    /// (a - mean) / (std + eps) over completions. TRL, MLLM-JAX.
    Sequences,
    /// (a - mean) / sqrt(var + 1e-8) over active tokens. verl's masked_whiten.
    Tokens,
}

/// The advantage where only one reward of a group is present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupOfOne {
    /// 0: there is nothing to compare with. TRL, MLLM-JAX.
    #[default]
    Zero,
    /// That of a group of mean 0 and standard deviation 1. verl.
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdvantageConfig {
    /// The estimator.
    pub estimator: AdvantageEstimator,
    /// Divisor of `group` (default group), `grpo_passk` and `gdpo` (group or none, default group).
    pub scale_rewards: Option<ScaleRewards>,
    /// Weights of K reward functions, whose rewards then come as `[B, K]`; empty is one function of weight 1. A
    /// completion's reward is the weighted sum of those that are present (TRL).
    pub reward_weights: Vec<f64>,
    /// Delta degrees of freedom of the standard deviation: 1 (TRL, verl) or 0 (MLLM-JAX).
    pub ddof: u8,
    /// Added to the standard deviation. TRL, MLLM-JAX: 1e-4; verl: 1e-6.
    pub eps: f64,
    /// The advantage where a group has only one reward.
    pub group_of_one: GroupOfOne,
    /// Whitening of the result; `None` is what the estimator is defined with, see [`AdvantageConfig::whitening`].
    pub whiten: Option<Whitening>,
    /// Discount per active token, for gae and for reinforce_plus_plus over tokens. verl: 1.
    pub gamma: f64,
    /// Lambda of gae. verl: 1; MLLM-JAX: 0.95.
    pub lam: f64,
    /// Weight of the batch's part in dapo_mix. MLLM-JAX: 0.2.
    pub global_weight: f64,
    /// Holds the result, after whitening, within this distance of 0. `None` is off.
    pub clip: Option<f64>,
}

impl Default for AdvantageConfig {
    fn default() -> Self {
        Self {
            estimator: AdvantageEstimator::Group,
            scale_rewards: None,
            reward_weights: Vec::new(),
            ddof: 1,
            eps: 1e-4,
            group_of_one: GroupOfOne::Zero,
            whiten: None,
            gamma: 1.0,
            lam: 1.0,
            global_weight: 0.2,
            clip: None,
        }
    }
}

impl AdvantageConfig {
    /// What the result is whitened over: `whiten`, or by default completions for reinforce_plus_plus and gdpo, tokens
    /// for reinforce_plus_plus_baseline and gae, nothing for the others.
    pub fn whitening(&self) -> Whitening {
        self.whiten.unwrap_or(match self.estimator {
            AdvantageEstimator::ReinforcePlusPlus | AdvantageEstimator::Gdpo => Whitening::Sequences,
            AdvantageEstimator::ReinforcePlusPlusBaseline | AdvantageEstimator::Gae => Whitening::Tokens,
            _ => Whitening::None,
        })
    }

    /// Whether the estimator compares the completions of one prompt, so that groups must have more than one.
    pub fn compares_within_groups(&self) -> bool {
        use AdvantageEstimator as E;
        !matches!(self.estimator, E::Reinforce | E::ReinforcePlusPlus | E::FlashReinforce | E::Remax | E::Gae)
    }

    /// What must be there beside one reward per completion ([`super::AdvantageInputs`]); `None` where that is enough.
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

    /// Number of reward functions K.
    pub fn reward_functions(&self) -> usize {
        self.reward_weights.len().max(1)
    }

    /// Weight of one reward function.
    pub(super) fn reward_weight(&self, function: usize) -> f64 {
        self.reward_weights.get(function).copied().unwrap_or(1.0)
    }

    /// The divisor, with the estimator's default resolved.
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
    /// [`Error::Config`] that names the fields and says why.
    pub fn validate(&self) -> Result<()> {
        use AdvantageEstimator as E;
        let fail = |message: String| Err(Error::Config(format!("advantages: {message}")));
        if self.ddof > 1 {
            return fail(format!("ddof must be 0 or 1, got {}", self.ddof));
        }
        if !(self.eps >= 0.0 && self.eps.is_finite()) {
            return fail(format!("eps must be finite and not negative, got {}", self.eps));
        }
        for (name, value) in [("gamma", self.gamma), ("lam", self.lam)] {
            if !(0.0..=1.0).contains(&value) {
                return fail(format!("{name} must lie in [0, 1], got {value}"));
            }
        }
        if !(self.global_weight >= 0.0 && self.global_weight.is_finite()) {
            return fail(format!("global_weight must be finite and not negative, got {}", self.global_weight));
        }
        if let Some(clip) = self.clip.filter(|c| !(*c > 0.0 && c.is_finite())) {
            return fail(format!("clip must be finite and above 0, got {clip}"));
        }
        if let Some(weight) = self.reward_weights.iter().find(|w| !w.is_finite()) {
            return fail(format!("reward_weights must be finite, got {weight}"));
        }
        let legal_scale = match (self.estimator, self.scale_rewards) {
            (_, None) | (E::Group, _) => true,
            (E::GrpoPassk | E::Gdpo, Some(scale)) => scale != ScaleRewards::Batch,
            (_, Some(scale)) => scale == ScaleRewards::None,
        };
        if !legal_scale {
            return fail(format!(
                "{:?} does not divide by what scale_rewards: {:?} says: leave it out, or use estimator group",
                self.estimator, self.scale_rewards
            ));
        }
        let discounts = self.estimator == E::Gae
            || (self.estimator == E::ReinforcePlusPlus && self.whitening() == Whitening::Tokens);
        let idle = [
            ("gamma", self.gamma != 1.0 && !discounts, "gae, or reinforce_plus_plus with whiten: tokens"),
            ("lam", self.lam != 1.0 && self.estimator != E::Gae, "gae"),
            ("global_weight", self.global_weight != 0.2 && self.estimator != E::DapoMix, "dapo_mix"),
        ];
        if let Some((name, _, owner)) = idle.into_iter().find(|(_, idle, _)| *idle) {
            return fail(format!("{name} is used by {owner} only, not by {:?}: leave it out", self.estimator));
        }
        if self.estimator == E::ReinforcePlusPlus && self.whitening() == Whitening::None {
            return fail("reinforce_plus_plus is its whitening: without it, use estimator reinforce".into());
        }
        Ok(())
    }
}
