//! Linear layers, embeddings and adapters.

use super::{fitting, operand, read, reread};
use crate::decoder::weight::{Stored, Weight, widened};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use grpo_backend_cpu::layers::{Add, Layers};
use grpo_burn::custom_op::{Derivative, Graph, Operand, elements, record, tensor};
use grpo_core::TensorRef;
use grpo_policy::{Error, Result};
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
