//! The report of a step.

use super::sample::Sample;
use super::speed::Speed;
use super::times::PhaseTimes;
use grpo_core::Metrics;

/// The report of one GRPO step.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StepReport {
    /// The number of the step, from 1.
    pub step: u64,
    /// Metrics by TRL's names.
    ///
    /// Over all samples, including groups that were filtered out: `reward`, `reward_std`, `rewards/NAME/mean` and `std`,
    /// `rewards/NAME/failures` (completions that the function failed to score; for programs and endpoints in every step, for other
    /// functions only if not zero), `frac_reward_zero_std` (share of groups whose rewards are all equal; only of groups of several completions),
    /// `completions/{mean,min,max}_length` and `_terminated_length`, `completions/clipped_ratio`, `num_tokens` (of this
    /// step). Standard deviations are over all completions, with ddof 1.
    ///
    /// With environments, over all conversations: `num_turns/{mean,min,max}` (messages of the assistant), `tools/call_frequency` (tool calls per
    /// conversation), `tools/failure_frequency` (share of calls that failed), `environments/failures`, `environments/without_room` (share of
    /// conversations that ended because a message had no room). Lengths count sampled tokens only. With agents or `data.history: fork`, also
    /// `num_rows/{mean,max}`, the rows per conversation; with agents `endpoint/unmet_requests`, the answers per conversation without the call or
    /// the JSON that was expected.
    ///
    /// Over the updates: `loss`, `policy_loss`, `entropy`, `clip_ratio/..`, `grad_norm`, `learning_rate`; `kl` if the loss has a KL term;
    /// `frac_rows_empty`, the share of rows without a sequence, of policies that pad rows (on a device);
    /// with a mixture of experts `moe/..` and `aux_loss` ([`grpo_policy::RouterStatistics::record`]);
    /// `skipped_updates`, the number of skipped updates, with `optimizer.skip_grad_norm`; for PPO `value_loss`, `value_pred_mean`,
    /// `return_mean`, `value_clip_ratio`, and over all samples `explained_variance`; `entropy_coef` with an entropy bonus;
    /// `sampling/..` if the loss corrects for the sampler. With `rollout.max_staleness`, over all samples `sampling/staleness`, the mean
    /// number of steps since their oldest weights, and `sampling/stale_completions`, the number of completions that were dropped.
    ///
    /// With the KL in the reward, verl's `actor/reward_kl_penalty` and `actor/reward_kl_penalty_coeff`. With dynamic sampling,
    /// `filter_groups/num_gen_batches`, `evicted_groups` and `discarded_surplus_groups`.
    pub metrics: Metrics,
    /// The samples that were trained on; samples of the same prompt are adjacent.
    pub samples: Vec<Sample>,
    /// The number of prompt and completion tokens of all samples.
    pub tokens: usize,
    /// The wall time of each phase.
    pub times: PhaseTimes,
    /// The speed of sampling and updates, as metrics [`Speed::metrics`].
    pub speed: Speed,
}

impl StepReport {
    /// Returns the value of a metric; 0 if it is missing.
    pub fn metric(&self, name: &str) -> f64 {
        self.metrics.value(name).unwrap_or(0.0)
    }
}
