//! The programs of training as values: scores, and the loss with the gradients of all parameters.

use super::adamw::apply_module;
use crate::decoder::{Compute, Decoder, Parameter, ParameterValues, Role as ParameterRole, Rows, parameters};
use crate::error::{Error, Result};
use crate::runtime::finish;
use backend_tpu::aot::Variant;
use backend_tpu::program::{Mesh, Numerics, Pass, ProgramKind, Role, Spec};
use grpo_core::{GradientSpec, HeadLayout, Implementation, LossConfig, PlanRequest, PolicySpec, Tiling};
use models::ModelConfig;
use stablehlo::{Builder, Dtype, GatherDimensions, Module, Save, TensorType, Traced, Value, trace};

/// The sizes of a program for micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TrainShape {
    /// Rows B, each of one sequence.
    pub rows: usize,
    /// Tokens T of a row.
    pub length: usize,
    /// Completion tokens N of all rows.
    pub tokens: usize,
}

/// Writes the programs of training for a decoder. Parameters and their gradients are arguments in the order of
/// [`parameters`], all f32.
///
/// ```
/// use policy_device::decoder::{Compute, Decoder};
/// use policy_device::{TrainModules, TrainShape};
///
/// # fn main() -> policy_device::Result<()> {
/// let decoder = Decoder::new(&models::ModelConfig::default(), Compute::F32);
/// let modules = TrainModules::new(decoder, stablehlo::Save::Carry);
/// let shape = TrainShape { rows: 2, length: 32, tokens: 48 };
/// let text = modules.gradient(&grpo_core::LossConfig::default(), shape)?.to_string();
/// assert!(text.contains("tensor<2x32xi32>"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct TrainModules {
    decoder: Decoder,
    save: Save,
    tiling: Tiling,
}

/// What a program of a micro-batch takes besides parameters and sums, as values.
struct Batch {
    ids: Value,
    positions: Value,
    tables: Vec<(Role, Value)>,
}

const TABLES: [Role; 3] = [Role::TokenIds, Role::TokenNumbers, Role::OnPolicy];

impl TrainModules {
    /// The programs of `decoder`, whose derivative keeps what `save` says of every layer.
    pub fn new(decoder: Decoder, save: Save) -> Self {
        Self { decoder, save, tiling: default_tiling() }
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

    pub(crate) fn table(&self) -> Vec<Parameter> {
        parameters(self.config())
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
            gradients: GradientSpec { hidden: true, lm_head: true, bias: false },
        };
        // What multiplies operands in bf16 is one itself: products of f32 would need a copy of the head in f32. Logits are products of such
        // operands, which leave their results so.
        let numerics = Numerics { logits: dtype, dlogits: dtype, ..Numerics::default() };
        let (mesh, program) = (Mesh::default(), ProgramKind::Gradient);
        Ok(Variant { request, numerics, mosaic: None, mesh, program }.spec()?)
    }

    /// The loss of a micro-batch and the gradients of all parameters.
    ///
    /// Arguments: the parameters; the sums of their gradients, which are donated; token ids i32 `[B, T]`; the index among B T positions
    /// that predicts each completion token, i32 `[N]`; the token tables of [`Role::TokenIds`], [`Role::TokenNumbers`] and
    /// [`Role::OnPolicy`]. Results: the sums with the gradients of the micro-batch added, the loss as [`Role::Sums`], log-probabilities
    /// and entropies `[N]`.
    ///
    /// # Errors
    /// [`Error::Loss`] for a loss that is not legal.
    pub fn gradient(&self, loss: &LossConfig, shape: TrainShape) -> Result<Module> {
        const NAME: &str = "gradient";
        let (spec, table) = (self.head(loss, shape.tokens)?, self.table());
        let f = Builder::new();
        let weights = ParameterValues::arguments(&f, &table, Dtype::F32);
        let sum = |p: &Parameter| f.argument(&format!("{}.sum", p.name()), TensorType::new(Dtype::F32, &p.shape[..]));
        let mut sums: Vec<Value> = table.iter().map(sum).collect();
        sums.iter().enumerate().for_each(|(i, sum)| f.alias(sum, i));
        let batch = self.batch(&f, &spec, shape);

        let forward = self.forward(&table, shape).map_err(program_error(NAME))?;
        let arguments = self.arguments(&table, &weights, &batch);
        let inside: Vec<usize> = (0..table.len()).filter(|i| is_inside(&table[*i])).collect();
        let asked: Vec<usize> = (0..inside.len()).collect();
        let (hidden, pullback) = f.vjp(&forward, &arguments, &asked).map_err(program_error(NAME))?;

        let of_head = table.iter().position(|p| p.role == self.head_role()).unwrap_or_default();
        let zeros = f.splat(0.0, spec.type_of(Role::GradHidden));
        let sums_of_loss = [(Role::GradHidden, zeros), (Role::GradLmHead, sums[of_head].clone())];
        let results =
            spec.operations(&f, Pass::Gradient, self.to_head(&weights, &hidden[0], batch.tables, sums_of_loss))?;
        let result = |role: Role| match results.iter().find(|(r, _)| *r == role) {
            Some((_, value)) => value,
            None => unreachable!("the program of gradients returns {role:?}"),
        };

        sums[of_head] = result(Role::GradLmHead).clone();
        let dhidden = result(Role::GradHidden).convert(hidden[0].dtype());
        let begun: Vec<&Value> = inside.iter().map(|index| &sums[*index]).collect();
        // The sums of layers are added to where they are, within the loop over layers.
        let added = pullback.add_to(&[&dhidden], &begun);
        inside.into_iter().zip(added).for_each(|(index, sum)| sums[index] = sum);
        let sums = table.iter().zip(&sums).map(|(p, sum)| (p.name(), sum));
        let of_loss = [Role::Sums, Role::Logp, Role::Entropy].map(|role| (role.name(), result(role)));
        let results: Vec<(&str, &Value)> = sums.chain(of_loss).collect();
        finish(f.clone(), NAME, &results)
    }

    /// Log-probabilities and entropies `[N]` of a micro-batch's completion tokens, from the same tiles as those of
    /// [`TrainModules::gradient`]. Arguments as there, without the sums.
    ///
    /// # Errors
    /// As [`TrainModules::gradient`].
    pub fn score(&self, loss: &LossConfig, shape: TrainShape) -> Result<Module> {
        const NAME: &str = "score";
        let (spec, table) = (self.head(loss, shape.tokens)?, self.table());
        let f = Builder::new();
        let weights = ParameterValues::arguments(&f, &table, Dtype::F32);
        let batch = self.batch(&f, &spec, shape);
        let forward = self.forward(&table, shape).map_err(program_error(NAME))?;
        let hidden = f.call(&forward, &self.arguments(&table, &weights, &batch));
        let results = spec.operations(&f, Pass::Score, self.to_head(&weights, &hidden[0], batch.tables, []))?;
        let results: Vec<(&str, &Value)> = results.iter().map(|(role, value)| (role.name(), value)).collect();
        finish(f.clone(), NAME, &results)
    }

    /// A step of AdamW over all parameters.
    ///
    /// Arguments, all donated but the last: parameters, first and second moments, sums of gradients, and the scalars of the step, f32
    /// `[8]`. Results: the same without the scalars, the sums being zero, and f32 `[3]`: the norm of the gradient, whether it is within its
    /// limit, and whether parameters and moments stay finite (0 or 1). Where one of the two is 0, parameters and moments are those of before.
    ///
    /// # Errors
    /// [`Error::Program`], a defect of this crate.
    pub fn adamw(&self) -> Result<Module> {
        apply_module(&self.table())
    }

    /// Declares what a program takes of a micro-batch.
    fn batch(&self, f: &Builder, spec: &Spec, shape: TrainShape) -> Batch {
        let indices = |shape: &[usize]| TensorType::new(Dtype::I32, shape);
        Batch {
            ids: f.argument("ids", indices(&[shape.rows, shape.length])),
            positions: f.argument("positions", indices(&[shape.tokens])),
            tables: TABLES.map(|role| (role, f.argument(role.name(), spec.type_of(role)))).to_vec(),
        }
    }

    /// The role of the LM head among the parameters.
    fn head_role(&self) -> ParameterRole {
        if self.config().tie_word_embeddings { ParameterRole::EmbedTokens } else { ParameterRole::LmHead }
    }

    /// What the head takes, with hidden states that the compiler leaves as they are: scoring and loss see the same bits.
    fn to_head<const S: usize>(
        &self,
        weights: &ParameterValues,
        hidden: &Value,
        tables: Vec<(Role, Value)>,
        sums: [(Role, Value); S],
    ) -> Vec<(Role, Value)> {
        let hidden = hidden.builder().optimization_barrier(&[hidden]).swap_remove(0);
        [(Role::Hidden, hidden), (Role::LmHead, weights.head().clone())].into_iter().chain(tables).chain(sums).collect()
    }

    /// What [`TrainModules::forward`] takes.
    fn arguments<'a>(&self, table: &[Parameter], weights: &'a ParameterValues, batch: &'a Batch) -> Vec<&'a Value> {
        let inside = table.iter().filter(|p| is_inside(p)).map(|p| &weights[p.role]);
        inside.chain([&batch.ids, &batch.positions]).collect()
    }

    /// The function of the parameters but an LM head of its own, the ids and the positions, to the hidden states `[N, H]` there.
    fn forward(&self, table: &[Parameter], shape: TrainShape) -> Result<Traced, stablehlo::Error> {
        let inside: Vec<&Parameter> = table.iter().filter(|p| is_inside(p)).collect();
        let indices = |shape: &[usize]| TensorType::new(Dtype::I32, shape);
        let types = inside.iter().map(|p| TensorType::new(Dtype::F32, &p.shape[..]));
        let types: Vec<TensorType> =
            types.chain([indices(&[shape.rows, shape.length]), indices(&[shape.tokens])]).collect();
        let mut failed = None;
        let forward = trace(&types, |_, values| {
            let (parameters, batch) = values.split_at(inside.len());
            let weights = ParameterValues::new(inside.iter().map(|p| p.role).zip(parameters.iter().cloned()));
            let rows = Rows::of_sequences(&batch[0]);
            match self.decoder.residual(&weights, &rows, self.save.clone()) {
                Ok(x) => vec![self.decoder.final_norm(&weights, &take_rows(&x, &batch[1]))],
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

/// Room for 2048 rows of bf16 logits of 152 thousand tokens. Every chunk reads the head and its gradient: of Qwen2.5-0.5B, 8192 tokens in 4
/// chunks are estimated at 12 ms on v6e; in 8 chunks of f32 logits it was 25 ms, and in 38 chunks of 216 rows 53 ms.
pub(crate) fn default_tiling() -> Tiling {
    Tiling { workspace_budget: 640 << 20, ..Tiling::default() }
}

/// Whether the hidden states depend on a parameter: on all but an LM head of its own.
fn is_inside(parameter: &Parameter) -> bool {
    parameter.role != ParameterRole::LmHead
}

/// The rows `[N, H]` of `x` `[B, T, H]` at `positions` `[N]`.
fn take_rows(x: &Value, positions: &Value) -> Value {
    let [b, t, h] = x.shape() else { unreachable!("the residual stream has three dimensions") };
    let dimensions = GatherDimensions {
        offset_dims: vec![1],
        collapsed_slice_dims: vec![0],
        start_index_map: vec![0],
        index_vector_dim: 1,
        slice_sizes: vec![1, *h],
        ..GatherDimensions::default()
    };
    x.reshape(&[b * t, *h]).gather(positions, dimensions, &[positions.shape()[0], *h])
}

fn program_error(program: &'static str) -> impl Fn(stablehlo::Error) -> Error {
    move |source| Error::Program { program: program.into(), source }
}
