//! Attention and Gated DeltaNets over packed sequences.

use super::{fitting, operand, read, reread};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use grpo_backend_cpu::layers::{
    AttentionGrad, DeltaGrad, DeltaHeads, DeltaWeights, Heads, Layers, RopeTable, Scores, Span,
};
use grpo_burn::custom_op::{Derivative, Graph, Operand, record, tensor};
use grpo_policy::Result;
use std::borrow::Cow;
use std::sync::Arc;

/// The structure of packed sequences, for attention.
#[derive(Debug)]
pub(crate) struct Sequences {
    /// Rows of each sequence, and the prefix rows that they also attend to.
    pub(crate) spans: Vec<Span>,
    /// Position `[N]` of each row in its sequence.
    pub(crate) positions: Vec<usize>,
}

/// Computes attention, with rotary position embeddings if there is a table: `[N, A D]` from queries, keys and values `[N, (A + 2K) D]`.
/// `sinks` `[A]` are the logits of sinks.
pub(crate) fn attention(
    qkv: Tensor<2>,
    heads: Heads,
    scores: Scores,
    rope: Option<&RopeTable>,
    sinks: Option<Tensor<1>>,
    sequences: &Arc<Sequences>,
) -> Result<Tensor<2>> {
    let [n, _] = qkv.dims();
    let mut graph = Graph::default();
    let qkv = operand(&mut graph, "qkv", qkv)?;
    let layers = Layers::new();
    let mut turned = read("qkv", &qkv.storage)?.to_vec();
    if let Some(rope) = rope {
        layers.rotate(&mut turned, heads, rope, &sequences.positions)?;
    }
    let mut mixed = layers.attention(&turned, heads, scores, &sequences.spans)?;
    let (sinks, factors) = match sinks {
        Some(sinks) => {
            let sinks = operand(&mut graph, "sinks", sinks)?;
            let factors = mixed.add_sinks(heads, read("sinks", &sinks.storage)?)?;
            (sinks.node, Some(factors))
        }
        None => (Operand::absent().node, None),
    };
    let output = tensor(mixed.values, [n, heads.query * heads.width]);
    let derivative = MixGrad {
        turned: turned.into(),
        values: output.clone(),
        lse: mixed.lse.into(),
        heads,
        scores,
        rope: rope.cloned(),
        factors: factors.map(Arc::from),
        sequences: Arc::clone(sequences),
    };
    Ok(record(graph, output, [qkv.node, sinks], derivative))
}

#[derive(Clone, Debug)]
struct MixGrad {
    turned: Arc<[f32]>,
    values: FlexTensor,
    lse: Arc<[f32]>,
    heads: Heads,
    scores: Scores,
    rope: Option<RopeTable>,
    /// The factors `[N, A]` of the values, if there are sinks.
    factors: Option<Arc<[f32]>>,
    sequences: Arc<Sequences>,
}

impl Derivative<2> for MixGrad {
    fn gradients(self, upstream: FlexTensor, _: [bool; 2]) -> [Option<FlexTensor>; 2] {
        let (layers, heads) = (Layers::new(), self.heads);
        let (values, mut dvalues) = (reread(&self.values), Cow::Borrowed(reread(&upstream)));
        let mut dsinks = vec![0.0; heads.query];
        if let Some(factors) = &self.factors {
            // See `grpo_backend_cpu::layers::Mixed::add_sinks`.
            let of_heads = dvalues.to_mut().chunks_exact_mut(heads.width).zip(values.chunks_exact(heads.width));
            for (at, ((dvalues, values), factor)) in of_heads.zip(&factors[..]).enumerate() {
                let product: f32 = dvalues.iter().zip(values).map(|(dvalue, value)| dvalue * value).sum();
                dsinks[at % heads.query] -= (1.0 - factor) * product;
                dvalues.iter_mut().for_each(|dvalue| *dvalue *= factor);
            }
        }
        let of = AttentionGrad { qkv: &self.turned, values, lse: &self.lse, dvalues: &dvalues };
        let mut gradient = fitting(layers.attention_grad(of, heads, self.scores, &self.sequences.spans));
        if let Some(rope) = &self.rope {
            fitting(layers.rotate_grad(&mut gradient, heads, rope, &self.sequences.positions));
        }
        let dsinks = self.factors.is_some().then(|| tensor(dsinks, [heads.query]));
        [Some(tensor(gradient, [self.sequences.positions.len(), heads.row()])), dsinks]
    }
}

/// Computes the gated outputs `[N, Hv Dv]` of a Gated DeltaNet from its projected input `[N, C + Hv Dv + 2 Hv]`, its convolution `[C, L]`,
/// and the vectors `a_log`, `dt_bias` and `norm`. State and convolution start at zero in every sequence.
pub(crate) fn gated_delta_net(
    x: Tensor<2>,
    conv: Tensor<2>,
    [a_log, dt_bias, norm]: [Tensor<1>; 3],
    heads: DeltaHeads,
    eps: f64,
    sequences: &Arc<Sequences>,
) -> Result<Tensor<2>> {
    let [n, _] = x.dims();
    let mut graph = Graph::default();
    let x = operand(&mut graph, "x", x)?;
    let conv = operand(&mut graph, "conv1d", conv)?;
    let a_log = operand(&mut graph, "A_log", a_log)?;
    let dt_bias = operand(&mut graph, "dt_bias", dt_bias)?;
    let norm = operand(&mut graph, "norm", norm)?;
    let nodes = [x.node, conv.node, a_log.node, dt_bias.node, norm.node];
    let storage = [x.storage, conv.storage, a_log.storage, dt_bias.storage, norm.storage];
    for tensor in &storage {
        read("a tensor of a Gated DeltaNet", tensor)?;
    }
    let derivative = GatedDeltaNetGrad { storage: storage.into(), heads, eps, sequences: Arc::clone(sequences) };
    let (x, weights) = derivative.inputs();
    let y = Layers::new().gated_delta_net(x, heads, weights, &sequences.spans)?;
    Ok(record(graph, tensor(y, [n, heads.values()]), nodes, derivative))
}

#[derive(Clone, Debug)]
struct GatedDeltaNetGrad {
    /// x, the convolution, `a_log`, `dt_bias` and the norm.
    storage: Box<[FlexTensor; 5]>,
    heads: DeltaHeads,
    eps: f64,
    sequences: Arc<Sequences>,
}

impl GatedDeltaNetGrad {
    fn inputs(&self) -> (&[f32], DeltaWeights<'_>) {
        let [x, conv, a_log, dt_bias, norm] = self.storage.each_ref().map(reread);
        (x, DeltaWeights { conv, a_log, dt_bias, norm, eps: self.eps })
    }
}

impl Derivative<5> for GatedDeltaNetGrad {
    fn gradients(self, upstream: FlexTensor, _: [bool; 5]) -> [Option<FlexTensor>; 5] {
        let ((x, weights), heads, n) = (self.inputs(), self.heads, self.sequences.positions.len());
        let gradients = Layers::new().gated_delta_net_grad(x, heads, weights, &self.sequences.spans, reread(&upstream));
        let DeltaGrad { dx, dconv, da_log, ddt_bias, dnorm } = fitting(gradients);
        [
            Some(tensor(dx, [n, heads.row()])),
            Some(tensor(dconv, [heads.channels(), heads.taps])),
            Some(tensor(da_log, [heads.value])),
            Some(tensor(ddt_bias, [heads.value])),
            Some(tensor(dnorm, [heads.value_width])),
        ]
    }
}
