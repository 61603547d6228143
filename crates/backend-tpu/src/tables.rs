//! The tokens of a batch as the two small tables of programs.

use crate::devices::{DeviceTensor, Devices};
use crate::program::{IDS, Role, Spec, bits};
use crate::tensor::layout;
use grpo_core::backend_api::evaluate::Evaluator;
use grpo_core::backend_api::token_columns::TokenColumns;
use grpo_core::batch::TokenBatch;
use grpo_core::error::Result;
use std::collections::HashMap;

/// The tokens of a batch on the host, as arguments of programs: [`Role::TokenIds`], [`Role::TokenNumbers`],
/// [`Role::OnPolicy`] and [`Role::SamplingMask`]. Masked tokens and padding have target -1 and zeros, for any content of the batch.
#[derive(Clone, Debug)]
pub struct TokenTables {
    /// i32 `[IDS, N]`, for [`Role::TokenIds`].
    pub ids: Vec<i32>,
    /// f32 `[TokenColumns::COUNT, N]`, for [`Role::TokenNumbers`].
    pub numbers: Vec<f32>,
    /// The predicate for [`Role::OnPolicy`].
    pub on_policy: bool,
    /// u32 `[N, W]`, for [`Role::SamplingMask`], if the specification has it.
    pub sampling_mask: Option<Vec<u32>>,
}

impl TokenTables {
    /// Makes the tables of `batch`, which has at most [`Spec::tokens`] tokens. `evaluator` belongs to the loss of
    /// `batch`; `None` for scoring.
    pub fn new(spec: &Spec, batch: &TokenBatch, evaluator: Option<&Evaluator>) -> Self {
        let n = spec.padded_tokens();
        let (mut ids, mut numbers) = (vec![-1; IDS * n], vec![0.0; TokenColumns::<f32>::COUNT * n]);
        for sequence in 0..batch.sequences() {
            for row in batch.range(sequence).filter(|row| batch.is_active(*row)) {
                // The batch has checked that it is in the vocabulary; programs use i32.
                ids[row] = batch.targets()[row] as i32;
                ids[n + row] = sequence as i32;
                // Scores depend on the temperature only.
                let columns = evaluator.map_or_else(
                    || TokenColumns {
                        reciprocal_temperature: spec.loss.reciprocal_temperature(batch, row),
                        ..TokenColumns::default()
                    },
                    |evaluator| evaluator.columns(sequence, row),
                );
                for (column, value) in columns.iter().enumerate() {
                    numbers[column * n + row] = *value as f32;
                }
            }
        }
        let sampling_mask = spec.sampling_mask.then(|| bits(batch, n, spec.padded_vocab()));
        Self { ids, numbers, on_policy: batch.old_logp().is_none(), sampling_mask }
    }

    /// Copies the tables to every device.
    pub(crate) fn upload(&self, spec: &Spec, devices: &Devices) -> Result<HashMap<Role, DeviceTensor>> {
        let mut tables = HashMap::from([
            (Role::TokenIds, devices.upload(&self.ids, layout(spec, Role::TokenIds))?),
            (Role::TokenNumbers, devices.upload(&self.numbers, layout(spec, Role::TokenNumbers))?),
            (Role::OnPolicy, devices.upload(&[self.on_policy], layout(spec, Role::OnPolicy))?),
        ]);
        if let Some(bits) = &self.sampling_mask {
            tables.insert(Role::SamplingMask, devices.upload(bits, layout(spec, Role::SamplingMask))?);
        }
        Ok(tables)
    }
}
