//! The decoder's operations as differentiable burn operations, on kernels of [`backend_cpu::layers`].
//!
//! All tensors are f32 rows `[N, ..]`. Operands of the forward pass are saved for the backward pass; storage is shared, not copied.

use super::weight::{Stored, Weight, widened};
use backend_cpu::layers::{
    Activation, Add, AttentionGrad, DeltaGrad, DeltaHeads, DeltaWeights, HeadNorms, HeadNormsGrad, Heads, Layers,
    RopeTable, Scores, Span,
};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use grpo_burn::custom_op::{Derivative, Graph, Operand, elements, record, tensor, values};
use grpo_core::TensorRef;
use policy::{Error, Result};
use std::borrow::Cow;
use std::sync::Arc;

/// Term that a linear layer adds to its product.
#[derive(Debug)]
pub(crate) enum Addend {
    /// Bias `[out]`.
    Bias(Tensor<1>),
    /// Residual stream `[N, out]`.
    Residual(Tensor<2>),
    Nothing,
}

/// Returns the row-major storage of a tensor, and joins its autodiff graph to `graph`.
pub(super) fn operand<const D: usize>(graph: &mut Graph, name: &'static str, tensor: Tensor<D>) -> Result<Operand> {
    *graph = graph.join(name, &tensor).map_err(Error::other)?;
    Ok(Operand::new(name, tensor).map_err(Error::other)?.row_major())
}

/// Returns the elements of an operand.
pub(super) fn read<'a>(name: &'static str, tensor: &'a FlexTensor) -> Result<&'a [f32]> {
    values(name, tensor).map_err(Error::other)
}

/// Returns the elements of a saved operand.
pub(super) fn reread(tensor: &FlexTensor) -> &[f32] {
    values("a tensor of the forward pass", tensor).expect("row-major f32, as in the forward pass")
}

/// Returns the result of a kernel whose shapes were checked in the forward pass.
pub(super) fn fitting<T>(result: grpo_core::Result<T>) -> T {
    result.expect("shapes of the forward pass")
}

/// Computes y `[N, out]` = x W + `add` with the kernels `layers`, for x `[N, in]` and a weight `[in, out]`.
pub(crate) fn linear(layers: Layers, x: Tensor<2>, weight: &Weight, add: Addend) -> Result<Tensor<2>> {
    let ([n, _], [input, output]) = (x.dims(), weight.dims());
    let dims = [n, input, output];
    let mut graph = Graph::default();
    let x = operand(&mut graph, "x", x)?;
    let (third, added) = add.operand(&mut graph)?;
    let (y, node, factor) = match weight {
        Weight::Parameter(weight) => {
            let weight = operand(&mut graph, "weight", weight.val())?;
            let values = read("weight", &weight.storage)?;
            let y = layers.linear(read("x", &x.storage)?, values, added.add(&third)?, dims)?;
            (y, weight.node, Factor::Parameter([x.storage, weight.storage].into()))
        }
        Weight::Stored(weight) => {
            let y = layers.linear_stored(read("x", &x.storage)?, &weight.view()?, added.add(&third)?, n)?;
            (y, Operand::absent().node, Factor::Stored(weight.clone()))
        }
    };
    let derivative = LinearGrad { layers, factor, added, dims };
    Ok(record(graph, tensor(y, [n, output]), [x.node, node, third.node], derivative))
}

impl Addend {
    /// Returns the addend as an operand of the operation.
    fn operand(self, graph: &mut Graph) -> Result<(Operand, Added)> {
        Ok(match self {
            Self::Nothing => (Operand::absent(), Added::Nothing),
            Self::Bias(bias) => (operand(graph, "bias", bias)?, Added::Bias),
            Self::Residual(residual) => (operand(graph, "residual", residual)?, Added::Residual),
        })
    }
}

#[derive(Clone, Copy, Debug)]
enum Added {
    Bias,
    Residual,
    Nothing,
}

impl Added {
    /// Returns the addend as an argument of the kernels.
    fn add(self, operand: &Operand) -> Result<Add<'_>> {
        Ok(match self {
            Self::Nothing => Add::Nothing,
            Self::Bias => Add::Rows(read("bias", &operand.storage)?),
            Self::Residual => Add::Residual(read("residual", &operand.storage)?),
        })
    }

    /// Returns the gradient of the addend, given the gradient of the output `[N, out]`.
    fn gradient(self, upstream: &FlexTensor, tracked: bool, dims @ [_, output]: [usize; 2]) -> Option<FlexTensor> {
        match self {
            Self::Bias if tracked => {
                Some(tensor(fitting(Layers::new().linear_dbias(reread(upstream), dims)), [output]))
            }
            Self::Residual if tracked => Some(upstream.clone()),
            _ => None,
        }
    }
}

/// The saved operands of a product.
#[derive(Clone, Debug)]
enum Factor {
    /// x and the weight.
    Parameter(Box<[FlexTensor; 2]>),
    /// A frozen, memory-mapped weight.
    Stored(Stored),
}

#[derive(Clone, Debug)]
struct LinearGrad {
    layers: Layers,
    factor: Factor,
    added: Added,
    dims: [usize; 3],
}

impl Derivative<3> for LinearGrad {
    fn gradients(self, upstream: FlexTensor, [of_x, of_weight, third]: [bool; 3]) -> [Option<FlexTensor>; 3] {
        let (layers, dims @ [n, input, output]) = (self.layers, self.dims);
        let dy = reread(&upstream);
        let dx = || match &self.factor {
            Factor::Parameter(operands) => layers.linear_dx(reread(&operands[1]), dy, dims),
            Factor::Stored(weight) => layers.linear_stored_dx(&weight.view().expect("read in the forward pass"), dy, n),
        };
        let dx = of_x.then(|| tensor(fitting(dx()), [n, input]));
        let dweight = match &self.factor {
            Factor::Parameter(operands) if of_weight => {
                Some(tensor(fitting(layers.linear_dweight(reread(&operands[0]), dy, dims)), [input, output]))
            }
            _ => None,
        };
        [dx, dweight, self.added.gradient(&upstream, third, [n, output])]
    }
}

/// Looks up the rows `ids` of an embedding `[V, H]`; the row of `padding` gets no gradient.
pub(crate) fn embedding(weight: Tensor<2>, ids: &[u32], padding: Option<usize>) -> Result<Tensor<2>> {
    let [vocab, width] = weight.dims();
    let mut graph = Graph::default();
    let weight = operand(&mut graph, "embed_tokens", weight)?;
    let table = read("embed_tokens", &weight.storage)?;
    let rows = ids.iter().flat_map(|id| &table[*id as usize * width..(*id as usize + 1) * width]).copied().collect();
    let derivative = EmbeddingGrad { ids: ids.into(), padding, dims: [vocab, width] };
    Ok(record(graph, tensor(rows, [ids.len(), width]), [weight.node], derivative))
}

#[derive(Clone, Debug)]
struct EmbeddingGrad {
    ids: Arc<[u32]>,
    padding: Option<usize>,
    dims: [usize; 2],
}

impl Derivative<1> for EmbeddingGrad {
    fn gradients(self, upstream: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let [vocab, width] = self.dims;
        // Zeroed memory is allocated lazily, so only rows of these ids take memory.
        let mut gradient = vec![0.0; vocab * width];
        for (id, row) in self.ids.iter().zip(reread(&upstream).chunks_exact(width)) {
            let id = *id as usize;
            if self.padding == Some(id) {
                continue;
            }
            let to = &mut gradient[id * width..(id + 1) * width];
            to.iter_mut().zip(row).for_each(|(to, g)| *to += g);
        }
        [Some(tensor(gradient, self.dims))]
    }
}

/// Returns `y: [N, out]` plus `scale` x A^T B^T in the columns from `first` on, for x `[N, in]`, A `[r, in]` and B `[width, r]`.
pub(crate) fn low_rank(
    x: Tensor<2>,
    y: Tensor<2>,
    a: Tensor<2>,
    b: Tensor<2>,
    scale: f32,
    first: usize,
) -> Result<Tensor<2>> {
    let ([n, input], [_, output], [rank, _], [width, _]) = (x.dims(), y.dims(), a.dims(), b.dims());
    let mut graph = Graph::default();
    let x = operand(&mut graph, "x", x)?;
    let y = operand(&mut graph, "y", y)?;
    let a = operand(&mut graph, "lora_A", a)?;
    let b = operand(&mut graph, "lora_B", b)?;
    let layers = Layers::new();
    let inner = layers.linear_dx(read("lora_A", &a.storage)?, read("x", &x.storage)?, [n, rank, input])?;
    let outer = layers.linear_dx(read("lora_B", &b.storage)?, &inner, [n, width, rank])?;
    let mut sum = read("y", &y.storage)?.to_vec();
    for (row, added) in sum.chunks_exact_mut(output).zip(outer.chunks_exact(width)) {
        row[first..first + width].iter_mut().zip(added).for_each(|(y, added)| *y += scale * added);
    }
    let parents = [x.node, y.node, a.node, b.node];
    let dims = LowRankDims { n, input, output, rank, width, first };
    let derivative = LowRankGrad { x: x.storage, a: a.storage, b: b.storage, inner, scale, dims };
    Ok(record(graph, tensor(sum, [n, output]), parents, derivative))
}

#[derive(Clone, Copy, Debug)]
struct LowRankDims {
    n: usize,
    input: usize,
    output: usize,
    rank: usize,
    width: usize,
    first: usize,
}

#[derive(Clone, Debug)]
struct LowRankGrad {
    x: FlexTensor,
    a: FlexTensor,
    b: FlexTensor,
    /// x A^T `[N, r]`.
    inner: Vec<f32>,
    scale: f32,
    dims: LowRankDims,
}

impl Derivative<4> for LowRankGrad {
    fn gradients(self, upstream: FlexTensor, [x, _, a, b]: [bool; 4]) -> [Option<FlexTensor>; 4] {
        let LowRankDims { n, input, output, rank, width, first } = self.dims;
        let layers = Layers::new();
        let rows = reread(&upstream).chunks_exact(output).flat_map(|row| &row[first..first + width]);
        let dy: Vec<f32> = rows.map(|dy| self.scale * dy).collect();
        let dinner = fitting(layers.linear(&dy, reread(&self.b), Add::Nothing, [n, width, rank]));
        let dx = || fitting(layers.linear(&dinner, reread(&self.a), Add::Nothing, [n, rank, input]));
        let da = || fitting(layers.linear_dweight(&dinner, reread(&self.x), [n, rank, input]));
        let db = || fitting(layers.linear_dweight(&dy, &self.inner, [n, width, rank]));
        let of_x = x.then(|| tensor(dx(), [n, input]));
        let (of_a, of_b) = (a.then(|| tensor(da(), [rank, input])), b.then(|| tensor(db(), [width, rank])));
        [of_x, Some(upstream), of_a, of_b]
    }
}

/// Computes a head `[V, H]` + `scale` B A, for A `[r, H]` and B `[V, r]`.
pub(crate) fn adapted_head(head: Tensor<2>, a: Tensor<2>, b: Tensor<2>, scale: f32) -> Result<Tensor<2>> {
    let ([vocab, width], [rank, _]) = (head.dims(), a.dims());
    let dims = [vocab, rank, width];
    let mut graph = Graph::default();
    let head = operand(&mut graph, "head", head)?;
    let a = operand(&mut graph, "lora_A", a)?;
    let b = operand(&mut graph, "lora_B", b)?;
    let scaled: Vec<f32> = read("lora_B", &b.storage)?.iter().map(|b| scale * b).collect();
    let start = match elements("head", &head.storage).map_err(Error::other)? {
        TensorRef::F32(head) => Cow::Borrowed(head),
        stored => Cow::Owned(widened(stored)),
    };
    let sum = Layers::new().linear(&scaled, read("lora_A", &a.storage)?, Add::Residual(&start), dims)?;
    let derivative = AdaptedHeadGrad { a: a.storage, scaled, scale, dims };
    Ok(record(graph, tensor(sum, [vocab, width]), [head.node, a.node, b.node], derivative))
}

#[derive(Clone, Debug)]
struct AdaptedHeadGrad {
    a: FlexTensor,
    /// scale B.
    scaled: Vec<f32>,
    scale: f32,
    dims: [usize; 3],
}

impl Derivative<3> for AdaptedHeadGrad {
    fn gradients(self, upstream: FlexTensor, [_, a, b]: [bool; 3]) -> [Option<FlexTensor>; 3] {
        let (layers, dims @ [vocab, rank, width]) = (Layers::new(), self.dims);
        let dy = reread(&upstream);
        let da = || tensor(fitting(layers.linear_dweight(&self.scaled, dy, dims)), [rank, width]);
        let db = || {
            let mut gradient = fitting(layers.linear_dx(reread(&self.a), dy, [vocab, rank, width]));
            gradient.iter_mut().for_each(|g| *g *= self.scale);
            tensor(gradient, [vocab, rank])
        };
        let (of_a, of_b) = (a.then(da), b.then(db));
        [Some(upstream), of_a, of_b]
    }
}

/// Returns a weight plus `offset`; the derivative with respect to the sum is that with respect to the weight.
fn shifted(weight: FlexTensor, offset: f32) -> Result<FlexTensor> {
    if offset == 0.0 {
        return Ok(weight);
    }
    let sums: Vec<f32> = read("weight", &weight)?.iter().map(|weight| weight + offset).collect();
    let count = sums.len();
    Ok(tensor(sums, [count]))
}

/// Computes x / sqrt(mean(x^2) + eps) * (w + offset) for x `[N, H]` and a weight w `[H]`.
pub(crate) fn rms_norm(x: Tensor<2>, weight: Tensor<1>, offset: f32, eps: f64) -> Result<Tensor<2>> {
    let dims = x.dims();
    let mut graph = Graph::default();
    let x = operand(&mut graph, "x", x)?;
    let weight = operand(&mut graph, "weight", weight)?;
    let factor = shifted(weight.storage, offset)?;
    let (y, scale) = Layers::new().rms_norm(read("x", &x.storage)?, read("weight", &factor)?, eps)?;
    let derivative = RmsNormGrad { x: x.storage, weight: factor, scale, dims };
    Ok(record(graph, tensor(y, dims), [x.node, weight.node], derivative))
}

#[derive(Clone, Debug)]
struct RmsNormGrad {
    x: FlexTensor,
    weight: FlexTensor,
    scale: Vec<f32>,
    dims: [usize; 2],
}

impl Derivative<2> for RmsNormGrad {
    fn gradients(self, upstream: FlexTensor, _: [bool; 2]) -> [Option<FlexTensor>; 2] {
        let (x, weight, dy) = (reread(&self.x), reread(&self.weight), reread(&upstream));
        let (dx, dweight) = fitting(Layers::new().rms_norm_grad(x, weight, &self.scale, dy));
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
            // See `backend_cpu::layers::Mixed::add_sinks`.
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
