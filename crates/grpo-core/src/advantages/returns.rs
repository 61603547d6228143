//! Discounted returns of tokens.

use super::Raw;
use super::inputs::Rows;
use crate::error::Result;

/// Returns `[N]`: R_t = reward_t + gamma R_(t+1) over the active tokens of each completion; NaN at masked tokens and at completions
/// without a reward.
pub(super) fn discounted(rows: &Rows<'_>, gamma: f64) -> Result<Vec<f64>> {
    let batch = rows.batch()?;
    let earned = rows.token_rewards()?;
    let mut returns = vec![f64::NAN; batch.tokens()];
    for b in (0..batch.sequences()).filter(|b| !rows.scores[*b].is_nan()) {
        let mut later = 0.0;
        for i in batch.range(b).rev().filter(|i| batch.is_active(*i)) {
            later = earned[i] + gamma * later;
            returns[i] = later;
        }
    }
    Ok(returns)
}

/// Subtracts the reward of the greedy completion from the return: one number per completion, or per token if rewards are per token.
pub(super) fn remax(rows: &Rows<'_>) -> Result<Raw> {
    let greedy = rows.greedy_rewards()?;
    if !rows.per_token() {
        let advantages = rows.scores.iter().zip(&greedy).map(|(r, g)| r - g);
        return Ok(Raw::PerSequence(advantages.collect()));
    }
    let batch = rows.batch()?;
    let mut returns = discounted(rows, 1.0)?;
    for (b, greedy) in greedy.iter().enumerate() {
        for i in batch.range(b) {
            returns[i] -= greedy;
        }
    }
    Ok(Raw::PerToken(returns))
}
