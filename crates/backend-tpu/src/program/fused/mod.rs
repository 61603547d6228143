//! The loss of hidden states x LM head without a full logits tensor.
//!
//! A loop holds one tile of the `[N, V]` logits and their gradient at a time.
//!
//! * Token chunks: C rows with the whole vocabulary. If the loss is per token, the derivative of a row is known as soon
//!   as its logits are, so the gradient is computed in the same iteration: three products. With a ratio per sequence,
//!   derivatives are known after all rows only, so the chunks are computed a second time: four products.
//! * Vocabulary panels: all rows with W columns. One loop for the statistics, one for the gradient: four products, but
//!   the head and its gradient are read once per loop instead of once per chunk.
//!
//! N and V need not be multiples of the tile: the last window is shifted to end at the edge, and entries that overlap
//! with another window are masked.
//!
//! Gradients are carried through the loop in the caller's donated buffers.
//!
//! Three choices determine the memory on a TPU: the target is found by comparing columns (no gather, no scatter over V), dlogits are
//! computed inside the operands of the products, and dL/dhead is carried in f32 and never cast within the program.
//!
//! On a mesh, every device has all tokens and its shard of the vocabulary in these loops. The partitioner reduces maxima,
//! sums and the target's logit over the devices, and the gradient of the hidden states of a tile.
//!
//! Legend: N tokens, V vocabulary, H hidden size, C tokens of a chunk, W columns of a panel.

mod panels;
mod window;

use super::blocking::Blocking;
use super::frame::{Frame, accumulate, pinned};
use super::pass::Pass;
use super::products::Head;
use super::role::Role;
use super::sampling_mask::kept;
use super::softmax::{Columns, Entries, Factors, RowGrad, Statistics, Tile};
use super::spec::{Spec, dtype};
use super::tokens::{TokenLoss, Tokens};
use super::transform::Transform;
use grpo_stablehlo::{Dtype, Reducer, TensorType, Value};
use panels::Panels;
use window::{Window, add_at, place, window, windows};

/// Computes the results of `pass` from the arguments in `frame`.
pub(super) fn results(spec: &Spec, frame: &Frame, pass: Pass, (hidden, head): (Value, Head)) -> Vec<(Role, Value)> {
    let (weight, bias) = (spec.in_loops(Role::LmHead, &head.weight), head.bias.as_ref());
    let head = Head { weight, bias: bias.map(|bias| spec.in_loops(Role::Bias, bias)), ..head };
    let fused = Fused {
        loss: spec.token_loss(|role| frame.argument(role)),
        transform: Transform::new(&spec.loss),
        roles: spec.accumulators(Pass::Gradient),
        hidden: spec.in_loops(Role::Hidden, &hidden),
        mask: frame.get(Role::SamplingMask).cloned(),
        n: spec.padded_tokens(),
        spec,
        head,
    };
    // Scoring runs the same operations as the loss, so that both see the same bits.
    let gradients = (pass != Pass::Score).then_some(frame);
    let mut results = match spec.blocking {
        Blocking::TokenChunks(c) if spec.loss.is_token_level() => fused.token_chunks(c, gradients),
        Blocking::TokenChunks(c) => fused.token_chunks_twice(c, gradients),
        Blocking::VocabPanels(w) => fused.vocab_panels(w, gradients),
    };
    if pass != Pass::Score {
        let (terms, _) = fused.loss.terms(&results[0].1, fused.known(&results[1].1));
        results.insert(0, (Role::Sums, fused.loss.sums(terms)));
    }
    results
}

/// The values that the loops read.
struct Fused<'a> {
    spec: &'a Spec,
    loss: TokenLoss,
    /// The hidden states, `[N, H]`.
    hidden: Value,
    /// The bits of the sampling mask, `[N, W]`.
    mask: Option<Value>,
    head: Head,
    /// The gradients that loops carry.
    roles: Vec<Role>,
    n: usize,
    transform: Transform,
}

/// A chunk of tokens, with its logits.
struct Chunk {
    window: Window,
    tokens: Tokens,
    /// The hidden states, `[C, H]`.
    rows: Value,
    factors: Factors,
    head: Head,
    tile: Tile,
}

impl Fused<'_> {
    fn zeros(&self) -> Value {
        self.hidden.builder().splat(0.0, TensorType::new(Dtype::F32, [self.n]))
    }

    /// Returns the chunk of `c` tokens of iteration `trip`, with logits of the whole vocabulary.
    fn chunk(&self, trip: &Value, c: usize) -> Chunk {
        let window = window(trip, self.n, c);
        let fresh = window.fresh.as_ref().unwrap_or(&window.start);
        let tokens = self.loss.tokens.chunk(&window.start, fresh, c);
        let rows = self.hidden.dynamic_slice(&[&window.start, &window.start.like(0)], &[c, self.hidden.shape()[1]]);
        let factors = tokens.factors(&self.spec.loss);
        let head = self.head.beside(&rows);
        let logits = pinned(self.spec, head.logits(self.spec, &rows));
        let bits = |mask: &Value| mask.dynamic_slice(&[&window.start, &window.start.like(0)], &[c, mask.shape()[1]]);
        let mask = self.mask.as_ref().map(|mask| kept(&bits(mask), logits.shape()[1]));
        let entries = Entries::all(&logits, self.spec.end_of_vocab()).only(mask);
        let tile = Tile::new(&logits, self.transform, &tokens.target, entries, &factors.logits);
        Chunk { window, tokens, rows, factors, head, tile }
    }

    fn statistics(&self, chunk: &Chunk) -> Statistics {
        chunk.tile.statistics(self.spec.numerics.entropy)
    }

    /// Returns the entropies for the loss, if they are computed.
    fn known<'v>(&self, entropy: &'v Value) -> Option<&'v Value> {
        self.spec.numerics.entropy.then_some(entropy)
    }

    /// Computes dL/dz of rows from dL/dlogp.
    fn row_grad(&self, statistics: &Statistics, factors: &Factors, dlogp: &Value, tokens: &Tokens) -> RowGrad {
        let row = statistics.row(&factors.logits);
        statistics.row_grad(&row, factors, dlogp, tokens.dentropy(&self.spec.loss).as_ref())
    }

    /// Computes dL/dlogits of a tile in the products' dtype; zeros in rows of masked tokens, for any content.
    fn dlogits(&self, tile: &Tile, row_grad: &RowGrad, tokens: &Tokens) -> Value {
        tile.gradient(row_grad, &tokens.active()).convert(dtype(self.spec.numerics.dlogits))
    }

    /// Returns the carried gradients `sums` plus the gradients of a chunk.
    fn add_chunk(&self, sums: &[Value], chunk: &Chunk, row_grad: &RowGrad) -> Vec<Value> {
        let Chunk { window, tokens, rows, head, tile, .. } = chunk;
        let dlogits = self.dlogits(tile, row_grad, tokens);
        let add = |(role, sum): (&Role, &Value)| match role {
            Role::GradHidden => add_at(sum, &head.hidden_gradient(&dlogits), &[&window.start, &window.start.like(0)]),
            Role::GradLmHead => accumulate(sum, &head.weight_gradient(&dlogits, &tokens.clean(rows))),
            _ => accumulate(sum, &dlogits.convert(Dtype::F32).reduce(Reducer::Add, &[0])),
        };
        self.roles.iter().zip(sums).map(add).collect()
    }

    /// Returns the initial values of gradients in a loop.
    fn begin(&self, frame: &Frame) -> Vec<Value> {
        self.roles.iter().map(|role| self.spec.in_loops(*role, &frame.argument(*role))).collect()
    }

    /// Returns the results: scores, then the gradients that a loop has carried.
    fn end(&self, carried: Vec<Value>) -> Vec<(Role, Value)> {
        let roles = [Role::Logp, Role::Entropy].into_iter().chain(self.roles.iter().copied());
        let end = |(role, value): (Role, Value)| (role, self.spec.stored(role, &self.spec.in_loops(role, &value)));
        roles.zip(carried).map(end).collect()
    }

    /// Loops over chunks of `c` tokens: scores, and gradients if `frame` is present.
    fn token_chunks(&self, c: usize, frame: Option<&Frame>) -> Vec<(Role, Value)> {
        let (trips, c, _) = windows(self.n, c);
        let grads = frame.map(|frame| self.begin(frame)).unwrap_or_default();
        let zero = self.zeros();
        let initial: Vec<&Value> = [&zero, &zero].into_iter().chain(&grads).collect();
        let carried = self.hidden.builder().for_loop(trips, &initial, |trip, carried| {
            let chunk = self.chunk(trip, c);
            let Chunk { tokens, factors, .. } = &chunk;
            let statistics = self.statistics(&chunk);
            let (logp, entropy) = statistics.row(&factors.logits).scores(&tokens.active(), factors);
            let sums = &carried[2..];
            let grads = if sums.is_empty() {
                vec![]
            } else {
                let (_, dlogp) = tokens.loss(&self.spec.loss, &logp, self.known(&entropy), |v| v.clone());
                self.add_chunk(sums, &chunk, &self.row_grad(&statistics, factors, &dlogp, tokens))
            };
            let scores =
                [(&carried[0], &logp), (&carried[1], &entropy)].map(|(all, part)| place(all, part, &chunk.window));
            scores.into_iter().chain(grads).collect()
        });
        self.end(carried)
    }

    /// Loops over chunks of `c` tokens: scores; and if `frame` is present, a second loop for gradients, because the
    /// derivative depends on all rows.
    fn token_chunks_twice(&self, c: usize, frame: Option<&Frame>) -> Vec<(Role, Value)> {
        let (trips, c, _) = windows(self.n, c);
        let (f, tokens) = (self.hidden.builder(), &self.loss.tokens);
        let empty = Statistics::empty(&self.zeros(), self.spec.numerics.entropy).to_list();
        let carried = f.for_loop(trips, &empty.iter().collect::<Vec<_>>(), |trip, carried| {
            let chunk = self.chunk(trip, c);
            let parts = self.statistics(&chunk).to_list();
            carried.iter().zip(&parts).map(|(all, part)| place(all, part, &chunk.window)).collect()
        });
        let (statistics, factors) = (Statistics::from_list(&carried), self.loss.factors());
        let (logp, entropy) = statistics.row(&factors.logits).scores(&tokens.active(), &factors);
        let Some(frame) = frame else { return self.end(vec![logp, entropy]) };
        let (_, dlogp) = self.loss.terms(&logp, self.known(&entropy));
        let row_grad = self.row_grad(&statistics, &factors, &dlogp, tokens);

        let grads = self.begin(frame);
        let carried = f.for_loop(trips, &grads.iter().collect::<Vec<_>>(), |trip, carried| {
            let chunk = self.chunk(trip, c);
            self.add_chunk(carried, &chunk, &row_grad.chunk(&chunk.window.start, c))
        });
        self.end([vec![logp, entropy], carried].concat())
    }

    /// Loops over panels of `w` columns of every device: statistics, then gradients if `frame` is present.
    fn vocab_panels(&self, w: usize, frame: Option<&Frame>) -> Vec<(Role, Value)> {
        let (vocab, shards) = (self.spec.padded_vocab(), self.head.vocab_shards());
        let (trips, w, _) = windows(vocab / shards, w);
        let panels = Panels::new(shards, w);
        let (tokens, f, factors) = (&self.loss.tokens, self.hidden.builder(), self.loss.factors());
        let tile = |trip: &Value| {
            let window = window(trip, vocab / shards, w);
            let head = panels.head(&self.head, &window.start);
            let logits = pinned(self.spec, head.logits(self.spec, &self.hidden));
            let mask = self.mask.as_ref().map(|mask| panels.kept(mask, &window, vocab));
            let entries = panels.entries(&logits, &window, vocab, self.spec.end_of_vocab()).only(mask);
            let tile = Tile::new(&logits, self.transform, &tokens.target, entries, &factors.logits);
            (tile, head, window.start)
        };
        let empty = Statistics::empty(&self.zeros(), self.spec.numerics.entropy).to_list();
        let carried = f.for_loop(trips, &empty.iter().collect::<Vec<_>>(), |trip, carried| {
            let part = tile(trip).0.statistics(self.spec.numerics.entropy);
            Statistics::from_list(carried).merge(&part, &factors.logits).to_list()
        });
        let statistics = Statistics::from_list(&carried);
        let (logp, entropy) = statistics.row(&factors.logits).scores(&tokens.active(), &factors);
        let Some(frame) = frame else { return self.end(vec![logp, entropy]) };
        let (_, dlogp) = self.loss.terms(&logp, self.known(&entropy));
        let row_grad = self.row_grad(&statistics, &factors, &dlogp, tokens);

        let grads = self.begin(frame);
        let carried = f.for_loop(trips, &grads.iter().collect::<Vec<_>>(), |trip, carried| {
            let (tile, head, start) = tile(trip);
            let dlogits = self.dlogits(&tile, &row_grad, tokens);
            let next = self.roles.iter().zip(carried).map(|(role, sum)| match role {
                Role::GradHidden => accumulate(sum, &head.hidden_gradient(&dlogits)),
                Role::GradLmHead => {
                    let part = head.weight_gradient(&dlogits, &tokens.clean(&self.hidden));
                    panels.add(sum, &part, head.vocab_dimension(), &start)
                }
                _ => panels.add(sum, &dlogits.convert(Dtype::F32).reduce(Reducer::Add, &[0]), 0, &start),
            });
            next.collect()
        });
        self.end([vec![logp, entropy], carried].concat())
    }
}
