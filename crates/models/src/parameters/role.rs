//! Roles of parameters, and matrices that can have an adapter.

/// The role of a parameter in the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // named as in transformers; `PARAMETERS` has the names
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

    /// Returns `true` for parameters of a router, which may be frozen.
    pub fn is_of_router(self) -> bool {
        matches!(self, Self::Router | Self::RouterBias)
    }

    /// Returns `true` for a parameter that is never trained.
    pub fn is_constant(self) -> bool {
        matches!(self, Self::LayerScalar | Self::CorrectionBias)
    }
}

/// A matrix that can have an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // named as in transformers
pub enum Matrix {
    QProj,
    KProj,
    VProj,
    QkvProj,
    OProj,
    InProjQkv,
    InProjZ,
    InProjB,
    InProjA,
    OutProj,
    GateProj,
    UpProj,
    GateUpProj,
    DownProj,
    SharedGateProj,
    SharedUpProj,
    SharedDownProj,
    SharedGate,
    /// Gate and up of each expert.
    ExpertGateUpProj,
    ExpertDownProj,
    LmHead,
}

impl Matrix {
    /// All matrices, with their roles.
    pub const ALL: [(Self, Role); 21] = [
        (Self::QProj, Role::QProj),
        (Self::KProj, Role::KProj),
        (Self::VProj, Role::VProj),
        (Self::QkvProj, Role::QkvProj),
        (Self::OProj, Role::OProj),
        (Self::InProjQkv, Role::InProjQkv),
        (Self::InProjZ, Role::InProjZ),
        (Self::InProjB, Role::InProjB),
        (Self::InProjA, Role::InProjA),
        (Self::OutProj, Role::OutProj),
        (Self::GateProj, Role::GateProj),
        (Self::UpProj, Role::UpProj),
        (Self::GateUpProj, Role::GateUpProj),
        (Self::DownProj, Role::DownProj),
        (Self::SharedGateProj, Role::SharedGateProj),
        (Self::SharedUpProj, Role::SharedUpProj),
        (Self::SharedDownProj, Role::SharedDownProj),
        (Self::SharedGate, Role::SharedGate),
        (Self::ExpertGateUpProj, Role::ExpertGateUpProj),
        (Self::ExpertDownProj, Role::ExpertDownProj),
        (Self::LmHead, Role::LmHead),
    ];

    /// Returns the role of the matrix in the decoder.
    pub fn role(self) -> Role {
        Self::ALL[self as usize].1
    }

    /// Returns the matrix of this role, or `None` if it is not one matrix `[out, in]` that can have an adapter.
    pub fn of(role: Role) -> Option<Self> {
        Self::adapting(role).filter(|matrix| !matrix.is_of_experts())
    }

    /// Returns the matrix whose adapter changes the parameter of this role, if any.
    pub fn adapting(role: Role) -> Option<Self> {
        match role {
            Role::ExpertGateProj | Role::ExpertUpProj => Some(Self::ExpertGateUpProj),
            role => Self::ALL.iter().find(|(_, of)| *of == role).map(|(matrix, _)| *matrix),
        }
    }

    /// Returns `true` if each expert has such a matrix.
    pub fn is_of_experts(self) -> bool {
        matches!(self, Self::ExpertGateUpProj | Self::ExpertDownProj)
    }
}
