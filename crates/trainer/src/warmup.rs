//! Supervised warm-up: cross-entropy on reference answers, so that the first rewards are not all zero.

use crate::dataset::Item;
use crate::error::{Error, Result};
use crate::loss::cross_entropy;
use crate::model::{Decoder, to_host};
use crate::optim::{AdamW, GradientSum};
use crate::sequences::{Sequence, completion_hidden, token_batch};
use crate::tokenizer::Tokenizer;

/// What one warm-up step did.
#[derive(Clone, Debug, PartialEq)]
pub struct WarmupReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean negative log-likelihood per answer token, in nats.
    pub loss: f64,
    /// Norm of the whole gradient before clipping.
    pub grad_norm: f64,
    /// Learning rate used.
    pub learning_rate: f64,
    /// Answer tokens trained on, EOS included.
    pub tokens: usize,
}

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
    let loss = cross_entropy(completion_hidden(&model, &sequences)?, model.lm_head(), &batch);
    let value = to_host(loss.clone().inner()).iter().map(|x| f64::from(*x)).sum::<f64>();
    if !value.is_finite() {
        return Err(Error::NotFinite { what: "the warm-up loss", step: optimizer.steps() });
    }
    let mut gradients = GradientSum::new();
    gradients.add(&model, loss.backward());
    let (model, done) = optimizer.step(model, &gradients)?;
    let report = WarmupReport {
        step: optimizer.steps(),
        loss: value,
        grad_norm: done.grad_norm,
        learning_rate: done.learning_rate,
        tokens: batch.tokens(),
    };
    Ok((model, report))
}
