//! How programs are compiled, per kind of device: the one place with compiler flags.

use crate::plugins::Kind;
use crate::program::Mesh;
use pjrt::{CompileOptions, OptimizationLevel};

/// Scratch memory (VMEM) of a TPU core that a fusion may use. Of 128 MiB, more than this leaves less than 33.5 MB for
/// small buffers, and then a chunk of dL/dhidden (2048 x 4096 x f32) goes through HBM: 5 % more temporary memory. Less
/// makes products slower.
const SCOPED_VMEM_KIB: i64 = 90_112;

/// Options for a program on the devices of `mesh`.
pub fn options_for(kind: Kind, mesh: Mesh) -> CompileOptions {
    // XLA may keep what the program rounds to bf16 in f32, and then forward and backward see different logits.
    let options = CompileOptions::replicas(mesh.devices()).with("xla_allow_excess_precision", false);
    match kind {
        Kind::Tpu => options.with("xla_tpu_scoped_vmem_limit_kib", SCOPED_VMEM_KIB),
        // A NaN among the logits must not get lost in their maximum.
        Kind::Cpu => options.with("xla_cpu_enable_fast_min_max", false),
        Kind::Cuda => options,
    }
}

/// Options for a program of a whole decoder on one device.
///
/// libtpu takes twenty-five times as long over one at its own level, at which it also rounds the weights of all layers before the loop over
/// layers begins, in which the program rounds those of one. XLA's CPU makes two passes of every sum over 32 numbers and more, the first one
/// over windows that it visits number by number: that was a fifth of the time of a small model's training step.
pub fn options_for_decoder(kind: Kind) -> CompileOptions {
    let options = options_for(kind, Mesh::default());
    match kind {
        Kind::Tpu => CompileOptions { optimization_level: Some(OptimizationLevel::O0), ..options },
        Kind::Cpu => options.with("xla_disable_hlo_passes", "tree_reduction_rewriter"),
        Kind::Cuda => options,
    }
}
