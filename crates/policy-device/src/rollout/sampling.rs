//! How the next token is chosen in a program: the processors of [`LogitsProcessors`], Gumbel-max or the largest, and the
//! log-probability of what was chosen.
//!
//! Legend: B rows, V vocabulary.

use super::threefry::gumbel_values;
use crate::decoder::Broadcast;
use policy::{LogitsProcessors, Sampling};
use stablehlo::{Builder, Comparison, Dtype, Number, Reducer, TensorType, Value};

/// The parts of sampling that a program has; their numbers are arguments of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Sampler {
    pub(crate) greedy: bool,
    pub(crate) repetition_penalty: bool,
    pub(crate) top_k: bool,
    pub(crate) top_p: bool,
    pub(crate) min_p: bool,
}

/// The numbers of sampling: temperature, repetition penalty, top_p, min_p.
pub(crate) const NUMBERS: usize = 4;

impl Sampler {
    /// What a request asks for, in a vocabulary of `vocab`: the parts, their numbers, and top_k.
    pub(crate) fn of(sampling: &Sampling, vocab: usize) -> (Self, [f32; NUMBERS], i32) {
        let (greedy, temperature, processors) = match sampling {
            Sampling::Greedy => (true, 1.0, LogitsProcessors::default()),
            Sampling::Random { temperature, processors, .. } => (false, *temperature, *processors),
        };
        let LogitsProcessors { repetition_penalty, top_k, top_p, min_p } = processors;
        let top_k = top_k.filter(|k| (1..vocab).contains(k));
        let top_p = top_p.filter(|p| *p < 1.0);
        let min_p = min_p.filter(|share| *share > 0.0);
        let parts = Self {
            greedy,
            repetition_penalty: processors.penalises_repetition(),
            top_k: top_k.is_some(),
            top_p: top_p.is_some(),
            min_p: min_p.is_some(),
        };
        let numbers = [temperature, repetition_penalty.unwrap_or(1.0), top_p.unwrap_or(1.0), min_p.unwrap_or(0.0)];
        (parts, numbers.map(|number| number as f32), top_k.map_or(0, |k| k as i32))
    }
}

/// The arguments of sampling.
pub(crate) struct SamplerValues {
    /// `[NUMBERS]`, f32.
    numbers: Value,
    /// A scalar, i32.
    top_k: Value,
}

impl SamplerValues {
    /// Declares them as the next arguments of a program.
    pub(crate) fn arguments(f: &Builder) -> Self {
        let numbers = f.argument("sampling", TensorType::new(Dtype::F32, [NUMBERS]));
        Self { numbers, top_k: f.argument("top_k", TensorType::scalar(Dtype::I32)) }
    }

    /// The number at `index`, everywhere.
    fn number(&self, index: usize, like: &Value) -> Value {
        self.numbers.slice(&[index], &[index + 1]).reshape(&[]).broadcast_in_dim(like.shape(), &[])
    }
}

/// What was chosen for every row.
pub(crate) struct Chosen {
    /// Token ids `[B]`, i32; V where the scores are NaN.
    pub(crate) ids: Value,
    /// Log-probabilities `[B]`, f32; not finite where the scores are not.
    pub(crate) logps: Value,
}

impl Sampler {
    /// Chooses a token for every row of `logits` `[B, V]`, f32. `keys` `[B, 2]` and `positions` `[B]` say what is drawn; `seen`
    /// `[B, V]` are the tokens that the repetition penalty is for.
    pub(crate) fn choose(
        self,
        logits: &Value,
        arguments: &SamplerValues,
        keys: &Value,
        positions: &Value,
        seen: Option<&Value>,
    ) -> Chosen {
        let scores = self.scores(logits, arguments, seen);
        let noisy = match self.greedy {
            true => scores.clone(),
            false => &scores + gumbel_values(keys, positions, logits.shape()[1]),
        };
        let tokens = tokens(logits);
        let ids = smallest(&noisy.eq(&noisy.reduce(Reducer::Max, &[1]).along_first(&noisy)), &tokens);
        let chosen = tokens.eq(&ids.along_first(&tokens)).select(&scores, &scores.like(0.0)).reduce(Reducer::Add, &[1]);
        let max = scores.reduce(Reducer::Max, &[1]);
        let sum = (&scores - max.along_first(&scores)).exp().reduce(Reducer::Add, &[1]);
        Chosen { logps: chosen - max - sum.log(), ids }
    }

    /// The scores `[B, V]` of `logits`, as [`LogitsProcessors::scores`] defines them, in f32.
    pub(crate) fn scores(self, logits: &Value, arguments: &SamplerValues, seen: Option<&Value>) -> Value {
        let number = |index| arguments.number(index, logits);
        let mut scores = logits.clone();
        if let Some(seen) = seen.filter(|_| self.repetition_penalty) {
            let penalty = number(1);
            let negative = scores.lt(&scores.like(0.0));
            scores = seen.select(&negative.select(&(&scores * &penalty), &(&scores / &penalty)), &scores);
        }
        if !self.greedy {
            scores = &scores / number(0);
        }
        let leave_out = |scores: &Value, kept: &Value| kept.select(scores, &scores.like(f64::NEG_INFINITY));
        if self.top_k {
            let edge = top_k_edge(&scores, &arguments.top_k);
            scores = leave_out(&scores, &scores.ge(&edge.along_first(&scores)));
        }
        if self.top_p {
            scores = leave_out(&scores, &nucleus(&scores, &number(2)));
        }
        if self.min_p {
            let shares = (&scores - scores.reduce(Reducer::Max, &[1]).along_first(&scores)).exp();
            scores = leave_out(&scores, &shares.ge(&number(3)));
        }
        scores
    }
}

/// The token of every column: `[B, V]`, i32.
fn tokens(like: &Value) -> Value {
    like.builder().iota(1, like.ty().with_dtype(Dtype::I32))
}

/// The smallest token of every row for which `hit` holds: `[B]`; V where there is none.
fn smallest(hit: &Value, tokens: &Value) -> Value {
    hit.select(tokens, &tokens.like(tokens.shape()[1] as i64)).reduce(Reducer::Min, &[1])
}

/// u32 numbers that are in the order of `scores`, f32: a float's bits with the sign turned, all of them where it is negative.
fn ordered(scores: &Value) -> Value {
    let bits = scores.bitcast_convert(Dtype::U32);
    let negative = bits.ge(&bits.like(SIGN));
    negative.select(&!&bits, &(&bits | bits.like(SIGN)))
}

const SIGN: i64 = 1 << 31;

/// The largest number of `bits` bits per row, `[B]` of `dtype`, for which `holds`, which it does for 0 and for all numbers below the
/// one that is sought.
fn bisect(like: &Value, bits: usize, dtype: Dtype, holds: impl FnOnce(&Value) -> Value) -> Value {
    let f = like.builder();
    let zero = f.splat(Number::Int(0), TensorType::new(dtype, [like.shape()[0]]));
    let first = f.scalar(1_i64 << (bits - 1), Dtype::U32);
    let found = f.for_loop(bits, &[&first, &zero], |_, carried| {
        let (bit, found) = (&carried[0], &carried[1]);
        let candidate = found | bit.convert(dtype).broadcast_in_dim(found.shape(), &[]);
        let next = holds(&candidate).select(&candidate, found);
        vec![bit / bit.like(2), next]
    });
    found[1].clone()
}

/// The k-th largest score of every row, `[B]`: exact, by the bits of its order.
fn top_k_edge(scores: &Value, k: &Value) -> Value {
    let keys = ordered(scores);
    let edge = bisect(scores, 32, Dtype::U32, |candidate| {
        let count = keys.ge(&candidate.along_first(&keys)).convert(Dtype::I32).reduce(Reducer::Add, &[1]);
        count.ge(&k.broadcast_in_dim(count.shape(), &[]))
    });
    // Back from the order to the float.
    let positive = edge.ge(&edge.like(SIGN));
    positive.select(&(&edge & edge.like(SIGN - 1)), &!&edge).bitcast_convert(Dtype::F32)
}

/// The tokens that top_p leaves, `[B, V]`: without the least likely ones whose probabilities add up to at most 1 - p; of those at the
/// edge that are equally likely, the smallest ids go first. The most likely one stays.
fn nucleus(scores: &Value, p: &Value) -> Value {
    let max = scores.reduce(Reducer::Max, &[1]).along_first(scores);
    let shares = (scores - &max).exp();
    let sum_where = |hit: &Value| hit.select(&shares, &shares.like(0.0)).reduce(Reducer::Add, &[1]);
    let p = p.slice(&[0, 0], &[scores.shape()[0], 1]).reshape(&[scores.shape()[0]]);
    let limit = (p.like(1.0) - &p) * shares.reduce(Reducer::Add, &[1]);
    let (keys, tokens) = (ordered(scores), tokens(scores));
    let edge =
        bisect(scores, 32, Dtype::U32, |candidate| sum_where(&keys.lt(&candidate.along_first(&keys))).le(&limit));
    let edge = edge.along_first(&keys);
    let (below, at_edge) = (keys.lt(&edge), keys.eq(&edge));
    let bits = (usize::BITS - scores.shape()[1].leading_zeros()) as usize;
    let first = bisect(scores, bits, Dtype::I32, |candidate| {
        let earlier = tokens.lt(&candidate.along_first(&tokens));
        sum_where(&(&below | &at_edge & earlier)).le(&limit)
    });
    let kept = keys.compare(Comparison::Gt, &edge) | &at_edge & tokens.ge(&first.along_first(&tokens));
    // The last of the most likely ones.
    let best = scores.eq(&max).select(&tokens, &tokens.like(-1)).reduce(Reducer::Max, &[1]);
    kept | tokens.eq(&best.along_first(&tokens))
}
