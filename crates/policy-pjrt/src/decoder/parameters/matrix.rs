//! The matrices that can have adapters.

use super::Role;

/// A matrix that can have an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // named as in Hugging Face's folders
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
    /// All matrices, with their roles in the decoder and their module names in a layer or a model, and then the other names of some.
    pub(crate) const ALL: [(Self, Role, &'static str); 24] = [
        (Self::QProj, Role::QProj, "self_attn.q_proj"),
        (Self::KProj, Role::KProj, "self_attn.k_proj"),
        (Self::VProj, Role::VProj, "self_attn.v_proj"),
        (Self::QkvProj, Role::QkvProj, "self_attn.qkv_proj"),
        (Self::OProj, Role::OProj, "self_attn.o_proj"),
        (Self::InProjQkv, Role::InProjQkv, "linear_attn.in_proj_qkv"),
        (Self::InProjZ, Role::InProjZ, "linear_attn.in_proj_z"),
        (Self::InProjB, Role::InProjB, "linear_attn.in_proj_b"),
        (Self::InProjA, Role::InProjA, "linear_attn.in_proj_a"),
        (Self::OutProj, Role::OutProj, "linear_attn.out_proj"),
        (Self::GateProj, Role::GateProj, "mlp.gate_proj"),
        (Self::UpProj, Role::UpProj, "mlp.up_proj"),
        (Self::GateUpProj, Role::GateUpProj, "mlp.gate_up_proj"),
        (Self::DownProj, Role::DownProj, "mlp.down_proj"),
        (Self::SharedGateProj, Role::SharedGateProj, "mlp.shared_expert.gate_proj"),
        (Self::SharedUpProj, Role::SharedUpProj, "mlp.shared_expert.up_proj"),
        (Self::SharedDownProj, Role::SharedDownProj, "mlp.shared_expert.down_proj"),
        (Self::SharedGate, Role::SharedGate, "mlp.shared_expert_gate"),
        (Self::ExpertGateUpProj, Role::ExpertGateUpProj, "mlp.experts.gate_up_proj"),
        (Self::ExpertDownProj, Role::ExpertDownProj, "mlp.experts.down_proj"),
        (Self::LmHead, Role::LmHead, "lm_head"),
        (Self::SharedGateProj, Role::SharedGateProj, "mlp.shared_experts.gate_proj"),
        (Self::SharedUpProj, Role::SharedUpProj, "mlp.shared_experts.up_proj"),
        (Self::SharedDownProj, Role::SharedDownProj, "mlp.shared_experts.down_proj"),
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
    pub(crate) fn adapting(role: Role) -> Option<Self> {
        match role {
            Role::ExpertGateProj | Role::ExpertUpProj => Some(Self::ExpertGateUpProj),
            role => Self::ALL.iter().find(|(_, of, _)| *of == role).map(|(matrix, ..)| *matrix),
        }
    }

    /// Returns `true` if each expert has such a matrix.
    pub fn is_of_experts(self) -> bool {
        matches!(self, Self::ExpertGateUpProj | Self::ExpertDownProj)
    }
}
