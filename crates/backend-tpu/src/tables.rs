//! The tokens of a batch as the two small tables of programs.

use crate::devices::Devices;
use crate::program::{IDS, Role, Spec};
use crate::shard::Layout;
use crate::tensor::send;
use grpo_core::backend_api::evaluate::Evaluator;
use grpo_core::backend_api::token_columns::TokenColumns;
use grpo_core::batch::TokenBatch;
use grpo_core::error::Result;
use pjrt::Buffer;
use std::collections::HashMap;

/// The tokens of a batch on the host, as arguments of programs: [`Role::TokenIds`], [`Role::TokenNumbers`] and
/// [`Role::OnPolicy`]. Masked tokens and padding have target -1 and zeros, for any content of the batch.
#[derive(Clone, Debug)]
pub struct TokenTables {
    /// i32 `[IDS, G]`, for [`Role::TokenIds`].
    pub ids: Vec<i32>,
    /// f32 `[TokenColumns::COUNT, G]`, for [`Role::TokenNumbers`].
    pub numbers: Vec<f32>,
    /// The predicate for [`Role::OnPolicy`].
    pub on_policy: bool,
}

impl TokenTables {
    /// Makes the tables of `batch`, which has at most [`Spec::tokens`] tokens. `evaluator` belongs to the loss of
    /// `batch`; `None` for scoring.
    pub fn new(spec: &Spec, batch: &TokenBatch, evaluator: Option<&Evaluator>) -> Self {
        let g = spec.padded_tokens();
        let (mut ids, mut numbers) = (vec![-1; IDS * g], vec![0.0; TokenColumns::<f32>::COUNT * g]);
        for sequence in 0..batch.sequences() {
            for row in batch.range(sequence).filter(|row| batch.is_active(*row)) {
                // The batch has checked that it is in the vocabulary; programs use i32.
                ids[row] = batch.targets()[row] as i32;
                ids[g + row] = sequence as i32;
                // Scores depend on the temperature only.
                let columns = evaluator.map_or_else(
                    || TokenColumns {
                        reciprocal_temperature: spec.loss.reciprocal_temperature(batch, row),
                        ..TokenColumns::default()
                    },
                    |evaluator| evaluator.columns(sequence, row),
                );
                for (column, value) in columns.iter().enumerate() {
                    numbers[column * g + row] = *value as f32;
                }
            }
        }
        Self { ids, numbers, on_policy: batch.old_logp().is_none() }
    }

    /// Copies the tables to every device.
    pub(crate) fn upload(&self, spec: &Spec, devices: &Devices) -> Result<HashMap<Role, Vec<Buffer>>> {
        let place = |role| (Layout::new(spec, role, 0), spec.type_of(role).shape);
        let [ids, numbers, flag] = [Role::TokenIds, Role::TokenNumbers, Role::OnPolicy].map(place);
        Ok(HashMap::from([
            (Role::TokenIds, send(devices, &ids.0, &ids.1, &self.ids)?),
            (Role::TokenNumbers, send(devices, &numbers.0, &numbers.1, &self.numbers)?),
            (Role::OnPolicy, send(devices, &flag.0, &flag.1, &[self.on_policy])?),
        ]))
    }
}
