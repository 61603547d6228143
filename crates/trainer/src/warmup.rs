//! Supervised warm-up: cross-entropy on reference answers, so that the first rewards are not all zero.

use crate::dataset::Item;
use crate::error::{Error, Result};
use crate::loss::cross_entropy;
use crate::micro_batch::accumulate;
use crate::model::Decoder;
use crate::optim::AdamW;
use crate::sequences::{Sequence, completion_hidden, token_batch};
use crate::tokenizer::Tokenizer;

/// What one warm-up step did.
#[derive(Clone, Debug, PartialEq)]
pub struct WarmupReport {
    /// Optimizer steps done; [`crate::Trainer::warmup_step`] counts skipped updates too.
    pub step: u64,
    /// Mean negative log-likelihood per answer token, in nats.
    pub loss: f64,
    /// Norm of the whole gradient before clipping.
    pub grad_norm: f64,
    /// Learning rate used.
    pub learning_rate: f64,
    /// Whether nothing was updated, see [`AdamW::step`].
    pub skipped: bool,
    /// Answer tokens trained on, EOS included.
    pub tokens: usize,
}

/// Sequences per micro-batch: small enough for activations to stay in cache, large enough to be worth a thread.
const MICRO_BATCH: usize = 32;

/// One step on `items`.
///
/// # Errors
/// [`Error::UnknownCharacter`], [`Error::TooLong`], [`Error::NotFinite`].
pub fn warmup_step(model: Decoder, optimizer: &mut AdamW, items: &[Item]) -> Result<(Decoder, WarmupReport)> {
    let sequences: Vec<Sequence> = items
        .iter()
        .map(|item| {
            Ok(Sequence {
                prompt: Tokenizer.encode_prompt(&item.problem.prompt)?,
                completion: Tokenizer.encode_completion(&item.problem.answer)?,
            })
        })
        .collect::<Result<_>>()?;
    let batch = token_batch(&sequences)?;
    let parts = items.len().div_ceil(MICRO_BATCH);
    let sum = accumulate(&model, items.len(), parts, |model, part| {
        let hidden = completion_hidden(model, &sequences[part.clone()])?;
        Ok(cross_entropy(hidden, model.lm_head(), &batch.select_sequences(part)?, batch.tokens()))
    })?;
    let (model, done) = match sum.loss.is_finite() {
        true => optimizer.step(model, &sum.gradients)?,
        false if optimizer.skips() => (model, optimizer.skip(sum.gradients.norm())?),
        false => return Err(Error::NotFinite { what: "the warm-up loss".into(), step: optimizer.steps() }),
    };
    let report = WarmupReport {
        step: optimizer.steps(),
        loss: sum.loss,
        grad_norm: done.grad_norm,
        learning_rate: done.learning_rate,
        skipped: done.skipped,
        tokens: batch.tokens(),
    };
    Ok((model, report))
}
