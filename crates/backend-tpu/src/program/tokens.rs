//! The tokens of a batch in a program, and the loss over them.
//!
//! Tokens are passed as two small tables, replicated on every device. The loss itself is
//! [`grpo_core::objective::batch_loss`] on [`Traced`] values, without a second implementation here.
//!
//! Legend: N tokens.

use super::role::Role;
use super::softmax::{Factors, spread};
use super::spec::Spec;
use super::traced::Traced;
use grpo_core::backend_api::token_columns::{LossSums, Recorded, Reduction, TokenColumns};
use grpo_core::objective::batch_loss;
use grpo_core::{KlImportance, LossConfig, TemperatureMode};
use grpo_stablehlo::{Dtype, Reducer, TensorType, Value};
use std::sync::Arc;

/// The block size of token comparisons for f64 sums: libtpu took a minute to compile 4096 by 4096 at once.
const COMPARED: usize = 512;
/// The sequence id of masked tokens and of padding.
const OF_NOBODY: i64 = -1;

/// The tokens of a batch, or of a chunk. Every entry is `[N]`.
#[derive(Clone)]
pub(crate) struct Tokens {
    pub(crate) target: Value,
    sequence: Value,
    /// f32, the rows of the table in their order.
    columns: TokenColumns<Value>,
    /// A predicate: the batch has no old policy, so that the current policy is the old one.
    on_policy: Value,
}

/// The loss of the tokens of a batch, for a program that computes their log-probabilities.
pub struct TokenLoss {
    config: Arc<LossConfig>,
    pub(super) tokens: Tokens,
}

impl Spec {
    /// Returns the loss of the tokens. `argument` returns the program's arguments [`Role::TokenIds`],
    /// [`Role::TokenNumbers`] and [`Role::OnPolicy`].
    pub fn token_loss(&self, argument: impl Fn(Role) -> Value) -> TokenLoss {
        let [ids, numbers, on_policy] = [Role::TokenIds, Role::TokenNumbers, Role::OnPolicy].map(argument);
        let n = self.padded_tokens();
        let row = |table: &Value, row: usize| table.slice(&[row, 0], &[row + 1, n]).reshape(&[n]);
        let columns = TokenColumns::from_fn(|i| row(&numbers, i));
        let tokens = Tokens { target: row(&ids, 0), sequence: row(&ids, 1), columns, on_policy };
        TokenLoss { config: self.loss.clone(), tokens }
    }
}

impl TokenLoss {
    /// Returns the targets in the whole vocabulary, i32 `[N]`; -1 at masked tokens.
    pub fn targets(&self) -> &Value {
        &self.tokens.target
    }

    /// Returns predicates `[N]`: active tokens (mask = 1).
    pub fn active(&self) -> Value {
        self.tokens.active()
    }

    /// Returns the effect of every token's temperature.
    pub fn factors(&self) -> Factors {
        self.tokens.factors(&self.config)
    }

    /// Computes the results [`Role::Sums`] and dL/dlogp `[N]` from log-probabilities and entropies `[N]`, which are 0 at
    /// masked tokens.
    pub fn value_and_derivative(&self, logp: &Value, entropy: Option<&Value>) -> (Value, Value) {
        let (terms, dlogp) = self.terms(logp, entropy);
        (self.sums(terms), dlogp)
    }

    /// Computes the summands of the loss, and dL/dlogp.
    pub(super) fn terms(&self, logp: &Value, entropy: Option<&Value>) -> (LossSums<Value>, Value) {
        self.tokens.loss(&self.config, logp, entropy, |value| self.sequence_sum(value))
    }

    /// Gives every token the sum of `value` over the tokens of its sequence, in f64, because the exponential of a sum over
    /// a long sequence amplifies its rounding errors.
    ///
    /// Compares blocks of [`COMPARED`] tokens, because TPU code for f64, which consists of pairs of f32, grows faster
    /// than the number of tokens.
    fn sequence_sum(&self, value: &Value) -> Value {
        let n = value.shape()[0];
        if n <= COMPARED {
            return self.sum_of_own(&self.tokens.sequence, &value.convert(Dtype::F64));
        }
        let f = value.builder();
        let width = n.next_multiple_of(COMPARED);
        let padded = |list: &Value, with: Value| list.pad(&with, &[0], &[width - n]);
        let sequences = padded(&self.tokens.sequence, f.scalar(OF_NOBODY, Dtype::I32));
        let all = padded(value, f.scalar(0.0, value.dtype()));
        let none = f.splat(0.0, TensorType::new(Dtype::F64, [n]));
        let mut sums = f.for_loop(width / COMPARED, &[&none], |trip, sums| {
            let start = trip * trip.like(COMPARED as i64);
            let block = |list: &Value| list.dynamic_slice(&[&start], &[COMPARED]);
            vec![&sums[0] + self.sum_of_own(&block(&sequences), &block(&all).convert(Dtype::F64))]
        });
        sums.swap_remove(0)
    }

    /// Gives every token the sum of the `values` that belong to its sequence.
    ///
    /// Compares every pair of tokens, without a scatter, a sort or a bound on the number of sequences. N x N
    /// comparisons are few, compared with N x V logits, as long as N is much smaller than V.
    fn sum_of_own(&self, sequences: &Value, values: &Value) -> Value {
        let own = &self.tokens.sequence;
        let shape = [values.shape()[0], own.shape()[0]];
        let same = sequences.broadcast_in_dim(&shape, &[0]).eq(&own.broadcast_in_dim(&shape, &[1]));
        let values = values.broadcast_in_dim(&shape, &[0]);
        same.select(&values, &values.like(0.0)).reduce(Reducer::Add, &[0])
    }

    /// Reduces the summands of the loss over all tokens, in the order of the fields: f32
    /// `[LossSums::COUNT]`.
    pub(super) fn sums(&self, mut terms: LossSums<Value>) -> Value {
        let TokenColumns { share, clip_share, .. } = &self.tokens.columns;
        let active = self.active();
        for term in [&mut terms.low_clipped, &mut terms.high_clipped, &mut terms.statistic] {
            *term = &*term * clip_share;
        }
        // The share of clipped tokens: f32 is precise enough.
        for term in [&mut terms.low_min, &mut terms.high_max] {
            *term = self.sum_of_own(&self.tokens.sequence, &(&*term * share));
        }
        let terms_of_kind = |kind: Reduction| -> Vec<Value> {
            let terms = terms.iter().zip(LossSums::<Value>::REDUCTIONS.iter());
            terms.filter(|(_, reduction)| **reduction == kind).map(|(term, _)| term.clone()).collect()
        };
        let extremes = |kind: Reduction, none: f64, reducer: Reducer| {
            let rows: Vec<Value> = terms_of_kind(kind).iter().map(|v| active.select(v, &v.like(none))).collect();
            table(&rows).reduce(reducer, &[1])
        };
        // One reduction per kind; the entries of a kind are contiguous.
        let parts = [
            pairwise_sums(&table(&terms_of_kind(Reduction::Sum))),
            extremes(Reduction::Min, f64::INFINITY, Reducer::Min),
            extremes(Reduction::Max, f64::NEG_INFINITY, Reducer::Max),
        ];
        share.builder().concatenate(&parts.each_ref(), 0)
    }
}

impl Tokens {
    /// Returns predicates `[N]`: active tokens (mask = 1).
    pub(crate) fn active(&self) -> Value {
        self.target.ge(&self.target.like(0))
    }

    /// Returns the effect of every token's temperature.
    pub(crate) fn factors(&self, config: &LossConfig) -> Factors {
        let by = self.columns.reciprocal_temperature.clone();
        let one = by.like(1.0);
        match config.temperature_mode() {
            TemperatureMode::ScaleLogits => Factors { logits: by, logp: one },
            TemperatureMode::ScaleLogprobs => Factors { logits: one, logp: by },
        }
    }

    /// Returns `rows` `[N, _]` with zeros at masked tokens, which may hold anything.
    pub(crate) fn clean(&self, rows: &Value) -> Value {
        spread(&self.active(), rows).select(rows, &rows.like(0.0))
    }

    /// Returns `n` tokens from `start`; tokens before `fresh` get weight 0. Both are i32 scalars.
    pub(crate) fn chunk(&self, start: &Value, fresh: &Value, n: usize) -> Self {
        let take = |v: &Value| v.dynamic_slice(&[start], &[n]);
        let f = start.builder();
        let index = f.iota(0, TensorType::new(Dtype::I32, [n])) + start.broadcast_in_dim(&[n], &[]);
        let is_fresh = index.ge(&fresh.broadcast_in_dim(&[n], &[]));
        let target = take(&self.target);
        let mut columns = self.columns.map(take);
        // A token that another chunk counts gets weight 0, and share 0 in its sequence.
        let TokenColumns { policy_weight, kl_weight, nll_weight, entropy_weight, share, .. } = &mut columns;
        for weight in [policy_weight, kl_weight, nll_weight, entropy_weight, share] {
            *weight = is_fresh.select(weight, &weight.like(0.0));
        }
        Self {
            target: is_fresh.select(&target, &target.like(-1)),
            sequence: take(&self.sequence),
            columns,
            on_policy: self.on_policy.clone(),
        }
    }

    /// Computes the summands and dL/dlogp of these tokens, with `sequence_sum` as in [`batch_loss`].
    pub(crate) fn loss(
        &self,
        config: &LossConfig,
        logp: &Value,
        entropy: Option<&Value>,
        sequence_sum: impl Fn(&Value) -> Value,
    ) -> (LossSums<Value>, Value) {
        let on_policy = self.on_policy.broadcast_in_dim(logp.shape(), &[]);
        // In f64, as on the host: far from the reference, large terms of the derivative cancel, and f32 would lose all
        // precision. These are few operations per token, compared with V logits.
        let wide = |v: &Value| Traced::Value(v.convert(Dtype::F64));
        let old_logp = on_policy.select(logp, &self.columns.old_logp);
        let columns = TokenColumns { old_logp, ..self.columns.clone() }.map(wide);
        let recorded = Recorded {
            old: true,
            reference: config.beta != 0.0,
            sampler: config.kl_importance() == KlImportance::Sampler,
        };
        let like = logp.convert(Dtype::F64);
        let value = |v: &Traced| v.clone().into_value(&like).convert(Dtype::F32);
        let inputs = (&wide(logp), &entropy.map_or(Traced::Constant(0.0), wide));
        let (sums, dlogp) = batch_loss(config, &columns, recorded, inputs, |v| wide(&sequence_sum(&value(v))));
        (sums.map(value), value(&dlogp))
    }

    /// Returns dL/dentropy of every token; `None` if the loss has no entropy bonus.
    pub(crate) fn dentropy(&self, config: &LossConfig) -> Option<Value> {
        (config.entropy_coef != 0.0).then(|| -&self.columns.entropy_weight)
    }
}

/// Stacks vectors `[N]` as the rows of a table.
fn table(rows: &[Value]) -> Value {
    let rows: Vec<Value> = rows.iter().map(|v| v.reshape(&[1, v.shape()[0]])).collect();
    rows[0].builder().concatenate(&rows.iter().collect::<Vec<_>>(), 0)
}

/// Sums the rows of a table `[R, N]` in two levels, so that the rounding error hardly grows with N.
fn pairwise_sums(values: &Value) -> Value {
    const WIDTH: usize = 128;
    let [r, n] = [values.shape()[0], values.shape()[1]];
    let parts = n.div_ceil(WIDTH);
    let zero = values.builder().scalar(0.0, values.dtype());
    let padded = values.pad(&zero, &[0, 0], &[0, parts * WIDTH - n]);
    padded.reshape(&[r, parts, WIDTH]).reduce(Reducer::Add, &[2]).reduce(Reducer::Add, &[1])
}
