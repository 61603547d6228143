//! Compile options per kind of device, including all compiler flags.

use crate::plugins::Kind;
use grpo_pjrt::{CompileOptions, OptimizationLevel};

/// Scratch memory (VMEM) of a TPU core for a fusion, out of 128 MiB. A larger value leaves less than 33.5 MB for small
/// buffers, so that a chunk of dL/dhidden (2048 x 4096 x f32) goes through HBM, with 5 % more temporary memory. A
/// smaller value makes products slower.
const SCOPED_VMEM_KIB: i64 = 90_112;

/// Returns the options for a program that Shardy partitions over this number of devices, or for one device.
pub(crate) fn partitioned_over(devices: usize) -> CompileOptions {
    if devices > 1 { CompileOptions::shardy(devices) } else { CompileOptions::default() }
}

/// Returns the options for a program of the loss on this number of devices.
pub fn options_for(kind: Kind, devices: usize) -> CompileOptions {
    // Otherwise XLA may skip roundings to bf16, and the forward and backward passes would see different logits.
    let options = partitioned_over(devices).with("xla_allow_excess_precision", false);
    match kind {
        Kind::Tpu => options.with("xla_tpu_scoped_vmem_limit_kib", SCOPED_VMEM_KIB),
        // The maximum of the logits must propagate NaN.
        Kind::Cpu => options.with("xla_cpu_enable_fast_min_max", false),
        Kind::Cuda => options,
    }
}

/// Returns the options for a program of a whole decoder on this number of devices.
///
/// At its default level, libtpu takes 25 times as long to compile such a program, and rounds the weights of all layers
/// before the loop over layers, although the program rounds the weights of one layer inside of the loop. XLA's CPU
/// backend splits every sum over 32 or more numbers into two passes, the first over windows visited number by number:
/// that took a fifth of the time of a small model's training step. For a GPU, XLA would write products in Triton and measure dozens of
/// variants of each: with unrolled layers the compilation of a decode step took more than 25 s. cuBLAS reads slices of stacked weights in place.
/// With products that XLA merges, which concatenates their weights, a token took 0.03 ms more (docs/notes/device-programs.md).
pub fn options_for_decoder(kind: Kind, devices: usize) -> CompileOptions {
    let options = options_for(kind, devices);
    match kind {
        Kind::Tpu => CompileOptions { optimization_level: Some(OptimizationLevel::O0), ..options },
        Kind::Cpu => options.with("xla_disable_hlo_passes", "tree_reduction_rewriter"),
        Kind::Cuda => options.with("xla_gpu_enable_triton_gemm", false).with("xla_disable_hlo_passes", "dot-merger"),
    }
}
