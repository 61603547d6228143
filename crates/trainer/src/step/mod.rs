//! A GRPO step: rollout, rewards, advantages, then optimizer steps on the generated batch.

mod advantage;
mod generate;
mod record;
mod speed;
mod update;

use crate::ahead::Ahead;
use crate::coefficients::Coefficients;
use crate::error::Result;
use crate::factory::Parts;
use crate::micro_batch::split_evenly;
use crate::updates::Updates;
pub use speed::Speed;

use advantage::Generation;
use grpo_core::{LossConfig, Metrics};
use grpo_policy::WeightVersion;
use grpo_rewards::{Failures, Reward};
use grpo_run_config::{GrpoConfig, TrainConfig};
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

/// A sampled completion with its reward and advantage.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The name of the task.
    pub task: String,
    /// The text of the prompt.
    pub prompt: String,
    /// The reference answer.
    pub answer: String,
    /// The text that the policy wrote, without EOS; with environments, the whole conversation with special tokens.
    pub completion: String,
    /// `true` if the length limit cut the completion off.
    pub truncated: bool,
    /// The rewards of the completion, without the KL penalty.
    pub reward: Reward,
    /// The advantage of the completion, scaled by `grpo.advantage_scale`; with per-token advantages, their mean.
    pub advantage: f32,
    /// The weights that the tokens were sampled from, by the number of GRPO steps that had trained them; empty if all tokens were sampled from
    /// the weights at the start of the step.
    pub weight_versions: Vec<WeightVersion>,
}

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

/// The inputs and state of a step.
pub(crate) struct StepContext<'a> {
    pub(crate) config: &'a TrainConfig,
    /// The configuration of the loss, from [`TrainConfig::loss`].
    pub(crate) loss: &'a LossConfig,
    /// The policy needs a reference policy if a KL to it is configured.
    pub(crate) parts: &'a mut Parts,
    /// Counts of consecutive failures of reward functions, over all steps.
    pub(crate) failures: &'a mut Failures,
    pub(crate) updates: &'a mut Updates,
    pub(crate) coefficients: &'a mut Coefficients,
    /// Batches that are sampled in the background.
    pub(crate) ahead: &'a mut Ahead,
}

/// Does GRPO step number `step` (from 0).
///
/// # Errors
/// The errors of [`crate::Trainer::grpo_step`]. The policy may then be in the middle of the step; [`grpo_policy::Policy::roll_back`] restores it.
pub(crate) fn grpo_step(context: &mut StepContext<'_>, step: u64) -> Result<StepReport> {
    let grpo = &context.config.grpo;
    let (mut metrics, mut times) = (Metrics::default(), PhaseTimes::default());
    let sampled = generate::sample(context, step, &mut metrics, &mut times)?;
    let has_agents = context.parts.environments.has_agents();
    record::record(&mut metrics, &sampled.all, &context.parts.rewards, context.config, has_agents);
    let tokens = sampled.tokens();
    metrics.mean("num_tokens", tokens as f64, 1.0);
    let sampled_tokens = sampled.sampled_tokens();
    let generation = Generation::new(context, sampled.into_kept(), &mut metrics, &mut times)?;
    let mut skipped = 0.0;
    let began = Instant::now();
    for _ in 0..grpo.num_iterations {
        for rows in updates(grpo) {
            if !update::update_policy(context, &generation, rows, &mut metrics)? {
                skipped += 1.0;
                continue;
            }
            // TR-DPO, arXiv 2404.09656; as in TRL's SyncRefModelCallback, optimizer steps count from 1.
            let policy = &mut context.parts.policy;
            let is_due = grpo.sync_ref_model && policy.optimizer_steps().is_multiple_of(grpo.ref_model_sync_steps);
            if is_due {
                policy.mix_ref_policy(grpo.ref_model_mixup_alpha)?;
            }
        }
    }
    let update_seconds = began.elapsed().as_secs_f64();
    times.add("update_actor", began.elapsed());
    let speed = Speed::new(context, &generation, sampled_tokens, times.seconds("gen"), update_seconds);
    if context.updates.skips() {
        metrics.mean("skipped_updates", skipped, 1.0);
    }
    Ok(StepReport { step: step + 1, metrics, samples: generation.samples, tokens, times, speed })
}

/// Seconds of wall time by phase, by verl's names: `update_weights` (sending them to the engine), `gen` (sampling), `environments` (their
/// answers while nothing is sampled), `reward`, `old_log_prob` and `ref` (scoring), `values`, `adv`, `update_actor` (forward, loss, backward and the optimizer). Phases
/// that a step does not have are missing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PhaseTimes(BTreeMap<&'static str, f64>);

impl PhaseTimes {
    /// Adds time to a phase.
    pub(crate) fn add(&mut self, phase: &'static str, time: Duration) {
        *self.0.entry(phase).or_default() += time.as_secs_f64();
    }

    /// Makes `time`, which was added to phase `of`, a phase of its own.
    fn part(&mut self, phase: &'static str, of: &'static str, time: Duration) {
        *self.0.entry(of).or_default() -= time.as_secs_f64();
        *self.0.entry(phase).or_default() += time.as_secs_f64();
    }

    /// Returns the seconds of a phase.
    fn seconds(&self, phase: &str) -> Option<f64> {
        self.0.get(phase).copied()
    }

    /// Calls `work` and adds its time to a phase.
    fn time<T>(&mut self, phase: &'static str, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = work();
        self.add(phase, began.elapsed());
        result
    }

    /// Returns the phases and their seconds, as metrics `timing_s/PHASE`.
    pub fn metrics(&self) -> impl Iterator<Item = (String, f64)> + '_ {
        self.0.iter().map(|(phase, seconds)| (format!("timing_s/{phase}"), *seconds))
    }
}

/// Returns the samples of each optimizer step of one pass: contiguous whole groups.
fn updates(grpo: &GrpoConfig) -> impl Iterator<Item = Range<usize>> {
    let per_prompt = grpo.num_generations;
    split_evenly(grpo.prompts_per_step, grpo.steps_per_generation)
        .map(move |groups| groups.start * per_prompt..groups.end * per_prompt)
}

/// Returns the sequences of every micro-batch of a pass. `sample_of` has the sample of each sequence.
fn pass_micro_batches<'a>(grpo: &'a GrpoConfig, sample_of: &'a [usize]) -> impl Iterator<Item = Range<usize>> + 'a {
    updates(grpo).flat_map(|samples| micro_batches(grpo, advantage::rows_of(sample_of, samples)))
}

/// Returns the sequences of every micro-batch of an update with the sequences `rows`. Micro-batches have at most
/// [`GrpoConfig::micro_batch_sequences`] sequences, also if conversations of agents have several rows.
fn micro_batches(grpo: &GrpoConfig, rows: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let parts = grpo.gradient_accumulation_steps.max(rows.len().div_ceil(grpo.micro_batch_sequences().max(1)));
    split_evenly(rows.len(), parts).map(move |part| rows.start + part.start..rows.start + part.end)
}
