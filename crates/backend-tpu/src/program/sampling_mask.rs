//! The sampling mask in a program, a bit per token and vocabulary entry, and its tiles.
//!
//! The bits `[N, W]` are N V / 8 bytes, an eighth of a byte per logit, for sets of any size, so programs do not depend on the number of kept
//! ids. They are replicated on every device of a mesh, as the other token tables.
//!
//! Legend: N tokens, V vocabulary with padding, W words of a token, R rows, C columns of a tile.

use grpo_core::batch::TokenBatch;
use grpo_stablehlo::{Dtype, TensorType, Value};

/// The number of vocabulary entries of a word.
const BITS: usize = 32;

/// Returns W. The last word is a spare, so that a slice of words that covers any window of columns lies within them.
pub(crate) fn words(vocab: usize) -> usize {
    vocab.div_ceil(BITS) + 1
}

/// Returns the bits `[N, W]` of `batch` for `tokens` tokens and `vocab` entries. All bits are set of tokens with the whole vocabulary, of
/// masked tokens and of padding.
pub(crate) fn bits(batch: &TokenBatch, tokens: usize, vocab: usize) -> Vec<u32> {
    let width = words(vocab);
    let mut bits = vec![u32::MAX; tokens * width];
    for &row in batch.active_rows() {
        let Some(kept) = batch.kept(row) else { continue };
        let row_bits = &mut bits[row * width..(row + 1) * width];
        row_bits.fill(0);
        kept.iter().for_each(|id| row_bits[*id as usize / BITS] |= 1 << (*id as usize % BITS));
    }
    bits
}

/// Returns predicates `[R, C]` of the bits `[R, W]` of columns `0..columns`.
pub(crate) fn kept(bits: &Value, columns: usize) -> Value {
    let rows = bits.shape()[0];
    expanded(bits).slice(&[0, 0], &[rows, columns])
}

/// Returns predicates `[R, C]` of the bits `[R, W]` of `columns` columns from `start`, an i32 scalar.
pub(crate) fn kept_from(bits: &Value, start: &Value, columns: usize) -> Value {
    let rows = bits.shape()[0];
    let first = start / start.like(BITS as i64);
    let some = bits.dynamic_slice(&[&start.like(0), &first], &[rows, words(columns)]);
    let within = start - &first * first.like(BITS as i64);
    expanded(&some).dynamic_slice(&[&start.like(0), &within], &[rows, columns])
}

/// Returns predicates `[R, 32 W]` of bits `[R, W]`.
fn expanded(bits: &Value) -> Value {
    let [rows, words] = [0, 1].map(|d| bits.shape()[d]);
    let shape = [rows, words, BITS];
    let place = bits.builder().dense((0..BITS).map(|bit| 1_i64 << bit), TensorType::new(Dtype::U32, [BITS]));
    let set = bits.broadcast_in_dim(&shape, &[0, 1]) & place.broadcast_in_dim(&shape, &[2]);
    (!&set.eq(&set.like(0))).reshape(&[rows, words * BITS])
}
