//! Options that no other system has, or none that can be installed: compared with finite differences of the oracle's loss and with closed
//! forms derived by hand, with every implementation.

use grpo_backend_cpu::CpuBackend;
use grpo_check::gradcheck;
use grpo_check::parity::{Check, oracle};
use grpo_core::backend_api::evaluate::Evaluator;
use grpo_core::{BatchFile, Dtype, LossConfig, TokenBatch};
use grpo_tests::assert_parity;
use grpo_tests::variants::{LOSSES, file};
use rstest::rstest;

#[rstest]
fn every_variant_matches_the_oracle_and_finite_differences(#[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype) {
    for (name, loss) in LOSSES {
        let file = file(loss);
        for row in gradcheck::file(&file, 60).unwrap() {
            assert!(row.passed, "{name}: {row:#?}");
        }
        let check = Check { dtype: Some(dtype), ..Check::default() };
        assert_parity(&CpuBackend::new(), name, &file, &check);
    }
}

/// Returns the active rows of each sequence.
fn sequences(batch: &TokenBatch) -> Vec<Vec<usize>> {
    let active = |sequence| batch.range(sequence).filter(|row| batch.is_active(*row)).collect();
    (0..batch.sequences()).map(active).collect()
}

/// Returns exp(mean of old - sampler) of each sequence; unknown sampler log-probabilities count as 0.
fn geometric_ratios(batch: &TokenBatch) -> Vec<f64> {
    let (old, sampler) = (batch.old_logp().unwrap(), batch.sampler_logp().unwrap());
    let difference = |row: &usize| f64::from(old[*row]) - f64::from(sampler[*row]);
    let mean =
        |rows: &Vec<usize>| rows.iter().map(difference).filter(|d| !d.is_nan()).sum::<f64>() / rows.len().max(1) as f64;
    sequences(batch).iter().map(|rows| mean(rows).exp()).collect()
}

/// The expected loss is -A l w, where w is the geometric ratio within the bounds, and 0 or the bound outside.
#[rstest]
fn geometric_sampler_weights_match_their_formula(#[values("geometric_truncate", "geometric_mask")] mode: &str) {
    let ratios = geometric_ratios(&file("{}").batch);
    let mut sorted = ratios.clone();
    sorted.sort_by(f64::total_cmp);
    let bound = (sorted[sorted.len() / 2] + sorted[sorted.len() / 2 - 1]) / 2.0;
    let file = file(&format!(
        r#"{{"loss_type": "reinforce", "vllm_importance_sampling_mode": "{mode}",
             "vllm_importance_sampling_clip_max": {bound}}}"#
    ));
    let (batch, found) = (&file.batch, oracle(&file.loss, &file, &file.policy).unwrap().values);
    let mut loss = 0.0;
    for ((sequence, rows), ratio) in sequences(batch).iter().enumerate().zip(ratios) {
        let weight = if mode == "geometric_mask" && ratio > bound { 0.0 } else { ratio.min(bound) };
        for row in rows {
            let advantage = f64::from(batch.advantage(sequence, *row));
            loss -= weight * advantage * found.logp.as_ref().unwrap()[*row] / batch.active_tokens() as f64;
        }
    }
    let found = found.loss.unwrap();
    assert!((found - loss).abs() < 1e-12, "{found} and {loss}");
}

/// Tokens that are masked or not selected still count in the denominators and keep their KL term.
#[rstest]
#[case::sampler(r#""vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1e-9"#)]
#[case::off_policy(r#""off_policy_mask_threshold": -100.0, "vllm_importance_sampling_correction": false"#)]
fn dropped_tokens_keep_their_kl_and_count_in_denominators(#[case] keys: &str) {
    let file = file(&format!(r#"{{"loss_type": "bnpo", "beta": 0.1, "use_bias_correction_kl": false, {keys}}}"#));
    let (batch, found) = (&file.batch, oracle(&file.loss, &file, &file.policy).unwrap().values);
    let (logp, n) = (found.logp.unwrap(), batch.active_tokens() as f64);
    let mut loss = 0.0;
    for (sequence, rows) in sequences(batch).iter().enumerate() {
        for row in rows {
            let d = f64::from(batch.ref_logp().unwrap()[*row]) - logp[*row];
            loss += 0.1 * (d.exp() - d - 1.0) / n;
            let (advantage, old) =
                (f64::from(batch.advantage(sequence, *row)), f64::from(batch.old_logp().unwrap()[*row]));
            let ratio = (logp[*row] - old).exp();
            // Without a sampler log-probability the ratio is 1, which also exceeds the bound; positive advantages are kept.
            if keys.contains("off_policy") && advantage >= 0.0 {
                loss -= (ratio * advantage).min(ratio.clamp(0.8, 1.2) * advantage) / n;
            }
        }
    }
    let found = found.loss.unwrap();
    assert!((found - loss).abs() < 1e-12, "{found} and {loss}");
}

/// The expected loss is -keep adv_tau A r + kl_tau (l - o)^2 over the step's tokens; some tokens are outside the region.
#[rstest]
fn prime_rl_losses_match_their_formula(#[values("prime_rl", "ipo")] loss_type: &str) {
    let file = file(&format!(
        r#"{{"loss_type": "{loss_type}", "kl_tau": 0.05, "adv_tau": 0.8, "epsilon_low": 0.05, "epsilon_high": 0.04,
             "vllm_importance_sampling_correction": false}}"#
    ));
    let (batch, found) = (&file.batch, oracle(&file.loss, &file, &file.policy).unwrap().values);
    let (mut loss, mut outside) = (0.0, 0);
    for (sequence, rows) in sequences(batch).iter().enumerate() {
        for row in rows {
            let (logp, old) = (found.logp.as_ref().unwrap()[*row], f64::from(batch.old_logp().unwrap()[*row]));
            let (advantage, change) = (f64::from(batch.advantage(sequence, *row)), logp.exp() - old.exp());
            let drops = match loss_type {
                "ipo" => !(-0.05..=0.04).contains(&change),
                _ if advantage > 0.0 => change > 0.04,
                _ => change < -0.05,
            };
            outside += usize::from(drops);
            let gain = if drops { 0.0 } else { 0.8 * advantage * (logp - old).exp() };
            loss += (0.05 * (logp - old).powi(2) - gain) / batch.active_tokens() as f64;
        }
    }
    assert!(outside > 0 && outside < batch.active_tokens(), "{outside} tokens are outside");
    let found = found.loss.unwrap();
    assert!((found - loss).abs() < 1e-12, "{found} and {loss}");
}

/// The expected loss is -w A l over the tokens of a sequence, then over all sequences: w is the ratio to the sampler, and 0 if the mean
/// divergence of the sequence exceeds the threshold.
#[test]
fn flash_reinforce_matches_its_formula() {
    let file = file(r#"{"loss_type": "flash_reinforce", "sequence_kl_threshold": 0.012}"#);
    let (batch, found) = (&file.batch, oracle(&file.loss, &file, &file.policy).unwrap());
    let logp = found.values.logp.as_ref().unwrap();
    let (mut loss, mut rejected, mut divergences) = (0.0, 0, Vec::new());
    for (sequence, rows) in sequences(batch).iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
        let sampled = |row: usize| {
            let sampler = batch.sampler_logp().map(|sampler| f64::from(sampler[row])).filter(|s| !s.is_nan());
            sampler.unwrap_or(f64::from(batch.old_logp().unwrap()[row]))
        };
        let divergence = |row: &usize| {
            let (p, q) = (sampled(*row).exp(), logp[*row].exp());
            p * (p / q).ln() + (1.0 - p) * ((1.0 - p) / (1.0 - q)).ln()
        };
        let mean = rows.iter().map(divergence).sum::<f64>() / rows.len() as f64;
        divergences.push(mean);
        if mean > 0.012 {
            rejected += 1;
            continue;
        }
        let term = |row: &usize| {
            let advantage = f64::from(batch.advantage(sequence, *row));
            -(logp[*row] - sampled(*row)).exp() * advantage * logp[*row]
        };
        loss += rows.iter().map(term).sum::<f64>() / rows.len() as f64 / batch.sequences() as f64;
    }
    assert!(rejected > 0 && rejected < divergences.len(), "{rejected} of {divergences:?} are rejected");
    let found = found.values.loss.unwrap();
    assert!((found - loss).abs() < 1e-12, "{found} and {loss}");
}

/// The expected loss is the mean of -min(r A, clip(r) A) + beta clamp(w k3(clamp(q - l))). The value of w and its
/// derivative dw/dl are 1. A clamp that binds removes the whole derivative.
#[test]
fn nemo_rl_score_function_kl_matches_its_formula() {
    let file = file(
        r#"{"loss_type": "bnpo", "beta": 0.1, "kl_importance": "score_function", "kl_input_clamp": 0.35, "kl_output_clamp": 0.05,
            "vllm_importance_sampling_correction": false}"#,
    );
    let (batch, found) = (&file.batch, oracle(&file.loss, &file, &file.policy).unwrap().values);
    let (logp, n) = (found.logp.unwrap(), batch.active_tokens() as f64);
    let (mut loss, mut clamped) = (0.0, [0, 0, 0]);
    let dlogp = dlogp(&file, &logp);
    for (sequence, rows) in sequences(batch).iter().enumerate() {
        for row in rows {
            let old = f64::from(batch.old_logp().unwrap()[*row]);
            let (d, advantage) =
                (f64::from(batch.ref_logp().unwrap()[*row]) - logp[*row], f64::from(batch.advantage(sequence, *row)));
            let k3 = d.clamp(-0.35, 0.35).exp() - d.clamp(-0.35, 0.35) - 1.0;
            let ratio = (logp[*row] - old).exp();
            loss += 0.1 * k3.min(0.05) / n - (ratio * advantage).min(ratio.clamp(0.8, 1.2) * advantage) / n;
            // d k3 / dl = 1 - e^d, and k3 dw / dl = k3: the sum is -d.
            let (slope, which) = match (d.abs() > 0.35, k3 > 0.05) {
                (true, _) => (0.0, 0),
                (_, true) => (0.0, 1),
                _ => (-d, 2),
            };
            clamped[which] += 1;
            let binds = (advantage > 0.0 && ratio > 1.2) || (advantage < 0.0 && ratio < 0.8);
            let expected = (0.1 * slope - if binds { 0.0 } else { ratio * advantage }) / n;
            assert!((dlogp[*row] - expected).abs() < 1e-12, "row {row}: {} and {expected}", dlogp[*row]);
        }
    }
    assert!(
        clamped.iter().all(|count| *count > 0),
        "{clamped:?} tokens beyond the inner clamp, the outer one, and within"
    );
    let found = found.loss.unwrap();
    assert!((found - loss).abs() < 1e-12, "{found} and {loss}");
}

/// Returns dL/dlogp of every row.
fn dlogp(file: &BatchFile, logp: &[f64]) -> Vec<f64> {
    let evaluator = Evaluator::new(&file.loss, &file.batch).unwrap();
    let rows = file.batch.active_rows();
    let active: Vec<f64> = rows.iter().map(|row| logp[*row]).collect();
    let (mut slopes, mut unused) = (vec![0.0; rows.len()], vec![0.0; rows.len()]);
    let mut totals = evaluator.totals();
    evaluator.evaluate(0..rows.len(), &active, &vec![0.0; rows.len()], &mut slopes, &mut unused, &mut totals);
    let mut all = vec![0.0; logp.len()];
    rows.iter().zip(slopes).for_each(|(row, slope)| all[*row] = slope);
    all
}

/// The expected term is w k3(q - l) with w = e^(l - s). The old log-probability replaces an unknown s. The
/// derivative is w (l - q).
#[test]
fn sampler_weighted_kl_matches_its_formula() {
    let file = file(r#"{"loss_type": "bnpo", "beta": 1, "kl_importance": "sampler"}"#);
    let zero = grpo_core::Advantages::PerSequence(vec![0.0; file.batch.sequences()]);
    let file = BatchFile { batch: file.batch.clone().with_advantages(zero).unwrap(), ..file };
    let batch = LossConfig { vllm_importance_sampling_correction: Some(false), ..file.loss.clone() };
    let file = BatchFile { loss: batch, ..file };
    let (batch, found) = (&file.batch, oracle(&file.loss, &file, &file.policy).unwrap().values);
    let (logp, n) = (found.logp.unwrap(), batch.active_tokens() as f64);
    let slopes = dlogp(&file, &logp);
    let (mut loss, mut silent) = (0.0, 0);
    for row in batch.active_rows() {
        let of = |list: Option<&[f32]>| f64::from(list.unwrap()[*row]);
        let (sampler, old, d) = (of(batch.sampler_logp()), of(batch.old_logp()), of(batch.ref_logp()) - logp[*row]);
        silent += usize::from(sampler.is_nan());
        let weight = (logp[*row] - if sampler.is_nan() { old } else { sampler }).exp();
        loss += weight * (d.exp() - d - 1.0) / n;
        let expected = -weight * d / n;
        assert!((slopes[*row] - expected).abs() < 1e-12, "row {row}: {} and {expected}", slopes[*row]);
    }
    assert!(silent > 0);
    let found = found.loss.unwrap();
    assert!((found - loss).abs() < 1e-12, "{found} and {loss}");
}

/// `positive_example_nll_weight` adds the mean of -l over the tokens of `positive_rows`. With `seq_mask_tis` each token has its own weight,
/// and the bounds apply to the geometric mean of its sequence.
#[test]
fn positive_nll_and_seq_mask_tis_match_their_formulas() {
    let plain = r#""loss_type": "bnpo", "vllm_importance_sampling_correction": false"#;
    let of = |keys: &str| {
        let file = file(&format!("{{{keys}}}"));
        let values = oracle(&file.loss, &file, &file.policy).unwrap().values;
        (file, values.loss.unwrap(), values.logp.unwrap())
    };
    let (file, without, logp) = of(plain);
    let (_, with, _) = of(&format!(r#"{plain}, "positive_example_nll_weight": 0.5, "positive_rows": [0, 2]"#));
    let rows: Vec<usize> = [0, 2].iter().flat_map(|sequence| sequences(&file.batch)[*sequence].clone()).collect();
    let nll = -rows.iter().map(|row| logp[*row]).sum::<f64>() / rows.len() as f64;
    assert!((with - without - 0.5 * nll).abs() < 1e-12, "{with}, {without}, {nll}");

    let ratios = geometric_ratios(&file.batch);
    let bound = 1.3;
    assert!(ratios.iter().any(|r| *r > bound) && ratios.iter().any(|r| *r <= bound), "{ratios:?}");
    let (file, found, logp) = of(&format!(
        r#""loss_type": "reinforce", "vllm_importance_sampling_mode": "seq_mask_tis",
           "vllm_importance_sampling_clip_min": 0.1, "vllm_importance_sampling_clip_max": {bound}"#
    ));
    let batch = &file.batch;
    let mut loss = 0.0;
    for ((sequence, rows), ratio) in sequences(batch).iter().enumerate().zip(ratios) {
        for row in rows.iter().filter(|_| ratio <= bound) {
            let d = f64::from(batch.old_logp().unwrap()[*row]) - f64::from(batch.sampler_logp().unwrap()[*row]);
            let weight = if d.is_nan() { 1.0 } else { d.exp() };
            loss -= weight * f64::from(batch.advantage(sequence, *row)) * logp[*row] / batch.active_tokens() as f64;
        }
    }
    assert!((found - loss).abs() < 1e-12, "{found} and {loss}");
}
