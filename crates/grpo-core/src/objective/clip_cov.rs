//! # clip_cov
//!
//! The clipped ratio, without the gradient of some tokens whose advantage and log-probability have a large covariance. These tokens
//! drive the entropy down.
//!
//! **When to use it.** If entropy collapses early. The covariance bounds are absolute and suit advantages of size 1. Otherwise an
//! entropy bonus or `top_entropy_quantile` is easier to set up.
//!
//! **Source.** arXiv 2505.22617. verl's `loss_mode: clip_cov`. Preset: `configs/loss/verl-clip-cov.yaml`. verl draws at random;
//! here the draw is a hash of each token's position, token id and old log-probability, so the same batch gives the same loss.
//! verl's means divide by N + 1e-8.
//!
//! ## Formula
//!
//! ```text
//! P_t = -min( r_t A,  clip(r_t, 1 - epsilon_low, 1 + epsilon_high) A )
//! cov_t = (A_t - mean A)(l_t - mean l)                means over active tokens
//! eligible: not clipped, and clip_cov_lb < cov_t < clip_cov_ub
//! max(1, floor(clip_cov_ratio N)) of the eligible tokens are drawn: P_t = 0
//!
//! dP_t/dl_t = -A r_t   where the token is neither clipped nor drawn, else 0
//! ```
//!
//! Drawn tokens still count in the denominators and keep their KL and entropy terms.
//!
//! ## Knobs
//!
//! * `clip_cov_ratio`: share of active tokens that may be drawn.
//! * `clip_cov_lb`, `clip_cov_ub`: bounds of the covariance.
//! * `epsilon_low`, `epsilon_high`: bounds of the ratio. The dual clip is off unless `clip_ratio_c` is set.
//! * The selection needs all tokens of the step: [`LossConfig::prepare`](crate::LossConfig::prepare), one more forward pass.
//!
//! ```yaml
//! semantics: verl
//! loss_type: clip_cov
//! clip_cov_ratio: 0.0002
//! clip_cov_lb: 1.0
//! clip_cov_ub: 5.0
//! ```

use super::covariance::{covariances, share_of};
use super::loss::{Loss, LossTraits};
use super::{TokenTerms, token_loss};
use crate::batch::TokenBatch;
use crate::batch::{PolicyValues, TokenFactors};
use crate::config::LossConfig;
use crate::config::checks::{finite, positive};
use crate::error::Result;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The loss `clip_cov`.
#[derive(Clone, Copy, Debug)]
pub struct ClipCov;

/// Keys of this loss.
///
/// ```
/// use grpo_core::LossConfig;
///
/// let mut config = LossConfig::clip_cov();
/// config.parameters.clip_cov.ratio = 0.001;
/// config.validate()?;
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Parameters {
    /// `clip_cov_ratio`: share of tokens that may lose their gradient. Above 0.
    #[serde(rename = "clip_cov_ratio")]
    #[default(2e-4)]
    pub ratio: f64,
    /// `clip_cov_lb`: lower bound of their covariance.
    #[serde(rename = "clip_cov_lb")]
    #[default(1.0)]
    pub lower: f64,
    /// `clip_cov_ub`: upper bound of their covariance.
    #[serde(rename = "clip_cov_ub")]
    #[default(5.0)]
    pub upper: f64,
}

impl Parameters {
    pub(super) fn check(&self) -> Result<()> {
        finite("clip_cov_lb", self.lower)?;
        finite("clip_cov_ub", self.upper)?;
        positive("clip_cov_ratio", self.ratio)
    }
}

impl Loss for ClipCov {
    const TRAITS: LossTraits = LossTraits { is_of_tokens_only: true, chooses_tokens: true, ..LossTraits::PPO };

    /// Removes the gradient from some unclipped tokens whose covariance lies between the bounds. verl draws them at random; here the draw is a
    /// hash of the token, so the same batch gives the same loss.
    fn choose(&self, config: &LossConfig, batch: &TokenBatch, policy: &PolicyValues, factors: &mut TokenFactors) {
        let Parameters { ratio, lower, upper } = config.parameters.clip_cov;
        let covariances = covariances(batch, policy);
        let mut eligible = Vec::new();
        let mut position = 0;
        for sequence in 0..batch.sequences() {
            for row in batch.range(sequence).filter(|row| batch.is_active(*row)) {
                let covariance = covariances[position];
                position += 1;
                if !is_clipped(config, batch, policy, sequence, row) && covariance > lower && covariance < upper {
                    eligible.push((row - batch.range(sequence).start, row));
                }
            }
        }
        // Sorting by a hash draws without replacement. The hash uses the token and not its row, so it does not depend on the batch's layout.
        eligible.sort_by_key(|(place, row)| {
            let old = batch.old_logp().map_or(0, |old| u64::from(old[*row].to_bits()));
            mix(mix(*place as u64 ^ old.rotate_left(32)) ^ batch.targets()[*row] as u64)
        });
        let chosen = eligible.into_iter().take(share_of(batch.active_tokens(), ratio));
        chosen.for_each(|(_, row)| factors.policy[row] = 0.0);
    }
}

/// Returns `true` if the clip binds at a token.
fn is_clipped(config: &LossConfig, batch: &TokenBatch, policy: &PolicyValues, sequence: usize, row: usize) -> bool {
    let logp = policy.logp[row];
    let terms = TokenTerms {
        logp,
        old_logp: batch.old_logp().map_or(logp, |old| old[row].into()),
        shared: None,
        ref_logp: None,
        sampler_logp: None,
        advantage: f64::from(batch.advantage(sequence, row)),
        factor: 1.0,
        kl_cov_mask: 0.0,
    };
    let policy = token_loss(config, &terms).policy;
    policy.low_clipped + policy.high_clipped > 0.0
}

/// splitmix64.
fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
