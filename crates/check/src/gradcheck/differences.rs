//! Derivatives of a loss by central differences in f64.
//!
//! A gradient is not always the derivative of the loss value. A loss may treat parts of itself as constants (cispo's
//! weight, the denominator of a ratio without old log-probabilities), and it has kinks (the clip), at which a step
//! leaves the branch of the gradient. [`Moved`] therefore carries two values: the value at the point of
//! the gradient and the value one step away. Constants stay at the former, and so does the choice of branches.

use super::problem::TOLERANCE;
use crate::error::Result;
use crate::parity::{Row, widened};
use grpo_backend_cpu::oracle;
use grpo_core::backend_api::real::Real;
use grpo_core::batch::TokenBatch;
use grpo_core::batch::{PolicyValues, TokenFactors};
use grpo_core::objective::{TokenTerms, shared_part, shares_mean, token_loss};
use grpo_core::parity::{Comparison, Values};
use grpo_core::{HeadLayout, LossConfig, PolicyOutput, Tensor};
use grpo_core::{aggregate::token_weights, batch::TokenWeights};
use std::borrow::Cow;
use std::ops::{Add, Div, Mul, Neg, Sub};

/// Truncation error grows with the square of the step, rounding error with its inverse. They are equal near the cube root of f64's 2e-16,
/// 6e-6; the step is a little larger because a loss is a sum of many rounded terms. Logits move by about as much as an entry does.
const STEP: f64 = 1e-5;

/// A value of the loss at the point of the gradient and one step away.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moved {
    /// The value at the point of the gradient.
    from: f64,
    /// The value one step away.
    to: f64,
    /// A step away, on the branches that were taken at `from`. The same bits as `to` unless the step crosses a kink.
    smooth: f64,
}

impl Moved {
    fn new(from: f64, to: f64) -> Self {
        Self { from, to, smooth: to }
    }

    fn fixed(value: f64) -> Self {
        Self::new(value, value)
    }

    fn map(self, f: impl Fn(f64) -> f64) -> Self {
        Self { from: f(self.from), to: f(self.to), smooth: f(self.smooth) }
    }

    fn zip(self, other: Self, f: impl Fn(f64, f64) -> f64) -> Self {
        Self { from: f(self.from, other.from), to: f(self.to, other.to), smooth: f(self.smooth, other.smooth) }
    }

    fn has_crossed(self) -> bool {
        self.to.to_bits() != self.smooth.to_bits()
    }
}

macro_rules! arithmetic {
    ($($operator:ident $method:ident),*) => {$(
        impl $operator for Moved {
            type Output = Self;
            fn $method(self, other: Self) -> Self {
                self.zip(other, f64::$method)
            }
        }
    )*};
}

arithmetic!(Add add, Sub sub, Mul mul, Div div);

impl Neg for Moved {
    type Output = Self;
    fn neg(self) -> Self {
        self.map(f64::neg)
    }
}

impl Real for Moved {
    /// The predicate at `from` and at `to`.
    type Bool = [bool; 2];

    fn constant(&self, value: f64) -> Self {
        Self::fixed(value)
    }
    fn exp(&self) -> Self {
        self.map(f64::exp)
    }
    fn ln(&self) -> Self {
        self.map(f64::ln)
    }
    fn sqrt(&self) -> Self {
        self.map(f64::sqrt)
    }
    fn lt(&self, other: &Self) -> [bool; 2] {
        [self.from < other.from, self.to < other.to]
    }
    fn le(&self, other: &Self) -> [bool; 2] {
        [self.from <= other.from, self.to <= other.to]
    }
    fn and(a: &[bool; 2], b: &[bool; 2]) -> [bool; 2] {
        [a[0] && b[0], a[1] && b[1]]
    }
    fn not(a: &[bool; 2]) -> [bool; 2] {
        [!a[0], !a[1]]
    }
    fn select(predicate: &[bool; 2], on_true: &Self, on_false: &Self) -> Self {
        let at = |holds: bool| if holds { on_true } else { on_false };
        Self { from: at(predicate[0]).from, to: at(predicate[1]).to, smooth: at(predicate[0]).smooth }
    }
    fn stop_gradient(&self) -> Self {
        Self::fixed(self.from)
    }
}

/// The policy's output, in f64.
#[derive(Clone, Debug)]
pub(super) struct Point {
    /// Tensors by the names of their gradients: logits, or hidden states, head and, if present, bias.
    pub(super) tensors: Vec<(&'static str, Vec<f64>)>,
    /// The layout of the head; `None` for precomputed logits.
    pub(super) layout: Option<HeadLayout>,
    /// Vocabulary entries V.
    pub(super) vocab: usize,
}

impl Point {
    pub(super) fn new(policy: &PolicyOutput<Tensor>, layout: HeadLayout, vocab: usize, has_bias: bool) -> Self {
        let (tensors, layout) = match policy {
            PolicyOutput::Logits(logits) => (vec![("grad_logits", widened(logits))], None),
            PolicyOutput::Hidden { hidden, lm_head, bias } => {
                let mut tensors = vec![("grad_hidden", widened(hidden)), ("grad_lm_head", widened(lm_head))];
                tensors.extend(bias.iter().filter(|_| has_bias).map(|bias| ("grad_bias", widened(bias))));
                (tensors, Some(layout))
            }
        };
        Self { tensors, layout, vocab }
    }

    /// Returns the names of the gradients.
    pub(super) fn names(&self) -> Vec<&'static str> {
        self.tensors.iter().map(|(name, _)| *name).collect()
    }

    /// Returns the policy as the argument of the oracle.
    pub(super) fn policy(&self) -> oracle::Policy<'_, f64> {
        let tensor = |i: usize| self.tensors.get(i).map(|(_, values)| values.as_slice());
        let (first, vocab) = (tensor(0).unwrap_or_default(), self.vocab);
        match self.layout {
            None => oracle::Policy::logits(first, vocab),
            Some(layout) => {
                let lm_head = tensor(1).unwrap_or_default();
                oracle::Policy::hidden(first, lm_head, tensor(2), layout, vocab)
            }
        }
    }
}

/// Returns the gradient called `name`.
pub(super) fn gradient<'a>(values: &'a Values, name: &str) -> Option<&'a [f64]> {
    match name {
        "grad_logits" => values.grad_logits.as_deref(),
        "grad_hidden" => values.grad_hidden.as_deref(),
        "grad_lm_head" => values.grad_lm_head.as_deref(),
        _ => values.grad_bias.as_deref(),
    }
}

/// A loss around a point.
pub(super) struct Differences<'a> {
    loss: &'a LossConfig,
    /// The batch, prepared at the point, so that its selection of tokens is fixed.
    batch: Cow<'a, TokenBatch>,
    weights: TokenWeights,
    point: Point,
    /// Log-probabilities and entropies at the point, `[N]`.
    from: [Vec<f64>; 2],
}

impl<'a> Differences<'a> {
    /// Prepares the loss for differences around `point`.
    pub(super) fn new(loss: &'a LossConfig, batch: &'a TokenBatch, point: Point) -> Result<Self> {
        let scores = oracle::score(loss, &point.policy(), batch)?;
        let values = || PolicyValues { logp: scores.logp.clone(), entropy: scores.entropy.clone() };
        let batch = loss.prepare(batch, |_| Ok::<_, grpo_core::Error>(values()))?;
        let weights = match batch.weights() {
            Some(weights) => weights.clone(),
            None => token_weights(loss, &batch)?,
        };
        Ok(Self { loss, batch, weights, point, from: [scores.logp, scores.entropy] })
    }

    /// Compares the loss at the point with `found`.
    pub(super) fn loss_row(&self, found: Option<f64>, magnitude: Option<f64>) -> Row {
        let (value, floor) = (self.moved(&self.from[0], &self.from[1]).from, magnitude.unwrap_or_default().max(1.0));
        let comparison = Comparison::new("loss", &[value], &[found.unwrap_or(f64::NAN)], floor, 1e-12);
        Row::new("oracle", "differences", comparison)
    }

    /// Compares `entries` of `gradient`, of the tensor with index `tensor`, with derivatives. Also returns the number of
    /// entries whose step crosses a kink.
    pub(super) fn row(
        &mut self,
        tensor: usize,
        gradient: &[f64],
        entries: &[usize],
        floor: f64,
    ) -> Result<(Row, usize)> {
        let (values, crossed) = self.derivatives(tensor, entries)?;
        let found: Vec<f64> = entries.iter().map(|entry| gradient[*entry]).collect();
        let mut comparison = Comparison::new(self.point.tensors[tensor].0, &values, &found, floor, TOLERANCE);
        comparison.at = entries.get(comparison.at).copied().unwrap_or_default();
        Ok((Row::new("oracle", "differences", comparison), crossed))
    }

    /// Returns `true` if the loss has a kink within a shift of all log-probabilities by `distance`.
    pub(super) fn has_kink_within(&self, distance: f64) -> bool {
        let [logp, entropy] = &self.from;
        let moved = |by: f64| self.moved(&logp.iter().map(|logp| logp + by).collect::<Vec<_>>(), entropy);
        moved(distance).has_crossed() || moved(-distance).has_crossed()
    }

    /// Returns derivatives with respect to `entries` of the tensor with index `tensor`, and the number of entries whose
    /// step crosses a kink.
    fn derivatives(&mut self, tensor: usize, entries: &[usize]) -> Result<(Vec<f64>, usize)> {
        // Logits are multiplied by logit_scale/T: at a low temperature they would move by more than the step.
        let factor = |row: usize| self.loss.temperature_factors(self.batch.temperature(row)).logits;
        let factor = self.batch.active_rows().iter().map(|row| factor(*row)).fold(0.0, f64::max);
        let step = STEP / (self.loss.logit_scale.abs() * factor).max(1.0);
        let (mut values, mut crossed) = (vec![], 0);
        for entry in entries {
            let original = self.point.tensors[tensor].1[*entry];
            let mut at = |value: f64| {
                self.point.tensors[tensor].1[*entry] = value;
                let scores = oracle::score(self.loss, &self.point.policy(), &self.batch);
                self.point.tensors[tensor].1[*entry] = original;
                scores.map(|scores| self.moved(&scores.logp, &scores.entropy))
            };
            let (left, right) = (original - step, original + step);
            let (low, high) = (at(left)?, at(right)?);
            values.push((high.smooth - low.smooth) / (right - left));
            crossed += usize::from(low.has_crossed() || high.has_crossed());
        }
        Ok((values, crossed))
    }

    /// Returns the loss for log-probabilities `logp` and entropies `entropy`.
    fn moved(&self, logp: &[f64], entropy: &[f64]) -> Moved {
        let (batch, mut sum) = (&self.batch, Moved::fixed(0.0));
        let logp = |row: usize| Moved::new(self.from[0][row], logp[row]);
        let fixed = |list: &[f32], row: usize| Moved::fixed(list[row].into());
        // Without an old policy, the current log-probability is the old one, as a constant.
        let old = |row: usize| batch.old_logp().map_or_else(|| logp(row).stop_gradient(), |old| fixed(old, row));
        let factor = |row: usize, default: f64, of: fn(&TokenFactors) -> &Vec<f64>| {
            Moved::fixed(batch.factors().map_or(default, |factors| of(factors)[row]))
        };
        for sequence in 0..batch.sequences() {
            let rows: Vec<usize> = batch.range(sequence).filter(|row| batch.is_active(*row)).collect();
            let Some(first) = rows.first() else { continue };
            let advantage = |row: usize| Moved::fixed(batch.advantage(sequence, row).into());
            let part = |row: &usize| {
                shared_part(self.loss, &logp(*row), &old(*row), &advantage(*row))
                    * factor(*row, 1.0, |factors| &factors.log_ratio_scale)
            };
            let total = rows.iter().map(part).fold(Moved::fixed(0.0), Moved::add);
            let count = if shares_mean(self.loss) { rows.len() as f64 } else { 1.0 };
            let shared = total / Moved::fixed(count) + factor(*first, 0.0, |factors| &factors.log_ratio_bias);
            for row in rows {
                let terms = TokenTerms {
                    logp: logp(row),
                    old_logp: old(row),
                    shared: (!self.loss.is_token_level()).then_some(shared),
                    ref_logp: batch.ref_logp().map(|reference| fixed(reference, row)),
                    sampler_logp: batch.sampler_logp().map(|sampler| fixed(sampler, row)),
                    advantage: advantage(row),
                    factor: factor(row, 1.0, |factors| &factors.policy),
                    kl_cov_mask: factor(row, 0.0, |factors| &factors.kl_cov_mask),
                };
                let loss = token_loss(self.loss, &terms);
                let kl = loss.kl * Moved::fixed(self.weights.kl[row]);
                let nll = loss.nll * Moved::fixed(self.weights.nll[row]);
                let bonus = Moved::new(self.from[1][row], entropy[row])
                    * Moved::fixed(self.weights.entropy[row])
                    * factor(row, 1.0, |factors| &factors.entropy);
                sum = sum + Moved::fixed(self.weights.policy[row]) * loss.policy.value + kl + nll - bonus;
            }
        }
        sum
    }
}
