//! Compiles every kernel and every operation with the TPU compiler.

#[allow(dead_code)] // the interpreter takes more of them
#[path = "../fast/mosaic/kernels.rs"]
mod kernels;
mod operations;
mod reverse;
mod sharding;

use grpo_pjrt::install::{Kind, install};
use grpo_pjrt::{CompileOptions, Executable, Plugin};
use grpo_stablehlo::Builder;
use grpo_stablehlo::mosaic::Kernel;
use kernels::*;

grpo_testkit::tiers!();

fn compile(kernel: &Kernel) -> Executable {
    let f = Builder::new();
    let types = kernel.operand_types();
    let operands: Vec<_> = types.iter().map(|ty| f.argument("", ty.clone())).collect();
    for (output, input) in &kernel.aliases {
        f.alias(&operands[*input], *output);
    }
    let operands: Vec<_> = operands.iter().collect();
    let result = f.custom_call(kernel.custom_call(), &operands, &kernel.result_types()).remove(0);
    let program = f.finish(&kernel.name, &[("", &result)]).expect("a program").to_string();
    compile_text(&program, CompileOptions::default())
}

fn compile_text(program: &str, options: CompileOptions) -> Executable {
    compile_for("v6e:2x4", program, options)
}

fn compile_for(topology: &str, program: &str, options: CompileOptions) -> Executable {
    let installed = install(Kind::Tpu, |_| {}).expect("the TPU compiler can be installed");
    let topology = Plugin::load(installed.path).and_then(|plugin| plugin.topology(topology, &[])).expect("a topology");
    topology.compile(program, &options).unwrap_or_else(|error| panic!("{error}\n{program}"))
}

#[test]
fn every_operation_compiles() {
    for kernel in [row_max(true), arithmetic(), movement(), in_place()] {
        let kernel = kernel.expect("a kernel");
        let memory = compile(&kernel).memory_stats().expect("memory statistics");
        assert!(memory.generated_code > 0, "{}: {memory:?}", kernel.name);
        let shared = kernel.aliases.iter().map(|(output, _)| kernel.outputs[*output].ty.bytes() as i64).sum::<i64>();
        // In HBM, bf16 [20, 300] is padded to whole tiles.
        assert!(memory.alias >= shared && memory.alias < 2 * shared + 1, "{}: {memory:?}", kernel.name);
    }
}

#[test]
fn the_compiler_honours_the_cost() {
    let mut kernel = movement().expect("a kernel");
    let cost = compile(&kernel).cost_analysis().expect("a cost analysis");
    assert_eq!((cost["flops"], cost["bytes accessed"]), (1e6, 2e6));
    kernel.cost = None;
    let none = compile(&kernel).cost_analysis().expect("a cost analysis");
    assert!(none.get("flops").is_none_or(|flops| *flops < 1.0), "{none:?}");
}

#[test]
fn the_compiler_honours_the_vmem_limit() {
    let mut kernel = row_max(true).expect("a kernel");
    kernel.vmem_limit = Some(1024);
    let refused = std::panic::catch_unwind(|| drop(compile(&kernel)));
    assert!(refused.is_err(), "blocks of {} bytes", kernel.vmem_bytes());
}
