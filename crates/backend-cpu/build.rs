//! Passes this package's optimisation level to the library, which cannot ask the compiler for it.

fn main() {
    let level = std::env::var("OPT_LEVEL").unwrap_or_default();
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-env=GRPO_OPT_LEVEL={level}");
    // Cargo shows this line for path dependencies only; the library logs a warning at run time for all.
    if !matches!(level.as_str(), "2" | "3") {
        println!(
            "cargo::warning=kernels with opt-level {level} are 10 to 400 times slower: add \
             [profile.dev.package.grpo-backend-cpu] with opt-level = 3 to the program's Cargo.toml"
        );
    }
}
