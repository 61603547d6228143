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
    /// The number of checkpoints that are kept, the newest ones; 0 keeps all.
    pub save_total_limit: usize,
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
            log_completions_steps: 25,
            num_completions_to_print: 6,
        }
    }
}

impl RunOptions {
    /// Checks every field.
    ///
    /// # Errors
    /// [`crate::Error::Config`].
    pub fn validate(&self) -> Result<()> {
        // The name becomes part of a path.
        let legal = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let ok = (1..=100).contains(&self.name.len()) && self.name.chars().all(legal) && !self.name.starts_with('.');
        check(ok, "run.name", "1 to 100 of letters, digits, `-`, `_` and `.`, not beginning with `.`", &self.name)?;
        let count = self.num_completions_to_print;
        check(count <= MAX_COMPLETIONS, "run.num_completions_to_print", &format!("at most {MAX_COMPLETIONS}"), count)
    }
}
