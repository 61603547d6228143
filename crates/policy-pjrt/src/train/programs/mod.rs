//! Programs of training: scores, and the loss with the gradients of all trained parameters.

pub(super) use gradients::Gradients;
pub(super) use sharding::{ROUTED, table_axes};

use super::optimizer::{Check, apply_module};
use crate::decoder::{
    Axis, AxisRules, Compute, Decoder, Dims, Matrix, Parameter, ParameterValues, Role as ParameterRole, Rows, rows_at,
};
use crate::error::Result;
use crate::leaves::first;
use crate::modules::program_error;
use crate::storage::Storage;
use grpo_backend_tpu::aot::Variant;
use grpo_backend_tpu::program::{MeshShape, Numerics, Pass, Role, Spec};
use grpo_core::objective::ValueLossConfig;
use grpo_core::{GradientSpec, HeadLayout, Implementation, LossConfig, PlanRequest, PolicySpec, Tiling};
use grpo_models::{ModelConfig, OptimizerName};
use grpo_stablehlo::{Builder, Dtype, Module, Save, TensorType, Traced, Value, trace, try_trace};

/// Sizes of a micro-batch's program. The default has no rows; it completes literals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct TrainShape {
    /// Rows B, each with one or several sequences.
    pub rows: usize,
    /// Tokens T of a row.
    pub length: usize,
    /// Completion tokens N of all rows, padded.
    pub tokens: usize,
    /// `true` if sequences share rows: the program then takes positions, which separate them.
    pub shared: bool,
    /// `true` if tokens have a sampling mask: the program then takes it.
    pub sampling_mask: bool,
    /// `true` if experts are recorded, for a model with experts: the program then takes them.
    pub routed_experts: bool,
}

/// A builder of training programs for a decoder. Parameters are arguments in the order of [`Decoder::parameters`], with the dtypes of
/// [`Parameter::dtype`]: matrices have the compute dtype, unless [`TrainPrograms::with_model_dtype`] sets another. Gradients are in the
/// order of [`Decoder::trained`], all f32.
///
/// ```
/// use grpo_policy_pjrt::decoder::{Compute, Decoder};
/// use grpo_policy_pjrt::{TrainPrograms, TrainShape};
///
/// # fn main() -> grpo_policy_pjrt::Result<()> {
/// let decoder = Decoder::new(&grpo_models::ModelConfig::default(), Compute::F32);
/// let modules = TrainPrograms::new(decoder, grpo_stablehlo::Save::Carry);
/// let shape = TrainShape { rows: 2, length: 32, tokens: 48, shared: true, ..TrainShape::default() };
/// let text = modules.gradient(&grpo_core::LossConfig::default(), None, shape)?.to_string();
/// assert!(text.contains("tensor<2x32xi32>"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct TrainPrograms {
    decoder: Decoder,
    /// Dtype of the model's matrices.
    pub(super) model: Dtype,
    pub(super) save: Save,
    pub(in crate::train) optimizer: OptimizerName,
    tiling: Tiling,
}

/// The arguments of a micro-batch's program other than parameters and gradient accumulators.
pub(super) struct Batch {
    /// The arguments listed by [`row_types`].
    rows: Vec<Value>,
    /// Token tables of the loss, in the order of [`TABLES`], and the sampling mask, if there is one.
    tables: Vec<(Role, Value)>,
    /// The value loss and its inputs, f32 `[3, N]`.
    of_values: Option<(ValueLossConfig, Value)>,
    /// The factor of the load balancing loss, f32 scalar.
    aux_loss_factor: Option<Value>,
}

impl Batch {
    /// Returns the mask `[N]` of active tokens, which have a target.
    pub(super) fn counts(&self) -> Value {
        let (_, ids) = &self.tables[0];
        let tokens = ids.shape()[1];
        let targets = ids.slice(&[0, 0], &[1, tokens]).reshape(&[tokens]);
        targets.ge(&targets.like(0))
    }
}

const TABLES: [Role; 3] = [Role::TokenIds, Role::TokenNumbers, Role::OnPolicy];

impl TrainPrograms {
    /// Creates the programs of `decoder`; `save` selects the activations of each layer that are saved for the backward pass.
    pub fn new(decoder: Decoder, save: Save) -> Self {
        let model = decoder.compute().dtype();
        Self { decoder, model, save, optimizer: OptimizerName::default(), tiling: default_tiling() }
    }

    /// Sets the dtype of the model's matrices, f32 or bf16. If it differs from the compute dtype, every layer converts its matrices.
    #[must_use]
    pub fn with_model_dtype(mut self, dtype: Dtype) -> Self {
        self.model = dtype;
        self
    }

    /// Sets the optimizer, which decides the format of moments; the default is `adamw`. With `adamw_8bit`, each moment of a parameter whose
    /// tensors have 4096 values or more is two tensors: codes, u8, with the shape of the parameter, and scales, f32 ([`grpo_policy::MomentBlocks`]).
    #[must_use]
    pub fn with_optimizer(mut self, name: OptimizerName) -> Self {
        self.set_optimizer(name);
        self
    }

    pub(crate) fn set_optimizer(&mut self, name: OptimizerName) {
        self.optimizer = name;
    }

    /// Returns the programs of the model without adapters and value head.
    #[must_use]
    pub fn of_model(&self) -> Self {
        Self { decoder: self.decoder.model(), ..self.clone() }
    }

    /// Sets the tiling of the logits in the fused loss head. On a mesh, each device has the whole workspace budget.
    #[must_use]
    pub fn with_tiling(mut self, tiling: Tiling) -> Self {
        self.tiling = tiling;
        self
    }

    /// Returns the decoder.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    fn config(&self) -> &ModelConfig {
        self.decoder.config()
    }

    /// Returns the specification of the loss head, with the softcap of the model's logits.
    ///
    /// # Errors
    /// [`crate::Error::Loss`] for an invalid loss or tiling, [`crate::Error::Policy`] for a loss with another softcap.
    pub fn head(&self, loss: &LossConfig, tokens: usize) -> Result<Spec> {
        let config = self.config();
        let dtype = match self.decoder.compute() {
            Compute::F32 => grpo_core::Dtype::F32,
            Compute::Bf16 => grpo_core::Dtype::Bf16,
        };
        let (hidden, vocab, layout) = (config.hidden_size, config.vocab_size, HeadLayout::VocabHidden);
        // A device holds a shard of the tile: with more tokens in it, the head and its gradient are read and written less often.
        let shards = self.decoder.axis_rules().parts(Axis::Vocab);
        let workspace_budget = self.tiling.workspace_budget.saturating_mul(shards);
        let request = PlanRequest {
            loss: grpo_policy::loss_of_model(loss, config)?.into(),
            implementation: Implementation::Fused,
            tiling: Tiling { workspace_budget, ..self.tiling.clone() },
            max_tokens: tokens,
            policy: PolicySpec::Hidden { hidden, vocab, dtype, layout, bias: false },
            gradients: GradientSpec { hidden: true, lm_head: self.trained_head().is_some(), bias: false },
        };
        // The gradient of bf16 logits is bf16, too: with f32, the product with the head would need an f32 copy of the head. Logits have the
        // dtype of their operands.
        let numerics = Numerics { logits: dtype, dlogits: dtype, ..Numerics::default() };
        let (mesh, pass, build) = (MeshShape::default(), Pass::Gradient, Spec::program);
        let vocab_padding = self.decoder.logit_columns() - vocab;
        Ok(Spec { vocab_padding, ..Variant { request, numerics, mosaic: None, mesh, pass, build }.spec()? })
    }

    /// Returns the specification of the loss head of a program of `shape`.
    pub(crate) fn spec(&self, loss: &LossConfig, shape: TrainShape) -> Result<Spec> {
        Ok(Spec { sampling_mask: shape.sampling_mask, ..self.head(loss, shape.tokens)? })
    }

    /// Builds the program of the loss of a micro-batch and the gradients of all trained parameters.
    ///
    /// Arguments:
    /// * the parameters;
    /// * the gradient accumulators, donated;
    /// * token ids, i32 `[B, T]`;
    /// * for each completion token, the index (among B T) of the position that predicts it, i32 `[N]`;
    /// * for each position, the index (among N) of the completion token that it predicts, or N, i32 `[B, T]`;
    /// * if sequences share rows, the positions of tokens in their sequences, 0 for padding, i32 `[B, T]`;
    /// * if the model has experts, 1 for tokens and 0 for padding, f32 `[B, T]`;
    /// * with [`TrainShape::routed_experts`], the experts of each token in each layer, i32 `[L, B, T, k]`; -1 where the router chooses;
    /// * the token tables of [`Role::TokenIds`], [`Role::TokenNumbers`] and [`Role::OnPolicy`];
    /// * if tokens have a sampling mask, [`Role::SamplingMask`].
    ///
    /// Results: the accumulators plus the gradients of the micro-batch, the loss as [`Role::Sums`], log-probabilities and entropies `[N]`.
    ///
    /// With a value loss, for a decoder with a value head, it has one more argument at the end: old values, returns and weights of the value
    /// loss, f32 `[3, N]`, with weight 0 for tokens without a value loss. It has one more result: the values `[N]`.
    ///
    /// With experts, the next result is the number of tokens of each expert, f32 `[L, E]`. With a load balancing loss
    /// ([`Decoder::with_router_aux_loss`]), the last argument is its factor, an f32 scalar, and the next result its value without the factor. With
    /// recorded experts, the last result is [`RouterSums::replay`](crate::decoder::RouterSums::replay).
    ///
    /// # Errors
    /// [`crate::Error::Loss`] for an invalid loss.
    pub fn gradient(
        &self,
        loss: &LossConfig,
        of_values: Option<&ValueLossConfig>,
        shape: TrainShape,
    ) -> Result<Module> {
        const NAME: &str = "gradient";
        let (spec, trained) = (self.spec(loss, shape)?, self.decoder.trained());
        self.check_shape(shape)?;
        let f = Builder::new();
        let weights = self.decoder.declare(&f, self.model);
        let sum = |p: &Parameter| f.argument(&format!("{}.sum", p.name()), TensorType::new(Dtype::F32, &p.shape[..]));
        let begun: Vec<Value> = trained.iter().map(sum).collect();
        begun.iter().enumerate().for_each(|(i, sum)| f.alias(sum, i));
        begun.iter().zip(&trained).for_each(|(sum, p)| self.decoder.axis_rules().argument(sum, &p.axes));
        let batch = self.batch(&f, &spec, of_values, shape);
        let Gradients { sums, of_loss, others } = self.gradients(NAME, &spec, &weights, Some(begun), batch, shape)?;
        let sums = trained.iter().zip(&sums).map(|(p, sum)| (p.name(), sum));
        let of_loss = of_loss.iter().map(|(role, value)| (role.name(), value));
        let others = others.iter().map(|(name, value)| (*name, value));
        self.finish(&f, NAME, &trained, sums.chain(of_loss).chain(others))
    }

    /// Builds the program of the values `[N]`, f32, of the states before a micro-batch's completion tokens, for a decoder with a value
    /// head. Arguments: the parameters, then the rows as in [`TrainPrograms::gradient`].
    ///
    /// # Errors
    /// [`crate::Error::Policy`] for a decoder without a value head.
    pub fn values(&self, shape: TrainShape) -> Result<Module> {
        const NAME: &str = "values";
        if !self.decoder.has_value_head() {
            return Err(grpo_policy::Error::NoValueHead.into());
        }
        self.check_shape(shape)?;
        let table = self.decoder.parameters();
        let f = Builder::new();
        let weights = self.decoder.declare(&f, self.model);
        let batch = self.batch_of_rows(&f, shape);
        let outputs = Outputs { values: true, routers: false };
        let forward = self.forward(&table, shape, outputs).map_err(program_error(NAME))?;
        let results = f.call(&forward, &self.arguments(&table, &weights, &batch, outputs));
        self.finish(&f, NAME, &[], [(NAME, &results[1])])
    }

    /// Builds the program of log-probabilities and entropies `[N]` of a micro-batch's completion tokens, computed in the same tiles as in
    /// [`TrainPrograms::gradient`]. It has the same arguments, without the accumulators and what only the loss reads: value table and factor
    /// of the load balancing loss.
    ///
    /// # Errors
    /// See [`TrainPrograms::gradient`].
    pub fn score(&self, loss: &LossConfig, shape: TrainShape) -> Result<Module> {
        const NAME: &str = "score";
        let (spec, table) = (self.spec(loss, shape)?, self.decoder.parameters());
        self.check_shape(shape)?;
        let f = Builder::new();
        let weights = self.decoder.declare(&f, self.model);
        let batch = self.batch_of_scores(&f, &spec, shape);
        let outputs = Outputs::default();
        let forward = self.forward(&table, shape, outputs).map_err(program_error(NAME))?;
        let hidden = f.call(&forward, &self.arguments(&table, &weights, &batch, outputs));
        let to_head = self.to_head(&weights, &hidden[0], batch.tables, []);
        let results = self.of_head(&f, &spec, Pass::Score, to_head)?;
        self.finish(&f, NAME, &[], results.iter().map(|(role, value)| (role.name(), value)))
    }

    /// Builds the program of an AdamW step for all trained parameters, in f32. It does not check its results: the caller must know that
    /// weights and moments stay finite for every finite gradient norm ([`grpo_policy::OptimizerBounds::after`]).
    ///
    /// Arguments, all donated except the last: parameters, the optimizer's state slot by slot ([`grpo_policy::Rule::slots`]), gradient accumulators,
    /// and the scalars of the step, f32 `[S]` ([`grpo_policy::OptimizerStep::to_list`]). Each bf16 parameter is followed by its remainders, i16: the bits of the f32 weight are `(parameter << 16) + remainder`,
    /// as two's complement integers. Results: the same without the scalars, with zeroed accumulators, and a report, f32 `[3]`: the gradient
    /// norm, whether it is within the limit, and whether parameters and moments stay finite (0 or 1). If one of the two flags is 0,
    /// parameters and moments are unchanged.
    ///
    /// # Errors
    /// [`crate::Error::Program`], a bug in this crate.
    pub fn optimizer(&self) -> Result<Module> {
        self.optimizer_with(Check::Bounds)
    }

    /// Builds [`TrainPrograms::optimizer`] for states without known bounds: it checks the results before it writes them. The report is f32 `[4]`
    /// and ends with the largest magnitude of all weights, first moments and roots of second moments after the step, applied or not;
    /// infinite if one of them is not finite.
    ///
    /// # Errors
    /// [`crate::Error::Program`], a bug in this crate.
    pub fn optimizer_checked(&self) -> Result<Module> {
        self.optimizer_with(Check::Results)
    }

    fn optimizer_with(&self, check: Check) -> Result<Module> {
        apply_module(&self.decoder.trained(), self.storage(), self.optimizer, check, self.decoder.axis_rules())
    }

    /// Declares the rows of a micro-batch without a loss as the next arguments.
    fn batch_of_rows(&self, f: &Builder, shape: TrainShape) -> Batch {
        Batch { rows: self.declare_rows(f, shape), tables: vec![], of_values: None, aux_loss_factor: None }
    }

    /// Declares the inputs of the scores of a micro-batch as the next arguments.
    fn batch_of_scores(&self, f: &Builder, spec: &Spec, shape: TrainShape) -> Batch {
        let batch = self.batch_of_rows(f, shape);
        let roles = TABLES.into_iter().chain(spec.sampling_mask.then_some(Role::SamplingMask));
        Batch { tables: roles.map(|role| (role, self.declare_table(f, spec, role))).collect(), ..batch }
    }

    /// Declares the inputs of the loss of a micro-batch as the next arguments.
    pub(super) fn batch(
        &self,
        f: &Builder,
        spec: &Spec,
        of_values: Option<&ValueLossConfig>,
        shape: TrainShape,
    ) -> Batch {
        let batch = self.batch_of_scores(f, spec, shape);
        let value_table = || f.argument("value_table", TensorType::new(Dtype::F32, [3, shape.tokens]));
        let of_values = of_values.map(|of| (of.clone(), value_table()));
        let with_aux_loss = self.decoder.has_router_aux_loss();
        let aux_loss_factor = with_aux_loss.then(|| f.argument("aux_loss_factor", TensorType::new(Dtype::F32, [0; 0])));
        Batch { of_values, aux_loss_factor, ..batch }
    }

    /// Returns the storage of the trained weights.
    pub(super) fn storage(&self) -> Storage {
        Storage::of_masters(self.model)
    }

    /// Returns the role of the parameter that receives the gradient of the LM head, if it is trained: the head, the tied embedding, or an
    /// adapter.
    fn trained_head(&self) -> Option<ParameterRole> {
        let trained = self.decoder.trained();
        let tied = self.config().tie_word_embeddings;
        let head = if tied { ParameterRole::EmbedTokens } else { ParameterRole::LmHead };
        [head, ParameterRole::LoraB(Matrix::LmHead)].into_iter().find(|role| trained.iter().any(|p| p.role == *role))
    }

    /// Returns the arguments of the loss head. The barrier around the hidden states ensures that scoring and loss see the same bits.
    fn to_head(
        &self,
        weights: &ParameterValues,
        hidden: &Value,
        tables: Vec<(Role, Value)>,
        sums: impl IntoIterator<Item = (Role, Value)>,
    ) -> Vec<(Role, Value)> {
        let hidden = hidden.builder().optimization_barrier(&[hidden]).swap_remove(0);
        let head = weights.head();
        let head = match weights.adapter(Matrix::LmHead) {
            Some(adapter) => head.convert(Dtype::F32) + self.decoder.low_rank(adapter),
            // The loss head rounds it for its products.
            None if head.dtype() == Dtype::F32 => head.clone(),
            None => head.convert(self.decoder.compute().dtype()),
        };
        let [hidden, head] = self.operands_of_head(&hidden, &head);
        let tables = tables.into_iter().map(|(role, table)| (role, self.whole_table(&table)));
        let sums = sums.into_iter().map(|(role, sum)| (role, self.shard_gradient(role, &sum)));
        [(Role::Hidden, hidden), (Role::LmHead, head)].into_iter().chain(tables).chain(sums).collect()
    }

    /// Returns the arguments of [`TrainPrograms::forward`].
    fn arguments<'a>(
        &self,
        table: &[Parameter],
        weights: &'a ParameterValues,
        batch: &'a Batch,
        outputs: Outputs,
    ) -> Vec<&'a Value> {
        let inside = table.iter().filter(|p| outputs.depend_on(p.role)).map(|p| weights.of(p.id()));
        inside.chain(&batch.rows).collect()
    }

    /// Traces the forward pass: from rows and the parameters that the outputs depend on, to the outputs at the positions that predict
    /// completion tokens.
    fn forward(
        &self,
        table: &[Parameter],
        shape: TrainShape,
        outputs: Outputs,
    ) -> Result<Traced, grpo_stablehlo::Error> {
        let inside: Vec<&Parameter> = table.iter().filter(|p| outputs.depend_on(p.role)).collect();
        let types = inside.iter().map(|p| TensorType::new(p.dtype(self.model), &p.shape[..]));
        let types: Vec<TensorType> = types.chain(self.row_types(shape).into_iter().map(|(_, ty)| ty)).collect();
        try_trace(&types, |_, values| {
            let (parameters, rows) = values.split_at(inside.len());
            let ([ids, predicting, predicts], rest) = first(rows);
            let (positions, rest) = rest.split_at(usize::from(shape.shared));
            let (counted, routed) = rest.split_at(usize::from(self.config().experts.is_some()));
            let weights = ParameterValues::new(inside.iter().map(|p| p.id()).zip(parameters.iter().cloned()));
            let mut rows = Rows::of_sequences(ids);
            if let [positions] = positions {
                rows = Rows { positions: positions.clone(), shared: true, ..rows };
            }
            rows.counted = counted.first().filter(|_| outputs.routers).cloned();
            rows.routed = routed.first().cloned();
            let (x, routers) = self.decoder.residual(&weights, &rows, self.save.clone())?;
            let hidden = self.shard_hidden(&take_rows(self.decoder.axis_rules(), &x, predicting, predicts));
            let hidden = self.decoder.final_norm(&weights, &hidden);
            let values = outputs.values.then(|| self.decoder.values(&weights, &hidden));
            let routers = routers
                .into_iter()
                .flat_map(|sums| std::iter::once(sums.tokens).chain(sums.aux_loss).chain(sums.replay));
            Ok(std::iter::once(hidden).chain(values).chain(routers).collect())
        })
    }
}

/// The outputs of a forward pass behind the hidden states `[N, H]` at the positions that predict completion tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Outputs {
    /// The value head's values `[N]`.
    values: bool,
    /// The number of tokens of each expert `[L, E]`, the load balancing loss, and [`crate::decoder::RouterSums::replay`], if the decoder has them.
    routers: bool,
}

impl Outputs {
    /// Returns `true` if the outputs depend on the parameter of this role: not on an untied LM head, its adapter, or an unused value head.
    fn depend_on(self, role: ParameterRole) -> bool {
        match role {
            ParameterRole::LmHead | ParameterRole::LoraA(Matrix::LmHead) | ParameterRole::LoraB(Matrix::LmHead) => {
                false
            }
            ParameterRole::ValueHead | ParameterRole::ValueHeadBias => self.values,
            _ => true,
        }
    }
}

impl TrainPrograms {
    /// Returns the row arguments of a program, in order: ids `[B, T]`, the positions that predict `[N]`, the tokens that positions predict
    /// `[B, T]`, if sequences share rows, positions `[B, T]`, if the model has experts, the tokens that count `[B, T]`, and, if experts are
    /// recorded, the experts of each layer `[L, B, T, k]`.
    fn row_types(&self, shape: TrainShape) -> Vec<(&'static str, TensorType)> {
        let tokens = TensorType::new(Dtype::I32, [shape.rows, shape.length]);
        let predicting = TensorType::new(Dtype::I32, [shape.tokens]);
        let mut types = vec![("ids", tokens.clone()), ("predicting", predicting), ("predicts", tokens.clone())];
        if shape.shared {
            types.push(("positions", tokens.clone()));
        }
        if let Some(experts) = &self.config().experts {
            types.push(("counted", tokens.with_dtype(Dtype::F32)));
            if shape.routed_experts {
                let sizes = [self.config().routers(), shape.rows, shape.length, experts.num_experts_per_tok];
                types.push(("routed_experts", TensorType::new(Dtype::I32, sizes)));
            }
        }
        types
    }
}

/// Returns a tiling with room for 2048 rows of bf16 logits for a vocabulary of 152 thousand tokens. Every chunk reads the head and its
/// gradient, so few chunks are faster. Estimates for Qwen2.5-0.5B with 8192 tokens on v6e: 12 ms in 4 chunks; 25 ms in 8 chunks of f32
/// logits; 53 ms in 38 chunks of 216 rows.
pub(crate) fn default_tiling() -> Tiling {
    Tiling { workspace_budget: 640 << 20, ..Tiling::default() }
}

/// Gathers the rows `[N, H]` of `x` `[B, T, H]` at the positions `predicting` `[N]`, in f32. `predicts` `[B, T]` is the inverse: the row of
/// each position, or N.
///
/// The backward pass is a gather with `predicts` instead of a scatter-add, because no position predicts two tokens. It saves 3 MB of libtpu
/// code, a sixteenth of the step's program, and it is deterministic on GPUs.
///
/// On a mesh, every device gets all of `x`, and all cotangents in the backward pass, in the dtype of `x`, and gathers its own rows from
/// them. The partitioner alone would add up f32 rows of all tokens.
fn take_rows(rules: &AxisRules, x: &Value, predicting: &Value, predicts: &Value) -> Value {
    let [b, t, h] = x.dims();
    let (tokens, n) = (b * t, predicting.shape()[0]);
    // Its own rows first: otherwise the partitioner gathers what the value was rounded from.
    let whole = |value: &Value| {
        let mut axes = vec![None; value.shape().len()];
        axes[0] = Some(Axis::Batch);
        let own = rules.constrain(value, &axes);
        axes[0] = None;
        rules.constrain(&own, &axes)
    };
    // libtpu gathers f32 rows on the sparse cores, but generates a megabyte of code for bf16 rows. On a mesh, f32 would be twice the bytes of
    // all rows for the sake of a few.
    let x = if rules.is_sharded() { x.clone() } else { x.convert(Dtype::F32) };
    let arguments = [&x, predicting, predicts];
    let types = arguments.map(|value| value.ty().clone());
    let forward = trace(&types, |_, a| {
        let own = rules.constrain(&a[1], &[Axis::Batch]);
        vec![rows_at(&whole(&a[0]).reshape(&[tokens, h]), &own), a[2].clone()]
    });
    let backward = trace(&[types[2].clone(), TensorType::new(x.dtype(), [n, h])], |_, a| {
        let predicts = rules.constrain(&a[0], &[Axis::Batch, Axis::Length]);
        let own = rows_at(&whole(&a[1]), &predicts);
        let predicts_one = predicts.lt(&predicts.like(n as i64)).broadcast_in_dim(own.shape(), &[0, 1]);
        vec![predicts_one.select(&own, &own.like(0.0))]
    });
    let [forward, backward] = [forward, backward].map(|traced| traced.expect("rows of matrices"));
    x.builder().custom_vjp(&forward, &backward, &arguments, 1).swap_remove(0).convert(Dtype::F32)
}

mod gradients;
mod sharding;
#[cfg(test)]
mod tests;
