//! Held-out evaluation.

use crate::error::Result;
use crate::parts::Parts;
pub use crate::pass_rule::PassRule;
use grpo_conversations::Completed;
use grpo_data::Item;
use grpo_policy::Sampling;
use grpo_rewards::{Correct, Reward, RewardFn, RewardInput, Rewards};
use grpo_run_config::TrainConfig;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// The results of an evaluation on held-out problems.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EvalReport {
    /// The share of problems whose greedy completion passes, in [0, 1]; with 1 in `eval.pass_at`, the share of sampled completions that
    /// pass. [`PassRule`] defines passing.
    pub pass_at_1: f64,
    /// pass@1 per source, by its name.
    pub pass_at_1_by_task: BTreeMap<String, f64>,
    /// pass@k of the sampled completions for each other k of `eval.pass_at`: the probability that at least one of k passes.
    pub pass_at: BTreeMap<usize, PassAt>,
    /// The mean reward of sampled completions; `None` when none was sampled or every reward is missing.
    pub mean_reward: Option<f64>,
    /// The mean of each reward function, without its weight, by its name; functions that returned no reward are missing.
    pub mean_rewards: BTreeMap<String, f64>,
    /// The number of completions that a reward function failed to score, by its name; functions without failures are missing. Such a
    /// completion has no reward and does not pass.
    pub failures: BTreeMap<String, usize>,
    /// The number of problems evaluated.
    pub problems: usize,
}

/// Shares of solved problems, in [0, 1].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PassAt {
    /// The share of all problems.
    pub all: f64,
    /// The share per source, by its name.
    pub by_source: BTreeMap<String, f64>,
}

/// Returns an unbiased estimate of the probability that at least one of `k` completions passes, if `passed` of `samples` completions
/// pass: 1 - C(n - c, k) / C(n, k) (Codex, arXiv 2107.03374, with the product of its figure 3).
///
/// ```
/// use grpo_trainer::eval::pass_at_k;
///
/// assert_eq!(pass_at_k(4, 1, 1), 0.25);
/// assert_eq!(pass_at_k(4, 1, 2), 0.5);
/// assert_eq!(pass_at_k(4, 2, 3), 1.0);
/// ```
pub fn pass_at_k(samples: usize, passed: usize, k: usize) -> f64 {
    let failed = samples.saturating_sub(passed);
    if failed < k {
        return 1.0;
    }
    1.0 - (failed + 1..=samples).map(|i| 1.0 - k as f64 / i as f64).product::<f64>()
}

/// Evaluates the policy on `items`. Sampling depends on the seed, not on the step.
///
/// # Errors
/// [`crate::Error::Policy`] from the engine; [`crate::Error::Model`] from the tokenizer.
pub(crate) fn evaluate(parts: &mut Parts, items: &[Item], config: &TrainConfig) -> Result<EvalReport> {
    let eval = &config.eval;
    let mut report = EvalReport { problems: items.len(), ..EvalReport::default() };
    if !eval.pass_at.contains(&1) {
        let passed = greedy(parts, items, config, &mut report.failures)?;
        let solved = average(items, passed.iter().map(|passed| f64::from(u8::from(*passed))));
        (report.pass_at_1, report.pass_at_1_by_task) = (solved.all, solved.by_source);
    }
    if eval.num_generations == 0 {
        return Ok(report);
    }
    let sampling = eval.sampling(&config.rollout, config.seed);
    // All greedy completions of a prompt are equal.
    let per_item = if sampling == Sampling::Greedy { 1 } else { eval.num_generations };
    let sampled = generate(parts, items, per_item, sampling, config)?;
    let inputs = sampled.inputs(&items.iter().collect::<Vec<_>>());
    let rewards = parts.score(None, &inputs)?;
    count_failures(&mut report.failures, &parts.rewards, &rewards);
    if !eval.pass_at.is_empty() {
        let passed = passes(parts, config, &inputs, |_| Ok(Cow::Borrowed(&rewards)))?;
        let counts: Vec<usize> =
            passed.chunks(per_item).map(|of_item| of_item.iter().filter(|p| **p).count()).collect();
        for &k in &eval.pass_at {
            let solved = average(items, counts.iter().map(|passed| pass_at_k(per_item, *passed, k)));
            if k == 1 {
                (report.pass_at_1, report.pass_at_1_by_task) = (solved.all, solved.by_source);
            } else {
                report.pass_at.insert(k, solved);
            }
        }
    }
    report.mean_reward = mean(rewards.iter().filter_map(|reward| reward.total));
    for (k, name) in parts.rewards.names().enumerate() {
        let of_function = mean(rewards.iter().filter_map(|reward| reward.terms[k]));
        report.mean_rewards.extend(of_function.map(|mean| (name.to_owned(), mean)));
    }
    Ok(report)
}

/// Returns, for each item, `true` if its greedy completion passes. Counts failures of reward functions.
///
/// # Errors
/// The errors of [`evaluate`].
pub(crate) fn greedy(
    parts: &mut Parts,
    items: &[Item],
    config: &TrainConfig,
    failures: &mut BTreeMap<String, usize>,
) -> Result<Vec<bool>> {
    let sampled = generate(parts, items, 1, Sampling::Greedy, config)?;
    let inputs = sampled.inputs(&items.iter().collect::<Vec<_>>());
    passes(parts, config, &inputs, |functions| {
        let scored = parts.score(Some(functions), &inputs)?;
        count_failures(failures, &parts.rewards, &scored);
        Ok(Cow::Owned(scored))
    })
}

/// Counts failures, and logs the first of each function.
fn count_failures(failures: &mut BTreeMap<String, usize>, rewards: &Rewards, scored: &[Reward]) {
    for (index, failure) in scored.iter().flat_map(|reward| &reward.failures) {
        let name = rewards.names().nth(*index).unwrap_or_default();
        let count = failures.entry(name.to_owned()).or_default();
        *count += 1;
        if *count == 1 {
            tracing::warn!(
                "the reward `{name}` has failed for a completion of the evaluation, which does not pass: {failure}"
            );
        }
    }
}

/// Returns, for each completion, `true` if it passes. A completion does not pass if a function of the rule returns no reward or fails.
/// `score` returns the rewards of at least these functions, by index.
fn passes<'a>(
    parts: &Parts,
    config: &TrainConfig,
    inputs: &[RewardInput<'_>],
    score: impl FnOnce(&[usize]) -> Result<Cow<'a, [Reward]>>,
) -> Result<Vec<bool>> {
    let is_one = |value: Option<f32>| value >= Some(1.0);
    let known = || parts.rewards.names().enumerate();
    Ok(match PassRule::of(config, &parts.rewards)? {
        PassRule::Correct => {
            let correct = Correct { answer: config.rewards.answer_rule() };
            let has_failed = |input: &RewardInput<'_>| input.conversation.is_some_and(|c| c.failure.is_some());
            inputs.iter().map(|input| !has_failed(input) && is_one(correct.score(input))).collect()
        }
        PassRule::Sum => {
            let all: Vec<usize> = known().map(|(index, _)| index).collect();
            score(&all)?.iter().map(|reward| is_one(reward.total)).collect()
        }
        PassRule::Each(names) => {
            let named = known().filter(|(_, name)| names.iter().any(|known| known == name));
            let indices: Vec<usize> = named.map(|(index, _)| index).collect();
            score(&indices)?.iter().map(|reward| indices.iter().all(|index| is_one(reward.terms[*index]))).collect()
        }
    })
}

fn generate(
    parts: &mut Parts,
    items: &[Item],
    num_generations: usize,
    sampling: Sampling,
    config: &TrainConfig,
) -> Result<Completed> {
    let longest = config.eval.max_completion_length(&config.rollout);
    let rows: Vec<&Item> = items.iter().collect();
    let completed = parts.rollout(config).complete(&rows, num_generations, longest, sampling)?;
    let all = &completed.conversations;
    let failures: Vec<&str> = all.iter().filter_map(|each| each.conversation.failure.as_deref()).collect();
    if let Some(first) = failures.first() {
        let count = failures.len();
        tracing::warn!("{count} of {} conversations of the evaluation failed and do not pass: {first}", all.len());
    }
    Ok(completed)
}

/// Returns the mean of one number per item, over all items and per source.
fn average(items: &[Item], solved: impl Iterator<Item = f64>) -> PassAt {
    let (mut all, mut by_source) = (0.0, BTreeMap::<String, (f64, usize)>::new());
    for (item, solved) in items.iter().zip(solved) {
        let (sum, count) = by_source.entry(item.source.to_string()).or_default();
        (*sum, *count, all) = (*sum + solved, *count + 1, all + solved);
    }
    PassAt {
        all: all / items.len().max(1) as f64,
        by_source: by_source.into_iter().map(|(source, (sum, count))| (source, sum / count as f64)).collect(),
    }
}

/// Returns the mean of the values; `None` if there are none.
fn mean(values: impl Iterator<Item = f32>) -> Option<f64> {
    let values: Vec<f64> = values.map(f64::from).collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pass_at_k_is_the_share_of_all_choices_of_k() {
        /// Returns every choice of `k` among `samples`, of which the first `passed` pass.
        fn counted(samples: usize, passed: usize, k: usize) -> f64 {
            let choices = (0_u32..1 << samples).filter(|choice| choice.count_ones() as usize == k);
            let (mut all, mut solved) = (0.0, 0.0);
            for choice in choices {
                all += 1.0;
                solved += f64::from(u8::from(choice & ((1 << passed) - 1) != 0));
            }
            solved / all
        }
        for samples in 1..=9 {
            for (passed, k) in (0..=samples).flat_map(|passed| (1..=samples).map(move |k| (passed, k))) {
                let (found, want) = (pass_at_k(samples, passed, k), counted(samples, passed, k));
                assert!((found - want).abs() < 1e-12, "{samples} {passed} {k}: {found} {want}");
            }
        }
        // The sizes of HumanEval: 200 samples, where binomial coefficients are huge.
        assert!((pass_at_k(200, 20, 100) - 1.0).abs() < 1e-6 && (pass_at_k(200, 20, 1) - 0.1).abs() < 1e-12);
    }
}
