//! The programs of training through the TPU compiler.

use crate::compile_at;
use models::ModelConfig;
use pjrt::OptimizationLevel;
use policy_device::decoder::{Compute, Decoder, parameters};
use policy_device::{TrainModules, TrainShape};
use stablehlo::Save;

fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: 4096,
        hidden_size: 512,
        intermediate_size: 2048,
        num_hidden_layers: 4,
        num_attention_heads: 4,
        max_position_embeddings: 1024,
        ..ModelConfig::default()
    }
}

fn modules() -> TrainModules {
    TrainModules::new(Decoder::new(&config(), Compute::Bf16), Save::Carry)
}

/// The bytes of all parameters in f32.
fn weights() -> u64 {
    4 * parameters(&config()).iter().map(|p| p.shape.iter().product::<usize>() as u64).sum::<u64>()
}

#[test]
fn gradients_compile_and_are_added_where_the_sums_are() {
    let shape = TrainShape { rows: 2, length: 256, tokens: 256 };
    let loss = grpo_core::LossConfig { beta: 0.04, ..Default::default() };
    let memory = compile_at(&modules().gradient(&loss, shape).expect("a program"), Some(OptimizationLevel::O0));
    assert!(memory.alias_bytes >= weights(), "the sums are not donated: {memory:?}");
    // Neither logits of all tokens nor a second copy of the gradients beside what the layers need.
    assert!(memory.temp_bytes < weights(), "{memory:?} of {}", weights());
}

#[test]
fn an_update_compiles_and_overwrites_what_it_changes() {
    let memory = compile_at(&modules().adamw().expect("a program"), Some(OptimizationLevel::O0));
    assert!(memory.alias_bytes >= 4 * weights(), "{memory:?}");
    // Neither a second state nor a second gradient.
    assert!(memory.temp_bytes < weights() / 4, "{memory:?} of {}", weights());
}
