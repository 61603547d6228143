//! One GRPO step: rollout, rewards, advantages, then inner updates on the generated batch.

mod advantage;
mod generate;
mod record;
mod scores;
mod update;

use crate::coefficients::Coefficients;
use crate::dataset::Dataset;
use crate::error::Result;
use crate::loss::PolicyLoss;
use crate::micro_batch::split_evenly;
use crate::model::Decoder;
use crate::optim::AdamW;
use crate::reference::follow;
use crate::reward::{Reward, Rewards};
use crate::rollout::RolloutEngine;
use crate::train_config::{GrpoConfig, TrainConfig};
use advantage::Generation;
use burn::module::Module;
use grpo_core::Metrics;
use std::ops::Range;

/// One sampled completion and its judgement.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Name of the task.
    pub task: String,
    /// The question.
    pub prompt: String,
    /// A right answer.
    pub answer: String,
    /// What the policy wrote, without EOS.
    pub completion: String,
    /// Whether the length limit cut it off.
    pub truncated: bool,
    /// Its rewards, without the KL to the reference.
    pub reward: Reward,
    /// Its advantage, scaled by `grpo.advantage_scale`; the mean over its tokens where they have advantages of their own.
    pub advantage: f32,
}

/// What one GRPO step did.
#[derive(Clone, Debug)]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Metrics under TRL's names.
    ///
    /// Of everything that was sampled, groups that were filtered out included: `reward`, `reward_std`,
    /// `rewards/NAME/mean` and `std`, `frac_reward_zero_std` (share of groups whose rewards are all equal),
    /// `completions/{mean,min,max}_length` and `_terminated_length`, `completions/clipped_ratio`, `num_tokens` (of this
    /// step). Standard deviations are over all completions, with ddof 1.
    ///
    /// Of the updates: `loss`, `policy_loss`, `entropy`, `clip_ratio/..`, `grad_norm`, `learning_rate`; `kl` where the loss has
    /// a KL term;
    /// `skipped_updates`, the number of updates that were not applied, with `optimizer.skip_grad_norm`;
    /// `entropy_coef` where there is a bonus; `sampling/..` where the loss corrects for the sampler.
    ///
    /// verl's `actor/reward_kl_penalty` and `actor/reward_kl_penalty_coeff` with the KL in the reward. With dynamic
    /// sampling `filter_groups/num_gen_batches`, `evicted_groups` and `discarded_surplus_groups`.
    pub metrics: Metrics,
    /// Every sample that was trained on, those of one prompt next to each other.
    pub samples: Vec<Sample>,
    /// Prompt and completion tokens of everything that was sampled.
    pub tokens: usize,
}

impl StepReport {
    /// Value of a metric; 0 when it is not there.
    pub fn metric(&self, name: &str) -> f64 {
        self.metrics.value(name).unwrap_or(0.0)
    }
}

/// What a step works with beside the policy.
pub struct StepContext<'a> {
    /// The run's configuration.
    pub config: &'a TrainConfig,
    /// The loss and who computes it.
    pub loss: &'a PolicyLoss,
    /// Where prompts come from.
    pub dataset: &'a mut Dataset,
    /// Judges.
    pub rewards: &'a Rewards,
    /// Sampler.
    pub engine: &'a mut dyn RolloutEngine,
    /// Reference for the KL; needed when [`TrainConfig::needs_reference`].
    pub reference: &'a mut Option<Decoder>,
    /// Coefficients that follow what is measured.
    pub coefficients: &'a mut Coefficients,
}

/// GRPO step number `step` (from 0). `policy` lives on a device with autodiff.
///
/// # Errors
/// Those of the data set, the engine, the advantages, the loss and the optimizer; [`crate::Error::TooFewGroups`] when
/// dynamic sampling has reached its limit; [`crate::Error::NotFinite`] when the loss is not finite.
pub fn grpo_step(
    mut policy: Decoder,
    optimizer: &mut AdamW,
    context: &mut StepContext<'_>,
    step: u64,
) -> Result<(Decoder, StepReport)> {
    let grpo = &context.config.grpo;
    let sampler = policy.valid();
    let mut metrics = Metrics::default();
    let sampled = generate::sample(&sampler, context, step, &mut metrics)?;
    record::record(&mut metrics, &sampled.all, context.rewards);
    let tokens = sampled.tokens();
    metrics.mean("num_tokens", tokens as f64, 1.0);
    let generation = Generation::new(&sampler, context, sampled.into_kept(), &mut metrics)?;
    let mut skipped = 0.0;
    for _ in 0..grpo.num_iterations {
        for rows in updates(grpo) {
            let applied;
            (policy, applied) = update::update_policy(policy, optimizer, context, &generation, rows, &mut metrics)?;
            if applied {
                follow(context.reference, &policy, optimizer.steps(), grpo)?;
            } else {
                skipped += 1.0;
            }
        }
    }
    if optimizer.skips() {
        metrics.mean("skipped_updates", skipped, 1.0);
    }
    Ok((policy, StepReport { step: step + 1, metrics, samples: generation.samples, tokens }))
}

/// The sequences of each optimizer step of one pass: whole groups, end to end.
fn updates(grpo: &GrpoConfig) -> impl Iterator<Item = Range<usize>> {
    let per_prompt = grpo.num_generations;
    split_evenly(grpo.prompts_per_step, grpo.steps_per_generation)
        .map(move |groups| groups.start * per_prompt..groups.end * per_prompt)
}
