//! The device programs of a run for different configurations.

mod meshes;

grpo_testkit::tiers!();

use grpo_aot::{Error, ProgramName, RunPrograms};
use grpo_backend_tpu::aot::Report;
use grpo_backend_tpu::plugins::Kind;
use grpo_models::LoraConfig;
use grpo_pjrt::DeviceDescription;
use grpo_run_config::{MeshChoice, MeshConfig, PolicyDtype, TrainConfig};

#[test]
fn programs_include_adapters_and_value_heads() {
    let mut config = TrainConfig::built_in();
    config.grpo.advantages.estimator = grpo_core::AdvantageEstimator::Gae;
    let plain = RunPrograms::new(&TrainConfig::built_in(), Kind::Tpu, 1).unwrap();
    let sizes = plain.sizes();
    assert_eq!(sizes.trained, sizes.parameters);
    let text = |programs: &RunPrograms, name| programs.module(name).unwrap().to_string();
    assert!(!text(&plain, ProgramName::Gradient).contains("value_table"));

    let shape = config.model.shape().unwrap().clone();
    let of_head = shape.hidden_size + 1;
    let ppo = RunPrograms::new(&config, Kind::Tpu, 1).unwrap();
    assert_eq!(ppo.sizes().trained, sizes.parameters + of_head);
    assert!(text(&ppo, ProgramName::Gradient).contains("value_table"));

    let lora = LoraConfig { r: 3, ..LoraConfig::default() };
    let of_adapters: usize = lora.parameters(&shape).unwrap().iter().map(grpo_models::Parameter::len).sum();
    config.lora = Some(lora);
    config.loss.beta = 0.1;
    let adapted = RunPrograms::new(&config, Kind::Tpu, 1).unwrap();
    assert_eq!((adapted.sizes().trained, adapted.sizes().parameters), (of_adapters + of_head, sizes.parameters));
    assert_eq!(adapted.sizes().ref_policy_bytes, 0, "the reference is the model beneath");
    assert_eq!((plain.sizes().ref_policy_bytes, plain.sizes().remainder_bytes), (0, 0));
    for name in [ProgramName::Gradient, ProgramName::Score, ProgramName::Apply, ProgramName::Prefill] {
        assert!(text(&adapted, name).contains("lora_A"), "{name}");
    }
    assert!(!text(&adapted, ProgramName::Apply).contains("\"self_attn.q_proj.weight\""));
}

#[test]
fn an_update_of_one_micro_batch_is_one_program() {
    let mut config = TrainConfig::built_in();
    config.grpo.gradient_accumulation_steps = 1;
    let has = |config: &TrainConfig, name| RunPrograms::new(config, Kind::Tpu, 1).unwrap().names().contains(&name);
    assert!(has(&config, ProgramName::Step) && !has(&config, ProgramName::Gradient));
    let programs = RunPrograms::new(&config, Kind::Tpu, 1).unwrap();
    // The separate AdamW program measures the optimizer's share of the step.
    assert!(programs.is_part(ProgramName::Apply) && !programs.is_part(ProgramName::Step));
    let step = programs.module(ProgramName::Step).unwrap().to_string();
    assert!(step.contains("exp_avg_sq") && !step.contains(".sum\""));
    // Several micro-batches need gradient accumulators. So does a step without clipping, whose results are checked before they are written.
    let several = TrainConfig::built_in();
    let mut unclipped = config.clone();
    unclipped.optimizer.settings.max_grad_norm = 0.0;
    for config in [&several, &unclipped] {
        assert!(has(config, ProgramName::Gradient) && !has(config, ProgramName::Step));
    }
    unclipped.optimizer.settings.skip_grad_norm = Some(10.0);
    assert!(has(&unclipped, ProgramName::Step), "a larger gradient is not applied");
}

#[test]
fn bf16_weights_have_remainders_in_the_update_only() {
    let mut config = TrainConfig::built_in();
    config.policy.dtype = PolicyDtype::Bfloat16;
    config.loss.beta = 0.1;
    let programs = RunPrograms::new(&config, Kind::Tpu, 1).unwrap();
    let sizes = programs.sizes();
    let of_vectors: usize = {
        let shape = config.model.shape().unwrap();
        shape.parameters().iter().filter(|p| p.shape.len() == 1).map(grpo_models::Parameter::len).sum()
    };
    assert_eq!(sizes.weight_bytes, 2 * sizes.parameters + 2 * of_vectors, "norms and biases are f32");
    assert_eq!(sizes.weight_bytes + sizes.remainder_bytes, 4 * sizes.parameters);
    assert_eq!(sizes.ref_policy_bytes, sizes.weight_bytes);
    let has_remainders = |name| programs.module(name).unwrap().to_string().contains("xi16>");
    assert!(has_remainders(ProgramName::Apply));
    for name in [ProgramName::Gradient, ProgramName::Score, ProgramName::Prefill] {
        assert!(!has_remainders(name), "{name}");
    }
    // A synced reference policy is stored in f32.
    config.grpo.sync_ref_model = true;
    let mixed = RunPrograms::new(&config, Kind::Tpu, 1).unwrap().sizes();
    assert_eq!(mixed.ref_policy_bytes, 4 * sizes.parameters);
}

/// Returns a report of a program that takes `total_bytes`.
fn report(total_bytes: u64) -> Report {
    let report = serde_json::json!({
        "blocking": null, "argument_bytes": 0, "output_bytes": 0, "alias_bytes": 0, "temp_bytes": 0, "code_bytes": 0,
        "program_bytes": 0, "total_bytes": total_bytes, "flops": null, "bytes_accessed": null, "estimate_seconds": null,
        "estimate_cycles": null, "estimate_cycles_seconds": null, "no_estimate": null, "loops": [],
        "floor": {"flops": 0.0, "bytes": 0.0, "seconds": 0.0}, "compile_seconds": 0.0, "compile_processor_seconds": 0.0,
        "from_cache": false, "traffic": {}
    });
    serde_json::from_value(report).unwrap()
}

#[test]
fn a_rollback_copy_exists_only_if_a_step_can_be_rolled_back() {
    let memory = |config: &TrainConfig| {
        let programs = RunPrograms::new(config, Kind::Tpu, 1).unwrap();
        // The update takes by far the most memory.
        let [little, much] = [1 << 20, 1 << 40].map(report);
        let of = |name| if matches!(name, ProgramName::Apply | ProgramName::Step) { &much } else { &little };
        let memory = programs.memory(|name| Some(of(name))).unwrap();
        (memory.total_bytes - memory.total_bytes_without_roll_back, programs.sizes())
    };
    // A step with a single update needs no copy for a rollback.
    let mut config = TrainConfig::built_in();
    assert_eq!((memory(&config).0, memory(&config).1.can_roll_back), (0, false));
    config.grpo.num_iterations = 2;
    let (again, sizes) = memory(&config);
    assert!(sizes.can_roll_back);
    assert_eq!(again, 12 * sizes.trained as u64);
    config.policy.can_roll_back = false;
    assert_eq!(memory(&config).0, 0);
}

#[test]
fn a_run_without_clipping_keeps_gradients_during_sampling() {
    let mut config = TrainConfig::built_in();
    config.grpo.gradient_accumulation_steps = 1;
    let during = |config: &TrainConfig| {
        let programs = RunPrograms::new(config, Kind::Tpu, 1).unwrap();
        let report = report(1 << 20);
        (programs.memory(|_| Some(&report)).unwrap().totals, programs)
    };
    let (clipped, programs) = during(&config);
    config.optimizer.settings.max_grad_norm = 0.0;
    let (unclipped, _) = during(&config);
    let decode = programs.decode_calls().keys().next().unwrap().to_string();
    for name in [&decode, "prefill", "admit"] {
        assert_eq!(unclipped[name] - clipped[name], 4 * programs.sizes().trained as u64, "{name}");
    }
}

#[test]
fn shards_of_processes_need_a_mesh_of_all_their_devices() {
    let device = |id: i32| DeviceDescription {
        id,
        process_index: id / 4,
        kind: "a chip".into(),
        debug_string: String::new(),
        attributes: Default::default(),
    };
    let devices: Vec<DeviceDescription> = (0..8).map(device).collect();
    let on = |fsdp: i64| {
        let mut config = TrainConfig::built_in();
        config.policy.logical_axis_rules.vocab = Some(vec![]);
        config.policy.mesh = Some(MeshChoice::Axes(MeshConfig { data: 2, fsdp, tensor: 1 }));
        RunPrograms::new(&config, Kind::Tpu, 8).unwrap()
    };
    let all = on(4);
    let shards = all.processes(Kind::Tpu, &devices).unwrap();
    assert_eq!(shards.iter().map(|of| &of.devices[..]).collect::<Vec<_>>(), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    assert_eq!(shards[1].coordinates, [[1, 0, 0], [1, 1, 0], [1, 2, 0], [1, 3, 0]]);
    // `data` copies all weights to both processes.
    assert!(shards.iter().all(|of| of.weights == all.sizes().parameters));

    let error = on(2).processes(Kind::Tpu, &devices).unwrap_err();
    assert!(matches!(error, Error::PartialMesh { devices: 8, processes: 2, .. }), "{error}");
    assert!(on(2).processes(Kind::Tpu, &devices[..4]).is_ok(), "the devices of one process");
}
