//! Every golden file with every implementation and with the oracle.

use grpo_backend_cpu::CpuBackend;
use grpo_check::gradcheck;
use grpo_check::parity;
use grpo_core::parity::Tolerances;
use grpo_core::{Dtype, Implementation, LossType};
use grpo_tests::golden::{assert_golden, files};
use rstest::rstest;

#[rstest]
fn golden_files_match_on_cpu(#[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype) {
    assert_golden(&CpuBackend::new(), &Implementation::ALL, dtype);
}

#[test]
fn oracle_matches_the_golden_files_in_float64() {
    let mut wrong = Vec::new();
    for file in files() {
        let oracle = parity::oracle(&file.loss, &file, &file.policy).unwrap().values;
        let active = file.batch.active_rows();
        let tolerances = Tolerances { loss: 1e-12, logp: 1e-12, entropy: 1e-12, gradient: 1e-10 };
        let comparisons = file.expected.compare(&oracle, active, 0.0, &tolerances);
        wrong.extend(comparisons.into_iter().filter(|c| !c.passed()).map(|c| (file.name.clone(), c)));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn gradients_of_the_golden_files_match_finite_differences() {
    assert_finite_differences(6);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn gradients_of_the_golden_files_match_finite_differences_of_more_entries() {
    assert_finite_differences(40);
}

/// The gradients in the files match finite differences of the losses, in which detached parts are constant.
fn assert_finite_differences(entries: usize) {
    let (mut wrong, mut too_large) = (Vec::new(), Vec::new());
    for file in files() {
        // A step changes a loss of 1e7 by less than f64's rounding error.
        if file.expected.loss.is_some_and(|loss| loss > 1e6) {
            too_large.push(file.name.clone());
            continue;
        }
        let rows = gradcheck::file(&file, entries).unwrap();
        wrong.extend(rows.into_iter().filter(|row| !row.passed).map(|row| (file.name.clone(), row)));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(too_large, ["verl_vanilla_guard_no_dual_clip"]);
}

#[test]
fn every_loss_has_a_golden_file() {
    let made: Vec<LossType> = files().iter().map(|file| file.loss.loss_type).collect();
    let without: Vec<&LossType> = LossType::ALL.iter().filter(|loss| !made.contains(loss)).collect();
    assert!(without.is_empty(), "tests/golden has no file of {without:?}");
}
