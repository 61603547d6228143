//! Checking a decoder: logits, loss and gradients against those of `transformers`.
//!
//! A port of a model is right when it computes what `transformers` computes. A script writes some token ids and what came out there into
//! a file ([`ModelFile`]); [`check`] compares what a policy makes of the same ids. What a policy has to offer for that is
//! [`ModelPolicy`].

mod compare;
mod file;

pub use file::ModelFile;

use crate::error::{Error, Result};
use crate::parity::Row;
use compare::Running;
use file::Expected;
use models::NamedTensor;
use serde::Serialize;
use std::collections::BTreeMap;

/// How a policy computes logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forward {
    /// All tokens of a sequence at once, as in training.
    Whole,
    /// Token by token over a cache of keys and values, as in sampling.
    Cached,
}

impl Forward {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Whole, Self::Cached];
}

/// Takes logits `[n, V]` of a sequence (its index) from a position on.
pub type SeeLogits<'a> = dyn FnMut(usize, usize, &[f32]) -> Result<()> + 'a;
/// Takes the gradient of a parameter, with Hugging Face's name and layout.
pub type SeeGradient<'a> = dyn FnMut(NamedTensor) -> Result<()> + 'a;

/// What is asked of a policy whose numbers are compared. Its errors are its own; [`Error::policy`] takes any.
pub trait ModelPolicy {
    /// The name under which its rows stand in a report.
    fn name(&self) -> &str;

    /// Hands the logits of every position of every sequence to `see`, in whatever pieces.
    ///
    /// # Errors
    /// Its own, such as for too long a sequence, and those of `see`.
    fn logits(&mut self, sequences: &[Vec<u32>], forward: Forward, see: &mut SeeLogits<'_>) -> Result<()>;

    /// The mean cross-entropy (nats) of all tokens but the first of each sequence; and the gradient of every parameter that is trained,
    /// if they are asked for. What is tied has one gradient, the sum.
    ///
    /// # Errors
    /// Its own, and those of `gradients`.
    fn loss(&mut self, sequences: &[Vec<u32>], gradients: Option<&mut SeeGradient<'_>>) -> Result<f64>;
}

/// The largest differences that are allowed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelTolerances {
    /// For the loss: absolute. For logits: absolute, and of the largest logit where that is below 1.
    pub logits: f64,
    /// For gradients: of the largest entry of the same parameter. Parameters with a gradient below a thousandth of the largest of all
    /// are measured by that: their entries are what is left of larger ones that cancel.
    pub gradient: f64,
}

impl Default for ModelTolerances {
    fn default() -> Self {
        Self { logits: 1e-4, gradient: 1e-4 }
    }
}

/// The comparisons of one file.
#[derive(Clone, Debug, Serialize)]
pub struct ModelReport {
    /// The file, as the caller calls it.
    pub file: String,
    /// The comparisons: `implementation` is the policy.
    pub rows: Vec<Row>,
}

impl ModelReport {
    /// Whether everything is within tolerance. A file in which nothing was compared has not passed.
    pub fn passed(&self) -> bool {
        !self.rows.is_empty() && self.rows.iter().all(|row| row.passed)
    }
}

/// Compares what `policy` makes of the file's ids with everything that the file expects.
///
/// # Errors
/// Those of the policy, and of reading the file.
pub fn check(file: &ModelFile, policy: &mut dyn ModelPolicy, tolerances: &ModelTolerances) -> Result<ModelReport> {
    let mut rows = Vec::new();
    let mut add = |name: &str, running: Running, scale: f64, tolerance: f64| {
        rows.push(Row::new(name, "expected", running.finish(scale, tolerance)));
    };
    if let Some(expected) = file.logits() {
        let scale = expected.largest.min(1.0);
        for forward in Forward::ALL {
            let mut running = Running::new(match forward {
                Forward::Whole => "logits".to_owned(),
                Forward::Cached => "logits, cached".to_owned(),
            });
            policy.logits(file.sequences(), forward, &mut |sequence, position, logits| {
                file.compare_logits(expected, sequence, position, logits, &mut running)
            })?;
            let wanted: usize = file.sequences().iter().map(Vec::len).sum::<usize>() * file.vocab();
            running.expect(wanted);
            add(policy.name(), running, scale, tolerances.logits);
        }
    }
    let gradients: BTreeMap<&str, &Expected> = file.gradients().collect();
    if file.loss().is_none() && gradients.is_empty() {
        return Ok(ModelReport { file: file.name(), rows });
    }
    let largest = gradients.values().fold(0.0, |m: f64, expected| m.max(expected.largest));
    let mut of_gradients = Vec::new();
    let mut see = |tensor: NamedTensor| {
        // A head that is tied is the embedding under another name.
        let names = file.aliases(&tensor.name);
        for expected in names.iter().filter_map(|name| gradients.get(name)) {
            let mut running = Running::new(expected.name.trim_start_matches("expected.").to_owned());
            file.compare(expected, &tensor, &mut running)?;
            running.expect(expected.len());
            let scale = expected.largest.max(1e-3 * largest);
            of_gradients.push((running, scale));
        }
        Ok(())
    };
    let loss = policy.loss(file.sequences(), if gradients.is_empty() { None } else { Some(&mut see) })?;
    if let Some(expected) = file.loss() {
        let mut running = Running::new("loss".to_owned());
        running.add(0, expected, loss);
        add(policy.name(), running, 1.0, tolerances.logits);
    }
    if of_gradients.len() != gradients.len() {
        let found = format!("{} of them", of_gradients.len());
        return Err(Error::argument("parity", format!("gradients of {} parameters", gradients.len()), found));
    }
    of_gradients.into_iter().for_each(|(running, scale)| add(policy.name(), running, scale, tolerances.gradient));
    Ok(ModelReport { file: file.name(), rows })
}
