//! A small Qwen2-style decoder in burn: RMSNorm, rotary positions, grouped-query attention with biases, SwiGLU.
//!
//! Letters in shapes: B sequences, T positions of a call, S positions a query can see, H hidden, V vocabulary,
//! A query heads, K key/value heads, R = A / K queries per key/value head, D head width, I MLP width.

mod attention;
mod batch;
mod block;
mod cache;
mod layers;
mod model;
mod params;
mod rope;

pub use attention::Attention;
pub(crate) use batch::PADDING;
pub use batch::PaddedBatch;
pub use block::{Block, Mlp};
pub use cache::KvCache;
pub use layers::{Linear, RmsNorm};
pub use model::Decoder;
pub use rope::RopeTable;

pub(crate) use params::{ParameterVisitor, to_host, update_parameters, visit_parameters};
