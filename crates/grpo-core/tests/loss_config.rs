//! The loss configuration: what it accepts, and how it refuses.

use grpo_core::{Error, ImportanceSamplingLevel, LossConfig, LossType};
use proptest::prelude::*;
use rstest::rstest;

fn refusal(json: &str) -> String {
    LossConfig::from_json(json).expect_err(json).to_string()
}

#[test]
fn an_empty_map_is_trl_grpo() {
    let config = LossConfig::from_json("{}").unwrap();
    assert_eq!(config, LossConfig::default());
    assert_eq!((config.ratio_low(), config.ratio_high()), (0.8, 1.2));
    assert_eq!(config.level(), ImportanceSamplingLevel::Token);
    assert!(config.bias_correction());
}

#[test]
fn zero_is_a_legal_value_of_every_knob_that_can_be_zero() {
    let json = r#"{"epsilon_low": 0, "epsilon_high": 0, "beta": 0, "entropy_coef": 0, "num_items_in_batch": 0}"#;
    let config = LossConfig::from_json(json).unwrap();
    assert_eq!((config.ratio_low(), config.ratio_high()), (1.0, 1.0));
}

#[test]
fn gspo_is_sequence_level_and_says_so_when_contradicted() {
    let gspo = LossConfig::from_json(r#"{"loss_type": "gspo", "epsilon_low": 3e-4, "epsilon_high": 4e-4}"#).unwrap();
    assert!(!gspo.is_token_level());
    let by_level = LossConfig::from_json(r#"{"loss_type": "grpo", "importance_sampling_level": "sequence"}"#).unwrap();
    assert_eq!((by_level.loss_type, by_level.is_token_level()), (LossType::Grpo, false));
    let contradiction = refusal(r#"{"loss_type": "gspo", "importance_sampling_level": "token"}"#);
    assert!(contradiction.contains("importance_sampling_level"), "{contradiction}");
}

#[rstest]
#[case(r#"{"epsilonlow": 0.2}"#, "did you mean `epsilon_low`")]
#[case(r#"{"eps_high": 0.2}"#, "did you mean `epsilon_high`")]
#[case(r#"{"Beta": 0.2}"#, "did you mean `beta`")]
#[case(r#"{"zzz": 1}"#, "unknown key `zzz`; known here: batch_num_tokens, beta")]
#[case(r#"{"loss_type": "grpoo"}"#, "grpoo")]
#[case(r#"{"epsilon_low": -0.1}"#, "epsilon_low must lie in [0, 1]")]
#[case(r#"{"epsilon_low": 1.5}"#, "epsilon_low must lie in [0, 1]")]
#[case(r#"{"epsilon_high": -0.1}"#, "epsilon_high must not be negative")]
#[case(r#"{"beta": -1}"#, "beta must not be negative")]
#[case(r#"{"temperature": 0}"#, "temperature must be above 0")]
#[case(r#"{"temperature": 1e-7}"#, "temperature must lie in [1e-6, 1e6]")]
#[case(r#"{"temperature": 1e7}"#, "temperature must lie in [1e-6, 1e6]")]
#[case(r#"{"logit_scale": 0}"#, "logit_scale must lie in [1e-6, 1e6]")]
#[case(r#"{"logit_scale": -1e7}"#, "logit_scale must lie in [1e-6, 1e6]")]
#[case(r#"{"final_logit_softcapping": 0}"#, "final_logit_softcapping must lie in [1e-6, 1e6]")]
#[case(r#"{"final_logit_softcapping": -30}"#, "leave it out for logits without a cap")]
#[case(r#"{"beta": 0.1, "beta": 0.2}"#, "key `beta` is there twice")]
#[case(r#"{"temperature": 1e999}"#, "number out of range")]
#[case(r#"{"delta": 1.2}"#, "delta (1.2) must be above 1 + epsilon_high (1.2)")]
#[case(r#"{"loss_type": "dr_grpo"}"#, "set max_completion_length")]
#[case(r#"{"loss_type": "dr_grpo", "max_completion_length": 0}"#, "at least 1")]
#[case(r#"{"loss_type": "cispo"}"#, "epsilon_high")]
#[case(r#"{"loss_type": "cispo", "epsilon_high": 5, "delta": 9}"#, "delta")]
#[case(r#"{"loss_type": "luspo", "semantics": "verl"}"#, "use loss_type gspo")]
#[case(r#"{"loss_type": "dapo", "semantics": "verl"}"#, "use loss_type vanilla")]
#[case(r#"{"beta": "lots"}"#, "expected f64")]
#[case(r#"[1]"#, "expected a map")]
#[case(r#"{"beta": "#, "not JSON")]
fn refuses_with_a_reason(#[case] json: &str, #[case] reason: &str) {
    let message = refusal(json);
    assert!(message.contains(reason), "{json}: {message}");
}

#[test]
fn a_value_that_is_not_finite_is_refused_field_by_field() {
    let set: [fn(&mut LossConfig); 8] = [
        |c| c.epsilon_low = f64::NAN,
        |c| c.epsilon_high = Some(f64::INFINITY),
        |c| c.beta = f64::NAN,
        |c| c.temperature = f64::INFINITY,
        |c| c.entropy_coef = f64::NEG_INFINITY,
        |c| c.num_items_in_batch = Some(f64::NAN),
        |c| c.logit_scale = f64::NAN,
        |c| c.final_logit_softcapping = Some(f64::INFINITY),
    ];
    for change in set {
        let mut config = LossConfig::default();
        change(&mut config);
        assert!(matches!(config.validate(), Err(Error::Config(m)) if m.contains("finite")), "{config:?}");
    }
}

#[test]
fn json_round_trips() {
    let config = LossConfig { delta: Some(4.0), beta: 0.04, loss_type: LossType::Bnpo, ..LossConfig::default() };
    assert_eq!(LossConfig::from_json(&serde_json::to_string(&config).unwrap()).unwrap(), config);
}

proptest! {
    #[test]
    fn any_text_is_an_error_or_a_valid_configuration(text in ".{0,200}") {
        if let Ok(config) = LossConfig::from_json(&text) {
            prop_assert!(config.validate().is_ok());
        }
    }

    #[test]
    fn any_map_of_near_keys_never_panics(
        key in "[a-z_]{1,24}|beta|delta|epsilon_low|loss_type|temperature",
        value in prop_oneof![Just("null".to_owned()), "-?[0-9]{1,5}(\\.[0-9]{1,3})?(e[0-9]{1,3})?", "\"[a-z]{0,8}\"", Just("{\"a\":[1]}".to_owned())],
    ) {
        if let Ok(config) = LossConfig::from_json(&format!("{{\"{key}\": {value}}}")) {
            prop_assert!(config.validate().is_ok());
        }
    }
}

#[test]
fn kl_estimators_have_the_names_of_trl_and_verl() {
    use grpo_core::KlEstimator::{Abs, AbsPlus, K1, K1Plus, K2, K3, K3Plus, LowVarKl, LowVarKlPlus};
    let names =
        ["kl", "k1", "mse", "k2", "k2+", "mse+", "abs", "k3", "low_var_kl", "k1+", "kl+", "k3+", "low_var_kl+", "abs+"];
    let read =
        names.map(|name| LossConfig::from_json(&format!(r#"{{"kl_estimator": "{name}"}}"#)).unwrap().kl_estimator);
    let expected = [K1, K1, K2, K2, K2, K2, Abs, K3, LowVarKl, K1Plus, K1Plus, K3Plus, LowVarKlPlus, AbsPlus];
    assert_eq!(read, expected);
}
