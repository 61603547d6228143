//! Advantages from rewards, one number per completion or one per token.
//!
//! Rewards are in [`Groups`]: the completions of one prompt are contiguous, and group sizes may differ. A missing reward
//! ([`RewardList`]) is excluded from every statistic, and its row has advantage 0. All arithmetic is f64; results are f32.
//!
//! Legend: B completions, K reward functions, N tokens; r = reward of a completion, G = the rewards present in its
//! group, all = the rewards present in the batch.

mod config;
mod filter;
mod gae;
mod group;
mod groups;
mod inputs;
mod per_reward;
mod returns;
mod reward_list;
mod statistics;
mod token_baseline;

pub use config::{AdvantageConfig, AdvantageEstimator, GroupOfOne, ScaleRewards, Whitening};
pub use filter::{DynamicSampling, KeptGroups};
pub use groups::Groups;
pub use inputs::{AdvantageInputs, RewardValues};
pub use reward_list::RewardList;

use crate::batch::Advantages;
use crate::error::{Error, Result};
use inputs::Rows;

/// Advantages before whitening; NaN marks rows without a reward or without a comparison.
enum Raw {
    PerSequence(Vec<f64>),
    PerToken(Vec<f64>),
}

impl AdvantageConfig {
    /// Computes advantages `[B]` from `rewards: [B]` (`[B, K]` with `reward_weights`); a reward may be missing.
    ///
    /// If all rewards that an estimator compares are equal (in a group, or in the batch for global whitening), their
    /// advantages are exactly 0: the rewards are compared, not a rounded standard deviation. The advantage of a group of
    /// one is 0 too, except with [`GroupOfOne::Keep`].
    ///
    /// # Errors
    /// [`Error::Config`] for an illegal configuration or one that needs more inputs than rewards (see
    /// [`AdvantageConfig::compute`]), [`Error::Shape`] if the groups do not cover B completions, [`Error::Value`]
    /// for a reward that is not finite.
    pub fn advantages<'a>(
        &self,
        rewards: impl Into<RewardList<'a>>,
        groups: impl Into<Groups<'a>>,
    ) -> Result<Vec<f32>> {
        match self.compute(&AdvantageInputs::new(RewardValues::per_sequence(rewards), groups))? {
            Advantages::PerSequence(advantages) => Ok(advantages),
            Advantages::PerToken(_) => Err(Error::Config(format!(
                "advantages: {:?} gives one advantage per token: call `compute`",
                self.estimator
            ))),
        }
    }

    /// Computes advantages from all inputs: `[B]`, or `[N]` if they differ within a completion (0 at masked
    /// tokens). gae, the optimal token baselines, reinforce_plus_plus with `whiten: tokens`, and remax with rewards per token
    /// return `[N]`.
    ///
    /// # Errors
    /// [`Error::Config`] for an illegal configuration or a missing input; [`Error::Shape`] for wrong lengths; [`Error::Value`] for a
    /// reward, or a value, that is not finite at an active token.
    pub fn compute(&self, inputs: &AdvantageInputs<'_>) -> Result<Advantages> {
        self.validate()?;
        let rows = Rows::new(self, inputs)?;
        let raw = match self.estimator {
            AdvantageEstimator::Group
            | AdvantageEstimator::MeanOnly
            | AdvantageEstimator::ReinforcePlusPlusBaseline => Raw::PerSequence(group::centred(self, &rows)),
            AdvantageEstimator::MaxRl => Raw::PerSequence(group::over_mean(self, &rows)),
            AdvantageEstimator::FlashReinforce => Raw::PerSequence(group::centred_on_batch(self, &rows)),
            AdvantageEstimator::DapoMix => Raw::PerSequence(group::dapo_mix(self, &rows)),
            AdvantageEstimator::Rloo => Raw::PerSequence(group::leave_one_out(self, &rows)),
            AdvantageEstimator::Opo => Raw::PerSequence(group::length_weighted(self, &rows)?),
            AdvantageEstimator::Gpg => Raw::PerSequence(group::gpg(self, &rows)),
            AdvantageEstimator::GrpoPassk => Raw::PerSequence(group::pass_at_k(self, &rows)?),
            AdvantageEstimator::Gdpo => Raw::PerSequence(per_reward::gdpo(self, &rows)),
            AdvantageEstimator::ReinforcePlusPlus if self.whitening() == Whitening::Tokens => {
                Raw::PerToken(returns::discounted(&rows, self.gamma)?)
            }
            AdvantageEstimator::Reinforce | AdvantageEstimator::ReinforcePlusPlus => {
                Raw::PerSequence(rows.scores.clone())
            }
            AdvantageEstimator::Remax => returns::remax(&rows)?,
            AdvantageEstimator::Gae => Raw::PerToken(gae::advantages(&rows, self.gamma, self.lam)?),
            AdvantageEstimator::OptimalTokenBaseline | AdvantageEstimator::TirOptimalTokenBaseline => {
                Raw::PerToken(token_baseline::advantages(self, &rows)?)
            }
        };
        self.finish(raw, &rows)
    }

    /// Computes the targets `[N]` of the value function: GAE advantages before whitening + values, 0 at masked tokens and at
    /// completions without a reward. verl's `returns` of gae.
    ///
    /// # Errors
    /// The errors of [`AdvantageConfig::compute`]; [`Error::Config`] for any other estimator than gae.
    pub fn value_targets(&self, inputs: &AdvantageInputs<'_>) -> Result<Vec<f32>> {
        if self.estimator != AdvantageEstimator::Gae {
            return Err(Error::Config(format!("advantages: only gae has value targets, not {:?}", self.estimator)));
        }
        self.validate()?;
        let rows = Rows::new(self, inputs)?;
        let advantages = gae::advantages(&rows, self.gamma, self.lam)?;
        let values = rows.values()?;
        Ok(advantages.iter().zip(values).map(|(a, v)| or_zero(a + f64::from(*v))).collect())
    }

    fn finish(&self, mut raw: Raw, rows: &Rows<'_>) -> Result<Advantages> {
        match (self.whitening(), &mut raw) {
            (Whitening::None, _) => {}
            (Whitening::Sequences, Raw::PerSequence(values)) => {
                statistics::whiten(values, |_| 1.0, self.ddof, |std| std + self.eps);
            }
            (Whitening::Sequences, Raw::PerToken(_)) => {
                return Err(Error::Config(format!(
                    "advantages: whiten: sequences needs one advantage per completion, and {:?} gave one per token: \
                     use `tokens` or `none`",
                    self.estimator
                )));
            }
            (Whitening::Tokens, raw) => {
                let floor = |std: f64| (std * std + TOKEN_VARIANCE_FLOOR).sqrt();
                match raw {
                    Raw::PerToken(values) => statistics::whiten(values, |_| 1.0, self.ddof, floor),
                    Raw::PerSequence(values) => {
                        let lengths = rows.lengths()?;
                        statistics::whiten(values, |b| lengths[b], self.ddof, floor);
                    }
                }
            }
        }
        let bound = self.clip.unwrap_or(f64::INFINITY);
        let last = |values: Vec<f64>| values.into_iter().map(|a| or_zero(a.clamp(-bound, bound))).collect();
        Ok(match raw {
            Raw::PerSequence(values) => Advantages::PerSequence(last(values)),
            Raw::PerToken(values) => Advantages::PerToken(last(values)),
        })
    }
}

/// Added to the variance of tokens before the square root: verl's masked_whiten.
const TOKEN_VARIANCE_FLOOR: f64 = 1e-8;

/// Replaces NaN and -0 by 0.
fn or_zero(advantage: f64) -> f32 {
    if advantage.is_nan() { 0.0 } else { advantage as f32 + 0.0 }
}

#[cfg(test)]
mod tests;
