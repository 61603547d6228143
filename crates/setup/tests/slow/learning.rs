//! A policy learns from conversations with an environment and with an agent, and repeats them with any batch size.

use crate::support::agents::Hold;
use crate::support::conversations::{QUESTION, letters};
use crate::support::{agents, conversations, scored};
use grpo_policy::PolicyEngine;
use grpo_trainer::step::StepReport;
use serde_json::json;

#[test]
fn a_policy_learns_from_conversations_and_repeats_them() {
    let run = |batch_size: usize, steps: u64| {
        let mut config = conversations::config(json!({}));
        (config.grpo.num_generations, config.rollout.batch_size, config.grpo.max_steps) = (16, batch_size, 30);
        config.rollout.max_completion_length = Some(100);
        config.optimizer.learning_rate = 0.02;
        // Random tokens end a turn now and then, and these tokens end it, too.
        config.rollout.stop_token_ids = (0..60).collect();
        let rewards = scored("environment", |input| input.conversation?.reward);
        let mut run = conversations::trainer(config, letters(), rewards, Box::new(PolicyEngine)).unwrap();
        (0..steps).map(|_| run.grpo_step().unwrap()).collect::<Vec<StepReport>>()
    };
    let first = run(256, 30);
    assert!(first[..2].iter().all(|report| report.metric("num_turns/max") > 1.0));
    let rewards: Vec<f64> = first.iter().map(|report| report.metric("reward")).collect();
    let mean = |rewards: &[f64]| rewards.iter().sum::<f64>() / rewards.len() as f64;
    let [before, after] = [&rewards[..5], &rewards[25..]].map(mean);
    assert!(after > 2.0 * before && before > 0.0, "{rewards:?}");
    // The caches of earlier turns do not change the samples.
    for batch_size in [256, 1] {
        for (first, again) in first.iter().zip(run(batch_size, 2)) {
            let texts = |report: &StepReport| report.samples.iter().map(|s| s.completion.clone()).collect::<Vec<_>>();
            assert_eq!(texts(first), texts(&again));
        }
    }
}

#[test]
fn a_policy_learns_from_an_agent_and_repeats_it() {
    // The reward is the number of letters e in both messages.
    let hold: Hold = |client, _| {
        let mut messages = vec![agents::user(QUESTION)];
        let mut count = 0;
        for _ in 0..2 {
            let (message, _) = client.ask(&messages, json!({"max_tokens": 16}));
            count += message["content"].as_str().unwrap().matches('e').count();
            messages.extend([message, agents::user("again")]);
        }
        Ok(Some(count as f32))
    };
    let run = |batch_size: usize, steps: u64| {
        let mut config = conversations::config(json!({}));
        (config.grpo.num_generations, config.grpo.max_steps, config.rollout.batch_size) = (8, 12, batch_size);
        config.optimizer.learning_rate = 0.02;
        let rewards = scored("environment", |input| input.conversation?.reward);
        let mut run = agents::trainer(config, hold, rewards, Box::new(PolicyEngine)).unwrap();
        (0..steps).map(|_| run.grpo_step().unwrap()).collect::<Vec<StepReport>>()
    };
    let reports = run(256, 12);
    let reward =
        |reports: &[StepReport]| reports.iter().map(|r| r.metric("reward")).sum::<f64>() / reports.len() as f64;
    let (first, last) = (reward(&reports[..3]), reward(&reports[9..]));
    assert!(last > first + 1.0, "{first} {last}");
    for (first, again) in reports.iter().zip(run(1, 3)) {
        let texts = |report: &StepReport| report.samples.iter().map(|s| s.completion.clone()).collect::<Vec<_>>();
        assert_eq!(texts(first), texts(&again));
    }
}
