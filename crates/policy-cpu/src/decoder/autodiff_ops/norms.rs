//! RMSNorm, also of queries and keys, and gated activations.

use super::second::{Second, add};
use super::{fitting, operand, read, reread};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use grpo_backend_cpu::layers::{Activation, HeadNorms, HeadNormsGrad, Heads, Layers};
use grpo_burn::custom_op::{Derivative, Graph, record, tensor};
use grpo_policy::Result;

/// Returns a weight plus `offset`; the derivative with respect to the sum is that with respect to the weight.
fn shifted(weight: FlexTensor, offset: f32) -> Result<FlexTensor> {
    if offset == 0.0 {
        return Ok(weight);
    }
    let sums: Vec<f32> = read("weight", &weight)?.iter().map(|weight| weight + offset).collect();
    let count = sums.len();
    Ok(tensor(sums, [count]))
}

/// Computes x / sqrt(mean(x^2) + eps) * (w + offset) for x `[N, H]` and a weight w `[H]`. Also returns x for a second use; the loss must depend
/// on the norm.
pub(crate) fn rms_norm(x: Tensor<2>, weight: Tensor<1>, offset: f32, eps: f64) -> Result<[Tensor<2>; 2]> {
    let dims = x.dims();
    let mut graph = Graph::default();
    let residual = x.clone();
    let x = operand(&mut graph, "x", x)?;
    let weight = operand(&mut graph, "weight", weight)?;
    let factor = shifted(weight.storage, offset)?;
    let (y, scale) = Layers::new().rms_norm(read("x", &x.storage)?, read("weight", &factor)?, eps)?;
    let second = Second::default();
    let derivative = RmsNormGrad { x: x.storage.clone(), weight: factor, scale, dims, residual: second.clone() };
    let y = record(graph, tensor(y, dims), [x.node, weight.node], derivative);
    let residual = if x.tracked { second.output(x.storage, &y)? } else { residual };
    Ok([y, residual])
}

#[derive(Clone, Debug)]
struct RmsNormGrad {
    x: FlexTensor,
    weight: FlexTensor,
    scale: Vec<f32>,
    dims: [usize; 2],
    /// The gradient of the second use of x.
    residual: Second,
}

impl Derivative<2> for RmsNormGrad {
    fn gradients(self, upstream: FlexTensor, _: [bool; 2]) -> [Option<FlexTensor>; 2] {
        let (x, weight, dy) = (reread(&self.x), reread(&self.weight), reread(&upstream));
        let (mut dx, dweight) = fitting(Layers::new().rms_norm_grad(x, weight, &self.scale, dy));
        if let Some(residual) = self.residual.take() {
            add(&mut dx, reread(&residual));
        }
        [Some(tensor(dx, self.dims)), Some(tensor(dweight, [self.dims[1]]))]
    }
}

/// Normalises queries and keys of `[N, (A + 2K) D]`: each head, or all heads together, as the sizes of the weights say. `offset` is added
/// to the weights.
pub(crate) fn norm_heads(
    qkv: Tensor<2>,
    heads: Heads,
    [query, key]: [Tensor<1>; 2],
    offset: f32,
    eps: f64,
) -> Result<Tensor<2>> {
    let dims = qkv.dims();
    let mut graph = Graph::default();
    let qkv = operand(&mut graph, "qkv", qkv)?;
    let query = operand(&mut graph, "query weight", query)?;
    let key = operand(&mut graph, "key weight", key)?;
    let nodes = [qkv.node, query.node, key.node];
    let [query, key] = [shifted(query.storage, offset)?, shifted(key.storage, offset)?];
    let norms = HeadNorms { query: read("query weight", &query)?, key: read("key weight", &key)?, eps };
    let (y, scale) = Layers::new().norm_heads(read("qkv", &qkv.storage)?, heads, norms)?;
    let derivative = NormHeadsGrad { qkv: qkv.storage, query, key, scale, heads, eps, dims };
    Ok(record(graph, tensor(y, dims), nodes, derivative))
}

#[derive(Clone, Debug)]
struct NormHeadsGrad {
    qkv: FlexTensor,
    query: FlexTensor,
    key: FlexTensor,
    scale: Vec<f32>,
    heads: Heads,
    eps: f64,
    dims: [usize; 2],
}

impl Derivative<3> for NormHeadsGrad {
    fn gradients(self, upstream: FlexTensor, _: [bool; 3]) -> [Option<FlexTensor>; 3] {
        let norms = HeadNorms { query: reread(&self.query), key: reread(&self.key), eps: self.eps };
        let (qkv, dy) = (reread(&self.qkv), reread(&upstream));
        let gradients = Layers::new().norm_heads_grad(qkv, self.heads, norms, &self.scale, dy);
        let HeadNormsGrad { dqkv, dquery, dkey } = fitting(gradients);
        let of_weight = |gradient: Vec<f32>| {
            let count = gradient.len();
            Some(tensor(gradient, [count]))
        };
        [Some(tensor(dqkv, self.dims)), of_weight(dquery), of_weight(dkey)]
    }
}

/// Computes activation(gate) * up `[N, I]` from concatenated gate and up `[N, 2I]`.
pub(crate) fn gated(gate_up: Tensor<2>, activation: Activation) -> Result<Tensor<2>> {
    let [n, both] = gate_up.dims();
    let width = both / 2;
    let mut graph = Graph::default();
    let gate_up = operand(&mut graph, "gate_up", gate_up)?;
    let y = Layers::new().gated(read("gate_up", &gate_up.storage)?, activation, width)?;
    let derivative = GatedGrad { gate_up: gate_up.storage, activation, dims: [n, width] };
    Ok(record(graph, tensor(y, [n, width]), [gate_up.node], derivative))
}

#[derive(Clone, Debug)]
struct GatedGrad {
    gate_up: FlexTensor,
    activation: Activation,
    dims: [usize; 2],
}

impl Derivative<1> for GatedGrad {
    fn gradients(self, upstream: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let [n, width] = self.dims;
        let (gate_up, dy) = (reread(&self.gate_up), reread(&upstream));
        let gradient = fitting(Layers::new().gated_grad(gate_up, dy, self.activation, width));
        [Some(tensor(gradient, [n, 2 * width]))]
    }
}
