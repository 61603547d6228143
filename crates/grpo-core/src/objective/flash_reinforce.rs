//! # flash_reinforce
//!
//! Policy gradient with the ratio to the sampler as a detached weight, without the sequences on which the policy has moved too far.
//!
//! **When to use it.** Asynchronous training with one completion per prompt, such as agents with long episodes. For groups of
//! completions [grpo](super::grpo) has the better baseline.
//!
//! **Source.** FlashREINFORCE (Hu et al., September 2026): one completion per prompt, sampled asynchronously. Implementations are
//! the paper's reference (github.com/yifanzhang-pro/FlashREINFORCE) and TRL's `experimental.flash_reinforce`, whose `delta` is
//! `sequence_kl_threshold`. OpenRLHF and NeMo's labs-molt combine it from their options. Averaged over the tokens of a sequence,
//! then over all sequences, also under verl's semantics. Preset: `configs/loss/flash-reinforce.yaml`. The paper's optional
//! selection of tokens by entropy in failed completions is not implemented, as in TRL.
//!
//! ## Formula
//!
//! ```text
//! P_t = -w_t A l_t        w_t = exp(l_t - s_t) where D <= sequence_kl_threshold, else 0; detached
//! D   = mean over the tokens of the sequence of  p ln(p / q) + (1 - p) ln((1 - p) / (1 - q))
//! p   = e^s_t,  q = e^l_t, both clamped to [1e-6, 1 - 1e-6]
//!
//! dP_t/dl_t = -w_t A
//! ```
//!
//! s is the sampler's log-probability (`sampler_logp`). If it is missing or NaN, s is `old_logp`; without `old_logp` s is l, and
//! w_t is 1.
//!
//! A rejected sequence still counts in the denominators and keeps its KL and entropy terms.
//!
//! ## Knobs
//!
//! * `sequence_kl_threshold`: largest D of a sequence that is trained on, default 0.003; `null` rejects none. The paper uses 0.003 and 0.005.
//! * `grpo.advantages.estimator: flash_reinforce` (reward - mean of the batch) belongs to this loss, with `grpo.num_generations: 1`.
//! * `vllm_importance_sampling_correction: true` and `rollout_is` are refused, because the loss already contains the weight.
//! * The selection needs all tokens of the step: [`LossConfig::prepare`](crate::LossConfig::prepare), one more forward pass.
//!
//! ```yaml
//! loss_type: flash_reinforce
//! sequence_kl_threshold: 0.003
//! ```

use super::gpg::Gpg;
use super::loss::{Average, Loss, LossTraits, OwnAverage};
use super::{PolicyTerm, Ratio, TokenTerms};
use crate::backend_api::real::Real;
use crate::batch::{PolicyValues, TokenBatch, TokenFactors};
use crate::config::LossConfig;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// Probabilities in the divergence are clamped to this distance from 0 and 1 (reference implementation).
const SMALLEST_PROBABILITY: f64 = 1e-6;

/// Largest exponent of a weight: e^80 is within f32.
const LARGEST_EXPONENT: f64 = 80.0;

/// The loss `flash_reinforce`.
#[derive(Clone, Copy, Debug)]
pub struct FlashReinforce;

/// Keys of this loss.
///
/// ```
/// use grpo_core::LossConfig;
///
/// let mut config = LossConfig::flash_reinforce();
/// config.parameters.flash_reinforce.sequence_kl_threshold = Some(0.005);
/// config.validate()?;
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Parameters {
    /// Largest mean divergence of a sequence between sampler and policy; sequences above it have no policy term. `None` rejects none.
    #[default(Some(3e-3))]
    pub sequence_kl_threshold: Option<f64>,
}

impl Parameters {
    pub(super) fn check(&self) -> Result<()> {
        match self.sequence_kl_threshold.filter(|threshold| !(*threshold >= 0.0 && threshold.is_finite())) {
            Some(threshold) => Err(Error::of_key(
                "sequence_kl_threshold",
                format!("sequence_kl_threshold must be a finite number that is not negative, or null, got {threshold}"),
            )),
            None => Ok(()),
        }
    }
}

impl Loss for FlashReinforce {
    const TRAITS: LossTraits = LossTraits {
        weighs_by_sampler: true,
        trl_corrects_sampler: false,
        chooses_tokens: true,
        average: Average::Sequences,
        verl_average: Some(OwnAverage::AllRows),
        ..LossTraits::UNCLIPPED
    };

    fn policy<R: Real>(&self, config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> PolicyTerm<R> {
        // `terms.factor` holds the weight.
        Gpg.policy(config, terms, ratio)
    }

    fn check(&self, config: &LossConfig) -> Result<()> {
        let twice = [
            ("vllm_importance_sampling_correction", config.vllm_importance_sampling_correction == Some(true)),
            ("rollout_is", config.rollout_is.is_some()),
        ];
        match twice.into_iter().find(|(_, is_set)| *is_set) {
            Some((key, _)) => Err(Error::of_key(
                key,
                format!(
                    "flash_reinforce weights its tokens by the sampler's ratio, and {key} would weight them twice: leave it out"
                ),
            )),
            None => Ok(()),
        }
    }

    fn choose(&self, config: &LossConfig, batch: &TokenBatch, policy: &PolicyValues, factors: &mut TokenFactors) {
        let threshold = config.parameters.flash_reinforce.sequence_kl_threshold.unwrap_or(f64::INFINITY);
        for rows in batch.active_sequences() {
            let behaviour: Vec<f64> = rows.iter().map(|row| behaviour_logp(batch, policy.logp[*row], *row)).collect();
            let divergences = rows.iter().zip(&behaviour).map(|(row, s)| bernoulli_kl(*s, policy.logp[*row]));
            let mean = (divergences.sum::<f64>() / rows.len() as f64).max(0.0);
            let is_admitted = mean <= threshold;
            factors.metrics.mean("sequence_kl", mean, 1.0);
            factors.metrics.mean("acceptance_rate", f64::from(u8::from(is_admitted)), 1.0);
            for (row, s) in rows.into_iter().zip(behaviour) {
                let log_weight = policy.logp[row] - s;
                let weight = if log_weight.is_nan() { 1.0 } else { log_weight.min(LARGEST_EXPONENT).exp() };
                factors.policy[row] *= if is_admitted { weight } else { 0.0 };
            }
        }
    }
}

/// Returns the log-probability under which the token was sampled, as far as it is known. A NaN of the policy is compared with itself: the
/// loss of its token is NaN with any weight.
fn behaviour_logp(batch: &TokenBatch, logp: f64, row: usize) -> f64 {
    let sampled = batch.sampler_logp().map(|sampler| f64::from(sampler[row])).filter(|s| !s.is_nan());
    sampled.or(batch.old_logp().map(|old| f64::from(old[row]))).filter(|_| !logp.is_nan()).unwrap_or(logp)
}

/// Returns the KL divergence of "this token or another" between sampler and policy; 0 if both are NaN.
fn bernoulli_kl(sampler: f64, policy: f64) -> f64 {
    let held = |logp: f64| logp.exp().clamp(SMALLEST_PROBABILITY, 1.0 - SMALLEST_PROBABILITY);
    let (p, q) = (held(sampler), held(policy));
    let divergence = p * (p.ln() - q.ln()) + (1.0 - p) * ((-p).ln_1p() - (-q).ln_1p());
    if divergence.is_nan() { 0.0 } else { divergence }
}
