//! A mesh of devices: tokens are sharded along one dimension, the vocabulary along the other.
//!
//! Every device runs the same program on its shard, with explicit all-reduces. Device d holds the tokens of data rank d
//! / vocab and the columns of vocab rank d % vocab.

use grpo_core::error::{Error, Result};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use stablehlo::{Builder, Dtype, Reducer, TensorType, Value};

/// The numbers of shards of tokens and vocabulary.
///
/// ```
/// use backend_tpu::program::Mesh;
///
/// let mesh = Mesh { data: 4, vocab: 2 }; // eight devices
/// assert_eq!(Mesh::default(), Mesh { data: 1, vocab: 1 });
/// # let _ = mesh;
/// ```
#[derive(Clone, Copy, Debug, SmartDefault, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Mesh {
    /// The number of token shards (data parallelism); gradients of the head are summed over them.
    #[default(1)]
    pub data: usize,
    /// The number of vocabulary shards: each device holds `[V / vocab, H]` of the head.
    #[default(1)]
    pub vocab: usize,
}

impl Mesh {
    /// Returns the number of devices.
    pub fn devices(&self) -> usize {
        self.data.saturating_mul(self.vocab)
    }

    /// Checks that the mesh has devices.
    ///
    /// # Errors
    /// [`Error::Config`] for a mesh without devices.
    pub(crate) fn validate(&self) -> Result<()> {
        match self.devices() {
            0 => Err(Error::Config(format!(
                "mesh.data is {} and mesh.vocab {}: both are at least 1",
                self.data, self.vocab
            ))),
            _ => Ok(()),
        }
    }

    /// Returns the tokens per device; the last device may have padding.
    pub fn local_tokens(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.data)
    }

    /// Returns the vocabulary entries per device; the last device may have padding.
    pub fn local_vocab(&self, vocab: usize) -> usize {
        vocab.div_ceil(self.vocab)
    }
}

/// The coordinates of the running device in its mesh, as values of its program.
pub(crate) struct MeshCoord {
    mesh: Mesh,
    /// The ranks of the device along both dimensions of the mesh, i32 scalars.
    data_rank: Value,
    vocab_rank: Value,
}

impl MeshCoord {
    pub(crate) fn new(f: &Builder, mesh: Mesh) -> Self {
        let zero = f.scalar(0, Dtype::I32);
        if mesh.devices() == 1 {
            return Self { mesh, data_rank: zero.clone(), vocab_rank: zero };
        }
        let id = f.replica_id().convert(Dtype::I32);
        let vocab = f.scalar(mesh.vocab as i64, Dtype::I32);
        Self { mesh, data_rank: &id / &vocab, vocab_rank: id.rem(&vocab) }
    }

    /// Returns the index of the device's first token.
    pub(crate) fn first_token(&self, local_tokens: usize) -> Value {
        &self.data_rank * self.data_rank.like(local_tokens as i64)
    }

    /// Returns the index of the device's first column.
    pub(crate) fn first_column(&self, local_vocab: usize) -> Value {
        &self.vocab_rank * self.vocab_rank.like(local_vocab as i64)
    }

    /// Returns `true` if the device holds all columns.
    pub(crate) fn is_whole_vocab(&self) -> bool {
        self.mesh.vocab == 1
    }

    /// Reduces a value over the devices that hold the same tokens.
    pub(crate) fn over_vocab(&self, value: &Value, reducer: Reducer) -> Value {
        let Mesh { data, vocab } = self.mesh;
        let groups = || (0..data).map(|d| (0..vocab).map(|v| d * vocab + v).collect()).collect::<Vec<_>>();
        if vocab == 1 { value.clone() } else { value.all_reduce(reducer, &groups()) }
    }

    /// Reduces a value over the devices that hold the same columns.
    pub(crate) fn over_data(&self, value: &Value, reducer: Reducer) -> Value {
        let Mesh { data, vocab } = self.mesh;
        let groups = || (0..vocab).map(|v| (0..data).map(|d| d * vocab + v).collect()).collect::<Vec<_>>();
        if data == 1 { value.clone() } else { value.all_reduce(reducer, &groups()) }
    }

    /// Returns the value on data rank 0 and zeros elsewhere, so that a sum over data counts it once.
    pub(crate) fn once(&self, value: &Value) -> Value {
        if self.mesh.data == 1 { value.clone() } else { on_first(&self.data_rank, value) }
    }

    /// Returns the value on vocab rank 0 and zeros elsewhere, so that a sum over the vocabulary counts it once.
    pub(crate) fn once_over_vocab(&self, value: &Value) -> Value {
        if self.mesh.vocab == 1 { value.clone() } else { on_first(&self.vocab_rank, value) }
    }

    /// Gathers the vectors of all data ranks `[N_local]` into `[data * N_local]`.
    pub(crate) fn gather_tokens(&self, value: &Value) -> Value {
        if self.mesh.data == 1 {
            return value.clone();
        }
        let local = value.shape()[0];
        let whole = value.builder().splat(0.0, TensorType::new(value.dtype(), [self.mesh.data * local]));
        let placed = whole.dynamic_update_slice(value, &[&self.first_token(local)]);
        self.over_data(&placed, Reducer::Add)
    }
}

fn on_first(rank: &Value, value: &Value) -> Value {
    rank.eq(&rank.like(0)).select(value, &value.like(0.0))
}
