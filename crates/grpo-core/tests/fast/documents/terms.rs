//! The generated parts of the pages about aggregation, sampler and entropy.

use super::page::{fraction, number, spoken, table};
use grpo_core::aggregate::token_weights;
use grpo_core::batch::PolicyValues;
use grpo_core::format::BatchLoss;
use grpo_core::{LossConfig, TokenBatch};

/// Returns the weights of a batch of width 4 with three sequences of 3, 1 and 0 active tokens.
pub(crate) fn aggregation() -> String {
    let trl = [
        r#""loss_type": "grpo""#,
        r#""loss_type": "grpo", "count_masked_rows": false"#,
        r#""loss_type": "bnpo""#,
        r#""loss_type": "dr_grpo", "max_completion_length": 10"#,
        r#""loss_type": "luspo""#,
        r#""loss_type": "dapo""#,
        r#""loss_type": "dapo", "num_items_in_batch": 20, "gradient_accumulation_steps": 2, "steps_per_generation": 4"#,
        r#""semantics": "verl", "loss_type": "sapo""#,
    ]
    .map(|keys| format!("{{{keys}}}"));
    let verl = [
        r#""token-mean""#,
        r#""token-sum""#,
        r#""seq-mean-token-sum""#,
        r#""seq-mean-token-sum-norm""#,
        r#""seq-mean-token-mean""#,
        r#""seq-mean-token-mean", "dp_size": 2, "global_batch_size": 6"#,
        r#""sequence-mean-token-sum-norm""#,
        r#""prompt-mean", "num_generations": 3"#,
        r#""token-mean-legacy", "micro_batch_size": 1"#,
    ]
    .map(|mode| format!(r#"{{"semantics": "verl", "loss_type": "vanilla", "loss_agg_mode": {mode}}}"#));
    let named =
        [r#""loss_agg_mode": "token-mean", "kl_agg_mode": "seq-mean-token-mean""#].map(|keys| format!("{{{keys}}}"));
    let active = |i: usize| if i < 3 || i == 4 { 1.0 } else { 0.0 };
    let batch = TokenBatch::padded(&[0; 12], &std::array::from_fn::<f32, 12, _>(active), [3, 4]).unwrap();
    let rows = trl.iter().chain(&named).chain(&verl).map(|json| {
        let BatchLoss { loss, step } = BatchLoss::from_json(json).unwrap();
        // With coefficients of 1 the weights are the averages.
        let loss = LossConfig { beta: 1.0, entropy_coef: 1.0, ..loss };
        let weights = token_weights(&loss, &batch.clone().with_step(step).unwrap()).unwrap();
        let of = |list: &[f64]| match list[0] == list[4] {
            true => fraction(list[0]),
            false => format!("{}, {}", fraction(list[0]), fraction(list[4])),
        };
        [format!("`{}`", spoken(json)), of(&weights.policy), of(&weights.kl), of(&weights.entropy)]
    });
    format!(
        "Weights of a batch of three sequences, 4 wide, with 3, 1 and 0 active tokens. If a cell has two weights, they \
         are the weights of a token of the first and of the second sequence.\n\n{}",
        table(&["settings", "policy term", "KL term, before beta", "entropy, before its coefficient"], rows)
    )
}

/// Returns the weights of two sequences whose tokens have given ratios.
pub(crate) fn sampler() -> String {
    let ratios: [f64; 5] = [0.6, 4.0, 1.8, 1.8, f64::NAN];
    let trl = [
        r#""token_truncate""#,
        r#""token_mask""#,
        r#""sequence_truncate""#,
        r#""sequence_mask""#,
        r#""geometric_truncate""#,
        r#""geometric_mask""#,
        r#""seq_mask_tis", "vllm_importance_sampling_clip_min": 0.5"#,
        r#""seq_mask_tis", "vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 1.5"#,
    ]
    .map(|mode| format!(r#"{{"vllm_importance_sampling_mode": {mode}}}"#));
    let verl = [
        r#""rollout_is": "token""#,
        r#""rollout_is": "token", "rollout_is_threshold": "0.7_3.0""#,
        r#""rollout_is": "token", "rollout_is_batch_normalize": true"#,
        r#""rollout_is": "sequence""#,
        r#""rollout_is": "sequence", "rollout_is_threshold": "0.5_3.0""#,
        r#""rollout_is": "icepop""#,
        r#""rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0""#,
        r#""rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.3""#,
    ]
    .map(|keys| format!(r#"{{"semantics": "verl", "loss_type": "vanilla", {keys}}}"#));
    let rows = trl.iter().chain(&verl).map(|json| {
        let batch = TokenBatch::packed(vec![0; 5], vec![0, 2, 5])
            .and_then(|batch| batch.with_old_logp(vec![-1.0; 5]))
            .and_then(|batch| batch.with_sampler_logp(ratios.map(|r| (-1.0 - r.ln()) as f32).to_vec()))
            .unwrap();
        let config = LossConfig::from_json(json).unwrap();
        let prepared =
            config.prepare(&batch, |_| -> grpo_core::Result<PolicyValues> { panic!("needs no forward pass") }).unwrap();
        let weight = |row| match prepared.is_active(row) {
            true => number((prepared.factors().unwrap().policy[row] * 1e5).round() / 1e5),
            false => "masked".into(),
        };
        let weights = |rows: std::ops::Range<usize>| rows.map(weight).collect::<Vec<_>>().join(", ");
        [format!("`{}`", spoken(json)), weights(0..2), weights(2..5)]
    });
    format!(
        "The factor of each token's policy term, for two sequences with the ratios e^(o - s) in the table's \
         head.\n\n{}",
        table(&["settings", "0.6, 4", "1.8, 1.8, NaN"], rows)
    )
}

/// Returns the selection among five tokens.
pub(crate) fn entropy() -> String {
    let entropy = vec![0.1, 0.5, 1.0, 2.0, 3.0];
    let rows = [1.0, 0.8, 0.5, 0.3, 0.2].map(|top| {
        let config = LossConfig { top_entropy_quantile: top, ..LossConfig::default() };
        let batch = TokenBatch::packed(vec![0; 5], vec![0, 5]).unwrap();
        let values = PolicyValues { logp: vec![-1.0; 5], entropy: entropy.clone() };
        let prepared = config.prepare(&batch, |_| Ok::<_, grpo_core::Error>(values)).unwrap();
        let of = |list: Option<&Vec<f64>>| list.map_or(vec![1.0; 5], Clone::clone).into_iter().map(number).collect();
        let policy: Vec<String> = of(prepared.factors().map(|factors| &factors.policy));
        let bonus: Vec<String> = of(prepared.factors().map(|factors| &factors.entropy));
        [number(top), policy.join(", "), bonus.join(", ")]
    });
    format!(
        "Five tokens with entropies 0.1, 0.5, 1, 2 and 3:\n\n{}",
        table(&["`top_entropy_quantile`", "policy factors", "entropy factors in the bonus"], rows)
    )
}
