//! The planner's cost model, compared with compiled programs, and its choices.

use grpo_backend_tpu::aot::{Chip, Target};
use grpo_files::Layers;
use grpo_models::ModelConfig;
use grpo_planner::{Candidate, Devices, Plan, longest_prompt, plan};
use grpo_run_config::{MeshChoice, MeshConfig, RecomputeGranularity, TrainConfig};
use std::path::Path;

const ALL: [&str; 5] = ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen3-8b", "llama-3.1-8b"];

/// A step of 64 rows of 1024 tokens, all in the loss.
const WHOLE_ROWS: &str = "{data: {max_prompt_length: 1}, rollout: {max_completion_length: 1024}}";

/// Returns a configuration of `configs/aot/` with `settings`, and the shape of its model.
fn config(name: &str, settings: &str) -> (TrainConfig, ModelConfig) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../configs/aot/{name}.yaml"));
    let layers = Layers::new().file(&file).unwrap().text("a test", settings).unwrap();
    let config = TrainConfig::from_layers(layers).unwrap();
    let shape = config.model.shape().unwrap().clone();
    (config, shape)
}

fn planned(name: &str, target: &str, settings: &str) -> Plan {
    let (config, shape) = config(name, settings);
    let devices = Devices::of(&Target::parse(target).unwrap());
    plan(&config, &shape, longest_prompt(&config, &shape), &devices).unwrap()
}

fn mesh(data: i64, fsdp: i64, tensor: i64) -> MeshConfig {
    MeshConfig { data, fsdp, tensor }
}

/// Returns the candidate with this mesh and recomputation, and one micro-batch.
fn whole(plan: &Plan, mesh: MeshConfig, recompute: (RecomputeGranularity, usize)) -> Candidate {
    let is_it = |candidate: &&Candidate| {
        let s = &candidate.settings;
        let own = (s.recompute_granularity, s.recompute_num_layers);
        s.mesh == mesh && s.gradient_accumulation_steps == 1 && own == recompute
    };
    *plan.candidates.iter().find(is_it).unwrap()
}

/// Compiled numbers from BENCHMARKS.md, "Whole training steps" and "Meshes of eight chips": gigabytes per chip, and milliseconds without the
/// links. The time of 1.5B on {fsdp 8} is left out: 277 ms, of which the cost model predicts 80 %.
/// The times of `selective` and `none` are not compared: see docs/absent-chips.md.
#[test]
fn predictions_match_compiled_steps_within_a_tenth() {
    use RecomputeGranularity::{ExceptAttention, Full, Selective};
    let (one, fsdp, both) = (mesh(1, 1, 1), mesh(1, 8, 1), mesh(1, 2, 4));
    let cases = [
        ("qwen2.5-7b", "v6e:2x4", 64, fsdp, (Full, 1), 18.80, Some(784.7)),
        ("qwen2.5-7b", "v6e:2x4", 64, both, (Full, 1), 19.09, Some(824.1)),
        ("qwen2.5-1.5b", "v6e:2x4", 64, fsdp, (Full, 1), 4.71, None),
        ("qwen3-8b", "v6e:2x4", 64, fsdp, (Full, 1), 20.31, None),
        ("qwen2.5-0.5b", "v6e", 8, one, (Full, 1), 8.88, Some(110.0)),
        ("qwen2.5-0.5b", "v6e", 8, one, (ExceptAttention, 1), 9.18, Some(103.0)),
        ("qwen2.5-0.5b", "v6e", 8, one, (Selective, 1), 13.37, None),
        ("qwen2.5-0.5b", "v6e", 8, one, (RecomputeGranularity::None, 1), 26.02, None),
        ("qwen2.5-1.5b", "v6e", 8, one, (Full, 1), 26.47, Some(240.0)),
        ("qwen2.5-1.5b", "v6e", 16, one, (Full, 1), 27.54, Some(432.0)),
        ("qwen2.5-1.5b", "v6e", 16, one, (Full, 4), 26.72, Some(505.0)),
    ];
    for (name, target, rows, mesh, recompute, gigabytes, milliseconds) in cases {
        let rows = format!("{{grpo: {{prompts_per_step: 1, num_generations: {rows}}}}}");
        let (config, shape) = config(name, WHOLE_ROWS);
        let layers = Layers::new().value("a test", serde_json::to_value(&config).unwrap()).unwrap();
        let config = TrainConfig::from_layers(layers.text("a test", &rows).unwrap()).unwrap();
        let devices = Devices::of(&Target::parse(target).unwrap());
        let plan = plan(&config, &shape, 1, &devices).unwrap();
        let found = whole(&plan, mesh, recompute);
        let bytes = found.memory_bytes as f64 / 1e9 / gigabytes;
        let time = milliseconds.map_or(1.0, |expected| 1e3 * found.update.chip_seconds / expected);
        println!("{name} {target} {mesh} {recompute:?}: memory {bytes:.3}, time {time:.3} of the compiler's");
        assert!((0.9..1.1).contains(&bytes) && (0.9..1.1).contains(&time), "{name} {mesh}: {bytes} {time} {found:?}");
    }
}

/// The compiled decode programs of BENCHMARKS.md, "Meshes of eight chips": milliseconds per token without the links, with 64 sequences and 1280
/// columns of the cache.
#[test]
fn predictions_match_compiled_decode_steps_within_a_sixth() {
    // The mean of the columns from 256 to 2304 is 1280. Prompts take little of such a rollout.
    let settings = "{data: {max_prompt_length: 256}, rollout: {max_completion_length: 2048}}";
    for (name, rollout, milliseconds) in [("qwen2.5-7b", mesh(2, 1, 4), 2.75), ("qwen3-8b", mesh(1, 1, 8), 2.52)] {
        let best = planned(name, "v6e:2x4", settings).candidates[0];
        assert_eq!(best.settings.rollout_mesh, rollout, "{name}");
        let found = 1e3 * best.rollout.chip_seconds / 2047.0;
        println!("{name} {rollout}: {found:.2} ms, compiled {milliseconds} ms");
        assert!((found / milliseconds - 1.0).abs() < 1.0 / 6.0, "{name}: {found:.2} ms, compiled {milliseconds} ms");
    }
}

#[test]
fn an_update_without_clipping_keeps_gradients_during_sampling() {
    // Short sequences, so that the weights on the mesh of the rollout are the largest part besides weights and moments.
    let of = |max_grad_norm: f64| {
        let settings = format!(
            "{{grpo: {{prompts_per_step: 1, num_generations: 8}}, data: {{max_prompt_length: 16}}, rollout: {{max_completion_length: 16}}, \
             optimizer: {{max_grad_norm: {max_grad_norm}}}}}"
        );
        let plan = planned("qwen2.5-7b", "v6e:2x4", &settings);
        whole(&plan, mesh(1, 8, 1), (RecomputeGranularity::Full, 1)).memory_bytes
    };
    let (clipped, unclipped) = (of(1.0), of(0.0));
    let gradients = 4 * config("qwen2.5-7b", "{}").1.parameter_count() / 8;
    let more = unclipped - clipped;
    assert!(more > gradients / 2 && more < gradients + gradients / 100, "{more} of {gradients}");
}

#[test]
fn fsdp_over_all_devices_is_faster_and_smaller_than_tensor_shards() {
    let plan = planned("qwen2.5-7b", "v6e:2x4", WHOLE_ROWS);
    let [fsdp, both] = [mesh(1, 8, 1), mesh(1, 2, 4)].map(|mesh| whole(&plan, mesh, (RecomputeGranularity::Full, 1)));
    assert!(fsdp.update.chip_seconds < both.update.chip_seconds && fsdp.memory_bytes < both.memory_bytes);
    assert!(fsdp.update.seconds() < both.update.seconds() && fsdp.step_seconds < both.step_seconds);
    // Collectives of the two meshes run along other axes.
    assert!(fsdp.update.received_tensor_bytes == 0.0 && both.update.received_tensor_bytes > 1e10);
    assert!(fsdp.update.received_fsdp_bytes > 5.0 * both.update.received_fsdp_bytes);
    let meshes: Vec<MeshConfig> = plan.by_mesh().iter().map(|candidate| candidate.settings.mesh).collect();
    let place = |mesh| meshes.iter().position(|other| *other == mesh).unwrap();
    assert!(place(mesh(1, 8, 1)) == 0 && place(mesh(1, 4, 2)) < place(mesh(1, 2, 4)), "{meshes:?}");
}

#[test]
fn tensor_shards_are_chosen_if_rows_run_out() {
    let few = "{grpo: {prompts_per_step: 1, num_generations: 2}}";
    let plan = planned("qwen2.5-7b", "v6e:2x4", few);
    assert_eq!(plan.candidates[0].settings.mesh, mesh(1, 2, 4));
    // Rows that eight shards pad to 8 cost as much as 8 rows.
    let padded = whole(&plan, mesh(1, 8, 1), (RecomputeGranularity::Full, 1));
    assert!(padded.update.seconds() > plan.candidates[0].update.seconds());
}

#[test]
fn candidates_that_do_not_fit_come_last_smallest_first() {
    let v6e = Chip::from_name("v6e").unwrap();
    // The compiler has 31.24 of 32 GiB.
    assert_eq!((v6e.usable_memory as f64 / f64::from(1 << 30) * 100.0).round(), 3124.0);
    let plan = planned("qwen2.5-7b", "v6e:2x4", WHOLE_ROWS);
    let fitting = plan.candidates.iter().filter(|candidate| candidate.fits).count();
    assert!(fitting > 0 && fitting < plan.candidates.len());
    let (fit, rest) = plan.candidates.split_at(fitting);
    assert!(fit.iter().all(|c| c.fits && c.memory_bytes <= v6e.usable_memory));
    assert!(fit.is_sorted_by(|a, b| a.step_seconds <= b.step_seconds));
    assert!(rest.iter().all(|c| !c.fits && c.memory_bytes > v6e.usable_memory));
    assert!(rest.is_sorted_by(|a, b| a.memory_bytes <= b.memory_bytes));
    // Copies of the weights do not fit.
    assert!(rest.iter().any(|c| c.settings.mesh == mesh(8, 1, 1)));
    let one = planned("qwen2.5-7b", "v6e", "{}");
    assert!(!one.candidates[0].fits && one.candidates[0].memory_bytes > 120_000_000_000);
}

#[test]
fn fewer_rows_per_micro_batch_and_more_recomputation_need_less_memory_and_more_time() {
    let plan = planned("qwen2.5-0.5b", "v6e", WHOLE_ROWS);
    let of = |steps: usize, recompute: (RecomputeGranularity, usize)| {
        let is_it = |candidate: &&Candidate| {
            let s = &candidate.settings;
            let own = (s.recompute_granularity, s.recompute_num_layers);
            s.gradient_accumulation_steps == steps && own == recompute
        };
        *plan.candidates.iter().find(is_it).unwrap()
    };
    let all = [
        of(1, (RecomputeGranularity::ExceptAttention, 1)),
        of(1, (RecomputeGranularity::Full, 1)),
        of(1, (RecomputeGranularity::Full, 4)),
        of(4, (RecomputeGranularity::Full, 4)),
    ];
    assert_eq!(all.map(|candidate| candidate.micro_batch), [64, 64, 64, 16]);
    assert!(all.is_sorted_by(|a, b| a.memory_bytes > b.memory_bytes), "{all:?}");
    assert!(all.is_sorted_by(|a, b| a.update.seconds() < b.update.seconds()), "{all:?}");
    // Saved products are 23.5 kB per token and layer, and everything is 3.8 times as much.
    let [everything, products] =
        [RecomputeGranularity::None, RecomputeGranularity::Selective].map(|granularity| of(1, (granularity, 1)));
    let larger = [everything, products, all[0]];
    assert!(larger.is_sorted_by(|a, b| a.memory_bytes > b.memory_bytes), "{larger:?}");
    assert!(products.update.seconds() < all[1].update.seconds(), "{products:?} {all:?}");
}

#[test]
fn adapters_recompute_products() {
    let plan = planned("qwen2.5-0.5b", "v6e", "{lora: {r: 8}}");
    let of = |granularity| plan.candidates.iter().any(|c| c.settings.recompute_granularity == granularity);
    assert!(of(RecomputeGranularity::Full) && of(RecomputeGranularity::ExceptAttention));
    assert!(!of(RecomputeGranularity::Selective) && !of(RecomputeGranularity::None));
}

#[test]
fn planned_keys_are_a_configuration_with_the_same_settings() {
    for name in ALL {
        let (config, _) = config(name, "{}");
        let best = planned(name, "v5p:2x2x2", "{}").candidates[0].settings;
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../configs/aot/{name}.yaml"));
        let yaml = grpo_files::to_yaml_with_secrets(&best.keys()).unwrap();
        let layers = Layers::new().file(&file).unwrap().text("the plan", &yaml).unwrap();
        let planned = TrainConfig::from_layers(layers).unwrap();
        assert_eq!(planned, best.applied_to(&config));
        assert_eq!(planned.policy.mesh, Some(MeshChoice::Axes(best.mesh)));
        let context = planned.model.shape().unwrap().max_position_embeddings;
        planned.validate_for(planned.model.shape().unwrap().vocab_size, context).unwrap();
    }
}

/// Tests that take seconds: `cargo fast` skips modules of this name.
mod slow {
    use super::*;

    #[test]
    fn every_shipped_model_is_sharded_over_fsdp_and_samples_on_its_heads() {
        for target in ["v6e:2x4", "v5p:2x2x1", "v5p:2x2x2", "h200x8"] {
            let devices = Devices::of(&Target::parse(target).unwrap()).count as i64;
            for name in ALL {
                let plan = planned(name, target, "{}");
                let (_, shape) = config(name, "{}");
                let best = &plan.candidates[0];
                // Through the switch of GPUs, a shard of two heads moves as fast as weights.
                let is_gpu = target.starts_with('h') && best.settings.mesh == mesh(1, devices / 2, 2);
                assert!(
                    best.fits && (is_gpu || best.settings.mesh == mesh(1, devices, 1)),
                    "{name} on {target}: {best:?}"
                );
                let heads = shape.num_attention_heads as i64;
                let tensor = (1..=devices).rev().find(|tensor| devices % tensor == 0 && heads % tensor == 0).unwrap();
                assert_eq!(best.settings.rollout_mesh, mesh(devices / tensor, 1, tensor), "{name} on {target}");
                // Tensor shards divide the query heads.
                let all: Vec<i64> = plan.candidates.iter().map(|candidate| candidate.settings.mesh.tensor).collect();
                assert!(all.iter().all(|tensor| heads % tensor == 0), "{name} on {target}: {all:?}");
                let left_out = plan.illegal.iter().flat_map(|group| &group.meshes);
                let does_not_divide = |tensor| devices % tensor == 0 && heads % tensor != 0;
                assert_eq!(left_out.clone().count() > 0, (1..=devices).any(does_not_divide), "{name} on {target}");
                assert!(left_out.into_iter().all(|mesh| heads % mesh.tensor != 0));
            }
        }
    }
}
