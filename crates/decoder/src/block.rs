//! The layer.

use crate::ops::{LayerOps, Norm, Projection, Residual};
use grpo_models::{LayerRope, LayerSpec, ModelConfig, NormPlacement};

/// The structure of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockSpec {
    /// The token mixer.
    pub mixer: Mixer,
    /// `true` if the MLP is a mixture of experts.
    pub has_experts: bool,
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
            has_experts: config.experts.is_some() && !layer.dense_mlp,
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
    let x = if spec.has_experts {
        let update = ops.experts(input)?;
        ops.add(residual(x, after_mlp), update)?
    } else {
        let hidden = ops.gated_mlp(input)?;
        ops.linear_add(residual(x, after_mlp), hidden, Projection::Mlp)?
    };
    if spec.has_scalar { ops.scale(x) } else { Ok(x) }
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
