#![doc = include_str!("../README.md")]
//! [`block`] reads like a model file of `transformers`. A backend implements [`LayerOps`]. Its operations are coarse, as large as a kernel that
//! a backend may fuse, and never element-wise steps. Dispatch is static, so a backend runs the same kernels in the same order as if the layer were
//! written for this backend alone.
//!
//! | implementation | crate | tensors | weights |
//! |---|---|---|---|
//! | `Traced` | `policy-pjrt` | values of a StableHLO program, with shardings | slices of stacks, adapted or quantised |
//! | `Eager` | `policy-cpu` | rows of f32 whose memory is reused | packed for sampling, or quantised |
//! | `Tape` | `policy-cpu` | burn tensors that record their derivatives | parameters, mapped or quantised |
//!
//! An implementation is one layer in one forward pass. It holds the layer's weights and the data of the mixers: positions, masks, KV caches,
//! states of Gated DeltaNets and the recorded choices of routers. [`block`] names a weight by its place in the layer ([`Norm`], [`Projection`])
//! and does not know its form. So a prefill, a decode step and a training step differ only in the cache of the implementation.
//!
//! Legend: N rows (tokens), H hidden size, A query heads, K key/value heads, D head dimension, I width of the MLP, Hv value heads and Dv
//! their width in a Gated DeltaNet. `[N, ..]` may have several dimensions of rows.
#![forbid(unsafe_code)]

mod block;
mod ops;

pub use block::{Attention, BlockSpec, Experts, Mixer, block};
pub use ops::{LayerOps, Mlp, Norm, Projection, Residual};
