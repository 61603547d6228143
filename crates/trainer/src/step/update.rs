//! One optimizer step on a part of the generated batch.

use super::advantage::Generation;
use super::context::StepContext;
use super::passes::{micro_batches, rows_of};
use super::sample::Sample;
use crate::error::{Error, Result};
use crate::micro_batch::sequence_batches;
use crate::updates::check_scores;
use grpo_core::batch::{Rows, StepData};
use grpo_core::controllers::AdaptiveEntropy;
use grpo_core::{LossOutput, Metric, Metrics, Scores, TokenBatch, record_sampler_difference};
use grpo_policy::{StepLoss, Weights};
use std::ops::Range;

/// Does one optimizer step on the sequences of `samples`. Returns `true` if it was applied, `false` if skipped.
pub(super) fn update_policy(
    context: &mut StepContext<'_>,
    generation: &Generation,
    samples: Range<usize>,
    metrics: &mut Metrics,
) -> Result<bool> {
    let grpo = &context.config.grpo;
    let rows = rows_of(&generation.sample_of, samples);
    let sample = |row: usize| &generation.samples[generation.sample_of[row]];
    let whole = generation.batch.select_independent(rows.clone())?;
    let sequences = &generation.sequences[rows.clone()];
    let all_experts = &generation.routed_experts;
    let routed_experts = if all_experts.is_empty() { &[][..] } else { &all_experts[rows.clone()] };
    let (loss, policy) = (context.loss, &mut *context.parts.policy);
    let split = || micro_batches(grpo, 0..rows.len());
    // Masked truncated completions do not count (as in TRL).
    let counts = |row: &usize| !(loss.mask_truncated_completions && sample(*row).truncated);
    let tokens: usize = (0..generation.sequences.len()).filter(counts).map(|row| generation.batch.active_in(row)).sum();
    let those = |is: fn(&Sample) -> bool| {
        let indices = (0..rows.len()).filter(|row| is(sample(rows.start + row))).collect();
        Rows::Indices(indices)
    };
    let whole = whole.with_step(StepData {
        truncated_rows: those(|sample| sample.truncated),
        positive_rows: those(|sample| sample.reward.total.is_some_and(|reward| reward > 0.0)),
        // dapo and cispo divide by the tokens of the generation batch, split evenly over its updates. With an update's own count, tokens
        // of an update with fewer tokens would weigh more.
        num_items_in_batch: Some(tokens as f64 / grpo.steps_per_generation as f64),
        entropy_coef: context.coefficients.entropy.as_ref().map(AdaptiveEntropy::coef),
        ..StepData::default()
    })?;
    // Tokens are chosen over the whole update, independent of micro-batches.
    let mut chosen_from = None;
    let scored = |batch: &TokenBatch| {
        let parts = sequence_batches(sequences, routed_experts, batch, split())?;
        let scores = policy.score(Weights::Policy, &parts)?;
        check_scores("Policy::score", &scores, &parts)?;
        chosen_from = Some(scores.clone());
        Ok::<_, Error>(scores.into())
    };
    let whole = loss.prepare(&whole, scored)?.into_owned();
    if let Some(factors) = whole.factors() {
        metrics.merge(&factors.metrics);
    }

    let parts = sequence_batches(sequences, routed_experts, &whole, split())?;
    let check = |sum: &LossOutput| check_finite(sum, &generation.batch, rows.start);
    let (sum, done) = context.updates.step(policy, &parts, StepLoss::Grpo, check)?;
    metrics.merge(&sum.metrics);
    if let Some(sampler_logp) = &generation.sampler_logp {
        let sampler_logp = &sampler_logp[generation.batch.range(rows.start).start..];
        // Without the scores of the old policy there is one update, so the policy that it begins with is the old one.
        let old_logp = whole.old_logp().unwrap_or(&sum.scores.logp);
        let known = whole.active_rows().iter().filter(|row| !sampler_logp[**row].is_nan());
        record_sampler_difference(known.map(|row| (old_logp[*row] - sampler_logp[*row]).into()), metrics);
    }
    // TRL logs the coefficient after the step.
    if let Some(controller) = &mut context.coefficients.entropy {
        if !done.skipped {
            let (sum, count) = bonus_entropy(&whole, chosen_from.as_ref(), &sum.metrics);
            controller.observe(sum, count)?;
            controller.step()?;
        }
        metrics.mean("entropy_coef", controller.entropy_coef, 1.0);
    } else if loss.entropy_coef != 0.0 {
        metrics.mean("entropy_coef", loss.entropy_coef, 1.0);
    }
    metrics.mean("loss", sum.loss, 1.0);
    metrics.mean("policy_loss", sum.policy_loss, 1.0);
    if generation.batch.value_targets().is_some() {
        metrics.mean("value_loss", sum.value_loss, 1.0);
    }
    metrics.mean("grad_norm", done.grad_norm, 1.0);
    metrics.mean("learning_rate", done.learning_rate, 1.0);
    Ok(!done.skipped)
}

/// Checks that the loss of an update and the policy's outputs for its tokens are finite. The tokens are those of `generation` from the
/// sequence `first` on. The error text counts sequences over the whole step.
fn check_finite(sum: &LossOutput, generation: &TokenBatch, first: usize) -> Result<(), String> {
    let rows = generation.range(first).start..generation.range(first).start + sum.scores.logp.len();
    let mut scores = Scores { logp: vec![0.0; generation.tokens()], entropy: vec![0.0; generation.tokens()] };
    scores.logp[rows.clone()].copy_from_slice(&sum.scores.logp);
    scores.entropy[rows].copy_from_slice(&sum.scores.entropy);
    scores.check_finite(generation).map_err(|fault| format!("the loss, {fault}"))?;
    if sum.loss.is_finite() { Ok(()) } else { Err(format!("the loss, {}", sum.loss)) }
}

/// Returns sum and count of the entropies, in nats, of the tokens with an entropy bonus: the tokens that the loss chose from `scores`, or
/// else all active tokens, whose sum is in `of_loss`.
fn bonus_entropy(batch: &TokenBatch, scores: Option<&Scores>, of_loss: &Metrics) -> (f64, f64) {
    if let (Some(scores), Some(factors)) = (scores, batch.factors()) {
        let chosen = || batch.active_rows().iter().filter(|row| factors.entropy[**row] != 0.0);
        return (chosen().map(|row| f64::from(scores.entropy[*row])).sum(), chosen().count() as f64);
    }
    match of_loss.get("entropy") {
        Some(Metric::Mean { sum, count }) => (*sum, *count),
        _ => (0.0, 0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_core::batch::TokenFactors;

    #[test]
    fn a_non_finite_loss_names_the_token_of_the_step() {
        // The second update, with the sequences from 1 on.
        let generation = TokenBatch::packed(vec![0; 6], vec![0, 2, 3, 6]).unwrap();
        let sum = |logp: [f32; 4], loss: f64| {
            let scores = Scores { logp: logp.to_vec(), entropy: vec![0.5; 4] };
            LossOutput::new(loss, loss, scores, Metrics::default())
        };
        let found = |logp, loss| check_finite(&sum(logp, loss), &generation, 1);
        assert_eq!(found([-1.0; 4], 0.5), Ok(()));
        for (loss, logp) in [(f64::NAN, f32::NAN), (0.5, f32::NEG_INFINITY)] {
            let message = found([-1.0, -1.0, logp, -1.0], loss).unwrap_err();
            assert!(message.contains("logp at token 4 (sequence 2, position 1)"), "{message}");
        }
        assert!(found([-1.0; 4], f64::INFINITY).unwrap_err().contains("inf"));
    }

    #[test]
    fn adaptive_entropy_observes_the_tokens_of_the_bonus() {
        let batch = TokenBatch::packed(vec![0; 4], vec![0, 4]).unwrap().with_mask(&[1.0, 1.0, 0.0, 1.0]).unwrap();
        let mut of_loss = Metrics::default();
        of_loss.mean("entropy", 3.0, 3.0);
        assert_eq!(bonus_entropy(&batch, None, &of_loss), (3.0, 3.0));
        let scores = Scores { logp: vec![-1.0; 4], entropy: vec![0.5, 1.0, 9.0, 1.5] };
        let factors = TokenFactors { entropy: vec![0.0, 1.5, 1.5, 1.5], ..TokenFactors::new(4) };
        let batch = batch.with_factors(factors).unwrap();
        assert_eq!(bonus_entropy(&batch, Some(&scores), &of_loss), (2.5, 2.0));
    }
}
