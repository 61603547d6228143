//! Estimated times of a whole step.

use crate::{ProgramName, RunPrograms};
use grpo_backend_tpu::aot::{Chip, Report};
use grpo_planner::is_one_program;
use serde::Serialize;

/// Time estimates of a step whose programs run one after the other, without the host's work.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Times {
    /// The time of an update: gradients of its micro-batches, and AdamW.
    pub update_seconds: f64,
    /// The parts of an update by name; they add up to it. The head is a program of its own. The layers are loops with as many iterations as
    /// the model has layers; the MLP is twice the difference to a program with half its width, and attention with its projections is the
    /// rest; without such a program, `layers` are one part. On a mesh, the head is the loop over chunks of tokens in the update. If an update is one program, the optimizer is the time of
    /// the separate AdamW program.
    pub shares: Vec<(String, f64)>,
    /// Tokens of rows per second of an update.
    pub update_tokens_per_second: f64,
    /// FLOPs of the model (6 x matmul parameters x tokens, and causal attention, without rematerialisation) per second of an update, divided by
    /// the peak of all devices.
    pub utilisation: f64,
    /// The time of a rollout of as many sequences as decode in parallel, each of full length.
    pub rollout_seconds: f64,
    /// The mean time of a decode step, which adds a token to every sequence.
    pub token_seconds: f64,
    /// Completion tokens per second of a rollout.
    pub rollout_tokens_per_second: f64,
    /// The time of a step: rollout, scores, updates, as often as configured.
    pub step_seconds: f64,
}

impl RunPrograms {
    /// Returns the time of an update from the reports of its programs; `None` if one is missing or has no estimate.
    pub fn update_seconds<'a>(&self, report: impl Fn(ProgramName) -> Option<&'a Report>) -> Option<f64> {
        let time = |name| report(name)?.estimate_seconds;
        match is_one_program(&self.config) {
            true => time(ProgramName::Step),
            false => Some(self.sizes().micro_batches as f64 * time(ProgramName::Gradient)? + time(ProgramName::Apply)?),
        }
    }

    /// Returns the times from the reports of all programs; `None` if one is missing or has no estimate.
    pub fn times<'a>(&self, report: impl Fn(ProgramName) -> Option<&'a Report>, chip: Chip) -> Option<Times> {
        let sizes = self.sizes();
        let time = |name| report(name)?.estimate_seconds;
        let (apply, micro_batches) = (time(ProgramName::Apply)?, sizes.micro_batches as f64);
        let (update_program, gradient) = match is_one_program(&self.config) {
            true => (ProgramName::Step, time(ProgramName::Step)? - apply),
            false => (ProgramName::Gradient, time(ProgramName::Gradient)?),
        };
        // The loops over layers, and loops nested in them.
        let layer_seconds = |name| -> Option<f64> {
            let loops = &report(name)?.loops;
            let outer = loops.iter().filter(|l| l.trips == Some(sizes.layers as u64) && l.begins == Some(1));
            let inner = loops.iter().filter(|l| l.begins.is_some_and(|begins| begins > 1));
            let iterations =
                |l: &grpo_backend_tpu::aot::LoopReport| Some(l.body_seconds? * (l.trips? * l.begins?) as f64);
            let more = |l: &grpo_backend_tpu::aot::LoopReport| {
                Some(l.body_seconds? * (l.trips?.saturating_sub(1) * l.begins?) as f64)
            };
            let outer = outer.map(iterations).sum::<Option<f64>>()?;
            Some(outer + inner.map(more).sum::<Option<f64>>()?)
        };
        let layers = layer_seconds(update_program)?;
        let mlp = match self.names().contains(&ProgramName::HalfMlp) {
            true => Some(2.0 * (layers - layer_seconds(ProgramName::HalfMlp)?)),
            false => None,
        };
        let head = match self.meshes() {
            None => time(ProgramName::Head)?,
            Some(_) => head_seconds(report(update_program)?, sizes.layers)?,
        };
        let update_seconds = self.update_seconds(&report)?;
        let part = |what: &str, seconds: f64| (what.to_owned(), micro_batches * seconds);
        let mut shares = match mlp {
            Some(mlp) => vec![part("MLP", mlp), part("attention", layers - mlp)],
            None => vec![part("layers", layers)],
        };
        shares.extend([part("head", head), part("embedding, sums, rest", gradient - layers - head)]);
        shares.push(("optimizer".to_owned(), apply));
        let tokens = micro_batches * (sizes.rows * sizes.length) as f64;
        let flops = self.passes() * micro_batches * self.forward_flops().iter().sum::<f64>();

        let calls = self.decode_calls();
        let decode = calls.iter().map(|(name, count)| Some(*count as f64 * time(*name)?)).sum::<Option<f64>>()?;
        let decode_steps = calls.values().sum::<usize>() * sizes.tokens_per_call;
        // The number of samples that an admission starts depends on data; its time is only that of a few copies.
        let rollout_seconds = time(ProgramName::Prefill)? + time(ProgramName::Admit).unwrap_or(0.0) + decode;
        let completion_tokens = (sizes.slots * sizes.completion) as f64;
        let rollouts = sizes.sequences.div_ceil(sizes.slots) as f64;
        let batches = sizes.sequences.div_ceil(self.config.grpo.micro_batch_sequences()) as f64;
        let scores = sizes.scorings as f64 * batches * time(ProgramName::Score)?;
        let updates = sizes.updates as f64 * update_seconds;
        Some(Times {
            update_seconds,
            shares,
            update_tokens_per_second: tokens / update_seconds,
            utilisation: flops / update_seconds / (chip.peak_flops * sizes.devices as f64),
            rollout_seconds,
            token_seconds: decode / decode_steps.max(1) as f64,
            rollout_tokens_per_second: completion_tokens / rollout_seconds,
            step_seconds: rollouts * rollout_seconds + scores + updates,
        })
    }
}

/// Returns the time of the loops over chunks of tokens, which are neither loops over layers nor nested in one.
fn head_seconds(report: &Report, layers: usize) -> Option<f64> {
    let loops = report.loops.iter().filter(|l| l.begins == Some(1) && l.trips != Some(layers as u64));
    loops.map(|l| Some(l.body_seconds? * l.trips? as f64)).sum()
}
