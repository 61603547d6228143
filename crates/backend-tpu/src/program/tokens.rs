//! What a program knows of the tokens, and the loss over them.
//!
//! Tokens travel as two small tables, whole on every device; a device reads its own rows. The loss itself is
//! [`grpo_core::vectors::batch_loss`] on [`Traced`] values: nothing of it is repeated here.
//!
//! Legend: N tokens of a device, G tokens of all devices (data ranks x N).

use super::head::{Factors, spread};
use super::mesh::Position;
use super::traced::Traced;
use grpo_core::vectors::{BatchLoss, BatchTerms, batch_loss};
use grpo_core::{KlImportance, LossConfig, TemperatureMode};
use stablehlo::{Dtype, Reducer, TensorType, Value};
use std::ops::RangeInclusive;

/// Rows of the table of numbers, f32 `[NUMBERS, G]`.
pub(crate) const NUMBERS: usize = 16;
/// Rows of weights and of the share, which a token that another chunk counts has not.
const WEIGHTS: RangeInclusive<usize> = 1..=SHARE;
/// The row that holds the weight of the negative log-likelihood.
const NLL_WEIGHT: usize = 4;
/// The row that holds 1 / active tokens of the sequence.
const SHARE: usize = 5;
/// The row that holds what a clipped token counts.
const OF_CLIP: usize = 8;
/// The row that holds 1/T of every token.
pub(crate) const RECIPROCAL_TEMPERATURE: usize = NUMBERS - 1;
/// Rows of the table of ids, i32 `[IDS, G]`: target (-1 at masked tokens), sequence.
pub(crate) const IDS: usize = 2;
/// Entries of the result `sums`.
pub(crate) const SUMS: usize = ADDED + 2 * EXTREMES;
/// Those that are added up, and those of which there is a smallest and a largest.
const ADDED: usize = 11;
const EXTREMES: usize = 2;

/// Tokens of a device, or a chunk of them. Every entry `[N]`.
#[derive(Clone)]
pub(crate) struct Tokens {
    pub(crate) target: Value,
    sequence: Value,
    /// Advantage, weights of policy, KL (beta included), entropy and negative log-likelihood (its coefficient included), share,
    /// old logp, ref logp, what a clipped token counts, the token's own advantage, [`grpo_core::factors::TokenFactors`]
    /// (policy, part, penalised, shift), sampler logp, 1/T.
    numbers: Vec<Value>,
    /// A predicate: there is no old policy but the policy itself.
    on_policy: Value,
}

/// The tables, as arguments of a program.
pub(crate) struct Tables {
    pub(crate) ids: Value,
    pub(crate) numbers: Value,
    pub(crate) on_policy: Value,
}

impl Tables {
    /// The `n` tokens of this device.
    pub(crate) fn local(&self, position: &Position, n: usize) -> Tokens {
        let first = position.first_token(n);
        let zero = first.like(0);
        let row = |table: &Value, row: usize| {
            let whole = table.slice(&[row, 0], &[row + 1, table.shape()[1]]);
            whole.dynamic_slice(&[&zero, &first], &[1, n]).reshape(&[n])
        };
        Tokens {
            target: row(&self.ids, 0),
            sequence: row(&self.ids, 1),
            numbers: (0..NUMBERS).map(|i| row(&self.numbers, i)).collect(),
            on_policy: self.on_policy.clone(),
        }
    }
}

impl Tokens {
    /// Predicates `[N]`: tokens that count.
    pub(crate) fn active(&self) -> Value {
        self.target.ge(&self.target.like(0))
    }

    /// What the temperature of every token multiplies.
    pub(crate) fn factors(&self, config: &LossConfig) -> Factors {
        let by = self.numbers[RECIPROCAL_TEMPERATURE].clone();
        let one = by.like(1.0);
        match config.temperature_mode() {
            TemperatureMode::ScaleLogits => Factors { logits: by, logp: one },
            TemperatureMode::ScaleLogprobs => Factors { logits: one, logp: by },
        }
    }

    /// `rows` `[N, _]` with zeros at masked tokens, which may hold anything.
    pub(crate) fn clean(&self, rows: &Value) -> Value {
        spread(&self.active(), rows).select(rows, &rows.like(0.0))
    }

    /// The `n` tokens from `start` on, of which those before `fresh` (i32 scalars) count no more.
    pub(crate) fn chunk(&self, start: &Value, fresh: &Value, n: usize) -> Self {
        let take = |v: &Value| v.dynamic_slice(&[start], &[n]);
        let f = start.builder();
        let index = f.iota(0, TensorType::new(Dtype::I32, [n])) + start.broadcast_in_dim(&[n], &[]);
        let is_fresh = index.ge(&fresh.broadcast_in_dim(&[n], &[]));
        let target = take(&self.target);
        let numbers = self.numbers.iter().map(take).enumerate().map(|(i, v)| match i {
            i if WEIGHTS.contains(&i) => is_fresh.select(&v, &v.like(0.0)),
            _ => v,
        });
        Self {
            target: is_fresh.select(&target, &target.like(-1)),
            sequence: take(&self.sequence),
            numbers: numbers.collect(),
            on_policy: self.on_policy.clone(),
        }
    }

    /// The loss of these tokens. `sequence_sum` as [`batch_loss`] has it.
    pub(crate) fn loss(
        &self,
        config: &LossConfig,
        logp: &Value,
        entropy: Option<&Value>,
        sequence_sum: impl Fn(&Value) -> Value,
    ) -> BatchLoss<Value> {
        let [
            advantage,
            weight,
            kl_weight,
            entropy_weight,
            nll_weight,
            share,
            old,
            reference,
            _,
            direction,
            factor,
            part,
            penalised,
            shift,
            sampler,
            _,
        ] = &self.numbers[..]
        else {
            unreachable!("the table has {NUMBERS} rows")
        };
        let on_policy = self.on_policy.broadcast_in_dim(logp.shape(), &[]);
        // In f64, as on the host: far from the reference the large parts of a slope cancel, and f32 has nothing left. These
        // are a few operations per token beside V logits.
        let wide = |v: &Value| Traced::Value(v.convert(Dtype::F64));
        let terms = BatchTerms {
            logp: wide(logp),
            entropy: entropy.map_or(Traced::Constant(0.0), wide),
            old_logp: Some(wide(&on_policy.select(logp, old))),
            ref_logp: (config.beta != 0.0).then(|| wide(reference)),
            sampler_logp: (config.kl_importance() == KlImportance::Sampler).then(|| wide(sampler)),
            advantage: wide(advantage),
            weight: wide(weight),
            kl_weight: wide(kl_weight),
            nll_weight: wide(nll_weight),
            factor: wide(factor),
            direction: wide(direction),
            part: wide(part),
            penalised: wide(penalised),
            shift: wide(shift),
            entropy_weight: wide(entropy_weight),
            share: wide(share),
        };
        let like = logp.convert(Dtype::F64);
        let value = |v: Traced| v.into_value(&like).convert(Dtype::F32);
        let loss = batch_loss(config, &terms, |v| wide(&sequence_sum(&value(v.clone()))));
        BatchLoss {
            loss: value(loss.loss),
            policy: value(loss.policy),
            dlogp: value(loss.dlogp),
            dentropy: value(loss.dentropy),
            kl: loss.kl.map(value),
            low_clipped: value(loss.low_clipped),
            high_clipped: value(loss.high_clipped),
            dual_clipped: value(loss.dual_clipped),
            ratio: value(loss.ratio),
            log_ratio: loss.log_ratio.map(value),
            nll: value(loss.nll),
            phi: loss.phi.map(value),
        }
    }

    /// Gives every token of this device the sum of `value` over the tokens of its sequence on all data ranks.
    ///
    /// Compares every pair of tokens: no scatter, no sort, no bound on the number of sequences, and N x G comparisons are
    /// few beside N x V logits while N is. What travels between devices is f32; it is added up in f64, because the exponential
    /// of a sum over a long sequence shows every digit that the sum has lost.
    pub(crate) fn sequence_sum(&self, position: &Position, sequences: &Value, value: &Value) -> Value {
        let all = position.gather_tokens(value);
        let shape = [value.shape()[0], all.shape()[0]];
        let same = self.sequence.broadcast_in_dim(&shape, &[0]).eq(&sequences.broadcast_in_dim(&shape, &[1]));
        let all = all.convert(Dtype::F64).broadcast_in_dim(&shape, &[1]);
        same.select(&all, &all.like(0.0)).reduce(Reducer::Add, &[1])
    }

    /// [`grpo_core::evaluate::Sums`] over all tokens of all devices, as [`crate::plan`] reads them: f32 `[SUMS]`.
    pub(crate) fn sums(
        &self,
        position: &Position,
        sequences: &Value,
        loss: &BatchLoss<Value>,
        entropy: Option<&Value>,
    ) -> Value {
        let (share, of_clip, nll_weight) = (&self.numbers[SHARE], &self.numbers[OF_CLIP], &self.numbers[NLL_WEIGHT]);
        let active = self.active();
        let zero = share.like(0.0);
        let part = |v: &Value| self.sequence_sum(position, sequences, &(v * share)).convert(Dtype::F32);
        let added: [Value; ADDED] = [
            loss.loss.clone(),
            loss.policy.clone(),
            loss.kl.clone().unwrap_or_else(|| zero.clone()),
            entropy.map_or_else(|| zero.clone(), |e| active.select(e, &zero)),
            &loss.low_clipped * of_clip,
            &loss.high_clipped * of_clip,
            loss.phi.as_ref().map_or_else(|| zero.clone(), |phi| phi * of_clip),
            nll_weight.gt(&zero).select(&loss.nll, &zero),
            loss.log_ratio.clone().unwrap_or_else(|| zero.clone()),
            loss.ratio.clone(),
            loss.dual_clipped.clone(),
        ];
        let extremes = |rows: [Value; EXTREMES], none: f64, reducer: Reducer| {
            let rows = rows.map(|v| active.select(&v, &v.like(none)));
            position.over_data(&table(&rows).reduce(reducer, &[1]), reducer)
        };
        // One collective for each kind, whatever the number of entries.
        let parts = [
            position.over_data(&pairwise_sums(&table(&added)), Reducer::Add),
            extremes([part(&loss.low_clipped), loss.ratio.clone()], f64::INFINITY, Reducer::Min),
            extremes([part(&loss.high_clipped), loss.ratio.clone()], f64::NEG_INFINITY, Reducer::Max),
        ];
        share.builder().concatenate(&parts.each_ref(), 0)
    }
}

/// Vectors `[N]` as the rows of a table.
fn table(rows: &[Value]) -> Value {
    let rows: Vec<Value> = rows.iter().map(|v| v.reshape(&[1, v.shape()[0]])).collect();
    rows[0].builder().concatenate(&rows.iter().collect::<Vec<_>>(), 0)
}

/// Sums over the rows of a table `[R, N]` in two levels, whose rounding error hardly grows with N.
fn pairwise_sums(values: &Value) -> Value {
    const WIDTH: usize = 128;
    let [r, n] = [values.shape()[0], values.shape()[1]];
    let parts = n.div_ceil(WIDTH);
    let zero = values.builder().scalar(0.0, values.dtype());
    let padded = values.pad(&zero, &[0, 0], &[0, parts * WIDTH - n]);
    padded.reshape(&[r, parts, WIDTH]).reduce(Reducer::Add, &[2]).reduce(Reducer::Add, &[1])
}
