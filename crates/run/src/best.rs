//! The best evaluation of a run, by `run.metric_for_best_model`, and early stopping.

use super::jsonl::{MetricsRow, is_same_rule};
use crate::error::Result;
use grpo_run_config::RunOptions;
use grpo_trainer::coefficients::Exact;
use serde::{Deserialize, Serialize};

/// The best evaluation by `run.metric_for_best_model`, as stored in state.json.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// The name of the metric.
    pub metric: String,
    /// The best value of the metric.
    pub value: Exact,
    /// The number of GRPO steps before that evaluation. Its checkpoint was taken after the same step.
    pub step: u64,
    /// The number of evaluations since the last one that improved on the best by more than `run.early_stopping_threshold`.
    pub early_stopping_patience_counter: u64,
    /// The rule by which completions passed ([`MetricsRow::pass_rule`]); `None` if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass_rule: Option<String>,
}

impl Best {
    /// Returns the best evaluation including `row`, and `true` if `row` is the new best.
    ///
    /// # Errors
    /// [`grpo_run_config::Error::Key`] if the evaluation lacks the metric.
    pub(crate) fn after(before: Option<&Self>, options: &RunOptions, row: &MetricsRow) -> Result<Option<(Self, bool)>> {
        let Some(metric) = options.metric_for_best_model.as_deref() else { return Ok(None) };
        let metric = if metric.starts_with(PREFIX) { metric.to_owned() } else { format!("{PREFIX}{metric}") };
        let Some(found) = row.values.get(&metric) else {
            let names: Vec<&str> =
                row.values.keys().filter(|name| name.starts_with(PREFIX)).map(String::as_str).collect();
            let expected = format!("a metric of the evaluation: {}", names.join(", "));
            return Err(grpo_run_config::Error::key("run.metric_for_best_model", expected, metric).into());
        };
        // The metric and its rule may change when a run is resumed; the comparison then starts afresh.
        let rule = row.pass_rule.as_deref();
        let before =
            before.filter(|best| best.metric == metric && is_same_rule(best.pass_rule.as_deref(), rule, &metric));
        // Non-finite values are null in a row and never count as an improvement.
        let better = |value: f64, by: f64| {
            before.is_none_or(|best| {
                let gain = if options.is_greater_better() { value - best.value.0 } else { best.value.0 - value };
                gain > by
            })
        };
        let counter = before.map_or(0, |best| best.early_stopping_patience_counter);
        let counted = match found {
            Some(value) if better(*value, options.early_stopping_threshold) => 0,
            _ => counter + 1,
        };
        match (found, before) {
            (Some(value), _) if better(*value, 0.0) => {
                let best = Self {
                    metric,
                    value: Exact(*value),
                    step: row.step,
                    early_stopping_patience_counter: counted,
                    pass_rule: row.pass_rule.clone(),
                };
                Ok(Some((best, true)))
            }
            (_, Some(best)) => Ok(Some((Self { early_stopping_patience_counter: counted, ..best.clone() }, false))),
            (_, None) => Ok(None),
        }
    }
}

/// The prefix of evaluation metrics, optional in `run.metric_for_best_model`.
const PREFIX: &str = "eval/";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jsonl::RowKind;

    fn options(threshold: f64, greater_is_better: Option<bool>) -> RunOptions {
        RunOptions {
            metric_for_best_model: Some("pass@1".into()),
            greater_is_better,
            early_stopping_patience: Some(2),
            early_stopping_threshold: threshold,
            ..RunOptions::default()
        }
    }

    /// Returns value, step and patience counter of the best evaluation after each of these values.
    fn observed(options: &RunOptions, values: &[f64]) -> Vec<(f64, u64, u64)> {
        let mut best = None;
        let rows = values.iter().enumerate();
        rows.map(|(step, value)| {
            let row = MetricsRow::new(RowKind::Eval, step as u64, [("eval/pass@1", *value)]);
            best = Best::after(best.as_ref(), options, &row).unwrap().map(|(best, _)| best);
            best.as_ref().map_or((f64::NAN, 0, 0), |b| (b.value.0, b.step, b.early_stopping_patience_counter))
        })
        .collect()
    }

    #[test]
    fn early_stopping_counts_patience_like_transformers() {
        let found = observed(&options(0.1, None), &[0.5, 0.5, 0.55, 0.7, f64::NAN, 0.6]);
        // 0.55 is the best value, but improves by less than the threshold.
        let expected = [(0.5, 0, 0), (0.5, 0, 1), (0.55, 2, 2), (0.7, 3, 0), (0.7, 3, 1), (0.7, 3, 2)];
        assert_eq!(found, expected);
        let less = observed(&options(0.0, Some(false)), &[0.5, 0.6, 0.4]);
        assert_eq!(less, [(0.5, 0, 0), (0.5, 0, 1), (0.4, 2, 0)]);
    }

    #[test]
    fn the_best_of_another_pass_rule_is_not_compared() {
        let row = |step, value, rule: &str| MetricsRow {
            pass_rule: Some(rule.to_owned()),
            ..MetricsRow::new(RowKind::Eval, step, [("eval/pass@1", value), ("eval/reward", value)])
        };
        for (metric, expected) in [("pass@1", (0.25, 2)), ("reward", (0.75, 1))] {
            let options = RunOptions { metric_for_best_model: Some(metric.into()), ..RunOptions::default() };
            let (first, _) = Best::after(None, &options, &row(1, 0.75, "a")).unwrap().unwrap();
            let (best, _) = Best::after(Some(&first), &options, &row(2, 0.25, "b")).unwrap().unwrap();
            assert_eq!((best.value.0, best.step), expected, "{metric}");
        }
    }

    #[test]
    fn an_unknown_best_model_metric_is_an_error_with_the_known_ones() {
        let options = RunOptions { metric_for_best_model: Some("eval/pas@1".into()), ..RunOptions::default() };
        let row = MetricsRow::new(RowKind::Eval, 0, [("eval/pass@1", 0.5), ("step_time", 1.0)]);
        let error = Best::after(None, &options, &row).unwrap_err().to_string();
        assert!(error.contains("run.metric_for_best_model") && error.contains("eval/pass@1"), "{error}");
        assert!(!error.contains("step_time"), "{error}");
    }
}
