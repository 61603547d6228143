//! Compiler flags of tests for XLA's CPU.

/// Compiler flags with which XLA's CPU compiles a small program in a quarter of the default time, and runs it
/// more slowly. Tests compile thousands of programs and run each of them a few times. Tests of the rounding of users' programs do not use
/// these flags. The code is compiled as one module: split into several, equal expressions of a program may round differently at this level.
pub const QUICK: [(&str, &str); 3] = [
    ("xla_backend_optimization_level", "0"),
    ("xla_cpu_use_fusion_emitters", "False"),
    ("xla_cpu_parallel_codegen_split_count", "1"),
];

/// Returns [`QUICK`] as the environment variable `XLA_FLAGS`, for other processes.
pub fn quick_environment() -> (&'static str, String) {
    let flags: Vec<String> = QUICK.iter().map(|(flag, value)| format!("--{flag}={value}")).collect();
    ("XLA_FLAGS", flags.join(" "))
}
