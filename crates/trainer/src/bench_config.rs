//! What is compared with what: one problem, and variants of solving it. `grpo aot` and `grpo plan` compile them, `grpo
//! bench` runs them.
//!
//! Keys are those of the loss, of plans and of backends; none is of one backend only, and a variant that a backend does not
//! offer is an error there.

use crate::error::{Error, Result};
use backend_tpu::aot::{Variant, What};
use backend_tpu::program::{Mesh, MosaicBlocks, Numerics};
use grpo_core::{Dtype, GradientSpec, HeadLayout, Implementation, LossConfig, PlanRequest, PolicySpec, Tiling};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A problem with variants of solving it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BenchConfig {
    /// Shows in reports.
    pub name: String,
    /// Sizes.
    pub shape: ShapeConfig,
    /// Of hidden states and head, or of the logits.
    pub dtype: Dtype,
    /// How the head lies in memory.
    pub layout: HeadLayout,
    /// What the loss is.
    pub loss: LossConfig,
    /// Devices over which tokens and vocabulary are split.
    pub mesh: Mesh,
    /// By name, which is made of letters, digits, `_` and `-`. At least one.
    pub variants: Option<BTreeMap<String, VariantConfig>>,
}

impl Default for BenchConfig {
    fn default() -> Self {
        Self {
            name: "bench".into(),
            shape: ShapeConfig::default(),
            dtype: Dtype::Bf16,
            layout: HeadLayout::default(),
            loss: LossConfig::default(),
            mesh: Mesh::default(),
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

/// One way to solve the problem.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VariantConfig {
    /// How the loss is computed.
    pub implementation: Implementation,
    /// Scores, gradients, gradients in place of the given logits, or the baseline that automatic differentiation makes.
    pub pass: What,
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
        if self.names().is_empty() {
            return Err(config("variants", "at least one, e.g. `variants: { fused: {} }`", "none"));
        }
        let legal = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        for name in self.names() {
            if name.is_empty() || !name.chars().all(legal) {
                return Err(config("variants", "names of letters, digits, `_` and `-`", format!("`{name}`")));
            }
        }
        Ok(())
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
        let ShapeConfig { batch, tokens, hidden, vocab } = self.shape;
        let policy = match hidden {
            Some(hidden) => {
                let bias = variant.gradients.bias;
                PolicySpec::Hidden { hidden, vocab, dtype: self.dtype, layout: self.layout, bias }
            }
            None => PolicySpec::Logits { vocab, dtype: self.dtype },
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
            what: variant.pass,
        })
    }
}

fn config(key: impl Into<String>, expected: impl ToString, found: impl ToString) -> Error {
    Error::Config { key: key.into(), expected: expected.to_string(), found: found.to_string() }
}

fn of_variant(name: &str, error: Error) -> Error {
    Error::Layer { origin: format!("variant `{name}`"), source: Box::new(error) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config_layers::{Layers, to_yaml};

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
            let checked =
                config.validate().and_then(|()| config.names().iter().try_for_each(|name| config.check(name)));
            checked.unwrap_or_else(|error| panic!("{}: {error:?}", path.display()));
            let again = Layers::new().text("printed", &to_yaml(&config).expect("YAML")).expect("YAML");
            assert_eq!(again.resolve::<BenchConfig>().expect("a configuration"), config);
            files += 1;
        }
        assert!(files >= 5, "{files} files");
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
    fn what_has_no_program_is_named() {
        for (text, words) in [
            ("", &["variants", "at least one"][..]),
            ("shape: { tokenz: 3 }", &["shape.tokenz", "tokens"]),
            ("shape: { tokens: 0 }\nvariants: { a: {} }", &["shape.tokens"]),
            ("variants: { a: { tilling: {} } }", &["variants.a", "tilling", "tiling"]),
            ("variants: { a.b: {} }", &["a.b"]),
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
