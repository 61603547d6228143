//! The programs of a run on a device, for what a configuration asks for.

use backend_tpu::plugins::Kind;
use models::LoraConfig;
use trainer::TrainConfig;
use trainer::programs::{ProgramName, RunPrograms};

#[test]
fn what_is_trained_beside_a_model_is_in_the_programs() {
    let mut config = TrainConfig::default();
    config.grpo.advantages.estimator = grpo_core::AdvantageEstimator::Gae;
    let plain = RunPrograms::new(&TrainConfig::default(), Kind::Tpu).unwrap();
    let sizes = plain.sizes();
    assert_eq!(sizes.trained, sizes.parameters);
    let text = |programs: &RunPrograms, name| programs.module(name).unwrap().to_string();
    assert!(!text(&plain, ProgramName::Gradient).contains("value_table"));

    let shape = config.model.shape().unwrap().clone();
    let of_head = shape.hidden_size + 1;
    let ppo = RunPrograms::new(&config, Kind::Tpu).unwrap();
    assert_eq!(ppo.sizes().trained, sizes.parameters + of_head);
    assert!(text(&ppo, ProgramName::Gradient).contains("value_table"));

    let lora = LoraConfig { r: 3, ..LoraConfig::default() };
    let of_adapters: usize = lora.parameters(&shape).unwrap().iter().map(models::Parameter::len).sum();
    config.lora = Some(lora);
    config.loss.beta = 0.1;
    let adapted = RunPrograms::new(&config, Kind::Tpu).unwrap();
    assert_eq!((adapted.sizes().trained, adapted.sizes().parameters), (of_adapters + of_head, sizes.parameters));
    assert!(!adapted.sizes().ref_policy, "the reference is the model beneath");
    for name in [ProgramName::Gradient, ProgramName::Score, ProgramName::Apply, ProgramName::Prefill] {
        assert!(text(&adapted, name).contains("lora_A"), "{name}");
    }
    assert!(!text(&adapted, ProgramName::Apply).contains("\"self_attn.q_proj.weight\""));
}
