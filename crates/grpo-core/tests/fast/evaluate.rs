//! The evaluator compared with closed forms, with finite differences, and with its own results on parts of a batch.

use approx::assert_relative_eq;
use grpo_core::aggregate::token_weights;
use grpo_core::backend_api::evaluate::Evaluator;
use grpo_core::backend_api::real::Scalar;
use grpo_core::batch::{Rows, StepData, TokenWeights};
use grpo_core::format::BatchLoss;
use grpo_core::{Advantages, KlEstimator, LossConfig, LossOutput, LossType, Metrics, Scores, TokenBatch};
use rstest::rstest;

/// Returns two long sequences with ratios on both sides of the clip and both signs of the advantage, one masked token, a fully
/// masked sequence, and a sequence of one token.
fn batch() -> (TokenBatch, Vec<f64>) {
    let logp = [-1.0, -2.0, -0.5, -3.0, -1.5, -0.7, -2.2, -1.1, -4.0, -0.9_f64];
    let log_ratio = [0.05, 0.4, -0.5, 0.0, -0.3, 0.31, 9.0, 0.02, -0.07, 0.6_f32];
    let old: Vec<f32> = logp.iter().zip(log_ratio).map(|(l, d)| *l as f32 - d).collect();
    let ref_logp: Vec<f32> =
        logp.iter().zip([0.3, -0.2, 0.5, 0.1, -0.6, 0.2, 0.0, 0.4, -0.1, 0.25]).map(|(l, d)| *l as f32 - d).collect();
    let batch = TokenBatch::packed((0..10).collect(), vec![0, 4, 4, 8, 9, 10])
        .unwrap()
        .with_mask(&[1., 1., 1., 1., 1., 1., 0., 1., 0., 1.])
        .unwrap()
        .with_advantages(Advantages::PerSequence(vec![1.3, 9.0, -0.8, 2.0, 0.7]))
        .unwrap()
        .with_old_logp(old)
        .unwrap()
        .with_ref_logp(ref_logp)
        .unwrap();
    let active = batch.active_rows().iter().map(|i| logp[*i]).collect();
    (batch, active)
}

struct Result<R> {
    loss: f64,
    dlogp: Vec<R>,
    dentropy: Vec<R>,
    metrics: Metrics,
}

fn run<R: Scalar>(config: &LossConfig, batch: &TokenBatch, logp: &[R], entropy: &[R], cuts: &[usize]) -> Result<R> {
    let evaluator = Evaluator::new(config, batch).unwrap();
    let mut totals = evaluator.totals();
    let (mut dlogp, mut dentropy) = (vec![R::default(); logp.len()], vec![R::default(); logp.len()]);
    let mut from = 0;
    for to in cuts.iter().copied().chain([logp.len()]) {
        let (l, e) = (&logp[from..to], &entropy[from..to]);
        evaluator.evaluate(from..to, l, e, &mut dlogp[from..to], &mut dentropy[from..to], &mut totals);
        from = to;
    }
    let sums = evaluator.finish(totals);
    let metrics = evaluator.metrics(&sums);
    Result { loss: sums.loss, dlogp, dentropy, metrics }
}

fn config(json: &str) -> LossConfig {
    LossConfig::from_json(json).unwrap()
}

#[rstest]
fn derivatives_match_finite_differences(
    #[values("grpo", "bnpo", "dr_grpo", "dapo", "gspo")] loss_type: &str,
    #[values("k1", "k2", "k3")] kl: &str,
    #[values(true, false)] corrected: bool,
    #[values("null", "1.5")] delta: &str,
    #[values(true, false)] on_policy: bool,
) {
    let config = config(&format!(
        r#"{{"loss_type": "{loss_type}", "epsilon_low": 0.2, "epsilon_high": 0.3, "delta": {delta}, "beta": 0.1,
            "kl_estimator": "{kl}", "use_bias_correction_kl": {corrected}, "entropy_coef": 0.05,
            "max_completion_length": 16}}"#
    ));
    let (mut batch, logp) = batch();
    if on_policy {
        // The old log-probabilities equal the policy's own and stay fixed in the finite difference.
        let mut old = vec![0.0; batch.tokens()];
        for (row, l) in batch.active_rows().iter().zip(&logp) {
            old[*row] = *l as f32;
        }
        batch = batch.with_old_logp(old).unwrap();
    }
    let entropy: Vec<f64> = (0..logp.len()).map(|i| 1.0 + 0.1 * i as f64).collect();
    let at = run(&config, &batch, &logp, &entropy, &[]);
    let h = 1e-6;
    for i in 0..logp.len() {
        let shifted = |list: &[f64], d: f64| {
            let mut list = list.to_vec();
            list[i] += d;
            list
        };
        let slope = |f: &dyn Fn(f64) -> f64| (f(h) - f(-h)) / (2.0 * h);
        let dlogp = slope(&|d| run(&config, &batch, &shifted(&logp, d), &entropy, &[]).loss);
        let dentropy = slope(&|d| run(&config, &batch, &logp, &shifted(&entropy, d), &[]).loss);
        assert_relative_eq!(at.dlogp[i], dlogp, max_relative = 1e-6, epsilon = 1e-8);
        assert_relative_eq!(at.dentropy[i], dentropy, max_relative = 1e-6, epsilon = 1e-8);
        assert!(at.dentropy[i] < -1e-3);
    }
    assert!(at.dlogp.iter().filter(|d| d.abs() > 1e-3).count() >= 5, "inputs must exercise the gradient");
}

/// cispo detaches its weight, so its gradient differs from finite differences; the added KL term's gradient does not.
#[rstest]
fn the_kl_gradient_of_cispo_matches_finite_differences(
    #[values("k1", "k2", "k3")] kl: &str,
    #[values(true, false)] corrected: bool,
) {
    let with = |beta: f64| {
        config(&format!(
            r#"{{"loss_type": "cispo", "epsilon_high": 1.3, "beta": {beta}, "kl_estimator": "{kl}", "use_bias_correction_kl": {corrected}}}"#
        ))
    };
    let (batch, logp) = batch();
    let zeros = vec![0.0; logp.len()];
    let at = |logp: &[f64], beta: f64| run(&with(beta), &batch, logp, &zeros, &[]);
    let h = 1e-6;
    for i in 0..logp.len() {
        let kl = |d: f64| {
            let mut logp = logp.clone();
            logp[i] += d;
            at(&logp, 0.5).loss - at(&logp, 0.0).loss
        };
        let got = at(&logp, 0.5).dlogp[i] - at(&logp, 0.0).dlogp[i];
        assert_relative_eq!(got, (kl(h) - kl(-h)) / (2.0 * h), max_relative = 1e-6, epsilon = 1e-8);
        assert!(got.abs() > 1e-4);
    }
}

/// Returns dL_t/dlogp of the clip family as stated in the literature (without KL), independent of the crate's `objective`.
fn closed_form(config: &LossConfig, ratio: f64, advantage: f64) -> f64 {
    let delta = config.delta.unwrap_or(f64::INFINITY);
    let clipped = ratio.clamp(config.ratio_low(), config.ratio_high());
    let unclipped = clipped * advantage >= ratio.min(delta) * advantage;
    if unclipped && ratio <= delta { -advantage * ratio } else { 0.0 }
}

#[rstest]
fn the_clip_family_matches_its_closed_form(
    #[values("grpo", "bnpo", "dapo")] loss_type: &str,
    #[values("null", "1.4")] delta: &str,
    #[values(-2.0, -0.5, 0.0, 0.5, 2.0)] advantage: f32,
) {
    let config = config(&format!(r#"{{"loss_type": "{loss_type}", "epsilon_high": 0.28, "delta": {delta}}}"#));
    for step in -40..=40 {
        let log_ratio = f64::from(step) * 0.02 + 0.003;
        let batch = TokenBatch::packed(vec![0], vec![0, 1])
            .unwrap()
            .with_advantages(Advantages::PerSequence(vec![advantage]))
            .unwrap()
            .with_old_logp(vec![-1.0])
            .unwrap();
        let got = run(&config, &batch, &[log_ratio - 1.0], &[0.0], &[]).dlogp[0];
        assert_relative_eq!(got, closed_form(&config, log_ratio.exp(), advantage.into()), epsilon = 1e-12);
    }
}

#[test]
fn cispo_weights_by_a_detached_capped_ratio() {
    let config = config(r#"{"loss_type": "cispo", "epsilon_high": 1.3}"#);
    let (batch, logp) = batch();
    let got = run(&config, &batch, &logp, &vec![0.0; logp.len()], &[]);
    let mut loss = 0.0;
    for sequence in 0..batch.sequences() {
        for row in batch.range(sequence).filter(|r| batch.is_active(*r)) {
            let i = batch.active_rows().iter().position(|r| *r == row).unwrap();
            let ratio = (logp[i] - f64::from(batch.old_logp().unwrap()[row])).exp();
            let weight = ratio.min(1.3) * f64::from(batch.advantage(sequence, row)) / logp.len() as f64;
            assert_relative_eq!(got.dlogp[i], -weight, max_relative = 1e-12);
            loss -= weight * logp[i];
        }
    }
    assert_relative_eq!(got.loss, loss, max_relative = 1e-12);
    // Positive advantages with a ratio over 1.3: rows 1 (1.49) and 9 (1.82), of 8 active tokens.
    assert_eq!(got.metrics.value("cispo_clip_ratio"), Some(2.0 / 8.0));
}

#[rstest]
fn on_policy_the_gradient_is_minus_the_advantage(#[values("grpo", "cispo", "gspo")] loss_type: &str) {
    let config = config(&format!(r#"{{"loss_type": "{loss_type}", "epsilon_high": 5}}"#));
    let batch = TokenBatch::packed(vec![0; 6], vec![0, 2, 6]).unwrap();
    let batch = batch.with_advantages(Advantages::PerSequence(vec![1.5, -0.5])).unwrap();
    let got = run(&config, &batch, &[-1.0f32, -2.0, -0.3, -7.0, -1.0, -0.1], &[0.0; 6], &[]);
    let weights = token_weights(&config, &batch).unwrap().policy;
    for (i, weight) in weights.into_iter().enumerate() {
        let advantage = if i < 2 { 1.5 } else { -0.5 };
        assert_relative_eq!(got.dlogp[i], (-advantage * weight) as f32, max_relative = 1e-6);
    }
}

/// Returns the weights of a batch for a loss and a step.
fn weights(json: &str, batch: &TokenBatch) -> grpo_core::Result<TokenWeights> {
    let BatchLoss { loss, step } = BatchLoss::from_json(json)?;
    token_weights(&loss, &batch.clone().with_step(step)?)
}

/// Returns the data of a step with `positive_rows`.
fn positive(rows: Vec<usize>) -> StepData {
    StepData { positive_rows: Rows::Indices(rows), ..StepData::default() }
}

#[test]
fn kl_term_has_the_average_of_the_policy_term_times_beta() {
    let (batch, _) = batch();
    for json in [r#"{"beta": 0.5}"#, r#"{"loss_type": "dapo", "beta": 0.5}"#, r#"{"semantics": "verl", "beta": 0.5}"#] {
        let TokenWeights { policy, kl, .. } = weights(json, &batch).unwrap();
        assert!(policy.iter().zip(&kl).all(|(policy, kl)| 0.5 * policy == *kl), "{json}");
    }
}

#[test]
fn weights_match_trl() {
    let (batch, _) = batch(); // B = 5, active 4 + 0 + 3 + 0 + 1 = 8
    let of = |json: &str| weights(json, &batch).unwrap().policy;
    let expect = |weights: Vec<f64>, per_sequence: [f64; 5]| {
        for (sequence, weight) in per_sequence.into_iter().enumerate() {
            for row in batch.range(sequence) {
                let expected = if batch.is_active(row) { weight } else { 0.0 };
                assert_relative_eq!(weights[row], expected, max_relative = 1e-15);
            }
        }
    };
    expect(of(r#"{"loss_type": "grpo"}"#), [1.0 / 20.0, 0.0, 1.0 / 15.0, 0.0, 1.0 / 5.0]);
    expect(of(r#"{"loss_type": "bnpo"}"#), [1.0 / 8.0; 5]);
    expect(of(r#"{"loss_type": "dr_grpo", "max_completion_length": 16}"#), [1.0 / 80.0; 5]);
    expect(of(r#"{"loss_type": "dapo"}"#), [1.0 / 8.0; 5]);
    expect(of(r#"{"loss_type": "dapo", "num_items_in_batch": 32}"#), [1.0 / 32.0; 5]);
    expect(of(r#"{"loss_type": "cispo", "epsilon_high": 5, "num_items_in_batch": 0}"#), [1.0; 5]);
}

#[test]
fn weights_of_groups_match_skyrl_and_tunix() {
    let (batch, _) = batch(); // active: 4, 0, 3, 0, 1
    let batch = batch.select_independent(0..4).unwrap(); // 4, 0, 3, 0
    let of = |json: &str| {
        let BatchLoss { mut loss, step } = BatchLoss::from_json(json).unwrap();
        loss.beta = 1.0;
        let weights = token_weights(&loss, &batch.clone().with_step(step).unwrap()).unwrap();
        assert_eq!(weights.policy, weights.kl);
        [0, 2].map(|sequence| weights.policy[batch.range(sequence).find(|row| batch.is_active(*row)).unwrap()])
    };
    let prompts = r#""loss_agg_mode": "prompt_mean", "num_generations": 2"#;
    assert_eq!(of(&format!("{{{prompts}}}")), [1.0 / 8.0, 1.0 / 6.0]);
    assert_eq!(of(r#"{"loss_agg_mode": "prompt-mean", "num_generations": 4}"#), [1.0 / 7.0; 2]);
    assert_eq!(
        of(&format!(r#"{{"semantics": "verl", {prompts}, "dp_size": 2, "global_batch_size": 8}}"#)),
        [2.0 / 16.0, 2.0 / 12.0]
    );
    // Prompts without active tokens count, like sequences without active tokens.
    let halves = batch.clone().with_mask(&mask_of(&batch, 2..4)).unwrap();
    let first = |json: &str| weights(json, &halves).unwrap().policy[0];
    assert_eq!(first(&format!("{{{prompts}}}")), 1.0 / 8.0);
    assert_eq!(first(&format!(r#"{{{prompts}, "count_masked_rows": false}}"#)), 1.0 / 4.0);

    assert_eq!(of(r#"{"loss_agg_mode": "token_mean_legacy", "micro_batch_size": 2}"#), [1.0 / 8.0, 1.0 / 6.0]);
    assert_eq!(of(r#"{"loss_agg_mode": "token-mean-legacy", "micro_batch_size": 1}"#), [1.0 / 16.0, 1.0 / 12.0]);
    assert_eq!(of(r#"{"loss_agg_mode": "sequence_mean"}"#), [1.0 / 16.0, 1.0 / 12.0]);
    assert_eq!(of(r#"{"loss_agg_mode": "sequence-mean-token-sum-norm"}"#), [1.0 / 4.0; 2]);
    assert_eq!(of(r#"{"loss_agg_mode": "sequence-mean-token-sum-norm", "loss_scale_factor": 9}"#), [1.0 / 9.0; 2]);
    let scaled =
        r#"{"loss_agg_mode": "sequence-mean-token-scale", "loss_scale_factor": 5, "count_masked_rows": false}"#;
    assert_eq!(of(scaled), [1.0 / 10.0; 2]);

    let refused = |json: &str| weights(json, &batch).unwrap_err().to_string();
    let text = refused(r#"{"loss_agg_mode": "prompt_mean", "num_generations": 3}"#);
    assert!(text.contains("num_generations is 3, which does not divide the 4 sequences"), "{text}");
    let text = refused(r#"{"positive_example_nll_weight": 1, "positive_rows": [4]}"#);
    assert!(text.contains("positive_rows names sequence 4, but the batch has 4"), "{text}");
}

/// Returns the batch's mask without the sequences `without`.
fn mask_of(batch: &TokenBatch, without: std::ops::Range<usize>) -> Vec<f32> {
    let mut mask = batch.mask();
    without.for_each(|sequence| mask[batch.range(sequence)].fill(0.0));
    mask
}

/// Two tokens with A = -1 and ratios 4 and 1/2, one token with A = 1 and ratio 2.
#[test]
fn metrics_report_importance_ratios() {
    let config = config(r#"{"loss_type": "bnpo", "clip_ratio_c": 3, "positive_example_nll_weight": 0.5, "beta": 0.1}"#);
    let batch = TokenBatch::packed(vec![0; 3], vec![0, 2, 3]).unwrap().with_step(positive(vec![1])).unwrap();
    let batch = batch.with_advantages(Advantages::PerSequence(vec![-1.0, 1.0])).unwrap();
    let batch = batch.with_old_logp(vec![-4.0; 3]).unwrap().with_ref_logp(vec![-4.0; 3]).unwrap();
    let logp = [4_f64, 0.5, 2.0].map(|ratio| ratio.ln() - 4.0);
    let evaluator = Evaluator::new(&config, &batch).unwrap();
    let (mut totals, mut slopes, mut unused) = (evaluator.totals(), [0.0; 3], [0.0; 3]);
    evaluator.evaluate(0..3, &logp, &[0.0; 3], &mut slopes, &mut unused, &mut totals);
    let sums = evaluator.finish(totals);
    let metrics = evaluator.metrics(&sums);
    let value = |name: &str| metrics.value(name).unwrap();
    assert_relative_eq!(value("is_ratio/mean"), (4.0 + 0.5 + 2.0) / 3.0, max_relative = 1e-12);
    assert_relative_eq!(value("is_ratio/min"), 0.5, max_relative = 1e-12);
    assert_relative_eq!(value("is_ratio/max"), 4.0, max_relative = 1e-12);
    assert_relative_eq!(value("ppo_kl"), -(4_f64.ln()) / 3.0, max_relative = 1e-12);
    assert_relative_eq!(value("pg_clipfrac_lower"), 1.0 / 3.0);
    assert_relative_eq!(value("positive_nll_loss"), 4.0 - 2_f64.ln(), max_relative = 1e-12);
    // -max(...) of each token: 3 (dual clip), 0.8 (clip), -1.2 (clip).
    assert_relative_eq!(sums.policy, (3.0 + 0.8 - 1.2) / 3.0, max_relative = 1e-12);
    assert!(sums.loss > sums.policy + 0.5 * value("positive_nll_loss"));
}

#[rstest]
fn micro_batches_of_one_step_add_up(
    #[values("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo", "prompt-mean")] loss_type: &str,
    #[values(1, 2, 3, 4)] cut: usize,
) {
    let loss = match loss_type {
        "prompt-mean" => r#""loss_agg_mode": "prompt-mean", "num_generations": 5"#.to_owned(),
        _ => format!(r#""loss_type": "{loss_type}""#),
    };
    let config = config(&format!(
        r#"{{{loss}, "epsilon_high": 0.3, "beta": 0.1, "entropy_coef": 0.01, "max_completion_length": 9,
            "positive_example_nll_weight": 0.2}}"#
    ));
    let (batch, logp) = batch();
    let batch = batch.with_step(positive(vec![0, 4])).unwrap();
    let entropy = vec![0.5; logp.len()];
    let whole = run(&config, &batch, &logp, &entropy, &[]);
    let batch = batch.clone().with_weights(token_weights(&config, &batch).unwrap()).unwrap();
    let split = batch.select_sequences(0..cut).unwrap().active_tokens();
    let a = run(&config, &batch.select_sequences(0..cut).unwrap(), &logp[..split], &entropy[..split], &[]);
    let b = run(&config, &batch.select_sequences(cut..5).unwrap(), &logp[split..], &entropy[split..], &[]);
    assert_relative_eq!(a.loss + b.loss, whole.loss, max_relative = 1e-14);
    assert_eq!([a.dlogp, b.dlogp].concat(), whole.dlogp);
    let mut metrics = a.metrics;
    metrics.merge(&b.metrics);
    for (name, value) in whole.metrics.values() {
        assert_relative_eq!(metrics.value(name).unwrap(), value, max_relative = 1e-14);
    }
}

#[test]
fn outputs_of_micro_batches_merge_in_order() {
    let part = |loss: f64, logp: &[f32]| {
        let mut metrics = Metrics::default();
        metrics.mean("entropy", loss, 1.0);
        let scores = Scores { logp: logp.to_vec(), entropy: logp.iter().map(|l| -l).collect() };
        let mut output = LossOutput::new(loss, 2.0 * loss, scores, metrics);
        output.value_loss = 3.0 * loss;
        output
    };
    let mut sum = LossOutput::default();
    sum.merge(part(1.0, &[-1.0, -2.0]));
    sum.merge(part(0.5, &[-3.0]));
    assert_eq!((sum.loss, sum.policy_loss, sum.value_loss), (1.5, 3.0, 4.5));
    assert_eq!(sum.scores, Scores { logp: vec![-1.0, -2.0, -3.0], entropy: vec![1.0, 2.0, 3.0] });
    assert_eq!(sum.metrics.value("entropy"), Some(0.75));
}

#[test]
fn token_level_loss_can_be_evaluated_in_any_spans() {
    let config = config(r#"{"beta": 0.04}"#);
    let (batch, logp) = batch();
    let entropy = vec![0.25; logp.len()];
    let whole = run(&config, &batch, &logp, &entropy, &[]);
    let cut = run(&config, &batch, &logp, &entropy, &[1, 1, 4, 7]);
    assert_eq!(cut.dlogp, whole.dlogp);
    assert_relative_eq!(cut.loss, whole.loss, max_relative = 1e-15);
}

#[test]
fn clip_metrics_count_clipped_tokens_and_sequences() {
    let (batch, logp) = batch();
    let entropy: Vec<f64> = (0..8).map(f64::from).collect();
    let token =
        run(&config(r#"{"epsilon_low": 0.2, "epsilon_high": 0.3, "beta": 0.1}"#), &batch, &logp, &entropy, &[]).metrics;
    // A > 0 and ratio > 1.3: rows 1, 9. A < 0 and ratio < 0.8: row 4 (exp(-0.3)). Sequences of 4, 3 and 1 tokens.
    assert_eq!(token.value("clip_ratio/high_mean"), Some(2.0 / 8.0));
    assert_eq!(token.value("clip_ratio/low_mean"), Some(1.0 / 8.0));
    assert_eq!(token.value("clip_ratio/region_mean"), Some(3.0 / 8.0));
    assert_eq!(token.value("clip_ratio/high_max"), Some(1.0));
    assert_eq!(token.value("clip_ratio/low_min"), Some(0.0));
    assert_eq!(token.value("entropy"), Some(28.0 / 8.0));
    assert!(token.value("kl").unwrap() > 0.0);
    // A shared ratio counts once per sequence, including fully masked sequences: only the single token's exp(0.6) is clipped.
    let shared =
        run(&config(r#"{"loss_type": "gspo", "epsilon_low": 0.2, "epsilon_high": 0.3}"#), &batch, &logp, &entropy, &[]);
    assert_relative_eq!(shared.metrics.value("clip_ratio/high_mean").unwrap(), 1.0 / 5.0, max_relative = 1e-12);
    assert_eq!(shared.metrics.value("kl"), None);
    // The minimum covers the same sequences as the mean: a fully masked sequence is not clipped.
    let all_low = TokenBatch::packed(vec![0; 3], vec![0, 2, 3])
        .unwrap()
        .with_mask(&[1.0, 1.0, 0.0])
        .unwrap()
        .with_advantages(Advantages::PerSequence(vec![-1.0; 2]))
        .unwrap()
        .with_old_logp(vec![0.0; 3])
        .unwrap();
    let of = |json: &str| run(&config(json), &all_low, &[-1.0f64, -2.0], &[0.0; 2], &[]).metrics;
    assert_eq!(of(r#"{"loss_type": "gspo"}"#).value("clip_ratio/low_min"), Some(0.0));
    assert_eq!(of("{}").value("clip_ratio/low_min"), Some(1.0));
}

#[test]
fn batch_without_active_tokens_has_zero_loss_and_no_nan() {
    for loss_type in ["grpo", "bnpo", "dapo", "gspo"] {
        let batch = TokenBatch::padded(&[-100; 6], &[0.0; 6], [2, 3]).unwrap();
        let config = config(&format!(r#"{{"loss_type": "{loss_type}", "entropy_coef": 0.1}}"#));
        let got = run::<f32>(&config, &batch, &[], &[], &[]);
        assert_eq!((got.loss, got.dlogp.len()), (0.0, 0));
        assert!(got.metrics.values().all(|(_, v)| v.is_finite()));
    }
}

#[test]
fn delta_keeps_the_loss_of_huge_log_ratios_finite() {
    let config = config(r#"{"delta": 4.0}"#);
    for (log_ratio, advantage) in [(95.0f32, -1.0f32), (120.0, -1.0), (120.0, 1.0), (-120.0, -1.0), (-120.0, 1.0)] {
        let batch = TokenBatch::packed(vec![0], vec![0, 1])
            .unwrap()
            .with_advantages(Advantages::PerSequence(vec![advantage]))
            .unwrap()
            .with_old_logp(vec![-1.0 - log_ratio.max(0.0)])
            .unwrap();
        let got = run(&config, &batch, &[-1.0f32 + log_ratio.min(0.0)], &[0.0], &[]);
        assert!(
            got.loss.is_finite() && got.dlogp[0].is_finite(),
            "log ratio {log_ratio}: {} {:?}",
            got.loss,
            got.dlogp
        );
    }
}

/// Log-probabilities whose differences overflow exp, which would make gradients NaN.
#[rstest]
fn any_finite_log_probability_gives_a_finite_loss(
    #[values("grpo", "cispo", "gspo")] loss_type: &str,
    #[values("k1", "k2", "k3")] kl: &str,
    #[values(true, false)] corrected: bool,
    #[values(-1e30, -1e4, -100.0, 0.0)] old: f32,
    #[values(-1e4, -100.0, 0.0)] reference: f32,
    #[values(-1.0, -100.0, -1e4)] policy: f64,
) {
    let config = config(&format!(
        r#"{{"loss_type": "{loss_type}", "epsilon_high": 1.3, "beta": 0.1, "kl_estimator": "{kl}", "use_bias_correction_kl": {corrected}}}"#
    ));
    for advantage in [-1.0, 0.0, 1.0] {
        let batch = TokenBatch::packed(vec![0; 2], vec![0, 2])
            .unwrap()
            .with_advantages(Advantages::PerSequence(vec![advantage]))
            .unwrap()
            .with_old_logp(vec![old; 2])
            .unwrap()
            .with_ref_logp(vec![reference; 2])
            .unwrap();
        let got = run(&config, &batch, &[policy, policy - 1.0], &[0.0; 2], &[]);
        assert!(got.loss.is_finite(), "loss {}", got.loss);
        // Gradients are used in f32 arithmetic.
        assert!(got.dlogp.iter().all(|d| (*d as f32).is_finite()), "{:?}", got.dlogp);
    }
}

/// Beyond the bound of the exponent a term keeps the slope that it has at the bound.
#[test]
fn saturated_exponent_keeps_its_slope() {
    let dlogp = |policy: f64, old: f32, reference: f32, beta: f64| {
        let config = config(&format!(r#"{{"beta": {beta}, "use_bias_correction_kl": false}}"#));
        let batch = TokenBatch::packed(vec![0], vec![0, 1])
            .unwrap()
            .with_advantages(Advantages::PerSequence(vec![-1.0]))
            .unwrap()
            .with_old_logp(vec![old])
            .unwrap()
            .with_ref_logp(vec![reference])
            .unwrap();
        run(&config, &batch, &[policy], &[0.0], &[]).dlogp[0]
    };
    let bound = 80f64.exp();
    assert_relative_eq!(dlogp(-1.0, -80.0, 0.0, 0.0), 79f64.exp(), max_relative = 1e-12);
    assert_relative_eq!(dlogp(-1.0, -91.0, 0.0, 0.0), bound, max_relative = 1e-12);
    assert_relative_eq!(dlogp(-1.0, -9e3, 0.0, 0.0), bound, max_relative = 1e-12);
    assert_relative_eq!(dlogp(-80.0, -80.0, -1.0, 1.0) - 1.0, 1.0 - 79f64.exp(), max_relative = 1e-12);
    assert_relative_eq!(dlogp(-9e3, -9e3, -1.0, 1.0) - 1.0, 1.0 - bound, max_relative = 1e-12);
}

#[test]
fn k3_is_exactly_zero_at_the_reference() {
    let config =
        LossConfig { beta: 1.0, kl_estimator: KlEstimator::K3, loss_type: LossType::Bnpo, ..LossConfig::default() };
    let batch = TokenBatch::packed(vec![0], vec![0, 1]).unwrap().with_ref_logp(vec![-1.25]).unwrap();
    let got = run(&config, &batch, &[-1.25f32], &[0.0], &[]);
    assert_eq!((got.loss, got.dlogp[0]), (0.0, 0.0));
}
