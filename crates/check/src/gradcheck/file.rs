//! Comparison of the oracle's gradients of a batch file with finite differences of its loss.

use super::differences::{Differences, Point, gradient};
use crate::error::Result;
use crate::parity::{Row, oracle};
use grpo_core::{BatchFile, HeadLayout};

/// Compares the loss of `file` and its gradients with finite differences of the same loss, at regularly spaced entries, at most
/// `most_entries` per tensor. Constants of the loss stay fixed, and derivatives are taken on its current branches.
///
/// # Errors
/// The errors of the oracle.
pub fn file(file: &BatchFile, most_entries: usize) -> Result<Vec<Row>> {
    let truth = oracle(&file.loss, file, &file.policy)?;
    let point = Point::new(&file.policy, HeadLayout::VocabHidden, file.vocab, true);
    let names = point.names();
    let mut differences = Differences::new(&file.loss, &file.batch, point)?;
    let mut rows = vec![differences.loss_row(truth.values.loss, truth.magnitude)];
    for (tensor, name) in names.into_iter().enumerate() {
        let gradient = gradient(&truth.values, name).unwrap_or_default();
        let step = gradient.len().div_ceil(most_entries.max(1)).max(1);
        let entries: Vec<usize> = (0..gradient.len()).step_by(step).collect();
        // The largest entry may not be among the compared ones.
        let scale = gradient.iter().fold(0.0, |m: f64, g| m.max(g.abs()));
        rows.push(differences.row(tensor, gradient, &entries, scale)?.0);
    }
    Ok(rows)
}
