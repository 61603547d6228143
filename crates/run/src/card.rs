//! The model card (README.md) of a trained model.

use super::summary::Summary;
use crate::error::Result;
use grpo_files::{counted, grouped, to_yaml};
use run_config::{ModelSource, TrainConfig};
use std::fmt::Write;

/// The number of weights of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weights {
    /// The number of weights that were trained.
    pub trained: usize,
    /// The number of weights of the model, without adapters.
    pub total: usize,
}

/// Returns the text of the README.md: training, results of evaluations, and the configuration without its secrets.
pub(crate) fn model_card(config: &TrainConfig, summary: &Summary, weights: Weights) -> Result<String> {
    let mut text = format!("# {}\n\n", config.run.name);
    let model = match &config.model {
        ModelSource::Pretrained(name) => format!("`{name}`"),
        ModelSource::New(_) => "A new model".to_owned(),
    };
    let adapters = if config.lora.is_some() { ", LoRA adapters" } else { "" };
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
    if let (Some(step), Some(best)) = (summary.weights_of_step, &summary.best) {
        let _ = writeln!(
            text,
            "The weights are those after step {step}, the best by {}: {:.4}.\n",
            best.metric, best.value.0
        );
    }
    if let Some(problems) = summary.eval_after.get(PROBLEMS) {
        let _ = writeln!(text, "Evaluated on {}.\n", counted(*problems as u64, "held-out problem"));
    }
    let _ = writeln!(text, "| held-out evaluation | before | after |\n|---|---:|---:|");
    for (name, after) in summary.eval_after.iter().filter(|(name, _)| *name != PROBLEMS) {
        let before = summary.eval_before.get(name).map_or_else(|| "-".to_owned(), |before| format!("{before:.4}"));
        let _ = writeln!(text, "| {name} | {before} | {after:.4} |");
    }
    let _ = write!(text, "\nThe configuration of the run:\n\n```yaml\n{}```\n", to_yaml(config)?);
    Ok(text)
}

/// The number of held-out problems among the numbers of an evaluation.
const PROBLEMS: &str = "problems";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jsonl::{MetricsRow, RowKind};
    use trainer::Counters;

    #[test]
    fn the_model_card_has_results_and_configuration() {
        let config = TrainConfig { seed: 7, model: ModelSource::Pretrained("a/b".into()), ..TrainConfig::default() };
        let rows = [0.25, 0.75].map(|pass| MetricsRow::new(RowKind::Eval, 0, [("eval/pass@1", pass)]));
        let summary = Summary::new(&config, &rows, Counters::default(), 1.0);
        let text = model_card(&config, &summary, Weights { trained: 1234, total: 1234 }).unwrap();
        assert!(text.contains("`a/b`, trained with GRPO"), "{text}");
        assert!(text.contains("| pass@1 | 0.2500 | 0.7500 |"), "{text}");
        assert!(text.contains("seed: 7\n"), "{text}");
    }

    #[test]
    fn the_model_card_uses_singular_and_plural() {
        let config = TrainConfig { lora: Some(models::LoraConfig::default()), ..TrainConfig::default() };
        let text = |config: &TrainConfig, problems: f64| {
            let rows = [MetricsRow::new(RowKind::Eval, 0, [("eval/pass@1", 0.5), ("eval/problems", problems)])];
            let summary = Summary::new(config, &rows, Counters::default(), 1.0);
            model_card(config, &summary, Weights { trained: 38_912, total: 120_000 }).unwrap()
        };
        let of_three = text(&config, 3.0);
        assert!(of_three.contains("\n38,912 trained weights of 120,000.\n"), "{of_three}");
        assert!(
            of_three.contains("\nEvaluated on 3 held-out problems.\n") && !of_three.contains("| problems"),
            "{of_three}"
        );
        assert!(text(&config, 1.0).contains("on 1 held-out problem."));
        assert!(text(&TrainConfig::default(), 1.0).contains("\n38,912 trained weights.\n"));
    }

    #[test]
    fn the_configuration_of_a_card_has_no_secrets() {
        let mut config = TrainConfig::default();
        let mut program = rewards::ProgramConfig::new(vec!["judge.py".into(), "--key".into(), "S3CR3T".into()]);
        program.env.insert("API_KEY".into(), "S3CR3T".into());
        config.rewards.programs.insert("judge".into(), program);
        let summary = Summary::new(&config, &[], Counters::default(), 1.0);
        let text = model_card(&config, &summary, Weights { trained: 1, total: 1 }).unwrap();
        assert!(!text.contains("S3CR3T") && text.contains("API_KEY: (hidden)"), "{text}");
    }
}
