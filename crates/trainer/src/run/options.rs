//! The section `run`: what a run saves and shows. Nothing in it changes the numbers of the run.

use crate::error::Result;
use crate::train_config::check;
use serde::{Deserialize, Serialize};

/// The largest number of completions of one table.
const MAX_COMPLETIONS: usize = 1000;

/// The section `run` of a configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunOptions {
    /// The name of the run: `runs/<name>-<number>` is its folder unless another is asked for.
    pub name: String,
    /// The number of steps between checkpoints; 0 saves only where warm-up and GRPO end.
    pub save_steps: u64,
    /// The number of checkpoints that are kept, the newest ones, beside the best; 0 keeps all.
    pub save_total_limit: usize,
    /// The metric of evaluations by which a checkpoint is the best, such as `eval/pass@1`; the beginning `eval/` may be left out. The best
    /// checkpoint is saved when it is evaluated and kept beside the newest ones.
    pub metric_for_best_model: Option<String>,
    /// Whether the larger value of the metric is the better one; `None`: unless its name ends in `loss` or `kl`.
    pub greater_is_better: Option<bool>,
    /// Whether the policy has the weights of the best checkpoint when the run is done, which are then those of the model folder that
    /// the run leaves. The newest checkpoint keeps its own.
    pub load_best_model_at_end: bool,
    /// The number of evaluations in a row that are no better than the best one, after which the run ends.
    pub early_stopping_patience: Option<u64>,
    /// How much better an evaluation has to be in order to count as better for `early_stopping_patience`.
    pub early_stopping_threshold: f64,
    /// Whether a run may go on where its data files are not those that it was begun with. What has changed is said either way.
    pub allow_changed_data: bool,
    /// The number of steps between samples shown and written to completions.jsonl; 0 shows none.
    pub log_completions_steps: u64,
    /// The number of completions per such sample.
    pub num_completions_to_print: usize,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self {
            name: "run".into(),
            save_steps: 50,
            save_total_limit: 3,
            metric_for_best_model: None,
            greater_is_better: None,
            load_best_model_at_end: false,
            early_stopping_patience: None,
            early_stopping_threshold: 0.0,
            allow_changed_data: false,
            log_completions_steps: 25,
            num_completions_to_print: 6,
        }
    }
}

impl RunOptions {
    /// Whether the larger value of `metric_for_best_model` is the better one.
    pub fn is_greater_better(&self) -> bool {
        let metric = self.metric_for_best_model.as_deref().unwrap_or_default();
        self.greater_is_better.unwrap_or(!(metric.ends_with("loss") || metric.ends_with("kl")))
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`crate::Error::Config`].
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
