//! Compiles the kernels for TPUs that are not present, and checks their resources.

use grpo_backend_tpu::mosaic::{COEFFICIENTS, KernelSpec, dlogits_kernel, statistics_kernel};
use grpo_pjrt::install::{Kind, install};
use grpo_pjrt::{CompileOptions, CompiledMemoryStats, Executable, Plugin};
use grpo_stablehlo::{Builder, Dtype, Module, TensorType};

/// Compiles a program for a TPU that is not present.
fn compile_for(target: &str, program: &str) -> grpo_pjrt::Result<Executable> {
    let installed = install(Kind::Tpu, |_| {})?;
    Plugin::load(installed.path)?.topology(target, &[])?.compile(program, &CompileOptions::default())
}

fn compile(program: &str) -> Executable {
    compile_for("v6e:2x4", program).unwrap_or_else(|error| panic!("{error}\n{program}"))
}

/// Builds a program of the statistics, simple coefficients, and the gradient over the donated logits.
fn program(spec: &KernelSpec) -> Module {
    let [statistics, dlogits] = [statistics_kernel(spec), dlogits_kernel(spec)].map(|k| k.expect("a kernel"));
    let f = Builder::new();
    let targets = f.argument("targets", TensorType::new(Dtype::I32, [spec.batch, 1, spec.tokens]));
    let logits = f.argument("logits", spec.logits());
    f.alias(&logits, 0);
    let rows = f.custom_call(statistics.custom_call(), &[&targets, &logits], &statistics.result_types()).remove(0);
    let slopes = &rows * rows.like(0.5);
    assert_eq!(slopes.shape()[1], COEFFICIENTS);
    let operands = [&targets, &slopes, &logits];
    let gradient = f.custom_call(dlogits.custom_call(), &operands, &dlogits.result_types()).remove(0);
    f.finish("softmax", &[("dlogits", &gradient), ("statistics", &rows)]).expect("a program")
}

/// Makes the large arguments and results row-major, so that the compiler cannot choose another layout.
fn row_major(program: &str, ty: &TensorType) -> String {
    let layout = "mhlo.layout_mode = \"{2,1,0}\"";
    let with_others = program.replace(&format!("{ty} {{"), &format!("{ty} {{{layout}, "));
    with_others.replace(&format!("{ty} loc"), &format!("{ty} {{{layout}}} loc"))
}

#[test]
fn both_kernels_compile_and_copy_no_logits() {
    for dtype in [Dtype::Bf16, Dtype::F32] {
        for (batch, vocab) in [(1, 151_936), (1, 151_643), (4, 151_936), (4, 151_643)] {
            let spec = KernelSpec::new(batch, 4096 / batch, vocab, dtype, 1.0);
            let text = row_major(&program(&spec).to_string(), &spec.logits());
            let executable = compile(&text);
            let memory = executable.memory_stats().expect("memory statistics");
            let CompiledMemoryStats { temp, argument, alias, .. } = memory;
            let cost = executable.cost_analysis().expect("a cost analysis");
            assert!(temp <= 1 << 20, "{spec:?}: {memory:?}");
            // The logits have no padding outside of their tiles.
            assert!(alias >= spec.logits().bytes() as i64 && argument < alias + (1 << 20), "{spec:?}: {memory:?}");
            // The compiler uses the kernels' declared cost: logits are read twice and written once.
            let traffic = 3.0 * spec.logits().bytes() as f64;
            assert!((cost["bytes accessed"] / traffic - 1.0).abs() < 0.01, "{spec:?}: {cost:?}");
        }
    }
}

#[test]
fn unaligned_vocabularies_are_copied_unless_their_layout_is_given() {
    let spec = KernelSpec::new(1, 4096, 151_643, Dtype::Bf16, 1.0);
    let text = program(&spec).to_string();
    let temp = |text: &str| compile(text).memory_stats().expect("memory statistics").temp;
    assert!(temp(&text) >= spec.logits().bytes() as i64, "then the attribute is no longer needed");
    assert!(temp(&row_major(&text, &spec.logits())) <= 1 << 20);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn shapes_smaller_than_a_block_and_other_blocks_compile() {
    for (shape, blocks) in [
        ([1, 1, 7], None),
        ([4, 9, 130], Some([128, 128])),
        ([2, 300, 1000], Some([256, 512])),
        ([1, 4096, 32_768], Some([128, 4096])),
        ([1, 1000, 50_257], Some([512, 1024])),
    ] {
        for dtype in [Dtype::Bf16, Dtype::F32] {
            let mut spec = KernelSpec::new(shape[0], shape[1], shape[2], dtype, 0.5);
            if let Some([time_block, vocab_block]) = blocks {
                spec = KernelSpec { time_block, vocab_block, ..spec };
            }
            let memory = compile(&row_major(&program(&spec).to_string(), &spec.logits())).memory_stats();
            assert!(memory.expect("memory statistics").temp <= 1 << 20, "{spec:?}");
        }
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn the_default_blocks_fit_every_generation() {
    for target in ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1"] {
        for dtype in [Dtype::Bf16, Dtype::F32] {
            let spec = KernelSpec::new(4, 1024, 151_643, dtype, 0.5);
            let executable = compile_for(target, &row_major(&program(&spec).to_string(), &spec.logits()));
            let memory = executable.and_then(|executable| executable.memory_stats());
            let memory = memory.unwrap_or_else(|error| panic!("{target} {spec:?}: {error}"));
            assert!(memory.temp <= 1 << 20, "{target} {spec:?}: {memory:?}");
        }
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn the_compiler_needs_the_estimated_vmem() {
    for dtype in [Dtype::Bf16, Dtype::F32] {
        let spec = KernelSpec::new(4, 1024, 151_643, dtype, 1.0);
        for kernel in [statistics_kernel(&spec), dlogits_kernel(&spec)] {
            let mut kernel = kernel.expect("a kernel");
            let budget = kernel.vmem_bytes();
            let mut compiles_with = |limit: usize| {
                kernel.vmem_limit = Some(limit);
                let f = Builder::new();
                let types = kernel.operand_types();
                let operands: Vec<_> = types.into_iter().map(|ty| f.argument("", ty)).collect();
                let operands: Vec<_> = operands.iter().collect();
                let result = f.custom_call(kernel.custom_call(), &operands, &kernel.result_types()).remove(0);
                let module = f.finish("one", &[("", &result)]).expect("a program");
                compile_for("v6e:2x4", &module.to_string())
            };
            assert!(compiles_with(budget + budget / 10).is_ok(), "{spec:?}: {budget} bytes");
            let refused = compiles_with(budget - budget / 10).err().expect("too little VMEM").to_string();
            assert!(refused.contains("vmem"), "{refused}");
        }
    }
}
