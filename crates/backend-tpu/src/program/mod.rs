//! StableHLO programs of the loss: what is compiled for a device.
//!
//! [`Spec`] says what is wanted of one device's part; the three implementations are files of the same names. Every
//! program is a pure function of its arguments, whose order [`Program`] tells.
//!
//! Legend: N tokens and V vocabulary entries of one device, H hidden size.

mod bare;
mod baseline;
mod fused;
mod head;
mod kernels;
mod logits;
mod mesh;
mod products;
mod reference;
mod tokens;
mod traced;
mod transform;

use grpo_core::backend_api::columns::{LossSums, TokenColumns};
use grpo_core::batch::TokenBatch;
use grpo_core::error::{Error, Result};
use grpo_core::{Dtype, GradientSpec, HeadLayout, Implementation, LossConfig, PolicySpec};
pub use mesh::Mesh;
use serde::{Deserialize, Serialize};
use stablehlo::{Builder, Module, TensorType, Value};
use strum::IntoStaticStr;
pub(crate) use tokens::IDS;

/// What to do about what TPU kernels cannot.
const NO_KERNELS: &str = "leave `mosaic` out: the plain program does it";

/// An argument or a result of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Role {
    /// Hidden states `[N, H]`.
    Hidden,
    /// LM head `[V, H]` or `[H, V]`.
    LmHead,
    /// Bias `[V]`.
    Bias,
    /// Logits `[N, V]`.
    Logits,
    /// i32 `[2, G]`.
    TokenIds,
    /// [`TokenColumns`], a row each: f32 `[TokenColumns::COUNT, G]`.
    TokenNumbers,
    /// Predicate.
    OnPolicy,
    /// Gradients, accumulated: argument and result.
    GradHidden,
    /// Gradients, accumulated: argument and result.
    GradLmHead,
    /// Gradients, accumulated: argument and result.
    GradBias,
    /// Gradients with respect to given logits, accumulated: argument and result. In place, they are the result `Logits`.
    GradLogits,
    /// [`LossSums`]: f32 `[LossSums::COUNT]`.
    Sums,
    /// f32 `[N]`.
    Logp,
    /// f32 `[N]`.
    Entropy,
}

/// What a program computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// Log-probabilities and entropies.
    Score,
    /// Loss and gradients, added to what the caller donates.
    Gradient,
    /// Loss, and dL/dlogits in place of the donated logits.
    GradientInPlace,
}

/// How the fused loops are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Blocking {
    /// Chunks of so many tokens against the whole vocabulary.
    TokenChunks(usize),
    /// Panels of so many vocabulary entries against all tokens.
    VocabPanels(usize),
}

impl Blocking {
    /// Smaller tiles, about `ratio` times the size; `None` when there are none.
    pub(crate) fn scaled(self, ratio: f64) -> Option<Self> {
        let smaller = |size: usize| {
            let next = ((size as f64 * ratio) as usize).min(size.saturating_sub(1));
            (next > 0).then_some(next)
        };
        match self {
            Self::TokenChunks(c) => smaller(c).map(Self::TokenChunks),
            Self::VocabPanels(w) => smaller(w).map(Self::VocabPanels),
        }
    }
}

/// What may be rounded to the dtype of the inputs, and what is made at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Numerics {
    /// What logits are held in. `bf16` rounds them once, before every statistic, in forward and backward alike.
    pub logits: Dtype,
    /// What dL/dlogits is rounded to before it is multiplied into gradients (sums are f32 anyway).
    pub dlogits: Dtype,
    /// What gradients are accumulated in. Sums of a product are f32 anyway; `bf16` rounds the running sum with every
    /// chunk or micro-batch.
    pub gradients: Dtype,
    /// Whether scoring and loss are compiled so that they see bit for bit the same logits, which makes a ratio exactly 1
    /// on policy. Without it the compiler may fuse statistics into the product, differently in each program.
    pub exact_ratio: bool,
    /// Whether the entropy is computed. Without it the result holds zeros, and there is no entropy bonus.
    pub entropy: bool,
}

impl Default for Numerics {
    fn default() -> Self {
        let f32 = Dtype::F32;
        Self { logits: f32, dlogits: f32, gradients: f32, exact_ratio: true, entropy: true }
    }
}

/// How the TPU kernels of `logits` are cut. See [`crate::mosaic::KernelSpec`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MosaicBlocks {
    /// Batches into which the tokens are divided: logits are `[batch, N / batch, V]` to a kernel.
    pub batch: usize,
    /// Tokens of a block, a multiple of 128.
    pub time_block: usize,
    /// Vocabulary entries of a block, a multiple of 128.
    pub vocab_block: usize,
}

impl Default for MosaicBlocks {
    fn default() -> Self {
        Self { batch: 1, time_block: 256, vocab_block: 2048 }
    }
}

/// One device's part of a loss.
#[derive(Clone, Debug)]
pub struct Spec {
    /// What the loss is.
    pub loss: LossConfig,
    /// How it is computed.
    pub implementation: Implementation,
    /// Tokens of all devices.
    pub tokens: usize,
    /// Of all devices.
    pub policy: PolicySpec,
    /// Gradients to make.
    pub gradients: GradientSpec,
    /// Of the fused loops.
    pub blocking: Blocking,
    /// Whether `logits` runs our TPU kernels instead of what the compiler makes of the plain program.
    pub mosaic: Option<MosaicBlocks>,
    /// Rounding.
    pub numerics: Numerics,
    /// Devices.
    pub mesh: Mesh,
}

/// A program with the roles of its arguments and results.
#[derive(Clone, Debug)]
pub struct Program {
    /// The text is its `Display`.
    pub module: Module,
    /// Of the arguments, in order. Those that are also results are donated.
    pub arguments: Vec<Role>,
    /// Of the results, in order.
    pub results: Vec<Role>,
}

impl Spec {
    /// The program of `pass`.
    ///
    /// # Errors
    /// [`Error::Config`] or [`Error::Unsupported`] for what no program does.
    pub fn program(&self, pass: Pass) -> Result<Program> {
        self.validate(pass)?;
        match (self.implementation, self.policy) {
            (Implementation::Reference, _) => reference::program(self, pass),
            (Implementation::Logits, _) => logits::program(self, pass),
            (Implementation::Fused, PolicySpec::Hidden { .. }) => fused::program(self, pass),
            (Implementation::Fused, PolicySpec::Logits { .. }) => Err(crate::unsupported(
                "implementation `fused` on given logits",
                "there is no head to fuse with; use `logits`, or hand over hidden states and the head",
            )),
        }
    }

    /// What automatic differentiation makes of the dense loss, with every intermediate that it keeps: for comparison
    /// only.
    ///
    /// # Errors
    /// As [`Spec::program`].
    pub fn materialised_baseline(&self) -> Result<Program> {
        self.validate(Pass::Gradient)?;
        baseline::program(self)
    }

    /// The products of `pass` and nothing else, with its arguments and results: for comparison only. Of given logits, one
    /// pass over them.
    ///
    /// # Errors
    /// As [`Spec::program`].
    pub fn bare(&self, pass: Pass) -> Result<Program> {
        self.validate(pass)?;
        bare::program(self, pass)
    }

    fn validate(&self, pass: Pass) -> Result<()> {
        self.mesh.validate()?;
        let Numerics { logits, dlogits, gradients, .. } = self.numerics;
        if [logits, dlogits, gradients].contains(&Dtype::Bf16) && self.policy.dtype() == Dtype::F32 {
            return Err(Error::Config("logits, dlogits or gradients in bf16 need inputs in bf16".into()));
        }
        if self.loss.entropy_coef != 0.0 && !self.numerics.entropy {
            return Err(Error::Config(
                "entropy_coef needs the entropy, which `numerics.entropy: false` leaves out".into(),
            ));
        }
        if self.mosaic.is_some() {
            if self.implementation != Implementation::Logits {
                let what = format!("TPU kernels in the implementation `{}`", self.implementation.name());
                return Err(crate::unsupported(&what, "they belong to `logits`"));
            }
            if self.loss.final_logit_softcapping.is_some() || self.loss.logit_scale < 0.0 {
                let what = match self.loss.final_logit_softcapping {
                    Some(cap) => format!("TPU kernels with final_logit_softcapping {cap}"),
                    None => format!("TPU kernels with logit_scale {}, below 0", self.loss.logit_scale),
                };
                return Err(crate::unsupported(&what, NO_KERNELS));
            }
            if self.pads_vocab() {
                let what = format!("TPU kernels with {} entries over {} devices", self.policy.vocab(), self.mesh.vocab);
                return Err(crate::unsupported(&what, "split a vocabulary that divides, or leave `mosaic` out"));
            }
        }
        if pass == Pass::GradientInPlace && !matches!(self.policy, PolicySpec::Logits { .. }) {
            return Err(Error::Config("only given logits can be overwritten with their gradient".into()));
        }
        Ok(())
    }

    /// Checks that the programs take `batch`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for temperatures of tokens where TPU kernels are compiled for one temperature.
    pub fn check_batch(&self, batch: &TokenBatch) -> Result<()> {
        match (self.mosaic, batch.temperatures()) {
            (Some(_), Some(_)) => Err(crate::unsupported("TPU kernels with `temperatures` of tokens", NO_KERNELS)),
            _ => Ok(()),
        }
    }

    /// N: tokens of one device.
    pub fn local_tokens(&self) -> usize {
        self.mesh.local_tokens(self.tokens)
    }

    /// V: vocabulary entries of one device.
    pub fn local_vocab(&self) -> usize {
        self.mesh.local_vocab(self.policy.vocab())
    }

    /// Whether the last device holds columns beyond the vocabulary.
    pub(crate) fn pads_vocab(&self) -> bool {
        !self.policy.vocab().is_multiple_of(self.mesh.vocab)
    }

    /// G: tokens of all devices, with padding.
    pub fn padded_tokens(&self) -> usize {
        self.local_tokens() * self.mesh.data
    }

    /// Type of an argument or result on one device; gradients as accumulated.
    pub fn type_of(&self, role: Role) -> TensorType {
        let (n, v) = (self.local_tokens(), self.local_vocab());
        let (h, layout) = match self.policy {
            PolicySpec::Hidden { hidden, layout, .. } => (hidden, layout),
            PolicySpec::Logits { .. } => (0, HeadLayout::VocabHidden),
        };
        let head = match layout {
            HeadLayout::VocabHidden => [v, h],
            HeadLayout::HiddenVocab => [h, v],
        };
        let input = dtype(self.policy.dtype());
        let (f32, sum) = (stablehlo::Dtype::F32, dtype(self.numerics.gradients));
        match role {
            Role::Hidden => TensorType::new(input, [n, h]),
            Role::LmHead => TensorType::new(input, head),
            Role::Bias => TensorType::new(input, [v]),
            Role::Logits => TensorType::new(input, [n, v]),
            Role::TokenIds => TensorType::new(stablehlo::Dtype::I32, [IDS, self.padded_tokens()]),
            Role::TokenNumbers => TensorType::new(f32, [TokenColumns::<f32>::COUNT, self.padded_tokens()]),
            Role::OnPolicy => TensorType::scalar(stablehlo::Dtype::Pred),
            Role::GradHidden => TensorType::new(sum, [n, h]),
            Role::GradLmHead => TensorType::new(sum, head),
            Role::GradBias => TensorType::new(sum, [v]),
            Role::GradLogits => TensorType::new(sum, [n, v]),
            Role::Sums => TensorType::new(f32, [LossSums::<f32>::COUNT]),
            Role::Logp | Role::Entropy => TensorType::new(f32, [n]),
        }
    }

    /// Gradients that are arguments and results of `pass`, in the order of both.
    fn accumulators(&self, pass: Pass) -> Vec<Role> {
        let wanted = match (pass, self.policy) {
            (Pass::Gradient, PolicySpec::Hidden { .. }) => vec![
                (self.gradients.hidden, Role::GradHidden),
                (self.gradients.lm_head, Role::GradLmHead),
                (self.gradients.bias, Role::GradBias),
            ],
            (Pass::Gradient, PolicySpec::Logits { .. }) => vec![(self.gradients.hidden, Role::GradLogits)],
            (Pass::Score | Pass::GradientInPlace, _) => vec![],
        };
        wanted.into_iter().filter(|(wanted, _)| *wanted).map(|(_, role)| role).collect()
    }
}

/// The dtype of the loss as one of a program.
pub(crate) fn dtype(dtype: Dtype) -> stablehlo::Dtype {
    match dtype {
        Dtype::F32 => stablehlo::Dtype::F32,
        Dtype::Bf16 => stablehlo::Dtype::Bf16,
    }
}

/// `sum + gradient`, rounded to what gradients are accumulated in.
fn accumulate(sum: &Value, gradient: &Value) -> Value {
    (sum.convert(stablehlo::Dtype::F32) + gradient).convert(sum.dtype())
}

/// Logits that the compiler leaves as they are, if scoring and loss must see the same.
fn pinned(spec: &Spec, logits: Value) -> Value {
    match spec.numerics.exact_ratio {
        true => logits.builder().optimization_barrier(&[&logits]).swap_remove(0),
        false => logits,
    }
}

/// A program under construction: its arguments by role.
struct Frame {
    f: Builder,
    arguments: Vec<(Role, Value)>,
}

impl Frame {
    /// Declares what `pass` takes.
    fn new(spec: &Spec, pass: Pass) -> Self {
        let policy = match spec.policy {
            PolicySpec::Logits { .. } => vec![Role::Logits],
            PolicySpec::Hidden { bias: false, .. } => vec![Role::Hidden, Role::LmHead],
            PolicySpec::Hidden { bias: true, .. } => vec![Role::Hidden, Role::LmHead, Role::Bias],
        };
        let tokens = [Role::TokenIds, Role::TokenNumbers, Role::OnPolicy];
        let f = Builder::new();
        let arguments = policy
            .into_iter()
            .chain(tokens)
            .chain(spec.accumulators(pass))
            .map(|role| (role, f.argument(role.name(), spec.type_of(role))))
            .collect();
        Self { f, arguments }
    }

    /// An argument, if the program has it.
    fn get(&self, role: Role) -> Option<&Value> {
        self.arguments.iter().find(|(r, _)| *r == role).map(|(_, value)| value)
    }

    /// An argument that every program of this kind has.
    fn argument(&self, role: Role) -> Value {
        match self.get(role) {
            Some(value) => value.clone(),
            None => unreachable!("the frame declares {role:?} for this pass"),
        }
    }

    /// Hidden states and head, where the policy hands over those.
    fn head(&self, spec: &Spec) -> Option<(Value, products::Head)> {
        match spec.policy {
            PolicySpec::Logits { .. } => None,
            PolicySpec::Hidden { layout, .. } => {
                let (weight, bias) = (self.argument(Role::LmHead), self.get(Role::Bias).cloned());
                Some((self.argument(Role::Hidden), products::Head { weight, bias, layout }))
            }
        }
    }

    fn tables(&self) -> tokens::Tables {
        tokens::Tables {
            ids: self.argument(Role::TokenIds),
            numbers: self.argument(Role::TokenNumbers),
            on_policy: self.argument(Role::OnPolicy),
        }
    }

    /// The program that returns `results`. Results that are arguments too take over their buffers.
    fn finish(self, name: &str, spec: &Spec, results: &[(Role, Value)]) -> Result<Program> {
        for (index, (role, _)) in results.iter().enumerate() {
            if let Some(argument) = self.get(*role) {
                self.f.alias(argument, index);
            }
        }
        let named: Vec<(&str, &Value)> = results.iter().map(|(role, value)| (role.name(), value)).collect();
        let arguments: Vec<Role> = self.arguments.iter().map(|(role, _)| *role).collect();
        let mut module = self.f.finish(name, &named).map_err(|e| Error::Backend {
            backend: crate::NAME.into(),
            message: format!("the program `{name}` cannot be built: {e}"),
        })?;
        module.replicas = spec.mesh.devices();
        if spec.mosaic.is_some() {
            // Otherwise the compiler turns logits whose V is no multiple of 128 around, and copies them for the kernels.
            let logits = |role: &Role| *role == Role::Logits;
            module.main.arguments.iter_mut().zip(&arguments).for_each(|(a, role)| a.row_major = logits(role));
            module.main.results.iter_mut().zip(results).for_each(|(r, (role, _))| r.row_major = logits(role));
        }
        Ok(Program { module, arguments, results: results.iter().map(|(role, _)| *role).collect() })
    }
}

impl Role {
    /// As the text of a program names it.
    pub fn name(self) -> &'static str {
        self.into()
    }
}
