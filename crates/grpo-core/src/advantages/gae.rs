//! Generalised advantage estimation.

use super::inputs::Rows;
use crate::error::Result;

/// Returns `[N]` advantages: A_t = d_t + gamma lam A_(t+1), d_t = reward_t + gamma V_(t+1) - V_t, over the active tokens of each
/// completion, with V = 0 after the last token (arXiv 1506.02438). Masked tokens are skipped, as in verl. The result is NaN at masked
/// tokens and at completions without a reward.
pub(super) fn advantages(rows: &Rows<'_>, gamma: f64, lam: f64) -> Result<Vec<f64>> {
    let (batch, values) = (rows.batch()?, rows.values()?);
    let earned = rows.token_rewards()?;
    let mut advantages = vec![f64::NAN; batch.tokens()];
    for b in (0..batch.sequences()).filter(|b| !rows.scores[*b].is_nan()) {
        let (mut next_value, mut next_advantage) = (0.0, 0.0);
        for i in batch.range(b).rev().filter(|i| batch.is_active(*i)) {
            let value = f64::from(values[i]);
            next_advantage = earned[i] + gamma * next_value - value + gamma * lam * next_advantage;
            next_value = value;
            advantages[i] = next_advantage;
        }
    }
    Ok(advantages)
}
