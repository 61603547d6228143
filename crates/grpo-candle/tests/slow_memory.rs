//! The largest allocation of a step, and the memory that it holds at a time.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use grpo_candle::GrpoLoss;
use grpo_core::{Implementation, LossConfig, Tiling, TokenBatch};
use grpo_testkit::allocations::{Counting, measured};

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
            let tiling = Tiling { workspace_budget: 1 << 20, ..Tiling::default() };
            let builder = GrpoLoss::builder(LossConfig::default()).implementation(implementation).tiling(tiling);
            let grpo = builder.build(&grpo_backend_cpu::CpuBackend::new()).unwrap();
            measured(|| grpo.loss(&hidden, &lm_head, None, &batch).unwrap())
        };
        let (step, forward) = loss(Implementation::Fused);
        let backward = |backward: &dyn Fn() -> GradStore| {
            let (gradients, allocated) = measured(backward);
            assert_eq!(gradients.get(&lm_head).unwrap().dims(), [v, h]);
            allocated
        };
        // The workspace's budget and the gradient of the head are a sixteenth of the logits, or less.
        let gradient = v * h * dtype.size_in_bytes();
        let ours = backward(&|| step.backward().unwrap());
        let candles = backward(&|| step.loss.backward().unwrap());
        assert!(ours.peak < gradient / 8, "{dtype:?}");
        assert!(candles.peak > 2 * gradient, "{dtype:?}: candle adds it to zeros");
        assert!([forward, ours, candles].iter().all(|allocated| allocated.largest <= 1 << 20), "{dtype:?}");
        assert!(loss(Implementation::Reference).1.largest >= 4 * n * v, "the counter sees logits");
    }
}
