//! Comparison of the oracle's gradients of a batch file with finite differences of its loss.

use super::differences::{Differences, Point};
use super::problem::TOLERANCE;
use crate::error::Result;
use crate::parity::{Row, oracle, widened};
use grpo_core::parity::Comparison;
use grpo_core::{BatchFile, HeadLayout, PolicyOutput};

/// Compares the loss of `file` and its gradients with finite differences of the same loss, at regularly spaced entries, at most
/// `most_entries` per tensor. Constants of the loss stay fixed, and derivatives are taken on its current branches.
///
/// # Errors
/// The errors of the oracle.
pub fn file(file: &BatchFile, most_entries: usize) -> Result<Vec<Row>> {
    let truth = oracle(&file.loss, file, &file.policy)?;
    let (tensors, layout) = match &file.policy {
        PolicyOutput::Logits(logits) => (vec![("grad_logits", widened(logits), truth.values.grad_logits)], None),
        PolicyOutput::Hidden { hidden, lm_head, bias } => {
            let bias = bias.as_ref().map(|bias| ("grad_bias", widened(bias), truth.values.grad_bias));
            let both = [
                ("grad_hidden", widened(hidden), truth.values.grad_hidden),
                ("grad_lm_head", widened(lm_head), truth.values.grad_lm_head),
            ];
            (both.into_iter().chain(bias).collect(), Some(HeadLayout::VocabHidden))
        }
    };
    let point = Point {
        tensors: tensors.iter().map(|(name, values, _)| (*name, values.clone())).collect(),
        layout,
        vocab: file.vocab,
    };
    let mut differences = Differences::new(&file.loss, &file.batch, point)?;
    let (value, found) = (differences.value(), truth.values.loss.unwrap_or(f64::NAN));
    let floor = truth.magnitude.unwrap_or_default().max(1.0);
    let mut rows = vec![Row::new("oracle", "differences", Comparison::new("loss", &[value], &[found], floor, 1e-12))];
    for (tensor, (name, _, gradient)) in tensors.iter().enumerate() {
        let gradient = gradient.as_deref().unwrap_or_default();
        let step = gradient.len().div_ceil(most_entries.max(1)).max(1);
        let entries: Vec<usize> = (0..gradient.len()).step_by(step).collect();
        let derivatives = differences.derivatives(tensor, &entries)?;
        let found: Vec<f64> = entries.iter().map(|entry| gradient[*entry]).collect();
        // The largest entry may not be among the compared ones.
        let scale = gradient.iter().fold(0.0, |m: f64, g| m.max(g.abs()));
        rows.push(Row::new(
            "oracle",
            "differences",
            Comparison::new(*name, &derivatives.values, &found, scale, TOLERANCE),
        ));
    }
    Ok(rows)
}
