//! Compiles every operation for TPUs.

#[path = "../cases/mod.rs"]
pub(crate) mod cases;

use crate::compile_text;
use grpo_pjrt::CompileOptions;

#[test]
#[ignore = "GRPO_TESTS=all"]
fn every_case_compiles() {
    for case in cases::all() {
        let executable = compile_text(&case.module.to_string(), CompileOptions::default());
        println!("{}", case.name);
        let memory = executable.memory_stats().expect("memory statistics");
        assert!(memory.output > 0, "{}: {memory:?}", case.name);
    }
}
