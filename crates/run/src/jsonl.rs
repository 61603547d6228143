//! Rows of metrics.jsonl and completions.jsonl.

use grpo_policy::WeightVersion;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The phase of a row of metrics.jsonl.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowKind {
    /// A supervised step.
    Warmup,
    /// A GRPO step.
    Grpo,
    /// A held-out evaluation after `step` GRPO steps.
    Eval,
}

/// A row of metrics.jsonl.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MetricsRow {
    /// The phase of the run.
    pub phase: RowKind,
    /// The number of completed steps of the phase, including this one.
    pub step: u64,
    /// The completions of an evaluation that pass, such as "greedy completions with correct at least 1"; `None` for steps, and in rows of
    /// older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass_rule: Option<String>,
    /// The metrics by TRL's names; non-finite values are null.
    #[serde(flatten)]
    pub values: BTreeMap<String, Option<f64>>,
}

impl MetricsRow {
    /// Creates a row. Non-finite values become null, since JSON has no representation for them.
    pub fn new<N: Into<String>>(phase: RowKind, step: u64, values: impl IntoIterator<Item = (N, f64)>) -> Self {
        let values = values.into_iter().map(|(name, v)| (name.into(), v.is_finite().then_some(v))).collect();
        Self { phase, step, pass_rule: None, values }
    }

    /// Returns `true` if `metric` means the same in both rows: pass@k depends on the rule by which completions pass.
    pub fn is_comparable(&self, other: &Self, metric: &str) -> bool {
        is_same_rule(self.pass_rule.as_deref(), other.pass_rule.as_deref(), metric)
    }

    /// Returns the value of a metric; `None` when it is missing or null.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.values.get(name).copied().flatten()
    }
}

/// Returns `true` if `metric` means the same with both rules, as far as they are known.
pub(super) fn is_same_rule(rule: Option<&str>, other: Option<&str>, metric: &str) -> bool {
    !metric.trim_start_matches("eval/").starts_with("pass@") || rule.is_none() || other.is_none() || rule == other
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
    /// The reference answer.
    pub answer: String,
    /// The text that the policy wrote.
    pub completion: String,
    /// `true` if the length limit cut the completion off.
    pub truncated: bool,
    /// The total reward; null if no reward function returned a value.
    pub reward: Option<f32>,
    /// The unweighted reward of each function by name; null if the function returned none. Empty in rows of older versions.
    #[serde(default)]
    pub rewards: BTreeMap<String, Option<f32>>,
    /// The advantage of the completion.
    pub advantage: f32,
    /// The errors of reward functions that could not score the completion, as `NAME: REASON`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reward_failures: Vec<String>,
    /// The weights that the tokens were sampled from, by the number of GRPO steps that had trained them; empty if all tokens were sampled from
    /// the weights at the start of the step.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weight_versions: Vec<WeightVersion>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn non_finite_metrics_become_null_and_round_trip() {
        let row = MetricsRow::new(RowKind::Grpo, 1, [("reward", 0.5), ("kl", f64::NAN)]);
        let text = serde_json::to_string(&row).unwrap();
        assert!(text.contains("\"kl\":null"), "{text}");
        assert_eq!(serde_json::from_str::<MetricsRow>(&text).unwrap(), row);
        assert_eq!((row.get("reward"), row.get("kl")), (Some(0.5), None));
    }
}
