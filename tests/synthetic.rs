//! Cases of testkit as padded batch files: sequences of uneven length, the last one fully masked.

use grpo_core::parity::Values;
use grpo_core::{BatchFile, Dtype, LossConfig, PolicyOutput, Tensor};
use grpo_testkit::Case;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Shape of a case.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Number of sequences B.
    pub b: usize,
    /// Largest number of tokens T of a sequence.
    pub t: usize,
    /// Hidden size H.
    pub h: usize,
    /// Vocabulary size V.
    pub v: usize,
    /// `true` if the head has a bias.
    pub bias: bool,
}

/// Returns a batch for `loss`; equal seeds give equal batches.
pub fn case(shape: Shape, loss: &LossConfig, dtype: Dtype, seed: u64) -> BatchFile {
    let Shape { b, t, h, v, bias } = shape;
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let lengths: Vec<usize> = (0..b).map(|_| rng.random_range(1..=t)).collect();
    let of = grpo_testkit::Shape { lengths: &lengths, h, v, dtype, bias, ..grpo_testkit::Shape::default() };
    let packed = Case::new(loss, &grpo_testkit::Shape { mask_every: 0, mask_last: true, lean: 0.1, ..of }, seed);
    let Case { hidden, lm_head, bias, batch, .. } = packed.arranged(&(0..b).collect::<Vec<_>>(), Some(t));
    let owned = |tensor: &grpo_testkit::Tensor| Tensor::F32(tensor.to_vec()).to_dtype(dtype);
    BatchFile {
        name: format!("{shape:?}"),
        source: "synthetic".into(),
        loss: loss.clone(),
        hidden: h,
        vocab: v,
        policy: PolicyOutput::Hidden {
            hidden: owned(&hidden),
            lm_head: owned(&lm_head),
            bias: bias.as_ref().map(owned),
        },
        batch,
        expected: Values::default(),
    }
}
