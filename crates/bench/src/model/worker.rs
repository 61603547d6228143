//! The CPU policy's side of a measurement.

use super::job::{ModelJob, ModelTimes, Task, Time};
use crate::error::Result;
use crate::memory;
use grpo_backend_cpu::{CpuBackend, keep_freed_memory};
use grpo_core::{Implementation, LossConfig};
use grpo_models::ModelFolder;
use grpo_policy::{
    LogitsProcessors, Policy, RolloutRequest, Sampling, Sequence, SequenceBatch, StepLoss, StopCondition, token_batch,
};
use grpo_policy_cpu::{CpuPolicy, PolicyLoss};
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Loads the model and measures the job.
pub(crate) fn measure(job: &ModelJob) -> Result<ModelTimes> {
    // As `grpo train` does.
    keep_freed_memory();
    let folder = ModelFolder::open(&job.model)?;
    let max_tokens = match &job.task {
        Task::Generate { .. } => 0,
        Task::Update { completions, micro_batches, .. } => {
            completions.len().div_ceil(*micro_batches) * completions.first().map_or(0, Vec::len)
        }
    };
    let loss = PolicyLoss {
        config: LossConfig::default().into(),
        backend: Arc::new(CpuBackend::new().with_products(job.dtype)),
        implementation: Implementation::Fused,
        max_tokens,
    };
    let policy = CpuPolicy::from_weights(folder.config(), &folder.weights()?, loss)?.with_products(job.dtype)?;
    let can_reset = memory::reset_high_water();
    let times = match &job.task {
        Task::Generate { prompts, tokens } => generate(policy, prompts, *tokens),
        Task::Update { prompts, completions, advantages, micro_batches, learning_rate } => {
            let pairs = prompts.iter().zip(completions);
            let of = |(prompt, completion): (&Vec<u32>, &Vec<u32>)| Sequence {
                prompt: prompt.clone(),
                completion: completion.clone(),
            };
            update(policy, &pairs.map(of).collect::<Vec<_>>(), advantages, *micro_batches, *learning_rate)
        }
    }?;
    Ok(ModelTimes { peak_bytes: can_reset.and_then(|()| memory::high_water()), ..times })
}

fn generate(policy: CpuPolicy, prompts: &[Vec<u32>], tokens: usize) -> Result<ModelTimes> {
    let mut policy = policy.with_rollout_batch_size(prompts.len());
    // The first call allocates.
    sample(&mut policy, prompts, 2)?;
    sample(&mut policy, prompts, tokens)
}

/// Continues the prompts by a number of tokens, all of them together.
fn sample(policy: &mut CpuPolicy, prompts: &[Vec<u32>], tokens: usize) -> Result<ModelTimes> {
    let watch = FirstTokens { rows: prompts.len(), seen: AtomicUsize::new(0), all: OnceLock::new() };
    let request = RolloutRequest {
        prompts,
        num_generations: 1,
        max_completion_length: tokens,
        stop_ids: &[],
        stop: Some(&watch),
        sampling: Sampling::Random {
            temperature: 1.0,
            processors: LogitsProcessors::default(),
            seed: 1,
            purpose: grpo_rng::Purpose::Rollout,
            step: 0,
            first: 0,
        },
        return_sampling_mask: false,
        return_routed_experts: false,
        turn: None,
    };
    let began = Clock::now();
    let completions = policy.generate(&request)?;
    let ended = Clock::now();
    let first = *watch.all.get().unwrap_or(&ended);
    let digest = |sum: u64, id: &u32| sum.wrapping_mul(1_000_003).wrapping_add(u64::from(*id));
    let digest = completions.iter().flat_map(|completion| &completion.ids).fold(0, digest);
    Ok(ModelTimes {
        first_token: Some(first.since(began)),
        decode: ended.since(first),
        decoded: prompts.len() * (tokens - 1),
        whole: ended.since(began),
        digest: Some(format!("{digest:016x}")),
        ..ModelTimes::default()
    })
}

/// Notes when every sequence has its first token; no sequence ends.
#[derive(Debug)]
struct FirstTokens {
    rows: usize,
    seen: AtomicUsize,
    all: OnceLock<Clock>,
}

impl StopCondition for FirstTokens {
    fn is_met(&self, completion: &[u32]) -> grpo_policy::Result<bool> {
        if completion.len() == 1 && self.seen.fetch_add(1, Ordering::Relaxed) + 1 == self.rows {
            self.all.get_or_init(Clock::now);
        }
        Ok(false)
    }
}

fn update(
    mut policy: CpuPolicy,
    sequences: &[Sequence],
    advantages: &[f32],
    micro_batches: usize,
    learning_rate: f64,
) -> Result<ModelTimes> {
    let tokens = token_batch(sequences)?.with_advantages(advantages.to_vec())?;
    let tokens = LossConfig::default().prepare_step(&tokens)?;
    let rows = |i: usize| sequences.len() * i / micro_batches;
    let batch = |i: usize| {
        let rows = rows(i)..rows(i + 1);
        let tokens = tokens.select_sequences(rows.clone())?;
        Ok(SequenceBatch { sequences: &sequences[rows], tokens, routed_experts: &[] })
    };
    let batches = (0..micro_batches).map(batch).collect::<Result<Vec<_>>>()?;
    // The first step allocates the moments in freed memory of its activations, and the second step allocates activations again.
    let (_, first) = policy.step(&batches, StepLoss::Grpo, learning_rate)?;
    policy.step(&batches, StepLoss::Grpo, learning_rate)?;
    let (whole, step) = timed(|| policy.step(&batches, StepLoss::Grpo, learning_rate));
    step?;
    Ok(ModelTimes { whole, grad_norm: Some(first.grad_norm), ..ModelTimes::default() })
}

/// Wall time and the processor time of the process.
#[derive(Clone, Copy, Debug)]
struct Clock {
    wall: Instant,
    processor: f64,
}

impl Clock {
    fn now() -> Self {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        Self { wall: Instant::now(), processor: time.tv_sec as f64 + 1e-9 * time.tv_nsec as f64 }
    }

    fn since(self, earlier: Self) -> Time {
        let seconds = self.wall.duration_since(earlier.wall).as_secs_f64();
        Time { seconds, processor: self.processor - earlier.processor }
    }
}

/// Calls `f` and returns its time.
fn timed<T>(f: impl FnOnce() -> T) -> (Time, T) {
    let began = Clock::now();
    let result = f();
    (Clock::now().since(began), result)
}
