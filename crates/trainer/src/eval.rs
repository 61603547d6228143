//! Held-out evaluation.

use crate::dataset::Item;
use crate::error::Result;
use crate::model::Decoder;
use crate::reward::{RewardInput, Rewards};
use crate::rng::Purpose;
use crate::rollout::{Completion, RolloutEngine, RolloutRequest, Sampling};
use crate::tokenizer::Tokenizer;
use crate::train_config::TrainConfig;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How good a policy is on held-out problems.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvalReport {
    /// Share of problems whose greedy completion ends by itself and is right, in [0, 1].
    pub pass_at_1: f64,
    /// The same per task.
    pub pass_at_1_by_task: BTreeMap<String, f64>,
    /// Mean reward of sampled completions; `None` when none was sampled or every reward is missing.
    pub mean_reward: Option<f64>,
    /// Problems evaluated.
    pub problems: usize,
}

/// Evaluates `model` (on a device without autodiff) on `items`. Depends on the seed, not on the step.
///
/// # Errors
/// Those of the engine; [`crate::Error::UnknownCharacter`].
pub fn evaluate(
    model: &Decoder,
    engine: &mut dyn RolloutEngine,
    items: &[Item],
    rewards: &Rewards,
    config: &TrainConfig,
) -> Result<EvalReport> {
    let mut by_task: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    let passed = greedy_passes(model, engine, items, config)?;
    for (item, passed) in items.iter().zip(&passed) {
        let (hits, count) = by_task.entry(item.task.name().to_owned()).or_default();
        *hits += usize::from(*passed);
        *count += 1;
    }
    let hits = passed.iter().filter(|p| **p).count();

    let num_generations = config.eval.num_generations;
    let mean_reward = if num_generations == 0 {
        None
    } else {
        let sampling = Sampling::Random {
            temperature: config.rollout.temperature,
            seed: config.seed,
            purpose: Purpose::EvalRollout,
            step: 0,
            first: 0,
        };
        let completions = generate(model, engine, items, num_generations, sampling, config)?;
        mean_reward(items, num_generations, &completions, rewards)?
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
pub fn greedy_passes(
    model: &Decoder,
    engine: &mut dyn RolloutEngine,
    items: &[Item],
    config: &TrainConfig,
) -> Result<Vec<bool>> {
    let completions = generate(model, engine, items, 1, Sampling::Greedy, config)?;
    items
        .iter()
        .zip(completions)
        .map(|(item, completion)| {
            let text = Tokenizer.decode(&completion.ids)?;
            Ok(!completion.truncated && item.task.verify(&item.problem, &text))
        })
        .collect()
}

fn generate(
    model: &Decoder,
    engine: &mut dyn RolloutEngine,
    items: &[Item],
    num_generations: usize,
    sampling: Sampling,
    config: &TrainConfig,
) -> Result<Vec<Completion>> {
    let prompts = items.iter().map(|i| Tokenizer.encode_prompt(&i.problem.prompt)).collect::<Result<Vec<_>>>()?;
    let max_completion_length = config.rollout.max_completion_length;
    engine.generate(model, &RolloutRequest { prompts: &prompts, num_generations, max_completion_length, sampling })
}

fn mean_reward(items: &[Item], per_item: usize, completions: &[Completion], rewards: &Rewards) -> Result<Option<f64>> {
    let (mut sum, mut count) = (0.0, 0.0);
    for (i, completion) in completions.iter().enumerate() {
        let item = &items[i / per_item];
        let text = Tokenizer.decode(&completion.ids)?;
        let input = RewardInput {
            problem: &item.problem,
            task: item.task.as_ref(),
            completion: &text,
            truncated: completion.truncated,
            completion_len: completion.ids.len(),
        };
        if let Some(reward) = rewards.score(&input).total {
            sum += f64::from(reward);
            count += 1.0;
        }
    }
    Ok((count > 0.0).then(|| sum / count))
}
