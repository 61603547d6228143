//! Arguments that subcommands share: configurations of `configs/bench/`, and the target devices of `grpo aot` and `grpo plan`.

use crate::layers;
use crate::output::emit_document;
use anyhow::{Context, bail};
use grpo_backend_tpu::aot::{Compiler, Target, user_cache};
use grpo_bench::config::BenchConfig;
use grpo_bench::model::ModelBenchConfig;
use grpo_files::to_yaml;
use std::path::{Path, PathBuf};

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
        let default = ("configs/bench/fused.yaml (built in)", include_str!("../configs/fused.yaml"));
        resolve(self.config.as_deref(), &self.set, default)
    }

    /// Returns the target devices, with a plugin that exists.
    pub(crate) fn target(&self) -> anyhow::Result<Target> {
        let target = Target::parse(&self.target)?;
        grpo_backend_tpu::plugins::find(target.kind(), self.plugin.as_deref())?;
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

/// The configurations of `grpo bench` and `grpo gradcheck`.
#[derive(Debug, clap::Args)]
pub(crate) struct BenchFiles {
    /// YAML or JSON files, as in configs/bench/ [default: the built-in configs/bench/s2.yaml].
    #[arg(value_name = "CONFIG")]
    config: Vec<PathBuf>,
    /// Set one key of every configuration, after the file and the environment; repeatable.
    #[arg(long, value_name = "A.B=VALUE")]
    set: Vec<String>,
    /// Print the resolved configurations as YAML and exit.
    #[arg(long)]
    print_config: bool,
}

/// The default of [`BenchFiles`]: its name and its text.
const DEFAULT: (&str, &str) = ("configs/bench/s2.yaml (built in)", include_str!("../configs/s2.yaml"));

impl BenchFiles {
    /// Returns the configuration of a model's benchmark; `None` for configurations of the loss.
    pub(crate) fn of_model(&self) -> anyhow::Result<Option<ModelBenchConfig>> {
        let mut fitting = vec![];
        for file in &self.config {
            let layers = layers::of_file(Some(file), &self.set, DEFAULT)?;
            if ModelBenchConfig::fits(&layers) {
                fitting.push((file, layers));
            }
        }
        let Some((file, layers)) = fitting.pop() else { return Ok(None) };
        if self.config.len() > 1 {
            bail!(
                "{}: expected one configuration of a model, without others, got {}",
                file.display(),
                self.config.len()
            );
        }
        let config: ModelBenchConfig = layers.resolve()?;
        config.validate().with_context(|| file.display().to_string())?;
        Ok(Some(config))
    }

    /// Prints a configuration if that was asked for.
    pub(crate) fn is_printed(&self, config: &ModelBenchConfig) -> anyhow::Result<bool> {
        if self.print_config {
            emit_document(&to_yaml(config)?)?;
        }
        Ok(self.print_config)
    }

    /// Returns every file's configuration after `change`; `None` if they were printed instead.
    pub(crate) fn resolve(
        &self,
        change: impl Fn(&mut BenchConfig) -> anyhow::Result<()>,
    ) -> anyhow::Result<Option<Vec<BenchConfig>>> {
        let files = if self.config.is_empty() { vec![None] } else { self.config.iter().map(Some).collect() };
        let configs = files.into_iter().map(|file| {
            let mut config = resolve(file.map(PathBuf::as_path), &self.set, DEFAULT)?;
            change(&mut config)?;
            Ok(config)
        });
        let configs = configs.collect::<anyhow::Result<Vec<_>>>()?;
        if !self.print_config {
            return Ok(Some(configs));
        }
        let texts = configs.iter().map(to_yaml).collect::<Result<Vec<_>, _>>()?;
        emit_document(&texts.join("---\n"))?;
        Ok(None)
    }
}

/// Returns the checked configuration: defaults < `file` (or `default`, name and text) < environment < `set`.
fn resolve(file: Option<&Path>, set: &[String], default: (&str, &str)) -> anyhow::Result<BenchConfig> {
    let config: BenchConfig = layers::resolve(file, set, default)?;
    config.validate().with_context(|| file.map_or(default.0.into(), |path| path.display().to_string()))?;
    Ok(config)
}
