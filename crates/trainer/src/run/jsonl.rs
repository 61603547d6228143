//! Rows of the logs of a run: metrics.jsonl and completions.jsonl.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The part of a run that a row of metrics.jsonl belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowKind {
    /// The row is of a supervised step.
    Warmup,
    /// The row is of a GRPO step.
    Grpo,
    /// The row is of a held-out evaluation after `step` GRPO steps.
    Eval,
}

/// A row of metrics.jsonl.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MetricsRow {
    /// The part of the run.
    pub phase: RowKind,
    /// The number of steps of the phase that were done, this one included.
    pub step: u64,
    /// The metrics under TRL's names; what is not finite is null.
    #[serde(flatten)]
    pub values: BTreeMap<String, Option<f64>>,
}

impl MetricsRow {
    /// A row of these metrics; values that are not finite become null, which JSON can say.
    pub fn new<N: Into<String>>(phase: RowKind, step: u64, values: impl IntoIterator<Item = (N, f64)>) -> Self {
        let values = values.into_iter().map(|(name, v)| (name.into(), v.is_finite().then_some(v))).collect();
        Self { phase, step, values }
    }

    /// The value of a metric; `None` when it is missing or null.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.values.get(name).copied().flatten()
    }
}

/// A row of completions.jsonl.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CompletionRow {
    /// The GRPO step.
    pub step: u64,
    /// The name of the task.
    pub task: String,
    /// The text of the prompt.
    pub prompt: String,
    /// A right answer.
    pub answer: String,
    /// The text that the policy wrote.
    pub completion: String,
    /// Whether the length limit cut the completion off.
    pub truncated: bool,
    /// The reward of the completion; null when no reward function had anything to say.
    pub reward: Option<f32>,
    /// What each reward function said, unweighted, by its name; null where it had nothing to say. Empty in rows from before it
    /// was recorded.
    #[serde(default)]
    pub rewards: BTreeMap<String, Option<f32>>,
    /// The advantage of the completion.
    pub advantage: f32,
    /// What kept reward functions from judging the completion, as `NAME: REASON`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reward_failures: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_finite_becomes_null_and_reads_back() {
        let row = MetricsRow::new(RowKind::Grpo, 1, [("reward", 0.5), ("kl", f64::NAN)]);
        let text = serde_json::to_string(&row).unwrap();
        assert!(text.contains("\"kl\":null"), "{text}");
        assert_eq!(serde_json::from_str::<MetricsRow>(&text).unwrap(), row);
        assert_eq!((row.get("reward"), row.get("kl")), (Some(0.5), None));
    }
}
