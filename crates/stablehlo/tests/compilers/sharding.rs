//! Compiles sharded programs for four TPU chips.

use crate::compile_for;
use crate::operations::cases::split;
use grpo_pjrt::{CompileOptions, OptimizationLevel};

/// A chip takes its shards of the arguments, and returns its shards of the results.
#[test]
fn split_programs_compile_for_four_chips() {
    for case in split::programs() {
        println!("{}", case.name);
        let (main, text) = (&case.module.main, case.module.to_string());
        let options = CompileOptions { optimization_level: Some(OptimizationLevel::O0), ..CompileOptions::shardy(4) };
        let executable = compile_for("v6e:2x2", &text, options);
        assert_eq!(executable.num_partitions().expect("a number"), 4, "{}", case.name);
        let outputs = executable.outputs().expect("types");
        let shapes: Vec<&[usize]> = outputs.iter().map(|ty| &ty.dims[..]).collect();
        let parts = main.results.iter().zip(&main.body().results).map(|(result, id)| {
            result.sharding.as_ref().expect("a sharding").part(main.type_of(*id)).expect("a part").shape
        });
        assert_eq!(shapes, parts.collect::<Vec<_>>(), "{}", case.name);
    }
}
