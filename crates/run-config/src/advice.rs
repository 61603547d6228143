//! The keys that help when memory or time is exhausted.

/// The keys that reduce the host memory of a run.
pub const HOST_MEMORY: &str = "`lora` (adapters in place of all weights), grpo.gradient_accumulation_steps (more micro-batches of fewer \
    completions), optimizer.name adamw_8bit, rollout.batch_size (fewer sequences that decode together), rollout.max_completion_length, \
    data.max_prompt_length, grpo.prompts_per_step and grpo.num_generations need less";

/// The keys that reduce the device memory of a run.
pub const DEVICE_MEMORY: &str = "grpo.gradient_accumulation_steps (more micro-batches of fewer rows), rollout.max_completion_length and \
    data.max_prompt_length (shorter rows), rollout.batch_size (fewer sequences that decode concurrently), policy.dtype bfloat16, \
    policy.attention blockwise (no scores of all pairs of tokens), policy.recompute_granularity full and policy.recompute_num_layers \
    (fewer saved activations), policy.can_roll_back false (weights and moments once, where a step has several updates), \
    optimizer.name adamw_8bit, and policy.mesh with more fsdp (shards of weights and rows on more devices) need less";

/// The key that limits the waits for a device.
pub const DEVICE_TIME: &str = "`policy.wait_limit_minutes` of a run's configuration is the limit";

const MICRO_BATCH: &str = "grpo.gradient_accumulation_steps (more micro-batches of fewer rows), rollout.max_completion_length and \
    data.max_prompt_length (shorter rows), policy.dtype bfloat16, policy.attention blockwise (no scores of all pairs of tokens), \
    policy.recompute_granularity full and policy.recompute_num_layers (fewer saved activations), and policy.mesh with more fsdp (shards of \
    weights and rows on more devices) need less";
const ROLLOUT: &str = "rollout.batch_size (fewer sequences that decode concurrently), rollout.max_completion_length and \
    data.max_prompt_length (shorter sequences), policy.dtype bfloat16, and rollout.mesh over more devices (shards of weights, keys and \
    values) need less";
const UPDATE: &str = "policy.can_roll_back false (weights and moments once, where a step has several updates), policy.mesh \
    with more fsdp (shards of weights and moments on more devices), optimizer.name adamw_8bit and a smaller model need less";

/// Returns the keys that reduce the device memory of a program of a run, or of the whole run.
///
/// ```
/// assert!(grpo_run_config::advice::device_memory(Some("rollout_decode")).contains("rollout.batch_size"));
/// ```
pub fn device_memory(program: Option<&str>) -> &'static str {
    match program {
        Some("gradient" | "score" | "values") => MICRO_BATCH,
        Some("adamw") => UPDATE,
        Some(name) if name.starts_with("rollout") => ROLLOUT,
        _ => DEVICE_MEMORY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_names_keys_of_the_configuration() {
        let keys: Vec<&str> = crate::keys::keys().iter().map(|key| key.path).collect();
        for text in [HOST_MEMORY, DEVICE_MEMORY, DEVICE_TIME, MICRO_BATCH, ROLLOUT, UPDATE] {
            let named: Vec<&str> = text.split([' ', ',', '`']).filter(|word| word.contains('.')).collect();
            assert!(!named.is_empty() && named.iter().all(|name| keys.contains(name)), "{named:?}");
        }
    }
}
