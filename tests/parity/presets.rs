//! The presets under configs/loss are legal and mean what their names say.

use grpo_core::{LossConfig, LossType, TemperatureMode};
use trainer::config_layers::Layers;

fn preset(name: &str) -> LossConfig {
    let path = format!("../configs/loss/{name}.yaml");
    let config: LossConfig = Layers::new().file(path.as_ref()).unwrap().resolve().unwrap();
    config.validate().unwrap();
    config
}

#[test]
fn every_preset_is_valid() {
    let mut names: Vec<String> = std::fs::read_dir("../configs/loss")
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    names.sort();
    assert_eq!(names, ["bnpo", "cispo", "dapo", "dr_grpo", "grpo", "gspo", "mllm-jax"]);
    for name in names {
        preset(&name);
    }
}

#[test]
fn presets_mean_what_they_say() {
    assert_eq!(preset("grpo").loss_type, LossType::Grpo);
    assert_eq!(preset("dapo").ratio_high(), 1.28);
    assert_eq!(preset("cispo").ratio_high(), 5.0);
    assert!(!preset("gspo").is_token_level());
    assert_eq!(preset("dr_grpo").max_completion_length, Some(256));
    assert_eq!(preset("mllm-jax").temperature_mode(), TemperatureMode::ScaleLogprobs);
}
