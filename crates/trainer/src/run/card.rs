//! The model card of what a run has trained.

use super::summary::Summary;
use crate::error::Result;
use crate::train_config::{ModelSource, TrainConfig};
use grpo_files::to_yaml;
use std::fmt::Write;

/// The text of the README.md: what was done, what evaluations found, and the configuration that does it again.
pub(super) fn model_card(config: &TrainConfig, summary: &Summary) -> Result<String> {
    let mut text = format!("# {}\n\n", config.run.name);
    let model = match &config.model {
        ModelSource::Pretrained(name) => format!("`{name}`"),
        ModelSource::New(_) => "A new model".to_owned(),
    };
    let adapters = if config.lora.is_some() { ", LoRA adapters" } else { "" };
    let _ = writeln!(
        text,
        "{model}{adapters}, trained with GRPO for {} steps on {} tokens of prompts and completions, with seed {}, in \
         {:.0} seconds.\n",
        summary.steps, summary.tokens, summary.seed, summary.seconds
    );
    if let (Some(step), Some(best)) = (summary.weights_of_step, &summary.best) {
        let _ = writeln!(
            text,
            "The weights are those after step {step}, the best by {}: {:.4}.\n",
            best.metric, best.value.0
        );
    }
    let _ = writeln!(text, "| held-out evaluation | before | after |\n|---|---:|---:|");
    for (name, after) in &summary.eval_after {
        let before = summary.eval_before.get(name).map_or_else(|| "-".to_owned(), |before| format!("{before:.4}"));
        let _ = writeln!(text, "| {name} | {before} | {after:.4} |");
    }
    let _ = write!(text, "\nThe configuration of the run:\n\n```yaml\n{}```\n", to_yaml(config)?);
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::jsonl::{MetricsRow, RowKind};
    use crate::trainer::Counters;

    #[test]
    fn the_card_says_what_was_done_and_how_to_do_it_again() {
        let config = TrainConfig { seed: 7, model: ModelSource::Pretrained("a/b".into()), ..TrainConfig::default() };
        let rows = [0.25, 0.75].map(|pass| MetricsRow::new(RowKind::Eval, 0, [("eval/pass@1", pass)]));
        let text = model_card(&config, &Summary::new(&config, &rows, Counters::default(), 1.0)).unwrap();
        assert!(text.contains("`a/b`, trained with GRPO"), "{text}");
        assert!(text.contains("| pass@1 | 0.2500 | 0.7500 |"), "{text}");
        assert!(text.contains("seed: 7\n"), "{text}");
    }
}
