//! Policies, and batches sampled from nearly equal policies.

use crate::{Tensor, transposed};
use grpo_backend_cpu::oracle::{Evaluation, Policy, evaluate, score};
use grpo_core::batch::SamplingMask;
use grpo_core::{
    Advantages, Dtype, GradientSpec, HeadLayout, Implementation, LossConfig, PlanRequest, PolicyInput, PolicySpec,
    Tiling, TokenBatch,
};
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use smart_default::SmartDefault;
use std::ops::Range;

/// Properties of a case.
#[derive(Clone, Copy, Debug, SmartDefault)]
pub struct Shape<'a> {
    /// Tokens of each sequence.
    #[default(&[9, 0, 1, 14, 13])]
    pub lengths: &'a [usize],
    /// Hidden size H.
    #[default(24)]
    pub h: usize,
    /// Vocabulary size V.
    #[default(1100)]
    pub v: usize,
    /// The dtype of hidden states, head and bias.
    pub dtype: Dtype,
    /// The layout of the head.
    pub layout: HeadLayout,
    /// `true` if the head has a bias.
    #[default(true)]
    pub bias: bool,
    /// Every how many tokens one is masked; 0 masks none.
    #[default(5)]
    pub mask_every: usize,
    /// `true` if the last of several sequences is fully masked.
    pub mask_last: bool,
    /// `true` if every token has its own temperature.
    pub temperatures: bool,
    /// `true` if tokens were sampled from a part of the vocabulary: some from a ninth of it, some from a few ids or their target alone, some
    /// from all of it.
    pub sampling_mask: bool,
    /// Bias of the log-ratios of a sequence, so that the mean over a long sequence is clipped too. Sequences cycle through
    /// positive, negative and no bias.
    pub lean: f64,
}

impl Shape<'_> {
    /// Returns the first row of each sequence and the number of rows.
    fn offsets(&self) -> Vec<usize> {
        (0..=self.lengths.len()).map(|sequence| self.lengths[..sequence].iter().sum()).collect()
    }

    fn mask(&self) -> Vec<f32> {
        let (offsets, sequences) = (self.offsets(), self.lengths.len());
        let end = offsets[if self.mask_last && sequences > 1 { sequences - 1 } else { sequences }];
        let skipped = |i: usize| self.mask_every > 0 && i % self.mask_every == self.mask_every - 1;
        (0..offsets[sequences]).map(|i| if i >= end || skipped(i) { 0.0 } else { 1.0 }).collect()
    }
}

/// A policy, and a batch sampled from a nearly equal policy.
#[derive(Clone, Debug)]
pub struct Case {
    /// Hidden states `[N, H]`, NaN at masked tokens.
    pub hidden: Tensor,
    /// The head in the layout `layout`.
    pub lm_head: Tensor,
    /// The bias of the head, `[V]`.
    pub bias: Option<Tensor>,
    /// Hidden size H.
    pub h: usize,
    /// Vocabulary size V.
    pub v: usize,
    /// The layout of the head.
    pub layout: HeadLayout,
    /// The batch.
    pub batch: TokenBatch,
}

/// Returns a standard normal number by the Box-Muller transform. `rand_distr` draws other numbers, for which entropies of logits of 300 in
/// f32 exceed the bound 3e-6 of `transforms.rs` in the tests of backend-cpu by a sixth.
pub fn normal(rng: &mut ChaCha8Rng) -> f64 {
    let (u, v): (f64, f64) = (rng.random_range(1e-12..1.0), rng.random());
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

/// Rounds f64 to `dtype` once; [`Tensor::new`] would round to f32 first.
fn round(value: f64, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => value as f32,
        Dtype::Bf16 => bf16::from_f64(value).to_f32(),
    }
}

/// Returns a log-ratio on either side of every clip in use, at a distance from all bounds.
fn log_ratio(rng: &mut ChaCha8Rng) -> f64 {
    let size = match rng.random_range(0..3) {
        0 => rng.random_range(0.01..0.04),
        1 => rng.random_range(0.08..0.16),
        _ => rng.random_range(0.29..0.36),
    };
    if rng.random() { size } else { -size }
}

impl Case {
    /// Creates a case. Logits have a standard deviation of about 2, targets are sampled, advantages have both signs, and old and reference
    /// log-probabilities give ratios on both sides of every clip. Masked tokens are poisoned with NaN, infinity and invalid
    /// ids.
    pub fn new(loss: &LossConfig, shape: &Shape<'_>, seed: u64) -> Self {
        let Shape { lengths, h, v, dtype, layout, lean, .. } = *shape;
        let (mut rng, n) = (ChaCha8Rng::seed_from_u64(seed), lengths.iter().sum::<usize>());
        let mut values =
            |count: usize, std: f64| -> Vec<f32> { (0..count).map(|_| round(std * normal(&mut rng), dtype)).collect() };
        let mut hidden = values(n * h, 1.0);
        let head = values(v * h, 2.0 / (h as f64).sqrt());
        let bias = shape.bias.then(|| values(v, 0.5));
        let mask = shape.mask();
        let temperatures: Option<Vec<f32>> = shape.temperatures.then(|| {
            let of = |m: &f32| if *m == 0.0 { f32::NAN } else { rng.random_range(0.6..1.6) };
            mask.iter().map(of).collect()
        });
        let mut targets = vec![0; n];
        for (i, target) in targets.iter_mut().enumerate() {
            let logit = |j: usize| -> f64 {
                let row = &hidden[i * h..(i + 1) * h];
                let dot: f64 = row.iter().zip(&head[j * h..]).map(|(a, b)| f64::from(a * b)).sum();
                dot + bias.as_ref().map_or(0.0, |b| f64::from(b[j]))
            };
            let gumbel = |rng: &mut ChaCha8Rng| -(-rng.random_range(1e-12_f64..1.0).ln()).ln();
            let scale = loss.logit_scale * loss.temperature_factors(temperatures.as_ref().map(|t| t[i])).logits;
            let noisy: Vec<f64> = (0..v).map(|j| scale * logit(j) + gumbel(&mut rng)).collect();
            *target = (0..v).max_by(|a, b| noisy[*a].total_cmp(&noisy[*b])).unwrap() as i64;
        }
        for i in (0..n).filter(|i| mask[*i] == 0.0) {
            hidden[i * h..(i + 1) * h].fill(f32::NAN);
            targets[i] = [-100, i64::MAX, v as i64][i % 3];
        }
        let kept = |i: usize, rng: &mut ChaCha8Rng| -> Vec<u32> {
            let target = targets[i] as u32;
            let mut one_of = |most: usize| -> Vec<u32> {
                (0..v as u32).rev().filter(|id| *id == target || rng.random_range(0..most) == 0).collect()
            };
            match i % 8 {
                _ if mask[i] == 0.0 => vec![7, u32::MAX],
                1 | 5 => vec![target],
                3 | 7 => vec![],
                2 => vec![(target + 1) % v as u32, target],
                6 => one_of(v.div_ceil(20)),
                _ => one_of(9),
            }
        };
        let sampling_mask = shape.sampling_mask.then(|| {
            let mut all = SamplingMask::default();
            (0..n).for_each(|i| all.push(&kept(i, &mut rng)));
            all
        });
        let advantages =
            (0..lengths.len()).map(|b| if b % 2 == 0 { 1.3 } else { -0.8 } * (1.0 + 0.1 * b as f32)).collect();
        let mut batch = TokenBatch::packed(targets, shape.offsets())
            .and_then(|batch| batch.with_mask(&mask))
            .and_then(|batch| batch.with_advantages(Advantages::PerSequence(advantages)))
            .unwrap();
        if let Some(temperatures) = temperatures {
            batch = batch.with_temperatures(temperatures).unwrap();
        }
        if let Some(sampling_mask) = sampling_mask {
            batch = batch.with_sampling_mask(sampling_mask).unwrap();
        }
        let head = match layout {
            HeadLayout::VocabHidden => head,
            HeadLayout::HiddenVocab => transposed(&head, v, h),
        };
        let (hidden, lm_head) = (Tensor::new(hidden, dtype), Tensor::new(head, dtype));
        let mut case = Self { hidden, lm_head, bias: bias.map(|b| Tensor::new(b, dtype)), h, v, layout, batch };

        let logp = case.with_policy(|policy| score(loss, policy, &case.batch).unwrap().logp);
        let mut near = |poison: f32| -> Vec<f32> {
            let mut list = vec![poison; n];
            for sequence in 0..lengths.len() {
                let lean = lean * [1.0, -1.0, 0.0][sequence % 3];
                for i in case.batch.range(sequence).filter(|i| mask[*i] == 1.0) {
                    list[i] = (logp[i] - lean - log_ratio(&mut rng)) as f32;
                }
            }
            list
        };
        let (old, reference) = (near(f32::NAN), near(f32::INFINITY));
        // Every fourth token has no sampler log-probability.
        let sampled = |(i, old): (usize, &f32)| if i % 4 == 2 { f32::NAN } else { old - log_ratio(&mut rng) as f32 };
        let sampler = loss.asks_for_sampler_logp().then(|| old.iter().enumerate().map(sampled).collect());
        case = case.with_batch(|batch| batch.with_old_logp(old).unwrap().with_ref_logp(reference).unwrap());
        match sampler {
            Some(sampler) => case.with_batch(|batch| batch.with_sampler_logp(sampler).unwrap()),
            None => case,
        }
    }

    /// Returns the number of tokens N.
    pub fn tokens(&self) -> usize {
        self.batch.tokens()
    }

    /// Returns the dtype of hidden states, head and bias.
    pub fn dtype(&self) -> Dtype {
        self.hidden.dtype()
    }

    /// Calls `f` with the policy in f64.
    pub fn with_policy<T>(&self, f: impl FnOnce(&Policy<'_, f64>) -> T) -> T {
        let (hidden, lm_head) = (self.hidden.in_f64(), self.lm_head.in_f64());
        let bias = self.bias.as_ref().map(Tensor::in_f64);
        f(&Policy::hidden(&hidden, &lm_head, bias.as_deref(), self.layout, self.v))
    }

    /// Evaluates the loss densely in f64.
    pub fn oracle(&self, loss: &LossConfig) -> Evaluation<f64> {
        self.with_policy(|policy| evaluate(loss, policy, &self.batch).unwrap())
    }

    /// Returns the policy as the argument of an implementation.
    pub fn policy(&self) -> PolicyInput<'_> {
        let bias = self.bias.as_ref().map(Tensor::as_ref);
        PolicyInput::Hidden { hidden: self.hidden.as_ref(), lm_head: self.lm_head.as_ref(), bias }
    }

    /// Returns a plan request for this case with all of its gradients.
    pub fn request(&self, loss: &LossConfig, implementation: Implementation, tiling: Tiling) -> PlanRequest {
        let (dtype, bias) = (self.dtype(), self.bias.is_some());
        PlanRequest {
            loss: loss.clone().into(),
            implementation,
            tiling,
            max_tokens: self.tokens().max(1),
            policy: PolicySpec::Hidden { hidden: self.h, vocab: self.v, dtype, layout: self.layout, bias },
            gradients: GradientSpec { hidden: true, lm_head: true, bias },
        }
    }

    /// Returns the case with a changed batch.
    pub fn with_batch(&self, change: impl FnOnce(TokenBatch) -> TokenBatch) -> Self {
        Self { batch: change(self.batch.clone()), ..self.clone() }
    }

    /// Returns the case with `value` in one hidden unit of the token `row`.
    pub fn poisoned(&self, row: usize, value: f32) -> Self {
        Self { hidden: self.hidden.with(|hidden| hidden[row * self.h + 3] = value), ..self.clone() }
    }

    /// Returns the sequences `range` with their hidden states: a part of the step if the batch has weights, else a step of its own.
    pub fn select(&self, range: Range<usize>) -> Self {
        let rows = self.batch.offsets()[range.start]..self.batch.offsets()[range.end];
        let hidden = self.hidden[rows.start * self.h..rows.end * self.h].to_vec();
        Self {
            hidden: Tensor::new(hidden, self.dtype()),
            batch: match self.batch.weights() {
                Some(_) => self.batch.select_sequences(range).unwrap(),
                None => self.batch.select_independent(range).unwrap(),
            },
            ..self.clone()
        }
    }
}
