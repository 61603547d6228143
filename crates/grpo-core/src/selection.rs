//! Tokens that are chosen by what the policy says of all of them.
//!
//! The choice has no derivative. What is not chosen stays active: it keeps its place in the denominators and its KL term
//! (TRL's meaning).

use crate::batch::TokenBatch;
use crate::config::{LossConfig, LossType, Objective};
use crate::factors::{PolicyValues, TokenFactors};
use crate::objective::{TokenTerms, token_loss};

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
    match config.loss_type {
        LossType::ClipCov => clip_cov(config, batch, policy, factors),
        LossType::KlCov => kl_cov(config, batch, policy, factors),
        _ => {}
    }
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
    let of_policy = match config.objective() {
        Objective::GeoMean => &mut factors.log_ratio_scale,
        _ => &mut factors.policy,
    };
    for row in dropped {
        of_policy[row] = 0.0;
        factors.entropy[row] = 0.0;
    }
    if config.objective() == Objective::GeoMean {
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

/// (A - mean A)(l - mean l) of the active tokens, in their order.
fn covariances(batch: &TokenBatch, policy: &PolicyValues) -> Vec<f64> {
    let mut pairs = Vec::with_capacity(batch.active_tokens());
    for sequence in 0..batch.sequences() {
        for row in batch.range(sequence).filter(|row| batch.is_active(*row)) {
            pairs.push((f64::from(batch.advantage(sequence, row)), policy.logp[row]));
        }
    }
    let count = pairs.len() as f64;
    let (a, l) = pairs.iter().fold((0.0, 0.0), |(a, l), pair| (a + pair.0 / count, l + pair.1 / count));
    pairs.into_iter().map(|pair| (pair.0 - a) * (pair.1 - l)).collect()
}

/// How many of `tokens` a share is, at least one.
fn share_of(tokens: usize, share: f64) -> usize {
    ((tokens as f64 * share) as usize).max(1)
}

/// Takes the gradient from some tokens that are not clipped and whose covariance lies between the bounds. verl draws them
/// at random; here the draw follows from the batch, so that the same batch gives the same loss.
fn clip_cov(config: &LossConfig, batch: &TokenBatch, policy: &PolicyValues, factors: &mut TokenFactors) {
    let covariances = covariances(batch, policy);
    let mut eligible = Vec::new();
    let mut position = 0;
    for sequence in 0..batch.sequences() {
        for row in batch.range(sequence).filter(|row| batch.is_active(*row)) {
            let covariance = covariances[position];
            position += 1;
            let advantage = f64::from(batch.advantage(sequence, row));
            let logp = policy.logp[row];
            let loss = token_loss(
                config,
                &TokenTerms {
                    logp,
                    old_logp: batch.old_logp().map_or(logp, |old| old[row].into()),
                    shared: None,
                    ref_logp: None,
                    sampler_logp: None,
                    advantage,
                    factor: 1.0,
                    kl_cov_mask: 0.0,
                },
            );
            let clipped = loss.low_clipped + loss.high_clipped > 0.0;
            if !clipped && covariance > config.clip_cov_lb && covariance < config.clip_cov_ub {
                eligible.push((row - batch.range(sequence).start, row));
            }
        }
    }
    // A draw without replacement: sort by a hash of what the token is, not of where it lies in the batch.
    eligible.sort_by_key(|(place, row)| {
        let old = batch.old_logp().map_or(0, |old| u64::from(old[*row].to_bits()));
        mix(mix(*place as u64 ^ old.rotate_left(32)) ^ batch.targets()[*row] as u64)
    });
    let chosen = eligible.into_iter().take(share_of(batch.active_tokens(), config.clip_cov_ratio));
    chosen.for_each(|(_, row)| factors.policy[row] = 0.0);
}

/// Marks the tokens of the largest covariance.
fn kl_cov(config: &LossConfig, batch: &TokenBatch, policy: &PolicyValues, factors: &mut TokenFactors) {
    let mut ranked: Vec<(usize, f64)> = batch.active_rows().iter().copied().zip(covariances(batch, policy)).collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let chosen = ranked.into_iter().take(share_of(batch.active_tokens(), config.kl_cov_ratio));
    chosen.for_each(|(row, _)| factors.kl_cov_mask[row] = 1.0);
}

/// splitmix64.
fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
