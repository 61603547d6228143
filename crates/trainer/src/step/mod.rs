//! One GRPO step: rollout, rewards, advantages, then inner updates on the generated batch.

mod advantage;
mod generate;
mod record;
mod scores;
mod times;
mod update;

use crate::coefficients::Coefficients;
use crate::error::Result;
use crate::micro_batch::split_evenly;
use crate::ref_policy::follow;
use crate::train_config::{GrpoConfig, TrainConfig};
use crate::updates::Updates;
use advantage::Generation;
use data::Dataset;
use grpo_core::{LossConfig, Metrics};
use models::Tokenizer;
use policy::{Policy, RolloutEngine};
use rewards::{Failures, Reward, Rewards};
use std::ops::Range;
use std::time::Instant;
pub use times::PhaseTimes;

/// One sampled completion and its judgement.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The name of the task.
    pub task: String,
    /// The text of the prompt.
    pub prompt: String,
    /// A right answer.
    pub answer: String,
    /// The text that the policy wrote, without EOS.
    pub completion: String,
    /// Whether the length limit cut the completion off.
    pub truncated: bool,
    /// The rewards of the completion, without the KL to the reference policy.
    pub reward: Reward,
    /// The advantage of the completion, scaled by `grpo.advantage_scale`; the mean over its tokens where they have advantages of their own.
    pub advantage: f32,
}

/// What one GRPO step has done.
#[derive(Clone, Debug)]
pub struct StepReport {
    /// The number of the step, from 1.
    pub step: u64,
    /// Metrics under TRL's names.
    ///
    /// Of everything that was sampled, groups that were filtered out included: `reward`, `reward_std`,
    /// `rewards/NAME/mean` and `std`, `rewards/NAME/failures` (completions that the function failed to judge; of programs and
    /// endpoints in every step, of others where there are any), `frac_reward_zero_std` (share of groups whose rewards are all equal),
    /// `completions/{mean,min,max}_length` and `_terminated_length`, `completions/clipped_ratio`, `num_tokens` (of this
    /// step). Standard deviations are over all completions, with ddof 1.
    ///
    /// Of the updates: `loss`, `policy_loss`, `entropy`, `clip_ratio/..`, `grad_norm`, `learning_rate`; `kl` where the loss has
    /// a KL term;
    /// `skipped_updates`, the number of updates that were not applied, with `optimizer.skip_grad_norm`;
    /// of PPO `value_loss`, `value_pred_mean`, `return_mean`, `value_clip_ratio`, and of what was sampled `explained_variance`;
    /// `entropy_coef` where there is a bonus; `sampling/..` where the loss corrects for the sampler.
    ///
    /// verl's `actor/reward_kl_penalty` and `actor/reward_kl_penalty_coeff` with the KL in the reward. With dynamic
    /// sampling `filter_groups/num_gen_batches`, `evicted_groups` and `discarded_surplus_groups`.
    pub metrics: Metrics,
    /// Every sample that was trained on, those of one prompt next to each other.
    pub samples: Vec<Sample>,
    /// Prompt and completion tokens of everything that was sampled.
    pub tokens: usize,
    /// How long its phases took.
    pub times: PhaseTimes,
}

impl StepReport {
    /// The value of a metric; 0 when it is not there.
    pub fn metric(&self, name: &str) -> f64 {
        self.metrics.value(name).unwrap_or(0.0)
    }
}

/// Everything that a step works with, beside the policy.
pub struct StepContext<'a> {
    /// The configuration of the run.
    pub config: &'a TrainConfig,
    /// The configuration of the loss, [`TrainConfig::loss`]. The policy computes it.
    pub loss: &'a LossConfig,
    /// The tokenizer of the policy.
    pub tokenizer: &'a dyn Tokenizer,
    /// The data set that prompts come from.
    pub dataset: &'a mut dyn Dataset,
    /// The rewards that judge completions.
    pub rewards: &'a Rewards,
    /// The failures of reward functions, counted over the steps.
    pub failures: &'a mut Failures,
    /// The engine that samples completions.
    pub engine: &'a mut dyn RolloutEngine,
    /// The schedule of the optimizer's updates.
    pub updates: &'a mut Updates,
    /// The coefficients that follow what is measured.
    pub coefficients: &'a mut Coefficients,
}

/// GRPO step number `step` (from 0). With a KL to it, `policy` has a reference policy.
///
/// # Errors
/// Those of the data set, the engine, the advantages, the loss and the policy; [`crate::Error::TooFewGroups`] when
/// dynamic sampling has reached its limit; [`rewards::Error::TooManyFailures`] when a reward function has failed too often in a row; [`policy::Error::NotFinite`] when the loss is not finite. The policy is then
/// somewhere in the step: [`Policy::roll_back`] takes it back.
pub fn grpo_step(policy: &mut dyn Policy, context: &mut StepContext<'_>, step: u64) -> Result<StepReport> {
    let grpo = &context.config.grpo;
    let (mut metrics, mut times) = (Metrics::default(), PhaseTimes::default());
    let sampled = generate::sample(policy, context, step, &mut metrics, &mut times)?;
    record::record(&mut metrics, &sampled.all, context.rewards, context.config);
    let tokens = sampled.tokens();
    metrics.mean("num_tokens", tokens as f64, 1.0);
    let generation = Generation::new(policy, context, sampled.into_kept(), &mut metrics, &mut times)?;
    let mut skipped = 0.0;
    let began = Instant::now();
    for _ in 0..grpo.num_iterations {
        for rows in updates(grpo) {
            if update::update_policy(policy, context, &generation, rows, &mut metrics)? {
                let steps = policy.optimizer_steps();
                follow(policy, steps, grpo)?;
            } else {
                skipped += 1.0;
            }
        }
    }
    times.add("update_actor", began);
    if context.updates.skips() {
        metrics.mean("skipped_updates", skipped, 1.0);
    }
    Ok(StepReport { step: step + 1, metrics, samples: generation.samples, tokens, times })
}

/// The sequences of each optimizer step of one pass: whole groups, end to end.
fn updates(grpo: &GrpoConfig) -> impl Iterator<Item = Range<usize>> {
    let per_prompt = grpo.num_generations;
    split_evenly(grpo.prompts_per_step, grpo.steps_per_generation)
        .map(move |groups| groups.start * per_prompt..groups.end * per_prompt)
}
