//! A GRPO step: rollout, rewards, advantages, then optimizer steps on the generated batch.

mod advantage;
mod context;
mod generate;
mod passes;
mod record;
mod report;
mod sample;
mod speed;
mod times;
mod update;

pub(crate) use context::StepContext;
pub use report::StepReport;
pub use sample::Sample;
pub use speed::Speed;
pub use times::PhaseTimes;

use crate::error::Result;
use advantage::Generation;
use grpo_core::Metrics;
use passes::updates;
use std::time::Instant;

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
