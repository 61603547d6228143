//! Panels of the vocabulary.
//!
//! If the vocabulary is sharded over S devices, a panel consists of the same columns of every shard: a tensor of V
//! entries becomes one of `[S, V / S]`, and the loop slices the second dimension. A slice of a sharded dimension would
//! gather the tensor in every iteration.

use super::window::{Window, add_at};
use crate::program::products::Head;
use crate::program::sampling_mask::kept_from;
use crate::program::softmax::Entries;
use grpo_stablehlo::{Dtype, TensorType, Value};

/// The panels of a vocabulary.
pub(super) struct Panels {
    /// S, the number of shards.
    shards: usize,
    /// The number of columns of every shard in a panel.
    width: usize,
}

impl Panels {
    pub(super) fn new(shards: usize, width: usize) -> Self {
        Self { shards, width }
    }

    /// Divides a dimension into shards and their entries. Returns the index of the dimension of the entries, too.
    fn divided(&self, value: &Value, dimension: usize) -> (Value, usize) {
        if self.shards == 1 {
            return (value.clone(), dimension);
        }
        let mut shape = value.shape().to_vec();
        shape[dimension] /= self.shards;
        shape.insert(dimension, self.shards);
        (value.reshape(&shape), dimension + 1)
    }

    /// Returns the panel at column `start` of every shard.
    pub(super) fn slice(&self, value: &Value, dimension: usize, start: &Value) -> Value {
        let (all, along) = self.divided(value, dimension);
        let (mut sizes, mut shape) = (all.shape().to_vec(), value.shape().to_vec());
        sizes[along] = self.width;
        shape[dimension] = self.shards * self.width;
        all.dynamic_slice(&starts(&all, along, start).iter().collect::<Vec<_>>(), &sizes).reshape(&shape)
    }

    /// Adds `part` to the panel at column `start` of every shard of `sum`.
    pub(super) fn add(&self, sum: &Value, part: &Value, dimension: usize, start: &Value) -> Value {
        let ((all, along), (part, _)) = (self.divided(sum, dimension), self.divided(part, dimension));
        add_at(&all, &part, &starts(&all, along, start).iter().collect::<Vec<_>>()).reshape(sum.shape())
    }

    /// Returns the head of the columns of a panel.
    pub(super) fn head(&self, head: &Head, start: &Value) -> Head {
        let bias = head.bias.as_ref().map(|bias| self.slice(bias, 0, start));
        head.with(self.slice(&head.weight, head.vocab_dimension(), start), bias)
    }

    /// Returns the entries of the panel `logits` at `window`, of a vocabulary with `vocab` columns; from `end` on they are padding.
    pub(super) fn entries(&self, logits: &Value, window: &Window, vocab: usize, end: Option<usize>) -> Entries {
        let f = logits.builder();
        let place = f.iota(0, TensorType::new(Dtype::I32, [self.shards * self.width]));
        let spread = |scalar: &Value| scalar.broadcast_in_dim(place.shape(), &[]);
        let (first, within) = match self.shards {
            1 => (place.like(0), place.clone()),
            shards => {
                let shard = &place / place.like(self.width as i64);
                (&shard * shard.like((vocab / shards) as i64), &place - &shard * shard.like(self.width as i64))
            }
        };
        let column = within + spread(&window.start);
        let index = first + &column;
        let fresh = window.fresh.as_ref().map(|fresh| column.ge(&spread(fresh)));
        let real = end.map(|end| index.lt(&index.like(end as i64)));
        let counts = match (fresh, real) {
            (Some(fresh), Some(real)) => Some(fresh & real),
            (fresh, real) => fresh.or(real),
        };
        let rows = |columns: &Value| columns.broadcast_in_dim(logits.shape(), &[1]);
        Entries { index: rows(&index), counts: counts.as_ref().map(rows) }
    }

    /// Returns predicates of the kept columns of the panel at `window`, from the bits `[N, W]` of a vocabulary with `vocab` columns.
    pub(super) fn kept(&self, bits: &Value, window: &Window, vocab: usize) -> Value {
        let shard_columns = |shard: usize| {
            let first = window.start.like((vocab / self.shards * shard) as i64);
            kept_from(bits, &(first + &window.start), self.width)
        };
        let parts: Vec<Value> = (0..self.shards).map(shard_columns).collect();
        bits.builder().concatenate(&parts.iter().collect::<Vec<_>>(), 1)
    }
}

/// Returns the start indices of a slice of `value` that begins at `start` along one dimension.
fn starts(value: &Value, along: usize, start: &Value) -> Vec<Value> {
    (0..value.shape().len()).map(|d| if d == along { start.clone() } else { start.like(0) }).collect()
}
