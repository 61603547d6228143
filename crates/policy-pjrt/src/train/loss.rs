//! Evaluation of the loss of a micro-batch on a device.

use super::programs::{ROUTED, table_axes};
use super::step::StepOfState;
use super::{Rows, TrainPrograms, TrainShape};
use crate::decoder::Axis;
use crate::error::{Error, Result};
use crate::program::Programs;
use crate::runtime::Runtime;
use crate::weights::DeviceWeights;
use crate::{Argument, DeviceTensor};
use grpo_backend_tpu::TokenTables;
use grpo_backend_tpu::program::{Role, Spec};
use grpo_core::aggregate::batch_weights;
use grpo_core::backend_api::evaluate::Evaluator;
use grpo_core::backend_api::plan::Head;
use grpo_core::backend_api::token_columns::LossSums;
use grpo_core::batch::{TokenBatch, ValueTargets};
use grpo_core::objective::ValueLossConfig;
use grpo_core::{LossConfig, Metrics, Scores};
use grpo_pjrt::Element;
use grpo_policy::{OptimizerName, RouterStatistics};
use std::sync::Arc;

/// A loss and its compiled programs, by the sizes of micro-batches.
#[derive(Debug)]
pub(crate) struct Loss {
    pub(crate) config: Arc<LossConfig>,
    /// The value loss that is added to it.
    pub(crate) of_values: Option<ValueLossConfig>,
    programs: Programs<Key>,
}

/// Identifies a program of a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Key {
    Gradient(TrainShape),
    Step(TrainShape, OptimizerName),
    /// `adapted` and `value_head`: whether the decoder has adapters and a value head.
    Score {
        adapted: bool,
        value_head: bool,
        shape: TrainShape,
    },
    Values(TrainShape),
}

impl Loss {
    pub(crate) fn new(config: Arc<LossConfig>) -> Self {
        Self { config, of_values: None, programs: Programs::new() }
    }

    /// Drops the programs, which are specific to one decoder.
    pub(crate) fn forget_programs(&mut self) {
        self.programs = Programs::new();
    }

    /// Returns log-probabilities and entropies `[N]` of the tokens of `batch`, the completion tokens of `rows`; 0 for masked tokens.
    ///
    /// # Errors
    /// [`Error::Loss`] for an unknown token, [`Error::Device`].
    pub(crate) fn score(
        &mut self,
        on: &Device<'_>,
        weights: &DeviceWeights,
        rows: &UploadedRows,
        batch: &TokenBatch,
    ) -> Result<Scores> {
        let spec = on.modules.spec(&self.config, rows.shape)?;
        let tables = upload_tables(on.runtime, &spec, &TokenTables::new(&spec, batch, None))?;
        let (decoder, shape) = (on.modules.decoder(), rows.shape);
        let key = Key::Score { adapted: decoder.adapters().is_some(), value_head: decoder.has_value_head(), shape };
        let program = self.programs.get(on.runtime, key, |_| on.modules.score(&self.config, shape))?;
        let mut arguments = weights.arguments();
        arguments.extend(rows.tensors.iter().chain(&tables).map(Argument::from));
        let outputs = program.run(arguments)?;
        read_scores(&outputs, batch)
    }

    /// Returns the values `[N]` of the states before the `tokens` completion tokens of `rows`.
    ///
    /// # Errors
    /// [`Error::Policy`] for a decoder without a value head, [`Error::Device`].
    pub(crate) fn values(
        &mut self,
        on: &Device<'_>,
        weights: &DeviceWeights,
        rows: &UploadedRows,
        tokens: usize,
    ) -> Result<Vec<f32>> {
        let program = self.programs.get(on.runtime, Key::Values(rows.shape), |_| on.modules.values(rows.shape))?;
        let mut arguments = weights.arguments();
        arguments.extend(rows.tensors.iter().map(Argument::from));
        read_tokens(&program.run_one(arguments)?, "values", tokens)
    }

    /// Computes loss sums, scores and [`OtherOutputs`] of the evaluator's batch; gradients go to `target`. `aux_loss_factor` is the factor of
    /// the load balancing loss, if the decoder has one.
    fn gradient(
        &mut self,
        on: &Device<'_>,
        rows: &UploadedRows,
        evaluator: &Evaluator<'_>,
        target: Target<'_>,
        aux_loss_factor: f64,
    ) -> Result<(LossSums<f64>, Scores, OtherOutputs)> {
        let spec = on.modules.spec(&self.config, rows.shape)?;
        let batch = evaluator.batch();
        let mut tables = upload_tables(on.runtime, &spec, &TokenTables::new(&spec, batch, Some(evaluator)))?;
        if self.of_values.is_some() {
            let table = value_table(&self.config, batch, rows.shape.tokens)?;
            tables.push(on.runtime.upload(&table, &[3, rows.shape.tokens])?);
        }
        if on.modules.decoder().has_router_aux_loss() {
            tables.push(on.runtime.upload(&[aux_loss_factor as f32], &[])?);
        }
        let of_batch: Vec<&DeviceTensor> = rows.tensors.iter().chain(&tables).collect();
        let of_loss = match target {
            Target::Sums { weights, sums } => {
                let program = self.programs.get(on.runtime, Key::Gradient(rows.shape), |_| {
                    on.modules.gradient(&self.config, self.of_values.as_ref(), rows.shape)
                })?;
                let mut arguments = weights.arguments();
                let count = sums.len();
                arguments.extend(std::mem::take(sums).into_iter().map(Argument::from));
                arguments.extend(of_batch.into_iter().map(Argument::from));
                let mut outputs = program.run(arguments)?;
                let of_loss = outputs.split_off(count);
                *sums = outputs;
                of_loss
            }
            Target::Step(step) => {
                let key = Key::Step(rows.shape, on.modules.optimizer);
                let program = self
                    .programs
                    .get(on.runtime, key, |_| on.modules.step(&self.config, self.of_values.as_ref(), rows.shape))?;
                step.run(&program, &of_batch)?
            }
        };
        let sums: Vec<f32> = of_loss[0].read("the loss")?;
        let scores = read_scores(&of_loss[1..], batch)?;
        let (mut others, mut outputs) = (of_loss[3..].iter(), OtherOutputs::default());
        if self.of_values.is_some()
            && let Some(tensor) = others.next()
        {
            outputs.values = read_tokens(tensor, "values", batch.tokens())?;
        }
        if let Some(experts) = &on.modules.decoder().config().experts
            && let Some(tensor) = others.next()
        {
            let tokens: Vec<f32> = tensor.read("the tokens of experts")?;
            outputs.routers = RouterStatistics::new(experts.num_experts, tokens.into_iter().map(f64::from).collect());
        }
        if on.modules.decoder().has_router_aux_loss()
            && let Some(tensor) = others.next()
        {
            let aux_loss: Vec<f32> = tensor.read("the load balancing loss")?;
            outputs.aux_loss = f64::from(aux_loss[0]);
            outputs.routers = outputs.routers.with_aux_loss(outputs.aux_loss);
        }
        if rows.shape.routed_experts
            && let Some(tensor) = others.next()
        {
            let replay: Vec<f32> = tensor.read("the mismatch of recorded experts")?;
            let [tokens, pairs, of_tokens] = [0, 1, 2].map(|i| f64::from(replay[i]));
            let layers = on.modules.decoder().config().routers() as f64;
            outputs.routers = outputs.routers.with_replay([layers * tokens, pairs], [tokens, of_tokens]);
        }
        Ok((LossSums::from_fn(|i| f64::from(sums[i])), scores, outputs))
    }
}

/// Outputs of the gradient of a micro-batch other than the loss.
#[derive(Debug, Default)]
pub(crate) struct OtherOutputs {
    /// Outputs of the value head, if there is a value loss.
    pub(crate) values: Vec<f32>,
    /// The use of experts; the default if there are none.
    pub(crate) routers: RouterStatistics,
    /// The load balancing loss; 0 without one.
    pub(crate) aux_loss: f64,
}

/// Destination of the gradients of a micro-batch.
pub(crate) enum Target<'a> {
    /// Accumulators that persist between micro-batches; they are lost if the program fails.
    Sums { weights: &'a DeviceWeights, sums: &'a mut Vec<DeviceTensor> },
    /// A fused AdamW step.
    Step(StepOfState<'a>),
}

impl Target<'_> {
    /// Returns the weights of the forward pass.
    fn weights(&self) -> &DeviceWeights {
        match self {
            Self::Sums { weights, .. } => weights,
            Self::Step(step) => step.weights,
        }
    }
}

/// Returns old values, returns and weights of the value loss, `[3, N]` with padding. The weights equal the weights of the policy loss.
fn value_table(config: &LossConfig, batch: &TokenBatch, padded: usize) -> Result<Vec<f32>> {
    let Some(ValueTargets { old_values, returns }) = batch.value_targets() else {
        let expected = "values of the old policy and returns, which the value head is trained on";
        return Err(grpo_policy::Error::argument("accumulate", expected, "a batch without them").into());
    };
    let weights = batch_weights(config, batch)?;
    let mut table = vec![0.0; 3 * padded];
    // Tokens without a return have no value loss.
    for &row in batch.active_rows().iter().filter(|row| !returns[**row].is_nan()) {
        table[row] = old_values[row];
        table[padded + row] = returns[row];
        table[2 * padded + row] = weights.policy[row] as f32;
    }
    Ok(table)
}

/// The runtime and the programs of a decoder.
#[derive(Clone, Copy)]
pub(crate) struct Device<'a> {
    pub(crate) runtime: &'a Runtime,
    pub(crate) modules: &'a TrainPrograms,
}

/// Rows on the devices.
pub(crate) struct UploadedRows {
    shape: TrainShape,
    /// The number of rows without a sequence.
    empty: usize,
    /// Ids, the positions that predict tokens and the tokens they predict, positions if sequences share rows, the tokens that count if the model
    /// has experts, and the recorded experts, if there are any.
    tensors: Vec<DeviceTensor>,
}

impl Device<'_> {
    /// Copies the rows of a micro-batch to the device.
    pub(crate) fn upload(&self, rows: &Rows) -> Result<UploadedRows> {
        let TrainShape { rows: b, length, tokens, shared, .. } = rows.shape;
        let upload = |ids: &[i32]| self.runtime.upload_sharded(ids, &[b, length], &[Some(Axis::Batch), None]);
        let predicting = self.runtime.upload_sharded(&rows.predicting, &[tokens], &[Some(Axis::Batch)])?;
        let mut tensors = vec![upload(&rows.ids)?, predicting, upload(&rows.predicts)?];
        if shared {
            tensors.push(upload(&rows.positions)?);
        }
        if self.modules.decoder().config().experts.is_some() {
            let axes = [Some(Axis::Batch), None];
            tensors.push(self.runtime.upload_sharded(&rows.counted, &[b, length], &axes)?);
        }
        if rows.shape.routed_experts {
            let routed = &rows.routed_experts;
            let layers = self.modules.decoder().config().routers();
            let shape = [layers, b, length, routed.len() / (layers * b * length).max(1)];
            tensors.push(self.runtime.upload_sharded(routed, &shape, &ROUTED)?);
        }
        Ok(UploadedRows { shape: rows.shape, empty: rows.empty, tensors })
    }
}

impl UploadedRows {
    /// Adds the share of rows without a sequence to the mean `frac_rows_empty` of `metrics`.
    pub(crate) fn record_empty(&self, metrics: &mut Metrics) {
        metrics.mean("frac_rows_empty", self.empty as f64, self.shape.rows as f64);
    }
}

/// The head of a loss for the rows of one micro-batch.
pub(crate) struct LossHead<'a> {
    pub(crate) loss: &'a mut Loss,
    pub(crate) on: Device<'a>,
    pub(crate) rows: &'a UploadedRows,
    /// The factor of the load balancing loss, if the decoder has one.
    pub(crate) aux_loss_factor: f64,
    /// Outputs of the gradient.
    pub(crate) outputs: OtherOutputs,
}

impl Head for LossHead<'_> {
    type Tensors<'a> = Target<'a>;
    type Scores = Scores;
    type Error = Error;

    fn score(&mut self, target: &Target<'_>, batch: &TokenBatch) -> Result<Scores> {
        self.loss.score(&self.on, target.weights(), self.rows, batch)
    }

    fn gradient(&mut self, target: Target<'_>, evaluator: &Evaluator<'_>) -> Result<(LossSums<f64>, Scores)> {
        let (sums, scores, outputs) =
            self.loss.gradient(&self.on, self.rows, evaluator, target, self.aux_loss_factor)?;
        self.outputs = outputs;
        Ok((sums, scores))
    }
}

/// Copies the token tables to the device, in the argument order of programs.
fn upload_tables(runtime: &Runtime, spec: &Spec, tables: &TokenTables) -> Result<Vec<DeviceTensor>> {
    fn upload<T: Element>(runtime: &Runtime, spec: &Spec, role: Role, table: &[T]) -> Result<DeviceTensor> {
        runtime.upload_sharded(table, &spec.type_of(role).shape, table_axes(role))
    }
    let mut uploaded = vec![
        upload(runtime, spec, Role::TokenIds, &tables.ids)?,
        upload(runtime, spec, Role::TokenNumbers, &tables.numbers)?,
        upload(runtime, spec, Role::OnPolicy, &[tables.on_policy])?,
    ];
    if let Some(bits) = &tables.sampling_mask {
        uploaded.push(upload(runtime, spec, Role::SamplingMask, bits)?);
    }
    Ok(uploaded)
}

/// Reads log-probabilities and entropies of the tokens of `batch`, without padding.
fn read_scores(outputs: &[DeviceTensor], batch: &TokenBatch) -> Result<Scores> {
    let column = |tensor: &DeviceTensor, what| read_tokens(tensor, what, batch.tokens());
    Ok(Scores { logp: column(&outputs[0], "log-probabilities")?, entropy: column(&outputs[1], "entropies")? })
}

/// Reads one number per token, without padding.
fn read_tokens(tensor: &DeviceTensor, what: &str, tokens: usize) -> Result<Vec<f32>> {
    let mut values: Vec<f32> = tensor.read(what)?;
    values.truncate(tokens);
    Ok(values)
}
