//! Options that no other system has, or none that can be installed.

use crate::golden::folder;
use grpo_core::BatchFile;
use grpo_core::format::BatchLoss;

/// Losses by name.
pub const LOSSES: [(&str, &str); 24] = [
    (
        "geometric_truncate",
        r#"{"vllm_importance_sampling_mode": "geometric_truncate", "vllm_importance_sampling_clip_max": 1.02}"#,
    ),
    (
        "geometric_mask",
        r#"{"vllm_importance_sampling_mode": "geometric_mask", "vllm_importance_sampling_clip_max": 1.02,
    "vllm_importance_sampling_clip_min": 0.9}"#,
    ),
    ("gpg", r#"{"loss_type": "gpg", "beta": 0.1}"#),
    (
        "reinforce",
        r#"{"loss_type": "reinforce", "vllm_importance_sampling_mode": "token_truncate", "entropy_coef": 0.02}"#,
    ),
    ("dro", r#"{"loss_type": "dro", "dro_beta": 0.3, "beta": 0.1, "kl_estimator": "abs+"}"#),
    ("dual_clip", r#"{"clip_ratio_c": 1.3, "epsilon_low": 0.1, "beta": 0.1, "kl_estimator": "low_var_kl+"}"#),
    (
        "guard",
        r#"{"log_ratio_guard": 0.31, "epsilon_low": 0.4, "beta": 0.1, "kl_input_clamp": 0.3, "kl_output_clamp": 0.04}"#,
    ),
    (
        "sequence_token",
        r#"{"importance_sampling_level": "sequence_token", "epsilon_low": 0.02, "epsilon_high": 0.03, "beta": 0.1}"#,
    ),
    ("sapo_sequence", r#"{"loss_type": "sapo", "importance_sampling_level": "sequence", "beta": 0.1}"#),
    ("kl_cov", r#"{"loss_type": "kl_cov", "kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5, "beta": 0.1}"#),
    ("averages_of_verl", r#"{"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 7, "beta": 0.1}"#),
    (
        "geometric_mean_of_high_entropy",
        r#"{"loss_type": "geo_mean", "top_entropy_quantile": 0.5, "entropy_coef": 0.1}"#,
    ),
    (
        "prime_rl",
        r#"{"loss_type": "prime_rl", "kl_tau": 0.05, "adv_tau": 0.8, "epsilon_low": 0.05, "epsilon_high": 0.04}"#,
    ),
    ("ipo", r#"{"loss_type": "ipo", "kl_tau": 0.05, "epsilon_low": 0.05, "epsilon_high": 0.04, "entropy_coef": 0.02}"#),
    ("flash_reinforce", r#"{"loss_type": "flash_reinforce", "sequence_kl_threshold": 0.012, "entropy_coef": 0.02}"#),
    (
        "kl_of_nemo",
        r#"{"beta": 0.1, "kl_importance": "score_function", "kl_input_clamp": 0.35, "kl_output_clamp": 0.05}"#,
    ),
    ("kl_against_the_sampler", r#"{"beta": 0.1, "kl_importance": "sampler"}"#),
    (
        "kl_against_the_sampler_clamped",
        r#"{"loss_type": "gspo", "beta": 0.1, "kl_importance": "sampler", "kl_output_clamp": 0.02, "kl_estimator": "k2"}"#,
    ),
    ("positive_examples", r#"{"positive_example_nll_weight": 0.3, "positive_rows": [1, 2], "beta": 0.1}"#),
    (
        "seq_mask_tis",
        r#"{"vllm_importance_sampling_mode": "seq-mask-tis", "vllm_importance_sampling_clip_max": 1.3,
    "vllm_importance_sampling_clip_min": 1.2}"#,
    ),
    ("averages_of_skyrl", r#"{"loss_agg_mode": "prompt_mean", "num_generations": 5, "beta": 0.1}"#),
    ("averages_of_micro_batches", r#"{"loss_agg_mode": "token-mean-legacy", "micro_batch_size": 1}"#),
    ("averages_of_tunix", r#"{"loss_agg_mode": "sequence-mean-token-sum-norm", "loss_scale_factor": 9}"#),
    ("seed", r#"{"semantics": "mllm_jax", "temperature": 0.7, "epsilon_high": 0.3}"#),
];

/// Returns a golden batch with advantages of both signs, ratios on all sides of the clip, a reference policy, and some unknown sampler
/// log-probabilities.
pub fn file(loss: &str) -> BatchFile {
    let bytes = std::fs::read(folder().join("trl_grpo_sampler_token_truncate.safetensors")).unwrap();
    let file = BatchFile::parse(&bytes).unwrap();
    assert!(file.batch.sampler_logp().unwrap().iter().any(|logp| logp.is_nan()) && file.batch.old_logp().is_some());
    let expected = grpo_core::parity::Values::default();
    let reference = file.batch.old_logp().unwrap().iter().map(|logp| logp + 0.21).collect();
    let batch = file.batch.clone().with_ref_logp(reference).unwrap();
    BatchFile { expected, batch, ..file }.with_loss(BatchLoss::from_json(loss).unwrap()).unwrap()
}
