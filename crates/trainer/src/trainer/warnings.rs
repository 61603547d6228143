//! Warnings of settings and of first steps that make a run learn little.

use crate::step::StepReport;
use rewards::Rewards;
use run_config::TrainConfig;

/// The number of characters of a sample in a warning.
const SHOWN: usize = 300;
/// The share of truncated completions above which the first step is reported.
const MOST_CLIPPED: f64 = 0.9;
/// The share of conversations without room for a message of their environment above which the first step is reported.
const MOST_WITHOUT_ROOM: f64 = 0.25;

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
