//! Shared code of this package's tests: batches, the golden files, and comparisons of a backend with both and with the f64 oracle.
//!
//! `fast/` runs on this CPU and needs only Rust; `device/` runs on XLA's CPU plugin.

pub mod golden;
pub mod not_finite;
pub mod shapes;
pub mod synthetic;
pub mod variants;

use grpo_check::parity::{self, Check, FileReport};
use grpo_core::{Backend, BatchFile};

/// Checks `file` on `backend`, prints the largest differences (`-- --nocapture`) and fails if one exceeds its tolerance.
pub fn assert_parity(backend: &dyn Backend, name: &str, file: &BatchFile, check: &Check) -> FileReport {
    let report = parity::check(backend, name, file, check).unwrap();
    let backend = backend.name();
    for row in &report.rows {
        let c = &row.comparison;
        println!(
            "{name} {backend} {:9} {:4} vs {:8} {:12} abs {:.2e} rel {:.2e} (<= {:.0e})",
            row.implementation,
            report.dtype.name(),
            row.against,
            c.name,
            c.max_abs,
            c.max_rel,
            c.tolerance
        );
        assert!(row.passed, "{name} on {backend}: {row:#?}");
    }
    assert!(report.passed(), "{name} on {backend}: nothing was compared: {:?}", report.notes);
    report
}
