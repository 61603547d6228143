//! Folders that this crate writes, loaded by transformers and peft.
//!
//! torch, transformers and peft take 5 GB, which nobody should have to fetch to run the other tests:
//!
//!     cargo test -p grpo-models --examples --test python -- --ignored
//!
//! fetches them into the cache once. With `GRPO_TEST_PYTHON=/path/to/python` an interpreter that has them is used instead.

use std::path::Path;
use std::process::Command;
use testkit::python::Packages;

const REQUIREMENTS: [&str; 3] = ["torch==2.13.0", "transformers==5.23.0", "peft==0.21.2"];

#[test]
#[ignore = "fetches 5 GB: torch, transformers and peft"]
fn folders_and_adapters_are_loaded_by_transformers_and_peft() {
    let python = std::env::var_os("GRPO_TEST_PYTHON");
    let mut command = Command::new(python.as_deref().unwrap_or("python3".as_ref()));
    if python.is_none() {
        command.env("PYTHONPATH", Packages::install("models", &REQUIREMENTS).path());
    }
    // Cargo builds examples into the folder beside that of this test.
    let test = std::env::current_exe().expect("this test is a file");
    let program = test.ancestors().nth(2).expect("target/debug").join("examples").join("rewrite_folder");
    assert!(program.is_file(), "{} is not built: cargo test --examples builds it", program.display());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/libraries.py");
    let output = command.arg(script).arg("--program").arg(program).output().expect("python3 starts");
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{said}");
    assert!(output.status.success(), "{said}{errors}");
    // Each of 4 checkpoints in 3 dtypes and 2 sizes of files, 3 new models, 5 adapters.
    assert_eq!(said.lines().count(), 4 * 3 * 2 + 3 + 5, "{said}");
}
