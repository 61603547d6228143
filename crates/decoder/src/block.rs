//! The layer.

use crate::ops::{LayerOps, Mlp, Norm, Projection, Residual};
use grpo_models::{LayerRope, LayerSpec, ModelConfig, NormPlacement};

/// The structure of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockSpec {
    /// The token mixer.
    pub mixer: Mixer,
    /// The experts; `None` is one MLP.
    pub experts: Option<Experts>,
    /// The places of the norms.
    pub norm_placement: NormPlacement,
    /// The factor of the outputs of mixer and MLP.
    pub residual_multiplier: f64,
    /// `true` if the layer's output has a factor.
    pub has_scalar: bool,
}

/// The token mixer of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mixer {
    /// Softmax attention (arXiv 2305.13245).
    Attention(Attention),
    /// A Gated DeltaNet (arXiv 2412.06464).
    GatedDeltaNet,
}

/// A mixture of experts (arXiv 1701.06538), possibly with a shared expert, which computes every token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// `true` if there is a shared expert.
    pub has_shared: bool,
    /// `true` if the shared expert has a gate.
    pub gates_shared: bool,
}

/// The steps between the projections of attention and its softmax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention {
    /// `true` if values are keys, or are normalised.
    pub completes_values: bool,
    /// `true` if queries and keys are normalised.
    pub norms_heads: bool,
    /// `true` if queries and keys have a rotary embedding.
    pub rotates: bool,
}

impl BlockSpec {
    /// Returns the structure of a layer of a model.
    ///
    /// ```
    /// use grpo_decoder::{BlockSpec, Mixer};
    /// use grpo_models::{LayerSpec, ModelConfig};
    ///
    /// let spec = BlockSpec::new(&ModelConfig::default(), LayerSpec::default());
    /// assert!(matches!(spec.mixer, Mixer::Attention(attention) if attention.rotates && !attention.norms_heads));
    /// ```
    pub fn new(config: &ModelConfig, layer: LayerSpec) -> Self {
        let mixer = match layer.mixer {
            grpo_models::Mixer::Attention => Mixer::Attention(Attention {
                completes_values: layer.keys_are_values || config.value_norm,
                norms_heads: config.qk_norm,
                rotates: layer.rope != LayerRope::None,
            }),
            grpo_models::Mixer::GatedDeltaNet => Mixer::GatedDeltaNet,
        };
        Self {
            mixer,
            experts: config.experts.as_ref().filter(|_| !layer.dense_mlp).map(|experts| Experts {
                has_shared: experts.shared_expert.is_some(),
                gates_shared: experts.shared_expert.is_some_and(|shared| shared.is_gated),
            }),
            norm_placement: config.norm_placement,
            residual_multiplier: config.residual_multiplier,
            has_scalar: config.layer_scalars,
        }
    }
}

/// Computes one layer, `x` `[N, H]` -> `[N, H]`: a mixer of tokens and an MLP, whose outputs are added to the residual stream `x`.
///
/// # Errors
/// The error of an operation.
pub fn block<O: LayerOps>(ops: &mut O, spec: &BlockSpec, x: O::Tensor) -> Result<O::Tensor, O::Error> {
    let names = spec.norm_placement.names();
    let [before_mixer, after_mixer, before_mlp, after_mlp] = Norm::ALL.map(|norm| names[norm as usize].map(|_| norm));
    let residual = |stream, norm| Residual { stream, norm, factor: spec.residual_multiplier };

    let [input, x] = ops.branch(x, before_mixer)?;
    let mixed = match spec.mixer {
        Mixer::Attention(spec) => attention(ops, spec, input)?,
        Mixer::GatedDeltaNet => ops.gated_delta_net(input)?,
    };
    let x = ops.linear_add(residual(x, after_mixer), mixed, Projection::Mixer)?;

    let [input, x] = ops.branch(x, before_mlp)?;
    let x = match spec.experts {
        Some(spec) => {
            let update = experts(ops, spec, input)?;
            ops.add(residual(x, after_mlp), update)?
        }
        None => {
            let hidden = ops.gated_mlp(input, Mlp::Dense)?;
            ops.linear_add(residual(x, after_mlp), hidden, Projection::Mlp(Mlp::Dense))?
        }
    };
    if spec.has_scalar { ops.scale(x) } else { Ok(x) }
}

/// Computes the sum `[N, H]` of the outputs of each token's experts and of the shared expert for `x` `[N, H]`. The gate multiplies the shared
/// expert before its output projection, which is linear.
fn experts<O: LayerOps>(ops: &mut O, spec: Experts, x: O::Tensor) -> Result<O::Tensor, O::Error> {
    if !spec.has_shared {
        return ops.experts(x);
    }
    let [to_experts, x] = ops.branch(x, None)?;
    let sum = ops.experts(to_experts)?;
    let hidden = if spec.gates_shared {
        let [to_gates, x] = ops.branch(x, None)?;
        let gates = ops.shared_gates(to_gates)?;
        let hidden = ops.gated_mlp(x, Mlp::SharedExpert)?;
        ops.gate(hidden, gates)?
    } else {
        ops.gated_mlp(x, Mlp::SharedExpert)?
    };
    ops.linear_add(Residual { stream: sum, norm: None, factor: 1.0 }, hidden, Projection::Mlp(Mlp::SharedExpert))
}

/// Computes grouped-query attention `[N, A D]` of `x` `[N, H]`, before the output projection.
fn attention<O: LayerOps>(ops: &mut O, spec: Attention, x: O::Tensor) -> Result<O::Tensor, O::Error> {
    let (mut heads, gates) = ops.heads(x)?;
    if spec.completes_values {
        heads = ops.complete_values(heads)?;
    }
    if spec.norms_heads {
        heads = ops.norm_heads(heads)?;
    }
    if spec.rotates {
        heads = ops.rotate(heads)?;
    }
    let values = ops.attention(heads)?;
    match gates {
        Some(gates) => ops.gate(values, gates),
        None => Ok(values),
    }
}
