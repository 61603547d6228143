#![doc = include_str!("../README.md")]
//! [`block`] reads like a model file of `transformers`; [`LayerOps`] is what it needs of a backend. An operation is coarse: it is what a
//! backend may fuse into one kernel or one program, never an element-wise step. Dispatch is static, so a backend runs the same kernels in
//! the same order as if the layer were written for it alone.
//!
//! | implementation | crate | tensors | weights |
//! |---|---|---|---|
//! | `Traced` | `policy-pjrt` | values of a StableHLO program, with shardings | slices of stacks, adapted or quantised |
//! | `Eager` | `policy-cpu` | rows of f32 whose memory is reused | packed for sampling, or quantised |
//! | `Tape` | `policy-cpu` | burn tensors that record their derivatives | parameters, mapped or quantised |
//!
//! An implementation is one layer in one forward pass: it holds the layer's weights and all that the mixers read and write besides their
//! input, such as positions, masks, KV caches, states of Gated DeltaNets and the recorded choices of routers. [`block`] names a weight by
//! its place in the layer ([`Norm`], [`Projection`]) and does not know its form. So a prefill, a decode step and a training step differ
//! only in the cache of the implementation.
//!
//! The operations also describe the layers of an image encoder: attention has the mask of the implementation, causal or not, a norm the
//! formula of its weights, a projection its bias, and an MLP its form.
//!
//! Legend: N rows (tokens), H hidden size, A query heads, K key/value heads, D head dimension, I width of the MLP, Hv value heads and Dv
//! their width in a Gated DeltaNet. `[N, ..]` may have several dimensions of rows.
#![forbid(unsafe_code)]

mod block;
mod ops;

pub use block::{Attention, BlockSpec, Mixer, block};
pub use ops::{LayerOps, Norm, Projection, Residual};
