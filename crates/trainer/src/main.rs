//! The binary `grpo`; everything it does is callable from the library `trainer`.
#![forbid(unsafe_code)]

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
