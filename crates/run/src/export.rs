//! Exports a trained policy as a folder for `transformers` or PEFT.

use crate::card::{Weights, model_card};
use crate::error::{Error, Result};
use crate::summary::Summary;
use grpo_models::{
    AdapterOptions, AdapterWriter, Dtype, ExportOptions, FolderWriter, ModelCard, ModelFolder, NamedTensor,
};
use grpo_policy::{Policy, StateGroup};
use grpo_run_config::{ModelSource, TrainConfig};
use grpo_setup::{export_policy, open_model};
use std::path::Path;

/// Writes the weights of `policy`, which was made from `config`, to the folder `target`. An existing folder is replaced if `replace` is
/// set. The README.md has the configuration without secrets and the numbers of `summary`. The folder appears complete or not at all.
///
/// With adapters, the folder is for PEFT, unless `export.merge_adapters` is set.
///
/// # Errors
/// [`Error::Model`] if a file cannot be written or a weight is not finite; [`Error::Trainer`] if the policy cannot export by the names of
/// `transformers`.
pub(crate) fn export(
    policy: &dyn Policy,
    config: &TrainConfig,
    target: &Path,
    replace: bool,
    summary: &Summary,
) -> Result<()> {
    let source = open_model(config)?;
    let folder = source.as_ref();
    let Some(shape) = folder.map(ModelFolder::config).or(config.model.shape()) else {
        return Err(Error::Text("export: expected a model, got none".to_owned()));
    };
    let base_model = match &config.model {
        ModelSource::Pretrained(name) => Some(name.clone()),
        ModelSource::New(_) => None,
    };
    let total = shape.parameters().iter().map(grpo_models::Parameter::len).sum();
    let text = model_card(config, summary, Weights { trained: policy.num_parameters(), total })?;
    let card = Some(ModelCard { base_model: base_model.clone(), text });
    let dtype = config.export.dtype.map(Dtype::from);
    match config.lora.as_ref().filter(|_| !config.export.merge_adapters) {
        Some(lora) => {
            let dtype = dtype.unwrap_or(Dtype::F32);
            let base_model = base_model.map(|name| absolute(&name)).transpose()?;
            let options = AdapterOptions { dtype, base_model, replace, card, ..AdapterOptions::default() };
            let mut writer = AdapterWriter::create(target, lora, shape, folder, options)?;
            policy.export_adapter(&mut |tensor: NamedTensor| Ok(writer.write(&tensor.name, &tensor.data)?))?;
            writer.finish()?;
        }
        None => {
            let source_dtype = folder.and_then(ModelFolder::dtype).filter(|dtype| *dtype == Dtype::Bf16);
            let options = ExportOptions {
                dtype: dtype.or(source_dtype).unwrap_or(Dtype::F32),
                max_shard_size: config.export.max_shard_size,
                replace,
                card,
                ..ExportOptions::default()
            };
            let merged = config.lora.as_ref().map(|lora| lora.merged_into(shape)).transpose()?;
            let mut writer = FolderWriter::create(target, merged.as_ref().unwrap_or(shape), folder, options)?;
            policy.export_model(&mut |tensor: NamedTensor| Ok(writer.write(&tensor.name, &tensor.data)?))?;
            writer.finish()?;
        }
    }
    Ok(())
}

/// Returns the absolute path of a folder here, so that PEFT finds the base of an adapter from any folder; other names are of the hub.
fn absolute(name: &str) -> Result<String> {
    if !Path::new(name).is_dir() {
        return Ok(name.to_owned());
    }
    let path = std::path::absolute(name).map_err(|e| grpo_files::Error::io("resolve", Path::new(name), e))?;
    Ok(path.to_string_lossy().into_owned())
}

/// Returns the policy that [`export`] writes instead of `policy`, if that one has quantised weights and its adapters are to be merged: the
/// weights of the model's folder with the same adapters.
///
/// # Errors
/// [`Error::Trainer`] if a policy fails.
pub(crate) fn unquantized(policy: &dyn Policy, config: &TrainConfig) -> Result<Option<Box<dyn Policy>>> {
    let merges = config.lora.is_some() && config.export.merge_adapters;
    let Some(quantization) = config.policy.quantization.filter(|_| merges) else { return Ok(None) };
    tracing::info!(
        "export.merge_adapters: the adapters are merged into the weights of the model's folder, not into the {} weights on which they were \
         trained",
        quantization.name()
    );
    let mut trained: Vec<NamedTensor> = Vec::new();
    policy.export(StateGroup::Weights(grpo_policy::Weights::Policy), &mut trained)?;
    let mut merged = export_policy(config, open_model(config)?.as_ref())?;
    merged.import_weights(&trained)?;
    Ok(Some(merged))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_absolute_bases_of_adapters_and_names_stay_names() {
        // Tests run in the folder of their package.
        let current = std::env::current_dir().unwrap();
        for (name, expected) in [
            ("src", current.join("src").display().to_string()),
            ("./src/checkpoint", current.join("src/checkpoint").display().to_string()),
            ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct".into()),
            (&*current.display().to_string(), current.display().to_string()),
        ] {
            assert_eq!(absolute(name).unwrap(), expected);
        }
    }
}
