//! The interpreter beside XLA: every operation on numbers at its edges, and random programs.

#[path = "../cases/mod.rs"]
mod cases;

use crate::device::{Tensor, interpreter_agrees, run_module};

#[test]
fn every_operation_means_what_xla_makes_of_it() {
    for case in cases::all() {
        let arguments: Vec<Tensor> = case.arguments.iter().map(Tensor::of).collect();
        let found = run_module(&case.module, &arguments);
        println!("{}", case.name);
        interpreter_agrees(&case.module, &arguments, &found, case.slack);
    }
}
