//! The largest allocation of a step: with `fused` there is no tensor `[N, V]`.
#![allow(unsafe_code)] // a global allocator cannot be written without

use candle_core::{DType, Device, Tensor, Var};
use grpo_candle::GrpoLoss;
use grpo_core::{Implementation, LossConfig, Tiling, TokenBatch};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

struct Counting;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), SeqCst);
        // SAFETY: the caller guarantees a valid `layout`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller guarantees that `pointer` came from `alloc` with `layout`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// A single test, because the counter is per process.
#[test]
fn fused_never_allocates_logits() {
    let (n, h, v) = (512, 16, 8192);
    for dtype in [DType::F32, DType::BF16] {
        let var = |rows, columns| {
            let values = Tensor::randn(0f32, 0.5, (rows, columns), &Device::Cpu).unwrap();
            Var::from_tensor(&values.to_dtype(dtype).unwrap()).unwrap()
        };
        let (hidden, lm_head) = (var(n, h), var(v, h));
        let batch = TokenBatch::packed((0..n as i64).collect(), vec![0, n / 2, n]).unwrap();
        let batch = batch.with_advantages(vec![1.0, -1.0]).unwrap();
        let largest = |implementation| {
            let grpo = GrpoLoss::new(Arc::new(backend_cpu::CpuBackend::new()), LossConfig::default()).unwrap();
            let tiling = Tiling { workspace_budget: 1 << 20, ..Tiling::default() };
            let grpo = grpo.with_implementation(implementation).with_tiling(tiling);
            LARGEST.store(0, SeqCst);
            grpo.loss(&hidden, &lm_head, None, &batch).unwrap().loss.backward().unwrap();
            LARGEST.load(SeqCst)
        };
        // The workspace's budget and the gradient of the head are a sixteenth of the logits, or less.
        assert!(largest(Implementation::Fused) <= 1 << 20, "{dtype:?}");
        assert!(largest(Implementation::Reference) >= 4 * n * v, "the counter sees logits");
    }
}
