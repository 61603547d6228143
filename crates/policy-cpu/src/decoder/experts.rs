//! The mixture of experts of a layer as differentiable burn operations, on the kernels of [`grpo_backend_cpu::layers`].
//!
//! Letters in shapes: E experts, k experts of a token, I width of an expert's MLP, r rank of an expert's adapter.

use super::autodiff_ops::{fitting, fork, operand, read, reread};
use super::build::Builder;
use super::host;
use super::layers::{DenseMlp, Linear, activation};
use super::lora::LowRank;
use super::routers::Routers;
use super::weight::{Stored, Weight};
use burn::backend::autodiff::ops::NodeGuard;
use burn::backend::flex::FlexTensor;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use grpo_backend_cpu::layers::{
    Activation, ExpertAdapter, ExpertAdapterGrad, ExpertGroups, ExpertMatrix, ExpertWeights, ExpertsGrad, Layers,
    Routing,
};
use grpo_burn::custom_op::{Derivative, Graph, Operand, record, tensor};
use grpo_models::Experts;
use grpo_policy::Result;
use rayon::prelude::*;
use std::sync::Arc;

/// A mixture of experts (arXiv 1701.06538): the router chooses k of E MLPs for each token.
#[derive(Module, Debug)]
pub struct ExpertsMlp {
    /// Router `[H, E]`.
    pub router: Linear,
    /// Gate and up of all experts, `[E H, 2I]`.
    pub experts_gate_up: Weight,
    /// Bias of gate and up `[E, 2I]`, in gpt-oss.
    pub experts_gate_up_bias: Option<Param<Tensor<2>>>,
    /// Output projections of all experts, `[E I, H]`.
    pub experts_down: Weight,
    /// Bias of the output projections `[E, H]`, in gpt-oss.
    pub experts_down_bias: Option<Param<Tensor<2>>>,
    /// Adapter of gate and up.
    pub experts_gate_up_adapter: Option<LowRank>,
    /// Adapter of the output projections.
    pub experts_down_adapter: Option<LowRank>,
    /// Bias `[E]` of the ranks of experts, which is never trained, in GLM-4.x.
    pub correction_bias: Option<Param<Tensor<1>>>,
    /// The MLP of every token.
    pub shared: Option<DenseMlp>,
    /// Gate `[H, 1]` of the shared expert, in Qwen2-MoE.
    pub shared_gate: Option<Linear>,
    #[module(skip)]
    spec: Experts,
    #[module(skip)]
    activation: Activation,
    /// The kernels of the products of experts.
    #[module(skip)]
    pub(super) kernels: Layers,
}

/// The name of the bias of the ranks of experts, which is never trained.
pub(super) const CORRECTION_BIAS: &str = "correction_bias";

/// Returns the routing of tokens by a router's logits `[N, E]`. `replay` may replace the chosen experts `[N, k]`.
pub(super) fn routed(
    spec: &Experts,
    bias: Option<&[f32]>,
    logits: &[f32],
    replay: impl FnOnce(Vec<u32>) -> Vec<u32>,
) -> Result<Routing> {
    let (kernels, experts, top) = (Layers::new(), spec.num_experts, spec.num_experts_per_tok);
    let (Some(router), Some(bias)) = (spec.sigmoid, bias) else {
        let chosen = replay(kernels.choose(logits, experts, top)?);
        return Ok(kernels.route_to(logits, experts, top, chosen, spec.norm_topk_prob)?);
    };
    let groups = ExpertGroups { bias, count: router.n_group, chosen: router.topk_group };
    let chosen = replay(kernels.choose(&kernels.sigmoid_ranks(logits, experts, groups)?, experts, top)?);
    let factor = router.routed_scaling_factor as f32;
    Ok(kernels.route_by_sigmoid(logits, experts, top, chosen, spec.norm_topk_prob, factor)?)
}

/// Returns `[in, out]` of gate and up of an expert, and of its output projection.
pub(super) fn dims(spec: &Experts, hidden: usize) -> [[usize; 2]; 2] {
    let wide = spec.moe_intermediate_size;
    [[hidden, 2 * wide], [wide, hidden]]
}

impl ExpertsMlp {
    pub(super) fn new(of: &mut Builder<'_>, name: &str, spec: &Experts) -> Result<Self> {
        let (hidden, count, has_biases) = (of.config.hidden_size, spec.num_experts, spec.clamped.is_some());
        let [gate_up, down] = dims(spec, hidden);
        let all = |[input, output]: [usize; 2]| [count * input, output];
        let shared =
            spec.shared_expert.map(|shared| DenseMlp::new(of, &format!("{name}.shared"), shared.intermediate_size));
        let gated = spec.shared_expert.filter(|shared| shared.is_gated);
        let gate = gated.map(|_| Linear::new(of, &format!("{name}.shared_gate"), [hidden, 1], false));
        let (shared, shared_gate) = (shared.transpose()?, gate.transpose()?);
        let bias = |of: &mut Builder<'_>, name: &str, width: usize| {
            has_biases.then(|| of.parameter(name, [count, width])).transpose()
        };
        Ok(Self {
            router: Linear::new(of, &format!("{name}.router"), [hidden, count], has_biases)?,
            experts_gate_up: of.weight(&format!("{name}.experts_gate_up"), all(gate_up))?,
            experts_gate_up_bias: bias(of, &format!("{name}.experts_gate_up_bias"), gate_up[1])?,
            experts_down: of.weight(&format!("{name}.experts_down"), all(down))?,
            experts_down_bias: bias(of, &format!("{name}.experts_down_bias"), down[1])?,
            experts_gate_up_adapter: None,
            experts_down_adapter: None,
            correction_bias: spec
                .sigmoid
                .map(|_| of.parameter(&format!("{name}.{CORRECTION_BIAS}"), [count]))
                .transpose()?,
            shared,
            shared_gate,
            spec: spec.clone(),
            activation: activation(of.config),
            kernels: Layers::new(),
        })
    }

    /// Returns the weighted sum of the outputs of each token's experts, `x` `[N, H]` -> `[N, H]`.
    pub(crate) fn forward(&self, x: Tensor<2>, routers: &mut Routers) -> Result<Tensor<2>> {
        let [to_router, x] = fork(x)?;
        let logits = self.router.forward(to_router)?;
        let [logits, observed] = if routers.with_aux_loss() { fork(logits)? } else { [logits.clone(), logits] };
        let bias = self.correction_bias()?;
        let (weights, routing) = route(logits, &self.spec, bias.as_deref(), routers)?;
        routers.observe(observed, &routing)?;
        self.mix(x, weights, routing)
    }

    /// Returns the bias of the ranks of experts, if there is one.
    pub(super) fn correction_bias(&self) -> Result<Option<Vec<f32>>> {
        let values = |bias: &Param<Tensor<1>>| Ok(host::read(&host::storage(bias.val())?)?.to_vec());
        self.correction_bias.as_ref().map(values).transpose()
    }

    fn mix(&self, x: Tensor<2>, weights: Tensor<2>, routing: Arc<Routing>) -> Result<Tensor<2>> {
        let [n, hidden] = x.dims();
        let [gate_up_dims, down_dims] = dims(&self.spec, hidden);
        let mut graph = Graph::default();
        let x = operand(&mut graph, "x", x)?;
        let weights = operand(&mut graph, "weights", weights)?;
        let (gate_up, down) = (self.gate_up(gate_up_dims), self.down(down_dims));
        let (gate_up, [w_gate_up, b_gate_up, a_gate_up, c_gate_up]) = Matrices::new(&mut graph, gate_up)?;
        let (down, [w_down, b_down, a_down, c_down]) = Matrices::new(&mut graph, down)?;
        let (y, gates) =
            self.kernels.experts(read("x", &x.storage)?, &routing, &gate_up.view()?, &down.view()?, self.activation)?;
        let (activation, kernels) = (self.activation, self.kernels);
        let derivative = MixGrad { x: x.storage, gates: gates.into(), gate_up, down, routing, activation, kernels };
        let parents =
            [x.node, weights.node, w_gate_up, b_gate_up, a_gate_up, c_gate_up, w_down, b_down, a_down, c_down];
        Ok(record(graph, tensor(y, [n, hidden]), parents, derivative))
    }

    fn gate_up(&self, dims: [usize; 2]) -> Parameters<'_> {
        Parameters {
            weight: &self.experts_gate_up,
            bias: &self.experts_gate_up_bias,
            adapter: &self.experts_gate_up_adapter,
            dims,
        }
    }

    fn down(&self, dims: [usize; 2]) -> Parameters<'_> {
        Parameters {
            weight: &self.experts_down,
            bias: &self.experts_down_bias,
            adapter: &self.experts_down_adapter,
            dims,
        }
    }

    /// Returns the adapters of the parameters of experts, with the names of the parameters in transformers.
    pub(super) fn adapters(&mut self) -> [(&'static str, &mut Option<LowRank>); 2] {
        [("gate_up_proj", &mut self.experts_gate_up_adapter), ("down_proj", &mut self.experts_down_adapter)]
    }

    /// Returns the values `[E in, out]` of the parameter `name` plus its adapter; `None` if it has no adapter.
    pub(super) fn merged(&self, name: &str, values: &[f32]) -> Result<Option<Vec<f32>>> {
        let adapter = match name {
            "mlp.experts_gate_up" => &self.experts_gate_up_adapter,
            "mlp.experts_down" => &self.experts_down_adapter,
            _ => &None,
        };
        let Some(adapter) = adapter else { return Ok(None) };
        let mut values = values.to_vec();
        let ([all, input], [output, _]) = (adapter.a.dims(), adapter.b.dims());
        let (rank, scale) = (all / self.spec.num_experts, adapter.scale as f32);
        let a = to_vec(adapter.a.val())?;
        let b = by_expert(&to_vec(adapter.b.val())?, self.spec.num_experts, rank);
        let experts = a.chunks_exact(rank * input).zip(b.chunks_exact(output * rank));
        for (values, (a, b)) in values.chunks_exact_mut(input * output).zip(experts) {
            let turned: Vec<f32> = (0..input * rank).map(|at| scale * a[at % rank * input + at / rank]).collect();
            let product = Layers::new().linear_dx(b, &turned, [input, output, rank])?;
            values.iter_mut().zip(product).for_each(|(value, product)| *value += product);
        }
        Ok(Some(values))
    }

    /// Returns the sizes.
    pub(super) fn spec(&self) -> &Experts {
        &self.spec
    }

    /// Returns gate and up, and the output projection, of all experts for sampling.
    pub(super) fn packed(&self, hidden: usize) -> Result<[PackedExperts; 2]> {
        let [gate_up, down] = dims(&self.spec, hidden);
        Ok([
            PackedExperts::new(self.kernels, self.gate_up(gate_up), self.spec.num_experts)?,
            PackedExperts::new(self.kernels, self.down(down), self.spec.num_experts)?,
        ])
    }
}

/// Returns the weights `[N, k]` of each token's experts, given the router's logits `[N, E]`. `routers` may have other experts for a token.
fn route(
    logits: Tensor<2>,
    spec: &Experts,
    bias: Option<&[f32]>,
    routers: &mut Routers,
) -> Result<(Tensor<2>, Arc<Routing>)> {
    let [n, experts] = logits.dims();
    let top = spec.num_experts_per_tok;
    let mut graph = Graph::default();
    let logits = operand(&mut graph, "logits", logits)?;
    let routing = routed(spec, bias, read("logits", &logits.storage)?, |chosen| routers.replay(chosen, top))?;
    let (weights, routing) = (tensor(routing.weights.clone(), [n, top]), Arc::new(routing));
    let derivative = RouteGrad { logits: logits.storage, routing: Arc::clone(&routing), dims: [n, experts] };
    Ok((record(graph, weights, [logits.node], derivative), routing))
}

#[derive(Clone, Debug)]
struct RouteGrad {
    logits: FlexTensor,
    routing: Arc<Routing>,
    dims: [usize; 2],
}

impl Derivative<1> for RouteGrad {
    fn gradients(self, upstream: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let gradient = Layers::new().route_grad(&self.routing, reread(&self.logits), reread(&upstream));
        [Some(tensor(fitting(gradient), self.dims))]
    }
}

/// The parameters of one matrix of all experts.
#[derive(Clone, Copy)]
struct Parameters<'a> {
    weight: &'a Weight,
    bias: &'a Option<Param<Tensor<2>>>,
    adapter: &'a Option<LowRank>,
    /// `[in, out]`.
    dims: [usize; 2],
}

/// The matrices, biases and adapters of all experts in an operation.
#[derive(Clone, Debug)]
struct Matrices {
    matrices: Form,
    biases: Option<FlexTensor>,
    adapter: Option<Adapter<FlexTensor>>,
    /// `[in, out]`.
    dims: [usize; 2],
}

/// Adapters of all experts.
#[derive(Clone, Debug)]
struct Adapter<A> {
    /// A `[E r, in]`.
    a: A,
    /// B `[E, out, r]`.
    b: Vec<f32>,
    rank: usize,
    scale: f32,
}

impl<A> Adapter<A> {
    fn new(of: &LowRank, a: A, experts: usize) -> Result<Self> {
        let rank = of.a.dims()[0] / experts.max(1);
        Ok(Self { a, b: by_expert(&to_vec(of.b.val())?, experts, rank), rank, scale: of.scale as f32 })
    }

    fn view<'a>(&'a self, a: &'a [f32]) -> ExpertAdapter<'a> {
        ExpertAdapter { a, b: &self.b, rank: self.rank, scale: self.scale }
    }
}

/// Returns B `[out, r E]` of PEFT, in which the columns of an expert are E apart, as `[E, out, r]`.
fn by_expert(b: &[f32], experts: usize, rank: usize) -> Vec<f32> {
    let mut to = vec![0.0; b.len()];
    to.par_chunks_exact_mut((b.len() / experts.max(1)).max(1)).enumerate().for_each(|(expert, to)| {
        for (to, row) in to.chunks_exact_mut(rank.max(1)).zip(b.chunks_exact((rank * experts).max(1))) {
            to.iter_mut().zip(row[expert..].iter().step_by(experts)).for_each(|(to, x)| *to = *x);
        }
    });
    to
}

/// The inverse of [`by_expert`].
fn by_column(b: &[f32], experts: usize, rank: usize) -> Vec<f32> {
    let output = b.len() / (experts * rank).max(1);
    let mut to = vec![0.0; b.len()];
    to.par_chunks_exact_mut((rank * experts).max(1)).enumerate().for_each(|(row, to)| {
        for (j, to) in to.chunks_exact_mut(experts.max(1)).enumerate() {
            to.iter_mut().enumerate().for_each(|(expert, to)| *to = b[(expert * output + row) * rank + j]);
        }
    });
    to
}

fn to_vec(tensor: Tensor<2>) -> Result<Vec<f32>> {
    Ok(host::read(&host::storage(tensor)?)?.to_vec())
}

#[derive(Clone, Debug)]
enum Form {
    /// `[E in, out]`.
    Parameter(FlexTensor),
    /// A frozen, memory-mapped weight of each expert.
    Stored(Arc<[Stored]>),
}

impl Matrices {
    /// Returns the matrices, and the nodes of the weight, of the biases, and of A and B of the adapter.
    fn new(graph: &mut Graph, of: Parameters<'_>) -> Result<(Self, [NodeGuard; 4])> {
        let dims = of.dims;
        let (matrices, node) = match of.weight {
            Weight::Parameter(weight) => {
                let weight = operand(graph, "experts", weight.val())?;
                (Form::Parameter(weight.storage), weight.node)
            }
            Weight::Stored(stored) => (Form::Stored(stored.of_experts(dims[1])), Operand::absent().node),
        };
        let (biases, of_biases) = match of.bias {
            Some(biases) => {
                let biases = operand(graph, "biases", biases.val())?;
                (Some(biases.storage), biases.node)
            }
            None => (None, Operand::absent().node),
        };
        let (adapter, [of_a, of_b]) = match of.adapter {
            Some(adapter) => {
                let a = operand(graph, "lora_A", adapter.a.val())?;
                let b = operand(graph, "lora_B", adapter.b.val())?;
                let experts = match &matrices {
                    Form::Parameter(_) => of.weight.dims()[0] / dims[0].max(1),
                    Form::Stored(experts) => experts.len(),
                };
                (Some(Adapter::new(adapter, a.storage, experts)?), [a.node, b.node])
            }
            None => (None, [Operand::absent().node, Operand::absent().node]),
        };
        Ok((Self { matrices, biases, adapter, dims }, [node, of_biases, of_a, of_b]))
    }

    fn view(&self) -> Result<ExpertWeights<'_>> {
        let matrices = match &self.matrices {
            Form::Parameter(weight) => {
                read("experts", weight)?.chunks_exact(self.dims[0] * self.dims[1]).map(ExpertMatrix::Plain).collect()
            }
            Form::Stored(experts) => {
                experts.iter().map(|expert| Ok(ExpertMatrix::Stored(expert.view()?))).collect::<Result<_>>()?
            }
        };
        let biases = self.biases.as_ref().map(|biases| read("biases", biases)).transpose()?;
        let adapter =
            self.adapter.as_ref().map(|adapter| Ok::<_, grpo_policy::Error>(adapter.view(read("lora_A", &adapter.a)?)));
        Ok(ExpertWeights { matrices, biases, adapter: adapter.transpose()?, dims: self.dims })
    }
}

#[derive(Clone, Debug)]
struct MixGrad {
    x: FlexTensor,
    gates: Arc<[f32]>,
    gate_up: Matrices,
    down: Matrices,
    routing: Arc<Routing>,
    activation: Activation,
    kernels: Layers,
}

impl Derivative<10> for MixGrad {
    fn gradients(self, upstream: FlexTensor, tracked: [bool; 10]) -> [Option<FlexTensor>; 10] {
        let of_weights = tracked[2] || tracked[3] || tracked[6] || tracked[7];
        let [gate_up, down] = [&self.gate_up, &self.down].map(|of| of.view().expect("read in the forward pass"));
        let grad = fitting(self.kernels.experts_grad(
            reread(&self.x),
            &self.routing,
            &gate_up,
            &down,
            self.activation,
            &self.gates,
            reread(&upstream),
            of_weights,
        ));
        let ([hidden, both], [width, _]) = (gate_up.dims, down.dims);
        let (n, experts) = (grad.dx.len() / hidden, gate_up.matrices.len());
        let ExpertsGrad { dx, dweights, dgate_up, dgate_up_bias, ddown, ddown_bias, .. } = grad;
        let top = dweights.len() / n.max(1);
        let of = |is_tracked: bool, values: Vec<f32>, shape: [usize; 2]| is_tracked.then(|| tensor(values, shape));
        let of_adapter = |[a, b]: [bool; 2], grad: ExpertAdapterGrad, of: &Matrices| {
            let rank = of.adapter.as_ref().map_or(0, |adapter| adapter.rank);
            let [input, output] = of.dims;
            let da = a.then(|| tensor(grad.da, [experts * rank, input]));
            (da, b.then(|| tensor(by_column(&grad.db, experts, rank), [output, rank * experts])))
        };
        let (a_gate_up, b_gate_up) = of_adapter([tracked[4], tracked[5]], grad.dgate_up_adapter, &self.gate_up);
        let (a_down, b_down) = of_adapter([tracked[8], tracked[9]], grad.ddown_adapter, &self.down);
        [
            of(tracked[0], dx, [n, hidden]),
            of(tracked[1], dweights, [n, top]),
            of(tracked[2], dgate_up, [experts * hidden, both]),
            of(tracked[3], dgate_up_bias, [experts, both]),
            a_gate_up,
            b_gate_up,
            of(tracked[6], ddown, [experts * width, hidden]),
            of(tracked[7], ddown_bias, [experts, hidden]),
            a_down,
            b_down,
        ]
    }
}

/// A matrix of all experts, packed for sampling.
#[derive(Debug)]
pub(super) struct PackedExperts {
    matrices: Vec<grpo_backend_cpu::layers::PackedWeight>,
    biases: Option<Vec<f32>>,
    /// Adapters stay separate: merging them would need an f32 copy of all experts.
    adapter: Option<Adapter<Vec<f32>>>,
    dims: [usize; 2],
}

impl PackedExperts {
    fn new(kernels: Layers, of: Parameters<'_>, experts: usize) -> Result<Self> {
        let Parameters { weight, bias, adapter, dims } = of;
        let matrices = match weight {
            Weight::Parameter(weight) => {
                let values = host::storage(weight.val())?;
                let matrices = host::read(&values)?.chunks_exact(dims[0] * dims[1]);
                matrices.map(|matrix| Ok(kernels.pack_weight(matrix, dims)?)).collect::<Result<_>>()?
            }
            Weight::Stored(stored) => {
                let experts = stored.of_experts(dims[1]);
                experts.iter().map(|expert| Ok(kernels.pack_stored(&expert.view()?))).collect::<Result<_>>()?
            }
        };
        let values = |biases: &Param<Tensor<2>>| Ok::<_, grpo_policy::Error>(host::to_host(biases.val()));
        let adapter = adapter.as_ref().map(|adapter| Adapter::new(adapter, to_vec(adapter.a.val())?, experts));
        Ok(Self { matrices, biases: bias.as_ref().map(values).transpose()?, adapter: adapter.transpose()?, dims })
    }

    pub(super) fn view(&self) -> ExpertWeights<'_> {
        ExpertWeights {
            matrices: self.matrices.iter().map(ExpertMatrix::Packed).collect(),
            biases: self.biases.as_deref(),
            adapter: self.adapter.as_ref().map(|adapter| adapter.view(&adapter.a)),
            dims: self.dims,
        }
    }
}
