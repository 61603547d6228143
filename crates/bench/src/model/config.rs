//! The configuration of a model's benchmark: sizes of generation and of update.

use super::report::Work;
use crate::error::{Error, Result};
use grpo_backend_cpu::most_threads;
use grpo_core::Dtype;
use grpo_files::Layers;
use grpo_models::ModelConfig;
use grpo_sinks::{LoggingConfig, WandbConfig};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use std::path::{Path, PathBuf};

impl grpo_files::Configuration for ModelBenchConfig {}

/// A benchmark of a model folder: every combination of sizes and dtypes is a problem. At least one of `generation` and `update` is set.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelBenchConfig {
    /// The name of the configuration in reports.
    #[default("model".into())]
    pub name: String,
    /// The Hugging Face model folder; required.
    pub model: Option<PathBuf>,
    /// Sampling; `null` measures none.
    pub generation: Option<GenerationConfig>,
    /// An optimizer step; `null` measures none.
    pub update: Option<UpdateConfig>,
    /// The number of measurements of every system; each has a new process.
    #[default(3)]
    pub rounds: usize,
    /// Threads; 0 is one per core, the maximum is [`most_threads`].
    pub threads: usize,
    /// Other sinks than metrics.jsonl, if metrics are logged ([`crate::log`]).
    pub logging: LoggingConfig,
    /// Settings of Weights & Biases, if metrics are logged.
    pub wandb: WandbConfig,
}

/// Sizes of sampling.
#[derive(Clone, Debug, SmartDefault, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GenerationConfig {
    /// Numbers of sequences that decode together.
    #[default(vec![1, 16, 64])]
    pub rows: Vec<usize>,
    /// Tokens of a prompt.
    #[default(vec![16, 512])]
    pub prompts: Vec<usize>,
    /// Tokens of a completion, at least 2.
    #[default(48)]
    pub tokens: usize,
    /// Dtypes of the products; for peers, also of the weights.
    #[default(vec![Dtype::F32, Dtype::Bf16])]
    pub dtypes: Vec<Dtype>,
}

/// Sizes of an optimizer step on all weights.
#[derive(Clone, Debug, SmartDefault, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UpdateConfig {
    /// The number of sequences.
    #[default(16)]
    pub rows: usize,
    /// Tokens of a prompt.
    #[default(16)]
    pub prompt: usize,
    /// Tokens of a completion.
    #[default(64)]
    pub completion: usize,
    /// The number of micro-batches of a step, at most one per sequence.
    #[default(1)]
    pub micro_batches: usize,
    /// Dtypes of the products. Weights, gradients and moments are in f32.
    #[default(vec![Dtype::F32, Dtype::Bf16])]
    pub dtypes: Vec<Dtype>,
}

impl ModelBenchConfig {
    /// Returns `true` if the layers are for a model's benchmark, and not for a [`BenchConfig`](crate::config::BenchConfig).
    pub fn fits(layers: &Layers) -> bool {
        layers.keys().any(|key| ["generation", "update"].contains(&key))
    }

    /// Checks everything that is independent of the model.
    ///
    /// # Errors
    /// [`Error::Config`] that names the key.
    pub fn validate(&self) -> Result<()> {
        let generation_sizes = self.generation.iter().flat_map(|of| {
            let rows = of.rows.iter().map(|rows| ("generation.rows", *rows, 1));
            let prompts = of.prompts.iter().map(|prompt| ("generation.prompts", *prompt, 1));
            // The first token is not part of the rate.
            rows.chain(prompts).chain([("generation.tokens", of.tokens, 2)])
        });
        let update_sizes = self.update.iter().flat_map(|of| {
            [
                ("update.rows", of.rows, 1),
                ("update.prompt", of.prompt, 1),
                ("update.completion", of.completion, 1),
                ("update.micro_batches", of.micro_batches, 1),
            ]
        });
        for (key, size, least) in generation_sizes.chain(update_sizes).chain([("rounds", self.rounds, 1)]) {
            if size < least || i32::try_from(size).is_err() {
                return Err(config(key, format!("a number from {least} to 2^31 - 1"), size));
            }
        }
        for (key, values) in [
            ("generation.rows", self.generation.as_ref().map(|of| &of.rows)),
            ("generation.prompts", self.generation.as_ref().map(|of| &of.prompts)),
        ] {
            distinct(key, values.map(Vec::as_slice))?;
        }
        distinct("generation.dtypes", self.generation.as_ref().map(|of| of.dtypes.as_slice()))?;
        distinct("update.dtypes", self.update.as_ref().map(|of| of.dtypes.as_slice()))?;
        if let Some(of) = self.update.as_ref().filter(|of| of.micro_batches > of.rows) {
            let expected = format!("at most one per sequence of update.rows, {}", of.rows);
            return Err(config("update.micro_batches", expected, of.micro_batches));
        }
        if self.threads > most_threads() {
            let expected = format!("at most {} threads on this machine", most_threads());
            return Err(config("threads", expected, self.threads));
        }
        if self.generation.is_none() && self.update.is_none() {
            return Err(config("generation, update", "at least one of both", "null"));
        }
        Ok(())
    }

    /// Returns the model folder.
    ///
    /// # Errors
    /// [`Error::Config`] if the key is missing, or its value is no folder.
    pub fn folder(&self) -> Result<&Path> {
        let expected = "a Hugging Face model folder, e.g. `--set model=Qwen2.5-0.5B`";
        match &self.model {
            Some(path) if path.is_dir() => Ok(path),
            Some(path) if path.exists() => Err(config("model", expected, format!("the file {}", path.display()))),
            Some(path) => Err(config("model", expected, format!("{}, which does not exist", path.display()))),
            None => Err(config("model", expected, "none")),
        }
    }

    /// Checks that the sequences fit the context of `model`.
    ///
    /// # Errors
    /// [`Error::Config`] that names the key.
    pub fn check_context(&self, model: &ModelConfig) -> Result<()> {
        let generation_sizes = self.generation.iter().flat_map(|of| {
            of.prompts.iter().map(|prompt| ("generation.prompts, generation.tokens", *prompt, of.tokens))
        });
        let update_sizes = self.update.iter().map(|of| ("update.prompt, update.completion", of.prompt, of.completion));
        let context = model.max_position_embeddings;
        match generation_sizes.chain(update_sizes).find(|(_, prompt, tokens)| prompt + tokens > context) {
            Some((key, prompt, tokens)) => {
                let expected = format!("together at most {context}, the model's max_position_embeddings");
                Err(config(key, expected, format!("{prompt} + {tokens}")))
            }
            None => Ok(()),
        }
    }

    /// Returns the problems with their names, in order of measurement: by dtype, generation before update.
    pub fn cases(&self) -> Vec<(String, Dtype, Work)> {
        let mut cases = vec![];
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let named = |of: String| format!("{}-{}-{of}", self.name, dtype.name());
            for of in self.generation.iter().filter(|of| of.dtypes.contains(&dtype)) {
                for (rows, prompt) in of.rows.iter().flat_map(|rows| of.prompts.iter().map(move |p| (*rows, *p))) {
                    let work = Work::Generation { rows, prompt, tokens: of.tokens };
                    cases.push((named(format!("rows{rows}-prompt{prompt}")), dtype, work));
                }
            }
            for of in self.update.iter().filter(|of| of.dtypes.contains(&dtype)) {
                let UpdateConfig { rows, prompt, completion, micro_batches, .. } = *of;
                let work = Work::Update { rows, prompt, completion, micro_batches };
                cases.push((named("update".into()), dtype, work));
            }
        }
        cases
    }
}

/// Checks that a list has values, and no value twice.
fn distinct<T: PartialEq + std::fmt::Debug>(key: &str, values: Option<&[T]>) -> Result<()> {
    let Some(values) = values else { return Ok(()) };
    match values.iter().enumerate().find(|(i, value)| values[..*i].contains(value)) {
        _ if values.is_empty() => Err(config(key, "at least one value", "none")),
        Some((_, value)) => Err(config(key, "different values", format!("{value:?} twice").to_lowercase())),
        None => Ok(()),
    }
}

fn config(key: &str, expected: impl ToString, found: impl ToString) -> Error {
    Error::Config { key: key.into(), expected: expected.to_string(), found: found.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<ModelBenchConfig> {
        let config: ModelBenchConfig = Layers::new().text("text", text)?.resolve()?;
        config.validate()?;
        Ok(config)
    }

    #[test]
    fn problems_are_sizes_by_dtypes() {
        let text = "{name: m, generation: {rows: [1, 4], prompts: [8], dtypes: [bf16, f32]}, update: {dtypes: [bf16]}}";
        let names: Vec<String> = read(text).expect("legal").cases().into_iter().map(|(name, ..)| name).collect();
        let expected = ["m-f32-rows1-prompt8", "m-f32-rows4-prompt8", "m-bf16-rows1-prompt8", "m-bf16-rows4-prompt8"];
        assert_eq!(names[..4], expected);
        assert_eq!(names[4..], ["m-bf16-update"]);
    }

    #[test]
    fn sections_distinguish_benchmarks_of_models() {
        let layers = |text: &str| Layers::new().text("text", text).expect("YAML");
        assert!(ModelBenchConfig::fits(&layers("generation: {}")) && ModelBenchConfig::fits(&layers("update: null")));
        assert!(!ModelBenchConfig::fits(&layers("variants: { fused: {} }")));
    }

    #[test]
    fn illegal_sizes_are_named() {
        for (text, words) in [
            ("{}", &["generation, update"][..]),
            ("generation: {rows: [16, 0]}", &["generation.rows", "from 1", "got 0"]),
            ("generation: {rows: []}", &["generation.rows", "none"]),
            ("generation: {rows: [2, 2]}", &["generation.rows", "2 twice"]),
            ("generation: {prompts: [0]}", &["generation.prompts"]),
            ("generation: {tokens: 1}", &["generation.tokens", "from 2"]),
            ("generation: {dtypes: [f32, f32]}", &["generation.dtypes", "f32 twice"]),
            ("generation: {dtypes: []}", &["generation.dtypes", "none"]),
            ("{generation: {}, rounds: 0}", &["rounds"]),
            ("{generation: {}, threads: 100000}", &["threads", "100000"]),
            ("update: {rows: 4, micro_batches: 5}", &["update.micro_batches", "at most", "4"]),
            ("update: {completion: 0}", &["update.completion"]),
            ("update: {prompts: 1}", &["prompts"]),
        ] {
            let error = read(text).expect_err(text);
            let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            let found = format!("{error}: {source}");
            assert!(words.iter().all(|word| found.contains(word)), "{text}: {found}");
        }
    }

    #[test]
    fn sequences_beyond_the_context_are_named() {
        let model = ModelConfig { max_position_embeddings: 64, ..ModelConfig::default() };
        let check = |text: &str| read(text).expect("legal").check_context(&model).map_err(|error| error.to_string());
        assert_eq!(check("{generation: {prompts: [16], tokens: 48}, update: {prompt: 1, completion: 63}}"), Ok(()));
        for (text, key) in [
            ("generation: {prompts: [16, 17], tokens: 48}", "generation.prompts"),
            ("update: {prompt: 1, completion: 64}", "update.completion"),
        ] {
            let error = check(text).expect_err(text);
            assert!(error.contains(key) && error.contains("at most 64"), "{error}");
        }
    }

    #[test]
    fn a_model_must_be_a_folder() {
        let error = |model: Option<&str>| {
            let config = ModelBenchConfig { model: model.map(Into::into), ..ModelBenchConfig::default() };
            config.folder().map(drop).expect_err("no folder").to_string()
        };
        assert!(error(None).contains("`model`"));
        assert!(error(Some("/no/such/folder")).contains("does not exist"));
        assert!(error(Some(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))).contains("the file"));
    }
}
