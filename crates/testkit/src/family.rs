//! Loss configurations by name, for every way in which tokens depend on each other.

use grpo_core::{LossConfig, LossType};

/// Names of the losses on which properties of all losses are tested.
pub const LOSSES: [&str; 36] = [
    // Each token is independent.
    "grpo",
    "bnpo",
    "dr_grpo",
    "dapo",
    "cispo",
    "mllm_jax",
    "sapo",
    "verl_vanilla",
    "verl_guard",
    "verl_cispo",
    "verl_sapo",
    "gpg",
    "dppo_tv",
    "dppo_kl",
    "dro",
    "kl_straight_through",
    "kl_abs",
    "kl_clamps",
    "kl_score_function",
    "kl_sampler",
    // Tokens of a sequence share a ratio.
    "gspo",
    "verl_gspo",
    "luspo",
    "geo_mean",
    "vespo",
    "grpo_sequence",
    // Weights and rejections by the sampler.
    "sampler_token_truncate",
    "sampler_sequence_mask",
    "sampler_icepop",
    "sampler_seq_mask_tis",
    "sampler_rejection",
    "sampler_vespo",
    // Tokens are selected from the whole batch.
    "top_entropy",
    "off_policy",
    "clip_cov",
    "kl_cov",
];

/// Returns the losses without an entry in [`LOSSES`], under their defaults.
pub fn others() -> impl Iterator<Item = &'static str> {
    let named = |loss_type: LossType| LOSSES.iter().any(|name| loss(name).loss_type == loss_type);
    LossType::ALL.iter().copied().filter(move |loss_type| !named(*loss_type)).map(LossType::name)
}

/// Parses a configuration.
pub fn config(json: &str) -> LossConfig {
    LossConfig::from_json(json).unwrap()
}

/// Returns the configuration called `name`. Bounds of ratios lie where [`Case`](crate::Case) has no log-ratios.
pub fn loss(name: &str) -> LossConfig {
    let named = trl_loss(name).or_else(|| verl_loss(name)).or_else(|| kl_penalty(name));
    match named.or_else(|| sampler_correction(name)) {
        Some(json) => config(json),
        None => config(&format!(r#"{{"loss_type": "{name}", "beta": 0.1}}"#)),
    }
}

/// Returns a loss with the semantics of TRL or of other libraries.
fn trl_loss(name: &str) -> Option<&'static str> {
    Some(match name {
        "grpo" => r#"{"loss_type": "grpo", "epsilon_high": 0.28, "temperature": 0.9}"#,
        "bnpo" => r#"{"loss_type": "bnpo", "delta": 1.45, "entropy_coef": 0.01}"#,
        "dr_grpo" => r#"{"loss_type": "dr_grpo", "max_completion_length": 16, "beta": 0.05, "kl_estimator": "k2"}"#,
        "dapo" => {
            r#"{"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.1, "temperature": 0.7,
                      "temperature_mode": "scale_logprobs"}"#
        }
        "cispo" => {
            r#"{"loss_type": "cispo", "epsilon_high": 1.3, "beta": 0.1, "use_bias_correction_kl": false,
                       "entropy_coef": 0.02, "temperature": 0.8}"#
        }
        "gspo" => {
            r#"{"loss_type": "gspo", "epsilon_low": 0.05, "epsilon_high": 0.06, "beta": 0.1,
                      "entropy_coef": -0.01, "temperature": 1.3}"#
        }
        "softcap" => {
            r#"{"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.1, "entropy_coef": 0.02, "temperature": 0.8,
                       "logit_scale": 1.7, "final_logit_softcapping": 4.0}"#
        }
        "softcap_logprobs" => {
            r#"{"loss_type": "gspo", "epsilon_low": 0.05, "epsilon_high": 0.06, "beta": 0.1, "entropy_coef": -0.01,
                       "logit_scale": 0.6, "final_logit_softcapping": 30.0, "temperature_mode": "scale_logprobs"}"#
        }
        "logit_scale" => r#"{"loss_type": "bnpo", "logit_scale": 0.3, "entropy_coef": 0.02}"#,
        "negative_scale" => r#"{"loss_type": "bnpo", "logit_scale": -0.7, "entropy_coef": 0.02, "temperature": 0.9}"#,
        "mllm_jax" => r#"{"semantics": "mllm_jax", "beta": 0.1, "kl_estimator": "k3", "temperature": 0.8}"#,
        "sapo" => r#"{"loss_type": "sapo", "beta": 0.05, "kl_estimator": "k1", "entropy_coef": 0.01}"#,
        "luspo" => r#"{"loss_type": "luspo", "epsilon_low": 0.05, "epsilon_high": 0.06, "beta": 0.1}"#,
        "geo_mean" => r#"{"loss_type": "geo_mean", "epsilon_low": 0.2, "epsilon_high": 0.25, "beta": 0.1}"#,
        // The default exponents amplify rounding errors of a sequence's log-ratio fivefold; golden files have them.
        "vespo" => {
            r#"{"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_k_neg": 1.5, "vespo_lambda_pos": 0.5,
                "vespo_lambda_neg": 0.4, "beta": 0.1, "entropy_coef": 0.01}"#
        }
        "grpo_sequence" => {
            r#"{"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06, "delta": 1.08,
                "beta": 0.1, "use_bias_correction_kl": true}"#
        }
        "top_entropy" => r#"{"loss_type": "dapo", "top_entropy_quantile": 0.4, "entropy_coef": 0.02, "beta": 0.1}"#,
        "off_policy" => {
            r#"{"off_policy_mask_threshold": 0.02, "vllm_importance_sampling_correction": true, "beta": 0.1,
                "vllm_importance_sampling_mode": "geometric_truncate"}"#
        }
        _ => return None,
    })
}

/// Returns a loss with verl's semantics.
fn verl_loss(name: &str) -> Option<&'static str> {
    Some(match name {
        "verl_vanilla" => {
            r#"{"semantics": "verl", "epsilon_high": 0.28, "clip_ratio_c": 1.3,
                "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 8, "entropy_coef": 0.02,
                "beta": 0.01, "kl_estimator": "low_var_kl"}"#
        }
        "verl_guard" => {
            r#"{"semantics": "verl", "loss_type": "vanilla", "log_ratio_guard": 0.22, "epsilon_high": 0.06}"#
        }
        "verl_cispo" => {
            r#"{"semantics": "verl", "loss_type": "cispo", "epsilon_high": 0.28,
                "loss_agg_mode": "seq-mean-token-mean"}"#
        }
        "verl_sapo" => {
            r#"{"semantics": "verl", "loss_type": "sapo", "tau_pos": 1.2, "beta": 0.05, "entropy_coef": 0.01}"#
        }
        "gpg" => r#"{"semantics": "verl", "loss_type": "gpg", "loss_agg_mode": "seq-mean-token-sum"}"#,
        "dppo_tv" => r#"{"semantics": "verl", "loss_type": "dppo_tv", "epsilon_low": 0.004, "epsilon_high": 0.006}"#,
        "dppo_kl" => r#"{"semantics": "verl", "loss_type": "dppo_kl", "epsilon_low": 0.001, "epsilon_high": 0.002}"#,
        "dro" => r#"{"semantics": "verl", "loss_type": "dro", "dro_beta": 0.7}"#,
        "verl_gspo" => {
            r#"{"semantics": "verl", "loss_type": "gspo", "epsilon_low": 0.05, "epsilon_high": 0.06,
                "loss_agg_mode": "seq-mean-token-mean", "beta": 0.1, "use_bias_correction_kl": true}"#
        }
        // All eligible tokens are selected: a draw among them would depend on their positions.
        "clip_cov" => r#"{"semantics": "verl", "loss_type": "clip_cov", "clip_cov_ratio": 1.0, "clip_cov_lb": 0.3}"#,
        "kl_cov" => r#"{"semantics": "verl", "loss_type": "kl_cov", "kl_cov_ratio": 0.3, "ppo_kl_coef": 0.5}"#,
        _ => return None,
    })
}

/// Returns a form of the KL penalty.
fn kl_penalty(name: &str) -> Option<&'static str> {
    Some(match name {
        "kl_straight_through" => r#"{"loss_type": "dapo", "beta": 0.2, "kl_estimator": "k3+"}"#,
        "kl_abs" => r#"{"loss_type": "bnpo", "beta": 0.2, "kl_estimator": "abs", "use_bias_correction_kl": false}"#,
        "kl_clamps" => {
            r#"{"semantics": "verl", "beta": 0.2, "kl_estimator": "k3", "kl_input_clamp": 0.22,
                "kl_output_clamp": 0.018}"#
        }
        "kl_score_function" => {
            r#"{"loss_type": "dapo", "beta": 0.2, "kl_importance": "score_function", "kl_input_clamp": 0.22,
                "kl_output_clamp": 0.018}"#
        }
        "kl_sampler" => r#"{"beta": 0.2, "kl_importance": "sampler", "vllm_importance_sampling_correction": false}"#,
        _ => return None,
    })
}

/// Returns a correction of the mismatch between sampler and policy.
fn sampler_correction(name: &str) -> Option<&'static str> {
    Some(match name {
        "sampler_seq_mask_tis" => {
            r#"{"loss_type": "dapo", "vllm_importance_sampling_correction": true, "beta": 0.1,
                "vllm_importance_sampling_mode": "seq_mask_tis",
                "vllm_importance_sampling_clip_min": 0.97, "vllm_importance_sampling_clip_max": 1.1}"#
        }
        "sampler_token_truncate" => {
            r#"{"loss_type": "reinforce", "vllm_importance_sampling_correction": true, "beta": 0.1,
                "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.25}"#
        }
        "sampler_sequence_mask" => {
            r#"{"loss_type": "gspo", "vllm_importance_sampling_correction": true, "epsilon_low": 0.02, "beta": 0.1,
                "vllm_importance_sampling_clip_min": 0.6, "vllm_importance_sampling_clip_max": 1.6}"#
        }
        "sampler_icepop" => {
            r#"{"semantics": "verl", "rollout_is": "icepop", "rollout_is_threshold": "0.8_1.25",
                "rollout_is_batch_normalize": true}"#
        }
        "sampler_rejection" => {
            r#"{"semantics": "verl", "rollout_is": "sequence", "rollout_rs": "token_k1,seq_mean_k3",
                "rollout_rs_threshold": "0.6_1.25,0.025"}"#
        }
        "sampler_vespo" => {
            r#"{"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_k_neg": 1.5, "vespo_lambda_pos": 0.5,
                "vespo_lambda_neg": 0.4, "vllm_importance_sampling_correction": true,
                "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.25}"#
        }
        _ => return None,
    })
}
