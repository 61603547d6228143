//! The programs of training as values: scores, and the loss with the gradients of all parameters.

pub(super) use gradients::Gradients;

use super::adamw::{Check, apply_module};
use crate::decoder::{Compute, Decoder, Matrix, Parameter, ParameterValues, Role as ParameterRole, Rows};
use crate::error::{Error, Result};
use crate::storage::Storage;
use backend_tpu::aot::Variant;
use backend_tpu::program::{Mesh, Numerics, Pass, ProgramKind, Role, Spec};
use grpo_core::objective::ValueLossConfig;
use grpo_core::{GradientSpec, HeadLayout, Implementation, LossConfig, PlanRequest, PolicySpec, Tiling};
use models::ModelConfig;
use stablehlo::{Builder, Dtype, GatherDimensions, Module, Save, TensorType, Traced, Value, trace};

/// The sizes of a program for micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TrainShape {
    /// Rows B, each of one sequence or of several.
    pub rows: usize,
    /// Tokens T of a row.
    pub length: usize,
    /// Completion tokens N of all rows.
    pub tokens: usize,
    /// Whether sequences share rows: the program then takes positions, which keep them apart.
    pub shared: bool,
}

/// Writes the programs of training for a decoder. Parameters are arguments in the order of [`Decoder::parameters`], in the number types of
/// [`Parameter::dtype`]: matrices of the model are there as products take them, in the number type of operands, unless
/// [`TrainModules::with_model_dtype`] says otherwise. Gradients are in the order of [`Decoder::trained`], all f32.
///
/// ```
/// use policy_device::decoder::{Compute, Decoder};
/// use policy_device::{TrainModules, TrainShape};
///
/// # fn main() -> policy_device::Result<()> {
/// let decoder = Decoder::new(&models::ModelConfig::default(), Compute::F32);
/// let modules = TrainModules::new(decoder, stablehlo::Save::Carry);
/// let shape = TrainShape { rows: 2, length: 32, tokens: 48, shared: true };
/// let text = modules.gradient(&grpo_core::LossConfig::default(), shape)?.to_string();
/// assert!(text.contains("tensor<2x32xi32>"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct TrainModules {
    decoder: Decoder,
    /// The number type of the matrices of the model.
    model: Dtype,
    save: Save,
    tiling: Tiling,
}

/// What a program of a micro-batch takes besides parameters and sums, as values.
pub(super) struct Batch {
    /// What [`row_types`] names.
    rows: Vec<Value>,
    /// Of the loss, in the order of [`TABLES`].
    tables: Vec<(Role, Value)>,
    /// The value loss and what it takes of every token, f32 `[3, N]`.
    of_values: Option<(ValueLossConfig, Value)>,
}

impl Batch {
    /// Predicates `[N]`: tokens that count, which have a target.
    pub(super) fn counts(&self) -> Value {
        let [(_, ids), ..] = &self.tables[..] else { unreachable!("a batch has token ids") };
        let tokens = ids.shape()[1];
        let targets = ids.slice(&[0, 0], &[1, tokens]).reshape(&[tokens]);
        targets.ge(&targets.like(0))
    }
}

const TABLES: [Role; 3] = [Role::TokenIds, Role::TokenNumbers, Role::OnPolicy];

impl TrainModules {
    /// The programs of `decoder`, whose derivative keeps what `save` says of every layer.
    pub fn new(decoder: Decoder, save: Save) -> Self {
        let model = decoder.compute().dtype();
        Self { decoder, model, save, tiling: default_tiling() }
    }

    /// Takes the matrices of the model in this number type, f32 or bf16, and rounds them in every layer where operands have another one.
    #[must_use]
    pub fn with_model_dtype(mut self, dtype: Dtype) -> Self {
        self.model = dtype;
        self
    }

    /// The programs of the model without adapters and value head.
    #[must_use]
    pub fn of_model(&self) -> Self {
        Self { decoder: self.decoder.model(), ..self.clone() }
    }

    /// Cuts the logits of the fused head as `tiling` says.
    #[must_use]
    pub fn with_tiling(mut self, tiling: Tiling) -> Self {
        self.tiling = tiling;
        self
    }

    /// The decoder.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    fn config(&self) -> &ModelConfig {
        self.decoder.config()
    }

    /// What the head of the loss is made for.
    ///
    /// # Errors
    /// [`Error::Loss`] for a loss or a tiling that is not legal.
    pub fn head(&self, loss: &LossConfig, tokens: usize) -> Result<Spec> {
        let config = self.config();
        let dtype = match self.decoder.compute() {
            Compute::F32 => grpo_core::Dtype::F32,
            Compute::Bf16 => grpo_core::Dtype::Bf16,
        };
        let (hidden, vocab, layout) = (config.hidden_size, config.vocab_size, HeadLayout::VocabHidden);
        let request = PlanRequest {
            loss: loss.clone(),
            implementation: Implementation::Fused,
            tiling: self.tiling.clone(),
            max_tokens: tokens,
            policy: PolicySpec::Hidden { hidden, vocab, dtype, layout, bias: false },
            gradients: GradientSpec { hidden: true, lm_head: self.trained_head().is_some(), bias: false },
        };
        // What multiplies operands in bf16 is one itself: products of f32 would need a copy of the head in f32. Logits are products of such
        // operands, which leave their results so.
        let numerics = Numerics { logits: dtype, dlogits: dtype, ..Numerics::default() };
        let (mesh, program) = (Mesh::default(), ProgramKind::Gradient);
        Ok(Variant { request, numerics, mosaic: None, mesh, program }.spec()?)
    }

    /// The loss of a micro-batch and the gradients of all parameters that are trained.
    ///
    /// Arguments: the parameters; the sums of the gradients, which are donated; token ids, i32 `[B, T]`; the index among B T tokens of
    /// the one that predicts each completion token, i32 `[N]`; the index among the N completion tokens of the one that each token predicts, or
    /// N, i32 `[B, T]`; where sequences share rows, the tokens' positions within their sequences (0 of what pads the row), i32 `[B, T]`; the
    /// token tables of [`Role::TokenIds`], [`Role::TokenNumbers`] and [`Role::OnPolicy`].
    /// Results: the sums with the gradients of the micro-batch added, the loss as [`Role::Sums`], log-probabilities and entropies `[N]`.
    ///
    /// # Errors
    /// [`Error::Loss`] for a loss that is not legal.
    pub fn gradient(&self, loss: &LossConfig, shape: TrainShape) -> Result<Module> {
        self.gradient_of(loss, None, shape)
    }

    /// [`TrainModules::gradient`] of a decoder with a value head, and the gradients of the value loss with it.
    ///
    /// One more argument, behind the others: old values, returns and weights of the tokens' value losses, f32 `[3, N]`, with a weight of 0
    /// where there is no loss. One more result: the values `[N]`.
    ///
    /// # Errors
    /// [`Error::Loss`] for a loss that is not legal.
    pub fn gradient_with_values(
        &self,
        loss: &LossConfig,
        of_values: &ValueLossConfig,
        shape: TrainShape,
    ) -> Result<Module> {
        self.gradient_of(loss, Some(of_values), shape)
    }

    fn gradient_of(&self, loss: &LossConfig, of_values: Option<&ValueLossConfig>, shape: TrainShape) -> Result<Module> {
        const NAME: &str = "gradient";
        let (spec, trained) = (self.head(loss, shape.tokens)?, self.decoder.trained());
        self.check_split(shape)?;
        let f = Builder::new();
        let weights = self.decoder.declare(&f, self.model);
        let sum = |p: &Parameter| f.argument(&format!("{}.sum", p.name()), TensorType::new(Dtype::F32, &p.shape[..]));
        let begun: Vec<Value> = trained.iter().map(sum).collect();
        begun.iter().enumerate().for_each(|(i, sum)| f.alias(sum, i));
        begun.iter().zip(&trained).for_each(|(sum, p)| self.decoder.split().argument(sum, &p.axes));
        let batch = self.batch(&f, &spec, of_values, shape);
        let Gradients { sums, of_loss, values } = self.gradients(NAME, &spec, &weights, Some(begun), batch, shape)?;
        let sums = trained.iter().zip(&sums).map(|(p, sum)| (p.name(), sum));
        let of_loss = of_loss.iter().map(|(role, value)| (role.name(), value));
        let values = values.iter().map(|values| ("values", values));
        let results: Vec<(&str, &Value)> = sums.chain(of_loss).chain(values).collect();
        self.finish(&f, NAME, &trained, &results)
    }

    /// Values `[N]` of the states before a micro-batch's completion tokens, f32, of a decoder with a value head. Arguments: the parameters,
    /// then the rows as [`TrainModules::gradient`] takes them.
    ///
    /// # Errors
    /// [`Error::Policy`] for a decoder without a value head.
    pub fn values(&self, shape: TrainShape) -> Result<Module> {
        const NAME: &str = "values";
        if !self.decoder.has_value_head() {
            return Err(policy::Error::NoValueHead.into());
        }
        self.check_split(shape)?;
        let table = self.decoder.parameters();
        let f = Builder::new();
        let weights = self.decoder.declare(&f, self.model);
        let batch = Batch { rows: self.declare_rows(&f, shape), tables: vec![], of_values: None };
        let outputs = Outputs::HiddenAndValues;
        let forward = self.forward(&table, shape, outputs).map_err(program_error(NAME))?;
        let results = f.call(&forward, &self.arguments(&table, &weights, &batch, outputs));
        self.finish(&f, NAME, &[], &[(NAME, &results[1])])
    }

    /// Log-probabilities and entropies `[N]` of a micro-batch's completion tokens, from the same tiles as those of
    /// [`TrainModules::gradient`]. Arguments as there, without the sums.
    ///
    /// # Errors
    /// As [`TrainModules::gradient`].
    pub fn score(&self, loss: &LossConfig, shape: TrainShape) -> Result<Module> {
        const NAME: &str = "score";
        let (spec, table) = (self.head(loss, shape.tokens)?, self.decoder.parameters());
        self.check_split(shape)?;
        let f = Builder::new();
        let weights = self.decoder.declare(&f, self.model);
        let batch = self.batch(&f, &spec, None, shape);
        let forward = self.forward(&table, shape, Outputs::Hidden).map_err(program_error(NAME))?;
        let hidden = f.call(&forward, &self.arguments(&table, &weights, &batch, Outputs::Hidden));
        let to_head = self.to_head(&weights, &hidden[0], batch.tables, []);
        let results = self.of_head(&f, &spec, Pass::Score, to_head)?;
        let results: Vec<(&str, &Value)> = results.iter().map(|(role, value)| (role.name(), value)).collect();
        self.finish(&f, NAME, &[], &results)
    }

    /// A step of AdamW over all parameters that are trained, in f32, of which it is known that weights and moments stay finite if the norm of
    /// the gradient is: gradients are clipped, and neither the learning rate nor what there is comes near the largest numbers.
    ///
    /// Arguments, all donated but the last: parameters, first and second moments, sums of gradients, and the scalars of the step, f32
    /// `[8]`. Behind each parameter in bf16 are its remainders, i16: the f32 weight is `(parameter << 16) + remainder` of their patterns, as
    /// integers in two's complement. Results: the same without the scalars, the sums being zero, and f32 `[3]`: the norm of the
    /// gradient, whether it is within its limit, and whether parameters and moments stay finite (0 or 1). Where one of the two is
    /// 0, parameters and moments are those of before.
    ///
    /// # Errors
    /// [`Error::Program`], a defect of this crate.
    pub fn adamw(&self) -> Result<Module> {
        self.adamw_with(Check::Bounds)
    }

    /// [`TrainModules::adamw`] of which nothing is known: it looks at what it is about to write before it writes anything. The report is f32
    /// `[4]`, and ends with the largest magnitude of a weight, a first moment or the root of a second one after the step, whether it is taken
    /// or not; infinite where one is not finite.
    ///
    /// # Errors
    /// [`Error::Program`], a defect of this crate.
    pub fn adamw_checked(&self) -> Result<Module> {
        self.adamw_with(Check::Results)
    }

    fn adamw_with(&self, check: Check) -> Result<Module> {
        apply_module(&self.decoder.trained(), self.storage(), check, self.decoder.split())
    }

    /// Declares what a program takes of a micro-batch as the next arguments.
    pub(super) fn batch(
        &self,
        f: &Builder,
        spec: &Spec,
        of_values: Option<&ValueLossConfig>,
        shape: TrainShape,
    ) -> Batch {
        let rows = self.declare_rows(f, shape);
        let tables = TABLES.map(|role| (role, f.argument(role.name(), spec.type_of(role)))).to_vec();
        let value_table = || f.argument("value_table", TensorType::new(Dtype::F32, [3, shape.tokens]));
        Batch { rows, tables, of_values: of_values.map(|of| (of.clone(), value_table())) }
    }

    /// How the weights that are trained lie.
    pub(super) fn storage(&self) -> Storage {
        Storage::of_masters(self.model)
    }

    /// What the derivative keeps of every layer.
    pub(super) fn save(&self) -> &Save {
        &self.save
    }

    /// The number type of the matrices of the model.
    pub(super) fn model_dtype(&self) -> Dtype {
        self.model
    }

    /// The role of the parameter by which the LM head is trained, where it is: the head, the embedding that is the head, or an adapter.
    fn trained_head(&self) -> Option<ParameterRole> {
        let trained = self.decoder.trained();
        let tied = self.config().tie_word_embeddings;
        let head = if tied { ParameterRole::EmbedTokens } else { ParameterRole::LmHead };
        [head, ParameterRole::LoraB(Matrix::LmHead)].into_iter().find(|role| trained.iter().any(|p| p.role == *role))
    }

    /// What the head takes, with hidden states that the compiler leaves as they are: scoring and loss see the same bits.
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
            // The loss rounds it where it multiplies by it.
            None if head.dtype() == Dtype::F32 => head.clone(),
            None => head.convert(self.decoder.compute().dtype()),
        };
        let [hidden, head] = self.operands_of_head(&hidden, &head);
        let sums = sums.into_iter().map(|(role, sum)| (role, self.split_gradient(role, &sum)));
        [(Role::Hidden, hidden), (Role::LmHead, head)].into_iter().chain(tables).chain(sums).collect()
    }

    /// What [`TrainModules::forward`] takes.
    fn arguments<'a>(
        &self,
        table: &[Parameter],
        weights: &'a ParameterValues,
        batch: &'a Batch,
        outputs: Outputs,
    ) -> Vec<&'a Value> {
        let inside = table.iter().filter(|p| outputs.depend_on(p.role)).map(|p| &weights[p.role]);
        inside.chain(&batch.rows).collect()
    }

    /// The function of the parameters that the outputs depend on, and of rows, to the outputs at the tokens that predict.
    fn forward(&self, table: &[Parameter], shape: TrainShape, outputs: Outputs) -> Result<Traced, stablehlo::Error> {
        let inside: Vec<&Parameter> = table.iter().filter(|p| outputs.depend_on(p.role)).collect();
        let types = inside.iter().map(|p| TensorType::new(p.dtype(self.model), &p.shape[..]));
        let types: Vec<TensorType> = types.chain(row_types(shape).into_iter().map(|(_, ty)| ty)).collect();
        let mut failed = None;
        let forward = trace(&types, |_, values| {
            let (parameters, rows) = values.split_at(inside.len());
            let [ids, predicting, predicts, positions @ ..] = rows else { unreachable!("as many as there are types") };
            let weights = ParameterValues::new(inside.iter().map(|p| p.role).zip(parameters.iter().cloned()));
            let rows = match positions {
                [positions] => Rows { ids: ids.clone(), positions: positions.clone(), shared: true },
                _ => Rows::of_sequences(ids),
            };
            match self.decoder.residual(&weights, &rows, self.save.clone()) {
                Ok(x) => {
                    let hidden = self.split_hidden(&take_rows(&x, predicting, predicts));
                    let hidden = self.decoder.final_norm(&weights, &hidden);
                    let values = (outputs == Outputs::HiddenAndValues).then(|| self.decoder.values(&weights, &hidden));
                    std::iter::once(hidden).chain(values).collect()
                }
                Err(error) => {
                    failed = Some(error);
                    vec![]
                }
            }
        });
        match failed {
            Some(error) => Err(error),
            None => forward,
        }
    }
}

/// What a forward pass returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outputs {
    /// The hidden states `[N, H]` at the positions that predict completion tokens.
    Hidden,
    /// These, and what the value head makes of them, `[N]`.
    HiddenAndValues,
}

impl Outputs {
    /// Whether the parameter of this role acts on them: all but an LM head of its own, the adapter of the head, and a value head that is
    /// not asked.
    fn depend_on(self, role: ParameterRole) -> bool {
        match role {
            ParameterRole::LmHead | ParameterRole::LoraA(Matrix::LmHead) | ParameterRole::LoraB(Matrix::LmHead) => {
                false
            }
            ParameterRole::ValueHead | ParameterRole::ValueHeadBias => self == Self::HiddenAndValues,
            _ => true,
        }
    }
}

/// What a program takes of rows, in this order: ids `[B, T]`, the tokens that predict `[N]`, what each token predicts `[B, T]`, and positions
/// `[B, T]` where sequences share rows.
fn row_types(shape: TrainShape) -> Vec<(&'static str, TensorType)> {
    let tokens = TensorType::new(Dtype::I32, [shape.rows, shape.length]);
    let predicting = TensorType::new(Dtype::I32, [shape.tokens]);
    let mut types = vec![("ids", tokens.clone()), ("predicting", predicting), ("predicts", tokens.clone())];
    if shape.shared {
        types.push(("positions", tokens));
    }
    types
}

/// Room for 2048 rows of bf16 logits of 152 thousand tokens. Every chunk reads the head and its gradient: of Qwen2.5-0.5B, 8192 tokens in 4
/// chunks are estimated at 12 ms on v6e; in 8 chunks of f32 logits it was 25 ms, and in 38 chunks of 216 rows 53 ms.
pub(crate) fn default_tiling() -> Tiling {
    Tiling { workspace_budget: 640 << 20, ..Tiling::default() }
}

/// The rows `[N, H]` of `x` `[B, T, H]` at the tokens `predicting` `[N]`, f32. `predicts` `[B, T]` is the way back: the index of the row that
/// is each token's, or N.
///
/// The derivative looks up the cotangent of each token, where that of a gather adds them up: no token predicts two. libtpu writes 3 MB
/// less code for it, a sixteenth of a step, and no GPU adds in an order of its own.
fn take_rows(x: &Value, predicting: &Value, predicts: &Value) -> Value {
    let [b, t, h] = *x.shape() else { unreachable!("the residual stream has three dimensions") };
    let (tokens, n) = (b * t, predicting.shape()[0]);
    // In f32: libtpu leaves such rows to the sparse cores, and has a megabyte of code for rows of bf16.
    let (x, predicts) = (x.convert(Dtype::F32).reshape(&[tokens, h]), predicts.reshape(&[tokens]));
    let arguments = [&x, predicting, &predicts];
    let types = arguments.map(|value| value.ty().clone());
    let forward = trace(&types, |_, a| vec![rows_at(&a[0], &a[1]), a[2].clone()]);
    let backward = trace(&[types[2].clone(), TensorType::new(Dtype::F32, [n, h])], |_, a| {
        let (predicts, cotangents) = (&a[0], &a[1]);
        let own = rows_at(cotangents, predicts);
        let predicts_one = predicts.lt(&predicts.like(n as i64)).broadcast_in_dim(own.shape(), &[0]);
        vec![predicts_one.select(&own, &own.like(0.0))]
    });
    let [forward, backward] = [forward, backward].map(|traced| traced.expect("rows of matrices"));
    x.builder().custom_vjp(&forward, &backward, &arguments, 1).swap_remove(0)
}

/// The rows of `x` `[R, H]` with these indices `[N]`.
fn rows_at(x: &Value, indices: &Value) -> Value {
    let h = x.shape()[1];
    let dimensions = GatherDimensions {
        offset_dims: vec![1],
        collapsed_slice_dims: vec![0],
        start_index_map: vec![0],
        index_vector_dim: 1,
        slice_sizes: vec![1, h],
        ..GatherDimensions::default()
    };
    x.gather(indices, dimensions, &[indices.shape()[0], h])
}

fn program_error(program: &'static str) -> impl Fn(stablehlo::Error) -> Error {
    move |source| Error::Program { program: program.into(), source }
}

mod gradients;
mod split;
#[cfg(test)]
mod tests;
