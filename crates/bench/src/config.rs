//! What is compared with what: problems, and variants of solving them. `grpo aot` and `grpo plan` compile the variants of
//! one problem, `grpo bench` runs them all.
//!
//! Keys are those of the loss, of plans and of backends. A key that a variant's backend does not offer is an error there,
//! never passed over.

use crate::error::{Error, Result};
use crate::measure::Rounds;
use backend_cpu::{Isa, most_threads};
use backend_tpu::aot::Variant;
use backend_tpu::plugins::Kind;
use backend_tpu::program::{Mesh, MosaicBlocks, Numerics, ProgramKind};
use grpo_core::{Dtype, GradientSpec, HeadLayout, Implementation, LossConfig, PlanRequest, PolicySpec, Tiling};
use grpo_sinks::{LoggingConfig, WandbConfig};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Problems with variants of solving them: every one of `shapes` in every one of `dtypes`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BenchConfig {
    /// Shows in reports.
    pub name: String,
    /// Sizes.
    pub shape: ShapeConfig,
    /// Several problems instead of one, by name: what each changes in `shape`.
    pub shapes: Option<BTreeMap<String, ShapeChange>>,
    /// Of hidden states and head, or of the logits.
    pub dtype: Dtype,
    /// Several problems instead of one: one for each.
    pub dtypes: Option<Vec<Dtype>>,
    /// How the head lies in memory.
    pub layout: HeadLayout,
    /// What the loss is.
    pub loss: LossConfig,
    /// What the policy and the old policy are.
    pub inputs: InputsConfig,
    /// How often a variant runs.
    pub rounds: Rounds,
    /// Of variants that name none: `cpu`, `pjrt:cpu`, `pjrt:tpu`, `pjrt:cuda`.
    pub backend: String,
    /// Devices over which tokens and vocabulary are split.
    pub mesh: Mesh,
    /// Metrics beside metrics.jsonl, where they are logged ([`crate::log`]).
    pub logging: LoggingConfig,
    /// Metrics for Weights & Biases, where they are logged.
    pub wandb: WandbConfig,
    /// By name, which is made of letters, digits, `_` and `-`. At least one.
    pub variants: Option<BTreeMap<String, VariantConfig>>,
}

impl Default for BenchConfig {
    fn default() -> Self {
        Self {
            name: "bench".into(),
            shape: ShapeConfig::default(),
            shapes: None,
            dtype: Dtype::Bf16,
            dtypes: None,
            layout: HeadLayout::default(),
            loss: LossConfig::default(),
            inputs: InputsConfig::default(),
            rounds: Rounds::default(),
            backend: BackendName::Cpu.to_string(),
            mesh: Mesh::default(),
            logging: LoggingConfig::default(),
            wandb: WandbConfig::default(),
            variants: None,
        }
    }
}

/// Sizes of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShapeConfig {
    /// B: sequences.
    pub batch: usize,
    /// T: tokens of each.
    pub tokens: usize,
    /// H: size of a hidden state; without it (`null`), logits are given.
    pub hidden: Option<usize>,
    /// V: vocabulary.
    pub vocab: usize,
}

impl Default for ShapeConfig {
    fn default() -> Self {
        Self { batch: 1, tokens: 8192, hidden: Some(4096), vocab: 151_936 }
    }
}

/// Sizes that differ from `shape`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShapeChange {
    /// B.
    pub batch: Option<usize>,
    /// T.
    pub tokens: Option<usize>,
    /// H; a problem with given logits has none.
    pub hidden: Option<usize>,
    /// V.
    pub vocab: Option<usize>,
}

/// What the policy and the old policy are. Every number may be 0.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InputsConfig {
    /// Same seed, same bits.
    pub seed: u64,
    /// Standard deviation of the logits, in nats.
    pub logit_std: f64,
    /// Of the noise on old log-probabilities. At 0.15, about every fifth ratio is outside of 1 +- 0.2; at 0 the old policy is
    /// the present one, but for rounding.
    pub old_logp_noise: f64,
    /// Of the noise on reference log-probabilities, where the loss has a KL.
    pub ref_logp_noise: f64,
    /// Without old log-probabilities: every ratio is exactly 1.
    pub on_policy: bool,
}

impl Default for InputsConfig {
    fn default() -> Self {
        Self { seed: 0, logit_std: 2.0, old_logp_noise: 0.15, ref_logp_noise: 0.1, on_policy: false }
    }
}

/// A backend that benchmarks know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendName {
    /// `backend-cpu`.
    Cpu,
    /// Devices of a PJRT plugin.
    Pjrt(Kind),
}

impl BackendName {
    /// Reads `cpu`, `pjrt:cpu`, `pjrt:tpu`, `pjrt:cuda`.
    ///
    /// # Errors
    /// [`Error::Config`] for another name; `key` is where it stands.
    pub fn parse(key: &str, name: &str) -> Result<Self> {
        let kind = || Kind::ALL.into_iter().find(|kind| name.strip_prefix("pjrt:") == Some(kind.name()));
        match name {
            "cpu" => Ok(Self::Cpu),
            _ => kind().map(Self::Pjrt).ok_or_else(|| {
                config(
                    key,
                    "a backend that benchmarks run on (cpu, pjrt:cpu, pjrt:tpu, pjrt:cuda)",
                    format!("`{name}`"),
                )
            }),
        }
    }

    /// Whether its devices and their memory can be had by one process only.
    pub fn is_exclusive(self) -> bool {
        matches!(self, Self::Pjrt(Kind::Tpu | Kind::Cuda))
    }
}

impl std::fmt::Display for BackendName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Pjrt(kind) => write!(f, "pjrt:{}", kind.name()),
        }
    }
}

/// One way to solve the problem.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VariantConfig {
    /// Instead of the configuration's.
    pub backend: Option<String>,
    /// Instead of the problem's.
    pub dtype: Option<Dtype>,
    /// On the CPU; 0 is one per core, and [`most_threads`] are the most.
    pub threads: usize,
    /// Of this CPU, the instruction set whose kernels are used: `portable`, `avx2`, ...; none: the fastest that there is.
    pub isa: Option<String>,
    /// On the CPU, what dL/dlogits is rounded to before it is multiplied into gradients; none: the dtype of the inputs.
    pub dlogits: Option<Dtype>,
    /// Whether the variant's process takes large allocations in huge pages (glibc's `malloc.hugetlb`).
    pub huge_pages: bool,
    /// Somebody else's program, with its arguments, that speaks the protocol of [`crate::protocol`].
    pub command: Option<Vec<String>>,
    /// How the loss is computed.
    pub implementation: Implementation,
    /// Scores, gradients, gradients in place of the given logits, or the baseline that automatic differentiation makes.
    pub pass: ProgramKind,
    /// Gradients to make; without `lm_head` the head is frozen. Of given logits, `hidden` is theirs.
    pub gradients: GradientSpec,
    /// What is rounded, and whether the entropy is computed.
    pub numerics: Numerics,
    /// Memory against time.
    pub tiling: Tiling,
    /// For given logits on a TPU: kernels with blocks of these sizes instead of XLA's own code.
    pub mosaic: Option<MosaicConfig>,
}

/// Blocks of the TPU kernels, multiples of 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MosaicConfig {
    /// Tokens of a block.
    pub time_block: usize,
    /// Vocabulary entries of a block.
    pub vocab_block: usize,
}

impl Default for MosaicConfig {
    fn default() -> Self {
        Self { time_block: 256, vocab_block: 2048 }
    }
}

impl ShapeConfig {
    /// N.
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
        let mesh = [("mesh.data", self.mesh.data), ("mesh.vocab", self.mesh.vocab)];
        let sizes = sizes.map(|(key, size)| (format!("shape.{key}"), size)).into_iter();
        for (key, size) in sizes.chain(mesh.map(|(key, size)| (key.to_owned(), size))) {
            // Programs index with i32.
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

    /// Its problems one by one, each a configuration of its own, by names made of this one's, the shape's and the dtype's.
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

    /// The backend of the variant called `name`.
    ///
    /// # Errors
    /// [`Error::Config`] for a name that is not known.
    pub fn backend(&self, name: &str) -> Result<BackendName> {
        let of_variant = self.variants.as_ref().and_then(|variants| variants.get(name)?.backend.as_deref());
        match of_variant {
            Some(backend) => BackendName::parse(&format!("variants.{name}.backend"), backend),
            None => BackendName::parse("backend", &self.backend),
        }
    }

    /// Of the inputs of the variant called `name`.
    pub fn dtype_of(&self, name: &str) -> Dtype {
        self.variants.as_ref().and_then(|variants| variants.get(name)?.dtype).unwrap_or(self.dtype)
    }

    /// Whether the variant has a program, which is all that can be known without a compiler.
    ///
    /// # Errors
    /// Those of [`BenchConfig::variant`] and of the program, with the variant's name.
    pub fn check(&self, name: &str) -> Result<()> {
        let variant = self.variant(name)?;
        let program = variant.spec().and_then(|spec| variant.program(&spec));
        program.map(drop).map_err(|error| of_variant(name, error.into()))
    }

    /// Names of the variants, in order.
    pub fn names(&self) -> Vec<&str> {
        self.variants.iter().flat_map(|variants| variants.keys()).map(String::as_str).collect()
    }

    /// The variant called `name`, ready to be compiled.
    ///
    /// # Errors
    /// [`Error::Config`] that lists the names, or says what the variant cannot have.
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
                loss: self.loss.clone(),
                implementation: variant.implementation,
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
            program: variant.pass,
        })
    }
}

fn config(key: impl Into<String>, expected: impl ToString, found: impl ToString) -> Error {
    Error::Config { key: key.into(), expected: expected.to_string(), found: found.to_string() }
}

fn of_variant(name: &str, error: Error) -> Error {
    Error::Variant { name: name.to_owned(), source: Box::new(error) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_files::{Layers, to_yaml};

    fn read(text: &str) -> Result<BenchConfig> {
        let config: BenchConfig = Layers::new().text("text", text)?.resolve()?;
        config.validate()?;
        config.names().iter().try_for_each(|name| config.check(name))?;
        Ok(config)
    }

    fn refused(text: &str) -> String {
        let error = read(text).expect_err(text);
        let mut words = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(error) = source {
            words = format!("{words}: {error}");
            source = error.source();
        }
        words
    }

    #[test]
    fn the_files_of_the_repository_are_legal() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/bench");
        let mut files = 0;
        for entry in std::fs::read_dir(folder).expect("the folder is there") {
            let path = entry.expect("an entry").path();
            let config: BenchConfig = Layers::new().file(&path).expect("YAML").resolve().expect("a configuration");
            config.validate().unwrap_or_else(|error| panic!("{}: {error:?}", path.display()));
            for (name, case) in config.cases() {
                // What a compiler would say; of this CPU's variants that is known when they are planned.
                let compiled = |variant: &&&str| case.backend(variant).is_ok_and(|b| b != BackendName::Cpu);
                let checked = case.names().iter().filter(compiled).try_for_each(|variant| case.check(variant));
                checked.unwrap_or_else(|error| panic!("{name} of {}: {error:?}", path.display()));
            }
            let again = Layers::new().text("printed", &to_yaml(&config).expect("YAML")).expect("YAML");
            assert_eq!(again.resolve::<BenchConfig>().expect("a configuration"), config);
            files += 1;
        }
        assert!(files >= 11, "{files} files");
    }

    #[test]
    fn variants_can_be_changed_and_added_from_outside() {
        let layers = Layers::new().text("file", "variants: { fused: { tiling: { token_chunk: 512 } } }").expect("YAML");
        let set = ["variants.fused.tiling.token_chunk=1024", "variants.dense.implementation=reference"];
        let config: BenchConfig = layers.set(&set.map(String::from)).expect("legal").resolve().expect("legal");
        assert_eq!(config.names(), ["dense", "fused"]);
        assert_eq!(config.variant("fused").expect("there").request.tiling.token_chunk, Some(1024));
    }

    #[test]
    fn a_problem_for_every_shape_and_dtype() {
        let text = "name: scaling\nshape: { batch: 2, tokens: 4, hidden: 8, vocab: 16 }\nshapes: { small: {}, tall: { tokens: 64 } }
dtypes: [bf16, f32]\nvariants: { a: {}, b: { dtype: bf16, backend: 'pjrt:cpu' } }";
        let config: BenchConfig = Layers::new().text("text", text).expect("YAML").resolve().expect("legal");
        config.validate().expect("legal");
        let cases = config.cases();
        let names: Vec<&str> = cases.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["scaling-small-bf16", "scaling-small-f32", "scaling-tall-bf16", "scaling-tall-f32"]);
        let tall = &cases[3].1;
        assert_eq!((tall.shape.tokens, tall.shape.hidden, tall.dtype), (64, Some(8), Dtype::F32));
        assert_eq!((tall.dtype_of("a"), tall.dtype_of("b")), (Dtype::F32, Dtype::Bf16));
        assert_eq!(tall.backend("a").expect("legal"), BackendName::Cpu);
        assert_eq!(tall.backend("b").expect("legal").to_string(), "pjrt:cpu");
        // One problem at a time is compiled.
        assert!(config.variant("a").expect_err("four problems").to_string().contains("small, tall, bf16, f32"));
    }

    #[test]
    fn zero_is_a_legal_value_of_every_knob() {
        let text =
            "inputs: { seed: 0, logit_std: 0, old_logp_noise: 0, ref_logp_noise: 0 }\nrounds: { warmup: 0, steps: 0 }
loss: { epsilon_low: 0, epsilon_high: 0, beta: 0 }\nvariants: { a: { threads: 0 } }";
        let config = read(text).expect("legal");
        assert_eq!((config.loss.epsilon_high, config.rounds.steps, config.inputs.logit_std), (Some(0.0), 0, 0.0));
    }

    #[test]
    fn what_has_no_program_is_named() {
        for (text, words) in [
            ("", &["variants", "at least one"][..]),
            ("shape: { tokenz: 3 }", &["shape.tokenz", "tokens"]),
            ("shape: { tokens: 0 }\nvariants: { a: {} }", &["shape.tokens"]),
            ("variants: { a: { tilling: {} } }", &["variants.a", "tilling", "tiling"]),
            ("variants: { a.b: {} }", &["a.b"]),
            ("backend: gpu\nvariants: { a: {} }", &["backend", "`gpu`", "pjrt:cuda"]),
            ("variants: { a: { backend: tpu } }", &["variants.a.backend", "`tpu`", "pjrt:tpu"]),
            ("variants: { a: { threads: 100000 } }", &["variants.a.threads", "at most", "100000"]),
            ("variants: { a: { isa: avx1 } }", &["variants.a.isa", "`avx1`", "avx2"]),
            ("variants: { a: { command: [] } }", &["variants.a.command"]),
            ("inputs: { old_logp_noise: -1 }\nvariants: { a: {} }", &["inputs.old_logp_noise", "-1"]),
            ("shapes: { big: { tokens: 0 } }\nvariants: { a: {} }", &["shape.tokens"]),
            ("dtypes: []\nvariants: { a: {} }", &["dtypes", "at least one"]),
            ("variants: { a: { pass: gradient_in_place } }", &["variant `a`", "given logits"]),
            ("dtype: f32\nvariants: { a: { numerics: { logits: bf16 } } }", &["variant `a`", "bf16"]),
            ("shape: { hidden: null }\nvariants: { a: {} }", &["variant `a`", "no head"]),
            ("variants: { a: { tiling: { workspace_budget: 10 } } }", &["variant `a`", "budget"]),
        ] {
            let found = refused(text);
            assert!(words.iter().all(|word| found.contains(word)), "{text}: {found}");
        }
    }
}
