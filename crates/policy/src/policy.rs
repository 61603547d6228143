//! The [`Policy`] trait: the interface between the training loop and the weights.

use crate::error::Result;
use crate::optimizer::OptimizerSettings;
use crate::rollout::{Completion, RolloutRequest};
use crate::sequence::SequenceBatch;
use crate::state::{PolicyState, StateGroup, TensorSink, TensorSource};
use crate::update::{StepLoss, UpdateReport};
use grpo_core::{LossOutput, Scores};
use grpo_models::ModelConfig;

/// One of the two sets of weights that a policy holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// The weights of the policy, which are trained.
    Policy,
    /// The weights of the reference policy of the KL, which are frozen except for [`Policy::mix_ref_policy`].
    RefPolicy,
}

/// The weights, the optimizer and all computations on them. Implement it to train on other hardware or another model.
///
/// Only token ids, numbers per token `[N]` and named tensors of a checkpoint cross this interface. The policy owns the loss, its
/// configuration and its implementation, because a PJRT device compiles executables for it.
///
/// # Optimizer steps
/// [`Policy::accumulate`] adds the gradients of micro-batches to the policy's gradient accumulators. [`Policy::apply`] then clips the whole
/// gradient by its norm, takes one AdamW step and zeroes the accumulators; [`Policy::skip`] only zeroes them. [`Policy::step`] does both
/// for all micro-batches of a step.
///
/// # Roll back
/// [`Policy::begin`] saves the weights of both policies and the optimizer's state. If the step of a run fails, [`Policy::roll_back`]
/// restores them; if it succeeds, [`Policy::commit`] drops them.
///
/// # Optional methods
/// The methods of reference policy, roll back, checkpoints, value head and export have default implementations for a policy without them:
/// they return an error that names the missing capability. A run calls them only if its configuration needs them.
pub trait Policy: Send {
    /// Returns the number of trained weights.
    fn num_parameters(&self) -> usize;

    /// Returns the largest number of tokens of a sequence, prompt and completion together.
    fn context_length(&self) -> usize;

    /// Returns the dimensions of the model, for the metric `mfu`; `None`, the default, if there are none.
    fn model_config(&self) -> Option<&ModelConfig> {
        None
    }

    /// Returns the peak of matmuls of all devices of the policy together, in flop/s, for the metric `mfu`; `None`, the default, if it is not known.
    fn peak_flops(&self) -> Option<f64> {
        None
    }

    /// Samples `num_generations` completions for each prompt with the policy's weights. Completions of one prompt are contiguous. A sample
    /// does not depend on the other prompts of the request.
    ///
    /// # Errors
    /// [`crate::Error::Argument`] for a request without prompts, generations or tokens; [`crate::Error::TooLong`];
    /// [`crate::Error::Model`] for an unknown token.
    fn generate(&mut self, request: &RolloutRequest<'_>) -> Result<Vec<Completion>>;

    /// Returns log-probability and entropy `[N]` of every completion token of the micro-batches, concatenated, without gradients.
    ///
    /// They come from the tiles of the GRPO loss: for equal hidden states, they equal the values in [`Policy::accumulate`] bit for bit. If
    /// a model's forward pass rounds the same with and without gradients, on-policy ratios are exactly 1.
    ///
    /// # Errors
    /// [`crate::Error::Argument`] if there is no reference policy; errors of the model and of the loss.
    fn score(&mut self, of: Weights, batches: &[SequenceBatch<'_>]) -> Result<Scores>;

    /// Returns `true` if there is a value head: a linear layer on the hidden states, which PPO trains together with the policy.
    fn has_value_head(&self) -> bool {
        false
    }

    /// Returns the value `[N]` of the state before every completion token of the micro-batches, concatenated, without gradients. It is the
    /// output of the value head for the hidden state that predicts the token.
    ///
    /// # Errors
    /// [`crate::Error::NoValueHead`]; errors of the model.
    fn values(&mut self, batches: &[SequenceBatch<'_>]) -> Result<Vec<f32>> {
        let _ = batches;
        Err(crate::Error::NoValueHead)
    }

    /// Computes the loss of the micro-batches and adds its gradients to the accumulators. Losses and metrics are summed over the
    /// micro-batches, scores are concatenated.
    ///
    /// A policy with a value head adds the value loss of the batches' [`grpo_core::TokenBatch::value_targets`] to [`StepLoss::Grpo`].
    ///
    /// Micro-batches of one call may run concurrently; gradients are added in order, so equal calls give equal bits. A loss that is not
    /// finite is no error: it is visible in the output and in the gradient norm.
    ///
    /// # Errors
    /// Errors of the model and of the loss; [`crate::Error::NoValueHead`] for value targets without a value head;
    /// [`crate::Error::Argument`] for a value head without value targets. The accumulators are then zero.
    fn accumulate(&mut self, batches: &[SequenceBatch<'_>], loss: StepLoss) -> Result<LossOutput>;

    /// Clips the accumulated gradient by its norm, updates the weights, and zeroes the accumulators.
    ///
    /// With [`OptimizerSettings::skip_grad_norm`], a gradient whose norm exceeds the limit or is not finite is not applied: weights, moments and
    /// the number of optimizer steps stay the same, and the report has `applied: false`.
    ///
    /// # Errors
    /// [`crate::Error::NotFinite`] if the gradient, or the resulting weights or moments, are not finite; [`crate::Error::Argument`] if
    /// nothing was accumulated. Weights and optimizer are then unchanged, and the accumulators are zero.
    fn apply(&mut self, learning_rate: f64) -> Result<UpdateReport>;

    /// Runs an optimizer step on these micro-batches: [`Policy::accumulate`], then [`Policy::apply`]. If the loss, or a score of an active
    /// token, is not finite, [`Policy::skip`] runs instead of `apply`, and the report has `applied: false`.
    ///
    /// A PJRT policy may run both in one executable.
    ///
    /// # Errors
    /// Errors of the three methods.
    fn step(
        &mut self,
        batches: &[SequenceBatch<'_>],
        loss: StepLoss,
        learning_rate: f64,
    ) -> Result<(LossOutput, UpdateReport)> {
        accumulate_and_apply(self, batches, loss, learning_rate)
    }

    /// Zeroes the accumulators without an update; the report has the norm of the dropped gradient.
    ///
    /// # Errors
    /// Errors of the device.
    fn skip(&mut self) -> Result<UpdateReport>;

    /// Resets the optimizer: zero moments, zero steps, zero accumulators.
    ///
    /// # Errors
    /// Errors of the device.
    fn reset_optimizer(&mut self, config: &OptimizerSettings) -> Result<()>;

    /// Returns the number of optimizer steps since [`Policy::reset_optimizer`]; skipped updates do not count.
    fn optimizer_steps(&self) -> u64;

    /// Returns `true` if there is a reference policy.
    fn has_ref_policy(&self) -> bool {
        false
    }

    /// Copies the current weights to the reference policy.
    ///
    /// # Errors
    /// Errors of the device; [`crate::Error::Argument`] for a policy that cannot keep a reference policy.
    fn freeze_ref_policy(&mut self) -> Result<()> {
        Err(without("freeze_ref_policy", "a reference policy, for loss.beta or grpo.use_kl_in_reward"))
    }

    /// Updates the reference policy: ref = alpha x policy + (1 - alpha) x ref, with alpha in [0, 1].
    ///
    /// # Errors
    /// [`crate::Error::Argument`] if there is no reference policy.
    fn mix_ref_policy(&mut self, alpha: f64) -> Result<()> {
        let _ = alpha;
        Err(without("mix_ref_policy", "a reference policy, for grpo.sync_ref_model"))
    }

    /// Saves weights, reference policy and optimizer state; replaces an earlier save.
    ///
    /// # Errors
    /// Errors of the device; [`crate::Error::Argument`] for a policy that cannot save its state.
    fn begin(&mut self) -> Result<()> {
        Err(without("begin", "roll back, for steps of several updates"))
    }

    /// Drops the state saved by [`Policy::begin`].
    fn commit(&mut self) {}

    /// Restores the state saved by [`Policy::begin`] and zeroes the accumulators.
    ///
    /// # Errors
    /// [`crate::Error::State`] if no state is saved; the run must then continue from a checkpoint.
    fn roll_back(&mut self) -> Result<()> {
        Err(crate::Error::state("the policy", "a state saved by `begin`", "none"))
    }

    /// Passes a group of tensors to `sink`, one by one, in a fixed order.
    ///
    /// The optimizer's tensors are the first and second moments, `exp_avg.NAME` and `exp_avg_sq.NAME`, or their codes and scales
    /// ([`crate::moment_tensors`]); before the first step there are none. There are none either for a missing reference policy.
    ///
    /// # Errors
    /// Errors of the sink and of the device.
    fn export(&self, group: StateGroup, sink: &mut dyn TensorSink) -> Result<()> {
        let _ = (group, sink);
        Err(without("export", "checkpoints"))
    }

    /// Passes the weights of a model folder to `sink`, one by one, with the names and layout of `transformers`. Adapters are merged into
    /// their matrices. If the head is tied to the embedding and has an adapter, the merged head becomes a separate `lm_head.weight`, and
    /// the embedding is not changed.
    ///
    /// # Errors
    /// Errors of the sink and of the device; [`crate::Error::Argument`] if `transformers` does not have the model, which is the default
    /// implementation.
    fn export_model(&self, sink: &mut dyn TensorSink) -> Result<()> {
        let _ = sink;
        Err(without("export_model", "a model of transformers"))
    }

    /// Passes the adapters to `sink`, one by one, with the names and layout of PEFT.
    ///
    /// # Errors
    /// Errors of the sink and of the device; [`crate::Error::Argument`] if the policy has no adapters.
    fn export_adapter(&self, sink: &mut dyn TensorSink) -> Result<()> {
        let _ = sink;
        Err(without("export_adapter", "LoRA adapters"))
    }

    /// Restores exported tensors, in any order; training then continues bit for bit. Names and shapes are checked first, then values are
    /// read tensor by tensor: a PJRT policy uploads each tensor before it reads the next.
    ///
    /// # Errors
    /// [`crate::Error::State`] if a name or a shape does not fit; nothing is changed then. If the source fails later, while its values are
    /// read, the CPU policy may be partly restored: the source's error is returned, and the policy must be imported again.
    fn import(&mut self, state: &PolicyState<'_>) -> Result<()> {
        let _ = state;
        Err(without("import", "checkpoints"))
    }

    /// Imports weights only, as [`Policy::import`] does. The optimizer and the reference policy stay the same; the gradient accumulators
    /// become zero.
    ///
    /// # Errors
    /// See [`Policy::import`].
    fn import_weights(&mut self, weights: &dyn TensorSource) -> Result<()> {
        let _ = weights;
        Err(without("import_weights", "checkpoints"))
    }
}

/// Returns the error of a default implementation, for a policy without the capability that `operation` needs.
fn without(operation: &'static str, capability: &str) -> crate::Error {
    crate::Error::argument(operation, format!("a policy with {capability}"), "one without")
}

/// Runs [`Policy::step`] as two calls, for policies without a fused step, or for micro-batches that a fused step does not support.
///
/// # Errors
/// See [`Policy::step`].
pub fn accumulate_and_apply<P: Policy + ?Sized>(
    policy: &mut P,
    batches: &[SequenceBatch<'_>],
    loss: StepLoss,
    learning_rate: f64,
) -> Result<(LossOutput, UpdateReport)> {
    let output = policy.accumulate(batches, loss)?;
    let report = match is_finite(&output, batches) {
        true => policy.apply(learning_rate)?,
        false => policy.skip()?,
    };
    Ok((output, report))
}

/// Returns `true` if the loss is finite and all available scores of active tokens are finite.
fn is_finite(output: &LossOutput, batches: &[SequenceBatch<'_>]) -> bool {
    let Scores { logp, entropy } = &output.scores;
    let is_finite = |row: usize| [logp, entropy].iter().all(|list| list.get(row).is_none_or(|x| x.is_finite()));
    let mut end = 0;
    output.loss.is_finite()
        && batches.iter().all(|SequenceBatch { tokens, .. }| {
            let first = end;
            end += tokens.tokens();
            tokens.active_rows().iter().all(|row| is_finite(first + row))
        })
}
