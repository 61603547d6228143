//! The oracle: a dense, simple evaluation of the loss, the reference for every implementation.
//!
//! It stores the logits `[N, V]` (their gradient overwrites them) and every gradient, without tiles or threads. It is
//! generic over [`Scalar`]: `f64` gives the oracle, `f32` the implementation `reference`. Tensors are in `R`, sums and
//! the scalars of a row in f64. Rows of masked tokens are never read.
//!
//! Legend: N tokens, H hidden, V vocabulary; y the target; T the temperature of a token. Logits z become
//! log-probabilities by u = logit_scale z, w = cap tanh(u / cap) (without a softcap w = u), z' = w / T, p =
//! softmax(z'). If the temperature scales log-probabilities instead, z' = w and logp = log p_y / T. With
//! a sampling mask, the softmax is over the ids of the token.

mod policy;

pub use policy::{Evaluation, Policy};

use grpo_core::backend_api::evaluate::Evaluator;
use grpo_core::backend_api::plan::{Head, Step, TokenScores, step};
use grpo_core::backend_api::real::Scalar;
use grpo_core::backend_api::token_columns::LossSums;
use grpo_core::batch::PolicyValues;
use grpo_core::batch::TokenBatch;
use grpo_core::error::{Error, Result};
use grpo_core::{LossConfig, PolicyOutput, TemperatureFactors};
use policy::{dense, head_index};

/// Evaluates `config` on `batch`.
///
/// # Errors
/// [`grpo_core::Error::Shape`] for lengths that do not match, [`grpo_core::Error::Value`] for a target outside the
/// vocabulary, [`grpo_core::Error::Config`] for an illegal loss or a batch without required data,
/// [`grpo_core::Error::Backend`] if there is not enough memory for the logits.
pub fn evaluate<R: Scalar>(config: &LossConfig, policy: &Policy<'_, R>, batch: &TokenBatch) -> Result<Evaluation<R>> {
    let Step { sums, metrics, scores } = step(config, batch, &mut Dense { config, policy }, ())?;
    Ok(Evaluation { loss: sums.loss, policy_loss: sums.policy, metrics, ..scores })
}

/// The head of one policy, in the precision `R`. Its gradients are part of the scores.
struct Dense<'a, R> {
    config: &'a LossConfig,
    policy: &'a Policy<'a, R>,
}

impl<R: Scalar> Head for Dense<'_, R> {
    type Tensors<'a> = ();
    type Scores = Evaluation<R>;
    type Error = Error;

    fn score(&mut self, (): &(), batch: &TokenBatch) -> Result<Evaluation<R>> {
        score(self.config, self.policy, batch)
    }

    fn gradient(&mut self, (): (), loss: &Evaluator<'_>) -> Result<(LossSums<f64>, Evaluation<R>)> {
        gradient(self.policy, loss)
    }
}

impl<R: Scalar> TokenScores for Evaluation<R> {
    fn to_values(&self) -> Result<PolicyValues> {
        let widened = |values: &[R]| values.iter().map(|value| value.to_f64()).collect();
        Ok(PolicyValues { logp: widened(&self.logp), entropy: widened(&self.entropy) })
    }

    fn fill(&mut self, batch: &TokenBatch, other: &Self) {
        for &row in batch.active_rows() {
            (self.logp[row], self.entropy[row]) = (other.logp[row], other.entropy[row]);
        }
    }
}

/// Returns the loss of a prepared batch as sums, and all gradients. `loss`, `policy_loss` and `metrics` of the
/// evaluation keep their defaults; the caller computes them from the sums.
pub(crate) fn gradient<R: Scalar>(
    policy: &Policy<'_, R>,
    loss: &Evaluator<'_>,
) -> Result<(LossSums<f64>, Evaluation<R>)> {
    let (config, batch) = (loss.config(), loss.batch());
    let (mut z, stats, mut out) = forward(config, policy, batch)?;
    let (n, v, rows, zero) = (batch.tokens(), policy.vocab, batch.active_rows(), R::from_f64(0.0));

    // The loss and its derivatives with respect to logp and entropy, from the rounded values that the caller gets.
    let active = |values: &[R]| rows.iter().map(|&i| values[i].to_f64()).collect::<Vec<_>>();
    let (mut g, mut e, mut totals) = (vec![0.0; rows.len()], vec![0.0; rows.len()], loss.totals());
    loss.evaluate(0..rows.len(), &active(&out.logp), &active(&out.entropy), &mut g, &mut e, &mut totals);
    out.magnitude = totals.magnitude();
    let sums = loss.finish(totals);

    // dL/dw_j = factors.logits (g factors.logp (1[j = y] - p_j) - e p_j (log p_j + H)), and dL/dz over the logits.
    for ((&i, row), (g, e)) in rows.iter().zip(&stats).zip(g.into_iter().zip(e)) {
        for (j, z) in z[i * v..(i + 1) * v].iter_mut().enumerate() {
            if !is_kept(batch.kept(i), j) {
                *z = zero;
                continue;
            }
            let (w, dw) = transformed(config, z.to_f64());
            let log_p = row.log_p(row.factors.logits * w);
            let p = log_p.exp();
            let by_logp = if j == row.target { -row.logp.exp_m1() } else { -p };
            let by_entropy = if p == 0.0 { 0.0 } else { -p * (log_p + row.entropy) };
            *z = R::from_f64(dw * row.factors.logits * (g * row.factors.logp * by_logp + e * by_entropy));
        }
    }

    // dH = dZ W, dW = dZ^T H, db = sum of dZ.
    if let PolicyOutput::Hidden { hidden, lm_head, bias } = policy.output {
        let h = lm_head.len() / v;
        out.grad_hidden = vec![zero; n * h];
        out.grad_lm_head = vec![zero; v * h];
        out.grad_bias = vec![zero; bias.map_or(0, <[R]>::len)];
        for &i in rows {
            let mut sums = vec![0.0; h];
            for (j, dz) in z[i * v..(i + 1) * v].iter().enumerate() {
                for (k, sum) in sums.iter_mut().enumerate() {
                    *sum += dz.to_f64() * lm_head[head_index(policy.layout, j, k, v, h)].to_f64();
                }
            }
            out.grad_hidden[i * h..(i + 1) * h].iter_mut().zip(sums).for_each(|(g, sum)| *g = R::from_f64(sum));
        }
        for j in 0..v {
            let mut sums = vec![0.0; h];
            for &i in rows {
                for (k, sum) in sums.iter_mut().enumerate() {
                    *sum += z[i * v + j].to_f64() * hidden[i * h + k].to_f64();
                }
            }
            for (k, sum) in sums.into_iter().enumerate() {
                out.grad_lm_head[head_index(policy.layout, j, k, v, h)] = R::from_f64(sum);
            }
            if let Some(g) = out.grad_bias.get_mut(j) {
                *g = R::from_f64(rows.iter().map(|i| z[i * v + j].to_f64()).sum());
            }
        }
    }
    out.grad_logits = z;
    Ok((sums, out))
}

/// Computes log-probabilities and entropies only: the forward pass of [`evaluate`].
///
/// # Errors
/// [`grpo_core::Error::Shape`] for lengths that do not match, [`grpo_core::Error::Value`] for a target outside the
/// vocabulary.
pub fn score<R: Scalar>(config: &LossConfig, policy: &Policy<'_, R>, batch: &TokenBatch) -> Result<Evaluation<R>> {
    Ok(forward(config, policy, batch)?.2)
}

/// Returns the logits `[N, V]`, the statistics of active rows, and logp and entropy in an otherwise empty evaluation.
fn forward<R: Scalar>(
    config: &LossConfig,
    policy: &Policy<'_, R>,
    batch: &TokenBatch,
) -> Result<(Vec<R>, Vec<Row>, Evaluation<R>)> {
    policy.check(batch)?;
    let (n, v, zero) = (batch.tokens(), policy.vocab, R::from_f64(0.0));
    let mut out = Evaluation { logp: vec![zero; n], entropy: vec![zero; n], ..Evaluation::default() };
    let mut z = dense(n, v)?;
    let mut stats = Vec::with_capacity(batch.active_tokens());
    for &i in batch.active_rows() {
        let row = &mut z[i * v..(i + 1) * v];
        match policy.output {
            PolicyOutput::Logits(logits) => row.copy_from_slice(&logits[i * v..(i + 1) * v]),
            PolicyOutput::Hidden { hidden, lm_head, bias } => {
                let h = lm_head.len() / v;
                for (j, z) in row.iter_mut().enumerate() {
                    let weight = |k| lm_head[head_index(policy.layout, j, k, v, h)].to_f64();
                    let dot: f64 = (0..h).map(|k| hidden[i * h + k].to_f64() * weight(k)).sum();
                    *z = R::from_f64(dot + bias.map_or(0.0, |b| b[j].to_f64()));
                }
            }
        }
        let factors = config.temperature_factors(batch.temperature(i));
        let row = Row::new(config, factors, row, batch.targets()[i], batch.kept(i));
        out.logp[i] = R::from_f64(row.factors.logp * row.logp);
        out.entropy[i] = R::from_f64(row.entropy);
        stats.push(row);
    }
    Ok((z, stats, out))
}

/// Returns w and dw/dz of a logit.
fn transformed(config: &LossConfig, z: f64) -> (f64, f64) {
    let u = config.logit_scale * z;
    match config.final_logit_softcapping {
        None => (u, config.logit_scale),
        Some(cap) => {
            let t = (u / cap).tanh();
            (cap * t, config.logit_scale * (1.0 - t * t))
        }
    }
}

/// Returns `true` if vocabulary entry `j` is among `kept`, or if all are.
fn is_kept(kept: Option<&[u32]>, j: usize) -> bool {
    kept.is_none_or(|ids| ids.binary_search(&(j as u32)).is_ok())
}

/// The statistics of one row of logits, in f64.
struct Row {
    factors: TemperatureFactors,
    target: usize,
    /// base + log_sum = log sum_j exp(z'_j).
    base: f64,
    log_sum: f64,
    /// log p_y, before its factor.
    logp: f64,
    entropy: f64,
}

impl Row {
    /// Computes the statistics over the ids `kept`; `None` for the whole vocabulary.
    fn new<R: Scalar>(
        config: &LossConfig,
        factors: TemperatureFactors,
        z: &[R],
        target: i64,
        kept: Option<&[u32]>,
    ) -> Self {
        // The caller has checked that the target is in the vocabulary.
        let target = target as usize;
        let scaled = |j: usize| match is_kept(kept, j) {
            true => factors.logits * transformed(config, z[j].to_f64()).0,
            false => f64::NEG_INFINITY,
        };
        // The target is excluded from the sum: log p_y = -softplus(lse_{j != y} - z'_y) keeps its precision if p_y
        // rounds to 1, and -expm1(log p_y) is then the exact 1 - p_y. With a vocabulary of one, the lse is -inf, and
        // log p_y = 0.
        let others = || (0..z.len()).filter(|j| *j != target).map(scaled);
        let max = others().fold(f64::NEG_INFINITY, f64::max);
        // If no other logit is finite, differences are NaN: -inf must add nothing, +inf and NaN give NaN.
        let sum: f64 = others().map(|z| if z == f64::NEG_INFINITY { 0.0 } else { (z - max).exp() }).sum();
        let lse_of_others = max + sum.ln();
        // With an infinite target, the probability is infinity over infinity: NaN, not 1.
        let margin = if scaled(target) == f64::INFINITY { f64::NAN } else { lse_of_others - scaled(target) };
        let rest = (-margin.abs()).exp().ln_1p();
        // lse = base + log_sum, kept apart: for large logits, their sum would lose log_sum to rounding.
        let (base, log_sum) = if margin > 0.0 { (max, sum.ln() + rest) } else { (scaled(target), rest) };
        let row = Self { factors, target, base, log_sum, logp: -(margin.max(0.0) + rest), entropy: 0.0 };
        let log_p = (0..z.len()).map(|j| row.log_p(scaled(j))).filter(|log_p| *log_p != f64::NEG_INFINITY);
        Self { entropy: -log_p.map(|log_p| log_p.exp() * log_p).sum::<f64>(), ..row }
    }

    /// Returns log p of an entry with the scaled logit `z`.
    fn log_p(&self, z: f64) -> f64 {
        (z - self.base) - self.log_sum
    }
}
