//! Metrics of a step that are known before its first update, by TRL's names.

use super::generate::Group;
use grpo_conversations::Conversed;
use grpo_core::Metrics;
use grpo_data::History;
use grpo_rewards::Rewards;
use grpo_run_config::TrainConfig;

/// Records rewards and lengths of all samples, including groups that were filtered out.
pub(super) fn record(
    metrics: &mut Metrics,
    groups: &[Group],
    rewards: &Rewards,
    config: &TrainConfig,
    has_agents: bool,
) {
    let samples = || groups.iter().flat_map(|group| &group.samples);
    record_rewards(metrics, "reward", "reward_std", samples().filter_map(|s| s.reward.total));
    for (k, name) in rewards.names().enumerate() {
        let terms = samples().filter_map(|s| s.reward.terms[k]);
        record_rewards(metrics, &format!("rewards/{name}/mean"), &format!("rewards/{name}/std"), terms);
        let failures = samples().flat_map(|s| &s.reward.failures).filter(|(failed, _)| *failed == k).count();
        // External functions have this metric in every step, so their curves have zeros.
        let is_external = config.rewards.programs.contains_key(name) || config.rewards.http.contains_key(name);
        if failures > 0 || is_external {
            metrics.mean(&format!("rewards/{name}/failures"), failures as f64, 1.0);
        }
    }
    // The rewards of a group of one completion are equal by construction.
    for group in groups.iter().filter(|_| config.grpo.num_generations > 1) {
        let mut present = group.samples.iter().filter_map(|s| s.reward.total);
        let first = present.next();
        let equal = present.all(|reward| Some(reward) == first);
        metrics.mean("frac_reward_zero_std", f64::from(u8::from(equal)), 1.0);
    }
    record_lengths(metrics, groups);
    if groups.iter().any(|group| !group.conversations.is_empty()) {
        record_conversations(metrics, groups, has_agents, config.data.history == History::Fork);
    }
}

/// Records turns, tool calls and failures of environments; the rows of conversations if they may have several.
fn record_conversations(metrics: &mut Metrics, groups: &[Group], has_agents: bool, forks: bool) {
    let all = || groups.iter().flat_map(|group| &group.conversations);
    let (mut calls, mut failed_calls) = (0, 0);
    for Conversed { turns, calls: of_one, failed_calls: failed, .. } in all() {
        metrics.mean("num_turns/mean", *turns as f64, 1.0);
        metrics.min("num_turns/min", *turns as f64);
        metrics.max("num_turns/max", *turns as f64);
        metrics.mean("tools/call_frequency", *of_one as f64, 1.0);
        (calls, failed_calls) = (calls + of_one, failed_calls + failed);
    }
    for conversed in all().filter(|_| has_agents || forks) {
        let rows = 1.0 + conversed.other_rows.len() as f64;
        metrics.mean("num_rows/mean", rows, 1.0);
        metrics.max("num_rows/max", rows);
        if has_agents {
            metrics.mean("endpoint/unmet_requests", conversed.unmet as f64, 1.0);
        }
    }
    let share = if calls > 0 { failed_calls as f64 / calls as f64 } else { 0.0 };
    metrics.mean("tools/failure_frequency", share, 1.0);
    let lack_room = all().filter(|conversed| conversed.lacks_room).count() as f64;
    metrics.mean("environments/without_room", lack_room, all().count() as f64);
    let failures = all().filter(|conversed| conversed.conversation.failure.is_some()).count();
    metrics.mean("environments/failures", failures as f64, 1.0);
}

/// Records mean and standard deviation (ddof 1) of the present rewards; skips a statistic with too few of them.
fn record_rewards(metrics: &mut Metrics, mean: &str, std: &str, rewards: impl Iterator<Item = f32>) {
    let rewards: Vec<f64> = rewards.map(f64::from).collect();
    let count = rewards.len() as f64;
    let sum: f64 = rewards.iter().sum();
    if count > 0.0 {
        metrics.mean(mean, sum, count);
    }
    if count > 1.0 {
        let variance = rewards.iter().map(|r| (r - sum / count).powi(2)).sum::<f64>() / (count - 1.0);
        metrics.mean(std, variance.sqrt(), 1.0);
    }
}

/// Records lengths in sampled tokens, including EOS. If every completion was truncated, the terminated lengths are 0 (as in TRL).
fn record_lengths(metrics: &mut Metrics, groups: &[Group]) {
    let mut terminated = Vec::new();
    let of_group = |group: &Group| {
        let mut lengths = vec![0; group.completions.len()];
        group.rows().for_each(|(sample, _, completion)| lengths[sample] += completion.sampled_len());
        lengths
    };
    let lengths = groups.iter().flat_map(of_group);
    for (completion, length) in groups.iter().flat_map(|group| &group.completions).zip(lengths) {
        let length = length as f64;
        record_length(metrics, "length", length);
        metrics.mean("completions/clipped_ratio", f64::from(u8::from(completion.truncated)), 1.0);
        if !completion.truncated {
            terminated.push(length);
        }
    }
    if terminated.is_empty() {
        terminated.push(0.0);
    }
    terminated.into_iter().for_each(|length| record_length(metrics, "terminated_length", length));
}

fn record_length(metrics: &mut Metrics, what: &str, length: f64) {
    metrics.mean(&format!("completions/mean_{what}"), length, 1.0);
    metrics.min(&format!("completions/min_{what}"), length);
    metrics.max(&format!("completions/max_{what}"), length);
}
