//! The value heads of layers whose values are not the columns of a projection as they are: values that are keys, and normalised values.
//!
//! Legend: N rows, A query heads, K key/value heads, D head width.

use super::autodiff_ops::{fitting, operand, read, reread};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use grpo_backend_cpu::layers::{Heads, Layers};
use grpo_burn::custom_op::{Derivative, Graph, record, tensor};
use grpo_models::{LayerSpec, ModelConfig};
use grpo_policy::Result;

/// How the values of a layer follow from its projection.
#[derive(Clone, Copy, Debug)]
pub(super) struct ValueHeads {
    heads: Heads,
    /// `true` if values are the keys of the projection, which then has `[N, (A + K) D]`.
    shared: bool,
    /// The term added to the mean square of a head, if values are normalised.
    eps: Option<f64>,
}

impl ValueHeads {
    /// Returns the rule of a layer; `None` if values are the last columns of its projection.
    pub(super) fn of(config: &ModelConfig, spec: LayerSpec) -> Option<Self> {
        let eps = config.value_norm.then_some(config.rms_norm_eps);
        let is_needed = eps.is_some() || spec.keys_are_values;
        is_needed.then(|| Self { heads: heads(config, spec), shared: spec.keys_are_values, eps })
    }

    /// Returns queries, keys and values `[N, (A + 2K) D]`, and the scales of normalised values `[N K]`, from a projection.
    pub(super) fn forward(self, projected: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        let (values, to_keys) = (self.heads.key_value * self.heads.width, self.to_keys());
        let own = self.projected();
        let of_rows = columns(projected, own, own - values);
        let (of_rows, scales) = match self.eps {
            Some(eps) => Layers::new().rms_norm(&of_rows, &vec![1.0; self.heads.width], eps)?,
            None => (of_rows, Vec::new()),
        };
        let mut qkv = Vec::with_capacity(projected.len() / own * self.heads.row());
        for (row, values) in projected.chunks_exact(own).zip(of_rows.chunks_exact(values)) {
            qkv.extend_from_slice(&row[..to_keys]);
            qkv.extend_from_slice(values);
        }
        Ok((qkv, scales))
    }

    /// Returns the gradient of a projection, given the gradient of queries, keys and values.
    fn gradient(self, projected: &[f32], scales: &[f32], dqkv: &[f32]) -> grpo_core::Result<Vec<f32>> {
        let (values, to_keys, own) = (self.heads.key_value * self.heads.width, self.to_keys(), self.projected());
        let mut dvalues = columns(dqkv, self.heads.row(), to_keys);
        if self.eps.is_some() {
            let of_rows = columns(projected, own, own - values);
            let ones = vec![1.0; self.heads.width];
            dvalues = Layers::new().rms_norm_grad(&of_rows, &ones, scales, &dvalues)?.0;
        }
        let mut gradient = vec![0.0; projected.len()];
        let rows = gradient.chunks_exact_mut(own).zip(dqkv.chunks_exact(self.heads.row()));
        for ((to, from), dvalues) in rows.zip(dvalues.chunks_exact(values)) {
            to[..to_keys].copy_from_slice(&from[..to_keys]);
            to[own - values..].iter_mut().zip(dvalues).for_each(|(to, dvalue)| *to += dvalue);
        }
        Ok(gradient)
    }

    /// Returns the number of columns of queries and keys.
    fn to_keys(self) -> usize {
        (self.heads.query + self.heads.key_value) * self.heads.width
    }

    /// Returns the number of columns of the projection.
    fn projected(self) -> usize {
        if self.shared { self.to_keys() } else { self.heads.row() }
    }
}

/// Returns the columns from `first` on of rows with `width` columns.
fn columns(rows: &[f32], width: usize, first: usize) -> Vec<f32> {
    let mut found = Vec::with_capacity(rows.len() / width * (width - first));
    rows.chunks_exact(width).for_each(|row| found.extend_from_slice(&row[first..]));
    found
}

/// Returns the heads of a layer.
pub(super) fn heads(config: &ModelConfig, spec: LayerSpec) -> Heads {
    let grpo_models::AttentionHeads { query, key_value, width } = config.heads(spec);
    Heads { query, key_value, width }
}

/// Returns queries, keys and values `[N, (A + 2K) D]` from the projection of a layer.
pub(super) fn with_values(projected: Tensor<2>, of: ValueHeads) -> Result<Tensor<2>> {
    let [n, _] = projected.dims();
    let mut graph = Graph::default();
    let projected = operand(&mut graph, "qkv", projected)?;
    let (qkv, scales) = of.forward(read("qkv", &projected.storage)?)?;
    let derivative = ValuesGrad { projected: projected.storage, scales, of };
    Ok(record(graph, tensor(qkv, [n, of.heads.row()]), [projected.node], derivative))
}

#[derive(Clone, Debug)]
struct ValuesGrad {
    projected: FlexTensor,
    scales: Vec<f32>,
    of: ValueHeads,
}

impl Derivative<1> for ValuesGrad {
    fn gradients(self, upstream: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let gradient = fitting(self.of.gradient(reread(&self.projected), &self.scales, reread(&upstream)));
        let columns = self.of.projected();
        let rows = gradient.len() / columns;
        [Some(tensor(gradient, [rows, columns]))]
    }
}
