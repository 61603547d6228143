//! Every backend x implementation x loss x dtype against the f64 oracle, and against files made with other systems' own
//! code. Largest differences are printed (`cargo test -p grpo-tests -- --nocapture`).

mod golden;
mod not_finite;
mod presets;
mod report;
mod shapes;
mod synthetic;
mod variants;

use backend_tpu::PjrtBackend;
use backend_tpu::plugins::{self, Kind};
use grpo_check::parity::{self, Check, FileReport};
use grpo_core::{Backend, BatchFile};
use std::sync::{Arc, LazyLock};
use trainer::backends;

/// Backends that every machine can load. XLA's CPU plugin is installed if it is not there; one client serves all tests.
fn backends() -> Vec<Arc<dyn Backend>> {
    static PJRT: LazyLock<Arc<dyn Backend>> = LazyLock::new(|| {
        plugins::install(Kind::Cpu, |_| {}).expect("XLA's CPU plugin can be installed");
        let backend = PjrtBackend::open(Kind::Cpu, None).unwrap();
        // Hundreds of small programs: the compiler takes most of the time, and half of it without these.
        let backend = backend.with_compile_flag("xla_cpu_use_fusion_emitters", false);
        let backend = backend.with_compile_flag("xla_cpu_parallel_codegen_split_count", 1);
        Arc::new(backend.with_compile_flag("xla_backend_optimization_level", 0))
    });
    vec![backends::open("cpu", None).unwrap(), PJRT.clone()]
}

/// Checks `file` on `backend`, prints the largest differences and fails on a breach.
fn assert_parity(backend: &dyn Backend, name: &str, file: &BatchFile, check: &Check) -> FileReport {
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
