//! `cargo bench`: `grpo bench` on the shapes S1 to S4 of `configs/bench/`, reduced to take about a minute.
//!
//! Arguments after `--` are passed to `grpo bench`: `cargo bench -p grpo-cli -- --json`, or other configurations.

use std::path::Path;
use std::process::{Command, ExitCode};

const SHAPES: [&str; 4] = ["s1", "s2", "s3", "s4"];
/// Shapes keep their hidden size. A `--set` on the command line comes later and takes precedence.
const REDUCED: [&str; 3] = ["shape.tokens=128", "shape.vocab=16384", "rounds.warmup=1"];

fn main() -> ExitCode {
    // Cargo adds `--bench`; without it, as in `cargo test --benches`, nothing is run.
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    if !arguments.iter().any(|argument| argument == "--bench") {
        return ExitCode::SUCCESS;
    }
    arguments.retain(|argument| argument != "--bench");
    let mut command = Command::new(env!("CARGO_BIN_EXE_grpo"));
    command.arg("bench");
    // The value of an option is not a configuration.
    if !arguments.iter().any(|argument| argument.ends_with(".yaml")) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/bench");
        command.args(SHAPES.map(|name| folder.join(name).with_extension("yaml")));
        command.args(REDUCED.iter().flat_map(|set| ["--set", set]));
    }
    match command.args(arguments).status() {
        Ok(status) => ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(2)),
        Err(error) => {
            eprintln!("error: {}: {error}", env!("CARGO_BIN_EXE_grpo"));
            ExitCode::from(2)
        }
    }
}
