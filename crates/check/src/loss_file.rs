//! The results of one loss evaluation as a safetensors file, `grpo-loss/1`.
//!
//! Tensors: `loss` F64 `[]`, `logp` and `entropy` F32 `[B, T]` (0 at masked tokens), and the computed gradients:
//! `grad_hidden` `[B, T, H]`, `grad_lm_head` `[V, H]`, `grad_bias` `[V]` or `grad_logits` `[B, T, V]`, F32.
//! `__metadata__`: `format`, `name`, `backend`, `implementation`, `loss` (the configuration) and `metrics`, as JSON. Entries of the header
//! are sorted, so that equal results give equal bytes.

use crate::error::{Error, Result};
use crate::parity::Evaluated;
use grpo_core::format::with_metadata;
use grpo_core::{BatchFile, Implementation};
use safetensors::tensor::{Dtype, TensorView};
use std::collections::BTreeMap;

/// Name and version of the format.
pub const FORMAT: &str = "grpo-loss/1";

/// Serialises the results of `implementation` on the backend called `backend`.
///
/// # Errors
/// [`Error::Argument`] if a value does not have the shape that follows from the batch.
pub fn to_bytes(
    file: &BatchFile,
    evaluated: &Evaluated,
    backend: &str,
    implementation: Implementation,
) -> Result<Vec<u8>> {
    let loss: Vec<u8> = evaluated.values.loss.iter().flat_map(|l| l.to_le_bytes()).collect();
    let mut tensors = vec![("loss", Dtype::F64, vec![], loss)];
    for (name, shape, list) in lists(file, evaluated) {
        let bytes = list.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
        tensors.push((name, Dtype::F32, shape, bytes));
    }
    let bad = |e: safetensors::SafeTensorError| Error::argument("loss file", "consistent shapes", e);
    let mut views = Vec::with_capacity(tensors.len());
    for (name, dtype, shape, bytes) in &tensors {
        views.push((*name, TensorView::new(*dtype, shape.clone(), bytes).map_err(bad)?));
    }
    let json = |e: serde_json::Error| Error::argument("loss file", "values that JSON can hold", e);
    let metadata = BTreeMap::from([
        ("format", FORMAT.to_owned()),
        ("name", file.name.clone()),
        ("backend", backend.to_owned()),
        ("implementation", implementation.name().to_owned()),
        ("loss", serde_json::to_string(&file.batch_loss()).map_err(json)?),
        ("metrics", serde_json::to_string(&evaluated.metrics.values().collect::<BTreeMap<_, _>>()).map_err(json)?),
    ]);
    Ok(with_metadata(&safetensors::serialize(views, None).map_err(bad)?, &metadata)?)
}

/// A tensor of the results with entries that are not finite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotFinite {
    /// The name of the tensor in the file.
    pub tensor: &'static str,
    /// Number of entries that are not finite.
    pub count: usize,
    /// Number of entries.
    pub of: usize,
    /// Index of the first entry that is not finite.
    pub first: Vec<usize>,
}

impl std::fmt::Display for NotFinite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { tensor, count, of, first } = self;
        write!(f, "{tensor}: {count} of {of} entries are not finite, the first at {first:?}")
    }
}

/// Returns the tensors of the file that have entries that are not finite.
pub fn not_finite(file: &BatchFile, evaluated: &Evaluated) -> Vec<NotFinite> {
    let broken = |(tensor, shape, list): (&'static str, Vec<usize>, &Vec<f64>)| {
        // Values are written as f32.
        let is_broken = |x: &f64| !(*x as f32).is_finite();
        let mut rest = list.iter().position(is_broken)?;
        let mut first: Vec<usize> = Vec::with_capacity(shape.len());
        for size in shape.iter().rev() {
            first.insert(0, rest % size);
            rest /= size;
        }
        Some(NotFinite { tensor, count: list.iter().filter(|x| is_broken(x)).count(), of: list.len(), first })
    };
    lists(file, evaluated).into_iter().filter_map(broken).collect()
}

/// Returns the results other than the loss, with shapes.
fn lists<'a>(file: &BatchFile, evaluated: &'a Evaluated) -> Vec<(&'static str, Vec<usize>, &'a Vec<f64>)> {
    let tokens = file.token_shape();
    let with_columns = |columns: usize| [&tokens[..], &[columns]].concat();
    let (h, v) = (file.hidden, file.vocab);
    let values = &evaluated.values;
    let lists = [
        ("logp", tokens.clone(), &values.logp),
        ("entropy", tokens.clone(), &values.entropy),
        ("grad_hidden", with_columns(h), &values.grad_hidden),
        ("grad_lm_head", vec![v, h], &values.grad_lm_head),
        ("grad_bias", vec![v], &values.grad_bias),
        ("grad_logits", with_columns(v), &values.grad_logits),
    ];
    lists.into_iter().filter_map(|(name, shape, list)| Some((name, shape, list.as_ref()?))).collect()
}
