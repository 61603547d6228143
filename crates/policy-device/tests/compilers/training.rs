//! The programs of training through the TPU compiler.

use crate::compile;
use models::ModelConfig;
use policy_device::decoder::{Compute, Decoder, parameters};
use policy_device::{TrainModules, TrainShape};
use stablehlo::Save;

fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: 4096,
        hidden_size: 512,
        intermediate_size: 1024,
        num_hidden_layers: 4,
        num_attention_heads: 4,
        max_position_embeddings: 1024,
        ..ModelConfig::default()
    }
}

fn modules(compute: Compute, save: Save) -> TrainModules {
    TrainModules::new(Decoder::new(&config(), compute), save)
}

/// The bytes of all parameters in f32.
fn weights() -> i64 {
    4 * parameters(&config()).iter().map(|p| p.shape.iter().product::<usize>() as i64).sum::<i64>()
}

#[test]
fn gradients_compile_and_are_added_where_the_sums_are() {
    let shape = TrainShape { rows: 4, length: 512, tokens: 1024 };
    let loss = grpo_core::LossConfig { beta: 0.04, ..Default::default() };
    let temp = |save| {
        let module = modules(Compute::Bf16, save).gradient(&loss, shape).expect("a program");
        let memory = compile(&module);
        assert!(memory.alias >= weights(), "the sums are not donated: {memory:?}");
        memory.temp
    };
    let [carry, everything] = [Save::Carry, Save::Everything].map(temp);
    assert!(carry < everything, "{carry} {everything}");
}

#[test]
fn an_update_compiles_and_overwrites_what_it_changes() {
    let memory = compile(&modules(Compute::Bf16, Save::Carry).adamw().expect("a program"));
    assert!(memory.alias >= 4 * weights(), "{memory:?}");
    // Neither a second state nor a second gradient.
    assert!(memory.temp < weights() / 4, "{memory:?} of {}", weights());
}

#[test]
fn scores_compile_and_hold_no_logits_of_all_tokens() {
    let shape = TrainShape { rows: 4, length: 512, tokens: 1024 };
    let module = modules(Compute::F32, Save::Carry).score(&grpo_core::LossConfig::default(), shape).expect("a program");
    assert!(compile(&module).temp > 0);
}
