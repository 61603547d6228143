//! Keys and values of the layers with attention, and the logical axes of the tensors of a rollout.
//!
//! Legend: L layers of a cache, B slots, S columns of a cache, W columns of a window, K key/value heads, D head dimension.

use crate::decoder::Axis;
use crate::leaves::leaves;
use grpo_stablehlo::Value;

/// Keys and values of tokens, `[L, B, K, W, D]` of each cache: of the tokens of a call, or of all earlier ones.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    pub(crate) keys: Vec<Value>,
    pub(crate) values: Vec<Value>,
}

leaves!(Window { keys, values });

/// Logical axes of keys and values `[L, B, K, S, D]`. Columns are never sharded, even if the tokens of rows are.
pub(crate) const CACHE: [Option<Axis>; 5] = [None, Some(Axis::Batch), Some(Axis::Kv), None, None];

/// Logical axes of a tensor with one element per slot, `[B]`.
pub(crate) const ROWS: [Option<Axis>; 1] = [Some(Axis::Batch)];

/// Logical axes of a tensor with a row per slot, `[B, ...]`.
pub(super) const TABLE: [Option<Axis>; 2] = [Some(Axis::Batch), None];
