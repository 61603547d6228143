//! The rollout engine that a configuration names.

use crate::error::{Error, Result};
use grpo_distributed::Store;
use grpo_models::{Dtype, ModelFolder};
use grpo_policy::{PolicyEngine, RolloutEngine};
use grpo_run_config::{PolicyDtype, TrainConfig};

/// Returns the engine of `rollout.engine`, after it has checked its servers. `model` is the folder of the model, and `prompt` the number of
/// tokens of the longest prompt; `store` connects the processes of a run, if it has several.
///
/// # Errors
/// [`Error::Engine`] for servers that do not answer or do not fit the run; [`grpo_trainer::Error::Config`] for a policy that would have to sample while it trains.
pub(crate) fn engine(
    config: &TrainConfig,
    model: Option<&ModelFolder>,
    prompt: usize,
    store: Option<&Store>,
) -> Result<Box<dyn RolloutEngine>> {
    let rollout = &config.rollout;
    let (true, Some(server)) = (rollout.engine.is_server(), &rollout.server) else {
        let expected = "0, or rollout.engine vllm or sglang: a policy cannot sample while it trains";
        grpo_run_config::check(rollout.max_staleness == 0, "rollout.max_staleness", expected, rollout.max_staleness)?;
        return Ok(Box::new(PolicyEngine));
    };
    let expected = "policy: the processes of a run sample themselves";
    grpo_run_config::check(store.is_none(), "rollout.engine", expected, rollout.engine.name())?;
    let Some(model) = model else { return Err(Error::argument("rollout.engine", "the folder of a model", "none")) };
    let completion = rollout.max_completion_length().max(config.eval.max_completion_length(rollout));
    let run = grpo_engines::Run {
        model: model.clone(),
        lora: config.lora.clone(),
        // A conversation whose environment or agent begins it with a longer prompt fails by itself.
        max_tokens: (prompt + completion).min(model.config().max_position_embeddings),
        max_staleness: rollout.max_staleness,
        batch_size: rollout.batch_size,
        sampling_masks: rollout.replay_sampling_mask,
        dtype: match config.policy.dtype {
            PolicyDtype::Float32 => Dtype::F32,
            PolicyDtype::Bfloat16 => Dtype::Bf16,
        },
    };
    Ok(Box::new(grpo_engines::ServerEngine::open(rollout.engine, server, run)?))
}
