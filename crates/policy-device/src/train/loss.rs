//! One evaluation of the loss of a micro-batch on a device.

use super::{Rows, TrainModules, TrainShape};
use crate::error::{Error, Result};
use crate::runtime::{Programs, Runtime, read};
use crate::weights::DeviceWeights;
use backend_tpu::TokenTables;
use backend_tpu::program::{Pass, Role, Spec};
use grpo_core::backend_api::columns::LossSums;
use grpo_core::backend_api::evaluate::Evaluator;
use grpo_core::batch::TokenBatch;
use grpo_core::{LossConfig, Scores};
use pjrt::{Argument, Buffer};

/// A loss with the programs that compute it, by the sizes of micro-batches.
#[derive(Debug)]
pub(crate) struct Loss {
    pub(crate) config: LossConfig,
    programs: Programs<(Pass, TrainShape)>,
}

impl Loss {
    pub(crate) fn new(config: LossConfig) -> Self {
        Self { config, programs: Programs::new() }
    }

    /// Log-probabilities and entropies `[N]` of the active tokens of `batch`, the completion tokens of `rows`; 0 at the others.
    ///
    /// # Errors
    /// [`Error::Loss`] for a token that the model does not have, [`Error::Device`].
    pub(crate) fn score(&mut self, on: &Device<'_>, rows: &UploadedRows, batch: &TokenBatch) -> Result<Scores> {
        let spec = on.modules.head(&self.config, rows.shape.tokens)?;
        let tables = upload_tables(on.runtime, &spec, &TokenTables::new(&spec, batch, None))?;
        let program = self
            .programs
            .get(on.runtime, (Pass::Score, rows.shape), |(_, shape)| on.modules.score(&self.config, *shape))?;
        let mut arguments = on.weights.arguments();
        arguments.extend(rows.buffers.iter().chain(&tables).map(Argument::from));
        let outputs = program.run(arguments)?;
        read_scores(&outputs, batch)
    }

    /// The loss of the evaluator's batch as it was added up, and its scores; gradients are added to `sums`, which are gone when the
    /// program fails.
    fn gradient(
        &mut self,
        on: &Device<'_>,
        rows: &UploadedRows,
        evaluator: &Evaluator<'_>,
        sums: &mut Vec<Buffer>,
    ) -> Result<(LossSums<f64>, Scores)> {
        let spec = on.modules.head(&self.config, rows.shape.tokens)?;
        let batch = evaluator.batch();
        let tables = upload_tables(on.runtime, &spec, &TokenTables::new(&spec, batch, Some(evaluator)))?;
        let program = self
            .programs
            .get(on.runtime, (Pass::Gradient, rows.shape), |(_, shape)| on.modules.gradient(&self.config, *shape))?;
        let mut arguments = on.weights.arguments();
        arguments.extend(std::mem::take(sums).into_iter().map(Argument::from));
        arguments.extend(rows.buffers.iter().chain(&tables).map(Argument::from));
        let mut outputs = program.run(arguments)?;
        let rest = outputs.split_off(outputs.len().saturating_sub(3));
        let values: Vec<f32> = read(&rest[0], "the loss")?;
        let scores = read_scores(&rest[1..], batch)?;
        *sums = outputs;
        Ok((LossSums::from_fn(|i| f64::from(values[i])), scores))
    }
}

/// Where a loss is computed, and of which weights.
#[derive(Clone, Copy)]
pub(crate) struct Device<'a> {
    pub(crate) runtime: &'a Runtime,
    pub(crate) modules: &'a TrainModules,
    pub(crate) weights: &'a DeviceWeights,
}

/// Rows on the device.
pub(crate) struct UploadedRows {
    shape: TrainShape,
    /// Ids and positions.
    buffers: [Buffer; 2],
}

impl Device<'_> {
    /// Copies the rows of a micro-batch to the device.
    pub(crate) fn upload(&self, rows: &Rows) -> Result<UploadedRows> {
        let TrainShape { rows: b, length, tokens } = rows.shape;
        let ids = self.runtime.upload(&rows.ids, &[b, length])?;
        let positions = self.runtime.upload(&rows.positions, &[tokens])?;
        Ok(UploadedRows { shape: rows.shape, buffers: [ids, positions] })
    }
}

/// One call of a loss, for [`grpo_core::backend_api::plan::step`].
pub(crate) struct Call<'a> {
    pub(crate) loss: &'a mut Loss,
    pub(crate) on: Device<'a>,
    pub(crate) rows: &'a UploadedRows,
    pub(crate) sums: &'a mut Vec<Buffer>,
    /// What failed, where it is no error of the loss library, through which it goes.
    pub(crate) failed: &'a mut Option<Error>,
}

impl grpo_core::backend_api::plan::Call for Call<'_> {
    type Scores = Scores;

    fn score(&mut self, batch: &TokenBatch) -> grpo_core::Result<Scores> {
        self.loss.score(&self.on, self.rows, batch).map_err(|error| of_loss(self.failed, error))
    }

    fn gradient(self, evaluator: &Evaluator<'_>) -> grpo_core::Result<(LossSums<f64>, Scores)> {
        let Self { loss, on, rows, sums, failed } = self;
        loss.gradient(&on, rows, evaluator, sums).map_err(|error| of_loss(failed, error))
    }
}

/// The error as one of the loss library, which is not looked at where `failed` has one.
fn of_loss(failed: &mut Option<Error>, error: Error) -> grpo_core::Error {
    match error {
        Error::Loss(error) => error,
        other => {
            let message = other.to_string();
            *failed = Some(other);
            grpo_core::Error::Backend { backend: "pjrt".into(), message }
        }
    }
}

/// The token tables on the device, in the order in which programs take them.
fn upload_tables(runtime: &Runtime, spec: &Spec, tables: &TokenTables) -> Result<[Buffer; 3]> {
    let shape = |role| spec.type_of(role).shape;
    Ok([
        runtime.upload(&tables.ids, &shape(Role::TokenIds))?,
        runtime.upload(&tables.numbers, &shape(Role::TokenNumbers))?,
        runtime.upload(&[tables.on_policy], &[])?,
    ])
}

/// Log-probabilities and entropies of the tokens of `batch`, without padding.
fn read_scores(outputs: &[Buffer], batch: &TokenBatch) -> Result<Scores> {
    let column = |buffer: &Buffer, what| -> Result<Vec<f32>> {
        let mut values = read(buffer, what)?;
        values.truncate(batch.tokens());
        Ok(values)
    };
    Ok(Scores { logp: column(&outputs[0], "log-probabilities")?, entropy: column(&outputs[1], "entropies")? })
}
