//! The trait between the training loop and what holds the weights.

use crate::adamw::AdamWConfig;
use crate::error::Result;
use crate::rollout::{Completion, RolloutRequest};
use crate::sequence::SequenceBatch;
use crate::state::{PolicyState, StateGroup, TensorSink, TensorSource};
use crate::update::{StepLoss, UpdateReport};
use grpo_core::{LossOutput, Scores};

/// One of the two sets of weights that a policy holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// Those of the policy, which are trained.
    Policy,
    /// Those of the reference policy of the KL, which move only when [`Policy::mix_ref_policy`] says so.
    RefPolicy,
}

/// The weights, the optimizer and everything that runs on them. Implement it to train elsewhere or another model.
///
/// Only token ids, numbers per token `[N]` and named tensors of a checkpoint cross this seam. The loss, with its
/// configuration and who computes it, is the policy's own, because a device compiles programs for it.
///
/// # Optimizer steps
/// [`Policy::accumulate`] adds the gradients of micro-batches into sums that stay in the policy. [`Policy::apply`] then
/// clips the whole gradient by its norm, takes one step of AdamW and sets the sums to zero; [`Policy::skip`] only sets them
/// to zero. [`Policy::step`] is both for the micro-batches of a whole step.
///
/// # Going back
/// [`Policy::begin`] remembers the weights of both policies and the optimizer's state; [`Policy::roll_back`] goes back to
/// them when the step of a run has failed, [`Policy::commit`] forgets them when it has not.
pub trait Policy: Send {
    /// The number of weights that are trained.
    fn num_parameters(&self) -> usize;

    /// The largest number of tokens of a sequence, prompt and completion together.
    fn context_length(&self) -> usize;

    /// `num_generations` completions for each prompt, sampled from the policy's weights; those of one prompt stand next to
    /// each other. A sample does not depend on the prompts beside it.
    ///
    /// # Errors
    /// [`crate::Error::Argument`] for a request without prompts, generations or tokens; [`crate::Error::TooLong`];
    /// [`crate::Error::Model`] for an unknown token.
    fn generate(&mut self, request: &RolloutRequest<'_>) -> Result<Vec<Completion>>;

    /// Log-probability and entropy `[N]` of every completion token of the micro-batches, end to end, without gradients.
    ///
    /// They come from the tiles of the GRPO loss: for equal hidden states they are, bit for bit, those that
    /// [`Policy::accumulate`] works with. A model whose forward pass rounds alike with and without gradients has on-policy
    /// ratios of exactly 1.
    ///
    /// # Errors
    /// [`crate::Error::Argument`] when there is no reference policy; otherwise those of the model and of the loss.
    fn score(&mut self, of: Weights, batches: &[SequenceBatch<'_>]) -> Result<Scores>;

    /// Whether there is a value head, which PPO trains with the policy: a linear layer on the hidden states.
    fn has_value_head(&self) -> bool {
        false
    }

    /// Value `[N]` of the state before every completion token of the micro-batches, end to end, without gradients: what the value
    /// head makes of the hidden states that predict the token.
    ///
    /// # Errors
    /// [`crate::Error::NoValueHead`]; otherwise those of the model.
    fn values(&mut self, batches: &[SequenceBatch<'_>]) -> Result<Vec<f32>> {
        let _ = batches;
        Err(crate::Error::NoValueHead)
    }

    /// The loss of the micro-batches, whose gradients are added to the sums. Values and metrics are summed over the
    /// micro-batches, scores stand end to end.
    ///
    /// A policy with a value head adds the value loss to [`StepLoss::Grpo`], of the batches' [`grpo_core::TokenBatch::value_targets`].
    ///
    /// Micro-batches of one call may run at the same time; they are added in order, so that the same call gives the same
    /// bits. A loss that is not finite is no error: the caller sees it in the output, and in the gradient's norm.
    ///
    /// # Errors
    /// Those of the model and of the loss; [`crate::Error::NoValueHead`] for value targets that nothing trains on, and
    /// [`crate::Error::Argument`] where a value head has none. The sums are then zero.
    fn accumulate(&mut self, batches: &[SequenceBatch<'_>], loss: StepLoss) -> Result<LossOutput>;

    /// Clips the accumulated gradient by its norm, updates the weights, and sets the sums to zero.
    ///
    /// With [`AdamWConfig::skip_grad_norm`] a gradient whose norm is above it or not finite is not applied: weights, moments
    /// and the number of optimizer steps stay, and the report says so.
    ///
    /// # Errors
    /// [`crate::Error::NotFinite`] when the gradient is not finite, or the weights or moments that it leads to;
    /// [`crate::Error::Argument`] when nothing was accumulated. Weights and optimizer are then unchanged, the sums zero.
    fn apply(&mut self, learning_rate: f64) -> Result<UpdateReport>;

    /// An optimizer step on these micro-batches: [`Policy::accumulate`], then [`Policy::apply`], or [`Policy::skip`] where the loss, or a
    /// score of a token that counts, is not finite. The report then says that nothing was applied, and the caller sees the loss.
    ///
    /// A policy on a device may have one program for both.
    ///
    /// # Errors
    /// Those of the three.
    fn step(
        &mut self,
        batches: &[SequenceBatch<'_>],
        loss: StepLoss,
        learning_rate: f64,
    ) -> Result<(LossOutput, UpdateReport)> {
        accumulate_and_apply(self, batches, loss, learning_rate)
    }

    /// Sets the sums to zero without an update; the report has the norm of the gradient that is dropped.
    ///
    /// # Errors
    /// Those of the device.
    fn skip(&mut self) -> Result<UpdateReport>;

    /// Takes a fresh optimizer: moments of zero, no steps done, sums of zero.
    ///
    /// # Errors
    /// Those of the device.
    fn reset_optimizer(&mut self, config: &AdamWConfig) -> Result<()>;

    /// The number of optimizer steps since [`Policy::reset_optimizer`]; a skipped update is none.
    fn optimizer_steps(&self) -> u64;

    /// Whether there is a reference policy.
    fn has_ref_policy(&self) -> bool;

    /// Makes the present weights those of the reference policy, too.
    ///
    /// # Errors
    /// Those of the device.
    fn freeze_ref_policy(&mut self) -> Result<()>;

    /// Moves the reference policy: ref = alpha x policy + (1 - alpha) x ref, with alpha in [0, 1].
    ///
    /// # Errors
    /// [`crate::Error::Argument`] when there is no reference policy.
    fn mix_ref_policy(&mut self, alpha: f64) -> Result<()>;

    /// Remembers weights, reference policy and optimizer in the place of what was remembered before.
    ///
    /// # Errors
    /// Those of the device.
    fn begin(&mut self) -> Result<()>;

    /// Forgets what [`Policy::begin`] has remembered.
    fn commit(&mut self);

    /// Goes back to what [`Policy::begin`] has remembered, and sets the sums to zero.
    ///
    /// # Errors
    /// [`crate::Error::State`] when there is nothing to go back to; the run then continues from a checkpoint.
    fn roll_back(&mut self) -> Result<()>;

    /// Hands a group of tensors to `sink`, one by one, in an order that does not change.
    ///
    /// Of the optimizer these are the first and second moments, called `exp_avg.NAME` and `exp_avg_sq.NAME`; before the first
    /// step it has none. A reference policy that is not there has none either.
    ///
    /// # Errors
    /// Those of the sink and of the device.
    fn export(&self, group: StateGroup, sink: &mut dyn TensorSink) -> Result<()>;

    /// Hands the weights to `sink` as `transformers` has them, by its names and in its layout, one by one: what a model folder is written
    /// from. Adapters are merged into them; of a head that is the embedding, too, and has an adapter, there is then a `lm_head.weight`
    /// beside the embedding, which stays what it is.
    ///
    /// # Errors
    /// Those of the sink and of the device; [`crate::Error::Argument`] for a policy whose model `transformers` does not have, which is
    /// what a policy says that does not implement it.
    fn export_model(&self, sink: &mut dyn TensorSink) -> Result<()> {
        let _ = sink;
        Err(crate::Error::argument("export_model", "a policy with a model of transformers", "one without"))
    }

    /// Hands the adapters to `sink` as PEFT has them, by its names and in its layout, one by one.
    ///
    /// # Errors
    /// Those of the sink and of the device; [`crate::Error::Argument`] for a policy without adapters.
    fn export_adapter(&self, sink: &mut dyn TensorSink) -> Result<()> {
        let _ = sink;
        Err(crate::Error::argument("export_adapter", "a policy with LoRA adapters", "one without"))
    }

    /// Continues from tensors that were exported, whatever their order; bit for bit as if the policy had not stopped. Names and shapes are
    /// looked at first, and then values are read tensor by tensor: a policy on a device brings each there before it reads the next.
    ///
    /// # Errors
    /// [`crate::Error::State`] when a name or a shape does not fit; nothing is changed then. A source that fails to give values which it had
    /// when they were looked at may leave a policy on the host in between: its error is returned, and the policy is to be imported again.
    fn import(&mut self, state: &PolicyState<'_>) -> Result<()>;

    /// Takes other weights, as [`Policy::import`] does. Optimizer and reference policy stay what they are; sums of gradients become zero.
    ///
    /// # Errors
    /// As [`Policy::import`].
    fn import_weights(&mut self, weights: &dyn TensorSource) -> Result<()>;
}

/// [`Policy::step`] in two calls: what a policy does that has nothing better, or not for these micro-batches.
///
/// # Errors
/// As [`Policy::step`].
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

/// Whether the loss of the micro-batches is finite, and so are the scores of their tokens that count, where the loss has any.
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
