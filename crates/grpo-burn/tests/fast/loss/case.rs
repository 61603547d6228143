//! A small problem with advantages of both signs, ratios on both sides of the clip, a
//! fully masked sequence, a sequence of one token, and holes in the mask.

use burn::tensor::{Device, Tensor, TensorData};
use grpo_backend_cpu::CpuBackend;
use grpo_burn::GrpoLoss;
use grpo_core::{Advantages, HeadLayout, Implementation, LossConfig, TokenBatch};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

pub(crate) const H: usize = 12;
pub(crate) const V: usize = 37;
/// Row offsets of the sequences: [B + 1].
pub(crate) const OFFSETS: [usize; 6] = [0, 7, 8, 8 + 5, 13 + 9, 22 + 4];
pub(crate) const N: usize = OFFSETS[5];

/// The problem as plain lists.
pub(crate) struct Case {
    pub(crate) hidden: Vec<f32>,
    pub(crate) lm_head: Vec<f32>,
    pub(crate) bias: Vec<f32>,
    pub(crate) targets: Vec<i64>,
    pub(crate) mask: Vec<f32>,
    pub(crate) advantages: Vec<f32>,
    pub(crate) old_logp: Vec<f32>,
    pub(crate) ref_logp: Vec<f32>,
}

impl Case {
    /// Creates the case. Old and reference log-probabilities differ by at most 0.6 from the policy's under `config`.
    pub(crate) fn new(config: &LossConfig) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let mut uniform = |n: usize, scale: f32| (0..n).map(|_| rng.random_range(-scale..scale)).collect::<Vec<f32>>();
        // Products of uniform [-1.5, 1.5] and [-1, 1] over 12 terms: logits of standard deviation 1.7.
        let (hidden, lm_head, bias) = (uniform(N * H, 1.5), uniform(V * H, 1.0), uniform(V, 0.5));
        let (old, reference) = (uniform(N, 0.6), uniform(N, 0.6));
        // Masked: two holes, and all of sequence 2.
        let masked = |i: usize| i == 3 || i == 15 || (8..13).contains(&i);
        let mut case = Self {
            hidden,
            lm_head,
            bias,
            targets: (0..N).map(|i| if masked(i) { -100 } else { ((i * 11 + 5) % V) as i64 }).collect(),
            mask: (0..N).map(|i| if masked(i) { 0.0 } else { 1.0 }).collect(),
            advantages: vec![1.2, -0.7, 0.4, -1.5, 0.9],
            old_logp: vec![],
            ref_logp: vec![],
        };
        let logp = case.plain_logp(config);
        case.old_logp = logp.iter().zip(old).map(|(l, d)| l + d).collect();
        case.ref_logp = logp.iter().zip(reference).map(|(l, d)| l + d).collect();
        case
    }

    fn plain_logp(&self, config: &LossConfig) -> Vec<f32> {
        let device = Device::flex();
        let logits = tensor(&self.hidden, [N, H], &device).matmul(tensor(&self.lm_head, [V, H], &device).transpose())
            + tensor(&self.bias, [1, V], &device);
        let batch = TokenBatch::packed(self.targets.clone(), OFFSETS.to_vec()).and_then(|b| b.with_mask(&self.mask));
        let scores = super::plain::slices(config).score_logits(&values(logits), &batch.expect("a legal batch"));
        scores.expect("finite logits").logp
    }

    /// Returns the batch with all its inputs.
    pub(crate) fn batch(&self) -> TokenBatch {
        TokenBatch::packed(self.targets.clone(), OFFSETS.to_vec())
            .and_then(|b| b.with_mask(&self.mask))
            .and_then(|b| b.with_advantages(Advantages::PerSequence(self.advantages.clone())))
            .and_then(|b| b.with_old_logp(self.old_logp.clone()))
            .and_then(|b| b.with_ref_logp(self.ref_logp.clone()))
            .expect("a legal batch")
    }

    /// Returns hidden states `[N, H]`, head `[V, H]` and bias `[V]` as trainable leaves.
    pub(crate) fn leaves(&self, device: &Device) -> (Tensor<2>, Tensor<2>, Tensor<1>) {
        (
            tensor(&self.hidden, [N, H], device).require_grad(),
            tensor(&self.lm_head, [V, H], device).require_grad(),
            tensor(&self.bias, [V], device).require_grad(),
        )
    }
}

/// Creates the loss under test on this CPU.
pub(crate) fn grpo(config: &LossConfig, implementation: Implementation) -> GrpoLoss {
    laid_out(config, implementation, HeadLayout::default())
}

/// Creates the loss under test for heads of `layout`.
pub(crate) fn laid_out(config: &LossConfig, implementation: Implementation, layout: HeadLayout) -> GrpoLoss {
    let builder = GrpoLoss::builder(config.clone()).implementation(implementation).head_layout(layout);
    builder.build(&CpuBackend::new()).expect("a legal configuration")
}

pub(crate) fn tensor<const D: usize>(values: &[f32], shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), device)
}

pub(crate) fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// Returns the transpose of a row-major `[rows, columns]` matrix.
pub(crate) fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|c| values.iter().skip(c).step_by(columns).copied()).collect()
}

/// Prints the largest difference relative to the largest expected entry, and fails if it exceeds `tolerance`. The tolerance must be
/// far below 1, the result for an all-zero `found`, and the expected entries must not be close to zero.
#[track_caller]
pub(crate) fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    let largest = expected.iter().fold(0.0f32, |m, e| m.max(e.abs()));
    assert!(largest > 1e-3, "{what}: the expected values are all but zero ({largest:e})");
    let difference = found.iter().zip(expected).fold(0.0f32, |m, (f, e)| {
        assert!(f.is_finite(), "{what}: {f} is not finite");
        m.max((f - e).abs())
    });
    println!("{what}: largest difference {:.2e} of the largest entry {largest:.2e}", difference / largest);
    assert!(difference / largest <= tolerance, "{what}: {:e} exceeds {tolerance:e}", difference / largest);
}
