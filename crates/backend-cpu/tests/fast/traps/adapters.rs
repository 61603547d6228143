//! A head with a low-rank adapter, on slices: the input is W + s B A, and dA and dB follow from dL/dhead.

use super::*;
use testkit::{EXACT, Shape, Tensor, config, difference};

const RANK: usize = 2;
const SCALE: f64 = 0.5;

/// Returns W + s B A `[V, H]` from W `[V, H]`, B `[V, R]` and A `[R, H]`.
fn merged(w: &[f32], b: &[f64], a: &[f64], h: usize) -> Vec<f64> {
    let entry = |at: usize| {
        let (j, k) = (at / h, at % h);
        f64::from(w[at]) + SCALE * (0..RANK).map(|r| b[j * RANK + r] * a[r * h + k]).sum::<f64>()
    };
    (0..w.len()).map(entry).collect()
}

/// Compares with central differences of the f64 oracle with respect to A and B. A fused loss that ignores adapters
/// reads the frozen head only: it gives another loss, without a derivative with respect to A and B.
#[test]
fn gradients_of_an_adapter_follow_from_those_of_the_head() {
    // No clip, because finite differences across its kinks are wrong.
    let loss = config(r#"{"loss_type": "gpg", "beta": 0.1}"#);
    let shape = Shape { lengths: &[9, 1, 6], h: 6, v: 20, bias: false, ..Shape::default() };
    let case = Case::new(&loss, &shape, 83);
    let (h, v) = (case.h, case.v);
    let values = |count: usize, step: usize| (0..count).map(|i| (i * step % 13) as f64 / 13.0 - 0.45).collect();
    let (b, a): (Vec<f64>, Vec<f64>) = (values(v * RANK, 5), values(RANK * h, 4));

    let hidden = case.hidden.in_f64();
    let exact = |b: &[f64], a: &[f64]| {
        let (lm_head, layout) = (merged(&case.lm_head, b, a, h), HeadLayout::VocabHidden);
        let policy = Policy::hidden(&hidden, &lm_head, None, layout, v);
        evaluate(&loss, &policy, &case.batch).unwrap().loss
    };
    let slopes = |list: &[f64], at: &dyn Fn(&[f64]) -> f64| -> Vec<f64> {
        let shifted = |i: usize, d: f64| {
            let mut list = list.to_vec();
            list[i] += d;
            at(&list)
        };
        (0..list.len()).map(|i| (shifted(i, 1e-5) - shifted(i, -1e-5)) / 2e-5).collect()
    };
    let (expected_b, expected_a) = (slopes(&b, &|b| exact(b, &a)), slopes(&a, &|a| exact(&b, a)));
    let naive = case.oracle(&loss).loss;
    assert!((naive - exact(&b, &a)).abs() > 0.05, "naive: {naive} for {}", exact(&b, &a));

    let lm_head = merged(&case.lm_head, &b, &a, h).iter().map(|w| *w as f32).collect();
    let case = Case { lm_head: Tensor::new(lm_head, Dtype::F32), ..case };
    for (how, implementation, tiling) in implementations() {
        let out = run(&mut *plan(&CpuBackend::new(), &case.request(&loss, implementation, tiling)), &case);
        let of_head = |j: usize, k: usize| SCALE * f64::from(out.lm_head[j * h + k]);
        // dB = s dW A^T, dA = s B^T dW
        let by_b = |at: usize| (0..h).map(|k| of_head(at / RANK, k) * a[at % RANK * h + k]).sum::<f64>() as f32;
        let by_a = |at: usize| (0..v).map(|j| of_head(j, at % h) * b[j * RANK + at / h]).sum::<f64>() as f32;
        let found: [Vec<f32>; 2] = [(0..v * RANK).map(by_b).collect(), (0..RANK * h).map(by_a).collect()];
        for (found, expected) in found.iter().zip([&expected_b, &expected_a]) {
            assert!(expected.iter().any(|g| g.abs() > 0.01));
            let off = difference(found, expected);
            assert!(off <= EXACT, "{how}: {off:e}");
        }
    }
}
