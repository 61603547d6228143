//! Advantages of completions relative to the other completions of their prompt.

use super::config::{AdvantageConfig, GroupOfOne, ScaleRewards};
use super::inputs::Rows;
use super::statistics::{Statistics, scaled};
use crate::error::{Error, Result};

impl AdvantageConfig {
    fn lone_is_kept(&self, group: &Statistics) -> bool {
        group.count == 1.0 && self.group_of_one == GroupOfOne::Keep
    }

    /// Returns the statistics of one group. A single reward with `group_of_one: keep` gets mean 0 and standard deviation 1.
    fn group_statistics(&self, group: &[f64]) -> Statistics {
        let statistics = Statistics::of(group, self.ddof);
        match self.lone_is_kept(&statistics) {
            true => Statistics { mean: 0.0, std: 1.0, all_equal: false, ..statistics },
            false => statistics,
        }
    }
}

/// Returns r - mean(G), divided according to `scale_rewards`.
pub(super) fn centred(config: &AdvantageConfig, rows: &Rows<'_>) -> Vec<f64> {
    scaled_groups(config, &rows.scores, &rows.groups, config.scale())
}

/// Returns the advantages of [`centred`] for any list of rewards.
pub(super) fn scaled_groups(
    config: &AdvantageConfig,
    rewards: &[f64],
    groups: &[usize],
    scale: ScaleRewards,
) -> Vec<f64> {
    let batch = Statistics::of(rewards, config.ddof);
    each_group(rewards, groups, |group| {
        let statistics = config.group_statistics(group);
        let divisor = match scale {
            ScaleRewards::Group => statistics.std + config.eps,
            ScaleRewards::Batch => batch.std + config.eps,
            ScaleRewards::None => 1.0,
        };
        group.iter().map(|r| scaled(statistics.centred(*r), divisor)).collect()
    })
}

pub(super) fn dapo_mix(config: &AdvantageConfig, rows: &Rows<'_>) -> Vec<f64> {
    let of_group = scaled_groups(config, &rows.scores, &rows.groups, ScaleRewards::Group);
    let batch = Statistics::of(&rows.scores, config.ddof);
    let of_batch = rows.scores.iter().map(|r| scaled(batch.centred(*r), batch.std + config.eps));
    of_group.into_iter().zip(of_batch).map(|(group, all)| group + config.global_weight * all).collect()
}

/// Returns (r - mean(G)) / mean(G), and 0 if the mean is not above 0: a group without a success carries no signal.
pub(super) fn over_mean(config: &AdvantageConfig, rows: &Rows<'_>) -> Vec<f64> {
    each_group(&rows.scores, &rows.groups, |group| {
        let statistics = Statistics::of(group, config.ddof);
        let advantage = |r: &f64| match statistics.mean > 0.0 {
            _ if config.lone_is_kept(&statistics) => *r,
            true => scaled(statistics.centred(*r), statistics.mean),
            false if r.is_nan() => f64::NAN,
            false => 0.0,
        };
        group.iter().map(advantage).collect()
    })
}

/// Returns r - mean(all).
pub(super) fn centred_on_batch(config: &AdvantageConfig, rows: &Rows<'_>) -> Vec<f64> {
    let batch = Statistics::of(&rows.scores, config.ddof);
    rows.scores.iter().map(|r| batch.centred(*r)).collect()
}

/// Returns r - mean of the other rewards = (r - mean(G)) n / (n - 1). A single reward is excluded from a later whitening, as in TRL.
pub(super) fn leave_one_out(config: &AdvantageConfig, rows: &Rows<'_>) -> Vec<f64> {
    each_group(&rows.scores, &rows.groups, |group| {
        let statistics = Statistics::of(group, config.ddof);
        let n = statistics.count;
        let advantage = |r: &f64| match n > 1.0 {
            true => statistics.centred(*r) * n / (n - 1.0),
            false if config.lone_is_kept(&statistics) => *r,
            false => f64::NAN,
        };
        group.iter().map(advantage).collect()
    })
}

pub(super) fn length_weighted(config: &AdvantageConfig, rows: &Rows<'_>) -> Result<Vec<f64>> {
    let lengths = rows.lengths()?;
    let mut lengths = rows.groups.windows(2).map(|group| &lengths[group[0]..group[1]]);
    Ok(each_group(&rows.scores, &rows.groups, |group| {
        let lengths = lengths.next().unwrap_or_default();
        let statistics = config.group_statistics(group);
        let present = || group.iter().zip(lengths).filter(|(r, _)| !r.is_nan());
        let baseline = match config.lone_is_kept(&statistics) {
            true => 0.0,
            false => present().map(|(r, l)| r * l).sum::<f64>() / present().map(|(_, l)| l).sum::<f64>(),
        };
        let statistics = Statistics { mean: baseline, ..statistics };
        group.iter().map(|r| statistics.centred(*r)).collect()
    }))
}

pub(super) fn gpg(config: &AdvantageConfig, rows: &Rows<'_>) -> Vec<f64> {
    let present = || rows.scores.iter().filter(|r| !r.is_nan());
    let alpha = present().count() as f64 / present().filter(|r| **r != 0.0).count().max(1) as f64;
    let centred = scaled_groups(config, &rows.scores, &rows.groups, ScaleRewards::None);
    centred.into_iter().map(|a| a * alpha).collect()
}

pub(super) fn pass_at_k(config: &AdvantageConfig, rows: &Rows<'_>) -> Result<Vec<f64>> {
    if let Some(p) = rows.groups.windows(2).position(|group| group[1] - group[0] < 2) {
        let found = rows.groups[p + 1] - rows.groups[p];
        return Err(Error::shape("advantages", format!("size of group {p} of grpo_passk"), "at least 2", found));
    }
    Ok(each_group(&rows.scores, &rows.groups, |group| {
        let statistics = Statistics::of(group, config.ddof);
        let mut best: Vec<usize> = (0..group.len()).filter(|i| !group[*i].is_nan()).collect();
        best.sort_by(|i, j| group[*j].total_cmp(&group[*i]));
        let mut advantages: Vec<f64> = group.iter().map(|r| if r.is_nan() { f64::NAN } else { 0.0 }).collect();
        if let [first, second, ..] = best[..] {
            let divisor = match config.scale() {
                ScaleRewards::None => 1.0,
                ScaleRewards::Group | ScaleRewards::Batch => statistics.std + config.eps,
            };
            advantages[first] = scaled(group[first] - group[second], divisor);
        }
        advantages
    }))
}

fn each_group(rewards: &[f64], groups: &[usize], mut advantages: impl FnMut(&[f64]) -> Vec<f64>) -> Vec<f64> {
    groups.windows(2).flat_map(|group| advantages(&rewards[group[0]..group[1]])).collect()
}
