//! The numbers of columns of KV caches, rounded to few values so that few executables are compiled.
//!
//! Legend: B slots, S columns of a cache, C columns of it that are read.

use crate::decoder::Broadcast;
use grpo_stablehlo::{Dtype, TensorType, Value};

/// Smallest number of columns of a cache, and of tokens of a row of prompts.
pub(super) const FEWEST_COLUMNS: usize = 16;
/// Numbers of columns above it are multiples of it: the number of lanes of a TPU register.
const COLUMNS: usize = 128;

/// The numbers of columns of the caches of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Columns {
    /// S of layers without a sliding window: the number of tokens of a sequence with keys and values.
    pub(crate) all: usize,
    /// The number of positions, from the next token of a sequence on, that calls may have written.
    pub(crate) ahead: usize,
}

impl Columns {
    /// Returns S of layers with this sliding window.
    pub(crate) fn of(self, window: Option<usize>) -> usize {
        window.map_or(self.all, |window| columns(window - 1 + self.ahead).min(self.all))
    }

    /// Returns the position in each of the first columns of caches with this window, `[B, C]`, i32, if the next token of each sequence has
    /// position `next` `[B]`. Empty columns have negative positions. C is at most `read`.
    pub(super) fn positions(self, window: Option<usize>, next: &Value, read: usize) -> Value {
        let all = self.of(window);
        let column = next.builder().iota(1, TensorType::new(Dtype::I32, [next.shape()[0], all.min(read)]));
        let last = (next - next.like(1)).along_first(&column);
        &last - remainder(&(&last - &column + last.like(all as i64)), all)
    }
}

/// Returns `value` modulo `divisor`, for values that are not negative.
pub(super) fn remainder(value: &Value, divisor: usize) -> Value {
    let divisor = value.like(divisor as i64);
    value - (value / &divisor) * divisor
}

/// Returns the number of columns of a cache for sequences of `length` tokens.
pub(super) fn columns(length: usize) -> usize {
    if length > COLUMNS { length.next_multiple_of(COLUMNS) } else { length.next_multiple_of(FEWEST_COLUMNS) }
}

/// Returns the number of columns, of `all`, that a call reads if its longest sequence has `length` tokens: a multiple of about one sixth of
/// `all`. Smaller steps would need more executables, whose compile time exceeds the gain.
pub(crate) fn columns_read(length: usize, all: usize) -> usize {
    let step = (all / 6).next_multiple_of(COLUMNS).max(2 * COLUMNS);
    length.next_multiple_of(step).min(all)
}
