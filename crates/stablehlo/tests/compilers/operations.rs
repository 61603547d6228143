//! The TPU compiler on every operation.

#[path = "../cases/mod.rs"]
mod cases;

use crate::compile_text;

#[test]
fn every_case_compiles() {
    for case in cases::all() {
        let executable = compile_text(&case.module.to_string());
        println!("{}", case.name);
        let memory = executable.memory_stats().expect("memory statistics");
        assert!(memory.output > 0, "{}: {memory:?}", case.name);
    }
}
