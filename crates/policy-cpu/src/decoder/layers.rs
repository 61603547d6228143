//! The layers of the decoder: linear layer, RMSNorm, grouped-query attention with rotary position embeddings, MLP, block.

use super::autodiff_ops::{self, Addend};
use super::build::Builder;
use super::experts::ExpertsMlp;
use super::gated_delta_net::GatedDeltaNet;
use super::lora::LowRank;
use super::values::{ValueHeads, heads};
use super::weight::Weight;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use grpo_backend_cpu::layers::{Activation, Heads, Layers, Scores};
use grpo_decoder::BlockSpec;
use grpo_models::{LayerSpec, ModelConfig};
use grpo_policy::Result;

/// A linear layer, `y = x W + b`.
#[derive(Module, Debug)]
pub struct Linear {
    /// Weight W `[in, out]`.
    pub weight: Weight,
    /// Bias b `[out]`.
    pub bias: Option<Param<Tensor<1>>>,
    /// Adapters of the matrices that are fused in this layer.
    pub adapters: Vec<LowRank>,
    /// The kernels of the product with the weight; adapters are computed in f32.
    #[module(skip)]
    pub(super) kernels: Layers,
}

impl Linear {
    pub(crate) fn new(of: &mut Builder<'_>, name: &str, shape: [usize; 2], bias: bool) -> Result<Self> {
        let weight = of.weight(&format!("{name}.weight"), shape)?;
        let bias = if bias { Some(of.parameter(&format!("{name}.bias"), [shape[1]])?) } else { None };
        Ok(Self { weight, bias, adapters: Vec::new(), kernels: Layers::new() })
    }

    /// Applies the layer to `x: [N, in]` -> `[N, out]`.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        let add = self.bias.as_ref().map_or(Addend::Nothing, |bias| Addend::Bias(bias.val()));
        self.run(x, add)
    }

    /// Returns `residual` plus the layer applied to `x: [N, in]`, both `[N, out]`; for layers without a bias.
    pub(crate) fn add_to(&self, residual: Tensor<2>, x: Tensor<2>) -> Result<Tensor<2>> {
        self.run(x, Addend::Residual(residual))
    }

    fn run(&self, x: Tensor<2>, add: Addend) -> Result<Tensor<2>> {
        let Some((last, adapters)) = self.adapters.split_last() else {
            return autodiff_ops::linear(self.kernels, x, &self.weight, add);
        };
        let [first, mut x] = autodiff_ops::fork(x)?;
        let mut y = autodiff_ops::linear(self.kernels, first, &self.weight, add)?;
        for adapter in adapters {
            let [first, rest] = autodiff_ops::fork(x)?;
            (y, x) = (adapter.forward(first, y)?, rest);
        }
        last.forward(x, y)
    }

    /// Returns the weight `[in, out]` with merged adapters.
    pub(crate) fn merged(&self) -> Result<Vec<f32>> {
        let mut weight = self.weight.to_vec()?;
        self.adapters.iter().try_for_each(|adapter| adapter.merge_into(&mut weight, self.weight.dims()[1]))?;
        Ok(weight)
    }
}

/// Root mean square normalisation, `y = x / sqrt(mean(x^2) + eps) * (weight + offset)`.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// Factor `[H]` of each channel, without the offset.
    pub weight: Param<Tensor<1>>,
    /// Term added to the weight: 1 if weights are centred at 0, else 0.
    pub(super) offset: f64,
    /// Term added to the mean square.
    pub(super) eps: f64,
}

impl RmsNorm {
    pub(crate) fn new(of: &mut Builder<'_>, name: &str, size: usize) -> Result<Self> {
        let ModelConfig { rms_norm_eps: eps, zero_centered_norms, .. } = *of.config;
        let offset = if zero_centered_norms { 1.0 } else { 0.0 };
        Ok(Self { weight: of.parameter(&format!("{name}.weight"), [size])?, offset, eps })
    }

    /// Normalises `x: [N, H]` -> `[N, H]`.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        self.forward_with_residual(x).map(|[y, _]| y)
    }

    /// Normalises `x: [N, H]`, and returns `x` for a second use.
    pub(super) fn forward_with_residual(&self, x: Tensor<2>) -> Result<[Tensor<2>; 2]> {
        autodiff_ops::rms_norm(x, self.weight.val(), self.offset as f32, self.eps)
    }
}

/// Causal grouped-query attention (arXiv 2305.13245); each of K key/value heads serves R = A / K query heads.
#[derive(Module, Debug)]
pub struct Attention {
    /// Fused projection `[H, (A + 2K) D]` to query heads, then key heads, then value heads; `[H, (A + K) D]` if values are keys; with output gates
    /// `[H, (2A + 2K) D]`, with a gate behind every query head.
    pub qkv_proj: Linear,
    /// Output projection `[A D, H]`.
    pub o_proj: Linear,
    /// Norm `[D]` of query heads, or `[A D]` of all of them, before the rotary embedding, if the model has QK norm.
    pub q_norm: Option<RmsNorm>,
    /// Norm `[D]` of key heads, or `[K D]` of all of them, before the rotary embedding, if the model has QK norm.
    pub k_norm: Option<RmsNorm>,
    /// Logits `[A]` of the sinks of query heads, in gpt-oss.
    pub sinks: Option<Param<Tensor<1>>>,
    /// A, K and D of the layer.
    #[module(skip)]
    pub(super) heads: Heads,
    /// `true` if the values of query heads have gates.
    pub(super) has_gates: bool,
    /// The values, if they are not columns of the projection as they are.
    #[module(skip)]
    pub(super) values: Option<ValueHeads>,
    /// Window and rotary embedding of the layer.
    #[module(skip)]
    pub(super) spec: LayerSpec,
    /// Window and scale of scores.
    #[module(skip)]
    pub(super) scores: Scores,
}

/// Returns the window and scale of the scores of a layer.
pub(super) fn scores(config: &ModelConfig, spec: LayerSpec) -> Scores {
    Scores { scale: config.attention_multiplier.map(|scale| scale as f32), window: spec.sliding_window }
}

/// Returns the activation of a model's MLPs.
pub(super) fn activation(config: &ModelConfig) -> Activation {
    if let Some(clamped) = config.experts.as_ref().and_then(|experts| experts.clamped) {
        return Activation::Clamped { alpha: clamped.swiglu_alpha as f32, limit: clamped.swiglu_limit as f32 };
    }
    match config.hidden_act {
        grpo_models::Activation::Silu => Activation::Silu,
        grpo_models::Activation::GeluTanh => Activation::GeluTanh,
    }
}

impl Attention {
    pub(crate) fn new(of: &mut Builder<'_>, name: &str, spec: LayerSpec) -> Result<Self> {
        let config = of.config;
        let (h, heads) = (config.hidden_size, heads(config, spec));
        let has_gates = config.attention_output_gate;
        let gates = if has_gates { heads.query } else { 0 };
        let values = if spec.keys_are_values { 0 } else { heads.key_value };
        let qkv = [h, (heads.query + gates + heads.key_value + values) * heads.width];
        let qkv_proj = Linear::new(of, &format!("{name}.qkv_proj"), qkv, config.attention_bias)?;
        let o_proj =
            Linear::new(of, &format!("{name}.o_proj"), [heads.query * heads.width, h], config.attention_output_bias)?;
        let (mut q_norm, mut k_norm) = (None, None);
        if config.qk_norm {
            let [queries, keys] = config.qk_norm_sizes(spec);
            q_norm = Some(RmsNorm::new(of, &format!("{name}.q_norm"), queries)?);
            k_norm = Some(RmsNorm::new(of, &format!("{name}.k_norm"), keys)?);
        }
        let sinks =
            config.attention_sinks.then(|| of.parameter(&format!("{name}.sinks"), [heads.query])).transpose()?;
        let (values, scores) = (ValueHeads::of(config, spec), scores(config, spec));
        Ok(Self { qkv_proj, o_proj, q_norm, k_norm, sinks, heads, has_gates, values, spec, scores })
    }
}

/// The token mixer of a layer: softmax attention or a Gated DeltaNet.
// One per layer, so the size of the smaller variant does not matter.
#[allow(clippy::large_enum_variant)]
#[derive(Module, Debug)]
pub enum Mixer {
    /// Softmax attention.
    Attention(Attention),
    /// A recurrent state.
    GatedDeltaNet(GatedDeltaNet),
}

impl Mixer {
    fn new(of: &mut Builder<'_>, name: &str, spec: LayerSpec) -> Result<Self> {
        match of.config.linear_attention {
            Some(sizes) if spec.mixer == grpo_models::Mixer::GatedDeltaNet => {
                Ok(Self::GatedDeltaNet(GatedDeltaNet::new(of, name, sizes)?))
            }
            _ => Ok(Self::Attention(Attention::new(of, name, spec)?)),
        }
    }

    /// Returns the input and the output projection with their names.
    pub(super) fn linears(&self) -> [(&'static str, &Linear); 2] {
        match self {
            Self::Attention(attn) => [("attn.qkv_proj", &attn.qkv_proj), ("attn.o_proj", &attn.o_proj)],
            Self::GatedDeltaNet(attn) => [("attn.in_proj", &attn.in_proj), ("attn.out_proj", &attn.out_proj)],
        }
    }

    fn linears_mut(&mut self) -> [(&'static str, &mut Linear); 2] {
        match self {
            Self::Attention(attn) => [("attn.qkv_proj", &mut attn.qkv_proj), ("attn.o_proj", &mut attn.o_proj)],
            Self::GatedDeltaNet(attn) => [("attn.in_proj", &mut attn.in_proj), ("attn.out_proj", &mut attn.out_proj)],
        }
    }
}

/// MLP of a layer.
// One per layer, so the size of the smaller variant does not matter.
#[allow(clippy::large_enum_variant)]
#[derive(Module, Debug)]
pub enum Mlp {
    /// One for all tokens.
    Dense(DenseMlp),
    /// A mixture of experts.
    Experts(ExpertsMlp),
}

/// MLP for all tokens (arXiv 2002.05202): `down(activation(gate(x)) * up(x))`.
#[derive(Module, Debug)]
pub struct DenseMlp {
    /// Fused projection `[H, 2I]` to gate, then up.
    pub gate_up_proj: Linear,
    /// Output projection `[I, H]`.
    pub down_proj: Linear,
    /// Activation of the gate.
    #[module(skip)]
    pub(super) activation: Activation,
}

impl Mlp {
    /// Returns the linear layers with their names.
    pub(super) fn linears(&self) -> Vec<(&'static str, &Linear)> {
        match self {
            Self::Dense(mlp) => vec![("mlp.gate_up_proj", &mlp.gate_up_proj), ("mlp.down_proj", &mlp.down_proj)],
            Self::Experts(mlp) => {
                let of_shared = mlp.shared.iter().flat_map(|shared| {
                    [("mlp.shared.gate_up_proj", &shared.gate_up_proj), ("mlp.shared.down_proj", &shared.down_proj)]
                });
                let gate = mlp.shared_gate.iter().map(|gate| ("mlp.shared_gate", gate));
                of_shared.chain(gate).chain([(ROUTER, &mlp.router)]).collect()
            }
        }
    }

    fn new(of: &mut Builder<'_>, name: &str, spec: LayerSpec) -> Result<Self> {
        match of.config.experts.as_ref().filter(|_| !spec.dense_mlp) {
            Some(experts) => Ok(Self::Experts(ExpertsMlp::new(of, name, experts)?)),
            None => Ok(Self::Dense(DenseMlp::new(of, name, of.config.intermediate_size)?)),
        }
    }
}

impl DenseMlp {
    /// Creates an MLP of this width.
    pub(super) fn new(of: &mut Builder<'_>, name: &str, width: usize) -> Result<Self> {
        let h = of.config.hidden_size;
        Ok(Self {
            gate_up_proj: Linear::new(of, &format!("{name}.gate_up_proj"), [h, 2 * width], false)?,
            down_proj: Linear::new(of, &format!("{name}.down_proj"), [width, h], false)?,
            activation: activation(of.config),
        })
    }
}

/// One decoder layer: attention, or a Gated DeltaNet, and MLP, whose outputs are added to the residual stream. Their inputs, outputs or both are normalised.
#[derive(Module, Debug)]
pub struct Block {
    /// Norm before attention.
    pub input_norm: Option<RmsNorm>,
    /// Attention, or a Gated DeltaNet.
    pub attn: Mixer,
    /// Norm after attention.
    pub attn_output_norm: Option<RmsNorm>,
    /// Norm before the MLP.
    pub post_norm: Option<RmsNorm>,
    /// MLP.
    pub mlp: Mlp,
    /// Norm after the MLP.
    pub mlp_output_norm: Option<RmsNorm>,
    /// Factor `[1]` of the layer's output, which is never trained, in Gemma 4.
    pub layer_scalar: Option<Param<Tensor<1>>>,
    /// The structure of the layer.
    #[module(skip)]
    pub(super) spec: BlockSpec,
}

/// The name of the router in [`Block::linears`].
const ROUTER: &str = "mlp.router";

/// The norms of a [`Block`], in the order of [`grpo_models::NormPlacement::names`].
pub(super) const NORMS: [&str; 4] = ["input_norm", "attn_output_norm", "post_norm", "mlp_output_norm"];

/// The name of the factor of a layer's output.
const LAYER_SCALAR: &str = "layer_scalar";

impl Block {
    /// Sets the kernels of the products with weights. The router of experts stays in f32: rounding would change its choices.
    pub(super) fn set_kernels(&mut self, kernels: Layers) {
        if let Mlp::Experts(mlp) = &mut self.mlp {
            mlp.kernels = kernels;
        }
        let of_weights = self.linears().into_iter().filter(|(name, _)| *name != ROUTER);
        of_weights.for_each(|(_, linear)| linear.kernels = kernels);
    }

    /// Returns the linear layers with their names.
    pub(super) fn linears(&mut self) -> Vec<(&'static str, &mut Linear)> {
        let Self { attn, mlp, .. } = self;
        let mut linears = Vec::from(attn.linears_mut());
        match mlp {
            Mlp::Dense(mlp) => {
                linears.push(("mlp.gate_up_proj", &mut mlp.gate_up_proj));
                linears.push(("mlp.down_proj", &mut mlp.down_proj));
            }
            Mlp::Experts(mlp) => {
                linears.push((ROUTER, &mut mlp.router));
                if let Some(shared) = &mut mlp.shared {
                    linears.push(("mlp.shared.gate_up_proj", &mut shared.gate_up_proj));
                    linears.push(("mlp.shared.down_proj", &mut shared.down_proj));
                }
                linears.extend(mlp.shared_gate.as_mut().map(|gate| ("mlp.shared_gate", gate)));
            }
        }
        linears
    }

    pub(crate) fn new(of: &mut Builder<'_>, name: &str, spec: LayerSpec) -> Result<Self> {
        let ModelConfig { hidden_size, norm_placement, layer_scalars, .. } = *of.config;
        let places = norm_placement.names();
        let norm = |of: &mut Builder<'_>, place: usize| {
            let is_there = places[place].is_some();
            is_there.then(|| RmsNorm::new(of, &format!("{name}.{}", NORMS[place]), hidden_size)).transpose()
        };
        Ok(Self {
            input_norm: norm(of, 0)?,
            attn: Mixer::new(of, &format!("{name}.attn"), spec)?,
            attn_output_norm: norm(of, 1)?,
            post_norm: norm(of, 2)?,
            mlp: Mlp::new(of, &format!("{name}.mlp"), spec)?,
            mlp_output_norm: norm(of, 3)?,
            layer_scalar: layer_scalars.then(|| of.parameter(&format!("{name}.{LAYER_SCALAR}"), [1])).transpose()?,
            spec: BlockSpec::new(of.config, spec),
        })
    }
}
