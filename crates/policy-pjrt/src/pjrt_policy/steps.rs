//! Optimizer steps: gradients, updates, and both in one executable.

use super::PjrtPolicy;
use crate::error::Result;
use crate::program::Program;
use crate::train::{
    Applied, Device, Loss, LossHead, Moments, OtherOutputs, Rows, Scalars, StepOfState, Target, UploadedRows,
};
use grpo_core::backend_api::plan::step;
use grpo_core::{LossOutput, TokenBatch};
use grpo_policy::{RoutedExperts, RouterStatistics, Sequence, SequenceBatch, StepLoss, UpdateReport, imitation};
use std::borrow::Cow;
use std::sync::Arc;

impl PjrtPolicy {
    /// Adds the gradients of one of `count` micro-batches to the accumulators.
    pub(super) fn add(
        &mut self,
        batch: &SequenceBatch<'_>,
        loss: StepLoss,
        count: usize,
    ) -> Result<(LossOutput, RouterStatistics)> {
        self.weights()?;
        if self.sums.is_empty() {
            self.sums = self.optimizer.zeros(&self.runtime)?;
        }
        let aux_loss_factor = self.options.router_aux_loss_coef / count as f64;
        let Self { runtime, modules, grpo, cross_entropy, weights, sums, .. } = self;
        let target = Target::Sums { weights, sums };
        loss_of(Device { runtime, modules }, [grpo, cross_entropy], batch, loss, target, aux_loss_factor)
    }

    /// Computes the loss of a micro-batch and an optimizer step in one executable. Returns `None`, and changes nothing, unless bounds prove
    /// that weights and moments stay finite.
    pub(super) fn step_at_once(
        &mut self,
        batch: &SequenceBatch<'_>,
        loss: StepLoss,
        learning_rate: f64,
    ) -> Result<Option<(LossOutput, UpdateReport)>> {
        let (scalars, fresh) = self.scalars(learning_rate)?;
        if scalars.after.is_none() {
            return Ok(None);
        }
        let aux_loss_factor = self.options.router_aux_loss_coef;
        let Self { runtime, modules, grpo, cross_entropy, weights, moments, .. } = self;
        let mut applied = None;
        let step = StepOfState { weights, moments, fresh, scalars, applied: &mut applied };
        let on = Device { runtime, modules };
        let (mut output, routers) =
            loss_of(on, [grpo, cross_entropy], batch, loss, Target::Step(step), aux_loss_factor)?;
        routers.record(&mut output.metrics);
        let Some(mut applied) = applied else { unreachable!("a step always requests the gradient") };
        // The value loss and the load balancing loss are added on the host.
        applied.loss_is_finite &= output.loss.is_finite() || applied.is_applied();
        Ok(Some((output, self.finish_step(applied)?)))
    }

    pub(super) fn forget_gradient(&mut self) {
        (self.sums, self.has_gradient) = (Vec::new(), false);
    }

    /// Returns the scalars of the next step, and fresh moments if there are none.
    fn scalars(&mut self, learning_rate: f64) -> Result<(Scalars, Option<Moments>)> {
        let modules = &self.modules;
        let trained = self.weights()?.subset(|role| modules.decoder().trains(role));
        let mut fresh = None;
        let moments = match &self.moments {
            Some(moments) => moments,
            None => fresh.insert(self.optimizer.fresh(&self.runtime)?),
        };
        let step = self.steps + 1;
        let scalars = self.optimizer.scalars(&self.runtime, &self.settings, step, learning_rate, &trained, moments)?;
        Ok((scalars, fresh))
    }

    /// Returns the scalars of the next step, fresh moments if there are none, and the program.
    fn prepare(&mut self, learning_rate: f64) -> Result<(Scalars, Option<Moments>, Arc<Program>)> {
        let (scalars, fresh) = self.scalars(learning_rate)?;
        let program = self.optimizer.prepare(&self.runtime, &scalars)?;
        Ok((scalars, fresh, program))
    }

    pub(super) fn update(&mut self, learning_rate: f64) -> Result<UpdateReport> {
        if !self.has_gradient {
            return Err(grpo_policy::Error::argument("apply", "an accumulated gradient", "none").into());
        }
        let (scalars, fresh, program) = self.prepare(learning_rate).inspect_err(|_| self.forget_gradient())?;
        self.has_gradient = false;
        let sums = std::mem::take(&mut self.sums);
        let moments = Moments::taken(&mut self.moments, fresh);
        let (moments, applied, sums) = moments.apply(&mut self.weights, &program, &scalars, sums)?;
        (self.moments, self.sums) = (Some(moments), sums);
        self.finish_step(applied)
    }

    /// Builds the report of a step whose results are already in `self`.
    fn finish_step(&mut self, applied: Applied) -> Result<UpdateReport> {
        let grad_norm = applied.grad_norm;
        if applied.is_applied() {
            self.steps += 1;
            return Ok(UpdateReport { grad_norm, applied: true });
        }
        // Drop fresh moments if the first step was not applied.
        self.moments.take_if(|_| self.steps == 0);
        if !applied.loss_is_finite {
            // The caller sees the loss in the output.
            return Ok(UpdateReport { grad_norm, applied: false });
        }
        if applied.within {
            let what = "the weights, or the optimizer's moments, after the update".to_owned();
            return Err(grpo_policy::Error::NotFinite { what, step: self.steps + 1 }.into());
        }
        match self.settings.skips() {
            true => Ok(UpdateReport { grad_norm, applied: false }),
            false => Err(grpo_policy::Error::NotFinite { what: "the gradient".into(), step: self.steps }.into()),
        }
    }
}

/// Computes the loss of a micro-batch with the GRPO loss or the cross-entropy, plus `aux_loss_factor` times the load balancing loss; its
/// gradients go to `target`.
fn loss_of(
    on: Device<'_>,
    [grpo, cross_entropy]: [&mut Loss; 2],
    batch: &SequenceBatch<'_>,
    loss: StepLoss,
    target: Target<'_>,
    aux_loss_factor: f64,
) -> Result<(LossOutput, RouterStatistics)> {
    let (loss, tokens) = match loss {
        StepLoss::Grpo if grpo.of_values.is_none() && batch.tokens.value_targets().is_some() => {
            return Err(grpo_policy::Error::NoValueHead.into());
        }
        StepLoss::Grpo => (grpo, Cow::Borrowed(&batch.tokens)),
        StepLoss::CrossEntropy { tokens } => (cross_entropy, Cow::Owned(imitation(&batch.tokens, tokens)?)),
    };
    let rows = upload(on, batch.sequences, batch.routed_experts, &tokens)?;
    let (config, of_values) = (loss.config.clone(), loss.of_values.clone());
    let mut head = LossHead { loss, on, rows: &rows, aux_loss_factor, outputs: OtherOutputs::default() };
    let mut output = LossOutput::from(step(&config, &tokens, &mut head, target)?);
    output.loss += aux_loss_factor * head.outputs.aux_loss;
    rows.record_empty(&mut output.metrics);
    if let Some(of_values) = of_values {
        let of_values = of_values.compute(&head.outputs.values, &config, &tokens)?;
        output.loss += of_values.loss;
        output.value_loss += of_values.value_loss;
        output.metrics.merge(&of_values.metrics);
    }
    Ok((output, head.outputs.routers))
}

/// Copies the sequences of a micro-batch to the device, with their recorded experts, if any, after a check that `tokens` are their completion
/// tokens and within the vocabulary.
pub(super) fn upload(
    on: Device<'_>,
    sequences: &[Sequence],
    routed_experts: &[RoutedExperts],
    tokens: &TokenBatch,
) -> Result<UploadedRows> {
    let (config, rules) = (on.modules.decoder().config(), on.modules.decoder().axis_rules());
    let rows = Rows::new(config, sequences, rules)?;
    let mut rows = rows.with_routed_experts(config, sequences, routed_experts)?;
    rows.shape.sampling_mask = tokens.sampling_mask().is_some();
    let expected: usize = sequences.iter().map(|s| s.completion.len()).sum();
    if tokens.tokens() != expected {
        let expected = format!("the {expected} completion tokens of the sequences");
        return Err(grpo_policy::Error::argument("a micro-batch", expected, tokens.tokens()).into());
    }
    tokens.validate_targets(config.vocab_size)?;
    on.upload(&rows)
}
