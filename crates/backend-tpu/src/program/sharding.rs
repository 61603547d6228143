//! The sharding of the loss over the devices of a mesh: tokens over the axis `data`, the vocabulary over `tensor`.
//!
//! Programs are written for whole tensors, and Shardy's partitioner adds the collectives. Arguments and results are
//! sharded as [`Spec::sharding`] says. Loops over tiles slice tokens or vocabulary, and slices of a sharded dimension
//! would gather the tensor in every iteration. So their tensors have another sharding ([`Spec::in_loops`]): every device
//! has all tokens, and the vocabulary is sharded over all devices.

use super::products::HeadSplit;
use super::role::Role;
use super::spec::Spec;
use grpo_core::error::{Error, Result};
use grpo_core::{HeadLayout, Implementation, PolicySpec};
use grpo_stablehlo::{Mesh, Sharding, Value};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The axes of the mesh.
const DATA: &str = "data";
const TENSOR: &str = "tensor";

/// The numbers of devices along the axes of a mesh.
///
/// ```
/// use grpo_backend_tpu::program::MeshShape;
///
/// let mesh = MeshShape { data: 4, tensor: 2 }; // eight devices
/// assert_eq!(MeshShape::default(), MeshShape { data: 1, tensor: 1 });
/// assert_eq!(mesh.padded_vocab(50_257), 50_264);
/// ```
#[derive(Clone, Copy, Debug, SmartDefault, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MeshShape {
    /// The number of token shards.
    #[default(1)]
    pub data: usize,
    /// The number of vocabulary shards.
    #[default(1)]
    pub tensor: usize,
}

impl MeshShape {
    /// Returns the number of devices.
    pub fn devices(&self) -> usize {
        self.data.saturating_mul(self.tensor)
    }

    /// Returns the mesh of these devices.
    ///
    /// # Errors
    /// [`Error::Config`] for an axis without devices, and for more devices than a mesh can have.
    pub fn mesh(&self) -> Result<Mesh> {
        let Self { data, tensor } = *self;
        if self.devices() == 0 {
            return Err(Error::Config(format!("mesh.data is {data} and mesh.tensor {tensor}: both are at least 1")));
        }
        Mesh::new("mesh", [(DATA, data), (TENSOR, tensor)]).map_err(|error| Error::Config(error.to_string()))
    }

    /// Returns the number of tokens with padding: a multiple of `data`.
    pub fn padded_tokens(&self, tokens: usize) -> usize {
        tokens.checked_next_multiple_of(self.data.max(1)).unwrap_or(tokens)
    }

    /// Returns the size of the vocabulary with padding: a multiple of the number of devices.
    pub fn padded_vocab(&self, vocab: usize) -> usize {
        vocab.checked_next_multiple_of(self.devices().max(1)).unwrap_or(vocab)
    }

    /// Returns the vocabulary entries per device in loops over tiles.
    pub fn local_vocab(&self, vocab: usize) -> usize {
        self.padded_vocab(vocab) / self.devices().max(1)
    }
}

impl std::fmt::Display for MeshShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{DATA} {} x {TENSOR} {}", self.data, self.tensor)
    }
}

impl Spec {
    /// Returns the sharding of an argument or a result; `None` on one device.
    pub fn sharding(&self, role: Role) -> Option<Sharding> {
        self.sharding_over(role, &[DATA], &[TENSOR])
    }

    fn sharding_in_loops(&self, role: Role) -> Option<Sharding> {
        // In the order of axes in which a device's columns are a part of the columns that it stores.
        self.sharding_over(role, &[], &[TENSOR, DATA])
    }

    fn sharding_over(&self, role: Role, tokens: &[&str], vocab: &[&str]) -> Option<Sharding> {
        if self.mesh.devices() < 2 {
            return None;
        }
        let by_vocab_hidden = !matches!(self.policy, PolicySpec::Hidden { layout: HeadLayout::HiddenVocab, .. });
        let dimensions = match role {
            Role::Hidden | Role::GradHidden => vec![tokens, &[]],
            Role::LmHead | Role::GradLmHead if by_vocab_hidden => vec![vocab, &[]],
            Role::LmHead | Role::GradLmHead => vec![&[], vocab],
            Role::Bias | Role::GradBias => vec![vocab],
            Role::Logits | Role::GradLogits => vec![tokens, vocab],
            Role::TokenIds
            | Role::TokenNumbers
            | Role::OnPolicy
            | Role::SamplingMask
            | Role::Sums
            | Role::Logp
            | Role::Entropy => vec![&[][..]; self.type_of(role).rank()],
        };
        match self.mesh.mesh().map(|mesh| mesh.sharding(&dimensions)) {
            Ok(Ok(sharding)) => Some(sharding),
            _ => unreachable!("`validate` has checked the mesh, and each axis is used once"),
        }
    }

    /// Constrains an argument or a result to its sharding.
    pub(super) fn stored(&self, role: Role, value: &Value) -> Value {
        self.sharding(role).map_or(value.clone(), |sharding| value.constrain(&sharding))
    }

    /// Constrains a tensor that loops over tiles read or carry: every device has all tokens, and its shard of the
    /// vocabulary.
    pub(super) fn in_loops(&self, role: Role, value: &Value) -> Value {
        self.sharding_in_loops(role).map_or(value.clone(), |sharding| value.constrain(&sharding))
    }

    /// Returns the shardings of the operands of logits in loops over tiles.
    pub(super) fn head_split(&self) -> Option<HeadSplit> {
        if self.implementation != Implementation::Fused {
            return None;
        }
        let (rows, weight) = (self.sharding_in_loops(Role::Hidden)?, self.sharding_in_loops(Role::LmHead)?);
        Some(HeadSplit { rows, weight })
    }
}
