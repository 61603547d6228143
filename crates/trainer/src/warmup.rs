//! Supervised warm-up: cross-entropy on reference answers, so that the first rewards are not all zero.

use crate::error::{Error, Result};
use crate::micro_batch::{sequence_batches, split_evenly};
use crate::updates::{Update, Updates};
use grpo_agents::Environments;
use grpo_conversations::{encode_prompt, with_tools};
use grpo_core::LossOutput;
use grpo_data::Item;
use grpo_models::Tokenizer;
use grpo_policy::{Policy, Sequence, StepLoss, token_batch};

/// The report of one warm-up step.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct WarmupReport {
    /// The number of completed optimizer steps; [`crate::Trainer::warmup_step`] counts skipped updates too.
    pub step: u64,
    /// The mean negative log-likelihood per answer token, in nats.
    pub loss: f64,
    /// The norm of the whole gradient before clipping.
    pub grad_norm: f64,
    /// The learning rate of the update.
    pub learning_rate: f64,
    /// `true` if the update was skipped, because `skip_grad_norm` is set and the gradient norm exceeds it or is not finite.
    pub skipped: bool,
    /// The number of answer tokens trained on, EOS included.
    pub tokens: usize,
}

/// The number of sequences of a micro-batch: few enough for activations to stay in cache, enough to be worth a thread.
const MICRO_BATCH: usize = 32;

/// Does one supervised step on `items`, whose prompts show the tools of their environments.
///
/// # Errors
/// [`Error::Model`] if the tokenizer cannot encode a text; [`Error::Policy`] if a sequence is too long, or loss, gradient or weights are
/// not finite; [`Error::TooManySkips`]. Weights and moments are then unchanged.
pub(crate) fn warmup_step(
    policy: &mut dyn Policy,
    tokenizer: &dyn Tokenizer,
    environments: &Environments,
    updates: &mut Updates,
    items: &[Item],
) -> Result<WarmupReport> {
    let sequences: Vec<Sequence> = items
        .iter()
        .map(|item| {
            let Some(answer) = item.warmup_text() else {
                let expected = "rows with reference answers, or warmup.steps=0";
                return Err(Error::argument("warm-up", expected, format!("{item:?}")));
            };
            let prompt = encode_prompt(tokenizer, &with_tools(environments, item))?;
            Ok(Sequence { prompt, completion: tokenizer.encode_completion(answer)? })
        })
        .collect::<Result<_>>()?;
    let batch = token_batch(&sequences)?;
    let parts = split_evenly(items.len(), items.len().div_ceil(MICRO_BATCH));
    let parts = sequence_batches(&sequences, &[], &batch, parts)?;
    let loss = StepLoss::CrossEntropy { tokens: batch.tokens() };
    let check = |sum: &LossOutput| match sum.loss.is_finite() {
        true => Ok(()),
        false => Err(format!("the warm-up loss, {}", sum.loss)),
    };
    let (sum, Update { grad_norm, learning_rate, skipped }) = updates.step(policy, &parts, loss, check)?;
    let (step, tokens) = (policy.optimizer_steps(), batch.tokens());
    Ok(WarmupReport { step, loss: sum.loss, grad_norm, learning_rate, skipped, tokens })
}
