//! Runs of mixtures of experts, with adapters of experts and replayed routing, on the host and on a device.

use crate::support::Runs;
use crate::tiny_model::{call, prepare_shape, small, tensors};
use grpo_models::{Adapter, Experts, ModelConfig, ModelFolder};
use serde_json::Value;

const SETTINGS: [&str; 3] = [
    "policy.replay_routing=true",
    "lora={r: 2, target_modules: [q_proj], target_parameters: [experts.gate_up_proj, experts.down_proj]}",
    "optimizer.learning_rate=0.001",
];

/// Returns A and B of the adapters that a run exported, with the names of their matrices.
fn adapters(runs: &Runs, run: &str) -> Vec<(String, [Vec<f32>; 2])> {
    let base = ModelFolder::open(&runs.path("model")).unwrap();
    let adapter = Adapter::open(&runs.path(run).join("model"), base.config()).unwrap();
    let of = |matrix: &grpo_models::AdaptedMatrix| {
        let parts = [adapter.lora_a(matrix).unwrap().to_vec(), adapter.lora_b(matrix).unwrap().to_vec()];
        (matrix.name.clone(), parts)
    };
    adapter.matrices().iter().map(of).collect()
}

fn trains_experts(device: &str) {
    let runs = Runs::new(&[]);
    let experts = Experts { num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, ..Experts::default() };
    prepare_shape(&runs, &ModelConfig { experts: Some(experts), ..small() });
    let device = format!("policy.device={device}");
    let start = |name: &str, more: &[&str]| {
        let settings = [&SETTINGS[..], &[&device], more].concat();
        call(&runs, "model", name, &settings).quick_cpu().succeed()
    };
    start("whole", &[]);
    start("parts", &["grpo.max_steps=1"]);
    runs.resume("parts").set(["grpo.max_steps=2"]).quick_cpu().succeed();
    let found = adapters(&runs, "whole");
    assert_eq!(adapters(&runs, "parts"), found);

    // The experts of both layers learn.
    for layer in 0..2 {
        for matrix in ["gate_up_proj", "down_proj"] {
            let name = format!("model.layers.{layer}.mlp.experts.{matrix}");
            let (_, [_, b]) = found.iter().find(|(of, _)| *of == name).unwrap_or_else(|| panic!("no {name}"));
            assert!(b.iter().any(|value| *value != 0.0), "{name}");
        }
    }
    // Every step has one update, with the weights that sampled.
    let steps = runs.phase("whole", "grpo");
    let of = |row: &Value, name: &str| row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"));
    assert_eq!(steps.len(), 2);
    for row in &steps {
        assert_eq!([of(row, "moe/routing_mismatch"), of(row, "moe/routing_mismatch_tokens")], [0.0; 2], "{row}");
        assert!(of(row, "moe/load_max") > 1.0 && of(row, "grad_norm") > 0.0, "{row}");
    }

    // With two updates of the same samples, the router of the second one has other weights.
    let routers =
        ["lora=null", "grpo.num_iterations=2", "policy.router_aux_loss_coef=1", "optimizer.learning_rate=0.05"];
    let settings = [&SETTINGS[..1], &[&device], &routers, &["grpo.max_steps=1"]].concat();
    call(&runs, "model", "twice", &settings).quick_cpu().succeed();
    assert!(of(&runs.phase("twice", "grpo")[0], "moe/routing_mismatch") > 0.0);

    start("merged", &["export.merge_adapters=true", "grpo.max_steps=1"]);
    assert!(tensors(&runs.path("merged/model")) != tensors(&runs.path("model")));
}

#[test]
fn experts_are_adapted_and_routing_is_replayed_on_the_host() {
    trains_experts("host");
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn experts_are_adapted_and_routing_is_replayed_on_a_device() {
    trains_experts("pjrt:cpu");
}
