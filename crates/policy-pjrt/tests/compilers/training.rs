//! The training programs, compiled for TPU.

use crate::compile_at;
use grpo_models::{LoraConfig, ModelConfig};
use grpo_pjrt::OptimizationLevel;
use grpo_policy_pjrt::decoder::{Adapters, Compute, Decoder, parameters};
use grpo_policy_pjrt::{TrainPrograms, TrainShape};
use grpo_stablehlo::Save;

const SHAPE: TrainShape =
    TrainShape { rows: 2, length: 256, tokens: 256, shared: false, sampling_mask: false, routed_experts: false };

fn config() -> ModelConfig {
    ModelConfig { num_hidden_layers: 4, ..crate::config() }
}

fn modules() -> TrainPrograms {
    TrainPrograms::new(Decoder::new(&config(), Compute::Bf16), Save::Carry)
}

/// Returns the bytes of all parameters in f32.
fn weights() -> u64 {
    4 * parameters(&config()).iter().map(|p| p.shape.iter().product::<usize>() as u64).sum::<u64>()
}

#[test]
fn gradients_are_accumulated_in_place() {
    let loss = grpo_core::LossConfig { beta: 0.04, ..Default::default() };
    let memory = compile_at(&modules().gradient(&loss, None, SHAPE).expect("a program"), Some(OptimizationLevel::O0));
    assert!(memory.alias_bytes >= weights(), "the sums are not donated: {memory:?}");
    // bf16 weights and f32 accumulators.
    assert!(memory.argument_bytes < weights() + weights() * 3 / 5, "{memory:?} of {}", weights());
    // Neither logits of all tokens nor a second copy of the gradients.
    assert!(memory.temp_bytes < weights(), "{memory:?} of {}", weights());
}

#[test]
fn an_update_is_in_place() {
    let memory = compile_at(&modules().optimizer().expect("a program"), Some(OptimizationLevel::O0));
    assert!(memory.alias_bytes >= 4 * weights(), "{memory:?}");
    // Neither a second state nor a second gradient.
    assert!(memory.temp_bytes < weights() / 4, "{memory:?} of {}", weights());
    // Bytes per weight: 4 to read the gradient for its norm; 16 to read weight, moments and gradient, and 12 to write them; 12 to split the
    // f32 weight; 4 to zero the accumulator.
    let bytes = memory.cost.expect("an estimate").bytes;
    assert!(bytes < 1.02 * 48.0 / 4.0 * weights() as f64, "{bytes} of {}", weights());
}

#[test]
fn a_fused_step_is_in_place_and_has_no_accumulators() {
    let loss = grpo_core::LossConfig { beta: 0.04, ..Default::default() };
    let memory = compile_at(&modules().step(&loss, None, SHAPE).expect("a program"), Some(OptimizationLevel::O0));
    assert!(memory.alias_bytes >= 3 * weights(), "{memory:?} of {}", weights());
    // Weights and moments, and small inputs of the micro-batch.
    assert!(memory.argument_bytes < 3 * weights() + weights() / 8, "{memory:?} of {}", weights());
    // One gradient, and temporaries of its layers and of the update of one tensor.
    assert!(memory.temp_bytes < 2 * weights(), "{memory:?} of {}", weights());
}

#[test]
fn adapters_need_no_gradients_of_the_frozen_model() {
    let adapters = Adapters::new(&config(), &LoraConfig { r: 8, ..LoraConfig::default() }).expect("targets");
    let decoder = Decoder::new(&config(), Compute::Bf16).with_adapters(adapters).with_value_head();
    let trained: usize = 4 * decoder.trained().iter().map(|p| p.shape.iter().product::<usize>()).sum::<usize>();
    let modules = TrainPrograms::new(decoder, Save::Carry);
    let shape = TrainShape { shared: true, ..SHAPE };
    let (loss, of_values) = (grpo_core::LossConfig::default(), grpo_core::objective::ValueLossConfig::default());
    let module = modules.gradient(&loss, Some(&of_values), shape).expect("a program");
    let memory = compile_at(&module, Some(OptimizationLevel::O0));
    assert!(memory.alias_bytes >= trained as u64, "the sums are not donated: {memory:?}");
    // The model in bf16, without gradient accumulators; a TPU pads rows of narrow matrices to 128 numbers.
    assert!(memory.argument_bytes < weights(), "{memory:?} of {}", weights());
    assert!(memory.temp_bytes < weights(), "{memory:?} of {}", weights());
}
