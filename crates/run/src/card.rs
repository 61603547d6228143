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
    if let Some(rule) = summary.pass_sentence() {
        let _ = writeln!(text, "\n{rule}");
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
        let card = |config: &TrainConfig, problems: f64| {
            let row = |pass| MetricsRow::new(RowKind::Eval, 0, [("eval/pass@1", pass), ("eval/problems", problems)]);
            let summary = Summary::new(config, &[0.25, 0.75].map(row), Counters::default(), 1.0);
            model_card(config, &summary, Weights { trained: 38_912, total: 120_000 }).unwrap()
        };
        let pretrained = TrainConfig { seed: 7, model: ModelSource::Pretrained("a/b".into()), ..Default::default() };
        let adapters = TrainConfig { lora: Some(models::LoraConfig::default()), ..Default::default() };
        let (text, of_adapters) = (card(&pretrained, 3.0), card(&adapters, 1.0));
        for words in [
            "`a/b`, trained with GRPO",
            "\n38,912 trained weights.\n",
            "\nEvaluated on 3 held-out problems.\n",
            "| pass@1 | 0.2500 | 0.7500 |",
            "seed: 7\n",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(!text.contains("| problems"), "{text}");
        assert!(of_adapters.contains("\n38,912 trained weights of 120,000.\n"), "{of_adapters}");
        assert!(of_adapters.contains("on 1 held-out problem."), "{of_adapters}");
    }
}
