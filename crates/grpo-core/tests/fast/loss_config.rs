//! Parsing and refusals of the loss configuration.

use grpo_core::batch::StepData;
use grpo_core::format::BatchLoss;
use grpo_core::objective::Bounds;
use grpo_core::{AdvantageConfig, Error, ImportanceSamplingLevel, KlImportance, LossConfig, LossType};
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
    assert_eq!(config.kl_importance(), KlImportance::Ratio);
}

/// prime-rl #3586 of 2026-09-18.
#[rstest]
fn prime_rl_losses_have_the_defaults_of_2026_09_18(#[values("ipo", "prime_rl")] loss: &str) {
    let config = LossConfig::from_json(&format!(r#"{{"loss_type": "{loss}"}}"#)).unwrap();
    assert_eq!(config.bounds(), Bounds::Probability { down: 0.3, up: 0.3 });
    let parameters = &config.parameters.prime_rl;
    assert_eq!((parameters.adv_tau, parameters.kl_tau), (1.0, 0.0));
    let narrow = LossConfig::from_json(&format!(r#"{{"loss_type": "{loss}", "epsilon_low": 0.1}}"#)).unwrap();
    assert_eq!(narrow.bounds(), Bounds::Probability { down: 0.1, up: 0.1 });
}

/// The advice of the refusal leads to a valid configuration, in every system.
#[rstest]
fn losses_that_name_an_average_say_how_another_average_is_set(
    #[values("dapo", "bnpo", "dr_grpo", "luspo")] loss: &str,
    #[values("trl", "verl", "mllm_jax")] semantics: &str,
) {
    let config = |loss: &str, level: &str| {
        let average = r#""loss_agg_mode": "token-mean", "max_completion_length": 8"#;
        format!(r#"{{"loss_type": "{loss}", "semantics": "{semantics}", {average}{level}}}"#)
    };
    let text = refusal(&config(loss, ""));
    let (_, advice) = text.split_once("use loss_type ").expect(&text);
    let named = advice.split_whitespace().next().unwrap();
    let level = if advice.contains("sequence") { r#", "importance_sampling_level": "sequence""# } else { "" };
    LossConfig::from_json(&config(named, level)).unwrap_or_else(|error| panic!("{text}, and then {error}"));
}

#[test]
fn zero_is_a_legal_value_of_every_knob_that_can_be_zero() {
    let json = r#"{"epsilon_low": 0, "epsilon_high": 0, "beta": 0, "entropy_coef": 0}"#;
    let config = LossConfig::from_json(json).unwrap();
    assert_eq!((config.ratio_low(), config.ratio_high()), (1.0, 1.0));
}

#[test]
fn gspo_is_sequence_level_and_refuses_token_level() {
    let gspo = LossConfig::from_json(r#"{"loss_type": "gspo", "epsilon_low": 3e-4, "epsilon_high": 4e-4}"#).unwrap();
    assert!(!gspo.is_token_level());
    let by_level = LossConfig::from_json(r#"{"loss_type": "grpo", "importance_sampling_level": "sequence"}"#).unwrap();
    assert_eq!((by_level.loss_type, by_level.is_token_level()), (LossType::Grpo, false));
    let contradiction = refusal(r#"{"loss_type": "gspo", "importance_sampling_level": "token"}"#);
    assert!(contradiction.contains("importance_sampling_level"), "{contradiction}");
}

#[rstest]
#[case(r#"{"epsilonlow": 0.2}"#, "unknown key `epsilonlow`, did you mean `epsilon_low`? Known keys: adv_tau, beta")]
#[case(r#"{"eps_high": 0.2}"#, "did you mean `epsilon_high`")]
#[case(r#"{"Beta": 0.2}"#, "did you mean `beta`")]
#[case(r#"{"zzz": 1}"#, "unknown key `zzz`; known keys: adv_tau, beta")]
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
fn illegal_values_are_refused_with_a_reason(#[case] json: &str, #[case] reason: &str) {
    let message = refusal(json);
    assert!(message.contains(reason), "{json}: {message}");
}

#[test]
fn a_value_that_is_not_finite_is_refused_field_by_field() {
    let set: [fn(&mut LossConfig); 7] = [
        |c| c.epsilon_low = Some(f64::NAN),
        |c| c.epsilon_high = Some(f64::INFINITY),
        |c| c.beta = f64::NAN,
        |c| c.temperature = f64::INFINITY,
        |c| c.entropy_coef = f64::NEG_INFINITY,
        |c| c.logit_scale = f64::NAN,
        |c| c.final_logit_softcapping = Some(f64::INFINITY),
    ];
    for change in set {
        let mut config = LossConfig::default();
        change(&mut config);
        assert!(
            matches!(config.validate(), Err(Error::Key { message, .. }) if message.contains("finite")),
            "{config:?}"
        );
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

#[test]
fn keys_that_verl_passes_to_every_loss_are_ignored_by_losses_without_them() {
    let c = |loss: &str| {
        let json =
            format!(r#"{{"semantics": "verl", "loss_type": "{loss}", "clip_ratio_c": 3.0, "loss_scale_factor": 9}}"#);
        LossConfig::from_json(&json).unwrap().dual_clip()
    };
    assert_eq!(["vanilla", "grpo", "dppo_tv", "dppo_kl"].map(c), [Some(3.0); 4]);
    assert_eq!(["gspo", "clip_cov", "kl_cov", "cispo", "sapo", "gpg", "geo_mean"].map(c), [None; 7]);
    // Under TRL's semantics these keys would have no effect.
    assert!(refusal(r#"{"loss_type": "sapo", "clip_ratio_c": 3.0}"#).contains("clip_ratio_c"));
    let gspo = |level: &str| {
        format!(r#"{{"semantics": "verl", "loss_type": "gspo", "importance_sampling_level": "{level}"}}"#)
    };
    for level in ["token", "sequence", "sequence_token"] {
        let config = LossConfig::from_json(&gspo(level)).unwrap();
        assert_eq!(config.level(), ImportanceSamplingLevel::SequenceToken);
    }
}

#[rstest]
#[case(r#"{"rollout_is": "icepop", "rollout_is_threshold": 0.5}"#, "reciprocal")]
#[case(r#"{"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}"#, "in order")]
#[case(r#"{"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2}"#, "seq_max_k1")]
#[case(r#"{"rollout_rs_threshold": 2}"#, "without rollout_rs")]
#[case(r#"{"vllm_importance_sampling_clip_min": -1, "vllm_importance_sampling_clip_max": null}"#, "clip_min (-1)")]
#[case(r#"{"truncated_rows": [0]}"#, "a key of a batch")]
#[case(r#"{"num_items_in_batch": 9}"#, "a key of a batch")]
#[case(r#"{"log_ratio_guard": "on"}"#, "`off`")]
#[case(r#"{"loss_type": "vespo", "importance_sampling_level": "sequence", "beta": 0.1}"#, "vespo")]
#[case(r#"{"beta": 0.1, "kl_estimator": "k3+", "use_bias_correction_kl": true}"#, "gradient of k2")]
#[case(r#"{"beta": 0.1, "kl_estimator": "k1+", "kl_importance": "sampler"}"#, "gradient of k2")]
#[case(r#"{"use_bias_correction_kl": true, "kl_importance": "score_function"}"#, "set one of them")]
#[case(r#"{"loss_type": "geo_mean", "beta": 0.1, "kl_importance": "ratio"}"#, "score_function")]
#[case(r#"{"vllm_importance_sampling_mode": "seq-mask-tis"}"#, "vllm_importance_sampling_clip_min")]
#[case(r#"{"loss_agg_mode": "prompt-mean"}"#, "num_generations")]
#[case(r#"{"loss_agg_mode": "token_mean", "num_generations": 4}"#, "prompt-mean")]
#[case(r#"{"kl_agg_mode": "token_mean_legacy"}"#, "micro_batch_size")]
#[case(r#"{"micro_batch_size": 0, "loss_agg_mode": "token_mean_legacy"}"#, "at least 1")]
#[case(r#"{"positive_example_nll_weight": -1}"#, "positive_example_nll_weight")]
#[case(r#"{"loss_type": "vanilla"}"#, "set semantics to `verl`")]
#[case(r#"{"loss_type": "vanilla", "semantics": "mllm_jax"}"#, "semantics is mllm_jax, which has no such loss")]
fn combinations_that_would_be_silently_wrong_are_refused(#[case] json: &str, #[case] words: &str) {
    let message = refusal(json);
    assert!(message.contains(words), "{message}");
}

/// Keys of a step are read together with a batch, and refused without one.
#[rstest]
#[case(r#"{"semantics": "verl", "dp_size": 2}"#, "batch_num_tokens")]
#[case(r#"{"semantics": "verl", "loss_type": "sapo", "dp_size": 2, "batch_num_tokens": 9}"#, "global_batch_size")]
#[case(r#"{"semantics": "verl", "loss_type": "geo_mean", "dp_size": 2, "beta": 0.1}"#, "batch_num_tokens")]
#[case(r#"{"loss_agg_mode": "prompt-mean", "num_generations": 2, "dp_size": 2}"#, "global_batch_size")]
#[case(r#"{"truncated_rows": [0, 1, 0, 0]}"#, "twice")]
#[case(r#"{"truncated_rows": [true, 1]}"#, "one true or false")]
#[case(r#"{"truncated_rows": [2]}"#, "names sequence 2, but the batch has 2")]
#[case(r#"{"positive_rows": [true]}"#, "has 1 flags, but the batch has 2 sequences")]
#[case(r#"{"num_items_in_batch": -1}"#, "num_items_in_batch")]
#[case(r#"{"batch_num_tokens": 0}"#, "batch_num_tokens")]
#[case(r#"{"zzz": 1}"#, "unknown key `zzz`; known keys: adv_tau, batch_num_tokens, beta")]
fn keys_of_a_step_are_checked_with_its_batch(#[case] json: &str, #[case] words: &str) {
    let weights = || {
        let BatchLoss { loss, step } = BatchLoss::from_json(json)?;
        let batch = grpo_core::TokenBatch::packed(vec![0; 5], vec![0, 2, 5])?.with_step(step)?;
        grpo_core::aggregate::token_weights(&loss, &batch)
    };
    let message = weights().unwrap_err().to_string();
    assert!(message.contains(words), "{message}");
}

#[test]
fn numbers_of_a_step_must_be_finite_and_its_entropy_coef_needs_a_bonus() {
    let batch = || grpo_core::TokenBatch::packed(vec![0; 5], vec![0, 2, 5]).unwrap();
    for wrong in [
        StepData { num_items_in_batch: Some(f64::NAN), ..StepData::default() },
        StepData { entropy_coef: Some(f64::INFINITY), ..StepData::default() },
        StepData { global_batch_size: Some(f64::NAN), ..StepData::default() },
    ] {
        assert!(batch().with_step(wrong).is_err());
    }
    let moving = batch().with_step(StepData { entropy_coef: Some(0.5), ..StepData::default() }).unwrap();
    let weights = |entropy_coef| {
        let config = LossConfig { entropy_coef, ..LossConfig::bnpo() };
        grpo_core::aggregate::token_weights(&config, &moving)
    };
    assert_eq!(weights(1.0).unwrap().entropy, vec![0.1; 5], "the step's coefficient over five tokens");
    assert!(weights(0.0).unwrap_err().to_string().contains("no entropy bonus"));
}

/// verl's straight-through estimators are never weighted; TRL has none and weights its estimators by default.
#[test]
fn kl_importance_has_defaults_by_system_and_estimator() {
    let of = |json: &str| LossConfig::from_json(json).unwrap().kl_importance();
    assert_eq!(of(r#"{"beta": 0.1}"#), KlImportance::Ratio);
    assert_eq!(of(r#"{"beta": 0.1, "kl_estimator": "k3+"}"#), KlImportance::Off);
    assert_eq!(of(r#"{"beta": 0.1, "use_bias_correction_kl": false}"#), KlImportance::Off);
    assert_eq!(of(r#"{"beta": 0.1, "kl_importance": "off"}"#), KlImportance::Off);
    assert_eq!(of(r#"{"semantics": "verl", "beta": 0.1}"#), KlImportance::Off);
    assert_eq!(of(r#"{"beta": 0.1, "loss_type": "geo_mean", "kl_importance": "sampler"}"#), KlImportance::Sampler);
    let asks = |json: &str| LossConfig::from_json(json).unwrap().asks_for_sampler_logp();
    assert!(asks(r#"{"beta": 0.1, "kl_importance": "sampler"}"#) && !asks(r#"{"kl_importance": "sampler"}"#));
    assert!(asks(r#"{"rollout_is": "token"}"#) && !asks("{}"));
}

/// The weights of equal parts add up to the weights of the step.
#[rstest]
fn parts_of_a_step_share_its_weights(#[values("grpo", "bnpo", "dapo", "cispo", "luspo")] loss_type: &str) {
    let batch = grpo_core::TokenBatch::packed(vec![0; 5], vec![0, 2, 5]).unwrap();
    let weights = |keys: &str| {
        let json = format!(r#"{{"loss_type": "{loss_type}", "epsilon_high": 5.0{keys}}}"#);
        grpo_core::aggregate::token_weights(&LossConfig::from_json(&json).unwrap(), &batch).unwrap().policy
    };
    let (whole, half) = (weights(""), weights(r#", "gradient_accumulation_steps": 2, "steps_per_generation": 4"#));
    assert!(whole.iter().zip(&half).all(|(whole, half)| (whole / 2.0 - half).abs() < 1e-15), "{whole:?} {half:?}");
    assert_eq!(weights(r#", "num_processes": 2"#), whole);
}

#[test]
fn prepare_checks_truncated_rows_and_requires_sampler_logp() {
    let batch = grpo_core::TokenBatch::packed(vec![0; 5], vec![0, 2, 5]).unwrap();
    let prepare = |json: &str| {
        let BatchLoss { loss, step } = BatchLoss::from_json(json).unwrap();
        let batch = batch.clone().with_step(step).map_err(|e| e.to_string())?;
        let values = |_: &grpo_core::TokenBatch| Ok::<_, Error>(grpo_core::batch::PolicyValues::default());
        loss.prepare(&batch, values).map(|batch| batch.active_tokens()).map_err(|e| e.to_string())
    };
    let truncated =
        |rows: &str| prepare(&format!(r#"{{"mask_truncated_completions": true, "truncated_rows": {rows}}}"#));
    assert_eq!((truncated("[true, false]"), truncated("[0]"), truncated("[]")), (Ok(3), Ok(3), Ok(5)));
    assert!(truncated("[true]").unwrap_err().contains("1 flags"));
    assert!(truncated("[2]").unwrap_err().contains("sequence 2"));
    for key in ["rollout_is\": \"token", "rollout_rs\": \"token_k1\", \"rollout_rs_threshold\": \"2"] {
        let message = prepare(&format!("{{\"{key}\"}}")).unwrap_err();
        assert!(message.contains("sampler_logp"), "{message}");
    }
}

#[test]
fn a_prepared_step_is_masked_before_it_is_weighed_and_needs_no_scores() {
    use grpo_core::batch::{Rows, StepData};
    let batch = grpo_core::TokenBatch::packed(vec![0; 5], vec![0, 2, 5]).unwrap();
    let truncated = StepData { truncated_rows: Rows::Indices(vec![0]), ..StepData::default() };
    let batch = batch.with_step(truncated).unwrap().with_advantages(vec![1.0, -1.0]).unwrap();
    let loss = LossConfig { mask_truncated_completions: true, ..LossConfig::dapo() };
    let step = loss.prepare_step(&batch).unwrap();
    let third = 1.0 / 3.0;
    assert_eq!(step.weights().unwrap().policy, [0.0, 0.0, third, third, third]);
    assert_eq!(loss.prepare_step(&step).unwrap(), step, "a second preparation changes nothing");
    let parts = [0..1, 1..2].map(|rows| step.select_sequences(rows).unwrap());
    assert_eq!((parts[0].active_tokens(), &parts[1].weights().unwrap().policy[..]), (0, &[third; 3][..]));

    let message = LossConfig::kl_cov().prepare_step(&batch).unwrap_err().to_string();
    assert!(message.contains("selects tokens") && message.contains("LossConfig::prepare "), "{message}");
    let sampled = batch.with_sampler_logp(vec![-1.0; 5]).unwrap();
    let message = LossConfig::dapo().prepare_step(&sampled).unwrap_err().to_string();
    assert!(message.contains("old_logp"), "{message}");
}

#[test]
fn errors_of_the_configuration_have_their_key() {
    let key = |config: LossConfig| config.validate().unwrap_err().key().map(str::to_owned);
    assert_eq!(key(LossConfig { temperature: 0.0, ..LossConfig::default() }).as_deref(), Some("temperature"));
    assert_eq!(key(LossConfig { beta: -1.0, ..LossConfig::default() }).as_deref(), Some("beta"));
    assert_eq!(key(LossConfig { dp_size: 0, ..LossConfig::default() }).as_deref(), Some("dp_size"));
    assert_eq!(LossConfig::from_json(r#"{"epsilon_hi": 0.28}"#).unwrap_err().key(), Some("epsilon_hi"));
    let gspo = LossConfig { importance_sampling_level: Some(ImportanceSamplingLevel::Token), ..LossConfig::gspo() };
    assert_eq!(key(gspo).as_deref(), Some("importance_sampling_level"));
    let advantages = AdvantageConfig { eps: -1.0, ..AdvantageConfig::default() };
    assert_eq!(advantages.validate().unwrap_err().key(), Some("eps"));
    assert_eq!(Error::NoAdvantages.key(), None);
}

/// The advice of an error must not lead to another error.
#[rstest]
fn keys_of_an_average_lead_to_settings_that_are_legal(#[values("dapo", "bnpo", "dr_grpo", "luspo")] loss_type: &str) {
    let config = |json: &str| LossConfig::from_json(json).and_then(|config| config.validate().map(|()| config));
    let keys = [
        ("num_generations", "prompt-mean"),
        ("micro_batch_size", "token-mean-legacy"),
        ("loss_scale_factor", "seq-mean-token-sum-norm"),
    ];
    for (key, average) in keys {
        let base = match loss_type {
            "dr_grpo" => r#""loss_type": "dr_grpo", "max_completion_length": 9"#.to_owned(),
            "luspo" => r#""loss_type": "luspo", "importance_sampling_level": "sequence""#.to_owned(),
            _ => format!(r#""loss_type": "{loss_type}""#),
        };
        let error = config(&format!(r#"{{{base}, "{key}": 8}}"#)).unwrap_err();
        let (message, level) = (error.to_string(), ["token", "sequence"][usize::from(loss_type == "luspo")]);
        let advice = format!("leave it out, or set loss_agg_mode to {average} and use loss_type grpo");
        assert!(error.key() == Some(key) && message.contains(&advice), "{message}");
        assert_eq!(message.contains("importance_sampling_level sequence"), level == "sequence");
        let advised = format!(
            r#"{{"loss_type": "grpo", "importance_sampling_level": "{level}", "loss_agg_mode": "{average}", "{key}": 8}}"#
        );
        config(&advised).unwrap();
        config(&format!("{{{base}}}")).unwrap();
    }
}
