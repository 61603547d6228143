//! The weights of a decoder, packed for sampling.

use crate::decoder::experts::PackedExperts;
use crate::decoder::gated_delta_net::GatedDeltaNet;
use crate::decoder::host::{read, storage};
use crate::decoder::layers::{Attention, Block, DenseMlp, Linear, Mixer, Mlp, RmsNorm, scores};
use crate::decoder::lora::LowRank;
use crate::decoder::tape::no_such_part;
use crate::decoder::values::{ValueHeads, heads};
use crate::decoder::weight::{self, Stored};
use burn::backend::flex::FlexTensor;
use burn::module::Param;
use burn::tensor::Tensor;
use grpo_backend_cpu::layers::{
    Add, DeltaHeads, DeltaWeights, Heads, Layers, Mixed, PackedWeight, Scores, StoredWeight,
};
use grpo_models::{Experts, LayerRope, ModelConfig};
use grpo_policy::{Error, Result};

#[derive(Debug)]
pub(super) enum Embedding {
    Parameter(FlexTensor),
    Stored(Stored),
}

#[derive(Debug)]
pub(super) struct Layer {
    pub(super) input_norm: Option<Norm>,
    pub(super) mixer: LayerMixer,
    pub(super) attn_output_norm: Option<Norm>,
    pub(super) post_norm: Option<Norm>,
    pub(super) mlp: LayerMlp,
    pub(super) mlp_output_norm: Option<Norm>,
    /// Factor of the layer's output.
    pub(super) factor: f64,
}

/// Attention or a Gated DeltaNet; `index` counts the layers of its kind.
#[derive(Debug)]
pub(super) enum LayerMixer {
    Attention { index: usize, attention: LayerAttention },
    GatedDeltaNet { index: usize, net: LayerDeltaNet },
}

#[derive(Debug)]
pub(super) struct LayerAttention {
    pub(super) heads: Heads,
    pub(super) values: Option<ValueHeads>,
    pub(super) scores: Scores,
    pub(super) rope: LayerRope,
    pub(super) qkv: Weight,
    /// Norms of queries and keys.
    pub(super) head_norms: Option<[Norm; 2]>,
    /// `true` if the values of query heads have gates.
    pub(super) has_gates: bool,
    pub(super) o: Weight,
    /// Logits of the sinks of query heads.
    pub(super) sinks: Option<Vec<f32>>,
}

#[derive(Debug)]
pub(super) struct LayerDeltaNet {
    pub(super) heads: DeltaHeads,
    pub(super) in_proj: Weight,
    conv: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    pub(super) norm: Norm,
    pub(super) out_proj: Weight,
}

// One per layer, so the size of the smaller variant does not matter.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
pub(super) enum LayerMlp {
    Dense {
        gate_up: Weight,
        down: Weight,
    },
    Experts {
        router: Weight,
        gate_up: PackedExperts,
        down: PackedExperts,
        spec: Experts,
        correction_bias: Option<Vec<f32>>,
        /// Gate and up, and the output projection, of the shared expert.
        shared: Option<[Weight; 2]>,
        shared_gate: Option<Weight>,
    },
}

#[derive(Debug)]
pub(super) struct Norm {
    pub(super) weight: Vec<f32>,
    pub(super) eps: f64,
}

#[derive(Debug)]
pub(super) struct Weight {
    pub(super) matrix: Matrix,
    pub(super) bias: Option<Vec<f32>>,
    /// Adapters that are not merged into the weight.
    pub(super) adapters: Vec<Adapter>,
}

/// The matrix of a linear layer.
#[derive(Debug)]
pub(super) enum Matrix {
    Packed(PackedWeight),
    /// Dequantised by every product: packed, it would take the memory that quantisation saves.
    Quantized(Stored),
}

impl Matrix {
    /// Returns `[in, out]`.
    pub(super) fn dims(&self) -> [usize; 2] {
        match self {
            Self::Packed(weight) => weight.dims(),
            Self::Quantized(weight) => weight.dims(),
        }
    }
}

/// An adapter that is applied separately from its weight.
#[derive(Debug)]
pub(super) struct Adapter {
    /// A^T `[in, r]`.
    a: PackedWeight,
    /// B^T `[r, width]`.
    b: PackedWeight,
    scale: f32,
    /// First output column of the adapter.
    first: usize,
}

impl Adapter {
    fn new(adapter: &LowRank) -> Result<Self> {
        let kernels = Layers::new();
        let packed = |matrix: &Param<Tensor<2>>| {
            let values = storage(matrix.val())?;
            Ok::<_, Error>(kernels.pack_stored(&StoredWeight::new(&[read(&values)?.into()], matrix.dims()[1])?))
        };
        let (a, b) = (packed(&adapter.a)?, packed(&adapter.b)?);
        Ok(Self { a, b, scale: adapter.scale as f32, first: adapter.first })
    }

    /// Adds s x A^T B^T to the adapter's columns of y `[n, out]`.
    pub(super) fn add_to(&self, kernels: Layers, x: &[f32], y: &mut [f32], n: usize) -> Result<()> {
        let inner = kernels.linear_packed(x, &self.a, Add::Nothing, n)?;
        let outer = kernels.linear_packed(&inner, &self.b, Add::Nothing, n)?;
        let (width, columns) = (self.b.dims()[1], y.len() / n.max(1));
        for (row, added) in y.chunks_exact_mut(columns.max(1)).zip(outer.chunks_exact(width.max(1))) {
            row[self.first..self.first + width].iter_mut().zip(added).for_each(|(y, added)| *y += self.scale * added);
        }
        Ok(())
    }
}

fn to_vec<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>> {
    Ok(read(&storage(tensor)?)?.to_vec())
}

impl Norm {
    pub(super) fn new(norm: &RmsNorm) -> Result<Self> {
        let mut weight = to_vec(norm.weight.val())?;
        if norm.offset != 0.0 {
            weight.iter_mut().for_each(|weight| *weight += norm.offset as f32);
        }
        Ok(Self { weight, eps: norm.eps })
    }

    fn optional(norm: &Option<RmsNorm>) -> Result<Option<Self>> {
        norm.as_ref().map(Self::new).transpose()
    }
}

impl Layer {
    /// Packs the layer with this number. `indices` are its indices among the layers with attention and among those with a Gated DeltaNet.
    pub(super) fn new(config: &ModelConfig, number: usize, indices: [usize; 2], block: &Block) -> Result<Self> {
        let factor = block.layer_scalar.as_ref().map(Param::val).map(to_vec).transpose()?;
        Ok(Self {
            input_norm: Norm::optional(&block.input_norm)?,
            mixer: match &block.attn {
                Mixer::Attention(attention) => LayerMixer::Attention {
                    index: indices[0],
                    attention: LayerAttention::new(config, number, attention)?,
                },
                Mixer::GatedDeltaNet(net) => {
                    LayerMixer::GatedDeltaNet { index: indices[1], net: LayerDeltaNet::new(net)? }
                }
            },
            attn_output_norm: Norm::optional(&block.attn_output_norm)?,
            post_norm: Norm::optional(&block.post_norm)?,
            mlp: LayerMlp::new(&block.mlp, config.hidden_size)?,
            mlp_output_norm: Norm::optional(&block.mlp_output_norm)?,
            factor: factor.as_deref().and_then(<[f32]>::first).map_or(1.0, |factor| f64::from(*factor)),
        })
    }
}

impl LayerMlp {
    /// Returns gate and up, and the output projection, of an MLP.
    pub(super) fn gated(&self, mlp: grpo_decoder::Mlp) -> Result<[&Weight; 2]> {
        match (self, mlp) {
            (Self::Dense { gate_up, down }, grpo_decoder::Mlp::Dense) => Ok([gate_up, down]),
            (Self::Experts { shared: Some([gate_up, down]), .. }, grpo_decoder::Mlp::SharedExpert) => {
                Ok([gate_up, down])
            }
            _ => no_such_part("a dense MLP or a shared expert"),
        }
    }

    fn new(mlp: &Mlp, hidden: usize) -> Result<Self> {
        Ok(match mlp {
            Mlp::Dense(mlp) => {
                Self::Dense { gate_up: Weight::new(&mlp.gate_up_proj)?, down: Weight::new(&mlp.down_proj)? }
            }
            Mlp::Experts(mlp) => {
                let [gate_up, down] = mlp.packed(hidden)?;
                let of_shared =
                    |of: &DenseMlp| Ok::<_, Error>([Weight::new(&of.gate_up_proj)?, Weight::new(&of.down_proj)?]);
                Self::Experts {
                    router: Weight::new(&mlp.router)?,
                    gate_up,
                    down,
                    spec: mlp.spec().clone(),
                    correction_bias: mlp.correction_bias()?,
                    shared: mlp.shared.as_ref().map(of_shared).transpose()?,
                    shared_gate: mlp.shared_gate.as_ref().map(Weight::new).transpose()?,
                }
            }
        })
    }
}

impl LayerDeltaNet {
    fn new(net: &GatedDeltaNet) -> Result<Self> {
        Ok(Self {
            heads: net.heads(),
            in_proj: Weight::new(&net.in_proj)?,
            conv: to_vec(net.conv.val())?,
            a_log: to_vec(net.a_log.val())?,
            dt_bias: to_vec(net.dt_bias.val())?,
            norm: Norm { weight: to_vec(net.norm.val())?, eps: net.eps() },
            out_proj: Weight::new(&net.out_proj)?,
        })
    }

    pub(super) fn weights(&self) -> DeltaWeights<'_> {
        let Self { conv, a_log, dt_bias, norm, .. } = self;
        DeltaWeights { conv, a_log, dt_bias, norm: &norm.weight, eps: norm.eps }
    }
}

impl LayerAttention {
    fn new(config: &ModelConfig, layer: usize, attention: &Attention) -> Result<Self> {
        let spec = config.layer(layer);
        Ok(Self {
            heads: heads(config, spec),
            values: ValueHeads::of(config, spec),
            scores: scores(config, spec),
            rope: spec.rope,
            qkv: Weight::new(&attention.qkv_proj)?,
            head_norms: match (&attention.q_norm, &attention.k_norm) {
                (Some(query), Some(key)) => Some([Norm::new(query)?, Norm::new(key)?]),
                _ => None,
            },
            has_gates: config.attention_output_gate,
            o: Weight::new(&attention.o_proj)?,
            sinks: attention.sinks.as_ref().map(Param::val).map(to_vec).transpose()?,
        })
    }

    /// Returns the values of attention, after the sinks.
    pub(super) fn attended(&self, mut mixed: Mixed) -> Result<Vec<f32>> {
        if let Some(sinks) = &self.sinks {
            mixed.add_sinks(self.heads, sinks)?;
        }
        Ok(mixed.values)
    }
}

impl Weight {
    fn new(linear: &Linear) -> Result<Self> {
        let (kernels, dims) = (linear.kernels, linear.weight.dims());
        let mut adapters = Vec::new();
        let bias = linear.bias.as_ref().map(Param::val).map(to_vec).transpose()?;
        if let weight::Weight::Stored(stored) = &linear.weight
            && stored.is_quantized()
        {
            let adapters = linear.adapters.iter().map(Adapter::new).collect::<Result<_>>()?;
            return Ok(Self { matrix: Matrix::Quantized(stored.clone()), bias, adapters });
        }
        let weight = match (linear.adapters.as_slice(), &linear.weight) {
            ([], weight::Weight::Parameter(weight)) => kernels.pack_weight(read(&storage(weight.val())?)?, dims)?,
            ([], weight::Weight::Stored(stored)) => kernels.pack_stored(&stored.view()?),
            // A large bf16 weight stays bf16 and its adapters separate: a merged weight would need f32, and adapters are small in
            // comparison.
            (of_linear, weight::Weight::Stored(stored))
                if kernels.rounds_operands() || stored.view()?.packs_narrow() =>
            {
                adapters = of_linear.iter().map(Adapter::new).collect::<Result<_>>()?;
                kernels.pack_stored(&stored.view()?)
            }
            // Rounding a merged weight would change what the adapters add, which scoring computes in f32.
            (of_linear, weight::Weight::Parameter(weight)) if kernels.rounds_operands() => {
                adapters = of_linear.iter().map(Adapter::new).collect::<Result<_>>()?;
                kernels.pack_weight(read(&storage(weight.val())?)?, dims)?
            }
            // Otherwise adapters are merged, so they cost nothing per token.
            _ => kernels.pack_weight(&linear.merged()?, dims)?,
        };
        Ok(Self { matrix: Matrix::Packed(weight), bias, adapters })
    }
}
