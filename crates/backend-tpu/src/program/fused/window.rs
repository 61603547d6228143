//! Windows of a loop over tokens or over the vocabulary.
//!
//! Lengths need not be multiples of a window's width: the last window is shifted to end at the edge, and entries that
//! overlap with another window are masked.

use crate::program::frame::accumulate;
use grpo_stablehlo::{Dtype, TensorType, Value};

/// A window of a loop.
pub(super) struct Window {
    /// The index of the first entry of the window, an i32 scalar.
    pub(super) start: Value,
    /// The index of the first entry that no earlier window has counted; `None` if it is always `start`.
    pub(super) fresh: Option<Value>,
}

/// Returns the windows of `width` over `length`: (number, width, whether they overlap).
pub(super) fn windows(length: usize, width: usize) -> (usize, usize, bool) {
    let width = width.clamp(1, length);
    (length.div_ceil(width), width, !length.is_multiple_of(width))
}

/// Returns the window of iteration `trip` (an i32 scalar) over `length`.
pub(super) fn window(trip: &Value, length: usize, width: usize) -> Window {
    let (_, width, overlap) = windows(length, width);
    let fresh = trip * trip.like(width as i64);
    if !overlap {
        return Window { start: fresh, fresh: None };
    }
    Window { start: fresh.min(&fresh.like((length - width) as i64)), fresh: Some(fresh) }
}

/// Writes `part` to `all` at `window`, except for entries that another window has written.
pub(super) fn place(all: &Value, part: &Value, window: &Window) -> Value {
    let n = part.shape()[0];
    let part = match &window.fresh {
        None => part.clone(),
        Some(fresh) => {
            let f = part.builder();
            let index = f.iota(0, TensorType::new(Dtype::I32, [n])) + window.start.broadcast_in_dim(&[n], &[]);
            let current = all.dynamic_slice(&[&window.start], &[n]);
            index.ge(&fresh.broadcast_in_dim(&[n], &[])).select(part, &current)
        }
    };
    all.dynamic_update_slice(&part, &[&window.start])
}

/// Adds `part` to the window of `sum` at `starts`.
pub(super) fn add_at(sum: &Value, part: &Value, starts: &[&Value]) -> Value {
    let current = sum.dynamic_slice(starts, part.shape());
    sum.dynamic_update_slice(&accumulate(&current, part), starts)
}
