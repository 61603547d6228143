//! The mixture of experts of a layer as differentiable burn operations, on the kernels of [`backend_cpu::layers`].
//!
//! Letters in shapes: E experts, k experts of a token, I width of an expert's MLP.

use super::autodiff_ops::{fitting, operand, read, reread};
use super::build::Builder;
use super::layers::{Linear, activation};
use super::params;
use super::routers::Routers;
use super::weight::{Stored, Weight};
use backend_cpu::layers::{Activation, ExpertMatrix, ExpertWeights, ExpertsGrad, Layers, Routing};
use burn::backend::flex::FlexTensor;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use grpo_burn::custom_op::{Derivative, Graph, Operand, record, tensor};
use models::Experts;
use policy::Result;
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
    #[module(skip)]
    spec: Experts,
    #[module(skip)]
    activation: Activation,
    /// The kernels of the products of experts.
    #[module(skip)]
    pub(super) kernels: Layers,
}

/// Returns `true` if the parameter `name` belongs to a router.
pub(super) fn is_router(name: &str) -> bool {
    name.contains(".mlp.router.")
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
        let bias = |of: &mut Builder<'_>, name: &str, width: usize| {
            has_biases.then(|| of.parameter(name, [count, width])).transpose()
        };
        Ok(Self {
            router: Linear::new(of, &format!("{name}.router"), [hidden, count], has_biases)?,
            experts_gate_up: of.weight(&format!("{name}.experts_gate_up"), all(gate_up))?,
            experts_gate_up_bias: bias(of, &format!("{name}.experts_gate_up_bias"), gate_up[1])?,
            experts_down: of.weight(&format!("{name}.experts_down"), all(down))?,
            experts_down_bias: bias(of, &format!("{name}.experts_down_bias"), down[1])?,
            spec: spec.clone(),
            activation: activation(of.config),
            kernels: Layers::new(),
        })
    }

    /// Returns the weighted sum of the outputs of each token's experts, `x` `[N, H]` -> `[N, H]`.
    pub(crate) fn forward(&self, x: Tensor<2>, routers: &mut Routers) -> Result<Tensor<2>> {
        let logits = self.router.forward(x.clone())?;
        let (weights, routing) = route(logits.clone(), &self.spec, routers)?;
        routers.observe(logits, &routing)?;
        self.mix(x, weights, routing)
    }

    fn mix(&self, x: Tensor<2>, weights: Tensor<2>, routing: Arc<Routing>) -> Result<Tensor<2>> {
        let [n, hidden] = x.dims();
        let [gate_up_dims, down_dims] = dims(&self.spec, hidden);
        let mut graph = Graph::default();
        let x = operand(&mut graph, "x", x)?;
        let weights = operand(&mut graph, "weights", weights)?;
        let gate_up = Matrices::new(&mut graph, &self.experts_gate_up, &self.experts_gate_up_bias, gate_up_dims)?;
        let down = Matrices::new(&mut graph, &self.experts_down, &self.experts_down_bias, down_dims)?;
        let ((gate_up, [first, second]), (down, [third, fourth])) = (gate_up, down);
        let (y, gates) =
            self.kernels.experts(read("x", &x.storage)?, &routing, &gate_up.view()?, &down.view()?, self.activation)?;
        let (activation, kernels) = (self.activation, self.kernels);
        let derivative = MixGrad { x: x.storage, gates: gates.into(), gate_up, down, routing, activation, kernels };
        Ok(record(graph, tensor(y, [n, hidden]), [x.node, weights.node, first, second, third, fourth], derivative))
    }

    /// Returns the sizes.
    pub(super) fn spec(&self) -> &Experts {
        &self.spec
    }

    /// Returns gate and up, and the output projection, of all experts for sampling.
    pub(super) fn packed(&self, hidden: usize) -> Result<[PackedExperts; 2]> {
        let [gate_up, down] = dims(&self.spec, hidden);
        Ok([
            PackedExperts::new(self.kernels, &self.experts_gate_up, &self.experts_gate_up_bias, gate_up)?,
            PackedExperts::new(self.kernels, &self.experts_down, &self.experts_down_bias, down)?,
        ])
    }
}

/// Returns the weights `[N, k]` of each token's experts, given the router's logits `[N, E]`. `routers` may have other experts for a token.
fn route(logits: Tensor<2>, spec: &Experts, routers: &mut Routers) -> Result<(Tensor<2>, Arc<Routing>)> {
    let [n, experts] = logits.dims();
    let top = spec.num_experts_per_tok;
    let mut graph = Graph::default();
    let logits = operand(&mut graph, "logits", logits)?;
    let (kernels, values) = (Layers::new(), read("logits", &logits.storage)?);
    let chosen = routers.replay(kernels.choose(values, experts, top)?, top);
    let routing = kernels.route_to(values, experts, top, chosen, spec.norm_topk_prob)?;
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

/// The matrices and biases of all experts in an operation.
#[derive(Clone, Debug)]
struct Matrices {
    matrices: Form,
    biases: Option<FlexTensor>,
    /// `[in, out]`.
    dims: [usize; 2],
}

#[derive(Clone, Debug)]
enum Form {
    /// `[E in, out]`.
    Parameter(FlexTensor),
    /// A frozen, memory-mapped weight of each expert.
    Stored(Arc<[Stored]>),
}

impl Matrices {
    /// Returns the matrices, and the nodes of the weight and of the biases.
    fn new(
        graph: &mut Graph,
        weight: &Weight,
        biases: &Option<Param<Tensor<2>>>,
        dims: [usize; 2],
    ) -> Result<(Self, [burn::backend::autodiff::ops::NodeGuard; 2])> {
        let (matrices, node) = match weight {
            Weight::Parameter(weight) => {
                let weight = operand(graph, "experts", weight.val())?;
                (Form::Parameter(weight.storage), weight.node)
            }
            Weight::Stored(stored) => (Form::Stored(stored.of_experts(dims[1])), Operand::absent().node),
        };
        let (biases, of_biases) = match biases {
            Some(biases) => {
                let biases = operand(graph, "biases", biases.val())?;
                (Some(biases.storage), biases.node)
            }
            None => (None, Operand::absent().node),
        };
        Ok((Self { matrices, biases, dims }, [node, of_biases]))
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
        Ok(ExpertWeights { matrices, biases, dims: self.dims })
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

impl Derivative<6> for MixGrad {
    fn gradients(self, upstream: FlexTensor, tracked: [bool; 6]) -> [Option<FlexTensor>; 6] {
        let [_, _, of_weights @ ..] = tracked;
        let [gate_up, down] = [&self.gate_up, &self.down].map(|of| of.view().expect("read in the forward pass"));
        let grad = fitting(self.kernels.experts_grad(
            reread(&self.x),
            &self.routing,
            &gate_up,
            &down,
            self.activation,
            &self.gates,
            reread(&upstream),
            of_weights.contains(&true),
        ));
        let ([hidden, both], [width, _]) = (gate_up.dims, down.dims);
        let (n, experts) = (grad.dx.len() / hidden, gate_up.matrices.len());
        let ExpertsGrad { dx, dweights, dgate_up, dgate_up_bias, ddown, ddown_bias } = grad;
        let top = dweights.len() / n.max(1);
        let of = |is_tracked: bool, values: Vec<f32>, shape: [usize; 2]| is_tracked.then(|| tensor(values, shape));
        [
            of(tracked[0], dx, [n, hidden]),
            of(tracked[1], dweights, [n, top]),
            of(tracked[2], dgate_up, [experts * hidden, both]),
            of(tracked[3], dgate_up_bias, [experts, both]),
            of(tracked[4], ddown, [experts * width, hidden]),
            of(tracked[5], ddown_bias, [experts, hidden]),
        ]
    }
}

/// A matrix of all experts, packed for sampling.
#[derive(Debug)]
pub(super) struct PackedExperts {
    matrices: Vec<backend_cpu::layers::PackedWeight>,
    biases: Option<Vec<f32>>,
    dims: [usize; 2],
}

impl PackedExperts {
    fn new(kernels: Layers, weight: &Weight, biases: &Option<Param<Tensor<2>>>, dims: [usize; 2]) -> Result<Self> {
        let matrices = match weight {
            Weight::Parameter(weight) => {
                let values = params::storage(weight.val())?;
                let matrices = params::read(&values)?.chunks_exact(dims[0] * dims[1]);
                matrices.map(|matrix| Ok(kernels.pack_weight(matrix, dims)?)).collect::<Result<_>>()?
            }
            Weight::Stored(stored) => {
                let experts = stored.of_experts(dims[1]);
                experts.iter().map(|expert| Ok(kernels.pack_stored(&expert.view()?))).collect::<Result<_>>()?
            }
        };
        let values = |biases: &Param<Tensor<2>>| Ok::<_, policy::Error>(params::to_host(biases.val()));
        Ok(Self { matrices, biases: biases.as_ref().map(values).transpose()?, dims })
    }

    pub(super) fn view(&self) -> ExpertWeights<'_> {
        ExpertWeights {
            matrices: self.matrices.iter().map(ExpertMatrix::Packed).collect(),
            biases: self.biases.as_deref(),
            dims: self.dims,
        }
    }
}
