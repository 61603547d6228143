//! Cases that exercise what they claim, and comparisons that say how far off they were.
#![allow(dead_code, unused_imports, unreachable_pub, missing_docs)] // every test binary uses its own part

mod arranged;
pub mod family;

pub use family::loss;

use backend_cpu::CpuBackend;
use backend_cpu::oracle::{Evaluation, Policy, evaluate, score};
use grpo_core::*;
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A policy and a batch sampled from it. The head is `[V, H]`; values are representable in `dtype`.
#[derive(Clone)]
pub struct Case {
    pub hidden: Vec<f32>,
    pub lm_head: Vec<f32>,
    pub bias: Option<Vec<f32>>,
    pub h: usize,
    pub v: usize,
    pub dtype: Dtype,
    pub layout: HeadLayout,
    pub batch: TokenBatch,
}

pub struct Shape<'a> {
    pub lengths: &'a [usize],
    pub h: usize,
    pub v: usize,
    pub dtype: Dtype,
    pub layout: HeadLayout,
    pub bias: bool,
    /// Every how many tokens one is masked; 0 is never.
    pub mask_every: usize,
    /// Whether every token has a temperature of its own.
    pub temperatures: bool,
}

impl Default for Shape<'_> {
    fn default() -> Self {
        Self {
            lengths: &[9, 0, 1, 14, 13],
            h: 24,
            v: 1100,
            dtype: Dtype::F32,
            layout: HeadLayout::VocabHidden,
            bias: true,
            mask_every: 5,
            temperatures: false,
        }
    }
}

pub fn config(json: &str) -> LossConfig {
    LossConfig::from_json(json).unwrap()
}

/// A standard normal number, by Box and Muller. Not `rand_distr`'s: with other draws, entropies of logits of 300 in f32 miss
/// the bound of `transforms.rs`, 3e-6, by a sixth.
pub fn normal(rng: &mut ChaCha8Rng) -> f64 {
    let (u, v): (f64, f64) = (rng.random_range(1e-12..1.0), rng.random());
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

fn round(value: f64, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => value as f32,
        Dtype::Bf16 => bf16::from_f64(value).to_f32(),
    }
}

/// A log ratio on either side of every clip bound in use, and away from all of them.
fn log_ratio(rng: &mut ChaCha8Rng) -> f64 {
    let size = match rng.random_range(0..3) {
        0 => rng.random_range(0.01..0.04),
        1 => rng.random_range(0.08..0.16),
        _ => rng.random_range(0.29..0.36),
    };
    if rng.random() { size } else { -size }
}

impl Case {
    /// Logits have a standard deviation of about 2; targets are sampled; masked rows hold NaN and the id -100.
    pub fn new(loss: &LossConfig, shape: &Shape<'_>, seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (n, h, v) = (shape.lengths.iter().sum::<usize>(), shape.h, shape.v);
        let mut values = |count: usize, std: f64| -> Vec<f32> {
            (0..count).map(|_| round(std * normal(&mut rng), shape.dtype)).collect()
        };
        let mut hidden = values(n * h, 1.0);
        let lm_head = values(v * h, 2.0 / (h as f64).sqrt());
        let bias = shape.bias.then(|| values(v, 0.5));
        let mask: Vec<f32> = (0..n)
            .map(|i| if shape.mask_every > 0 && i % shape.mask_every == shape.mask_every - 1 { 0.0 } else { 1.0 })
            .collect();
        let temperatures: Option<Vec<f32>> = shape.temperatures.then(|| {
            let of = |m: &f32| if *m == 0.0 { f32::NAN } else { rng.random_range(0.6..1.6) };
            mask.iter().map(of).collect()
        });
        let mut targets = vec![0; n];
        for (i, target) in targets.iter_mut().enumerate() {
            let logit = |j: usize| -> f64 {
                let row = &hidden[i * h..(i + 1) * h];
                let dot: f64 = row.iter().zip(&lm_head[j * h..]).map(|(a, b)| f64::from(a * b)).sum();
                dot + bias.as_ref().map_or(0.0, |b| f64::from(b[j]))
            };
            let gumbel = |rng: &mut ChaCha8Rng| -(-rng.random_range(1e-12_f64..1.0).ln()).ln();
            let scale = loss.logit_scale * loss.temperature_factors(temperatures.as_ref().map(|t| t[i])).logits;
            let noisy: Vec<f64> = (0..v).map(|j| scale * logit(j) + gumbel(&mut rng)).collect();
            *target = (0..v).max_by(|a, b| noisy[*a].total_cmp(&noisy[*b])).unwrap() as i64;
        }
        for i in (0..n).filter(|i| mask[*i] == 0.0) {
            hidden[i * h..(i + 1) * h].fill(f32::NAN);
            targets[i] = -100;
        }
        let mut offsets = vec![0];
        offsets.extend(shape.lengths.iter().scan(0, |sum, l| {
            *sum += l;
            Some(*sum)
        }));
        let advantages =
            (0..shape.lengths.len()).map(|b| if b % 2 == 0 { 1.3 } else { -0.8 } * (1.0 + 0.1 * b as f32)).collect();
        let batch = TokenBatch::packed(targets, offsets)
            .unwrap()
            .with_mask(&mask)
            .unwrap()
            .with_advantages(Advantages::PerSequence(advantages))
            .unwrap();
        let batch = match temperatures {
            Some(temperatures) => batch.with_temperatures(temperatures).unwrap(),
            None => batch,
        };
        let mut case = Self { hidden, lm_head, bias, h, v, dtype: shape.dtype, layout: shape.layout, batch };
        let logp = case.with_policy(|policy| score(loss, policy, &case.batch).unwrap().logp);
        let mut old = |nan: f32| -> Vec<f32> {
            let noisy = |(i, l): (usize, &f64)| if mask[i] == 0.0 { nan } else { (l - log_ratio(&mut rng)) as f32 };
            logp.iter().enumerate().map(noisy).collect()
        };
        case.batch =
            case.batch.clone().with_old_logp(old(f32::NAN)).unwrap().with_ref_logp(old(f32::INFINITY)).unwrap();
        if loss.asks_for_sampler_logp() {
            let old_logp = case.batch.old_logp().unwrap();
            // Every fourth token came without.
            let sampled =
                |(i, old): (usize, &f32)| if i % 4 == 2 { f32::NAN } else { old - log_ratio(&mut rng) as f32 };
            let sampler = old_logp.iter().enumerate().map(sampled).collect();
            case.batch = case.batch.clone().with_sampler_logp(sampler).unwrap();
        }
        case
    }

    /// The head as the layout wants it.
    pub fn head(&self) -> Vec<f32> {
        match self.layout {
            HeadLayout::VocabHidden => self.lm_head.clone(),
            HeadLayout::HiddenVocab => transposed(&self.lm_head, self.v, self.h),
        }
    }

    pub fn with_policy<T>(&self, f: impl FnOnce(&Policy<'_, f64>) -> T) -> T {
        let wide = |t: &[f32]| t.iter().copied().map(f64::from).collect::<Vec<_>>();
        let (hidden, lm_head, bias) = (wide(&self.hidden), wide(&self.head()), self.bias.as_deref().map(wide));
        f(&Policy::hidden(&hidden, &lm_head, bias.as_deref(), self.layout, self.v))
    }

    pub fn oracle(&self, loss: &LossConfig) -> Evaluation<f64> {
        self.with_policy(|policy| evaluate(loss, policy, &self.batch).unwrap())
    }

    pub fn request(&self, loss: &LossConfig, implementation: Implementation, tiling: Tiling) -> PlanRequest {
        PlanRequest {
            loss: loss.clone(),
            implementation,
            tiling,
            max_tokens: self.batch.tokens().max(1),
            policy: PolicySpec::Hidden {
                hidden: self.h,
                vocab: self.v,
                dtype: self.dtype,
                layout: self.layout,
                bias: self.bias.is_some(),
            },
            gradients: GradientSpec { hidden: true, lm_head: true, bias: self.bias.is_some() },
        }
    }

    /// The sequences `range`, with their hidden states.
    pub fn select(&self, range: std::ops::Range<usize>) -> Self {
        let rows = self.batch.offsets()[range.start]..self.batch.offsets()[range.end];
        Self {
            hidden: self.hidden[rows.start * self.h..rows.end * self.h].to_vec(),
            batch: self.batch.select_sequences(range).unwrap(),
            ..self.clone()
        }
    }
}

pub fn transposed(values: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..rows * cols).map(|i| values[i % rows * cols + i / rows]).collect()
}

/// What one call made.
#[derive(Clone, Debug, Default)]
pub struct Output {
    pub loss: f64,
    pub scores: Scores,
    pub metrics: Metrics,
    pub hidden: Vec<f32>,
    pub lm_head: Vec<f32>,
    pub bias: Vec<f32>,
}

/// Owned inputs in the case's dtype.
pub enum Inputs {
    F32([Vec<f32>; 3]),
    Bf16([Vec<bf16>; 3]),
}

impl Inputs {
    pub fn new(case: &Case) -> Self {
        let lists = [case.hidden.clone(), case.head(), case.bias.clone().unwrap_or_default()];
        match case.dtype {
            Dtype::F32 => Self::F32(lists),
            Dtype::Bf16 => Self::Bf16(lists.map(|l| l.iter().map(|x| bf16::from_f32(*x)).collect())),
        }
    }

    pub fn policy(&self, case: &Case) -> PolicyInput<'_> {
        let [hidden, lm_head, bias]: [TensorRef<'_>; 3] = match self {
            Self::F32(lists) => lists.each_ref().map(|l| l.as_slice().into()),
            Self::Bf16(lists) => lists.each_ref().map(|l| l.as_slice().into()),
        };
        PolicyInput::Hidden { hidden, lm_head, bias: case.bias.is_some().then_some(bias) }
    }
}

/// Runs one call; gradients start at zero.
pub fn run(plan: &mut dyn LossPlan, case: &Case) -> Output {
    let mut out = Output {
        hidden: vec![0.0; case.batch.tokens() * case.h],
        lm_head: vec![0.0; case.v * case.h],
        bias: vec![0.0; case.bias.as_ref().map_or(0, Vec::len)],
        ..Output::default()
    };
    accumulate(plan, case, &mut out);
    out
}

/// Runs one call; loss and gradients add up in `out`.
pub fn accumulate(plan: &mut dyn LossPlan, case: &Case, out: &mut Output) {
    let inputs = Inputs::new(case);
    let grads = GradsMut {
        hidden: Some(out.hidden.as_mut_slice().into()),
        lm_head: Some(out.lm_head.as_mut_slice().into()),
        bias: case.bias.is_some().then_some(out.bias.as_mut_slice().into()),
        logits: None,
    };
    let result = plan.value_and_grad(inputs.policy(case), &case.batch, grads).unwrap();
    out.loss += result.loss;
    out.scores = result.scores;
    out.metrics.merge(&result.metrics);
}

pub fn plan(backend: &CpuBackend, request: &PlanRequest) -> Box<dyn LossPlan> {
    backend.plan(request).unwrap()
}

/// Whether the implementation takes given logits.
pub fn takes_logits(implementation: &Implementation) -> bool {
    match implementation {
        Implementation::Reference | Implementation::Logits => true,
        Implementation::Fused => false,
    }
}

/// Whether the implementation makes logits of hidden states by the tiled products, whose bits are the same in every tiling and
/// in every implementation that has them. The reference adds products up in f64.
pub fn has_tiled_products(implementation: &Implementation) -> bool {
    match implementation {
        Implementation::Logits | Implementation::Fused => true,
        Implementation::Reference => false,
    }
}

/// Implementations of hidden-state input and what they are called in messages.
pub fn implementations() -> Vec<(String, Implementation, Tiling)> {
    let tiling =
        |order, token_chunk, vocab_block| Tiling { loop_order: order, token_chunk, vocab_block, ..Tiling::default() };
    let chunks = Some(LoopOrder::TokenChunks);
    let panels = Some(LoopOrder::VocabPanels);
    let list = vec![
        ("reference".into(), Implementation::Reference, Tiling::default()),
        ("logits".into(), Implementation::Logits, Tiling::default()),
        ("logits, chunks of 4".into(), Implementation::Logits, tiling(None, Some(4), Some(512))),
        ("fused".into(), Implementation::Fused, Tiling::default()),
        ("fused, token chunks".into(), Implementation::Fused, tiling(chunks, None, None)),
        ("fused, token chunks of 4".into(), Implementation::Fused, tiling(chunks, Some(4), None)),
        ("fused, token chunks of 15".into(), Implementation::Fused, tiling(chunks, Some(15), None)),
        ("fused, vocab panels".into(), Implementation::Fused, tiling(panels, None, Some(512))),
        ("fused, vocab panels x 4".into(), Implementation::Fused, tiling(panels, Some(4), Some(1024))),
        ("fused, vocab panels x 15".into(), Implementation::Fused, tiling(panels, Some(15), Some(1))),
    ];
    for implementation in Implementation::ALL {
        let is_there = list.iter().any(|(_, listed, _)| *listed == implementation);
        assert!(is_there, "`{}` is tested nowhere: it needs a line in implementations()", implementation.name());
    }
    list
}

/// Largest difference, relative to the largest expected entry.
pub fn difference(got: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
    let off = got.iter().zip(expected).fold(0.0_f64, |m, (a, b)| {
        let d = (f64::from(*a) - b).abs();
        if d.is_nan() { f64::INFINITY } else { m.max(d) }
    });
    if off == 0.0 { 0.0 } else { off / largest.max(f64::MIN_POSITIVE) }
}

/// Largest differences of one output.
#[derive(Clone, Copy, Debug, Default)]
pub struct Differences {
    pub loss: f64,
    pub logp: f64,
    pub entropy: f64,
    pub gradient: f64,
}

impl Differences {
    /// Loss relative to itself or 1/2 (a mean of terms about 1 that cancel), logp and entropy to the larger of 1 and
    /// themselves, gradients to their largest entry.
    pub fn new(got: &Output, expected: &Evaluation<f64>) -> Self {
        let per_token = |got: &[f32], expected: &[f64]| {
            let off = |(a, b): (&f32, &f64)| (f64::from(*a) - b).abs() / b.abs().max(1.0);
            got.iter().zip(expected).map(off).fold(0.0, |m, d| if d.is_nan() { f64::INFINITY } else { d.max(m) })
        };
        let gradient = [
            difference(&got.hidden, &expected.grad_hidden),
            difference(&got.lm_head, &expected.grad_lm_head),
            difference(&got.bias, &expected.grad_bias),
        ];
        Self {
            loss: (got.loss - expected.loss).abs() / expected.loss.abs().max(0.5),
            logp: per_token(&got.scores.logp, &expected.logp),
            entropy: per_token(&got.scores.entropy, &expected.entropy),
            gradient: gradient.into_iter().fold(0.0, f64::max),
        }
    }

    pub fn max(self, other: Self) -> Self {
        Self {
            loss: self.loss.max(other.loss),
            logp: self.logp.max(other.logp),
            entropy: self.entropy.max(other.entropy),
            gradient: self.gradient.max(other.gradient),
        }
    }

    /// The tolerance of f32 arithmetic: logits of about 10 lie 1e-6 apart, and a sum over H takes a few such steps. bf16
    /// inputs are exact in f32, so it is theirs too, as long as dlogits are not rounded.
    pub fn assert_small(&self, what: &str) {
        self.assert_within(EXACT, what);
    }

    /// The same with another tolerance for gradients.
    pub fn assert_within(&self, gradient: f64, what: &str) {
        let small = self.loss <= 3e-6 && self.logp <= 3e-6 && self.entropy <= 3e-6 && self.gradient <= gradient;
        assert!(small, "{what}: {self:?} exceeds loss 3e-6, logp 3e-6, entropy 3e-6, gradient {gradient:e}");
    }
}

/// Tolerance of gradients in f32 arithmetic.
pub const EXACT: f64 = 2e-5;
/// That of gradients from dlogits rounded to bf16: twice the largest rounding, since errors of a few terms may add up.
pub const ROUNDED: f64 = 1.0 / 128.0;

/// A backend for each rounding of dlogits that there is for `dtype`, with the tolerance of its gradients.
pub fn backends(dtype: Dtype, threads: usize) -> Vec<(CpuBackend, f64)> {
    let backend = CpuBackend::with_threads(threads).unwrap();
    match dtype {
        Dtype::F32 => vec![(backend, EXACT)],
        Dtype::Bf16 => vec![(backend.clone(), ROUNDED), (backend.with_dlogits(Dtype::F32), EXACT)],
    }
}

/// A tolerance says nothing about a gradient that is zero.
pub fn assert_flows(expected: &Evaluation<f64>) {
    for (name, list) in [("hidden", &expected.grad_hidden), ("lm_head", &expected.grad_lm_head)] {
        let largest = list.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
        assert!(largest > 1e-3, "largest gradient of {name} is only {largest}");
    }
}
