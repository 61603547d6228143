//! Rows of a run's logs.

use super::jsonl::CompletionRow;
use grpo_rewards::{RewardFailure, Rewards};
use grpo_trainer::eval::EvalReport;
use grpo_trainer::step::{Sample, StepReport};

/// Returns the metrics of an evaluation by name.
pub(super) fn eval_values(report: &EvalReport) -> Vec<(String, f64)> {
    let mut values =
        vec![("eval/pass@1".to_owned(), report.pass_at_1), ("eval/problems".to_owned(), report.problems as f64)];
    values.extend(report.mean_reward.map(|reward| ("eval/reward".to_owned(), reward)));
    // With a single function, the mean equals the reward apart from its weight.
    if report.mean_rewards.len() > 1 {
        values.extend(report.mean_rewards.iter().map(|(name, mean)| (format!("eval/rewards/{name}/mean"), *mean)));
    }
    values.extend(report.failures.iter().map(|(name, count)| (format!("eval/rewards/{name}/failures"), *count as f64)));
    for (k, pass) in &report.pass_at {
        values.push((format!("eval/pass@{k}"), pass.all));
        if pass.by_source.len() > 1 {
            values.extend(pass.by_source.iter().map(|(source, pass)| (format!("eval/pass@{k}/{source}"), *pass)));
        }
    }
    // A single task needs no column of its own.
    if report.pass_at_1_by_task.len() > 1 {
        values.extend(report.pass_at_1_by_task.iter().map(|(task, pass)| (format!("eval/pass@1/{task}"), *pass)));
    }
    values
}

/// Returns the best and the worst completion of some groups, evenly spread over the step. A completion without a reward is the worst.
pub(super) fn pick_completions(
    report: &StepReport,
    rewards: &Rewards,
    per_group: usize,
    count: usize,
) -> Vec<CompletionRow> {
    let groups: Vec<&[Sample]> = report.samples.chunks(per_group.max(1)).collect();
    let group_count = count.div_ceil(2).min(groups.len());
    let reward = |sample: &Sample| sample.reward.total.unwrap_or(f32::NEG_INFINITY);
    let failure = |(index, failure): &(usize, RewardFailure)| {
        format!("{}: {failure}", rewards.names().nth(*index).unwrap_or_default())
    };
    let mut rows = Vec::with_capacity(count);
    for i in 0..group_count {
        let group = groups[i * groups.len() / group_count];
        let best = group.iter().max_by(|a, b| reward(a).total_cmp(&reward(b)));
        let worst = group.iter().min_by(|a, b| reward(a).total_cmp(&reward(b)));
        for sample in best.into_iter().chain(worst) {
            rows.push(CompletionRow {
                step: report.step,
                task: sample.task.clone(),
                prompt: sample.prompt.clone(),
                answer: sample.answer.clone(),
                completion: sample.completion.clone(),
                truncated: sample.truncated,
                reward: sample.reward.total,
                rewards: rewards.names().map(Into::into).zip(sample.reward.terms.iter().copied()).collect(),
                advantage: sample.advantage,
                reward_failures: sample.reward.failures.iter().map(failure).collect(),
                weight_versions: sample.weight_versions.clone(),
            });
        }
    }
    rows.truncate(count);
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_trainer::eval::PassAt;
    use std::collections::BTreeMap;

    #[test]
    fn evaluations_have_metrics_per_source_if_there_are_several() {
        let of = |sources: &[&str]| {
            let by_source: BTreeMap<String, f64> = sources.iter().map(|source| ((*source).to_owned(), 0.25)).collect();
            let pass_at = BTreeMap::from([(4, PassAt { all: 0.5, by_source: by_source.clone() })]);
            let report = EvalReport { pass_at, pass_at_1_by_task: by_source, ..EvalReport::default() };
            let names = eval_values(&report).into_iter().map(|(name, _)| name);
            names.filter(|name| name.contains("pass@")).collect::<Vec<_>>()
        };
        assert_eq!(of(&["gsm8k"]), ["eval/pass@1", "eval/pass@4"]);
        let both = [
            "eval/pass@1",
            "eval/pass@4",
            "eval/pass@4/gsm8k",
            "eval/pass@4/math",
            "eval/pass@1/gsm8k",
            "eval/pass@1/math",
        ];
        assert_eq!(of(&["gsm8k", "math"]), both);
    }
}
