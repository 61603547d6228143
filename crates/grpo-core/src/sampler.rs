//! Correction for a sampler that differs from the old policy: weights and rejections from exp(old - sampler).
//!
//! An unknown sampler log-probability (NaN) has ratio 1.

use crate::batch::TokenBatch;
use crate::batch::{PolicyValues, TokenFactors};
use crate::config::rejection::{Over, Rejection, rejections};
use crate::config::{LossConfig, SamplerMode};
use crate::error::{Error, Result};
use crate::metrics::Metrics;
use crate::mismatch;
use crate::objective::{kl_value, vespo};

/// verl's bound on |log ratio| before exp.
const SAFE: f64 = 20.0;

/// Returns old - sampler at the active tokens `[N]`, 0 at masked tokens and where the sampler's log-probability is unknown. `policy`: the
/// policy's own scores, for a batch without `old_logp`.
pub(crate) fn log_ratios(batch: &TokenBatch, policy: Option<&PolicyValues>) -> Vec<f64> {
    let mut ratios = vec![0.0; batch.tokens()];
    let Some(sampler) = batch.sampler_logp() else { return ratios };
    for row in batch.active_rows().iter().copied().filter(|row| !sampler[*row].is_nan()) {
        let sampled = f64::from(sampler[row]);
        // A NaN of the policy makes its token's loss NaN with any weight.
        let own = || policy.map(|policy| policy.logp[row]).filter(|logp| !logp.is_nan()).unwrap_or(sampled);
        ratios[row] = batch.old_logp().map_or_else(own, |old| old[row].into()) - sampled;
    }
    ratios
}

/// Multiplies the sampler's weight into `factors`.
pub(crate) fn weigh(
    config: &LossConfig,
    batch: &TokenBatch,
    log_ratios: &[f64],
    factors: &mut TokenFactors,
) -> Result<()> {
    let Some(correction) = config.sampler_correction() else { return Ok(()) };
    let of_token = correction.mode.is_of_tokens();
    let in_log_ratio = config.traits().takes_sampler_ratio;
    if in_log_ratio && !of_token {
        return Err(Error::Config(format!(
            "{} includes the sampler's ratio in its own weight: set vllm_importance_sampling_mode to token_truncate or \
             token_mask, or vllm_importance_sampling_correction to false",
            config.loss_type.name()
        )));
    }
    let weight = |log_ratio: f64| {
        let ratio = correction.guard.map_or(log_ratio, |guard| log_ratio.clamp(-guard, guard)).exp();
        let (low, high) = (correction.low.unwrap_or(f64::NEG_INFINITY), correction.high.unwrap_or(f64::INFINITY));
        match correction.mode {
            SamplerMode::TokenTruncate | SamplerMode::SequenceTruncate | SamplerMode::GeometricTruncate => {
                ratio.max(low).min(high)
            }
            _ if ratio < low || ratio > high => 0.0,
            _ => ratio,
        }
    };
    let mut weights = vec![1.0; batch.tokens()];
    // Per token or per sequence: weights, and ratios before their bounds.
    let (mut seen, mut ratios) = (Vec::new(), Vec::new());
    for rows in batch.active_sequences() {
        let sum: f64 = rows.iter().map(|row| log_ratios[*row]).sum();
        let mean = sum / rows.len() as f64;
        let shared = match correction.mode {
            SamplerMode::GeometricTruncate | SamplerMode::GeometricMask => weight(mean),
            _ => weight(sum),
        };
        for row in &rows {
            weights[*row] = match correction.mode {
                SamplerMode::TokenTruncate | SamplerMode::TokenMask => weight(log_ratios[*row]),
                // The sequence decides about rejection; each token has its own weight.
                SamplerMode::SeqMaskTis if weight(mean) == 0.0 => 0.0,
                SamplerMode::SeqMaskTis => log_ratios[*row].exp(),
                _ => shared,
            };
        }
        match of_token {
            true => {
                seen.extend(rows.iter().map(|row| weights[*row]));
                ratios.extend(rows.iter().map(|row| log_ratios[*row].min(SAFE).exp()));
            }
            false => {
                seen.push(shared);
                ratios.push(sum.exp());
            }
        }
    }
    if let Some(row) = batch.active_rows().iter().find(|row| !weights[**row].is_finite()) {
        let reason = match correction.mode {
            SamplerMode::SeqMaskTis => "the ratio of old policy to sampler overflows; token_truncate would bound it",
            _ => "the ratio of old policy to sampler overflows; bound it with vllm_importance_sampling_clip_max",
        };
        return Err(Error::value("sampler_logp", batch.position(*row), reason));
    }
    if let Some(threshold) = config.rollout_is_threshold.filter(|_| config.rollout_is.is_some()) {
        mismatch::record_weights(batch, &weights, (&ratios, !of_token), threshold, &mut factors.metrics);
    }
    if correction.normalize {
        let mean = seen.iter().sum::<f64>() / seen.len().max(1) as f64;
        // verl does not normalise weights whose mean is close to 0.
        if mean > 1e-8 {
            weights.iter_mut().for_each(|weight| *weight /= mean);
        }
    }
    record(batch, log_ratios, &seen, &mut factors.metrics);
    for rows in batch.active_sequences() {
        if in_log_ratio {
            let sum = rows.iter().map(|row| vespo::sampler_log_ratio(weights[*row])).sum();
            rows.iter().for_each(|row| factors.log_ratio_bias[*row] = sum);
        } else {
            rows.iter().for_each(|row| factors.policy[*row] *= weights[*row]);
        }
    }
    Ok(())
}

/// Gives each sequence one weight, for losses with one term per sequence (geo_mean): the geometric mean of its tokens' weights, after
/// rejection (verl).
pub(crate) fn share_weights(config: &LossConfig, batch: &TokenBatch, factors: &mut TokenFactors) {
    if config.traits().is_of_sequences && config.sampler_correction().is_some() {
        for rows in batch.active_sequences() {
            let logs = rows.iter().map(|row| (factors.policy[*row] + 1e-10).ln());
            let weight = (logs.sum::<f64>() / rows.len() as f64).exp();
            rows.iter().for_each(|row| factors.policy[*row] = weight);
        }
    }
}

/// Records TRL's `sampling/sampling_logp_difference/mean` and `max`, in nats, of the differences between the log-probabilities of old policy and
/// sampler, one per token; nothing without tokens. The loss does so if it corrects for the sampler.
///
/// ```
/// use grpo_core::{Metrics, record_sampler_difference};
///
/// let mut metrics = Metrics::default();
/// record_sampler_difference([0.25, -0.75].into_iter(), &mut metrics);
/// assert_eq!(metrics.value("sampling/sampling_logp_difference/mean"), Some(0.5));
/// assert_eq!(metrics.value("sampling/sampling_logp_difference/max"), Some(0.75));
/// ```
pub fn record_sampler_difference(differences: impl Iterator<Item = f64>, metrics: &mut Metrics) {
    let (sum, max, count) = differences.fold((0.0, 0.0, 0.0), |(sum, max, count), difference: f64| {
        (sum + difference.abs(), f64::max(max, difference.abs()), count + 1.0)
    });
    if count > 0.0 {
        let name = "sampling/sampling_logp_difference";
        metrics.mean(&format!("{name}/mean"), sum, count);
        metrics.max(&format!("{name}/max"), max);
    }
}

/// Records TRL's metrics of the mismatch.
fn record(batch: &TokenBatch, log_ratios: &[f64], weights: &[f64], metrics: &mut Metrics) {
    let known = |row: &&usize| batch.sampler_logp().is_some_and(|sampler| !sampler[**row].is_nan());
    record_sampler_difference(batch.active_rows().iter().filter(known).map(|row| log_ratios[*row]), metrics);
    if !weights.is_empty() {
        let name = "sampling/importance_sampling_ratio";
        metrics.min(&format!("{name}/min"), weights.iter().copied().fold(f64::INFINITY, f64::min));
        metrics.mean(&format!("{name}/mean"), weights.iter().sum(), weights.len() as f64);
        metrics.max(&format!("{name}/max"), weights.iter().copied().fold(f64::NEG_INFINITY, f64::max));
    }
}

impl Rejection {
    /// Returns the divergence of a token.
    fn statistic(&self, log_ratio: f64) -> f64 {
        kl_value(self.estimator, &log_ratio, (Some(SAFE), None))
    }

    /// Returns, for each token of a sequence, `true` if it is kept.
    fn keeps(&self, log_ratios: &[f64]) -> Vec<bool> {
        let within = |value: f64| value >= self.low && value <= self.high;
        let values = || log_ratios.iter().map(|d| self.statistic(*d));
        let value = match self.over {
            Over::Token => return values().map(within).collect(),
            Over::Sum => values().sum(),
            Over::Mean => values().sum::<f64>() / log_ratios.len() as f64,
            Over::Max => values().fold(f64::NEG_INFINITY, f64::max),
        };
        vec![within(value); log_ratios.len()]
    }
}

/// Returns the mask `[N]` without the tokens that `rollout_rs` rejects; `None` without rules.
pub(crate) fn rejection_mask(config: &LossConfig, batch: &TokenBatch, log_ratios: &[f64]) -> Result<Option<Vec<f32>>> {
    let rules = rejections(config)?;
    if rules.is_empty() {
        return Ok(None);
    }
    let mut mask = batch.mask();
    for rows in batch.active_sequences() {
        let ratios: Vec<f64> = rows.iter().map(|row| log_ratios[*row]).collect();
        for rule in &rules {
            for (row, _) in rows.iter().zip(rule.keeps(&ratios)).filter(|(_, keeps)| !keeps) {
                mask[*row] = 0.0;
            }
        }
    }
    Ok(Some(mask))
}
