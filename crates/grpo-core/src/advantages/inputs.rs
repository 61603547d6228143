//! Inputs of advantage estimators, and their checks.

use super::config::AdvantageConfig;
use super::groups::Groups;
use super::reward_list::RewardList;
use crate::batch::TokenBatch;
use crate::error::{Error, Result};

const OP: &str = "advantages";

/// The rewards; each may be missing.
///
/// ```
/// use grpo_core::advantages::{AdvantageInputs, RewardValues};
/// use grpo_core::{AdvantageConfig, Advantages};
///
/// let inputs = AdvantageInputs::new(RewardValues::per_sequence(&[Some(1.0), None, Some(0.0)]), 3);
/// let Advantages::PerSequence(advantages) = AdvantageConfig::default().compute(&inputs)? else { unreachable!() };
/// assert!(advantages[0] > 0.0 && advantages[1] == 0.0 && advantages[2] < 0.0);
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RewardValues<'a> {
    /// `[B]`, or `[B, K]` row by row with K `reward_weights`. Estimators per token assign the reward to the
    /// completion's last active token.
    PerSequence(RewardList<'a>),
    /// `[N]`: a reward per token, as [`crate::rewards::kl_in_reward`] computes it. The reward of a completion is
    /// the sum over its active tokens; it is missing if one of them is missing or if there are no active tokens.
    PerToken(RewardList<'a>),
}

impl<'a> RewardValues<'a> {
    /// Creates rewards of completions, [`RewardValues::PerSequence`].
    pub fn per_sequence(rewards: impl Into<RewardList<'a>>) -> Self {
        Self::PerSequence(rewards.into())
    }

    /// Creates rewards of tokens, [`RewardValues::PerToken`].
    pub fn per_token(rewards: impl Into<RewardList<'a>>) -> Self {
        Self::PerToken(rewards.into())
    }
}

/// Rewards in groups, and the additional inputs of some estimators.
#[derive(Clone, Copy, Debug)]
pub struct AdvantageInputs<'a> {
    /// The rewards.
    pub rewards: RewardValues<'a>,
    /// Groups of completions of the same prompt.
    pub groups: Groups<'a>,
    /// The tokens of the completions, for estimators that count tokens.
    pub batch: Option<&'a TokenBatch>,
    /// Rewards of the greedy completion of each row's prompt `[B]`, for remax.
    pub greedy_rewards: Option<RewardList<'a>>,
    /// Value of the state before each token `[N]`, for gae.
    pub values: Option<&'a [f32]>,
    /// Sum over the vocabulary of squared probabilities `[N]`, for the optimal token baselines.
    pub sum_pi_squared: Option<&'a [f32]>,
    /// Weights of the sampler correction `[N]`, for the optimal token baselines; optional.
    pub rollout_is_weights: Option<&'a [f32]>,
}

impl<'a> AdvantageInputs<'a> {
    /// Creates inputs with rewards and groups only. A number is the size of every group, a slice holds the offsets of groups of any
    /// size.
    ///
    /// ```
    /// use grpo_core::advantages::{AdvantageConfig, AdvantageInputs, RewardValues};
    ///
    /// let rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0];
    /// let offsets = [0, 3, 6, 7]; // three, three and one completion
    /// let inputs = AdvantageInputs::new(RewardValues::per_sequence(&rewards), &offsets[..]);
    /// let advantages = AdvantageConfig::default().compute(&inputs)?;
    /// # let _ = advantages;
    /// # Ok::<(), grpo_core::Error>(())
    /// ```
    pub fn new(rewards: RewardValues<'a>, groups: impl Into<Groups<'a>>) -> Self {
        Self {
            rewards,
            groups: groups.into(),
            batch: None,
            greedy_rewards: None,
            values: None,
            sum_pi_squared: None,
            rollout_is_weights: None,
        }
    }
}

/// Inputs with checked lengths, and the reward of every completion.
pub(super) struct Rows<'a> {
    inputs: &'a AdvantageInputs<'a>,
    /// The rewards of the inputs; NaN marks a missing one.
    rewards: Vec<f64>,
    /// Rewards of completions `[B]`; NaN marks a missing one.
    pub(super) scores: Vec<f64>,
    /// `[P + 1]`: the start of each group, and B.
    pub(super) groups: Vec<usize>,
}

impl<'a> Rows<'a> {
    pub(super) fn new(config: &AdvantageConfig, inputs: &'a AdvantageInputs<'a>) -> Result<Self> {
        let (rewards, scores) = match inputs.rewards {
            RewardValues::PerSequence(rewards) => sequence_scores(config, rewards)?,
            RewardValues::PerToken(rewards) => token_scores(config, rewards, inputs.batch)?,
        };
        let groups = inputs.groups.offsets(OP, scores.len())?;
        if let Some(batch) = inputs.batch
            && batch.sequences() != scores.len()
        {
            return Err(Error::shape(OP, "rewards", format!("{} sequences", batch.sequences()), scores.len()));
        }
        Ok(Self { inputs, rewards, scores, groups })
    }

    /// Returns the rewards of one function `[B]`.
    pub(super) fn rewards_of(&self, config: &AdvantageConfig, function: usize) -> Vec<f64> {
        match self.inputs.rewards {
            RewardValues::PerToken(_) => self.scores.clone(),
            RewardValues::PerSequence(_) => {
                self.rewards.iter().skip(function).step_by(config.reward_functions()).copied().collect()
            }
        }
    }

    /// Returns the reward of each token `[N]`; valid at active tokens of completions that have a reward.
    pub(super) fn token_rewards(&self) -> Result<Vec<f64>> {
        let batch = self.batch()?;
        let mut earned = vec![0.0; batch.tokens()];
        match self.inputs.rewards {
            RewardValues::PerToken(_) => earned.copy_from_slice(&self.rewards),
            RewardValues::PerSequence(_) => {
                for (b, score) in self.scores.iter().enumerate() {
                    if let Some(last) = batch.range(b).rev().find(|i| batch.is_active(*i)) {
                        earned[last] = *score;
                    }
                }
            }
        }
        Ok(earned)
    }

    pub(super) fn per_token(&self) -> bool {
        matches!(self.inputs.rewards, RewardValues::PerToken(_))
    }

    pub(super) fn batch(&self) -> Result<&'a TokenBatch> {
        self.inputs.batch.ok_or_else(|| missing("the tokens", "batch"))
    }

    /// Returns the number of active tokens of every completion `[B]`.
    pub(super) fn lengths(&self) -> Result<Vec<f64>> {
        let batch = self.batch()?;
        Ok((0..batch.sequences()).map(|b| batch.active_in(b) as f64).collect())
    }

    /// Returns the rewards of greedy completions `[B]`; NaN marks a missing one.
    pub(super) fn greedy_rewards(&self) -> Result<Vec<f64>> {
        let greedy =
            self.inputs.greedy_rewards.ok_or_else(|| missing("rewards of greedy completions", "greedy_rewards"))?;
        if greedy.len() != self.scores.len() {
            return Err(Error::shape(OP, "greedy_rewards [B]", self.scores.len(), greedy.len()));
        }
        greedy.of_completions("greedy_rewards")
    }

    pub(super) fn values(&self) -> Result<&'a [f32]> {
        self.finite("values", self.inputs.values.ok_or_else(|| missing("values of tokens", "values"))?)
    }

    pub(super) fn old_logp(&self) -> Result<&'a [f32]> {
        self.batch()?.old_logp().ok_or_else(|| missing("the batch's old log-probabilities", "batch.old_logp"))
    }

    pub(super) fn sum_pi_squared(&self) -> Result<&'a [f32]> {
        let sums =
            self.inputs.sum_pi_squared.ok_or_else(|| missing("sums of squared probabilities", "sum_pi_squared"))?;
        self.finite("sum_pi_squared", sums)
    }

    pub(super) fn rollout_is_weights(&self) -> Result<Option<&'a [f32]>> {
        self.inputs.rollout_is_weights.map(|weights| self.finite("rollout_is_weights", weights)).transpose()
    }

    fn finite(&self, name: &str, values: &'a [f32]) -> Result<&'a [f32]> {
        let batch = self.batch()?;
        if values.len() != batch.tokens() {
            return Err(Error::shape(OP, format!("{name} [N]"), batch.tokens(), values.len()));
        }
        match (0..values.len()).find(|i| batch.is_active(*i) && !values[*i].is_finite()) {
            None => Ok(values),
            Some(i) => Err(Error::value(name, format!("token {i}"), format!("{} is not finite", values[i]))),
        }
    }
}

fn missing(what: &str, field: &str) -> Error {
    Error::Config(format!("advantages: this estimator or its whitening needs {what}: set `{field}` of the inputs"))
}

/// Returns the rewards, and the weighted sums of the rewards that are present; NaN if none is.
fn sequence_scores(config: &AdvantageConfig, rewards: RewardList<'_>) -> Result<(Vec<f64>, Vec<f64>)> {
    let functions = config.reward_functions();
    if !rewards.len().is_multiple_of(functions) {
        let expected = format!("a multiple of the {functions} reward_weights");
        return Err(Error::shape(OP, "rewards [B, K]", expected, rewards.len()));
    }
    let position = |i: usize| match functions {
        1 => format!("completion {i}"),
        _ => format!("completion {}, reward function {}", i / functions, i % functions),
    };
    let rewards = rewards.values("rewards", |_| true, position)?;
    let weighted = |(k, r): (usize, &f64)| config.reward_weight(k) * r;
    let score = |row: &[f64]| match row.iter().all(|r| r.is_nan()) {
        true => f64::NAN,
        false => row.iter().enumerate().filter(|(_, r)| !r.is_nan()).map(weighted).sum(),
    };
    let scores = rewards.chunks(functions).map(score).collect();
    Ok((rewards, scores))
}

/// Returns the rewards of tokens, 0 at masked ones, and their sums over active tokens; NaN if there are none.
fn token_scores(
    config: &AdvantageConfig,
    rewards: RewardList<'_>,
    batch: Option<&TokenBatch>,
) -> Result<(Vec<f64>, Vec<f64>)> {
    if !config.reward_weights.is_empty() {
        return Err(Error::Config(
            "advantages: reward_weights weigh rewards of completions; rewards of tokens are already one sum".into(),
        ));
    }
    let batch = batch.ok_or_else(|| missing("the tokens of rewards of tokens", "batch"))?;
    if rewards.len() != batch.tokens() {
        return Err(Error::shape(OP, "rewards [N]", batch.tokens(), rewards.len()));
    }
    let rewards = rewards.values("rewards", |i| batch.is_active(i), |i| format!("token {i}"))?;
    let score = |b: usize| match batch.active_in(b) {
        0 => f64::NAN,
        _ => batch.range(b).filter(|i| batch.is_active(*i)).map(|i| rewards[i]).sum(),
    };
    let scores = (0..batch.sequences()).map(score).collect();
    Ok((rewards, scores))
}
