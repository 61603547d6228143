//! Arguments that `grpo aot` and `grpo plan` share: a configuration of `configs/bench/` and the target devices.

use crate::layers;
use anyhow::Context;
use backend_tpu::aot::{Compiler, Target, user_cache};
use grpo_bench::config::BenchConfig;
use std::path::{Path, PathBuf};

/// The default configuration.
const DEFAULT_CONFIG: (&str, &str) =
    ("configs/bench/fused.yaml (built in)", include_str!("../../../configs/bench/fused.yaml"));

/// A configuration and the target devices.
#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    /// YAML or JSON file, as in configs/bench/ [default: the built-in configs/bench/fused.yaml].
    #[arg(value_name = "CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// Set one key, after the file and the environment; repeatable.
    #[arg(long, value_name = "A.B=VALUE")]
    pub(crate) set: Vec<String>,
    /// Print the resolved configuration as YAML and exit.
    #[arg(long)]
    pub(crate) print_config: bool,
    /// Devices: a TPU slice (v6e:2x4, v5p:2x2x1, v6e) or a GPU (a100, h100, h200, b200).
    #[arg(long, required_unless_present = "print_config", default_value = "", hide_default_value = true)]
    pub(crate) target: String,
    /// The PJRT plugin [default: what GRPO_PJRT_PLUGIN names, or what `grpo plugin install` has installed].
    #[arg(long, value_name = "FILE")]
    pub(crate) plugin: Option<PathBuf>,
}

impl BenchArgs {
    /// Returns the checked configuration: defaults < file < environment < `--set`.
    pub(crate) fn resolve(&self) -> anyhow::Result<BenchConfig> {
        resolve(self.config.as_deref(), &self.set, DEFAULT_CONFIG)
    }

    /// Returns the target devices, with a plugin that exists.
    pub(crate) fn target(&self) -> anyhow::Result<Target> {
        let target = Target::parse(&self.target)?;
        backend_tpu::plugins::find(target.kind(), self.plugin.as_deref())?;
        Ok(target)
    }

    /// Returns the compiler for `target`. It caches reports, unless `recompile` is set.
    pub(crate) fn compiler(&self, target: Target, recompile: bool) -> anyhow::Result<Compiler> {
        let compiler = Compiler::open(target, self.plugin.as_deref())?;
        Ok(match user_cache().filter(|_| !recompile) {
            Some(cache) => compiler.with_cache(cache),
            None => compiler,
        })
    }
}

/// Returns the checked configuration: defaults < `file` (or `default`, name and text) < environment < `set`.
pub(crate) fn resolve(file: Option<&Path>, set: &[String], default: (&str, &str)) -> anyhow::Result<BenchConfig> {
    let config: BenchConfig = layers::resolve(file, set, default)?;
    config.validate().with_context(|| file.map_or(default.0.into(), |path| path.display().to_string()))?;
    Ok(config)
}
