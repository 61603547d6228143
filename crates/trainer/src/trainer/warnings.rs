//! Warnings of settings and of first steps that make a run learn little.

use crate::error::Result;
use crate::eval::{EvalReport, PassRule};
use crate::step::{Sample, StepReport};
use grpo_files::counted;
use grpo_rewards::{Correct, RewardFn, Rewards};
use grpo_run_config::{OptimizerConfig, REWARD, TrainConfig};

/// The number of characters of a sample in a warning.
const SHOWN: usize = 300;
/// The share of truncated completions above which the first step is reported.
const MOST_CLIPPED: f64 = 0.9;
/// The share of conversations without room for a message of their environment above which the first step is reported.
const MOST_WITHOUT_ROOM: f64 = 0.25;
/// The temperature below which samples are almost always the most likely token.
const COLD: f64 = 0.1;
/// The value of `top_p` below which few tokens are left.
const SMALL_TOP_P: f64 = 0.1;
/// The limit of a completion in tokens up to which different completions are unlikely.
const FEW_TOKENS: usize = 2;

/// Warns if completions are sampled from another distribution than the softmax of the loss.
pub(super) fn warn_of_truncated_sampling(config: &TrainConfig) {
    let active = config.rollout.processors().active();
    if active.is_empty() || config.rollout.replay_sampling_mask {
        return;
    }
    let list = |text: &mut dyn Iterator<Item = String>| text.collect::<Vec<_>>().join(", ");
    let found = list(&mut active.iter().map(|(name, value, _)| format!("rollout.{name}={value}")));
    let off = list(&mut active.iter().map(|(name, _, off)| format!("rollout.{name}={off}")));
    tracing::warn!(
        "completions are sampled from a truncated or penalised distribution ({found}), and the loss is over the whole softmax: its \
         probabilities are not those of the samples, which can make a run collapse; rollout.replay_sampling_mask computes the loss of \
         truncated distributions, and {off} switches this off"
    );
}

/// Warns if nothing passes in the first evaluation, and the rule by which completions pass was not chosen: graded rewards seldom reach 1.
pub(super) fn warn_of_pass_rule(config: &TrainConfig, rewards: &Rewards, report: &EvalReport) -> Result<()> {
    let rule = PassRule::of(config, rewards)?;
    let is_graded = match &rule {
        PassRule::Each(names) => names.iter().any(|name| name != Correct::default().name()),
        PassRule::Sum => true,
        PassRule::Correct => false,
    };
    if is_graded && report.problems > 0 && report.pass_at_1 == 0.0 && config.eval.pass_reward.is_none() {
        let first = rewards.names().next().unwrap_or(REWARD);
        tracing::warn!(
            "pass@1 of the first evaluation is 0: it counts completions with {rule}, which graded rewards seldom reach; \
             eval.pass_reward names the one reward that decides, as in `--set eval.pass_reward={first}`"
        );
    }
    Ok(())
}

/// Returns the number of groups of the step whose completions are all identical, and the number of groups.
fn identical_groups(config: &TrainConfig, samples: &[Sample]) -> (usize, usize) {
    let groups = samples.chunks(config.grpo.num_generations.max(1));
    let is_identical = |group: &&[Sample]| group.iter().all(|sample| sample.completion == group[0].completion);
    (groups.clone().filter(is_identical).count(), groups.count())
}

/// Returns the likely reasons for which all completions of a prompt are identical.
fn reasons_for_identical(config: &TrainConfig) -> String {
    let rollout = &config.rollout;
    let active = rollout.processors().active();
    let value = |name: &str| active.iter().find(|(known, ..)| *known == name).map(|(_, value, _)| value.to_string());
    let mut reasons = Vec::new();
    if rollout.temperature() < COLD {
        reasons.push(format!(
            "rollout.temperature is {}, which samples the most likely token: set 1",
            rollout.temperature()
        ));
    }
    if value("top_k").as_deref() == Some("1") {
        reasons.push("rollout.top_k is 1, which samples the most likely token: set 0".to_owned());
    }
    if let Some(top_p) = value("top_p").filter(|value| value.parse::<f64>().is_ok_and(|top_p| top_p < SMALL_TOP_P)) {
        reasons.push(format!("rollout.top_p is {top_p}, which keeps hardly more than the most likely token: set 1"));
    }
    if rollout.max_completion_length() <= FEW_TOKENS {
        let length = rollout.max_completion_length();
        reasons.push(format!("rollout.max_completion_length is {length}: completions are cut off before they differ"));
    }
    if rollout.engine.is_server() {
        reasons.push("the server may sample every completion with one seed: start it without a fixed seed".to_owned());
    }
    if reasons.is_empty() {
        reasons.push(
            "the policy is sure of every token of these prompts: take harder ones, or raise rollout.temperature"
                .to_owned(),
        );
    }
    reasons.join("; ")
}

/// Warns if the learning rate of the optimizer in `section` still rises at the last of its `updates`.
pub(super) fn warn_of_long_warmup(section: &str, optimizer: &OptimizerConfig, updates: u64) {
    let steps = optimizer.warmup_steps.trunc();
    if updates > 0 && steps >= updates as f64 {
        let share = (updates - 1) as f64 / steps;
        tracing::warn!(
            "{section}.warmup_steps, {steps}, is not less than the number of updates, {updates}: the learning rate reaches {:.0} % of \
             {section}.learning_rate; lower it, or set {section}.warmup_ratio, a share of the updates",
            100.0 * share
        );
    }
}

/// Warns if little or nothing can be learned from the first step.
pub(super) fn warn_of_first_step(config: &TrainConfig, rewards: &Rewards, has_tools: bool, report: &StepReport) {
    let clipped = report.metric("completions/clipped_ratio");
    let without_room = report.metrics.value("environments/without_room").unwrap_or(0.0);
    if without_room > MOST_WITHOUT_ROOM {
        tracing::warn!(
            "{:.0} % of the first step's conversations ended because a message of a tool or an environment had no room in \
             rollout.max_completion_length, {}: cut messages with rollout.multi_turn.max_tool_response_length, in characters, or raise it",
            100.0 * without_room,
            config.rollout.max_completion_length()
        );
    } else if clipped > MOST_CLIPPED {
        tracing::warn!(
            "{:.0} % of the first step's completions were cut off at rollout.max_completion_length, {}: raise it, or check that the model \
             ends its answers",
            100.0 * clipped,
            config.rollout.max_completion_length()
        );
    }
    if report.metrics.value("reward").is_none() {
        tracing::warn!(
            "no completion of the first step has a reward: no reward function had anything to say about any of them"
        );
    }
    let (identical, groups) = identical_groups(config, &report.samples);
    if config.grpo.num_generations > 1 && 2 * identical >= groups && identical > 0 {
        tracing::warn!(
            "all completions of a prompt are identical for {identical} of {} of the first step, and there is nothing to learn from such \
             groups: {}",
            counted(groups, "prompt"),
            reasons_for_identical(config)
        );
    } else if config.grpo.num_generations > 1 && report.metric("frac_reward_zero_std") >= 1.0 {
        tracing::warn!(
            "no group of the first step has completions with different rewards, and there is nothing to learn from such groups: take \
             easier or harder problems, raise grpo.num_generations, or check the reward"
        );
    }
    if has_tools {
        let value = |name: &str| report.metrics.value(name).unwrap_or(0.0);
        let what = if value("tools/call_frequency") == 0.0 {
            Some("no completion of the first step calls a tool")
        } else if value("tools/failure_frequency") >= 1.0 {
            Some("every call of a tool in the first step failed")
        } else {
            None
        };
        if let Some(what) = what {
            let sample: String =
                report.samples.first().map_or("", |sample| &sample.completion).chars().take(SHOWN).collect();
            tracing::warn!(
                sample,
                "{what}: check that the model writes calls in the format of rollout.multi_turn.tool_parser, or warm it up"
            );
        }
    }
    for name in rewards.names().filter(|name| matches_patterns(config, name)) {
        let value = |what: &str| report.metrics.value(&format!("rewards/{name}/{what}")).unwrap_or(0.0);
        if value("mean") == 0.0 && value("std") == 0.0 {
            tracing::warn!(
                "the reward `{name}` matched no completion of the first step: it gave 0, or nothing, to all of them"
            );
        }
    }
}

/// Returns `true` if the reward `name` looks for a pattern, or is a program or an endpoint.
fn matches_patterns(config: &TrainConfig, name: &str) -> bool {
    let of_users = &config.rewards;
    ["think_format", "tag_count", "json"].contains(&name)
        || of_users.regex.contains_key(name)
        || of_users.programs.contains_key(name)
        || of_users.http.contains_key(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warmup_longer_than_the_run_is_a_warning() {
        let log = |warmup_steps: f64, updates| {
            let optimizer = OptimizerConfig { warmup_steps, ..OptimizerConfig::default() };
            grpo_testkit::logged(|| warn_of_long_warmup("optimizer", &optimizer, updates))
        };
        let text = log(100.0, 40);
        for part in
            ["WARN", "optimizer.warmup_steps, 100, is not less than the number of updates, 40", "reaches 39 % of"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(log(40.0, 40).contains("reaches 98 % of"));
        for (steps, updates) in [(39.0, 40), (0.5, 1), (0.0, 40), (100.0, 0)] {
            assert_eq!(log(steps, updates), "", "{steps} of {updates}");
        }
    }
}
