//! A decoder of the families Qwen2 (biases), Qwen3 (normalised queries and keys) and Llama 3 (scaled rotary frequencies): RMSNorm,
//! rotary positions, grouped-query attention, SwiGLU. Its weights are a module of burn, which differentiates it; its operations are kernels of [`backend_cpu::layers`]. Sequences are laid end to end, without padding,
//! and completions of one prompt share its rows.
//!
//! Letters in shapes: N rows (tokens), B sequences, H hidden, V vocabulary, A query heads, K key/value heads, R = A / K queries per
//! key/value head, D head width, I MLP width.

mod attention;
mod batch;
mod block;
mod build;
mod hugging_face;
mod inference;
mod layers;
mod lora;
mod model;
mod ops;
mod params;
mod rope;
mod weight;

pub use attention::Attention;
pub use batch::PackedBatch;
pub use block::{Block, Mlp};
pub use inference::{Cache, Inference};
pub use layers::{Linear, RmsNorm};
pub use lora::LowRank;
pub use model::Decoder;
pub use weight::{Stored, Weight};

pub(crate) use params::{
    ParameterVisitor, Which, check_parameters, export_parameters, for_each_parameter, replace_parameters, to_host,
    trained_values, update_parameters, visit_parameters,
};
