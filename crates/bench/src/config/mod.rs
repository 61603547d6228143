//! The configuration of a benchmark: problems, and variants that solve them. `grpo aot` and `grpo plan` compile the variants of
//! one problem, `grpo bench` runs them all.
//!
//! The keys include the keys of the loss, of plans and of backends. A key that a variant's backend does not support is an error.

mod backend_name;
mod variant;

pub use backend_name::BackendName;
pub use variant::{MosaicConfig, ProgramKind, VariantConfig};

use crate::error::{Error, Result};
use crate::measure::Rounds;
use grpo_backend_cpu::{Isa, most_threads};
use grpo_backend_tpu::aot::Variant;
use grpo_backend_tpu::program::{MeshShape, MosaicBlocks};
use grpo_core::{Dtype, HeadLayout, Implementation, LossConfig, PlanRequest, PolicySpec};
use grpo_sinks::{LoggingConfig, WandbConfig};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use std::collections::BTreeMap;

impl grpo_files::Configuration for BenchConfig {}

/// Problems and variants that solve them: every shape of `shapes` with every dtype of `dtypes`.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BenchConfig {
    /// The name of the configuration in reports.
    #[default("bench".into())]
    pub name: String,
    /// The sizes of the problem.
    pub shape: ShapeConfig,
    /// Several problems instead of one, by name, with their changes to `shape`.
    pub shapes: Option<BTreeMap<String, ShapeChange>>,
    /// The dtype of hidden states and head, or of the logits.
    #[default(Dtype::Bf16)]
    pub dtype: Dtype,
    /// Several problems instead of one, one per dtype.
    pub dtypes: Option<Vec<Dtype>>,
    /// The memory layout of the head.
    pub layout: HeadLayout,
    /// The loss that every variant computes.
    pub loss: LossConfig,
    /// The policy and the old policy.
    pub inputs: InputsConfig,
    /// Numbers of warm-up and timed steps.
    pub rounds: Rounds,
    /// The default backend of variants: `cpu`, `pjrt:cpu`, `pjrt:tpu`, `pjrt:cuda`.
    #[default(BackendName::Cpu.to_string())]
    pub backend: String,
    /// The mesh of devices: tokens are sharded over `data`, the vocabulary over `tensor`.
    pub mesh: MeshShape,
    /// Other sinks than metrics.jsonl, if metrics are logged ([`crate::log`]).
    pub logging: LoggingConfig,
    /// Settings of Weights & Biases, if metrics are logged.
    pub wandb: WandbConfig,
    /// The variants by name (letters, digits, `_` and `-`); at least one.
    pub variants: Option<BTreeMap<String, VariantConfig>>,
}

/// Sizes of a problem.
#[derive(Clone, Copy, Debug, SmartDefault, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShapeConfig {
    /// Sequences B.
    #[default(1)]
    pub batch: usize,
    /// Tokens T per sequence.
    #[default(8192)]
    pub tokens: usize,
    /// Hidden size H; `null` for precomputed logits.
    #[default(Some(4096))]
    pub hidden: Option<usize>,
    /// Vocabulary entries V.
    #[default(151_936)]
    pub vocab: usize,
}

/// Sizes that differ from `shape`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShapeChange {
    /// Sequences B, if different.
    pub batch: Option<usize>,
    /// Tokens T per sequence, if different.
    pub tokens: Option<usize>,
    /// Hidden size H, if different; not allowed for precomputed logits.
    pub hidden: Option<usize>,
    /// Vocabulary entries V, if different.
    pub vocab: Option<usize>,
}

/// The policy and the old policy. Every number may be 0.
#[derive(Clone, Copy, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InputsConfig {
    /// Seed of the inputs; equal seeds give equal bits.
    pub seed: u64,
    /// Standard deviation of the logits, in nats.
    #[default(2.0)]
    pub logit_std: f64,
    /// Standard deviation of the noise on old log-probabilities. At 0.15, about every fifth ratio is outside 1 +-
    /// 0.2; at 0 the old policy equals the current one up to rounding.
    #[default(0.15)]
    pub old_logp_noise: f64,
    /// Standard deviation of the noise on the log-probabilities of the reference policy, if the loss has a KL term.
    #[default(0.1)]
    pub ref_logp_noise: f64,
    /// `true` if there are no old log-probabilities, so that every ratio is exactly 1.
    pub on_policy: bool,
    /// The number of ids that every token was sampled from, as with top-k; 0 is the whole vocabulary. For the backend `cpu` only.
    pub kept_ids: usize,
}

impl ShapeConfig {
    /// Returns the number of tokens N of all sequences.
    pub fn rows(&self) -> usize {
        self.batch.saturating_mul(self.tokens)
    }

    fn with(self, change: ShapeChange) -> Self {
        Self {
            batch: change.batch.unwrap_or(self.batch),
            tokens: change.tokens.unwrap_or(self.tokens),
            hidden: change.hidden.or(self.hidden),
            vocab: change.vocab.unwrap_or(self.vocab),
        }
    }
}

impl BenchConfig {
    /// Checks the sizes and the names of the variants.
    ///
    /// # Errors
    /// [`Error::Config`] that names the key.
    pub fn validate(&self) -> Result<()> {
        let ShapeConfig { batch, tokens, hidden, vocab } = self.shape;
        let sizes = [("batch", batch), ("tokens", tokens), ("hidden", hidden.unwrap_or(1)), ("vocab", vocab)];
        let mesh = [("mesh.data", self.mesh.data), ("mesh.tensor", self.mesh.tensor)];
        let sizes = sizes.map(|(key, size)| (format!("shape.{key}"), size)).into_iter();
        for (key, size) in sizes.chain(mesh.map(|(key, size)| (key.to_owned(), size))) {
            // Compiled programs index with i32.
            if size == 0 || i32::try_from(size).is_err() {
                return Err(config(key, "a number from 1 to 2^31 - 1", size));
            }
        }
        if batch.checked_mul(tokens).is_none_or(|n| i32::try_from(n).is_err()) {
            return Err(config("shape.tokens", "batch x tokens below 2^31", format!("{batch} x {tokens}")));
        }
        if self.shape.hidden.is_none() && self.shapes.iter().flatten().any(|(_, change)| change.hidden.is_some()) {
            return Err(config("shapes", "no `hidden` where logits are given", "a shape with `hidden`"));
        }
        for (key, empty) in [
            ("shapes", self.shapes.as_ref().is_some_and(BTreeMap::is_empty)),
            ("dtypes", self.dtypes.as_ref().is_some_and(Vec::is_empty)),
        ] {
            if empty {
                return Err(config(key, "at least one, or the key left out", "none"));
            }
        }
        let inputs = self.inputs;
        for (key, number) in [
            ("inputs.logit_std", inputs.logit_std),
            ("inputs.old_logp_noise", inputs.old_logp_noise),
            ("inputs.ref_logp_noise", inputs.ref_logp_noise),
        ] {
            if !(number.is_finite() && number >= 0.0) {
                return Err(config(key, "a finite number from 0", number));
            }
        }
        let (kept, smallest) = (inputs.kept_ids, self.cases().iter().map(|(_, case)| case.shape.vocab).min());
        if smallest.is_some_and(|vocab| kept > vocab) {
            return Err(config(
                "inputs.kept_ids",
                format!("at most the vocabulary of {}", smallest.unwrap_or(0)),
                kept,
            ));
        }
        self.loss.validate()?;
        BackendName::parse("backend", &self.backend)?;
        for (name, variant) in self.variants.iter().flatten() {
            if let Some(backend) = &variant.backend {
                BackendName::parse(&format!("variants.{name}.backend"), backend)?;
            }
            let most = most_threads();
            if variant.threads > most {
                let expected = format!("at most {most} threads on this machine");
                return Err(config(format!("variants.{name}.threads"), expected, variant.threads));
            }
            let isa = variant.isa.as_deref();
            if let Some(unknown) = isa.filter(|isa| Isa::from_name(isa).is_none()) {
                let names = Isa::ALL.map(Isa::name).join(", ");
                return Err(config(format!("variants.{name}.isa"), format!("one of {names}"), format!("`{unknown}`")));
            }
            if variant.command.as_ref().is_some_and(Vec::is_empty) {
                return Err(config(format!("variants.{name}.command"), "a program and its arguments", "none"));
            }
        }
        if self.names().is_empty() {
            return Err(config("variants", "at least one, e.g. `variants: { fused: {} }`", "none"));
        }
        let legal = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        for name in self.names() {
            if name.is_empty() || !name.chars().all(legal) {
                return Err(config("variants", "names of letters, digits, `_` and `-`", format!("`{name}`")));
            }
        }
        if self.is_several() { self.cases().iter().try_for_each(|(_, case)| case.validate()) } else { Ok(()) }
    }

    fn is_several(&self) -> bool {
        self.shapes.is_some() || self.dtypes.is_some()
    }

    /// Returns the problems as configurations, with names composed of the names of the configuration, the shape and
    /// the dtype.
    pub fn cases(&self) -> Vec<(String, Self)> {
        let shapes: Vec<(Option<&str>, ShapeConfig)> = match &self.shapes {
            None => vec![(None, self.shape)],
            Some(shapes) => {
                shapes.iter().map(|(name, change)| (Some(name.as_str()), self.shape.with(*change))).collect()
            }
        };
        let dtypes: Vec<(Option<&str>, Dtype)> = match &self.dtypes {
            None => vec![(None, self.dtype)],
            Some(dtypes) => dtypes.iter().map(|dtype| (Some(dtype.name()), *dtype)).collect(),
        };
        let pairs = shapes.iter().flat_map(|shape| dtypes.iter().map(move |dtype| (shape, dtype)));
        pairs
            .map(|((shape_name, shape), (dtype_name, dtype))| {
                let names = [Some(self.name.as_str()), *shape_name, *dtype_name];
                let name = names.into_iter().flatten().collect::<Vec<_>>().join("-");
                let case = Self { shape: *shape, shapes: None, dtype: *dtype, dtypes: None, ..self.clone() };
                (name, case)
            })
            .collect()
    }

    /// Returns the backend of the variant called `name`.
    ///
    /// # Errors
    /// [`Error::Config`] for an unknown name.
    pub fn backend(&self, name: &str) -> Result<BackendName> {
        let own_backend = self.variants.as_ref().and_then(|variants| variants.get(name)?.backend.as_deref());
        match own_backend {
            Some(backend) => BackendName::parse(&format!("variants.{name}.backend"), backend),
            None => BackendName::parse("backend", &self.backend),
        }
    }

    /// Returns the dtype of the inputs of the variant called `name`.
    pub fn dtype_of(&self, name: &str) -> Dtype {
        self.variants.as_ref().and_then(|variants| variants.get(name)?.dtype).unwrap_or(self.dtype)
    }

    /// Checks that the variant has a program, which is all that can be checked without a compiler.
    ///
    /// # Errors
    /// The errors of [`BenchConfig::variant`] and of the program, with the variant's name.
    pub fn check(&self, name: &str) -> Result<()> {
        let variant = self.variant(name)?;
        let program = variant.spec().and_then(|spec| variant.program(&spec));
        program.map(drop).map_err(|error| Error::Variant { name: name.to_owned(), source: Box::new(error.into()) })
    }

    /// Returns the names of the variants, in order.
    pub fn names(&self) -> Vec<&str> {
        self.variants.iter().flat_map(|variants| variants.keys()).map(String::as_str).collect()
    }

    /// Returns the variant called `name`, ready for compilation.
    ///
    /// # Errors
    /// [`Error::Config`] that lists the names, or names the illegal setting of the variant.
    pub fn variant(&self, name: &str) -> Result<Variant> {
        let Some(variant) = self.variants.as_ref().and_then(|variants| variants.get(name)) else {
            return Err(config("variants", format!("one of {}", self.names().join(", ")), format!("`{name}`")));
        };
        if self.is_several() {
            let (shapes, dtypes) = (self.shapes.iter().flat_map(BTreeMap::keys), self.dtypes.iter().flatten());
            let names: Vec<&str> = shapes.map(String::as_str).chain(dtypes.map(|dtype| dtype.name())).collect();
            let expected = "one problem (`--set shapes=null --set dtypes=null` leaves `shape` and `dtype`)";
            return Err(config("shapes, dtypes", expected, names.join(", ")));
        }
        let ShapeConfig { batch, tokens, hidden, vocab } = self.shape;
        let dtype = self.dtype_of(name);
        let policy = match hidden {
            Some(hidden) => {
                let bias = variant.gradients.bias;
                PolicySpec::Hidden { hidden, vocab, dtype, layout: self.layout, bias }
            }
            None => PolicySpec::Logits { vocab, dtype },
        };
        Ok(Variant {
            request: PlanRequest {
                loss: self.loss.clone().into(),
                // The baseline is dense.
                implementation: match variant.pass {
                    ProgramKind::Materialised => Implementation::Reference,
                    _ => variant.implementation,
                },
                tiling: variant.tiling.clone(),
                max_tokens: batch.saturating_mul(tokens),
                policy,
                gradients: variant.gradients,
            },
            numerics: variant.numerics,
            mosaic: variant.mosaic.map(|MosaicConfig { time_block, vocab_block }| MosaicBlocks {
                batch,
                time_block,
                vocab_block,
            }),
            mesh: self.mesh,
            pass: variant.pass.pass(policy),
            build: variant.pass.build(),
        })
    }
}

fn config(key: impl Into<String>, expected: impl ToString, found: impl ToString) -> Error {
    Error::Config { key: key.into(), expected: expected.to_string(), found: found.to_string() }
}

#[cfg(test)]
mod tests;
