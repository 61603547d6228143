//! The options and the sizes of a run on PJRT devices.

use crate::Result;
use grpo_models::{AdaptedMatrix, Dtype, ModelConfig, Trained};
use grpo_policy_pjrt::decoder::{ATTENTION, Attention, Compute, ExpertProducts, check_quantization};
use grpo_policy_pjrt::{PjrtPolicyOptions, RolloutOptions, RolloutSizes, TrainShape, TrainingSizes};
use grpo_run_config::{
    PolicyAttention, PolicyConfig, PolicyDevice, PolicyDtype, RecomputeGranularity, TrainConfig, check,
};
use grpo_stablehlo::Save;

/// Returns the options of the policy of a run on a device, for a model of this shape.
///
/// # Errors
/// [`crate::Error::Config`] if `policy.recompute_num_layers` does not divide the number of layers, or for `policy.quantization` of a model whose
/// matrices cannot be quantised.
pub fn policy_options(config: &TrainConfig, shape: &ModelConfig) -> Result<PjrtPolicyOptions> {
    if let Some(quantization) = config.policy.quantization {
        match config.policy.device {
            PolicyDevice::Host => quantization.check(shape)?,
            _ => check_quantization(shape, quantization)?,
        }
    }
    Ok(PjrtPolicyOptions {
        compute: match config.policy.dtype {
            PolicyDtype::Float32 => Compute::F32,
            PolicyDtype::Bfloat16 => Compute::Bf16,
        },
        attention: match config.policy.attention {
            PolicyAttention::Auto => Attention::Auto,
            PolicyAttention::Materialised => Attention::Materialised,
            PolicyAttention::Blockwise => Attention::Blockwise { block: Attention::BLOCK },
        },
        expert_products: match config.policy.expert_products {
            grpo_run_config::ExpertProducts::Dense => ExpertProducts::Dense,
            grpo_run_config::ExpertProducts::Grouped => ExpertProducts::Grouped { rows: None },
        },
        save: saved(&config.policy, shape.num_hidden_layers)?,
        can_roll_back: config.keeps_state_to_roll_back(),
        freeze_router: config.policy.freeze_router,
        quantization: config.policy.quantization,
        router_aux_loss_coef: config.policy.router_aux_loss_coef,
        rollout: RolloutOptions { slots: config.rollout.batch_size, ..RolloutOptions::default() },
        ..PjrtPolicyOptions::default()
    })
}

/// Returns the activations that are saved for a model with this number of layers.
fn saved(policy: &PolicyConfig, layers: usize) -> Result<Save> {
    let group = policy.recompute_num_layers;
    Ok(match policy.recompute_granularity {
        RecomputeGranularity::Full if group == 1 => Save::Carry,
        RecomputeGranularity::Full => {
            let expected = format!("a number that the model's {layers} layers are a multiple of");
            check(layers.is_multiple_of(group), "policy.recompute_num_layers", &expected, group)?;
            Save::Every(group)
        }
        RecomputeGranularity::ExceptAttention => Save::Named(vec![ATTENTION.into()]),
        RecomputeGranularity::Selective => Save::Products,
        RecomputeGranularity::None => Save::Everything,
    })
}

/// Returns the sizes of a run on a device, for prompts of up to `prompt` tokens and model weights of this dtype.
///
/// # Errors
/// The errors of [`trained`].
pub fn training_sizes(
    config: &TrainConfig,
    shape: &ModelConfig,
    weights: Dtype,
    prompt: usize,
) -> Result<TrainingSizes> {
    Ok(sizes_of(config, weights, prompt, trained(config, shape)?))
}

/// Returns [`training_sizes`] with these trained weights: with experts, counting adapters takes longer than everything else.
pub(crate) fn sizes_of(config: &TrainConfig, weights: Dtype, prompt: usize, trained: Trained) -> TrainingSizes {
    let completion = config.rollout.max_completion_length();
    TrainingSizes {
        micro_batch: TrainShape {
            sampling_mask: config.rollout.replay_sampling_mask,
            routed_experts: config.policy.replay_routing,
            ..TrainShape::uniform(config.grpo.micro_batch_sequences(), prompt, completion)
        },
        rollout: RolloutSizes {
            prompts: config.grpo.prompts_per_step,
            longest_prompt: prompt,
            num_generations: config.grpo.num_generations,
            max_completion_length: completion.max(config.eval.max_completion_length(&config.rollout)),
            conversations: !config.environments.is_empty(),
        },
        weights,
        trained,
        optimizer: config.largest_optimizer(),
        ref_policy: config.needs_ref_policy() && config.lora.is_none(),
        mixes_ref_policy: config.grpo.sync_ref_model,
    }
}

/// Returns the trained weights of a model of this shape.
///
/// # Errors
/// [`crate::Error::Model`] for LoRA targets that the model does not have.
pub fn trained(config: &TrainConfig, shape: &ModelConfig) -> Result<Trained> {
    Ok(match &config.lora {
        None => Trained::All,
        Some(lora) => {
            let (of_experts, others): (Vec<_>, Vec<_>) =
                lora.resolve(shape)?.into_iter().partition(|matrix| matrix.experts.is_some());
            let count = |matrices: &[AdaptedMatrix]| {
                matrices.iter().map(|matrix| (matrix.rank(lora.r) * (matrix.input + matrix.output)) as u64).sum::<u64>()
            };
            let of_experts = count(&of_experts);
            Trained::Adapters { weights: of_experts + count(&others), of_experts }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::one_update("{}", false)]
    #[case::two_updates("{grpo: {num_iterations: 2}}", true)]
    #[case::a_reference_that_moves("{grpo: {sync_ref_model: true}, loss: {beta: 0.1}}", true)]
    #[case::switched_off("{grpo: {num_iterations: 2}, policy: {can_roll_back: false, device: 'pjrt:cpu'}}", false)]
    fn rollback_memory_is_counted_only_if_a_step_can_be_rolled_back(#[case] settings: &str, #[case] twice: bool) {
        let config = TrainConfig::from_layers(grpo_files::Layers::new().text("a test", settings).unwrap()).unwrap();
        let shape = config.model.shape().unwrap();
        let options = policy_options(&config, shape).unwrap();
        let sizes = training_sizes(&config, shape, Dtype::F32, 16).unwrap();
        assert_eq!(
            sizes
                .memory(shape, &options, &grpo_policy_pjrt::decoder::AxisRules::default())
                .unwrap()
                .to_string()
                .contains("to go back to"),
            twice
        );
        assert_eq!(config.keeps_state_to_roll_back(), twice);
    }
}
