//! Dynamic sampling: keeps the groups whose rewards carry a learning signal.

use super::groups::Groups;
use super::reward_list::RewardList;
use super::statistics::Statistics;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use std::cmp::Ordering;

/// Rules that select groups. DAPO, arXiv 2503.14476. The caller decides how often to sample again (verl's
/// `max_num_gen_batches`).
///
/// ```
/// use grpo_core::advantages::DynamicSampling;
///
/// let kept = DynamicSampling::default().filter(&[1.0, 0.0, 0.5, 0.5, 0.0, 1.0], 2)?;
/// assert_eq!((kept.kept.as_slice(), kept.zero_variance, kept.to_refill(3)), (&[0, 2][..], 1, 1));
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DynamicSampling {
    /// Drops groups whose rewards are all equal; compares the rewards themselves. Groups of one are kept (verl's `filter_groups`).
    #[default(true)]
    pub drop_zero_variance: bool,
    /// Keeps groups with low < mean reward < high. OpenRLHF's `dynamic_filtering_reward_range`, whose default is 0 and 1.
    pub reward_range: Option<[f64; 2]>,
    /// Keeps groups whose standard deviation (ddof 1) is above this.
    pub min_std: Option<f64>,
}

/// The groups that [`DynamicSampling::filter`] keeps, and counts of dropped groups by reason; a group counts under the first reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeptGroups {
    /// Indices of the kept groups, ascending.
    pub kept: Vec<usize>,
    /// Groups dropped because they have no reward.
    pub without_reward: usize,
    /// Groups dropped because all rewards are equal.
    pub zero_variance: usize,
    /// Groups dropped because their mean lies outside the range.
    pub out_of_range: usize,
    /// Groups dropped because their standard deviation is too small.
    pub low_std: usize,
}

impl KeptGroups {
    /// Returns the number of groups that a batch of `wanted` groups still lacks.
    pub fn to_refill(&self, wanted: usize) -> usize {
        wanted.saturating_sub(self.kept.len())
    }
}

impl DynamicSampling {
    /// Filters the groups of `rewards: [B]`; a reward may be missing.
    ///
    /// # Errors
    /// [`Error::Key`] for an empty range or a threshold that is negative or not finite, [`Error::Shape`] if
    /// the groups do not cover B completions, [`Error::Value`] for a reward that is not finite.
    pub fn filter<'a>(&self, rewards: impl Into<RewardList<'a>>, groups: impl Into<Groups<'a>>) -> Result<KeptGroups> {
        if let Some([low, high]) = self.reward_range.filter(|[low, high]| low.partial_cmp(high) != Some(Ordering::Less))
        {
            return Err(Error::of_key(
                "reward_range",
                format!("dynamic sampling: reward_range must rise, got {low} to {high}"),
            ));
        }
        if let Some(min) = self.min_std.filter(|min| !(*min >= 0.0 && min.is_finite())) {
            return Err(Error::of_key(
                "min_std",
                format!("dynamic sampling: min_std must be finite and not negative, got {min}"),
            ));
        }
        let rewards = rewards.into();
        let offsets = groups.into().offsets("dynamic sampling", rewards.len())?;
        let rewards = rewards.of_completions("rewards")?;
        let mut groups = KeptGroups::default();
        for (index, range) in offsets.windows(2).enumerate() {
            let group = &rewards[range[0]..range[1]];
            let statistics = Statistics::of(group, 1);
            if statistics.count == 0.0 {
                groups.without_reward += 1;
            } else if self.drop_zero_variance && statistics.all_equal && group.len() > 1 {
                groups.zero_variance += 1;
            } else if self.reward_range.is_some_and(|[low, high]| !(low < statistics.mean && statistics.mean < high)) {
                groups.out_of_range += 1;
            } else if self.min_std.is_some_and(|min| statistics.all_equal || statistics.std <= min) {
                groups.low_std += 1;
            } else {
                groups.kept.push(index);
            }
        }
        Ok(groups)
    }
}
