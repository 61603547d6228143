//! The model card (README.md) of a trained model.

use super::summary::Summary;
use crate::error::{Error, Result};
use grpo_files::{counted, grouped, printable, printable_line, to_yaml};
use grpo_rewards::Rewards;
use grpo_run_config::{ModelSource, TrainConfig};
use serde_json::{Map, Value};
use std::fmt::Write;

/// The number of weights of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weights {
    /// The number of weights that were trained.
    pub trained: usize,
    /// The number of weights of the model, without adapters.
    pub total: usize,
}

/// Returns the text of the README.md: training, reward functions, results of evaluations, and the changed keys of the configuration without its
/// secrets.
pub(crate) fn model_card(config: &TrainConfig, summary: &Summary, weights: Weights) -> Result<String> {
    let mut text = format!("# {}\n\n", plain(&config.run.name));
    let model = match &config.model {
        ModelSource::Pretrained(name) => code(name),
        ModelSource::New(_) => "A new model".to_owned(),
    };
    let adapters = match (&config.lora, config.policy.quantization) {
        (Some(_), Some(quantization)) => format!(", LoRA adapters on {} weights", quantization.name()),
        (Some(_), None) => ", LoRA adapters".to_owned(),
        (None, _) => String::new(),
    };
    let _ = writeln!(
        text,
        "{model}{adapters}, trained with GRPO for {} on {} of prompts and completions, with seed {}, in {:.0} seconds.\n",
        counted(summary.steps, "step"),
        counted(summary.tokens, "token"),
        summary.seed,
        summary.seconds
    );
    let Weights { trained, total } = weights;
    let _ = match config.lora {
        Some(_) => writeln!(text, "{} of {}.\n", counted(trained, "trained weight"), grouped(total as u64)),
        None => writeln!(text, "{}.\n", counted(trained, "trained weight")),
    };
    // A program of a run on another machine may refer to variables that this one lacks; its name is among the keys below.
    if let Ok(functions) = Rewards::new(&config.rewards) {
        let named =
            functions.names().zip(functions.weights()).map(|(name, weight)| format!("`{name}` (weight {weight})"));
        let _ = writeln!(text, "Reward functions: {}.\n", named.collect::<Vec<_>>().join(", "));
    }
    if let (Some(step), Some(best)) = (summary.weights_of_step, &summary.best) {
        let _ = writeln!(
            text,
            "The weights are those after step {step}, the best by {}: {:.4}.\n",
            plain(&best.metric),
            best.value.0
        );
    }
    if let Some(problems) = summary.eval_after.get(PROBLEMS) {
        let _ = writeln!(text, "Evaluated on {}.\n", counted(*problems as u64, "held-out problem"));
    }
    let _ = writeln!(text, "| held-out evaluation | before | after |\n|---|---:|---:|");
    for (name, after) in summary.eval_after.iter().filter(|(name, _)| *name != PROBLEMS) {
        let before = summary.eval_before.get(name).map_or_else(|| "-".to_owned(), |before| format!("{before:.4}"));
        let _ = writeln!(text, "| {} | {before} | {after:.4} |", plain(name));
    }
    if let Some(rule) = summary.pass_sentence() {
        let _ = writeln!(text, "\n{rule}");
    }
    let changed = changed(to_value(config)?, &to_value(&TrainConfig::default())?).unwrap_or_else(|| Map::new().into());
    let yaml = to_yaml(&changed)?;
    let fence = "`".repeat(longest_run(&yaml).max(2) + 1);
    let _ = write!(
        text,
        "\nThe keys of the run's configuration that differ from the defaults of `grpo train`:\n\n{fence}yaml\n{}{fence}\n",
        printable(&yaml)
    );
    Ok(text)
}

fn to_value(config: &TrainConfig) -> Result<Value> {
    serde_json::to_value(config).map_err(|error| Error::Text(format!("the configuration of the run: {error}")))
}

/// Returns the part of `value` that differs from `default`; `None` if nothing does.
fn changed(value: Value, default: &Value) -> Option<Value> {
    match (value, default) {
        (Value::Object(keys), Value::Object(defaults)) => {
            let changed_entry = |(key, value): (String, Value)| {
                let value = changed(value, defaults.get(&key).unwrap_or(&Value::Null))?;
                Some((key, value))
            };
            let keys: Map<String, Value> = keys.into_iter().filter_map(changed_entry).collect();
            (!keys.is_empty()).then_some(Value::Object(keys))
        }
        (value, default) => (value != *default).then_some(value),
    }
}

/// Returns a text as Markdown without markup, on one line. Names of metrics have names of rows' sources in them.
fn plain(text: &str) -> String {
    let mut escaped = String::new();
    for c in printable_line(text).chars() {
        if "\\`*<>[]|&~".contains(c) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

/// Returns a text as a code span of Markdown, on one line.
fn code(text: &str) -> String {
    let line = printable_line(text);
    let marks = "`".repeat(longest_run(&line) + 1);
    let space = if line.starts_with('`') || line.ends_with('`') { " " } else { "" };
    format!("{marks}{space}{line}{space}{marks}")
}

/// Returns the length of the longest run of backticks, which would end a shorter code span or block.
fn longest_run(text: &str) -> usize {
    text.split(|c| c != '`').map(str::len).max().unwrap_or_default()
}

/// The number of held-out problems among the numbers of an evaluation.
const PROBLEMS: &str = "problems";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jsonl::{MetricsRow, RowKind};
    use grpo_trainer::Counters;
    use serde_json::json;

    #[test]
    fn the_model_card_has_results_and_configuration() {
        let card = |config: &TrainConfig, problems: f64| {
            let row = |pass| MetricsRow::new(RowKind::Eval, 0, [("eval/pass@1", pass), ("eval/problems", problems)]);
            let summary = Summary::new(config, &[0.25, 0.75].map(row), Counters::default(), 1.0);
            model_card(config, &summary, Weights { trained: 38_912, total: 120_000 }).unwrap()
        };
        let pretrained = TrainConfig { seed: 7, model: ModelSource::Pretrained("a/b".into()), ..Default::default() };
        let adapters = TrainConfig { lora: Some(grpo_models::LoraConfig::default()), ..Default::default() };
        let command = json!(["python3", "trl_adapter.py", "mine.py:brevity", "--key", "S3CR3T"]);
        let program = json!({ "command": command, "env": { "JUDGE": "S3CR3T" }, "weight": 0.5 });
        let rewards = serde_json::from_value(json!({ "exact": 1.0, "programs": { "judge": program } })).unwrap();
        let program_card = card(&TrainConfig { rewards, ..Default::default() }, 1.0);
        for words in ["Reward functions: `exact` (weight 1), `judge` (weight 0.5).", "mine.py:brevity", "exact: 1"] {
            assert!(program_card.contains(words), "{words}: {program_card}");
        }
        assert!(!program_card.contains("S3CR3T"), "{program_card}");
        let (text, adapter_card) = (card(&pretrained, 3.0), card(&adapters, 1.0));
        for words in [
            "`a/b`, trained with GRPO",
            "\n38,912 trained weights.\n",
            "\nEvaluated on 3 held-out problems.\n",
            "| pass@1 | 0.2500 | 0.7500 |",
            "\nmodel: a/b\n",
            "\nseed: 7\n",
            "Reward functions: `correct` (weight 1).",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(!text.contains("| problems"), "{text}");
        // Keys with their default are left out.
        assert!(!text.contains("prompts_per_step") && !text.contains("lora"), "{text}");
        assert!(adapter_card.contains("\n38,912 trained weights of 120,000.\n"), "{adapter_card}");
        assert!(adapter_card.contains("on 1 held-out problem."), "{adapter_card}");
    }

    #[test]
    fn names_and_values_cannot_add_markup_to_the_model_card() {
        let evil = "mod`\n---\nlicense: evil\n<img src=x onerror=alert(4)>\u{1b}[2J\u{202e}```\n# Title";
        let mut config = TrainConfig { model: ModelSource::Pretrained(evil.into()), ..Default::default() };
        config.data.system_prompt = Some("a\n```\n<img src=y>\n````\n\u{202e}".into());
        let row = |pass| MetricsRow::new(RowKind::Eval, 0, [("eval/<img src=z>|`x`", pass), ("eval/problems", 1.0)]);
        let summary = Summary::new(&config, &[0.25, 0.75].map(row), Counters::default(), 1.0);
        let text = model_card(&config, &summary, Weights { trained: 1, total: 1 }).unwrap();
        assert!(text.chars().all(|c| c == '\n' || grpo_files::is_printable(c)), "{text:?}");
        let (before, configuration) = text.split_once("differ from the defaults of `grpo train`:\n\n").unwrap();
        let span = "````mod`\\n---\\nlicense: evil\\n<img src=x onerror=alert(4)>\\u{1b}[2J\\u{202e}```\\n# Title````, trained";
        assert!(before.contains(span), "{before}");
        assert!(before.contains("| \\<img src=z\\>\\|\\`x\\` | 0.2500 | 0.7500 |"), "{before}");
        assert_eq!(before.lines().filter(|line| line.starts_with(['-', '<', '#'])).count(), 1, "{before}");
        // The block ends at the card's end only.
        let fence: String = configuration.chars().take_while(|c| *c == '`').collect();
        assert_eq!(fence.len(), 5, "{configuration}");
        assert!(configuration.ends_with(&format!("\n{fence}\n")), "{configuration}");
        assert_eq!(configuration.matches(&fence).count(), 2, "{configuration}");
    }
}
