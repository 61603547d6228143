//! Logical axes of dimensions. [`ModelConfig::parameters`](crate::ModelConfig::parameters) has a legend of their sizes.

/// The logical axis of a dimension of a parameter or an activation. A policy on devices maps logical axes to axes of
/// a device mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Layers, L; never sharded.
    Layer,
    /// The hidden dimension, H.
    Embed,
    /// Query heads and their columns, A D.
    Heads,
    /// Key/value heads and their columns, K D.
    Kv,
    /// The bias of queries: sharded like [`Axis::Heads`], and over the mesh axes of [`Axis::Embed`] if they divide its `columns`.
    HeadsBias {
        /// The number of columns of the queries.
        columns: usize,
    },
    /// The bias of keys or of values: sharded like [`Axis::Kv`], and over the mesh axes of [`Axis::Embed`] if they divide its `columns`.
    KvBias {
        /// The number of columns of the keys or the values.
        columns: usize,
    },
    /// A dimension of the codes or the scales of a quantised matrix, shorter than the dimension of the matrix. It is sharded like the matrix if the
    /// mesh axes divide `size`, otherwise not sharded.
    Packed {
        /// The logical axis of the matrix.
        of: &'static Axis,
        /// The number of words or of blocks.
        size: usize,
    },
    /// The dimension of one head, D.
    HeadDim,
    /// One value; not sharded.
    One,
    /// Query heads, A, with one value each; not sharded.
    QueryHead,
    /// The value heads of a Gated DeltaNet and their columns, Hv Dv; its key heads in activations. A value head is on the device of its key
    /// head.
    LinearHeads,
    /// The channels of the convolution of a Gated DeltaNet, C; usually not sharded, because the channels of a head are in three places.
    Channels,
    /// The single input of a channel of a convolution; not sharded.
    ChannelInput,
    /// The tokens that a convolution reads; not sharded.
    Taps,
    /// The columns of a value head of a Gated DeltaNet, Dv; not sharded.
    ValueDim,
    /// The columns of all queries, keys and values of a fused matrix, (A + 2K) D; usually not sharded, because heads of one kind belong
    /// together.
    FusedHeads,
    /// The intermediate dimension of the MLP, I.
    Mlp,
    /// The columns of gate and up of a fused matrix, 2I; usually not sharded.
    FusedMlp,
    /// The experts of their matrices, biases and adapters, E.
    Experts,
    /// The rows of B of experts, which are sharded along [`Axis::Experts`] instead.
    ExpertRows,
    /// The experts of a router, E; not sharded, because a router compares all of them.
    RouterExperts,
    /// The vocabulary, V.
    Vocab,
    /// The rank of an adapter.
    Rank,
    /// The single output of the value head.
    Value,
    /// The blocks of a row of 8-bit moments, where shards of the row do not have whole blocks; not sharded.
    Blocks,
    /// The rows of activations, B, or their tokens, N; not an axis of parameters.
    Batch,
    /// The tokens of a row in the residual stream, T; not an axis of parameters. Attention and MLP see all tokens of a row.
    Length,
}

impl Axis {
    /// Returns the axis of a dimension that packs the elements of this one into `size` words or blocks.
    pub fn packed(self, size: usize) -> Self {
        let of = match self {
            Self::Embed => &Self::Embed,
            Self::Heads => &Self::Heads,
            Self::Kv => &Self::Kv,
            Self::LinearHeads => &Self::LinearHeads,
            Self::Mlp => &Self::Mlp,
            // The other axes of matrices are not sharded.
            axis => return axis,
        };
        Self::Packed { of, size }
    }

    /// Returns the axis of the matrix whose codes or scales have this axis.
    pub fn unpacked(self) -> Self {
        match self {
            Self::Packed { of, .. } => *of,
            axis => axis,
        }
    }
}
