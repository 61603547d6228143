//! Checks of a decoder: logits, loss and gradients against `transformers`.
//!
//! A port of a model is correct if it computes the same as `transformers`. A script writes token ids and the results of `transformers` to
//! a file ([`ModelFile`]); [`check`] compares the results of a policy for the same ids. A policy under test implements
//! [`ModelPolicy`].

mod compare;
mod file;

pub use file::ModelFile;

use crate::error::{Error, Result};
use crate::parity::Row;
use compare::Running;
use file::Expected;
use grpo_models::NamedTensor;
use serde::Serialize;
use smart_default::SmartDefault;
use std::collections::BTreeMap;

/// How a policy computes logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forward {
    /// All tokens of a sequence at once, as in training.
    Whole,
    /// Token by token with a KV cache, as in sampling.
    Cached,
}

impl Forward {
    /// Both ways.
    pub const ALL: [Self; 2] = [Self::Whole, Self::Cached];
}

/// Receives logits `[n, V]` of a sequence (by index), starting at a position.
pub type SeeLogits<'a> = dyn FnMut(usize, usize, &[f32]) -> Result<()> + 'a;
/// Receives the gradient of a parameter, with Hugging Face's name and layout.
pub type SeeGradient<'a> = dyn FnMut(NamedTensor) -> Result<()> + 'a;

/// A policy under test. [`Error::policy`] converts its errors.
pub trait ModelPolicy {
    /// Returns the name of its rows in a report.
    fn name(&self) -> &str;

    /// Passes the logits of every position of every sequence to `see`, in pieces of any size.
    ///
    /// # Errors
    /// The policy's errors, such as for a sequence that is too long, and the errors of `see`.
    fn logits(&mut self, sequences: &[Vec<u32>], forward: Forward, see: &mut SeeLogits<'_>) -> Result<()>;

    /// Returns the mean cross-entropy (nats) of all tokens except the first of each sequence, and passes the gradient of every trained
    /// parameter to `gradients`, if given. Tied parameters have one gradient, the sum.
    ///
    /// # Errors
    /// The policy's errors, and the errors of `gradients`.
    fn loss(&mut self, sequences: &[Vec<u32>], gradients: Option<&mut SeeGradient<'_>>) -> Result<f64>;
}

/// Largest allowed differences.
#[derive(Clone, Copy, Debug, SmartDefault, PartialEq)]
pub struct ModelTolerances {
    /// Tolerance of the loss, absolute, and of logits, relative to the largest logit if it is below 1, else absolute.
    #[default(1e-4)]
    pub logits: f64,
    /// Tolerance of gradients, relative to the largest entry of the parameter. If that entry is below a thousandth of the largest entry of all
    /// gradients, the thousandth is the scale: such entries are sums of larger terms that cancel.
    #[default(1e-4)]
    pub gradient: f64,
}

/// The comparisons of one file.
#[derive(Clone, Debug, Serialize)]
pub struct ModelReport {
    /// Name of the file, as given by the caller.
    pub file: String,
    /// The comparisons; `implementation` is the policy.
    pub rows: Vec<Row>,
}

impl ModelReport {
    /// Returns `true` if all comparisons are within tolerance and there is at least one.
    pub fn passed(&self) -> bool {
        !self.rows.is_empty() && self.rows.iter().all(|row| row.passed)
    }
}

/// Compares the results of `policy` for the file's ids with all expected tensors of the file.
///
/// # Errors
/// The errors of the policy and of reading the file.
pub fn check(file: &ModelFile, policy: &mut dyn ModelPolicy, tolerances: &ModelTolerances) -> Result<ModelReport> {
    let mut rows = Vec::new();
    let mut add = |name: &str, running: Running, entries: usize, scale: f64, tolerance: f64| {
        rows.push(Row::new(name, "expected", running.finish(entries, scale, tolerance)));
    };
    if let Some(expected) = file.logits() {
        let scale = expected.largest.min(1.0);
        for forward in Forward::ALL {
            let mut running = Running::new(match forward {
                Forward::Whole => "logits".to_owned(),
                Forward::Cached => "logits, cached".to_owned(),
            });
            policy.logits(file.sequences(), forward, &mut |sequence, position, logits| {
                file.compare(expected, file.first_logit(sequence, position), logits, &mut running)
            })?;
            let entries: usize = file.sequences().iter().map(Vec::len).sum::<usize>() * file.vocab();
            add(policy.name(), running, entries, scale, tolerances.logits);
        }
    }
    let gradients: BTreeMap<&str, &Expected> = file.gradients().collect();
    if file.loss().is_none() && gradients.is_empty() {
        return Ok(ModelReport { file: file.name(), rows });
    }
    let largest = gradients.values().fold(0.0, |m: f64, expected| m.max(expected.largest));
    let mut compared = Vec::new();
    let mut see = |tensor: NamedTensor| {
        // A tied head is the embedding under another name.
        let names = file.aliases(&tensor.name);
        for (name, expected) in names.iter().filter_map(|name| Some((name, gradients.get(name)?))) {
            let mut running = Running::new(format!("grad.{name}"));
            if tensor.shape != expected.shape {
                let expected = format!("the gradient of {} {:?}", tensor.name, expected.shape);
                return Err(Error::argument("parity", expected, format!("{:?}", tensor.shape)));
            }
            file.compare(expected, 0, &tensor.data, &mut running)?;
            compared.push((running, expected.len(), expected.largest.max(1e-3 * largest)));
        }
        Ok(())
    };
    let loss = policy.loss(file.sequences(), if gradients.is_empty() { None } else { Some(&mut see) })?;
    if let Some(expected) = file.loss() {
        let mut running = Running::new("loss".to_owned());
        running.add(0, expected, loss);
        add(policy.name(), running, 1, 1.0, tolerances.logits);
    }
    if compared.len() != gradients.len() {
        let found = format!("{} of them", compared.len());
        return Err(Error::argument("parity", format!("gradients of {} parameters", gradients.len()), found));
    }
    for (running, entries, scale) in compared {
        add(policy.name(), running, entries, scale, tolerances.gradient);
    }
    Ok(ModelReport { file: file.name(), rows })
}
