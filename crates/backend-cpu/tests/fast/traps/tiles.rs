//! Differences between the policies of scoring and loss, and tiles beyond the vocabulary's edge.

use super::*;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rstest::rstest;
use testkit::cpu::has_tiled_products;
use testkit::{EXACT, Shape, config, difference, normal};

/// Every ratio other than 1 is clipped.
const NO_ROOM: &str = r#""loss_type": "dapo", "epsilon_low": 0.0, "epsilon_high": 0.0"#;
/// -(9 x 1.5 - 0.5 + 14 x 2 - 8 x 1.25) / 32, where every term and every sum is exact.
const MINUS_MEAN_ADVANTAGE: f64 = -31.0 / 32.0;

fn on_policy_case(loss: &LossConfig) -> Case {
    let case = Case::new(loss, &Shape { lengths: &[9, 1, 14, 8], h: 300, mask_every: 0, ..Shape::default() }, 61);
    let advantages = Advantages::PerSequence(vec![1.5, -0.5, 2.0, -1.25]);
    Case { batch: case.batch.clone().with_advantages(advantages).unwrap(), ..case }
}

fn with_old(case: &Case, old: Vec<f32>) -> Case {
    Case { batch: case.batch.clone().with_old_logp(old).unwrap(), ..case.clone() }
}

fn clipped(metrics: &Metrics) -> f64 {
    metrics.value("clip_ratio/region_mean").unwrap()
}

/// Old log-probabilities come from one plan, the loss from another with other tiles and threads: every ratio is 1, and
/// the loss is exactly minus the mean advantage. Another summation order would break that.
#[test]
fn scores_and_loss_are_bit_identical() {
    let loss = config(&format!("{{{NO_ROOM}}}"));
    let case = on_policy_case(&loss);
    let logp = |row: usize, order: &dyn Fn(usize) -> usize| {
        let dot = |j: usize| -> f32 {
            let term = |k: usize| case.hidden[row * case.h + k] * case.lm_head[j * case.h + k];
            (0..case.h).map(|k| term(order(k))).sum::<f32>() + case.bias.as_ref().unwrap()[j]
        };
        naive_logp(&(0..case.v).map(dot).collect::<Vec<_>>(), case.batch.targets()[row] as usize)
    };
    let n = case.batch.tokens();
    let forwards: Vec<f32> = (0..n).map(|row| logp(row, &|k| k)).collect();
    let backwards: Vec<f32> = (0..n).map(|row| logp(row, &|k| case.h - 1 - k)).collect();
    let differ = forwards.iter().zip(&backwards).filter(|(a, b)| a != b).count();
    assert!(2 * differ > n, "naive: {differ} of {n} log-probabilities differ");

    let all = implementations();
    for (name, implementation, tiling) in &all {
        let score_with = |threads: usize| {
            let backend = CpuBackend::with_threads(threads).unwrap();
            let mut plan = plan(&backend, &case.request(&loss, *implementation, tiling.clone()));
            plan.score(case.policy(), &case.batch).unwrap().logp
        };
        let scored = with_old(&case, score_with(1));
        // Implementations with other products have other rounding.
        let both_tiled = |other| has_tiled_products(implementation) && has_tiled_products(other);
        let others = all.iter().filter(|(_, other, _)| other == implementation || both_tiled(other));
        for (other, implementation, tiling) in others {
            for threads in [1, 3] {
                let request = case.request(&loss, *implementation, tiling.clone());
                let backend = CpuBackend::with_threads(threads).unwrap();
                let out = run(&mut *plan(&backend, &request), &scored);
                let what = format!("scored by {name}, loss by {other} on {threads} threads");
                assert_eq!((out.loss, clipped(&out.metrics)), (MINUS_MEAN_ADVANTAGE, 0.0), "{what}");
            }
        }
        let backend = CpuBackend::with_threads(1).unwrap();
        let request = case.request(&loss, *implementation, tiling.clone());
        let out = run(&mut *plan(&backend, &request), &with_old(&case, backwards.clone()));
        assert!(
            out.loss != MINUS_MEAN_ADVANTAGE && clipped(&out.metrics) > 0.1,
            "{name}: a naive score goes unnoticed"
        );
    }
}

/// Scoring at the loss's temperature gives ratios of 1; scoring at temperature 1, as other systems do by default, does
/// not.
#[rstest]
fn scores_and_loss_use_the_same_temperature(#[values("scale_logits", "scale_logprobs")] mode: &str) {
    let with = |t: f64| config(&format!(r#"{{{NO_ROOM}, "temperature_mode": "{mode}", "temperature": {t}}}"#));
    let loss = with(0.7);
    let case = on_policy_case(&loss);
    let backend = CpuBackend::with_threads(2).unwrap();
    for (name, implementation, tiling) in implementations() {
        let of = |loss: &LossConfig| plan(&backend, &case.request(loss, implementation, tiling.clone()));
        let at = |t: f64| of(&with(t)).score(case.policy(), &case.batch).unwrap().logp;
        let out = run(&mut *of(&loss), &with_old(&case, at(0.7)));
        assert_eq!((out.loss, clipped(&out.metrics)), (MINUS_MEAN_ADVANTAGE, 0.0), "{name}");
        let out = run(&mut *of(&loss), &with_old(&case, at(1.0)));
        let off = (out.loss - MINUS_MEAN_ADVANTAGE).abs();
        assert!(off > 0.05 && clipped(&out.metrics) > 0.2, "{name}: naive is only {off} off");
    }
}

/// Naive: a last tile that is padded with zeros has additional logits of 0.
#[rstest]
fn padding_columns_do_not_count(#[values(1, 2, 3, 511, 512, 513, 1023, 1025)] v: usize) {
    let mut rng = ChaCha8Rng::seed_from_u64(67);
    let z: Vec<f32> = (0..3 * v).map(|_| (normal(&mut rng) - 12.0) as f32).collect();
    let (loss, batch) = (config(r#"{"loss_type": "bnpo"}"#), sequence(&[0, (v - 1) as i64, (v / 2) as i64], 1.0));
    let expected = oracle(&loss, &z, v, &batch);

    let mut padded = z[..v].to_vec();
    padded.resize(v.next_multiple_of(512), 0.0);
    let off = (f64::from(naive_logp(&padded, 0)) - expected.logp[0]).abs();
    assert!(if v == 512 { off < 1e-5 } else { off > 0.1 }, "naive: logp is {off} off");

    for found in everywhere(&loss, &z, v, &batch) {
        for (got, expected) in found.scores.logp.iter().zip(&expected.logp) {
            assert!((f64::from(*got) - expected).abs() <= 3e-6 * expected.abs().max(1.0), "{}: {got}", found.how);
        }
        let off = difference(&found.dz, &expected.grad_logits);
        assert!(off <= EXACT, "{}: gradients are {off:e} off", found.how);
    }
}
