//! Batches that exercise what they claim: logits of standard deviation 2, ratios on both sides of the clip, both signs
//! of advantage, sequences of uneven length, one of them fully masked, poison at every masked position.

use grpo_check::parity::oracle;
use grpo_core::parity::Values;
use grpo_core::{BatchFile, Dtype, LossConfig, TokenBatch};
use grpo_core::{PolicyOutput, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

/// Shape of a case.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Sequences.
    pub b: usize,
    /// Tokens of each, at most.
    pub t: usize,
    /// Hidden size.
    pub h: usize,
    /// Vocabulary.
    pub v: usize,
    /// Whether the head has one.
    pub bias: bool,
}

/// A batch for `loss`, the same for the same seed.
pub fn case(shape: Shape, loss: &LossConfig, dtype: Dtype, seed: u64) -> BatchFile {
    let Shape { b, t, h, v, bias } = shape;
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let n = b * t;
    let mut mask: Vec<f32> = Vec::with_capacity(n);
    for sequence in 0..b {
        // The last of several sequences is masked as a whole; a lone one keeps its tokens.
        let length = if b > 1 && sequence == b - 1 { 0 } else { rng.random_range(1..=t) };
        mask.extend((0..t).map(|i| f32::from(u8::from(i < length))));
    }
    let scale = 2.0 / (h as f32).sqrt();
    let mut hidden: Vec<f32> = (0..n * h).map(|_| rng.sample(StandardNormal)).collect();
    let lm_head: Vec<f32> = (0..v * h).map(|_| scale * rng.sample::<f32, _>(StandardNormal)).collect();
    let bias = bias.then(|| Tensor::F32((0..v).map(|_| rng.sample(StandardNormal)).collect()));
    let mut targets: Vec<i64> = (0..n).map(|_| rng.random_range(0..v as i64)).collect();
    for i in (0..n).filter(|i| mask[*i] == 0.0) {
        hidden[i * h..(i + 1) * h].fill(f32::NAN);
        targets[i] = [-100, i64::MAX, v as i64][i % 3];
    }
    let policy =
        PolicyOutput::Hidden { hidden: Tensor::F32(hidden), lm_head: Tensor::F32(lm_head), bias }.to_dtype(dtype);
    let mut size = || rng.sample::<f32, _>(StandardNormal).abs().max(0.3);
    let advantages: Vec<f32> = (0..b).map(|i| if i % 2 == 0 { size() } else { -size() }).collect();
    let mut file = BatchFile {
        name: format!("{shape:?}"),
        source: "synthetic".into(),
        loss: loss.clone(),
        shape: [b, t],
        hidden: h,
        vocab: v,
        policy,
        batch: TokenBatch::padded(&targets, &mask, [b, t]).and_then(|batch| batch.with_advantages(advantages)).unwrap(),
        expected: Values::default(),
    };
    // Old and reference log-probabilities lie near the policy's own, which an on-policy evaluation tells.
    let logp = oracle(&LossConfig { beta: 0.0, ..loss.clone() }, &file, &file.policy).unwrap().values.logp.unwrap();
    let mut near = |spread: f32| -> Vec<f32> {
        logp.iter()
            .zip(&mask)
            .map(|(l, m)| match *m == 1.0 {
                // What lies above 0 would be no log-probability.
                true => (*l as f32 + spread * rng.sample::<f32, _>(StandardNormal)).min(0.0),
                false => f32::NAN,
            })
            .collect()
    };
    let (old, reference) = (near(0.3), near(0.5));
    file.batch = file.batch.with_old_logp(old).unwrap().with_ref_logp(reference).unwrap();
    file
}
