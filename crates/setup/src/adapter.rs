//! Training that starts from an adapter in PEFT's layout.

use crate::error::{Error, Result};
use grpo_models::{Adapter, LoraConfig, ModelConfig, ModelFolder};
use grpo_policy::{AdapterTensors, Policy, StateGroup, TensorSource, Weights, export_all};
use grpo_run_config::{ModelSource, TrainConfig};
use std::path::{Path, PathBuf};

/// If `model` is an adapter, replaces it by its base model and sets `lora.adapter`. Copies rank, alpha and targets of `lora.adapter` to the
/// section `lora`.
///
/// # Errors
/// [`grpo_trainer::Error::Config`] for an adapter without the name of its base model, for two adapters, and for a section that contradicts the adapter;
/// the errors of [`Adapter::read_config`].
pub(crate) fn resolve(config: &mut TrainConfig) -> Result<()> {
    if let ModelSource::Pretrained(name) = &config.model
        && Adapter::is_in(Path::new(name))
    {
        let folder = PathBuf::from(name);
        let (_, base) = Adapter::read_config(&folder)?;
        let expected = "the base of the adapter, as in `model: BASE` and `lora: { adapter: FOLDER }`: its adapter_config.json names none";
        let base = base.ok_or_else(|| grpo_run_config::Error::key("model", expected, name))?;
        let lora = config.lora.get_or_insert_default();
        if lora.adapter.as_ref().is_some_and(|other| *other != folder) {
            let expected = "left out where `model` is an adapter, or the same folder";
            let found = lora.adapter.as_deref().unwrap_or(&folder).display();
            return Err(grpo_run_config::Error::key("lora.adapter", expected, found).into());
        }
        lora.adapter = Some(folder);
        config.model = ModelSource::Pretrained(base);
    }
    let Some(lora) = &mut config.lora else { return Ok(()) };
    let Some(folder) = lora.adapter.as_deref().map(grpo_data::at_home) else { return Ok(()) };
    let (own, _) = Adapter::read_config(&folder)?;
    let (own, fresh) = (LoraConfig { adapter: Some(folder.clone()), ..own }, LoraConfig::default());
    let given = LoraConfig { adapter: Some(folder.clone()), ..lora.clone() };
    let is_set = given != LoraConfig { adapter: Some(folder.clone()), ..fresh.clone() };
    let keys = |lora: &LoraConfig| {
        [
            ("lora.r", lora.r.to_string()),
            ("lora.lora_alpha", lora.lora_alpha.to_string()),
            ("lora.use_rslora", lora.use_rslora.to_string()),
            ("lora.target_modules", format!("{:?}", lora.target_modules)),
            ("lora.target_parameters", format!("{:?}", lora.target_parameters)),
        ]
    };
    // The default targets mean the targets of the adapter.
    let targets = if given.target_modules == fresh.target_modules { &own } else { &given }.target_modules.clone();
    let parameters = if given.target_parameters.is_empty() { &own } else { &given }.target_parameters.clone();
    let given = keys(&LoraConfig { target_modules: targets, target_parameters: parameters, ..given });
    let differs = keys(&own).into_iter().zip(given).find(|(own, given)| is_set && own != given);
    if let Some(((key, expected), (_, found))) = differs {
        let expected = format!("{expected}, that of the adapter {}, or left out", folder.display());
        return Err(grpo_run_config::Error::key(key, expected, found).into());
    }
    *lora = own;
    Ok(())
}

/// Loads the weights of the configuration's adapter, if there is one, into a policy with newly initialised adapters.
///
/// # Errors
/// The errors of [`Adapter::open`], [`Adapter::check_base`] and the policy.
pub(crate) fn start(
    config: &TrainConfig,
    shape: &ModelConfig,
    base: Option<&ModelFolder>,
    policy: &mut dyn Policy,
) -> Result<()> {
    let Some(folder) = config.lora.as_ref().and_then(|lora| lora.adapter.as_deref()) else { return Ok(()) };
    let adapter = Adapter::open(folder, shape)?;
    if let Some(base) = base {
        adapter.check_base(&base.weights()?)?;
    }
    let mut own = export_all(policy, StateGroup::Weights(Weights::Policy))?;
    let stored = AdapterTensors(&adapter);
    for (name, shape) in stored.shapes() {
        match own.iter_mut().find(|tensor| tensor.name == name && tensor.shape == shape) {
            Some(tensor) => tensor.data = stored.values(name)?.into_owned(),
            None => return Err(Error::argument("lora.adapter", format!("a policy with an adapter {name}"), "none")),
        }
    }
    Ok(policy.import_weights(&own)?)
}
