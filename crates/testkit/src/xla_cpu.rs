//! Compiler flags and the cache of compiled programs of tests for XLA's CPU.

use crate::user_cache;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// The size of the cache of compiled programs, in bytes, above which programs are removed.
const PROGRAMS: u64 = 2 << 30;

/// Returns the folder of compiled programs of all tests: `tests` in the project's folder of the user's cache. `grpo_pjrt::CompileCache` keys its
/// entries by program, options, plugin, devices and processor, and processes may share it.
pub fn program_cache() -> &'static Path {
    static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
        let folder = user_cache::folder().join("tests");
        user_cache::shrink(&folder, PROGRAMS);
        folder
    });
    &FOLDER
}

/// Compiler flags with which XLA's CPU compiles a small program in a quarter of the default time, and runs it
/// more slowly. Tests compile thousands of programs and run each of them a few times. Tests of the rounding of users' programs do not use
/// these flags. The code is compiled as one module: split into several, equal expressions of a program may round differently at this level.
pub const QUICK: [(&str, &str); 3] = [
    ("xla_backend_optimization_level", "0"),
    ("xla_cpu_use_fusion_emitters", "False"),
    ("xla_cpu_parallel_codegen_split_count", "1"),
];

/// Compiler flags with which XLA's CPU rounds like another processor: without fused multiply-adds and wide vectors, and with other sums in
/// products. One machine then shows differences of two. Processors before AVX cannot convert f16, and XLA does not convert it for them.
const OTHER_ROUNDING: [(&str, &str); 2] = [("xla_cpu_max_isa", "AVX"), ("xla_cpu_multi_thread_eigen", "False")];

/// Returns [`QUICK`] for one device. With `GRPO_TEST_ROUNDING=other` in the environment, the device rounds like another processor.
pub fn flags() -> Vec<(&'static str, &'static str)> {
    with_rounding(rounds_otherwise())
}

/// Returns [`QUICK`] for a mesh that is compared with one device of [`flags`]: the two always round differently.
pub fn mesh_flags() -> Vec<(&'static str, &'static str)> {
    with_rounding(!rounds_otherwise())
}

fn with_rounding(other: bool) -> Vec<(&'static str, &'static str)> {
    QUICK.into_iter().chain(OTHER_ROUNDING.into_iter().filter(|_| other)).collect()
}

pub(crate) fn rounds_otherwise() -> bool {
    std::env::var("GRPO_TEST_ROUNDING").is_ok_and(|value| match &*value {
        "other" => true,
        value => panic!("GRPO_TEST_ROUNDING: expected `other`, found `{value}`"),
    })
}

/// Returns [`QUICK`] as the environment variable `XLA_FLAGS`, for other processes.
pub fn quick_environment() -> (&'static str, String) {
    let flags: Vec<String> = QUICK.iter().map(|(flag, value)| format!("--{flag}={value}")).collect();
    ("XLA_FLAGS", flags.join(" "))
}
