//! Tokens that are chosen by what the policy says of all of them.
//!
//! The choice has no derivative. What is not chosen stays active: it keeps its place in the denominators and its KL term
//! (TRL's meaning).

use crate::batch::TokenBatch;
use crate::batch::{PolicyValues, TokenFactors};
use crate::config::LossConfig;

/// Writes every choice that the configuration asks for into `factors`. `batch.factors()` of a part of a step that was
/// chosen before makes this unnecessary.
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
    config.rules().choose(config, batch, policy, factors);
}

/// Sequences of negative advantage from which the policy has moved away too far: the mean of sampler (else old) logp - logp
/// is above the threshold. Tokens without the former count 0. DeepSeek-V3.2.
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

/// The share `top` of tokens of the highest entropy: those at or above the quantile 1 - `top`, interpolated between
/// neighbours (arXiv 2506.01939). The others leave the entropy bonus too, and its mean; in geo_mean, whose policy term is a
/// sequence's, they leave the mean of log-ratios instead.
fn high_entropy(config: &LossConfig, batch: &TokenBatch, policy: &PolicyValues, factors: &mut TokenFactors) {
    let entropy = |row: &usize| policy.entropy[*row];
    let mut sorted: Vec<f64> = batch.active_rows().iter().map(entropy).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let place = (1.0 - config.top_entropy_quantile) * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    let threshold = low + (high - low) * place.fract();
    let (kept, dropped): (Vec<usize>, Vec<usize>) =
        batch.active_rows().iter().partition(|row| entropy(row) >= threshold);
    let of_sequences = config.rules().is_of_sequences();
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
    // Weights have the mean over all active tokens in them.
    let share = batch.active_tokens() as f64 / kept.len().max(1) as f64;
    kept.into_iter().for_each(|row| factors.entropy[row] = share);
}
