//! Roles of parameters.

use super::Matrix;
use grpo_models::Mixer;

/// The role of a parameter in the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // named as in Hugging Face's folders; `Parameter::tensors` has the names
pub enum Role {
    EmbedTokens,
    InputLayernorm,
    QProj,
    QBias,
    KProj,
    KBias,
    VProj,
    VBias,
    /// Queries, keys and values in one matrix.
    QkvProj,
    OProj,
    OBias,
    /// Logits of the sinks of query heads.
    Sinks,
    /// The factor of a layer's output, which is never trained.
    LayerScalar,
    QNorm,
    KNorm,
    /// Queries, keys and values of a Gated DeltaNet, before its convolution.
    InProjQkv,
    /// Output gates of a Gated DeltaNet.
    InProjZ,
    InProjB,
    InProjA,
    Conv1d,
    ALog,
    DtBias,
    /// The norm of the outputs of a Gated DeltaNet.
    LinearNorm,
    OutProj,
    PostAttentionLayernorm,
    PreFeedforwardLayernorm,
    GateProj,
    UpProj,
    /// Gate and up in one matrix.
    GateUpProj,
    DownProj,
    /// The shared expert, which computes every token in addition to its experts.
    SharedGateProj,
    SharedUpProj,
    SharedDownProj,
    /// The gate of the shared expert.
    SharedGate,
    /// The router of a mixture of experts.
    Router,
    RouterBias,
    /// The bias of the ranks of experts, which is never trained.
    CorrectionBias,
    /// Gate projections of all experts.
    ExpertGateProj,
    ExpertUpProj,
    /// Gate and up of all experts in one matrix, in gpt-oss.
    ExpertGateUpProj,
    ExpertGateUpBias,
    ExpertDownProj,
    ExpertDownBias,
    PostFeedforwardLayernorm,
    Norm,
    LmHead,
    /// A of the adapter of a matrix.
    LoraA(Matrix),
    /// B of the adapter of a matrix.
    LoraB(Matrix),
    /// The scales of a quantised matrix.
    Scales(Matrix),
    ValueHead,
    ValueHeadBias,
}

impl Role {
    /// The norms of a layer's inputs and outputs, by the names of their modules.
    pub(super) const NORMS: [(Self, &'static str); 4] = [
        (Self::InputLayernorm, "input_layernorm"),
        (Self::PostAttentionLayernorm, "post_attention_layernorm"),
        (Self::PreFeedforwardLayernorm, "pre_feedforward_layernorm"),
        (Self::PostFeedforwardLayernorm, "post_feedforward_layernorm"),
    ];

    /// Returns the norm of a layer with this module name.
    pub(crate) fn of_norm(module: &str) -> Option<Self> {
        Self::NORMS.into_iter().find(|(_, name)| *name == module).map(|(role, _)| role)
    }

    /// Returns the mixer of the layers that have such a parameter; `None` if it does not depend on the mixer.
    pub(crate) fn mixer(self) -> Option<Mixer> {
        use Matrix::{InProjA, InProjB, InProjQkv, InProjZ, KProj, OProj, OutProj, QProj, QkvProj, VProj};
        match self {
            Self::QProj | Self::QBias | Self::KProj | Self::KBias | Self::VProj | Self::VBias => Some(Mixer::Attention),
            Self::QkvProj | Self::OProj | Self::OBias | Self::Sinks => Some(Mixer::Attention),
            Self::QNorm | Self::KNorm => Some(Mixer::Attention),
            Self::InProjQkv | Self::InProjZ | Self::InProjB | Self::InProjA => Some(Mixer::GatedDeltaNet),
            Self::Conv1d | Self::ALog | Self::DtBias => Some(Mixer::GatedDeltaNet),
            Self::LinearNorm | Self::OutProj => Some(Mixer::GatedDeltaNet),
            Self::LoraA(matrix) | Self::LoraB(matrix) | Self::Scales(matrix) => match matrix {
                QProj | KProj | VProj | QkvProj | OProj => Some(Mixer::Attention),
                InProjQkv | InProjZ | InProjB | InProjA | OutProj => Some(Mixer::GatedDeltaNet),
                _ => None,
            },
            _ => None,
        }
    }

    /// Returns `true` if layers have such a parameter.
    pub fn is_of_layers(self) -> bool {
        let head = Matrix::LmHead;
        !matches!(self, Self::EmbedTokens | Self::Norm | Self::LmHead)
            && self != Self::LoraA(head)
            && self != Self::LoraB(head)
            && !self.is_of_value_head()
    }

    /// Returns `true` for parameters of the base model, `false` for adapters and the value head.
    pub fn is_of_model(self) -> bool {
        !matches!(self, Self::LoraA(_) | Self::LoraB(_)) && !self.is_of_value_head()
    }

    /// Returns `true` for matrices, biases and adapters of experts.
    pub fn is_of_experts(self) -> bool {
        match self {
            Self::ExpertGateProj | Self::ExpertUpProj | Self::ExpertGateUpProj | Self::ExpertDownProj => true,
            Self::ExpertGateUpBias | Self::ExpertDownBias => true,
            Self::LoraA(matrix) | Self::LoraB(matrix) => matrix.is_of_experts(),
            _ => false,
        }
    }

    /// Returns `true` for parameters of the value head.
    pub fn is_of_value_head(self) -> bool {
        matches!(self, Self::ValueHead | Self::ValueHeadBias)
    }
}
