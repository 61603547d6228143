//! Formats the block at the start of a run: model, data, rewards and settings; defaults of keys that the user did not set are marked.

use grpo_core::readable_bytes;
use grpo_files::{Layers, counted, grouped, noun};
use grpo_run_config::PolicyDevice;
use grpo_trainer::{ModelSource, Overview, TrainConfig};
use serde_json::Value;
use std::fmt::Display;

/// Returns the block, one line per subject. `layers` are the user's; `None` if they are unknown, and no default is marked.
pub(crate) fn text(config: &TrainConfig, overview: &Overview, layers: Option<&Layers>) -> String {
    let settings = Settings::of(config, layers);
    let lines = [
        ("model", model(config, overview)),
        ("device", device(config, &settings)),
        ("rows", rows(config, overview)),
        ("rewards", rewards(overview)),
        ("steps", steps(config, &settings)),
        ("learning", learning(config, &settings)),
        ("lengths", lengths(config, overview, &settings)),
        ("sampling", sampling(&settings)),
        ("evaluation", evaluation(config, overview, &settings)),
        ("memory", memory(overview)),
    ];
    let lines = lines.into_iter().map(|(subject, text)| format!("  {subject:11}{text}\n"));
    lines.collect::<String>().trim_end().to_owned()
}

/// The values of a configuration and the default values, by key.
struct Settings<'a> {
    given: Value,
    default: Value,
    layers: Option<&'a Layers>,
}

impl<'a> Settings<'a> {
    fn of(config: &TrainConfig, layers: Option<&'a Layers>) -> Self {
        let value = |config: &TrainConfig| serde_json::to_value(config).unwrap_or_default();
        Self { given: value(config), default: value(&TrainConfig::default()), layers }
    }

    /// Returns the value of a key, marked if it is the default and no layer sets the key.
    fn shown(&self, key: &str) -> String {
        self.with_unset(key, "null")
    }

    /// Returns the value of a key, or `unset` if it is null.
    fn with_unset(&self, key: &str, unset: &str) -> String {
        let at = |value: &Value| value.pointer(&format!("/{}", key.replace('.', "/"))).cloned().unwrap_or_default();
        let (given, default) = (at(&self.given), at(&self.default));
        let text = match &given {
            Value::Null => unset.to_owned(),
            Value::String(text) => text.clone(),
            Value::Number(number) => number.as_f64().filter(|_| number.is_f64()).map_or(number.to_string(), plain),
            other => other.to_string(),
        };
        let is_unset = self.layers.is_some_and(|layers| layers.get(key).is_none());
        if is_unset && given == default { format!("{text} (default)") } else { text }
    }
}

/// Formats a number without superfluous digits: `1e-6`, `0.8`, `1`.
fn plain(value: f64) -> String {
    match value.abs() {
        size if size != 0.0 && size < 1e-3 => format!("{value:e}"),
        _ => value.to_string(),
    }
}

fn model(config: &TrainConfig, overview: &Overview) -> String {
    let name = match &config.model {
        ModelSource::Pretrained(name) => name,
        ModelSource::New(_) => "a new model with random weights",
    };
    let weights = counted(overview.weights, "weight");
    match &config.lora {
        Some(lora) => {
            let trained = grouped(overview.trained_weights);
            format!("{name}: {weights}, and {trained} of LoRA adapters (r {}) that are trained", lora.r)
        }
        None => format!("{name}: {weights}, all of them trained"),
    }
}

fn device(config: &TrainConfig, settings: &Settings<'_>) -> String {
    match config.policy.device {
        PolicyDevice::Host => {
            format!("this CPU, {} (policy.device: host)", counted(rayon::current_num_threads(), "thread"))
        }
        _ => format!("{}, {}", settings.shown("policy.device"), settings.shown("policy.dtype")),
    }
}

fn rows(config: &TrainConfig, overview: &Overview) -> String {
    let form = match overview.renders_template {
        Some(true) if overview.rewrites_history => {
            "messages that the chat template renders, anew after every turn (data.history: fork)"
        }
        Some(true) => "messages that the chat template renders",
        _ => "text that is sent as it is",
    };
    match &overview.rows {
        Some(report) => {
            let files = report.files.iter().map(|file| {
                let [training, held_out] = [file.training, file.held_out].map(|count| grouped(count as u64));
                let rows = counted(file.rows, "row");
                let dropped: usize = file.dropped.values().sum();
                let dropped = if dropped > 0 { format!(", {dropped} dropped") } else { String::new() };
                format!("{}: {rows}, {training} to train on, {held_out} held out{dropped}", file.path.display())
            });
            format!("{}; prompts are {form}", files.collect::<Vec<_>>().join("; "))
        }
        None => {
            let tasks = serde_json::to_value(&config.data.tasks).unwrap_or_default();
            let tasks = tasks.as_object().into_iter().flatten();
            let used = tasks.filter(|(_, task)| task["weight"].as_f64() > Some(0.0)).map(|(name, _)| name.as_str());
            format!("problems made by the built-in task {}; prompts are {form}", used.collect::<Vec<_>>().join(", "))
        }
    }
}

fn rewards(overview: &Overview) -> String {
    let rewards = weighted(overview.rewards.iter().map(|(name, weight)| (name, weight)));
    format!("{rewards}; pass@1 counts completions with {} (eval.pass_reward)", overview.pass_rule)
}

/// Lists rewards with their weights.
pub(crate) fn weighted(rewards: impl Iterator<Item = (impl Display, impl Display)>) -> String {
    rewards.map(|(name, weight)| format!("{name} x {weight}")).collect::<Vec<_>>().join(", ")
}

fn steps(config: &TrainConfig, settings: &Settings<'_>) -> String {
    let loop_config = &config.grpo;
    let grpo = format!(
        "{} of {} {} x {} {}, updates in {} {}",
        settings.shown("grpo.max_steps"),
        settings.shown("grpo.prompts_per_step"),
        noun(loop_config.prompts_per_step as u64, "prompt"),
        settings.shown("grpo.num_generations"),
        noun(loop_config.num_generations as u64, "completion"),
        settings.shown("grpo.gradient_accumulation_steps"),
        noun(loop_config.gradient_accumulation_steps as u64, "micro-batch"),
    );
    match config.warmup.steps {
        0 => grpo,
        steps => format!(
            "up to {} at learning rate {}, then {grpo}",
            counted(steps, "supervised step"),
            settings.shown("warmup.optimizer.learning_rate")
        ),
    }
}

fn learning(config: &TrainConfig, settings: &Settings<'_>) -> String {
    format!(
        "{} with learning rate {}, schedule {}, weight decay {}, beta {}",
        config.loss.loss_type.name(),
        settings.shown("optimizer.learning_rate"),
        settings.shown("optimizer.lr_scheduler_type"),
        settings.shown("optimizer.weight_decay"),
        settings.shown("loss.beta"),
    )
}

fn lengths(config: &TrainConfig, overview: &Overview, settings: &Settings<'_>) -> String {
    format!(
        "completions of up to {} {}, prompts of up to {}, context {}",
        settings.shown("rollout.max_completion_length"),
        noun(config.rollout.max_completion_length() as u64, "token"),
        overview.longest_prompt,
        grouped(overview.context as u64)
    )
}

fn sampling(settings: &Settings<'_>) -> String {
    let keys = [("temperature", "1"), ("top_p", "1"), ("top_k", "0"), ("min_p", "0"), ("repetition_penalty", "1")];
    let of = |(key, unset): (&str, &str)| format!("{key} {}", settings.with_unset(&format!("rollout.{key}"), unset));
    keys.map(of).join(", ")
}

fn evaluation(config: &TrainConfig, overview: &Overview, settings: &Settings<'_>) -> String {
    if overview.held_out == 0 {
        return "off: no row is held out (data.held_out_fraction, data.eval_files)".into();
    }
    let every = match config.eval.eval_steps {
        0 => "before the first and after the last step (eval.eval_steps: 0)".to_owned(),
        1 => "every step (eval.eval_steps: 1)".to_owned(),
        _ => format!("every {} steps", settings.shown("eval.eval_steps")),
    };
    format!("{}, {every}", counted(overview.held_out, "held-out row"))
}

fn memory(overview: &Overview) -> String {
    let table = &overview.memory;
    let available =
        overview.available_memory.map_or(String::new(), |bytes| format!(" of {} free", readable_bytes(bytes)));
    let always = table.rows().iter().map(|(part, bytes)| format!("{part} {}", readable_bytes(*bytes)));
    let phases = table.phases().iter().map(|(phase, parts)| {
        let bytes = parts.iter().fold(0_u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
        format!("during {phase} {} more", readable_bytes(bytes))
    });
    let parts = always.chain(phases).collect::<Vec<_>>().join(", ");
    format!("{}{available}: {parts}", readable_bytes(table.total()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_plain() {
        assert_eq!([1e-6, 7e-4, 0.01, 1.0, 0.0].map(plain), ["1e-6", "7e-4", "0.01", "1", "0"]);
    }

    #[test]
    fn only_defaults_of_keys_that_no_layer_sets_are_marked() {
        let file = "optimizer: { learning_rate: 0.5, weight_decay: 0.0 }\nrollout: { top_p: null }\n";
        let layers = Layers::new().text("run.yaml", file).unwrap();
        let layers = layers.set(&["grpo.num_generations=8".to_owned(), "grpo.max_steps=7".to_owned()]).unwrap();
        let config = layers.clone().resolve::<TrainConfig>().unwrap();
        let settings = Settings::of(&config, Some(&layers));
        for (key, shown) in [
            ("optimizer.learning_rate", "0.5"),
            ("optimizer.weight_decay", "0"),
            ("optimizer.lr_scheduler_type", "linear (default)"),
            ("grpo.num_generations", "8"),
            ("grpo.max_steps", "7"),
            ("grpo.gradient_accumulation_steps", "8 (default)"),
            ("rollout.top_p", "null"),
            ("rollout.min_p", "null (default)"),
        ] {
            assert_eq!(settings.shown(key), shown, "{key}");
        }
        assert_eq!(Settings::of(&config, None).shown("optimizer.lr_scheduler_type"), "linear");
    }
}
