//! The rotary table of a decoder, computed lazily.

use backend_cpu::layers::RopeTable;
use models::ModelConfig;
use policy::{Error, Result};
use std::sync::{Arc, Mutex, PoisonError};

/// Smallest number of positions of a table.
const FIRST: usize = 64;

/// The rotary table of a model. A model may have 131,072 positions; the table has only as many as sequences needed so far, and grows on
/// demand. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Rope {
    /// `[D / 2]`.
    frequencies: Arc<[f64]>,
    /// max_position_embeddings of the model.
    limit: usize,
    table: Arc<Mutex<RopeTable>>,
}

impl Rope {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        let frequencies: Arc<[f64]> = config.rope_frequencies().into();
        let limit = config.max_position_embeddings;
        let table = RopeTable::of_frequencies(&frequencies, FIRST.min(limit));
        Self { table: Arc::new(Mutex::new(table)), frequencies, limit }
    }

    /// Returns a table of at least `positions` positions. Its rows do not depend on its length.
    pub(crate) fn table(&self, positions: usize) -> Result<RopeTable> {
        if positions > self.limit {
            return Err(Error::TooLong { what: "sequence", length: positions, limit: self.limit });
        }
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if table.len() < positions {
            *table = RopeTable::of_frequencies(&self.frequencies, positions.next_power_of_two().min(self.limit));
        }
        Ok(table.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_grows_up_to_the_models_limit() {
        let config = ModelConfig { max_position_embeddings: 131_072, ..ModelConfig::default() };
        let rope = Rope::new(&config);
        assert_eq!(rope.table(1).unwrap().len(), 64);
        let copy = rope.clone();
        assert_eq!(copy.table(65).unwrap().len(), 128);
        assert_eq!(rope.table(3).unwrap().len(), 128, "copies share one table");
        assert_eq!(rope.table(131_072).unwrap().len(), 131_072);
        assert!(matches!(rope.table(131_073), Err(Error::TooLong { length: 131_073, limit: 131_072, .. })));
        let short = Rope::new(&ModelConfig { max_position_embeddings: 50, ..ModelConfig::default() });
        assert_eq!(short.table(40).unwrap().len(), 50);
    }
}
