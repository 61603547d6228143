//! Policies and batches that exercise what they claim: logits of standard deviation 2, sampled targets, ratios on both
//! sides of every clip, both signs of advantage, sequences of uneven length, one empty, one masked as a whole, and poison
//! at every masked position.

use backend_cpu::oracle::{Evaluation, Policy, evaluate, score};
use grpo_core::{
    Advantages, Dtype, GradientSpec, HeadLayout, Implementation, LossConfig, PlanRequest, PolicyInput, PolicySpec,
    TensorRef, Tiling, TokenBatch,
};
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use std::ops::Range;

/// Values of a dtype, widened, and as they are handed over.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) wide: Vec<f32>,
    narrow: Option<Vec<bf16>>,
}

impl Tensor {
    /// `values`, rounded to `dtype`.
    pub(crate) fn new(values: Vec<f32>, dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self { wide: values, narrow: None },
            Dtype::Bf16 => {
                let narrow: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
                Self { wide: narrow.iter().map(|x| x.to_f32()).collect(), narrow: Some(narrow) }
            }
        }
    }

    pub(crate) fn as_ref(&self) -> TensorRef<'_> {
        match &self.narrow {
            None => TensorRef::F32(&self.wide),
            Some(narrow) => TensorRef::Bf16(narrow),
        }
    }

    pub(crate) fn in_f64(&self) -> Vec<f64> {
        self.wide.iter().map(|x| f64::from(*x)).collect()
    }
}

/// Shape of a case.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    /// Tokens per sequence. The last of several is masked as a whole, as is every fifth token.
    pub(crate) lengths: &'static [usize],
    pub(crate) h: usize,
    pub(crate) v: usize,
    pub(crate) dtype: Dtype,
    pub(crate) layout: HeadLayout,
    pub(crate) bias: bool,
    /// Whether every token has a temperature of its own.
    pub(crate) temperatures: bool,
}

impl Default for Shape {
    fn default() -> Self {
        let layout = HeadLayout::VocabHidden;
        Self { lengths: &[5, 0, 1, 7, 3], h: 12, v: 61, dtype: Dtype::F32, layout, bias: false, temperatures: false }
    }
}

/// A policy, and a batch that was sampled from nearly the same one.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) shape: Shape,
    pub(crate) hidden: Tensor,
    /// As the layout wants it.
    pub(crate) lm_head: Tensor,
    pub(crate) bias: Option<Tensor>,
    pub(crate) batch: TokenBatch,
}

/// The logarithm of a ratio on either side of every clip in use, and away from all of them.
fn log_ratio(rng: &mut ChaCha8Rng) -> f64 {
    let size = match rng.random_range(0..3) {
        0 => rng.random_range(0.01..0.04),
        1 => rng.random_range(0.08..0.16),
        _ => rng.random_range(0.30..0.36),
    };
    if rng.random() { size } else { -size }
}

impl Case {
    pub(crate) fn new(loss: &LossConfig, shape: Shape, seed: u64) -> Self {
        let Shape { lengths, h, v, dtype, layout, bias, temperatures } = shape;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (n, b) = (lengths.iter().sum::<usize>(), lengths.len());
        let offsets: Vec<usize> = (0..=b).map(|i| lengths[..i].iter().sum()).collect();
        let whole = if b > 1 { offsets[b - 1] } else { n };
        let mask: Vec<f32> = (0..n).map(|i| f32::from(u8::from(i % 5 != 4 && i < whole))).collect();
        let mut values = |count: usize, std: f32| {
            (0..count).map(|_| std * rng.sample::<f32, _>(StandardNormal)).collect::<Vec<f32>>()
        };
        let mut hidden = values(n * h, 1.0);
        let lm_head = Tensor::new(values(v * h, 2.0 / (h as f32).sqrt()), dtype);
        let bias = bias.then(|| Tensor::new(values(v, 0.5), dtype));
        let mut targets: Vec<i64> = (0..n).map(|_| rng.random_range(0..v as i64)).collect();
        for i in (0..n).filter(|i| mask[*i] == 0.0) {
            hidden[i * h..(i + 1) * h].fill(f32::NAN);
            targets[i] = [-100, i64::MAX, v as i64][i % 3];
        }
        let advantages = (0..b).map(|i| if i % 2 == 0 { 1.3 } else { -0.8 } * (1.0 + 0.1 * i as f32)).collect();
        let batch = TokenBatch::packed(targets, offsets).unwrap().with_mask(&mask).unwrap();
        let mut batch = batch.with_advantages(Advantages::PerSequence(advantages)).unwrap();
        if temperatures {
            let of = |(i, m): (usize, &f32)| if *m == 0.0 { f32::NAN } else { 0.6 + 0.1 * (i * 7 % 11) as f32 };
            batch = batch.with_temperatures(mask.iter().enumerate().map(of).collect()).unwrap();
        }
        let mut case = Self { shape, hidden: Tensor::new(hidden, dtype), lm_head, bias, batch };
        if layout == HeadLayout::HiddenVocab {
            let head = (0..v * h).map(|i| case.lm_head.wide[i % v * h + i / v]).collect();
            case.lm_head = Tensor::new(head, dtype);
        }
        let logp = case.with_policy(|policy| score(loss, policy, &case.batch).unwrap().logp);
        // Ratios of one sequence lean to one side, so that those of sequences are clipped too.
        let mut near = |poison: f32| -> Vec<f32> {
            let mut list = vec![poison; n];
            for sequence in 0..b {
                let lean = 0.1 * [1.0, -1.0, 0.0][sequence % 3];
                for i in case.batch.range(sequence).filter(|i| mask[*i] == 1.0) {
                    list[i] = (logp[i] - lean - log_ratio(&mut rng)) as f32;
                }
            }
            list
        };
        let (old, reference) = (near(f32::NAN), near(f32::INFINITY));
        case.batch = case.batch.with_old_logp(old).unwrap().with_ref_logp(reference).unwrap();
        case
    }

    pub(crate) fn tokens(&self) -> usize {
        self.batch.tokens()
    }

    pub(crate) fn with_policy<T>(&self, f: impl FnOnce(&Policy<'_, f64>) -> T) -> T {
        let (hidden, lm_head) = (self.hidden.in_f64(), self.lm_head.in_f64());
        let bias = self.bias.as_ref().map(Tensor::in_f64);
        let Shape { layout, v, .. } = self.shape;
        f(&Policy::hidden(&hidden, &lm_head, bias.as_deref(), layout, v))
    }

    /// What the loss is, densely in f64.
    pub(crate) fn oracle(&self, loss: &LossConfig) -> Evaluation<f64> {
        self.with_policy(|policy| evaluate(loss, policy, &self.batch).unwrap())
    }

    pub(crate) fn policy(&self) -> PolicyInput<'_> {
        let bias = self.bias.as_ref().map(Tensor::as_ref);
        PolicyInput::Hidden { hidden: self.hidden.as_ref(), lm_head: self.lm_head.as_ref(), bias }
    }

    pub(crate) fn request(&self, loss: &LossConfig, implementation: Implementation, tiling: Tiling) -> PlanRequest {
        let Shape { h, v, dtype, layout, bias, .. } = self.shape;
        PlanRequest {
            loss: loss.clone(),
            implementation,
            tiling,
            max_tokens: self.tokens().max(1),
            policy: PolicySpec::Hidden { hidden: h, vocab: v, dtype, layout, bias },
            gradients: GradientSpec { hidden: true, lm_head: true, bias },
        }
    }

    /// The sequences `range`, with their hidden states.
    pub(crate) fn select(&self, range: Range<usize>) -> Self {
        let (rows, h) = (self.batch.offsets()[range.start]..self.batch.offsets()[range.end], self.shape.h);
        let hidden = self.hidden.wide[rows.start * h..rows.end * h].to_vec();
        Self {
            hidden: Tensor::new(hidden, self.shape.dtype),
            batch: self.batch.select_sequences(range).unwrap(),
            ..self.clone()
        }
    }

    pub(crate) fn with_batch(&self, change: impl FnOnce(TokenBatch) -> TokenBatch) -> Self {
        Self { batch: change(self.batch.clone()), ..self.clone() }
    }
}

/// Chunks of so many tokens.
pub(crate) fn chunks(size: usize) -> Tiling {
    Tiling { token_chunk: Some(size), ..Tiling::default() }
}

/// Panels of so many vocabulary entries.
pub(crate) fn panels(size: usize) -> Tiling {
    Tiling { vocab_block: Some(size), ..Tiling::default() }
}
