//! A decoder of the families of [`grpo_models::Family`]: RMSNorm, rotary position embeddings, grouped-query attention with or without a
//! window or a Gated DeltaNet, SwiGLU, GeGLU or a mixture of experts. Its weights are a burn module, its operations are kernels of [`grpo_backend_cpu::layers`], and burn runs the backward
//! pass. Sequences are packed without padding, and completions of one prompt share its rows.
//!
//! Letters in shapes: N rows (tokens), B sequences, H hidden size, V vocabulary, A query heads, K key/value heads, R = A / K query heads
//! per key/value head, D head dimension, I intermediate size of the MLP. Of a Gated DeltaNet: Hk key heads, Hv value heads, Dk and Dv their
//! widths, L taps and C = 2 Hk Dk + Hv Dv channels of the convolution.

mod autodiff_ops;
mod batch;
mod build;
mod embedded;
mod experts;
pub(crate) mod gated_delta_net;
mod host;
mod hugging_face;
mod inference;
mod layers;
mod lora;
mod model;
mod names;
mod params;
mod rope;
mod routers;
mod tape;
mod values;
mod weight;

pub use batch::PackedBatch;
pub use experts::ExpertsMlp;
pub use gated_delta_net::GatedDeltaNet;
pub(crate) use inference::cap;
pub use inference::{Cache, Inference};
pub use layers::{Attention, Block, DenseMlp, Linear, Mixer, Mlp, RmsNorm};
pub use lora::LowRank;
pub use model::Decoder;
pub(crate) use model::EMBED_TOKENS;
pub use weight::{Stored, Weight};

pub(crate) use autodiff_ops::fork;
pub(crate) use embedded::{EmbeddedRows, RowGradients};
pub(crate) use host::to_host;
pub(crate) use hugging_face::Tensors;
pub(crate) use names::{Part, parts};
pub(crate) use params::{
    Which, export_parameters, export_parts, for_each_parameter, replace_parameters, trained_tensors, trained_values,
    update_parameters, visit_parameters,
};
pub(crate) use routers::Routers;
