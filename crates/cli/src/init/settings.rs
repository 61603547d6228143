//! Chooses the keys of the written file and their values.

use super::columns::{Answer, Roles, described};
use super::rows::Rows;
use anyhow::bail;
use grpo_core::readable_bytes;
use grpo_data::Columns;
use grpo_files::{Layers, counted};
use grpo_models::{LoraConfig, ModelConfig, OptimizerName, TrainedMemory};
use grpo_rewards::AnswerFrom;
use grpo_run_config::keys::keys;
use grpo_trainer::TrainConfig;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::borrow::Cow;

/// The smallest number of rows that is split into training and held-out rows.
const FEWEST_TO_HOLD_OUT: usize = 10;
/// The maximum length of an answer in characters that a completion is expected to repeat.
const LONGEST_ANSWER: usize = 60;
/// The learning rate of adapters, ten times the default for all weights.
const ADAPTERS_LEARNING_RATE: f64 = 1e-5;
/// The keys that are written even with their defaults.
const DEFAULTS: [&str; 9] = [
    "grpo.max_steps",
    "grpo.prompts_per_step",
    "grpo.num_generations",
    "grpo.gradient_accumulation_steps",
    "loss.loss_type",
    "loss.beta",
    "optimizer.learning_rate",
    "optimizer.lr_scheduler_type",
    "optimizer.weight_decay",
];
/// An example of a custom reward.
const OWN_REWARD: &str = "--set 'rewards.programs.judge.command=[python3, judge.py]'";

/// The chosen settings of a run and the user's settings, which win.
pub(super) struct Settings {
    chosen: Value,
    user_layers: Layers,
    /// The keys of `--set`.
    user_keys: Vec<String>,
}

impl Settings {
    /// Creates the settings `start` with the user's assignments.
    ///
    /// # Errors
    /// An error for an invalid assignment.
    pub(super) fn new(start: Value, assignments: &[String]) -> anyhow::Result<Self> {
        let user_keys = assignments.iter().filter_map(|text| Some(text.split_once('=')?.0.trim().to_owned())).collect();
        Ok(Self { chosen: start, user_layers: Layers::new().set(assignments)?, user_keys })
    }

    /// Returns the configuration with these settings.
    ///
    /// # Errors
    /// An error for an invalid setting.
    pub(super) fn config(&self) -> anyhow::Result<TrainConfig> {
        let chosen = Layers::new().value("the settings that `grpo init` has chosen", self.chosen.clone())?;
        let mut config = TrainConfig::from_layers(self.user_layers.clone().over(chosen))?;
        grpo_setup::expand_paths(&mut config.data)?;
        Ok(config)
    }

    /// Returns the keys to write, in the order of a configuration's sections.
    ///
    /// # Errors
    /// The errors of [`Settings::config`].
    pub(super) fn values(&self) -> anyhow::Result<Value> {
        let mut values = self.chosen.clone();
        for key in &self.user_keys {
            if let Some(value) = self.user_layers.get(key) {
                let nested = key.rsplit('.').fold(value.clone(), |value, part| json!({ part: value }));
                merge(&mut values, nested);
            }
        }
        let Value::Object(mut given) = values else { bail!("the settings are no map of keys") };
        given.retain(|_, value| !value.is_null());
        let order = keys().iter().filter(|key| !key.path.contains('.'));
        let mut sorted = Map::new();
        for key in order {
            if let Some(value) = given.remove(key.path) {
                sorted.insert(key.path.into(), value);
            }
        }
        sorted.extend(given);
        Ok(Value::Object(sorted))
    }

    /// Sets `key`, unless the user has set it.
    fn set(&mut self, key: &str, value: impl Into<Value>) {
        if self.user_layers.get(key).is_none() {
            let nested = key.rsplit('.').fold(value.into(), |value, part| json!({ part: value }));
            merge(&mut self.chosen, nested);
        }
    }

    /// Returns the name of the run.
    pub(super) fn run_name(&self) -> String {
        let name = |config: TrainConfig| config.run.name;
        self.config().map(name).unwrap_or_default()
    }

    /// Sets the run's name, the columns, and the rendering of texts.
    pub(super) fn choose_data(&mut self, model: &str, roles: &Roles, found: &Columns, has_chat_template: bool) {
        self.set("run.name", run_name(model));
        if let Some(key) = roles.prompt_key {
            self.set(&format!("data.{key}"), roles.prompts.concat());
        }
        if let Answer::Column(column) = &roles.answer {
            self.set("data.answer_column", column.as_str());
        }
        if has_chat_template && roles.has_texts(found) {
            self.set("data.apply_chat_template", true);
        }
        let is_split = self.user_layers.get("data.eval_files").is_some();
        if !is_split {
            let share = if found.rows < FEWEST_TO_HOLD_OUT { json!(0) } else { default("data.held_out_fraction") };
            self.set("data.held_out_fraction", share);
        }
    }

    /// Sets the reward that fits the answers.
    ///
    /// # Errors
    /// An error if there are no answers, or if no built-in reward can score them.
    pub(super) fn choose_rewards(&mut self, roles: &Roles, rows: &Rows, found: &Columns) -> anyhow::Result<()> {
        if self.user_layers.get("rewards").is_some() {
            return Ok(());
        }
        if roles.answer == Answer::None {
            bail!(
                "no column has the right answer of every row: expected a text or a number in `answer` or another usual name, found {}; name \
                 the column, e.g. `--set data.answer_column=COLUMN`, or choose a reward that needs no answer, e.g. `{OWN_REWARD}`",
                described(found)
            );
        }
        let short = |answer: &String| AnswerFrom::Boxed.find(answer).map_or(answer.trim().to_owned(), Cow::into_owned);
        let answers: Vec<String> = rows.answers.iter().map(short).collect();
        let most = |is: fn(&str) -> bool| 2 * answers.iter().filter(|answer| is(answer)).count() > answers.len();
        if most(|answer| answer.chars().count() > LONGEST_ANSWER || answer.contains('\n')) {
            let mut lengths: Vec<usize> = answers.iter().map(|answer| answer.chars().count()).collect();
            lengths.sort_unstable();
            bail!(
                "the answers ({}) are long texts, half of them of more than {}: expected a short answer, or one that stands behind `####` or in \
                 `\\boxed{{}}`; no built-in reward compares completions with long texts. Name another column, e.g. `--set \
                 data.answer_column=COLUMN`, or a reward of your own, e.g. `{OWN_REWARD}`",
                roles.answer_text(),
                counted(lengths[lengths.len() / 2].saturating_sub(1), "character"),
            );
        }
        let is_mathematics = most(|answer| answer.contains(|c: char| c.is_ascii_digit() || c == '\\'));
        let reward = if is_mathematics { "rewards.correct" } else { "rewards.normalized" };
        self.set(reward, 1);
        Ok(())
    }

    /// Chooses lengths, trained weights, steps and evaluations; returns a text about the trained weights.
    pub(super) fn choose_training(&mut self, shape: &ModelConfig, rows: &Rows, available: Option<u64>) -> String {
        self.set("rollout.max_completion_length", rows.completion);
        self.set("rollout.temperature", 1);
        DEFAULTS.into_iter().for_each(|key| self.set(key, default(key)));
        let prompts = default("grpo.prompts_per_step").as_u64().unwrap_or(1);
        self.set("grpo.prompts_per_step", prompts.min(rows.report.training() as u64).max(1));
        if rows.report.held_out() > 0 {
            self.set("eval.eval_steps", default("eval.eval_steps"));
        } else if self.user_layers.get("data.eval_files").is_none() {
            self.set("data.held_out_fraction", 0);
        }
        let optimizer = self.user_layers.get("optimizer.name").and_then(|name| OptimizerName::deserialize(name).ok());
        let TrainedMemory { weights, moments, gradients, .. } =
            TrainedMemory::of(shape.parameter_count(), optimizer.unwrap_or_default());
        let needed = weights.saturating_add(moments).saturating_add(gradients);
        let (needed_text, free) = (readable_bytes(needed), available.map(readable_bytes).unwrap_or_default());
        if self.user_layers.get("lora").is_some_and(Value::is_object) {
            self.set("optimizer.learning_rate", ADAPTERS_LEARNING_RATE);
            return "LoRA adapters are trained, as --set asks for".into();
        }
        if available.is_none_or(|available| needed <= available / 2) {
            return "all of them are trained".into();
        }
        let LoraConfig { r, lora_alpha, .. } = LoraConfig::default();
        self.set("lora", json!({ "r": r, "lora_alpha": lora_alpha }));
        self.set("optimizer.learning_rate", ADAPTERS_LEARNING_RATE);
        format!(
            "LoRA adapters are trained: all weights with gradients and moments take {needed_text}, and {free} are free"
        )
    }
}

/// Returns the default value of a key.
fn default(key: &str) -> Value {
    let defaults = serde_json::to_value(TrainConfig::default()).unwrap_or_default();
    defaults.pointer(&format!("/{}", key.replace('.', "/"))).cloned().unwrap_or_default()
}

/// Merges the keys of `new` into `values`, section by section.
fn merge(values: &mut Value, new: Value) {
    match (values, new) {
        (Value::Object(values), Value::Object(new)) => {
            for (key, value) in new {
                merge(values.entry(key).or_insert(Value::Null), value);
            }
        }
        (values, new) => *values = new,
    }
}

/// Returns a run name from the last part of a model's path or name.
fn run_name(model: &str) -> String {
    let last = model.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let legal = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let name: String = last.chars().map(legal).take(80).collect();
    let name = name.trim_start_matches(['.', '-']);
    if name.is_empty() { "run".into() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_named_after_its_model() {
        let names = ["Qwen/Qwen2.5-0.5B-Instruct", "runs/a b/model/", "..", "/", "", "ü"].map(run_name);
        assert_eq!(names, ["Qwen2.5-0.5B-Instruct", "model", "run", "run", "run", "run"]);
    }

    #[test]
    fn user_keys_take_precedence_in_their_section() {
        let start = json!({ "model": "m", "data": { "files": "a.jsonl" } });
        let user = ["data={answer_column: b}", "seed=3", "rewards.programs.judge.command=[a]"].map(str::to_owned);
        let mut settings = Settings::new(start, &user).unwrap();
        settings.set("data.answer_column", "c");
        settings.set("grpo.max_steps", 2);
        let expected = json!({
            "seed": 3, "model": "m", "data": { "files": "a.jsonl", "answer_column": "b" },
            "rewards": { "programs": { "judge": { "command": ["a"] } } }, "grpo": { "max_steps": 2 },
        });
        let values = settings.values().unwrap();
        assert_eq!(values, expected);
        assert_eq!(values.as_object().unwrap().keys().next().unwrap(), "seed", "{values}");
    }

    #[test]
    fn lora_is_chosen_if_all_weights_do_not_fit() {
        let shape = ModelConfig::default();
        let needed = 16 * shape.parameter_count();
        let rows = Rows { completion: 4, ..Rows::default() };
        for (available, has_lora) in [(None, false), (Some(2 * needed), false), (Some(2 * needed - 2), true)] {
            let start = json!({ "model": "m", "data": { "files": "a.jsonl" } });
            let mut settings = Settings::new(start, &[]).unwrap();
            let summary = settings.choose_training(&shape, &rows, available);
            let config = settings.config().unwrap();
            assert_eq!((config.lora.is_some(), summary.contains("LoRA")), (has_lora, has_lora), "{summary}");
            assert_eq!(config.optimizer.learning_rate, if has_lora { 1e-5 } else { 1e-6 });
        }
    }
}
