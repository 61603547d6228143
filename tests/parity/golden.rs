//! Files whose `expected.*` were made with the other systems' own functions in float64 (see each file's `source`).

use crate::backends;
use grpo_check::gradcheck;
use grpo_check::parity::{self, Check};
use grpo_core::parity::Tolerances;
use grpo_core::{BatchFile, Dtype, Implementation, LossType};
use rstest::rstest;
use std::collections::BTreeMap;
use std::path::PathBuf;

pub(crate) fn files() -> Vec<BatchFile> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir("golden").unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    paths.sort();
    assert!(paths.len() >= 153, "the golden files are part of the repository, {} are there", paths.len());
    paths.iter().map(|path| BatchFile::parse(&std::fs::read(path).unwrap()).unwrap()).collect()
}

/// The matrix: every file in every implementation, against the file and the oracle, and with NaN at a token. Prints the largest difference of each
/// tensor in each column, with the file that it comes from (`cargo test -p grpo-tests golden -- --nocapture`).
#[rstest]
fn golden(#[values("cpu", "pjrt:cpu")] backend: &str, #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype) {
    let backend = backends().into_iter().find(|b| b.name() == backend).unwrap();
    let mut worst: BTreeMap<(String, String), (f64, String)> = BTreeMap::new();
    let mut wrong = Vec::new();
    let mut poisoned = [0, 0];
    for file in files() {
        let check = Check { dtype: Some(dtype), skip_unsupported: false, ..Check::default() };
        let report = parity::check(backend.as_ref(), &file.name, &file, &check).unwrap();
        // The inputs are exact in bf16, so `expected.*` applies to both dtypes: 5 tensors of the oracle, and 5 of each
        // implementation against file and oracle.
        assert!(report.notes.is_empty(), "{}: {:?}", file.name, report.notes);
        assert_eq!(report.rows.len(), 5 + Implementation::ALL.len() * 2 * 5, "{}", file.name);
        for row in report.rows {
            let key = (row.implementation.clone(), row.comparison.name.clone());
            let most = worst.entry(key).or_insert((0.0, file.name.clone()));
            if row.comparison.max_rel > most.0 {
                *most = (row.comparison.max_rel, file.name.clone());
            }
            if !row.passed {
                wrong.push((file.name.clone(), row));
            }
        }
        let [tried, dead] = crate::not_finite::assert_seen(backend.as_ref(), &file, dtype);
        poisoned = [poisoned[0] + tried, poisoned[1] + dead];
    }
    println!("largest relative differences on {} in {}", backend.name(), dtype.name());
    for ((implementation, tensor), (difference, file)) in &worst {
        println!("{implementation:9} {tensor:12} {difference:.1e}  {file}");
    }
    assert!(wrong.is_empty(), "on {} in {}: {wrong:#?}", backend.name(), dtype.name());
    assert_eq!(worst.len(), 5 * (1 + Implementation::ALL.len()));
    // In all but the files without an active token; in every fourth also a token that has no gradient.
    assert!(poisoned[0] >= 190 && poisoned[1] >= 40, "{poisoned:?}");
}

#[test]
fn the_oracle_is_the_golden_files_to_float64() {
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

/// What autodiff made of each loss is the slope of its value, with what it calls constant held.
#[test]
fn gradients_of_the_golden_files_are_the_slopes_of_their_losses() {
    let (mut wrong, mut too_large) = (Vec::new(), Vec::new());
    for file in files() {
        // A step changes a loss of 1e7 by less than what f64 rounds off.
        if file.expected.loss.is_some_and(|loss| loss > 1e6) {
            too_large.push(file.name.clone());
            continue;
        }
        let rows = gradcheck::file(&file, 40).unwrap();
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
