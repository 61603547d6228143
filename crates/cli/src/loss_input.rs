//! Arguments that `grpo parity` and `grpo loss` share: a batch file and evaluation options.

use anyhow::{Context, bail};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use grpo_backend_cpu::CpuBackend;
use grpo_backend_tpu::PjrtBackend;
use grpo_backend_tpu::plugins::Kind;
use grpo_core::format::BatchLoss;
use grpo_core::{Backend, BatchFile, Dtype, Implementation};
use grpo_files::Layers;
use grpo_files::read_safetensors;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The names of the backends.
pub(crate) const BACKENDS: [&str; 4] = ["cpu", "pjrt:cpu", "pjrt:tpu", "pjrt:cuda"];

/// Options for evaluating a batch file.
#[derive(Debug, clap::Args)]
pub(crate) struct LossInput {
    /// Backend to evaluate on: cpu, pjrt:cpu, pjrt:tpu, pjrt:cuda.
    #[arg(long, default_value = "cpu")]
    backend: String,
    /// The PJRT plugin [default: what GRPO_PJRT_PLUGIN names, or what `grpo plugin install` has installed].
    #[arg(long, value_name = "FILE")]
    pub(crate) plugin: Option<PathBuf>,
    /// Round the policy's tensors to this dtype first [default: the file's own].
    #[arg(long, value_parser = dtypes())]
    pub(crate) dtype: Option<Dtype>,
    /// Loss configuration (YAML or JSON, as in configs/loss/) that replaces the file's own.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
}

/// Returns the parser of an option whose values are implementations and `others`.
pub(crate) fn implementations(others: &[&'static str]) -> PossibleValuesParser {
    PossibleValuesParser::new(Implementation::ALL.map(Implementation::name).into_iter().chain(others.iter().copied()))
}

/// Returns the parser of a dtype.
fn dtypes() -> impl TypedValueParser<Value = Dtype> {
    let single = PossibleValue::new("f32").aliases(["fp32", "float32"]);
    PossibleValuesParser::new([single, PossibleValue::new("bf16").alias("bfloat16")])
        .map(|name| if name.ends_with("32") { Dtype::F32 } else { Dtype::Bf16 })
}

impl LossInput {
    /// Opens the chosen backend.
    pub(crate) fn open(&self) -> anyhow::Result<Arc<dyn Backend>> {
        let name = &self.backend;
        if name == "cpu" {
            return Ok(Arc::new(CpuBackend::new()));
        }
        match Kind::ALL.into_iter().find(|kind| name.strip_prefix("pjrt:") == Some(kind.name())) {
            Some(kind) => Ok(Arc::new(PjrtBackend::open(kind, self.plugin.as_deref())?)),
            None => bail!("--backend: expected one of {}, got `{name}`", BACKENDS.join(", ")),
        }
    }

    /// Returns the loss that replaces the file's, if one was given.
    pub(crate) fn loss(&self) -> anyhow::Result<Option<BatchLoss>> {
        let Some(path) = &self.config else { return Ok(None) };
        let batch_loss: BatchLoss = Layers::new().file(path)?.resolve()?;
        batch_loss.loss.validate().with_context(|| path.display().to_string())?;
        Ok(Some(batch_loss))
    }
}

/// Reads a batch file.
pub(crate) fn read(path: &Path) -> anyhow::Result<BatchFile> {
    let bytes = read_safetensors(path).with_context(|| format!("cannot read {}", path.display()))?;
    BatchFile::parse(&bytes).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dtypes_have_the_names_of_torch_and_short_ones() {
        let command = || clap::Command::new("x").arg(clap::Arg::new("dtype").long("dtype").value_parser(dtypes()));
        let parsed = |name: &str| command().try_get_matches_from(["x", "--dtype", name]);
        for (names, dtype) in [(&["f32", "fp32", "float32"][..], Dtype::F32), (&["bf16", "bfloat16"], Dtype::Bf16)] {
            for name in names {
                assert_eq!(parsed(name).unwrap().get_one::<Dtype>("dtype"), Some(&dtype), "{name}");
            }
        }
        let error = parsed("float16").unwrap_err().to_string();
        assert!(error.contains("f32, bf16"), "{error}");
    }
}
