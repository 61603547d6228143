//! The largest allocation of a step, and the memory that it holds at a time.
#![allow(unsafe_code)] // a global allocator cannot be written without

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use grpo_candle::GrpoLoss;
use grpo_core::{Implementation, LossConfig, Tiling, TokenBatch};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

struct Counting;

/// The largest allocation, the bytes that are allocated, and their maximum.
static LARGEST: AtomicUsize = AtomicUsize::new(0);
static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), SeqCst);
        PEAK.fetch_max(LIVE.fetch_add(layout.size(), SeqCst) + layout.size(), SeqCst);
        // SAFETY: the caller guarantees a valid `layout`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), SeqCst);
        // SAFETY: the caller guarantees that `pointer` came from `alloc` with `layout`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// A single test, because the counters are per process.
#[test]
fn fused_allocates_no_logits_and_backward_copies_no_gradient() {
    let (n, h, v) = (512, 16, 8192);
    for dtype in [DType::F32, DType::BF16] {
        let var = |rows, columns| {
            let values = Tensor::randn(0f32, 0.5, (rows, columns), &Device::Cpu).unwrap();
            Var::from_tensor(&values.to_dtype(dtype).unwrap()).unwrap()
        };
        let (hidden, lm_head) = (var(n, h), var(v, h));
        let batch = TokenBatch::packed((0..n as i64).collect(), vec![0, n / 2, n]).unwrap();
        let batch = batch.with_advantages(vec![1.0, -1.0]).unwrap();
        let loss = |implementation| {
            let grpo = GrpoLoss::new(Arc::new(backend_cpu::CpuBackend::new()), LossConfig::default()).unwrap();
            let tiling = Tiling { workspace_budget: 1 << 20, ..Tiling::default() };
            let grpo = grpo.with_implementation(implementation).with_tiling(tiling);
            LARGEST.store(0, SeqCst);
            grpo.loss(&hidden, &lm_head, None, &batch).unwrap()
        };
        let step = loss(Implementation::Fused);
        let backward = |backward: &dyn Fn() -> GradStore| {
            let before = LIVE.load(SeqCst);
            PEAK.store(before, SeqCst);
            assert_eq!(backward().get(&lm_head).unwrap().dims(), [v, h]);
            PEAK.load(SeqCst) - before
        };
        // The workspace's budget and the gradient of the head are a sixteenth of the logits, or less.
        let gradient = v * h * dtype.size_in_bytes();
        assert!(backward(&|| step.backward().unwrap()) < gradient / 8, "{dtype:?}");
        assert!(backward(&|| step.loss.backward().unwrap()) > 2 * gradient, "{dtype:?}: candle adds it to zeros");
        assert!(LARGEST.load(SeqCst) <= 1 << 20, "{dtype:?}");
        loss(Implementation::Reference);
        assert!(LARGEST.load(SeqCst) >= 4 * n * v, "the counter sees logits");
    }
}
