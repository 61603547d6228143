//! Loads the configuration of a run from layers, and selects the defaults below them.

use crate::{Error, Result, TrainConfig};
use grpo_files::Layers;
use grpo_rewards::RewardConfig;
use serde_json::Value;

/// The built-in configuration: a small model that learns addition.
const BUILT_IN: (&str, &str) = ("configs/train/arithmetic.yaml (built in)", include_str!("../configs/arithmetic.yaml"));

/// The section of a file that applies only if neither a pretrained model nor data files are named.
pub const WITHOUT_MODEL: &str = "without_model";

impl TrainConfig {
    /// Returns the configuration of `layers`, where later ones take precedence:
    ///
    /// 1. `TrainConfig::default()`, whose settings suit pretrained models,
    /// 2. the built-in configuration, `configs/train/arithmetic.yaml`, unless a layer names a pretrained model or data files,
    /// 3. the layers; under the same condition, each with the keys of its section `without_model` over its other keys.
    ///
    /// Settings of the built-in task (warm-up, learning rate, lengths) therefore never apply to a pretrained model. A section `rewards` in any
    /// layer replaces the default reward `correct: 1`, and an assignment of the whole section (`--set rewards={math: 1}`) the sections of lower
    /// layers.
    ///
    /// ```
    /// use grpo_files::Layers;
    /// use grpo_run_config::TrainConfig;
    ///
    /// let file = Layers::new().text("train.yaml", "{model: path/to/model, data: {files: train.jsonl}, rewards: {math: 1}}")?;
    /// let config = TrainConfig::from_layers(file)?;
    /// assert_eq!((config.optimizer.learning_rate, config.warmup.steps), (1e-6, 0));
    /// assert_eq!((config.rewards.math, config.rewards.correct), (1.0, 0.0));
    /// # Ok::<(), grpo_run_config::Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`Layers::resolve`]; [`Error::Key`] for both `grpo.max_steps` and `grpo.num_train_epochs`.
    pub fn from_layers(layers: Layers) -> Result<Self> {
        let without_model = !(names_model(&layers) || names_files(&layers));
        let layers = layers.optional_section(WITHOUT_MODEL, without_model)?;
        let given = |key| layers.get(key).is_some_and(|value| !value.is_null());
        if given("grpo.max_steps") && given("grpo.num_train_epochs") {
            let expected = "one of grpo.num_train_epochs and grpo.max_steps";
            return Err(Error::key("grpo.num_train_epochs", expected, "both"));
        }
        let mut defaults = Self::default();
        if layers.get("rewards").is_some() {
            defaults.rewards = RewardConfig::default();
        }
        let (origin, text) = BUILT_IN;
        let built_in = Layers::new().text(origin, text)?.optional_section(WITHOUT_MODEL, without_model)?;
        Ok(layers.over(built_in).replacing("rewards").resolve_over(defaults)?)
    }

    /// Returns the configuration of `grpo train` without arguments: a small model with random weights, which learns addition on the CPU within
    /// half a minute.
    ///
    /// ```
    /// let config = grpo_run_config::TrainConfig::built_in();
    /// assert_eq!(config.run.name, "arithmetic");
    /// config.validate()?;
    /// # Ok::<(), grpo_run_config::Error>(())
    /// ```
    ///
    /// # Panics
    /// Never: the text is a constant.
    pub fn built_in() -> Self {
        Self::from_layers(Layers::new()).expect("the built-in configuration is tested")
    }
}

/// Returns `true` if `layers` name a pretrained model instead of the shape of a new one.
fn names_model(layers: &Layers) -> bool {
    layers.get("model").is_some_and(Value::is_string)
}

/// Returns `true` if `layers` name files to train on.
fn names_files(layers: &Layers) -> bool {
    match layers.get("data.files") {
        None | Some(Value::Null) => false,
        Some(Value::Array(files)) => !files.is_empty(),
        Some(_) => true,
    }
}
