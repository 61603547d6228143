//! Plans and implementations of the CPU backend.

use crate::xla_cpu::rounds_otherwise;
use crate::{EXACT, ROUNDED};
use grpo_backend_cpu::{CpuBackend, Isa};
use grpo_core::{Backend, Dtype, Implementation, LoopOrder, LossPlan, PlanRequest, Tiling};

/// Returns a plan; panics on an error.
pub fn plan(backend: &CpuBackend, request: &PlanRequest) -> Box<dyn LossPlan> {
    backend.plan(request).unwrap()
}

/// Returns `true` if the implementation takes precomputed logits.
pub fn takes_logits(implementation: &Implementation) -> bool {
    matches!(implementation, Implementation::Reference | Implementation::Logits)
}

/// Returns `true` if the implementation computes logits with the tiled products, whose bits are the same in every tiling and
/// in every implementation with them. The reference accumulates products in f64.
pub fn has_tiled_products(implementation: &Implementation) -> bool {
    !matches!(implementation, Implementation::Reference)
}

/// Returns implementations for hidden states with their names in messages.
pub fn implementations() -> Vec<(String, Implementation, Tiling)> {
    let tiling =
        |order, token_chunk, vocab_block| Tiling { loop_order: order, token_chunk, vocab_block, ..Tiling::default() };
    let chunks = Some(LoopOrder::TokenChunks);
    let panels = Some(LoopOrder::VocabPanels);
    let list = vec![
        ("reference".into(), Implementation::Reference, Tiling::default()),
        ("logits".into(), Implementation::Logits, Tiling::default()),
        ("logits, chunks of 4".into(), Implementation::Logits, tiling(None, Some(4), Some(512))),
        ("fused".into(), Implementation::Fused, Tiling::default()),
        ("fused, token chunks".into(), Implementation::Fused, tiling(chunks, None, None)),
        ("fused, token chunks of 4".into(), Implementation::Fused, tiling(chunks, Some(4), None)),
        ("fused, token chunks of 15".into(), Implementation::Fused, tiling(chunks, Some(15), None)),
        ("fused, vocab panels".into(), Implementation::Fused, tiling(panels, None, Some(512))),
        ("fused, vocab panels x 4".into(), Implementation::Fused, tiling(panels, Some(4), Some(1024))),
        ("fused, vocab panels x 15".into(), Implementation::Fused, tiling(panels, Some(15), Some(1))),
    ];
    for implementation in Implementation::ALL {
        let is_listed = list.iter().any(|(_, listed, _)| *listed == implementation);
        assert!(is_listed, "`{}` is tested nowhere: it needs a line in implementations()", implementation.name());
    }
    list
}

/// Returns a backend for each rounding of dlogits that exists for `dtype`, with the tolerance of its gradients. With `GRPO_TEST_ROUNDING=other` in
/// the environment, its kernels are portable.
pub fn backends(dtype: Dtype, threads: usize) -> Vec<(CpuBackend, f64)> {
    let backend = CpuBackend::with_threads(threads).unwrap();
    let backend = if rounds_otherwise() { backend.with_isa(Isa::Portable) } else { backend };
    match dtype {
        Dtype::F32 => vec![(backend, EXACT)],
        Dtype::Bf16 => vec![(backend.clone(), ROUNDED), (backend.with_dlogits(Dtype::F32), EXACT)],
    }
}
