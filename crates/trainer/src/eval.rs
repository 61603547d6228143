//! Held-out evaluation.

use crate::error::Result;
use crate::parts::Parts;
use crate::prompts::encode_prompts;
use crate::train_config::TrainConfig;
use data::Item;
use models::Tokenizer;
use policy::{Completion, RolloutRequest, Sampling};
use rewards::{Correct, RewardFn, RewardInput, Rewards};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What an evaluation on held-out problems has found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvalReport {
    /// The share of problems whose greedy completion ends by itself and is right, in [0, 1].
    pub pass_at_1: f64,
    /// The share of such problems per task, by the name of the task.
    pub pass_at_1_by_task: BTreeMap<String, f64>,
    /// The mean reward of sampled completions; `None` when none was sampled or every reward is missing.
    pub mean_reward: Option<f64>,
    /// The number of problems evaluated.
    pub problems: usize,
}

/// Evaluates the present policy on `items`. What is sampled depends on the seed, not on the step.
///
/// # Errors
/// [`crate::Error::Policy`] from the engine; [`crate::Error::Model`] from the tokenizer.
pub fn evaluate(parts: &mut Parts, items: &[Item], config: &TrainConfig) -> Result<EvalReport> {
    let mut by_task: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    let passed = greedy_passes(parts, items, config)?;
    for (item, passed) in items.iter().zip(&passed) {
        let (hits, count) = by_task.entry(item.source.to_string()).or_default();
        *hits += usize::from(*passed);
        *count += 1;
    }
    let hits = passed.iter().filter(|p| **p).count();

    let num_generations = config.eval.num_generations;
    let mean_reward = if num_generations == 0 {
        None
    } else {
        let sampling = config.eval.sampling(&config.rollout, config.seed);
        let completions = generate(parts, items, num_generations, sampling, config)?;
        mean_reward(items, num_generations, &completions, &parts.rewards, &*parts.tokenizer)?
    };
    Ok(EvalReport {
        pass_at_1: hits as f64 / items.len().max(1) as f64,
        pass_at_1_by_task: by_task.into_iter().map(|(task, (hits, n))| (task, hits as f64 / n as f64)).collect(),
        mean_reward,
        problems: items.len(),
    })
}

/// Whether the greedy completion of each item ends by itself and is right.
///
/// # Errors
/// As [`evaluate`].
pub fn greedy_passes(parts: &mut Parts, items: &[Item], config: &TrainConfig) -> Result<Vec<bool>> {
    let completions = generate(parts, items, 1, Sampling::Greedy, config)?;
    items
        .iter()
        .zip(completions)
        .map(|(item, completion)| {
            let text = parts.tokenizer.decode(&completion.ids)?;
            let completion_len = completion.ids.len();
            let input = RewardInput { item, completion: &text, truncated: completion.truncated, completion_len };
            Ok(Correct.score(&input) == Some(1.0))
        })
        .collect()
}

fn generate(
    parts: &mut Parts,
    items: &[Item],
    num_generations: usize,
    sampling: Sampling,
    config: &TrainConfig,
) -> Result<Vec<Completion>> {
    let Parts { policy, tokenizer, engine, .. } = parts;
    let (prompts, stop_ids) = (encode_prompts(&**tokenizer, items)?, tokenizer.stop_ids());
    let request = RolloutRequest {
        prompts: &prompts,
        num_generations,
        max_completion_length: config.rollout.max_completion_length,
        stop_ids: &stop_ids,
        sampling,
    };
    Ok(engine.generate(&mut **policy, &request)?)
}

fn mean_reward(
    items: &[Item],
    per_item: usize,
    completions: &[Completion],
    rewards: &Rewards,
    tokenizer: &dyn Tokenizer,
) -> Result<Option<f64>> {
    let texts = completions.iter().map(|c| tokenizer.decode(&c.ids)).collect::<models::Result<Vec<_>>>()?;
    let inputs: Vec<RewardInput<'_>> = (completions.iter().zip(&texts).enumerate())
        .map(|(i, (completion, text))| RewardInput {
            item: &items[i / per_item],
            completion: text,
            truncated: completion.truncated,
            completion_len: completion.ids.len(),
        })
        .collect();
    let totals: Vec<f64> = rewards.score(&inputs).iter().filter_map(|r| r.total.map(f64::from)).collect();
    Ok((!totals.is_empty()).then(|| totals.iter().sum::<f64>() / totals.len() as f64))
}
