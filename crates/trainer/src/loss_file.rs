//! The results of one loss evaluation as a safetensors file, `grpo-loss/1`.
//!
//! Tensors: `loss` F64 `[]`, `logp` and `entropy` F32 `[B, T]` (0 at masked tokens), and the gradients that were made:
//! `grad_hidden` `[B, T, H]`, `grad_lm_head` `[V, H]`, `grad_bias` `[V]` or `grad_logits` `[B, T, V]`, F32.
//! `__metadata__`: `format`, `name`, `backend`, `implementation`, `loss` (the configuration) and `metrics`, as JSON.

use crate::parity::Evaluated;
use crate::{Error, Result};
use grpo_core::{BatchFile, Implementation, LossConfig};
use safetensors::tensor::{Dtype, TensorView};
use std::collections::HashMap;

/// The format's name and version.
pub const FORMAT: &str = "grpo-loss/1";

/// What made the results.
#[derive(Clone, Copy, Debug)]
pub struct Origin<'a> {
    /// Name of the backend.
    pub backend: &'a str,
    /// Implementation.
    pub implementation: Implementation,
    /// The loss that was evaluated.
    pub loss: &'a LossConfig,
}

/// The bytes of the file.
///
/// # Errors
/// [`Error::State`] when a value does not have the shape that the batch gives it.
pub fn to_bytes(file: &BatchFile, evaluated: &Evaluated, origin: &Origin<'_>) -> Result<Vec<u8>> {
    let [b, t] = file.shape;
    let (h, v) = (file.hidden, file.vocab);
    let values = &evaluated.values;
    let loss: Vec<u8> = values.loss.iter().flat_map(|l| l.to_le_bytes()).collect();
    let mut tensors = vec![("loss", Dtype::F64, vec![], loss)];
    let lists = [
        ("logp", vec![b, t], &values.logp),
        ("entropy", vec![b, t], &values.entropy),
        ("grad_hidden", vec![b, t, h], &values.grad_hidden),
        ("grad_lm_head", vec![v, h], &values.grad_lm_head),
        ("grad_bias", vec![v], &values.grad_bias),
        ("grad_logits", vec![b, t, v], &values.grad_logits),
    ];
    for (name, shape, list) in lists {
        if let Some(list) = list {
            let bytes = list.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
            tensors.push((name, Dtype::F32, shape, bytes));
        }
    }
    let bad = |e: safetensors::SafeTensorError| Error::state("loss file", "consistent shapes", e);
    let mut views = Vec::with_capacity(tensors.len());
    for (name, dtype, shape, bytes) in &tensors {
        views.push((*name, TensorView::new(*dtype, shape.clone(), bytes).map_err(bad)?));
    }
    let json = |e: serde_json::Error| Error::state("loss file", "values that JSON can hold", e);
    let metadata = HashMap::from([
        ("format".to_owned(), FORMAT.to_owned()),
        ("name".to_owned(), file.name.clone()),
        ("backend".to_owned(), origin.backend.to_owned()),
        ("implementation".to_owned(), origin.implementation.name().to_owned()),
        ("loss".to_owned(), serde_json::to_string(origin.loss).map_err(json)?),
        (
            "metrics".to_owned(),
            serde_json::to_string(&evaluated.metrics.values().collect::<HashMap<_, _>>()).map_err(json)?,
        ),
    ]);
    safetensors::serialize(views, Some(metadata)).map_err(bad)
}
