//! Optimal token baselines: one baseline per position of a group.

use super::config::{AdvantageConfig, AdvantageEstimator};
use super::inputs::Rows;
use super::returns::discounted;
use crate::error::Result;
use std::ops::Range;

/// Added to the sum of weights, as in verl.
const EPS: f64 = 1e-8;

/// Returns A_t = R_t - B_t with B_t = sum(W_t R_t) / (sum(W_t) + 1e-8) over the group's completions that reach position t, and
/// W_t = sum over tokens up to t of (1 - 2 p + sum p^2) w^2: the cumulative squared norm of the scores, where w is the weight of the
/// sampler correction.
///
/// The longest completion of a group has baseline 0 beyond the second longest (verl's `handle_zero_tail`), where it
/// would be compared with itself. A group with one completion has no baseline.
pub(super) fn advantages(config: &AdvantageConfig, rows: &Rows<'_>) -> Result<Vec<f64>> {
    let batch = rows.batch()?;
    let weights = cumulative_weights(rows)?;
    let mut returns = discounted(rows, 1.0)?;
    let counts_active = config.estimator == AdvantageEstimator::TirOptimalTokenBaseline;
    for group in rows.groups.windows(2) {
        let members: Vec<Member> = (group[0]..group[1])
            .filter(|b| !rows.scores[*b].is_nan() && batch.active_in(*b) > 0)
            .map(|b| Member {
                range: batch.range(b),
                active: batch.range(b).filter(|i| batch.is_active(*i)).collect(),
                counts_active,
            })
            .collect();
        for (tokens, baselines) in baselines(&members, &returns, &weights) {
            for (i, baseline) in tokens.iter().zip(baselines) {
                returns[*i] -= baseline;
            }
        }
    }
    Ok(returns)
}

/// One completion: its rows and its active tokens.
struct Member {
    range: Range<usize>,
    active: Vec<usize>,
    counts_active: bool,
}

impl Member {
    /// Returns the position of the nth active token.
    fn position(&self, nth: usize) -> usize {
        if self.counts_active { nth } else { self.active[nth] - self.range.start }
    }
}

/// Returns the active tokens of every member with their baselines.
fn baselines<'a>(members: &'a [Member], returns: &[f64], weights: &[f64]) -> Vec<(&'a [usize], Vec<f64>)> {
    if members.len() < 2 {
        return Vec::new();
    }
    let positions = members.iter().map(|m| m.range.len()).max().unwrap_or(0);
    let (mut numerator, mut denominator) = (vec![0.0; positions], vec![EPS; positions]);
    for member in members {
        for (nth, i) in member.active.iter().enumerate() {
            numerator[member.position(nth)] += returns[*i] * weights[*i];
            denominator[member.position(nth)] += weights[*i];
        }
    }
    let mut lengths: Vec<usize> = members.iter().map(|m| m.active.len()).collect();
    lengths.sort_unstable();
    let (second, longest) = (lengths[lengths.len() - 2], lengths[lengths.len() - 1]);
    let baseline = |member: &Member, nth: usize| {
        let position = member.position(nth);
        let alone = longest > second && member.active.len() == longest && position >= second;
        if alone { 0.0 } else { numerator[position] / denominator[position] }
    };
    members.iter().map(|m| (m.active.as_slice(), (0..m.active.len()).map(|nth| baseline(m, nth)).collect())).collect()
}

/// Returns W_t `[N]`.
fn cumulative_weights(rows: &Rows<'_>) -> Result<Vec<f64>> {
    let batch = rows.batch()?;
    let (old_logp, squares) = (rows.old_logp()?, rows.sum_pi_squared()?);
    let correction = rows.rollout_is_weights()?;
    let mut weights = vec![0.0; batch.tokens()];
    for b in 0..batch.sequences() {
        let mut sum = 0.0;
        for i in batch.range(b).filter(|i| batch.is_active(*i)) {
            let w = correction.map_or(1.0, |w| f64::from(w[i]));
            sum += (1.0 - 2.0 * f64::from(old_logp[i]).exp() + f64::from(squares[i])) * w * w;
            weights[i] = sum;
        }
    }
    Ok(weights)
}
