//! Files with `expected.*` computed by other systems' own functions in float64 (see each file's `source`).

use grpo_check::parity::{self, Check};
use grpo_core::{Backend, BatchFile, Dtype, Implementation};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Returns the folder of the files.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden")
}

/// Returns all files by name.
pub fn files() -> Vec<BatchFile> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    paths.sort();
    assert!(paths.len() >= 158, "the golden files are part of the repository, {} are there", paths.len());
    paths.iter().map(|path| BatchFile::parse(&std::fs::read(path).unwrap()).unwrap()).collect()
}

/// Compares every implementation with the expected values of every file and with the oracle, also with a NaN at a token. Prints the largest
/// difference of each tensor in each column with the name of its file (`-- --nocapture`).
pub fn assert_golden(backend: &dyn Backend, implementations: &[Implementation], dtype: Dtype) {
    let mut worst: BTreeMap<(String, String), (f64, String)> = BTreeMap::new();
    let mut wrong = Vec::new();
    let mut poisoned = [0, 0];
    for file in files() {
        let implementations = implementations.to_vec();
        let check = Check { dtype: Some(dtype), skip_unsupported: false, implementations, ..Check::default() };
        let report = parity::check(backend, &file.name, &file, &check).unwrap();
        // The inputs are exact in bf16, so `expected.*` applies to both dtypes: 5 tensors of the oracle, and 5 of each
        // implementation against file and oracle.
        assert!(report.notes.is_empty(), "{}: {:?}", file.name, report.notes);
        assert_eq!(report.rows.len(), 5 + check.implementations.len() * 2 * 5, "{}", file.name);
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
        let [tried, dead] = crate::not_finite::assert_seen(backend, &check.implementations, &file, dtype);
        poisoned = [poisoned[0] + tried, poisoned[1] + dead];
    }
    println!("largest relative differences on {} in {}", backend.name(), dtype.name());
    for ((implementation, tensor), (difference, file)) in &worst {
        println!("{implementation:9} {tensor:12} {difference:.1e}  {file}");
    }
    assert!(wrong.is_empty(), "on {} in {}: {wrong:#?}", backend.name(), dtype.name());
    assert_eq!(worst.len(), 5 * (1 + implementations.len()));
    // Every file with an active token is tested; in every fourth file a token without a gradient is tested, too.
    assert!(poisoned[0] >= 190 && poisoned[1] >= 40, "{poisoned:?}");
}
