//! Every backend x implementation x loss x dtype against the f64 oracle, and against files made with other systems' own
//! code. Largest differences are printed (`cargo test -p grpo-tests -- --nocapture`).

mod golden;
mod presets;
mod report;
mod shapes;
mod synthetic;

use grpo_core::BatchFile;
use trainer::parity::{self, Check, FileReport};

/// Backends that this machine can load, by name.
fn backends() -> impl Iterator<Item = &'static str> {
    parity::BACKENDS.into_iter()
}

/// Checks `file` on `backend`, prints the largest differences and fails on a breach.
fn assert_parity(backend: &str, name: &str, file: &BatchFile, check: &Check) -> FileReport {
    let report = parity::check(parity::backend(backend).unwrap().as_ref(), name, file, check).unwrap();
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
