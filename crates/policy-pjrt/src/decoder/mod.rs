//! A decoder of the families of [`grpo_models::Family`] as operations of a StableHLO program.
//!
//! [`Decoder`] adds its operations to a program that the caller builds: a forward pass over rows of whole sequences, or one layer with
//! attention from the caller. [`parameters()`] lists its parameters.
//!
//! Legend: B rows, T tokens of a row, L layers, V vocabulary, H hidden size, I intermediate size of the MLP, A query heads, K key/value
//! heads, R = A / K query heads per key/value head, D head dimension.

mod adapters;
mod attention;
mod blockwise;
mod delta_net;
mod experts;
mod forward;
mod layer_loop;
mod layer_ops;
mod model;
mod options;
mod parameters;
mod products;
mod quantized;
mod rope;
mod rows;
mod traced;

pub use crate::sharding::AxisRules;
pub use adapters::Adapters;
pub use attention::{Heads, Mask};
pub use blockwise::ATTENTION;
pub use experts::{ExpertProducts, RouterSums, Routing};
pub use grpo_models::{Axis, Matrix, Role};
pub use model::Decoder;
pub use options::{Attention, Compute};
pub use parameters::{Format, Parameter, ParameterId, ParameterValues, parameters};
pub use quantized::{check_quantization, quantized_parameters};
pub use rope::{Rotaries, Rotary};
pub use rows::Rows;

pub(crate) use attention::{ByWindow, MASKED, of_groups};
pub(crate) use delta_net::{DELTA, DeltaStates, NextTokens};
pub(crate) use layer_loop::{Layer, Layers};
pub(crate) use layer_ops::{Broadcast, Dims, dot, layer_at, put_layer, rows_at, zeros};
pub(crate) use quantized::words;
pub(crate) use traced::LayerCache;
