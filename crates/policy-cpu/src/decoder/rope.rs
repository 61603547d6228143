//! The rotary tables of a decoder, computed lazily.

use grpo_backend_cpu::layers::RopeTable;
use grpo_models::{LayerRope, ModelConfig, Rotary};
use grpo_policy::{Error, Result};
use std::sync::{Arc, Mutex, PoisonError};

/// Smallest number of positions of a table.
const FIRST: usize = 64;

/// The rotary tables of a model. A model may have 131,072 positions; the tables have only as many as sequences needed so far, and grow on
/// demand. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Ropes {
    /// max_position_embeddings of the model.
    limit: usize,
    ropes: Arc<[Rope]>,
}

/// The rotary embedding of some layers.
#[derive(Debug)]
struct Rope {
    of: LayerRope,
    rotary: Rotary,
    table: Mutex<RopeTable>,
}

/// Tables of all rotary embeddings of a model.
#[derive(Debug)]
pub(crate) struct RopeTables(Vec<(LayerRope, RopeTable)>);

impl RopeTables {
    /// Returns the table of layers with this rotary embedding; `None` if they have none.
    pub(crate) fn get(&self, rope: LayerRope) -> Option<&RopeTable> {
        self.0.iter().find(|(of, _)| *of == rope).map(|(_, table)| table)
    }
}

impl Ropes {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        let limit = config.max_position_embeddings;
        let layers = config.period();
        let is_used = |of: &LayerRope| layers.iter().any(|layer| layer.rope == *of);
        let ropes = [LayerRope::Global, LayerRope::Local].into_iter().filter(is_used).filter_map(|of| {
            let rotary = config.rotary(of)?;
            Some(Rope { of, table: Mutex::new(table(&rotary, FIRST.min(limit))), rotary })
        });
        Self { limit, ropes: ropes.collect() }
    }

    /// Returns tables of at least `positions` positions. Their rows do not depend on their length.
    pub(crate) fn tables(&self, positions: usize) -> Result<RopeTables> {
        if positions > self.limit {
            return Err(Error::TooLong { what: "sequence", length: positions, limit: self.limit });
        }
        let grown = |rope: &Rope| {
            let mut held = rope.table.lock().unwrap_or_else(PoisonError::into_inner);
            if held.len() < positions {
                *held = table(&rope.rotary, positions.next_power_of_two().min(self.limit));
            }
            (rope.of, held.clone())
        };
        Ok(RopeTables(self.ropes.iter().map(grown).collect()))
    }
}

/// Computes the table of `positions` positions.
fn table(rotary: &Rotary, positions: usize) -> RopeTable {
    let table = RopeTable::of_frequencies(&rotary.frequencies, positions).scaled(rotary.attention_factor);
    match rotary.query_scaling {
        Some(scaling) => table.with_query_factors(|position| scaling.at(position)),
        None => table,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_models::LayerSpec;

    #[test]
    fn the_table_grows_up_to_the_models_limit() {
        let length = |ropes: &Ropes, positions| ropes.tables(positions).unwrap().get(LayerRope::Global).unwrap().len();
        let config = ModelConfig { max_position_embeddings: 131_072, ..ModelConfig::default() };
        let ropes = Ropes::new(&config);
        assert_eq!(length(&ropes, 1), 64);
        let copy = ropes.clone();
        assert_eq!(length(&copy, 65), 128);
        assert_eq!(length(&ropes, 3), 128, "copies share one table");
        assert_eq!(length(&ropes, 131_072), 131_072);
        assert!(matches!(ropes.tables(131_073), Err(Error::TooLong { length: 131_073, limit: 131_072, .. })));
        let short = Ropes::new(&ModelConfig { max_position_embeddings: 50, ..ModelConfig::default() });
        assert_eq!(length(&short, 40), 50);
    }

    #[test]
    fn layers_have_the_table_of_their_rotary_embedding() {
        let layer = |rope| LayerSpec { rope, ..LayerSpec::default() };
        let config =
            ModelConfig { layers: vec![layer(LayerRope::Local), layer(LayerRope::None)], ..ModelConfig::default() };
        let tables = Ropes::new(&config).tables(3).unwrap();
        assert!(tables.get(LayerRope::Local).is_some());
        assert!(tables.get(LayerRope::Global).is_none() && tables.get(LayerRope::None).is_none());
    }
}
