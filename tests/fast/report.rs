//! `expected.*` is compared whenever it applies, and a wrong value fails.

use grpo_backend_cpu::CpuBackend;
use grpo_check::parity::{self, Check, FileReport};
use grpo_core::{Advantages, BatchFile, Dtype, LossConfig};
use grpo_tests::synthetic::{Shape, case};
use rstest::rstest;

fn check(file: &BatchFile, dtype: Option<Dtype>) -> FileReport {
    let check = Check { dtype, ..Check::default() };
    parity::check(&CpuBackend::new(), "case", file, &check).unwrap()
}

/// Returns a batch with NaN at masked positions, and the oracle's results.
fn with_expected(dtype: Dtype) -> BatchFile {
    let shape = Shape { b: 4, t: 5, h: 6, v: 29, bias: true };
    let mut file = case(shape, &LossConfig { beta: 0.1, ..LossConfig::default() }, dtype, 3);
    assert!(file.batch.active_tokens() < file.batch.tokens());
    file.expected = parity::oracle(&file.loss, &file, &file.policy).unwrap().values;
    file
}

/// Changes one entry of `expected.*`.
type Edit = fn(&mut BatchFile, usize);

#[rstest]
#[case(Dtype::F32, None)]
#[case(Dtype::F32, Some(Dtype::F32))]
#[case(Dtype::Bf16, None)]
#[case(Dtype::Bf16, Some(Dtype::F32))]
fn wrong_expected_value_fails(#[case] dtype: Dtype, #[case] evaluated: Option<Dtype>) {
    let file = with_expected(dtype);
    let report = check(&file, evaluated);
    assert!(report.passed() && report.notes.is_empty(), "{report:#?}");
    let active = file.batch.active_rows()[0];
    let edits: [(&str, Edit); 7] = [
        ("loss", |f, _| *f.expected.loss.as_mut().unwrap() += 0.01),
        ("logp", |f, row| f.expected.logp.as_mut().unwrap()[row] += 0.01),
        ("entropy", |f, row| f.expected.entropy.as_mut().unwrap()[row] += 0.01),
        ("grad_hidden", |f, _| scale_largest(f.expected.grad_hidden.as_mut().unwrap())),
        ("grad_lm_head", |f, _| scale_largest(f.expected.grad_lm_head.as_mut().unwrap())),
        ("grad_bias", |f, _| scale_largest(f.expected.grad_bias.as_mut().unwrap())),
        ("grad_logits", |f, _| scale_largest(f.expected.grad_logits.as_mut().unwrap())),
    ];
    for (name, edit) in edits {
        let mut wrong = file.clone();
        edit(&mut wrong, active);
        let report = check(&wrong, evaluated);
        let failed: Vec<_> = report.rows.iter().filter(|row| !row.passed).collect();
        assert!(!failed.is_empty(), "{name} is wrong, and nothing noticed");
        assert!(failed.iter().all(|row| row.comparison.name == name && row.against == "expected"), "{failed:#?}");
    }
}

fn scale_largest(values: &mut [f64]) {
    let largest = values.iter_mut().max_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap();
    *largest *= 1.05;
}

#[test]
fn report_notes_omitted_comparisons() {
    let file = with_expected(Dtype::F32);
    let report = check(&file, Some(Dtype::Bf16));
    assert!(report.rows.iter().all(|row| row.against == "oracle"), "{report:#?}");
    assert!(report.notes[0].contains("rounding to bf16"), "{:?}", report.notes);
}

#[test]
fn cancelling_large_advantages_pass() {
    let shape = Shape { b: 6, t: 9, h: 8, v: 61, bias: false };
    for seed in 0..8 {
        let mut file = case(shape, &LossConfig::default(), Dtype::F32, seed);
        // Terms of a thousand that nearly cancel: f32 log-probabilities are not precise to 1e-6 of the difference.
        let advantages = (0..6).map(|b| if b % 2 == 0 { 1000.0 } else { -1000.0 }).collect();
        file.batch = file.batch.with_advantages(Advantages::PerSequence(advantages)).unwrap();
        let report = check(&file, None);
        assert!(report.passed(), "{report:#?}");
    }
}
