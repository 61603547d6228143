//! Compares every instruction set with f64, and with the others.

use super::exp::exp;
use super::*;
use crate::arch::dispatch::{FusedMulAdd, SeparateMulAdd};
use crate::arch::{IsaToken, MulAdd};
use grpo_core::LossConfig;
use half::bf16;

fn check_exp<M: MulAdd>() {
    let mut worst = (0.0, 0.0);
    // Every 61st float from -1e-30 down to the first results of 0.
    for bits in ((-1e-30_f32).to_bits()..=(-55.79_f32).to_bits()).step_by(61) {
        let x = f32::from_bits(bits);
        let exact = f64::from(x).exp();
        let unit = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
        let error = (f64::from(exp::<M>(x).1) - exact).abs() / unit;
        worst = if error > worst.0 { (error, x) } else { worst };
    }
    assert!(worst.0 <= 2.0, "{} units in the last place at {}", worst.0, worst.1);
    let values = [0.0, -0.0, -55.8, -1e30, f32::NEG_INFINITY].map(exp::<M>);
    assert_eq!(values.map(|(_, e)| e), [1.0, 1.0, 0.0, 0.0, 0.0]);
    assert!(values.iter().all(|(d, _)| d.is_finite()));
    assert!(exp::<M>(f32::NAN).1.is_nan());
}

#[test]
fn exp_is_within_two_units_in_the_last_place() {
    check_exp::<FusedMulAdd>();
    check_exp::<SeparateMulAdd>();
}

fn check_tanh<M: MulAdd>() {
    let mut worst = (0.0, 0.0);
    // Every 61st float from 1e-30 up to 20, where results are 1.
    for bits in (1e-30_f32.to_bits()..=20.0_f32.to_bits()).step_by(61) {
        let x = f32::from_bits(bits);
        let exact = f64::from(x).tanh();
        let below = f32::from_bits((exact as f32).to_bits() - 1);
        let error = (f64::from(tanh::tanh::<M>(x)) - exact).abs() / (f64::from(exact as f32) - f64::from(below));
        worst = if error > worst.0 { (error, x) } else { worst };
        assert_eq!(tanh::tanh::<M>(-x), -tanh::tanh::<M>(x));
        assert!(tanh::tanh::<M>(x) <= 1.0);
    }
    assert!(worst.0 <= 3.0, "{} units in the last place at {}", worst.0, worst.1);
    let values = [0.0, -0.0, 44.1, 3e38, f32::INFINITY, f32::NEG_INFINITY].map(tanh::tanh::<M>);
    assert_eq!(values, [0.0, 0.0, 1.0, 1.0, 1.0, -1.0]);
    assert!(values[1].is_sign_negative() && tanh::tanh::<M>(f32::NAN).is_nan());
}

#[test]
fn tanh_is_within_three_units_in_the_last_place() {
    check_tanh::<FusedMulAdd>();
    check_tanh::<SeparateMulAdd>();
}

fn transforms() -> Vec<Transform> {
    [(1.0, Some(30.0)), (0.0625, Some(30.0)), (2.0, Some(1.5)), (-0.4, Some(5.0)), (-0.4, None)]
        .into_iter()
        .filter_map(|(logit_scale, final_logit_softcapping)| {
            Transform::new(&LossConfig { logit_scale, final_logit_softcapping, ..LossConfig::default() })
        })
        .collect()
}

/// Returns w and dw/dz in f64.
fn transformed(z: f32, by: &Transform) -> (f64, f64) {
    let by = by.in_f64();
    let u = by.0 * f64::from(z);
    by.1.map_or((u, by.0), |cap| {
        let t = (u / cap).tanh();
        (cap * t, by.0 * (1.0 - t) * (1.0 + t))
    })
}

#[test]
fn logit_transforms_match_f64_on_every_isa() {
    assert_eq!(transforms().len(), 5);
    assert_eq!(Transform::new(&LossConfig { logit_scale: 0.3, ..LossConfig::default() }), None);
    for (length, by) in
        (1..=70).chain([511, 512]).flat_map(|length| transforms().into_iter().map(move |by| (length, by)))
    {
        for z in &rows(length)[..3] {
            let narrow: Vec<bf16> = z.iter().map(|z| bf16::from_f32(*z)).collect();
            let z: Vec<f32> = narrow.iter().map(|z| z.to_f32()).collect();
            let exact: Vec<_> = z.iter().map(|z| transformed(*z, &by)).collect();
            for isa in IsaToken::available() {
                let what = format!("{isa:?} {length} {by:?}");
                let (mut w, mut to, mut to_bf16) = (z.clone(), vec![f32::NAN; length], vec![f32::NAN; length]);
                by.apply(isa, &mut w);
                transform_to(isa, &z, &by, &mut to);
                transform_to(isa, &narrow, &by, &mut to_bf16);
                assert!(w == to && w == to_bf16, "{what}");
                for (w, (exact, _)) in w.iter().zip(&exact) {
                    // The rounding errors of the factor, its product, the result, and tanh.
                    assert!((f64::from(*w) - exact).abs() <= 6e-7 * exact.abs(), "{what}: {w} for {exact}");
                }
                // The gradient of the softmax times dw/dz.
                let (row_grad, y) = (RowGrad { max: 5.0, constant: -0.3, linear: 0.02, target: 0.8 }, length / 2);
                let (mut w_grad, mut z_grad, mut rounded) = (w.clone(), vec![f32::NAN; length], vec![f32::NAN; length]);
                gradient_to(isa, &w, Some(y), &row_grad, 0.7, &mut w_grad, false);
                by.gradient_to(isa, &w, Some(y), &row_grad, 0.7, &mut z_grad, false);
                by.gradient_to(isa, &w, Some(y), &row_grad, 0.7, &mut rounded, true);
                for i in (0..length).filter(|i| w_grad[*i].is_finite()) {
                    let (found, dw, scale) = (f64::from(z_grad[i]), f64::from(w_grad[i]), by.in_f64().0.abs());
                    // Near the cap, the error of w limits the accuracy.
                    let bound = 1e-6 * (dw * scale).abs();
                    assert!((found - dw * exact[i].1).abs() <= bound, "{what}: {found} for {dw} x {}", exact[i].1);
                    assert_eq!(rounded[i], bf16::from_f32(z_grad[i]).to_f32(), "{what}");
                }
            }
        }
    }
    let mut special = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    let by = transforms()[0];
    by.apply(IsaToken::available().next().unwrap(), &mut special);
    // -inf does not stay -inf: it is capped, too.
    assert!(special[0] == 30.0 && special[1] == -30.0 && special[2].is_nan(), "{special:?}");
}

/// Logits of every kind of row: spread out, far apart, huge, and half of them excluded.
fn rows(length: usize) -> Vec<Vec<f32>> {
    let spread = |scale: f32| (0..length).map(|i| ((i * 7919 % 1013) as f32 / 500.0 - 1.0) * scale).collect();
    let half = |i: usize| if i.is_multiple_of(2) { f32::NEG_INFINITY } else { i as f32 * 0.01 };
    vec![spread(3.0), spread(60.0), spread(1e38), (0..length).map(half).collect(), vec![f32::NEG_INFINITY; length]]
}

fn targets(length: usize) -> [Option<usize>; 4] {
    [None, Some(0), Some(length / 2), Some(length - 1)]
}

/// Returns `true` within 1e-6 of `scale`, or if both are NaN.
fn close(a: f32, b: f64, scale: f64) -> bool {
    a.is_nan() && b.is_nan() || (f64::from(a) - b).abs() <= 1e-6 * scale
}

#[test]
fn partial_sums_match_f64_on_every_isa() {
    for length in (1..=70).chain([511, 512]) {
        for (z, y) in rows(length).iter().flat_map(|z| targets(length).map(|y| (z, y))) {
            let others = || z.iter().enumerate().filter(|(i, _)| Some(*i) != y).map(|(_, z)| *z);
            let max = others().fold(f32::NEG_INFINITY, f32::max);
            let from = if max.is_finite() { f64::from(max) } else { 0.0 };
            // Clamped like in exp; below, e d is 0 in f32.
            let terms = || others().map(|z| (0.7 * (f64::from(z) - from)).max(-100.0)).map(|d| (d.exp(), d));
            let (sum, dot) = terms().fold((0.0, 0.0), |(sum, dot), (e, d)| (sum + e, dot + e * d));
            for isa in IsaToken::available() {
                let got = Partial::new(isa, z, y, 0.7);
                assert_eq!((got.max, got.target), (max, y.map_or(0.0, |y| z[y])));
                assert!(close(got.sum, sum, 1.0 + sum), "{isa:?} {length} {y:?}: {got:?}, not {sum}");
                assert!(close(got.dot, dot, 1.0 - dot), "{isa:?} {length} {y:?}: {got:?}, not {dot}");
                let narrow: Vec<bf16> = z.iter().map(|z| bf16::from_f32(*z)).collect();
                let wide: Vec<f32> = narrow.iter().map(|z| z.to_f32()).collect();
                let (narrow, wide) = (Partial::new(isa, &narrow, y, 0.7), Partial::new(isa, &wide, y, 0.7));
                assert_eq!(narrow, wide, "{isa:?} {length} {y:?}");
                let mut z = z.clone();
                z[length / 3] = f32::NAN;
                let hidden = y == Some(length / 3);
                assert_eq!(Partial::new(isa, &z, y, 0.7).sum.is_nan(), !hidden, "{isa:?} {length} {y:?}");
            }
        }
    }
}

#[test]
fn gradients_match_f64_on_every_isa() {
    for length in (1..=70).chain([511, 512]) {
        for (z, y) in rows(length).iter().flat_map(|z| targets(length).map(|y| (z, y))) {
            let narrow: Vec<bf16> = z.iter().map(|z| bf16::from_f32(*z)).collect();
            let z: Vec<f32> = narrow.iter().map(|z| z.to_f32()).collect();
            let max = z.iter().copied().fold(-3e38, f32::max);
            for (isa, linear) in IsaToken::available().flat_map(|isa| [(isa, 0.0), (isa, 0.02)]) {
                let row_grad = RowGrad { max, constant: -0.3, linear, target: 0.8 };
                let exact = |i: usize| {
                    let d = (0.7 * (f64::from(z[i]) - f64::from(max))).max(-100.0);
                    let others = d.exp() * (f64::from(row_grad.constant) + f64::from(row_grad.linear) * d);
                    if Some(i) == y { f64::from(row_grad.target) } else { others }
                };
                let what = format!("{isa:?} {length} {y:?} {linear}");
                let all_close = |got: &[f32]| got.iter().enumerate().all(|(i, got)| close(*got, exact(i), 1.0));
                let to_bf16 = |g: &[f32]| g.iter().map(|g| bf16::from_f32(*g)).collect::<Vec<_>>();

                let (mut plain, mut rounded) = (vec![f32::NAN; length], vec![f32::NAN; length]);
                gradient_to(isa, &z, y, &row_grad, 0.7, &mut plain, false);
                gradient_to(isa, &z, y, &row_grad, 0.7, &mut rounded, true);
                assert!(all_close(&plain), "{what}: {plain:?}");
                assert_eq!(rounded, to_bf16(&plain).iter().map(|g| g.to_f32()).collect::<Vec<_>>(), "{what}");

                let (mut kept, mut kept_bf16) = (vec![f32::NAN; length], vec![f32::NAN; length]);
                let partial = Partial::keeping(isa, &z, y, 0.7, &mut kept);
                assert_eq!(partial, Partial::new(isa, &z, y, 0.7), "{what}");
                assert_eq!(partial, Partial::keeping(isa, &narrow, y, 0.7, &mut kept_bf16), "{what}");
                assert_eq!(kept, kept_bf16, "{what}");
                let tile_grad = row_grad.for_tile(&partial, 0.7);
                let (mut over, mut over_bf16) = (z.clone(), narrow.clone());
                gradient(isa, &mut over, &kept, y, &tile_grad, 0.7);
                gradient(isa, &mut over_bf16, &kept, y, &tile_grad, 0.7);
                assert!(all_close(&over), "{what}: {over:?}");
                assert_eq!(over_bf16, to_bf16(&over), "{what}");
                let (mut sum, mut sum_bf16) = (vec![2.0; length], vec![2.0; length]);
                add_gradient(isa, &z, &kept, y, &tile_grad, 0.7, &mut sum);
                add_gradient(isa, &narrow, &kept, y, &tile_grad, 0.7, &mut sum_bf16);
                assert_eq!(sum, over.iter().map(|g| 2.0 + g).collect::<Vec<_>>(), "{what}");
                assert_eq!(sum_bf16, sum, "{what}");

                let mut nan = z.clone();
                nan[length / 3] = f32::NAN;
                let partial = Partial::keeping(isa, &nan, y, 0.7, &mut kept);
                gradient_to(isa, &nan, y, &row_grad, 0.7, &mut plain, false);
                gradient(isa, &mut nan, &kept, y, &row_grad.for_tile(&partial, 0.7), 0.7);
                for got in [plain, nan] {
                    let expected = usize::from(y != Some(length / 3));
                    assert_eq!(got.iter().filter(|g| g.is_nan()).count(), expected, "{what}");
                }
            }
        }
    }
}

fn row(isa: IsaToken, z: &[f32], y: usize, scale: f32, tile: usize) -> Row {
    let mut sums = RowSums::EMPTY;
    for (i, part) in z.chunks(tile).enumerate() {
        let target = y.checked_sub(i * tile).filter(|y| *y < part.len());
        sums.merge(&Partial::new(isa, part, target, scale), target.is_some(), scale);
    }
    sums.finish(scale)
}

#[test]
fn gradients_of_confident_rows_are_not_subnormal() {
    // Logits down to 300 below the maximum, and coefficients of a batch of a million tokens.
    let z: Vec<f32> = (0..1200).map(|i| -0.25 * i as f32).collect();
    for (isa, linear) in IsaToken::available().flat_map(|isa| [(isa, 0.0), (isa, 1e-7)]) {
        let row_grad = RowGrad { max: 0.0, constant: -1e-6, linear, target: 1e-6 };
        let mut found = vec![f32::NAN; z.len()];
        gradient_to(isa, &z, Some(0), &row_grad, 1.0, &mut found, false);
        // They must be normal numbers even after a product with 1e-6.
        let fine = |g: &f32| *g == 0.0 || (g * 1e-6).abs() >= f32::MIN_POSITIVE;
        assert!(found.iter().all(fine) && found[..200].iter().all(|g| *g != 0.0), "{isa:?} {linear}");
    }
}

#[test]
fn extreme_rows_stay_finite_and_keep_their_gradient() {
    IsaToken::available().for_each(check_extreme_rows);
}

fn check_extreme_rows(isa: IsaToken) {
    // 30 nats above the rest, where `1 - p` is 0 in f32.
    let collapsed = row(isa, &[30.0, 0.0, 0.0], 0, 1.0, 2);
    let rest = 2.0 * (-30.0_f64).exp();
    assert!((collapsed.logp / -rest - 1.0).abs() < 1e-6, "{collapsed:?}");
    assert!((collapsed.others / rest - 1.0).abs() < 1e-6, "{collapsed:?}");
    for z in [
        [1e4, -1e4, 0.0],
        [3e38, -3e38, 3e38],
        [f32::NEG_INFINITY, 2.0, 1.0],
        [f32::MIN; 3],
        [f32::NEG_INFINITY, -200.0, -201.0],
    ] {
        for tile in [1, 2, 3] {
            let mut z = z;
            let row = row(isa, &z, 2, 1.0, tile);
            assert!(row.logp.is_finite() && row.entropy.is_finite() && row.entropy >= 0.0, "{z:?}: {row:?}");
            let scales = Scales { logit: 1.0, logp: 1.0 };
            let row_grad = row.row_grad(&scales, 1.0, 1.0);
            for (i, z) in z.chunks_mut(tile).enumerate() {
                let (mut kept, target) =
                    (vec![f32::NAN; z.len()], 2_usize.checked_sub(i * tile).filter(|y| *y < z.len()));
                let partial = Partial::keeping(isa, z, target, 1.0, &mut kept);
                gradient(isa, z, &kept, target, &row_grad.for_tile(&partial, 1.0), 1.0);
            }
            assert!(z.iter().all(|z| z.is_finite()), "{z:?}");
            assert!(z.iter().sum::<f32>().abs() < 1e-6, "{z:?}");
        }
    }
    let alone = row(isa, &[7.0], 0, 1.0, 1);
    assert_eq!((alone.logp, alone.entropy, alone.others), (0.0, 0.0, 0.0));
    let nan = row(isa, &[f32::NAN, 1.0, 2.0], 2, 1.0, 1);
    assert!(nan.logp.is_nan(), "a NaN must not be hidden: {nan:?}");
}
