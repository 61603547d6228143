//! summary.json: the results of a run, computed from its metrics.

use super::best::Best;
use super::jsonl::{MetricsRow, RowKind};
use grpo_run_config::TrainConfig;
use grpo_trainer::Counters;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The results of a run, as stored in summary.json.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The name of the run.
    pub name: String,
    /// The seed of the run.
    pub seed: u64,
    /// The held-out evaluation between warm-up and GRPO: `pass@1` (greedy), `reward` (sampled), `problems`, and
    /// `pass@1/TASK` when there are several tasks.
    /// Without `pass@k` if the rule by which completions pass was changed later.
    pub eval_before: BTreeMap<String, f64>,
    /// The held-out evaluation of the exported weights, by the same names: after the last step, or after
    /// [`Summary::weights_of_step`].
    pub eval_after: BTreeMap<String, f64>,
    /// The completions that count as passed in `eval_after`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass_rule: Option<String>,
    /// The completions that counted as passed in the first evaluation, if a changed `eval.pass_reward` or `eval.pass_at` has other ones now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass_rule_before: Option<String>,
    /// The mean training reward over the first tenth of the GRPO steps, 10 at most.
    pub reward_first: Option<f64>,
    /// The mean training reward over the same number of last steps.
    pub reward_last: Option<f64>,
    /// The number of GRPO steps.
    pub steps: u64,
    /// The number of supervised warm-up steps.
    pub warmup_steps: u64,
    /// The number of prompt and completion tokens of all GRPO samples.
    pub tokens: u64,
    /// The seconds of the whole run, over all sessions.
    pub seconds: f64,
    /// The best evaluation, with `run.metric_for_best_model`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<Best>,
    /// The number of GRPO steps after which the exported weights were taken, if `run.load_best_model_at_end` replaced the last ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights_of_step: Option<u64>,
    /// `true` if `run.early_stopping_patience` ended the run before its last step.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stopped_early: bool,
}

impl Summary {
    pub(super) fn new(config: &TrainConfig, rows: &[MetricsRow], counters: Counters, seconds: f64) -> Self {
        let evals: Vec<_> = rows.iter().filter(|r| r.phase == RowKind::Eval).collect();
        let rewards: Vec<f64> =
            rows.iter().filter(|r| r.phase == RowKind::Grpo).filter_map(|r| r.get("reward")).collect();
        let window = (rewards.len() / 10).clamp(1, 10).min(rewards.len());
        let mean = |values: &[f64]| (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64);
        let summary = Self {
            name: config.run.name.clone(),
            seed: config.seed,
            eval_before: BTreeMap::new(),
            eval_after: BTreeMap::new(),
            pass_rule: None,
            pass_rule_before: None,
            reward_first: mean(&rewards[..window]),
            reward_last: mean(&rewards[rewards.len() - window..]),
            steps: counters.grpo_steps,
            warmup_steps: counters.warmup_steps,
            tokens: counters.num_tokens,
            seconds,
            best: None,
            weights_of_step: None,
            stopped_early: false,
        };
        match (evals.first(), evals.last()) {
            (Some(first), Some(last)) => summary.with_evaluations(first, last),
            _ => summary,
        }
    }

    /// Returns the summary with these evaluations, and of the first one only what the last one is comparable with.
    fn with_evaluations(mut self, first: &MetricsRow, last: &MetricsRow) -> Self {
        (self.eval_before, self.eval_after) = (evaluation(first), evaluation(last));
        self.eval_before.retain(|name, _| first.is_comparable(last, name));
        let is_other = !first.is_comparable(last, "pass@1");
        (self.pass_rule, self.pass_rule_before) =
            (last.pass_rule.clone(), first.pass_rule.clone().filter(|_| is_other));
        self
    }

    /// Returns the summary of a run that exports the weights of `best` instead of its last.
    pub(super) fn leaving(mut self, best: &Best, rows: &[MetricsRow]) -> Self {
        let best_row = rows.iter().rfind(|row| row.phase == RowKind::Eval && row.step == best.step);
        let first = rows.iter().find(|row| row.phase == RowKind::Eval);
        if let (Some(first), Some(row), true) = (first, best_row, best.step != self.steps) {
            self.weights_of_step = Some(best.step);
            return self.with_evaluations(first, row);
        }
        self
    }

    /// Returns the sentence that says what passes, with the key that decides it; `None` without an evaluation, or if it is not known.
    pub fn pass_sentence(&self) -> Option<String> {
        let rule = self.pass_rule.as_ref()?;
        Some(match &self.pass_rule_before {
            Some(before) => format!(
                "pass@1 counts {rule} (eval.pass_reward); it counted {before} before, so that the values before are left out."
            ),
            None => format!("pass@1 counts {rule} (eval.pass_reward)."),
        })
    }

    /// Returns the change of held-out pass@1, in [-1, 1].
    pub fn gain(&self) -> Option<f64> {
        Some(self.eval_after.get("pass@1")? - self.eval_before.get("pass@1")?)
    }
}

/// Returns the metrics of an evaluation that have a value.
fn evaluation(row: &MetricsRow) -> BTreeMap<String, f64> {
    row.values.iter().filter_map(|(name, v)| Some((name.strip_prefix("eval/")?.to_owned(), (*v)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_rewards_are_means_over_a_tenth_of_the_steps() {
        let mut rows = vec![MetricsRow::new(RowKind::Eval, 0, [("eval/pass@1", 0.25), ("step_time", 1.0)])];
        rows.extend((1..=20).map(|s| MetricsRow::new(RowKind::Grpo, s, [("reward", s as f64)])));
        rows.push(MetricsRow::new(RowKind::Eval, 20, [("eval/pass@1", 0.75)]));
        let counters = Counters { grpo_steps: 20, num_tokens: 7, ..Counters::default() };
        let summary = Summary::new(&TrainConfig::default(), &rows, counters, 1.5);
        assert_eq!((summary.reward_first, summary.reward_last), (Some(1.5), Some(19.5)));
        assert_eq!((summary.gain(), summary.steps, summary.tokens), (Some(0.5), 20, 7));
        assert!(!summary.eval_before.contains_key("step_time"));
        assert_eq!(summary.pass_rule, None, "rows of older versions have no rule");
        let without_steps = Summary::new(&TrainConfig::default(), &[], Counters::default(), 0.0);
        assert_eq!((without_steps.reward_first, without_steps.gain()), (None, None));
    }

    #[test]
    fn two_definitions_of_pass_at_1_are_not_subtracted() {
        let row = |step, pass, rule: &str| MetricsRow {
            pass_rule: Some(format!("greedy completions with {rule} at least 1")),
            ..MetricsRow::new(
                RowKind::Eval,
                step,
                [("eval/pass@1", pass), ("eval/pass@4", pass), ("eval/reward", pass)],
            )
        };
        let rows = |last: &str| [row(0, 0.0, "judge"), row(10, 0.25, "judge"), row(20, 0.5, last)];
        let summary = |last| Summary::new(&TrainConfig::default(), &rows(last), Counters::default(), 1.0);
        let same = summary("judge");
        assert_eq!((same.gain(), same.pass_rule_before.as_deref()), (Some(0.5), None));
        let changed = summary("accuracy");
        assert_eq!(changed.gain(), None);
        assert_eq!(changed.eval_before.keys().collect::<Vec<_>>(), ["reward"]);
        assert_eq!(changed.eval_after["pass@1"], 0.5);
        assert_eq!(changed.pass_rule.as_deref(), Some("greedy completions with accuracy at least 1"));
        assert_eq!(changed.pass_rule_before.as_deref(), Some("greedy completions with judge at least 1"));
        // The weights of an evaluation by the first rule.
        let best = Best {
            metric: "eval/reward".into(),
            value: grpo_trainer::coefficients::Exact(0.25),
            step: 10,
            early_stopping_patience_counter: 0,
            pass_rule: None,
        };
        let summary = changed.leaving(&best, &rows("accuracy"));
        assert_eq!((summary.gain(), summary.pass_rule_before), (Some(0.25), None));
    }
}
