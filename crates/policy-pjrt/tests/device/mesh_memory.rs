//! The memory table of a mesh.

use crate::mesh_models::of_experts;
use crate::mesh_support::{config, loss, rules};
use grpo_models::{Experts, LoraConfig, ModelConfig};
use grpo_policy::OptimizerName;
use grpo_policy_pjrt::decoder::{Adapters, Compute, Decoder};
use grpo_policy_pjrt::{PjrtPolicyOptions, RolloutSizes, TrainPrograms, TrainShape, TrainingSizes};
use grpo_stablehlo::Save;
use rstest::rstest;

/// The memory table of a mesh counts what XLA's CPU reports for the arguments of one device.
#[test]
fn the_memory_of_a_device_is_that_of_its_shards() {
    check(&[("data", 2), ("fsdp", 2), ("tensor", 2)], &[1, 3]);
}

#[rstest]
#[case::data(&[("data", 8)])]
#[case::fsdp(&[("fsdp", 8)])]
#[case::every_axis(&[("data", 2), ("fsdp", 2), ("tensor", 2)])]
#[ignore = "GRPO_TESTS=all"]
fn the_memory_of_a_device_of_every_mesh_is_that_of_its_shards(#[case] axes: &[(&str, usize)]) {
    check(axes, &[0, 1, 2, 3]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn the_memory_of_a_device_has_padding_and_copies_of_key_value_heads() {
    check(&[("fsdp", 2), ("tensor", 4)], &[4, 5]);
}

fn check(axes: &[(&str, usize)], cases: &[usize]) {
    let dense = ModelConfig { vocab_size: 1024, hidden_size: 128, intermediate_size: 256, ..config() };
    let experts = Experts { num_experts: 8, moe_intermediate_size: 64, ..Experts::default() };
    let uneven = ModelConfig { vocab_size: 1021, num_attention_heads: 8, num_key_value_heads: 2, ..dense.clone() };
    let with_experts = ModelConfig { experts: Some(experts), ..dense.clone() };
    let micro_batch = TrainShape { rows: 8, length: 16, tokens: 64, ..TrainShape::default() };
    let rollout = RolloutSizes {
        prompts: 1,
        longest_prompt: 8,
        num_generations: 1,
        max_completion_length: 8,
        conversations: false,
    };
    let weights = grpo_models::Dtype::F32;
    let sizes = |optimizer, trained| TrainingSizes {
        micro_batch,
        rollout,
        weights,
        trained,
        optimizer,
        ref_policy: false,
        mixes_ref_policy: false,
    };
    let options = PjrtPolicyOptions { can_roll_back: false, ..PjrtPolicyOptions::default() };
    let lora = LoraConfig { r: 16, ..of_experts() };
    let configs = [
        (&dense, OptimizerName::AdamW, None),
        (&dense, OptimizerName::AdamW8bit, None),
        (&with_experts, OptimizerName::AdamW, None),
        (&with_experts, OptimizerName::AdamW, Some(&lora)),
        (&uneven, OptimizerName::AdamW, None),
        (&uneven, OptimizerName::AdamW8bit, None),
    ];
    for (config, optimizer, lora) in cases.iter().map(|case| configs[*case]) {
        let rules = rules(axes);
        let trained = lora.map_or(grpo_models::Trained::All, |lora| {
            let of_experts = lora.parameters(config).unwrap().iter().map(|parameter| parameter.len() as u64).sum();
            grpo_models::Trained::Adapters { weights: of_experts, of_experts }
        });
        let table = sizes(optimizer, trained).memory(config, &options, &rules).unwrap();
        let part = |name: &str| table.rows().iter().find(|(part, _)| part.starts_with(name)).map(|(_, bytes)| *bytes);
        let expected: u64 = ["weights", "adapters", "gradients"].into_iter().filter_map(part).sum();
        let state = ["weights", "adapters", "first moments", "second moments"];
        let state: u64 = state.into_iter().filter_map(part).sum();
        let decoder = Decoder::new(config, Compute::F32);
        let decoder = match lora {
            Some(lora) => decoder.with_adapters(Adapters::new(config, lora).unwrap()),
            None => decoder,
        };
        let decoder = decoder.with_axis_rules(rules).unwrap();
        let programs = TrainPrograms::new(decoder, Save::Carry).with_optimizer(optimizer);
        let gradient = programs.gradient(&loss(), None, micro_batch).unwrap();
        let step = programs.step(&loss(), None, micro_batch).unwrap();
        for (module, expected) in [(gradient, expected), (step, state)] {
            let stats = crate::mesh::compile(&module).executable().memory_stats().unwrap();
            let (found, expected) = (stats.argument as f64, expected as f64);
            assert!(
                (found - expected).abs() < 0.1 * expected,
                "{axes:?}, {optimizer:?}, {}: {found} {expected}\n{table}",
                module.name
            );
        }
    }
}
