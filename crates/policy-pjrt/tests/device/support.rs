//! Shared code of these tests.

use models::ModelConfig;
use pjrt::Argument;
use pjrt::install::{Kind, install};
use policy_pjrt::decoder::{Compute, Decoder, Rows};
use policy_pjrt::{DeviceWeights, Runtime};
use stablehlo::{Builder, Dtype, Save, TensorType};
use std::sync::OnceLock;
use testkit::xla_cpu::QUICK;

/// Returns XLA's CPU runtime with default compiler options; installs the plugin if it is missing.
pub(crate) fn optimised() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        let installed = install(Kind::Cpu, |_| {}).expect("XLA's CPU plugin can be installed");
        let runtime = Runtime::open(Kind::Cpu, Some(&installed.path)).expect("the CPU opens");
        // Compiled programs are cached between runs.
        runtime.with_compile_cache(concat!(env!("CARGO_TARGET_TMPDIR"), "/policy-pjrt"))
    })
}

/// Returns the same runtime with fast compilation, for hundreds of programs that compile longer than they run.
pub(crate) fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        QUICK.iter().fold(optimised().clone(), |runtime, (flag, value)| runtime.with_compile_flag(flag, *value))
    })
}

/// Returns hidden states `[B, T, H]` and logits `[B, T, V]` of sequences, each in its own row padded with token 0.
pub(crate) fn forward(
    config: &ModelConfig,
    weights: &DeviceWeights,
    compute: Compute,
    sequences: &[Vec<u32>],
) -> (Vec<f32>, Vec<f32>, usize) {
    let (b, t) = (sequences.len(), sequences.iter().map(Vec::len).max().unwrap());
    let f = Builder::new();
    let decoder = Decoder::new(config, compute);
    let values = decoder.declare(&f, weights.dtype());
    let ids = f.argument("ids", TensorType::new(Dtype::I32, [b, t]));
    let hidden = decoder.hidden(&values, &Rows::of_sequences(&ids), Save::Carry).unwrap();
    let logits = decoder.logits(&values, &hidden);
    let hidden = hidden.convert(Dtype::F32);
    let module = f.finish("forward", &[("hidden", &hidden), ("logits", &logits)]).unwrap();
    let program = runtime().compile(&module).unwrap();
    let mut rows = vec![0; b * t];
    for (row, sequence) in rows.chunks_mut(t).zip(sequences) {
        row.iter_mut().zip(sequence).for_each(|(to, id)| *to = *id as i32);
    }
    let ids = runtime().upload(&rows, &[b, t]).unwrap();
    let mut arguments = weights.arguments();
    arguments.push(Argument::from(&ids));
    let outputs = program.run(arguments).unwrap();
    (outputs[0].to_vec().unwrap(), outputs[1].to_vec().unwrap(), t)
}

/// Fails unless all values are within `tolerance` of the expected ones, relative to the largest.
#[track_caller]
pub(crate) fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
    assert!(largest > 0.0, "{what}: nothing to compare");
    let off = found.iter().zip(expected).map(|(f, e)| (f - e).abs());
    // `max` ignores NaN, so it is handled here.
    let off = off.fold(0.0, |m: f32, x| if x > m || x.is_nan() { x } else { m });
    assert!(off <= tolerance * largest, "{what}: off by {off} of {largest}");
}
