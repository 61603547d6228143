//! Cases of testkit as padded batches in files: sequences of uneven length, the last of which is masked as a whole.

use grpo_core::parity::Values;
use grpo_core::{BatchFile, Dtype, LossConfig, PolicyOutput, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use testkit::Case;

/// Shape of a case.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// The number of sequences.
    pub b: usize,
    /// Tokens of each, at most.
    pub t: usize,
    /// The size H of hidden states.
    pub h: usize,
    /// The size V of the vocabulary.
    pub v: usize,
    /// Whether the head has one.
    pub bias: bool,
}

/// A batch for `loss`, the same for the same seed.
pub fn case(shape: Shape, loss: &LossConfig, dtype: Dtype, seed: u64) -> BatchFile {
    let Shape { b, t, h, v, bias } = shape;
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let lengths: Vec<usize> = (0..b).map(|_| rng.random_range(1..=t)).collect();
    let of = testkit::Shape { lengths: &lengths, h, v, dtype, bias, ..testkit::Shape::default() };
    let packed = Case::new(loss, &testkit::Shape { mask_every: 0, mask_last: true, lean: 0.1, ..of }, seed);
    let Case { hidden, lm_head, bias, batch, .. } = packed.arranged(&(0..b).collect::<Vec<_>>(), Some(t));
    let owned = |tensor: &testkit::Tensor| Tensor::F32(tensor.to_vec()).to_dtype(dtype);
    BatchFile {
        name: format!("{shape:?}"),
        source: "synthetic".into(),
        loss: loss.clone(),
        shape: [b, t],
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
