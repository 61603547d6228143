//! The presets in configs/loss are legal and match their names.

use grpo_core::{
    ImportanceSamplingLevel, KlEstimator, KlImportance, LossAggMode, LossConfig, LossType, SamplerMode, Semantics,
    TemperatureMode,
};
use grpo_files::Layers;

/// Presets on which users rely; more may be added.
const NAMES: [&str; 29] = [
    "flash-reinforce",
    "mllm-jax",
    "nemo-grpo",
    "openrlhf",
    "prime-rl",
    "prime-rl-dppo",
    "skyrl-grpo",
    "trl-bnpo",
    "trl-cispo",
    "trl-dapo",
    "trl-dr-grpo",
    "trl-gmpo",
    "trl-grpo",
    "trl-gspo",
    "trl-luspo",
    "trl-sapo",
    "trl-vespo",
    "tunix-grpo",
    "verl-cispo",
    "verl-clip-cov",
    "verl-dapo",
    "verl-dppo-kl",
    "verl-dppo-tv",
    "verl-gmpo",
    "verl-gpg",
    "verl-grpo",
    "verl-gspo",
    "verl-kl-cov",
    "verl-sapo",
];

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
    let gone: Vec<&str> = NAMES.into_iter().filter(|name| !names.iter().any(|there| there == name)).collect();
    assert!(gone.is_empty(), "users have copied these: {gone:?}");
    for name in names {
        preset(&name);
    }
}

#[test]
fn presets_match_their_names() {
    assert_eq!(preset("trl-grpo").loss_type, LossType::Grpo);
    assert_eq!(preset("trl-bnpo").loss_type, LossType::Bnpo);
    assert_eq!(preset("trl-dapo").ratio_high(), 1.28);
    assert_eq!(preset("trl-cispo").ratio_high(), 5.0);
    assert!(!preset("trl-gspo").is_token_level());
    assert_eq!(preset("trl-dr-grpo").max_completion_length, Some(256));
    assert_eq!(preset("mllm-jax").temperature_mode(), TemperatureMode::ScaleLogprobs);
    assert_eq!(preset("mllm-jax").ratio_high(), 1.3);
    assert_eq!(preset("mllm-jax").kl_importance(), KlImportance::Off);
}

#[test]
fn presets_of_trl_have_bias_corrected_kl_and_no_other_clip() {
    for name in NAMES.iter().filter(|name| name.starts_with("trl-")) {
        let config = preset(name);
        assert_eq!((config.semantics, config.beta), (Semantics::Trl, 0.0), "{name}");
        assert_eq!(config.kl_importance() == KlImportance::Ratio, *name != "trl-gmpo", "{name}");
        assert_eq!((config.guard(), config.dual_clip(), config.kl_clamps()), (None, None, (None, None)), "{name}");
        assert!(config.counts_masked_rows(), "{name}");
    }
    assert_eq!(preset("trl-gspo").level(), ImportanceSamplingLevel::Sequence);
    assert_eq!(preset("trl-gspo").ratio_high(), 1.0004);
    assert_eq!(preset("trl-luspo").level(), ImportanceSamplingLevel::Sequence);
    assert_eq!(preset("trl-luspo").ratio_low(), 0.998);
    assert_eq!(preset("trl-sapo").parameters.sapo.temperatures(), (1.0, 1.05));
    assert_eq!(preset("trl-vespo").vllm_importance_sampling_mode, SamplerMode::TokenTruncate);
    assert_eq!((preset("trl-gmpo").loss_type, preset("trl-gmpo").upper_epsilon()), (LossType::GeoMean, 0.4));
}

#[test]
fn presets_of_verl_have_the_defaults_of_its_actor() {
    for name in NAMES.iter().filter(|name| name.starts_with("verl-")) {
        let config = preset(name);
        assert_eq!((config.semantics, config.beta), (Semantics::Verl, 0.0), "{name}");
        assert_eq!(config.kl_importance(), KlImportance::Off, "{name}");
        assert!(!config.counts_masked_rows(), "{name}");
        assert_eq!(config.kl_clamps(), (Some(20.0), Some(10.0)), "{name}");
    }
    for (name, c) in [("verl-grpo", 3.0), ("verl-dapo", 10.0), ("verl-dppo-tv", 3.0), ("verl-dppo-kl", 3.0)] {
        assert_eq!((preset(name).dual_clip(), preset(name).guard()), (Some(c), Some(20.0)), "{name}");
    }
    for name in ["verl-gspo", "verl-gmpo", "verl-gpg", "verl-clip-cov", "verl-kl-cov"] {
        assert_eq!((preset(name).dual_clip(), preset(name).guard()), (None, None), "{name}");
    }
    assert_eq!(preset("verl-grpo").kl_estimator, KlEstimator::LowVarKl);
    assert_eq!(preset("verl-grpo").loss_agg_mode, Some(LossAggMode::TokenMean));
    assert_eq!(preset("verl-gspo").level(), ImportanceSamplingLevel::SequenceToken);
    assert_eq!(preset("verl-gspo").loss_agg_mode, Some(LossAggMode::SeqMeanTokenMean));
    assert_eq!(preset("verl-dapo").ratio_high(), 1.28);
    assert_eq!(preset("verl-cispo").ratio_high(), 1.2);
    assert_eq!(preset("verl-sapo").parameters.sapo.temperatures(), (1.0, 1.05));
    assert_eq!(preset("verl-kl-cov").parameters.kl_cov.ppo_kl_coef, 0.1);
    assert_eq!(preset("verl-clip-cov").parameters.clip_cov.upper, 5.0);
}

#[test]
fn presets_of_other_systems_set_their_own_options() {
    let openrlhf = preset("openrlhf");
    assert_eq!((openrlhf.loss_type, openrlhf.guard(), openrlhf.dual_clip()), (LossType::Bnpo, Some(20.0), None));
    assert_eq!((openrlhf.kl_estimator, openrlhf.kl_clamps()), (KlEstimator::K1, (None, Some(10.0))));
    let tunix = preset("tunix-grpo");
    assert_eq!((tunix.beta, tunix.kl_estimator, tunix.guard()), (0.04, KlEstimator::K1, Some(20.0)));
    assert!(!tunix.counts_masked_rows());
    let skyrl = preset("skyrl-grpo");
    assert_eq!((skyrl.beta, skyrl.kl_clamps(), skyrl.guard()), (0.001, (Some(20.0), Some(10.0)), Some(20.0)));
    assert_eq!(skyrl.agg_mode(), Some(LossAggMode::TokenMean));
    let nemo = preset("nemo-grpo");
    assert_eq!((nemo.beta, nemo.kl_clamps(), nemo.guard()), (0.01, (Some(20.0), Some(10.0)), None));
    assert_eq!((nemo.loss_type, nemo.kl_importance()), (LossType::Bnpo, KlImportance::ScoreFunction));
    let prime_rl = preset("prime-rl");
    assert_eq!((prime_rl.bounds(), prime_rl.parameters), (LossConfig::ipo().bounds(), LossConfig::ipo().parameters));
    let dppo = preset("prime-rl-dppo");
    assert_eq!((dppo.loss_type, dppo.lower_epsilon()), (LossType::PrimeRl, 0.2));
    assert_eq!(dppo.parameters.prime_rl.kl_tau, 0.001);
    for config in [openrlhf, tunix, skyrl] {
        assert_eq!(config.kl_importance(), KlImportance::Off);
        assert_eq!(config.vllm_importance_sampling_correction, Some(false));
    }
}
