//! The rows of metrics.jsonl as one series per metric and phase.

use crate::curve::Point;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// The limit of different metrics per phase. Runs have dozens.
const MAX_METRICS: usize = 2000;

/// A row of metrics.jsonl with any metrics.
#[derive(Debug, Deserialize)]
pub(crate) struct Row {
    pub phase: String,
    pub step: u64,
    /// The completions of an evaluation that pass.
    #[serde(default)]
    pub pass_rule: Option<String>,
    #[serde(flatten)]
    pub values: BTreeMap<String, Value>,
}

/// The progress of a run at the end of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Tick {
    pub step: u64,
    /// The seconds of all steps of the phase so far.
    pub seconds: f64,
    /// The tokens of all steps so far.
    pub tokens: f64,
}

/// A phase of a run: `warmup`, `grpo`, `eval`, or another trainer's.
#[derive(Debug, Default)]
pub(crate) struct Phase {
    /// Every numeric metric, in step order.
    pub series: BTreeMap<String, Vec<Point>>,
    pub clock: Vec<Tick>,
    /// The steps of evaluations with the rule by which completions passed.
    pass_rules: Vec<(u64, Option<String>)>,
}

impl Phase {
    /// Adds a row. If a value is not a number, nothing is added, and the error names it.
    pub(crate) fn add(&mut self, row: Row) -> Result<(), String> {
        let Row { step, values, pass_rule, .. } = row;
        for (name, value) in &values {
            if !(value.is_null() || value.is_number()) {
                return Err(format!("`{name}` is {value}, expected a number or null"));
            }
        }
        self.pass_rules.push((step, pass_rule));
        let number = |name: &str| values.get(name).and_then(Value::as_f64);
        let (tokens, seconds) = (number("tokens"), number("step_time"));
        let before = self.clock.last().copied().unwrap_or(Tick { step: 0, seconds: 0.0, tokens: 0.0 });
        self.clock.push(Tick {
            step,
            seconds: before.seconds + seconds.unwrap_or(0.0),
            tokens: number("num_tokens").unwrap_or(before.tokens + tokens.unwrap_or(0.0)),
        });
        if let (Some(tokens), Some(seconds)) = (tokens, seconds.filter(|seconds| *seconds > 0.0)) {
            self.push("tokens/s", step, Some(tokens / seconds));
        }
        for (name, value) in &values {
            self.push(name, step, value.as_f64());
        }
        Ok(())
    }

    fn push(&mut self, name: &str, step: u64, value: Option<f64>) {
        let value = value.filter(|value| value.is_finite());
        let point = Point { step, value };
        if let Some(points) = self.series.get_mut(name) {
            points.push(point);
        } else if self.series.len() < MAX_METRICS {
            self.series.insert(name.to_owned(), vec![point]);
        }
    }

    /// Sorts the steps. Returns `true` if they were out of order, for example in a concatenated file.
    pub(crate) fn sort(&mut self) -> bool {
        let sorted = self.clock.is_sorted_by_key(|tick| tick.step);
        if !sorted {
            self.series.values_mut().for_each(|points| points.sort_by_key(|point| point.step));
            self.clock.sort_by_key(|tick| tick.step);
        }
        !sorted
    }

    /// Returns the finite values of a metric with their steps.
    pub(crate) fn finite(&self, name: &str) -> impl DoubleEndedIterator<Item = (u64, f64)> {
        self.series.get(name).into_iter().flatten().filter_map(|point| Some((point.step, point.value?)))
    }

    /// Returns the first step from which all evaluations have the rule of the last one, by which completions pass.
    pub(crate) fn pass_rule_since(&self) -> u64 {
        let Some((_, last)) = self.pass_rules.iter().max_by_key(|(step, _)| *step) else { return 0 };
        let others = self.pass_rules.iter().filter(|(_, rule)| rule.is_some() && last.is_some() && rule != last);
        others.map(|(step, _)| step + 1).max().unwrap_or(0)
    }

    pub(crate) fn last_step(&self) -> u64 {
        self.clock.last().map_or(0, |tick| tick.step)
    }

    /// Returns the seconds of all steps; `None` if no step has a time.
    pub(crate) fn seconds(&self) -> Option<f64> {
        self.series.contains_key("step_time").then(|| self.clock.last().map_or(0.0, |tick| tick.seconds))
    }
}

/// Returns the description of a metric; empty for unknown metrics.
pub(crate) fn about(name: &str) -> &'static str {
    match name {
        "reward" => "mean reward of the sampled completions",
        "reward_std" => "standard deviation of the rewards",
        "loss" => "loss of the step",
        "policy_loss" => "loss without KL and entropy terms",
        "entropy" => "of the policy, nats per token",
        "kl" => "to the reference policy, nats per token",
        "ppo_kl" => "to the policy that sampled, nats per token",
        "grad_norm" => "2-norm before clipping",
        "learning_rate" => "of the optimizer",
        "tokens" => "tokens of the step",
        "num_tokens" => "tokens since the beginning",
        "tokens/s" => "tokens of the step per second",
        "step_time" => "seconds",
        "mfu" => "share of the peak that the update's useful flops reach",
        "tokens_per_second/gen" => "sampled tokens per second of sampling",
        "tokens_per_second/update_actor" => "tokens per second of the updates",
        "frac_reward_zero_std" => "share of groups whose rewards are all equal",
        "frac_rows_empty" => "share of rows without a sequence",
        "completions/mean_length" => "tokens",
        "completions/clipped_ratio" => "share of completions that the length limit cut off",
        "value_loss" => "loss of the value head",
        "aux_loss" => "load balancing loss of experts, without its coefficient",
        "moe/load_max" => "largest share of an expert in the tokens of a layer, over 1/E",
        "moe/load_min" => "smallest share of an expert in the tokens of a layer, over 1/E",
        "moe/max_vio" => "largest load minus 1, mean of the layers",
        "moe/routing_mismatch" => "share of replayed choices that the router would change",
        "moe/routing_mismatch_tokens" => "share of replayed tokens for which a router would choose other experts",
        "moe/load_entropy" => "entropy of the shares of experts, over ln E",
        "eval/pass@1" => "share of held-out problems that the greedy answer solves",
        "eval/reward" => "mean reward of sampled answers to held-out problems",
        "eval/problems" => "number of held-out problems",
        _ if name.starts_with("timing_s/") => "seconds",
        _ if name.starts_with("eval/pass@") => "share of held-out problems",
        _ if name.starts_with("rewards/") && name.ends_with("/mean") => "mean of one reward function",
        _ => "",
    }
}

/// Returns `true` if a metric is a share in [0, 1], which is shown in percent on an axis from 0 to 100.
pub(crate) fn is_share(name: &str) -> bool {
    name.contains("pass@")
        || name.starts_with("moe/routing_mismatch")
        || matches!(name, "frac_reward_zero_std" | "frac_rows_empty" | "completions/clipped_ratio" | "mfu")
}

/// Returns the rank of a metric among the important ones of its phase; `None` for others.
pub(crate) fn rank(phase: &str, name: &str) -> Option<usize> {
    const FIRST: [&str; 21] = [
        "reward",
        "eval/pass@1",
        "eval/pass@*",
        "eval/reward",
        "eval/*",
        "rewards/*/mean",
        "loss",
        "value_loss",
        "entropy",
        "kl",
        "completions/mean_length",
        "completions/clipped_ratio",
        "grad_norm",
        "learning_rate",
        "frac_reward_zero_std",
        "tokens/s",
        "tokens_per_second/*",
        "mfu",
        "step_time",
        "timing_s/*",
        "skipped_updates",
    ];
    if phase == "eval" && matches!(name, "step_time" | "eval/problems") {
        return None;
    }
    FIRST.iter().position(|pattern| match pattern.split_once('*') {
        None => name == *pattern,
        Some((head, tail)) => {
            name.strip_prefix(head).is_some_and(|rest| rest.len() > tail.len() && rest.ends_with(tail))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evaluations_by_another_pass_rule_are_not_compared() {
        let since = |rules: &[Option<&str>]| {
            let mut phase = Phase::default();
            for (step, rule) in rules.iter().enumerate() {
                let row =
                    serde_json::json!({"phase": "eval", "step": 10 * step, "pass_rule": rule, "eval/pass@1": 0.5});
                phase.add(serde_json::from_value(row).unwrap()).unwrap();
            }
            phase.pass_rule_since()
        };
        assert_eq!(since(&[]), 0);
        assert_eq!(since(&[None, None]), 0);
        assert_eq!(since(&[Some("a"), Some("a")]), 0);
        assert_eq!(since(&[Some("a"), Some("b"), Some("b")]), 1);
        assert_eq!(since(&[None, Some("b")]), 0);
    }

    fn row(text: &str) -> Row {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn rows_become_series_with_time_and_tokens_per_second() {
        let mut phase = Phase::default();
        phase.add(row(r#"{"phase":"grpo","step":1,"reward":0.5,"tokens":100,"step_time":2}"#)).unwrap();
        phase.add(row(r#"{"phase":"grpo","step":2,"reward":null,"tokens":100,"step_time":0.5}"#)).unwrap();
        assert_eq!(phase.finite("tokens/s").collect::<Vec<_>>(), [(1, 50.0), (2, 200.0)]);
        assert_eq!(phase.finite("reward").collect::<Vec<_>>(), [(1, 0.5)]);
        assert_eq!(phase.series["reward"][1], Point { step: 2, value: None });
        assert_eq!(phase.clock[1], Tick { step: 2, seconds: 2.5, tokens: 200.0 });
        let refused = phase.add(row(r#"{"phase":"grpo","step":3,"reward":"high"}"#)).unwrap_err();
        assert!(refused.contains("`reward` is \"high\""), "{refused}");
        assert_eq!((phase.last_step(), phase.seconds()), (2, Some(2.5)));
    }

    #[test]
    fn important_metrics_come_first() {
        let mut names = ["entropy", "rewards/correct/mean", "reward", "clip_ratio/high_max", "timing_s/gen"];
        names.sort_by_key(|name| rank("grpo", name).unwrap_or(usize::MAX));
        assert_eq!(names, ["reward", "rewards/correct/mean", "entropy", "timing_s/gen", "clip_ratio/high_max"]);
        assert!(rank("eval", "eval/pass@8") > rank("eval", "eval/pass@1"));
        assert_eq!((rank("eval", "step_time"), rank("grpo", "rewards/correct/std")), (None, None));
    }
}
