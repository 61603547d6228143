//! The generated parts of the pages about KL, aggregation, sampler and entropy.

use super::page::{fraction, number, spoken, table};
use grpo_core::aggregate::token_weights;
use grpo_core::backend_api::evaluate::Evaluator;
use grpo_core::batch::PolicyValues;
use grpo_core::format::BatchLoss;
use grpo_core::{Advantages, LossConfig, TokenBatch};

/// Returns value and derivative of each estimator.
pub(crate) fn kl() -> String {
    let estimators = ["k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k3+", "abs+", "low_var_kl+"];
    let head: Vec<String> = estimators.iter().map(|name| format!("`{name}`")).collect();
    let head: Vec<&str> = ["d = q - l"].into_iter().chain(head.iter().map(String::as_str)).chain(["k3 r"]).collect();
    let settings = estimators.map(|name| (name, false)).into_iter().chain([("k3", true)]);
    let (mut values, mut slopes) = (Vec::new(), Vec::new());
    for d in [-3.0, -0.5, 0.0, 0.5, 3.0, 45.0] {
        let of = settings.clone().map(|(name, corrected)| estimate(name, corrected, d));
        let (value, slope): (Vec<String>, Vec<String>) = of.map(|(v, s)| (number(v), number(s))).unzip();
        values.push([vec![number(d)], value].concat());
        slopes.push([vec![number(d)], slope].concat());
    }
    format!(
        "Computed by this library with `semantics: trl` without bias correction; the last column is k3 times the ratio, \
         on-policy (r = 1).\n\nValue:\n\n{}\nDerivative with respect to l:\n\n{}",
        table(&head, values),
        table(&head, slopes)
    )
}

/// Returns the KL term of a token with A = 0 and beta = 1.
fn estimate(estimator: &str, corrected: bool, d: f64) -> (f64, f64) {
    let json = format!(r#"{{"beta": 1, "kl_estimator": "{estimator}", "use_bias_correction_kl": {corrected}}}"#);
    let config = LossConfig::from_json(&json).unwrap();
    let batch = TokenBatch::packed(vec![0], vec![0, 1])
        .and_then(|batch| batch.with_advantages(Advantages::PerSequence(vec![0.0])))
        .and_then(|batch| batch.with_ref_logp(vec![-50.0 + d as f32]))
        .unwrap();
    let evaluator = Evaluator::new(&config, &batch).unwrap();
    let mut totals = evaluator.totals();
    let (mut dlogp, mut dentropy) = ([0.0], [0.0]);
    evaluator.evaluate(0..1, &[-50.0], &[0.0], &mut dlogp, &mut dentropy, &mut totals);
    (evaluator.finish(totals).loss, dlogp[0])
}

/// Returns the weights of a batch of width 4 with three sequences of 3, 1 and 0 active tokens.
pub(crate) fn aggregation() -> String {
    let trl = [
        r#""loss_type": "grpo""#,
        r#""loss_type": "grpo", "count_masked_rows": false"#,
        r#""loss_type": "grpo", "gradient_accumulation_steps": 2"#,
        r#""loss_type": "bnpo""#,
        r#""loss_type": "dr_grpo", "max_completion_length": 10"#,
        r#""loss_type": "luspo""#,
        r#""loss_type": "dapo""#,
        r#""loss_type": "dapo", "num_items_in_batch": 20, "num_processes": 2"#,
        r#""loss_type": "dapo", "num_items_in_batch": 20, "gradient_accumulation_steps": 2, "steps_per_generation": 4"#,
        r#""semantics": "verl", "loss_type": "sapo""#,
        r#""semantics": "verl", "loss_type": "geo_mean""#,
    ]
    .map(|keys| format!("{{{keys}}}"));
    let verl = [
        r#""token-mean""#,
        r#""token-mean", "dp_size": 2, "batch_num_tokens": 20"#,
        r#""token-sum""#,
        r#""seq-mean-token-sum""#,
        r#""seq-mean-token-sum-norm""#,
        r#""seq-mean-token-sum-norm", "loss_scale_factor": 10"#,
        r#""seq-mean-token-mean""#,
        r#""seq-mean-token-mean", "count_masked_rows": true"#,
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
