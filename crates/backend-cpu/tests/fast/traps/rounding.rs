//! Values that are rounded to bf16, and values that must not be.

use super::*;
use grpo_backend_cpu::CpuBackend;
use grpo_testkit::{ROUNDED, Tensor, config, difference};
use half::bf16;
use rstest::rstest;

/// Returns a bf16 number within `scale` of `middle`.
fn value(i: usize, middle: f32, scale: f32) -> f32 {
    bf16::from_f32(middle + scale * ((i * 37 % 101) as f32 / 50.0 - 1.0)).to_f32()
}

/// Makes `n` tokens whose head gradients have the same direction.
fn one_way(n: usize, dtype: Dtype) -> Case {
    let (h, v) = (4, 8);
    let hidden = (0..n * h).map(|i| value(i, 1.0, 0.125)).collect();
    let lm_head = (0..v * h).map(|i| value(i, 0.0, 0.25)).collect();
    let (hidden, lm_head) = (Tensor::new(hidden, dtype), Tensor::new(lm_head, dtype));
    let (bias, layout) = (None, HeadLayout::VocabHidden);
    Case { hidden, lm_head, bias, h, v, layout, batch: sequence(&vec![0; n], 1.0) }
}

/// dL/dhead is summed over chunks of tokens: a bf16 accumulator loses small terms, the more chunks the more.
#[rstest]
fn the_head_gradient_is_summed_in_f32(#[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype) {
    let (n, loss) = (512, config(r#"{"loss_type": "bnpo"}"#));
    let case = one_way(n, dtype);
    let expected = case.oracle(&loss);
    let (h, v) = (case.h, case.v);

    let naive = |chunks: usize| -> f64 {
        let mut sum = vec![bf16::ZERO; v * h];
        for chunk in 0..chunks {
            let tokens = chunk * n / chunks..(chunk + 1) * n / chunks;
            for (at, sum) in sum.iter_mut().enumerate() {
                let term = |i: usize| expected.grad_logits[i * v + at / h] as f32 * case.hidden[i * h + at % h];
                *sum = bf16::from_f32(sum.to_f32() + tokens.clone().map(term).sum::<f32>());
            }
        }
        difference(&sum.iter().map(|x| x.to_f32()).collect::<Vec<_>>(), &expected.grad_lm_head)
    };
    let (few, many) = (naive(4), naive(64));
    assert!(many > 0.01 && many > 3.0 * few, "naive: {few:e} with 4 chunks, {many:e} with 64");

    let ours = |chunks: usize, order: LoopOrder| {
        let tiling = Tiling { token_chunk: Some(n / chunks), loop_order: Some(order), ..Tiling::default() };
        let backend = CpuBackend::with_threads(2).unwrap();
        let out = run(&mut *plan(&backend, &case.request(&loss, Implementation::Fused, tiling)), &case);
        difference(&out.lm_head, &expected.grad_lm_head)
    };
    let tolerance = if dtype == Dtype::F32 { 1e-6 } else { ROUNDED };
    for order in [LoopOrder::TokenChunks, LoopOrder::VocabPanels] {
        let (few, many) = (ours(4, order), ours(64, order));
        assert!(
            few <= tolerance && many <= (2.0 * few).max(1e-6),
            "{order:?}: {few:e} with 4 chunks, {many:e} with 64"
        );
    }
}

/// Naive: statistics from f32 logits, but probabilities from rounded ones; near 60, bf16 values are 1/4 apart.
#[test]
fn forward_and_backward_see_the_same_logits() {
    let v = 40;
    let z: Vec<f32> = (0..v).map(|j| 60.0 + ((j * 29 % 41) as f32 - 20.0) / 17.3).collect();
    let (loss, batch) = (config(r#"{"loss_type": "bnpo"}"#), sequence(&[7], 1.0));
    let expected = oracle(&loss, &z, v, &batch);

    let lse = z[7] - naive_logp(&z, 7);
    let naive: Vec<f32> = z.iter().map(|z| (bf16::from_f32(*z).to_f32() - lse).exp()).collect();
    let off = |j: usize, p: f32| (f64::from(p) / expected.grad_logits[j] - 1.0).abs();
    let others = || (0..v).filter(|j| *j != 7);
    let worst = others().map(|j| off(j, naive[j])).fold(0.0, f64::max);
    assert!(worst > 0.05, "naive: probabilities are off by {worst}");
    let leak = (naive.iter().sum::<f32>() - 1.0).abs();
    assert!(leak > 1e-3, "naive: the gradients of a row sum to {leak}");

    for Found { how, dz, .. } in everywhere(&loss, &z, v, &batch) {
        let worst = others().map(|j| off(j, dz[j])).fold(0.0, f64::max);
        // f32 values near 60 are 4e-6 apart.
        assert!(worst <= 1e-5, "{how}: probabilities are off by {worst:e}");
        let (sum, size) = dz.iter().fold((0.0, 0.0), |(sum, size), g| (sum + f64::from(*g), size + f64::from(g.abs())));
        assert!(sum.abs() <= 1e-6 * size, "{how}: the gradients of a row sum to {sum:e}");
    }
}

/// The same for a bf16 head, whose logits are not bf16 numbers, and for precomputed bf16 logits.
#[test]
fn bf16_inputs_are_rounded_once() {
    let (h, v) = (16, 40);
    let loss = config(r#"{"loss_type": "bnpo"}"#);
    let values = |count: usize, middle: f32, scale: f32| {
        Tensor::new((0..count).map(|i| value(i, middle, scale)).collect(), Dtype::Bf16)
    };
    let case = Case {
        hidden: values(h, 0.0, 4.0),
        lm_head: values(v * h, 1.5, 0.25),
        bias: Some(values(v, 60.0, 1.0)),
        h,
        v,
        layout: HeadLayout::VocabHidden,
        batch: sequence(&[7], 1.0),
    };
    let balanced = |how: &str, dz: &[f32], expected: &[f64]| {
        let (sum, size) = dz.iter().fold((0.0, 0.0), |(sum, size), g| (sum + f64::from(*g), size + f64::from(g.abs())));
        assert!(size > 0.1 && sum.abs() <= 1e-6 * size, "{how}: the gradients of a row sum to {sum:e} of {size}");
        // For sums of this size, logits have an error of 1e-5; bf16 values are 1/2 apart.
        assert!(difference(dz, expected) <= 3e-5, "{how}: {dz:?}");
    };
    let backend = CpuBackend::with_threads(2).unwrap().with_dlogits(Dtype::F32);
    let expected = case.oracle(&loss);
    for (name, implementation, tiling) in implementations() {
        // With one token, the bias gradient is the gradient of its logits.
        let out = run(&mut *plan(&backend, &case.request(&loss, implementation, tiling)), &case);
        balanced(&name, &out.bias, &expected.grad_bias);
    }

    let z: Vec<f32> = (0..v).map(|j| bf16::from_f32(60.0 + (j % 7) as f32 / 4.0).to_f32()).collect();
    let expected = oracle(&loss, &z, v, &case.batch);
    let z = Tensor::new(z, Dtype::Bf16);
    for implementation in Implementation::ALL.into_iter().filter(takes_logits) {
        let mut request = case.request(&loss, implementation, Tiling::default());
        request.policy = PolicySpec::Logits { vocab: v, dtype: Dtype::Bf16 };
        let mut dz = vec![0.0; v];
        let mut plan = plan(&backend, &request);
        plan.value_and_grad(PolicyInput::Logits(z.as_ref()), &case.batch, Grads::of_logits(&mut dz)).unwrap();
        balanced(implementation.name(), &dz, &expected.grad_logits);
    }
}
