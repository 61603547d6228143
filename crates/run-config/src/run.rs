//! The section `run`: checkpoints, logs and early stopping. Its keys do not change the computation of a step.

use crate::{Result, check};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The largest number of completions per table.
const MAX_COMPLETIONS: usize = 1000;

/// The section `run` of a configuration.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunOptions {
    /// The name of the run. Its folder is `runs/<name>-<number>` by default.
    #[default("run")]
    pub name: String,
    /// The number of steps between checkpoints; 0 saves only at the end of warm-up and of GRPO.
    #[default(50)]
    pub save_steps: u64,
    /// The number of newest checkpoints to keep, in addition to the best; 0 keeps all.
    #[default(3)]
    pub save_total_limit: usize,
    /// The evaluation metric that selects the best checkpoint, such as `eval/pass@1`; the prefix `eval/` is optional. The best
    /// checkpoint is saved at its evaluation and kept in addition to the newest ones.
    pub metric_for_best_model: Option<String>,
    /// `true` if larger values of the metric are better; `None`: `true` unless its name ends in `loss` or `kl`.
    pub greater_is_better: Option<bool>,
    /// `true` if the run loads the weights of the best checkpoint at its end and exports them to the model folder. The newest checkpoint
    /// keeps its own weights.
    pub load_best_model_at_end: bool,
    /// The number of evaluations in a row without improvement after which the run ends.
    pub early_stopping_patience: Option<u64>,
    /// The improvement that an evaluation must exceed to reset the count for `early_stopping_patience`.
    pub early_stopping_threshold: f64,
    /// `true` if a run may resume after its data files have changed. Changes are reported in either case.
    pub allow_changed_data: bool,
    /// The number of steps between samples that are shown and written to completions.jsonl; 0 disables them.
    #[default(25)]
    pub log_completions_steps: u64,
    /// The number of completions per such sample.
    #[default(6)]
    pub num_completions_to_print: usize,
}

impl RunOptions {
    /// Returns `true` if larger values of `metric_for_best_model` are better.
    pub fn is_greater_better(&self) -> bool {
        let metric = self.metric_for_best_model.as_deref().unwrap_or_default();
        self.greater_is_better.unwrap_or(!(metric.ends_with("loss") || metric.ends_with("kl")))
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`crate::Error::Key`].
    pub fn validate(&self) -> Result<()> {
        // The name becomes part of a path.
        let legal = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let ok = (1..=100).contains(&self.name.len()) && self.name.chars().all(legal) && !self.name.starts_with('.');
        check(ok, "run.name", "1 to 100 of letters, digits, `-`, `_` and `.`, not beginning with `.`", &self.name)?;
        for (key, needs) in [
            ("run.load_best_model_at_end", self.load_best_model_at_end),
            ("run.early_stopping_patience", self.early_stopping_patience.is_some()),
        ] {
            let ok = !needs || self.metric_for_best_model.is_some();
            check(ok, key, "a run.metric_for_best_model, such as eval/pass@1, to compare evaluations by", "none")?;
        }
        check(self.early_stopping_patience != Some(0), "run.early_stopping_patience", "at least 1", 0)?;
        let threshold = self.early_stopping_threshold;
        let ok = threshold.is_finite() && threshold >= 0.0;
        check(ok, "run.early_stopping_threshold", "a finite number >= 0", threshold)?;
        let count = self.num_completions_to_print;
        check(count <= MAX_COMPLETIONS, "run.num_completions_to_print", &format!("at most {MAX_COMPLETIONS}"), count)
    }
}
