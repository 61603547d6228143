//! What a token still earns: its return.

use super::Raw;
use super::inputs::Rows;
use crate::error::Result;

/// R_t = reward_t + gamma R_(t+1) over the active tokens of each completion `[N]`; NaN at masked tokens and where there
/// is no reward.
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

/// Return - reward of the greedy completion: one number per completion unless tokens earn rewards of their own.
pub(super) fn remax(rows: &Rows<'_>) -> Result<Raw> {
    let greedy = rows.greedy_rewards()?;
    if !rows.per_token() {
        let advantages = rows.scores.iter().zip(greedy).map(|(r, g)| r - f64::from(*g));
        return Ok(Raw::PerSequence(advantages.collect()));
    }
    let batch = rows.batch()?;
    let mut returns = discounted(rows, 1.0)?;
    for (b, greedy) in greedy.iter().enumerate() {
        for i in batch.range(b) {
            returns[i] -= f64::from(*greedy);
        }
    }
    Ok(Raw::PerToken(returns))
}
