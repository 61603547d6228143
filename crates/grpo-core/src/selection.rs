//! Selection of tokens by the policy's scores of the whole batch.
//!
//! The selection has no derivative. Tokens that are not selected stay active: they count in the denominators and keep their KL term, as
//! in TRL.

use crate::batch::TokenBatch;
use crate::batch::{PolicyValues, TokenFactors};
use crate::config::LossConfig;

/// Writes every selection of the configuration into `factors`. Parts of a step that was selected from before have `batch.factors()`
/// instead.
pub(crate) fn select(config: &LossConfig, batch: &TokenBatch, policy: &PolicyValues, factors: &mut TokenFactors) {
    if batch.active_tokens() == 0 {
        return;
    }
    if let Some(threshold) = config.off_policy_mask_threshold {
        off_policy(threshold, batch, policy, factors);
    }
    if config.top_entropy_quantile < 1.0 {
        high_entropy(config, batch, policy, factors);
    }
    config.loss_type.choose(config, batch, policy, factors);
}

/// Excludes sequences of negative advantage whose mean of sampler (else old) logp - logp exceeds the threshold. Tokens with an unknown
/// sampler log-probability contribute 0. DeepSeek-V3.2.
fn off_policy(threshold: f64, batch: &TokenBatch, policy: &PolicyValues, factors: &mut TokenFactors) {
    let before = batch.sampler_logp().or(batch.old_logp());
    for sequence in 0..batch.sequences() {
        let rows: Vec<usize> = batch.range(sequence).filter(|row| batch.is_active(*row)).collect();
        let moved = |row: &usize| {
            let moved = before.map_or(0.0, |before| f64::from(before[*row]) - policy.logp[*row]);
            if moved.is_nan() { 0.0 } else { moved }
        };
        let mean = rows.iter().map(moved).sum::<f64>() / rows.len().max(1) as f64;
        let far = |row: &&usize| batch.advantage(sequence, **row) < 0.0 && mean > threshold;
        rows.iter().filter(far).for_each(|row| factors.policy[*row] = 0.0);
    }
}

/// Selects the share `top` of tokens with the highest entropy: entropy at or above the quantile 1 - `top`, interpolated between
/// neighbours (arXiv 2506.01939). All other tokens lose their policy term; for geo_mean, whose policy term belongs to a sequence, they are
/// excluded from the mean of log-ratios instead. They are also excluded from the entropy bonus and its mean.
fn high_entropy(config: &LossConfig, batch: &TokenBatch, policy: &PolicyValues, factors: &mut TokenFactors) {
    let entropy = |row: &usize| policy.entropy[*row];
    let mut sorted: Vec<f64> = batch.active_rows().iter().map(entropy).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let place = (1.0 - config.top_entropy_quantile) * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    let threshold = low + (high - low) * place.fract();
    let (kept, dropped): (Vec<usize>, Vec<usize>) =
        batch.active_rows().iter().partition(|row| entropy(row) >= threshold);
    let of_sequences = config.traits().is_of_sequences;
    let of_policy = if of_sequences { &mut factors.log_ratio_scale } else { &mut factors.policy };
    for row in dropped {
        of_policy[row] = 0.0;
        factors.entropy[row] = 0.0;
    }
    if of_sequences {
        for sequence in 0..batch.sequences() {
            let rows: Vec<usize> = batch.range(sequence).filter(|row| batch.is_active(*row)).collect();
            let left = rows.iter().filter(|row| factors.log_ratio_scale[**row] != 0.0).count();
            let share = rows.len() as f64 / left.max(1) as f64;
            rows.into_iter().for_each(|row| factors.log_ratio_scale[row] *= share);
        }
    }
    // The weights contain the mean over all active tokens; rescale it to the selected ones.
    let share = batch.active_tokens() as f64 / kept.len().max(1) as f64;
    kept.into_iter().for_each(|row| factors.entropy[row] = share);
}
