//! Files whose `expected.*` were made with the other systems' own functions in float64 (see each file's `source`).

use crate::{assert_parity, backends};
use grpo_core::{BatchFile, Dtype};
use rstest::rstest;
use std::path::PathBuf;
use trainer::parity::Check;

#[rstest]
fn golden(#[files("golden/*.safetensors")] path: PathBuf, #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype) {
    let file = BatchFile::parse(&std::fs::read(&path).unwrap()).unwrap();
    for backend in backends() {
        let check = Check { dtype: Some(dtype), ..Check::default() };
        let report = assert_parity(backend.as_ref(), &file.name, &file, &check);
        // The inputs are exact in bf16, so `expected.*` applies to both dtypes: 5 tensors of the oracle, and 5 of each
        // implementation against file and oracle.
        assert!(report.notes.is_empty(), "{:?}", report.notes);
        assert_eq!(report.rows.len(), 5 + 3 * 2 * 5);
    }
}

#[test]
fn the_oracle_is_the_golden_files_to_float64() {
    let (mut files, mut wrong) = (0, Vec::new());
    for entry in std::fs::read_dir("golden").unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let file = BatchFile::parse(&std::fs::read(path).unwrap()).unwrap();
        let oracle = trainer::parity::oracle(&file.loss, &file, &file.policy).unwrap();
        let active = &oracle.active_rows.unwrap();
        let tolerances = grpo_core::parity::Tolerances { loss: 1e-12, logp: 1e-12, entropy: 1e-12, gradient: 1e-10 };
        let comparisons = file.expected.compare(&oracle.values, active, 0.0, &tolerances);
        wrong.extend(comparisons.into_iter().filter(|c| !c.passed()).map(|c| (file.name.clone(), c)));
        files += 1;
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(files >= 60, "the golden files are part of the repository, {files} are there");
}
