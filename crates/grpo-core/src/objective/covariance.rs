//! The covariance of advantage and log-probability, by which clip_cov and kl_cov select tokens (arXiv 2505.22617).

use crate::batch::PolicyValues;
use crate::batch::TokenBatch;

/// Returns (A - mean A)(l - mean l) of each active token, in order.
pub(super) fn covariances(batch: &TokenBatch, policy: &PolicyValues) -> Vec<f64> {
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

/// Returns the number of tokens in a share of `tokens`, at least one.
pub(super) fn share_of(tokens: usize, share: f64) -> usize {
    ((tokens as f64 * share) as usize).max(1)
}
