//! Advantages per reward function, then their sum.

use super::config::AdvantageConfig;
use super::group::scaled_groups;
use super::inputs::Rows;

/// Returns the sum over k of weight_k (r_k - mean(G_k)) / (std(G_k) + eps), before whitening. A function adds nothing to a completion
/// without its reward, or if it has no other reward in the group.
pub(super) fn gdpo(config: &AdvantageConfig, rows: &Rows<'_>) -> Vec<f64> {
    let mut sum: Vec<f64> = rows.scores.iter().map(|r| if r.is_nan() { f64::NAN } else { 0.0 }).collect();
    for k in 0..config.reward_functions() {
        let own = scaled_groups(config, &rows.rewards_of(config, k), &rows.groups, config.scale());
        for (sum, own) in sum.iter_mut().zip(own).filter(|(_, own)| !own.is_nan()) {
            *sum += config.reward_weight(k) * own;
        }
    }
    sum
}
