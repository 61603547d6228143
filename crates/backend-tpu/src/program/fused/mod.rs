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
//! Legend: N tokens, V vocabulary of this device, H hidden size, C tokens of a chunk, W columns of a panel.

mod window;

use super::blocking::Blocking;
use super::frame::{Frame, accumulate, pinned};
use super::kind::Pass;
use super::mesh::MeshCoord;
use super::products::Head;
use super::role::Role;
use super::softmax::{Columns, Factors, Row, RowGrad, Statistics, Tile};
use super::spec::{Spec, dtype};
use super::tokens::Tokens;
use super::transform::Transform;
use grpo_core::backend_api::token_columns::LossSums;
use grpo_core::{HeadLayout, PolicySpec};
use stablehlo::{Dtype, Reducer, TensorType, Value};
use window::{Window, add_at, place, window, windows};

/// Computes the results of `pass` from the arguments in `frame`.
pub(super) fn results(spec: &Spec, frame: &Frame, pass: Pass) -> Vec<(Role, Value)> {
    let fused = Fused::new(spec, frame);
    // Scoring runs the same operations as the loss, so that both see the same bits.
    let gradients = (pass != Pass::Score).then_some(frame);
    let mut results = match spec.blocking {
        Blocking::TokenChunks(c) if spec.loss.is_token_level() => fused.token_chunks(c, gradients),
        Blocking::TokenChunks(c) => fused.token_chunks_twice(c, gradients),
        Blocking::VocabPanels(w) => fused.vocab_panels(w, gradients),
    };
    if pass != Pass::Score {
        let (terms, _) = fused.loss(&results[0].1, &results[1].1);
        results.insert(0, (Role::Sums, fused.tokens.sums(&fused.coord, &fused.sequences, terms)));
    }
    results
}

/// The values that the loops read.
struct Fused<'a> {
    spec: &'a Spec,
    coord: MeshCoord,
    /// The tokens of this device; `sequences` has the sequences of all tokens.
    tokens: Tokens,
    sequences: Value,
    /// The hidden states of this device, `[N, H]`.
    hidden: Value,
    head: Head,
    /// The index of this device's first column; `end_column` is the vocabulary of all devices. Both are i32 scalars.
    first_column: Value,
    end_column: Value,
    n: usize,
    v: usize,
    transform: Transform,
}

impl<'a> Fused<'a> {
    fn new(spec: &'a Spec, frame: &Frame) -> Self {
        let (n, v) = (spec.local_tokens(), spec.local_vocab());
        let coord = MeshCoord::new(&frame.f, spec.mesh);
        let tables = frame.tables();
        let g = spec.padded_tokens();
        let layout = match spec.policy {
            PolicySpec::Hidden { layout, .. } => layout,
            PolicySpec::Logits { .. } => HeadLayout::VocabHidden,
        };
        Self {
            tokens: tables.local(&coord, n),
            sequences: tables.ids.slice(&[1, 0], &[2, g]).reshape(&[g]),
            hidden: frame.argument(Role::Hidden),
            head: Head {
                weight: frame.argument(Role::LmHead),
                bias: frame.get(Role::Bias).cloned(),
                layout,
                split: frame.split(),
            },
            first_column: coord.first_column(v),
            end_column: frame.f.scalar(spec.policy.vocab() as i64, Dtype::I32),
            transform: Transform::new(&spec.loss),
            spec,
            coord,
            n,
            v,
        }
    }

    fn vector(&self, number: f64) -> Value {
        self.hidden.builder().splat(number, TensorType::new(Dtype::F32, [self.n]))
    }

    /// Returns the tokens and hidden states of the chunk at `window`.
    fn chunk(&self, window: &Window, c: usize) -> (Tokens, Value) {
        let fresh = window.fresh.as_ref().unwrap_or(&window.start);
        let tokens = self.tokens.chunk(&window.start, fresh, c);
        let rows = self.hidden.dynamic_slice(&[&window.start, &window.start.like(0)], &[c, self.hidden.shape()[1]]);
        (tokens, rows)
    }

    fn factors(&self, tokens: &Tokens) -> Factors {
        tokens.factors(&self.spec.loss)
    }

    /// Computes the logits of `rows` with the whole vocabulary of this device.
    fn tile(&self, head: &Head, rows: &Value, tokens: &Tokens, factors: &Factors) -> Tile {
        let logits = pinned(self.spec, head.logits(self.spec, rows));
        let limits = self.spec.pads_vocab().then_some((&self.first_column, &self.end_column));
        Tile::new(&logits, self.transform, &tokens.target, &self.first_column, limits, &factors.logits)
    }

    fn statistics(&self, tile: &Tile, factors: &Factors) -> Statistics {
        tile.statistics(self.spec.numerics.entropy).over_vocab(&self.coord, &factors.logits)
    }

    /// Returns logp and entropy for the loss: 0 at masked tokens.
    fn scores(&self, row: &Row, tokens: &Tokens, factors: &Factors) -> (Value, Value) {
        let active = tokens.active();
        let zero = row.logp.like(0.0);
        let logp = active.select(&(&row.logp * &factors.logp), &zero);
        let entropy = row.entropy.as_ref().map_or(zero.clone(), |e| active.select(e, &zero));
        (logp, entropy)
    }

    fn loss(&self, logp: &Value, entropy: &Value) -> (LossSums<Value>, Value) {
        self.tokens.loss(&self.spec.loss, logp, self.spec.numerics.entropy.then_some(entropy), |v| {
            self.tokens.sequence_sum(&self.coord, &self.sequences, v)
        })
    }

    /// Computes dL/dz of rows from dL/dlogp.
    fn row_grad(&self, statistics: &Statistics, factors: &Factors, dlogp: &Value, tokens: &Tokens) -> RowGrad {
        let row = statistics.row(&factors.logits);
        let dentropy = (self.spec.loss.entropy_coef != 0.0).then(|| tokens.dentropy());
        statistics.row_grad(&row, factors, dlogp, dentropy.as_ref())
    }

    /// Computes dL/dlogits of a tile in the products' dtype; zeros in rows of masked tokens, for any content.
    fn dlogits(&self, tile: &Tile, row_grad: &RowGrad, tokens: &Tokens) -> Value {
        tile.gradient(row_grad, &tokens.active()).convert(dtype(self.spec.numerics.dlogits))
    }

    /// Adds the gradients of a chunk to the carried ones.
    fn add_chunk(
        &self,
        head: &Head,
        grads: &mut [(Role, Value)],
        dlogits: &Value,
        rows: &Value,
        tokens: &Tokens,
        start: &Value,
    ) {
        for (role, sum) in grads {
            *sum = match role {
                Role::GradHidden => {
                    let dh = self.coord.over_vocab(&head.hidden_gradient(dlogits), Reducer::Add);
                    let at = [start, &start.like(0)];
                    add_at(sum, &dh, &at)
                }
                Role::GradLmHead => accumulate(sum, &head.weight_gradient(dlogits, &tokens.clean(rows))),
                _ => accumulate(sum, &dlogits.convert(Dtype::F32).reduce(Reducer::Add, &[0])),
            };
        }
    }

    /// Returns the initial values of carried gradients. If they are all-reduced over data later, the caller's sum
    /// counts once.
    fn begin(&self, frame: &Frame) -> Vec<(Role, Value)> {
        let roles = self.spec.accumulators(Pass::Gradient).into_iter();
        let once = |role, value| if role == Role::GradHidden { value } else { self.coord.once(&value) };
        roles.map(|role| (role, once(role, frame.argument(role)))).collect()
    }

    /// Returns the final gradients, reduced over data.
    fn end(&self, grads: Vec<(Role, Value)>) -> impl Iterator<Item = (Role, Value)> {
        grads.into_iter().map(|(role, value)| match role {
            Role::GradHidden => (role, value),
            _ => (role, self.coord.over_data(&value, Reducer::Add)),
        })
    }

    /// Loops over chunks of `c` tokens: scores, and gradients if `frame` is present.
    fn token_chunks(&self, c: usize, frame: Option<&Frame>) -> Vec<(Role, Value)> {
        let (trips, c, _) = windows(self.n, c);
        let grads = frame.map(|frame| self.begin(frame)).unwrap_or_default();
        let zero = self.vector(0.0);
        let initial: Vec<&Value> = [&zero, &zero].into_iter().chain(grads.iter().map(|(_, v)| v)).collect();
        let carried = self.hidden.builder().for_loop(trips, &initial, |trip, carried| {
            let window = window(trip, self.n, c);
            let (tokens, rows) = self.chunk(&window, c);
            let factors = self.factors(&tokens);
            let head = self.head.beside(&rows);
            let tile = self.tile(&head, &rows, &tokens, &factors);
            let statistics = self.statistics(&tile, &factors);
            let (logp, entropy) = self.scores(&statistics.row(&factors.logits), &tokens, &factors);
            let mut grads: Vec<(Role, Value)> =
                grads.iter().zip(&carried[2..]).map(|((role, _), v)| (*role, v.clone())).collect();
            if !grads.is_empty() {
                let known = self.spec.numerics.entropy.then_some(&entropy);
                let (_, dlogp) = tokens.loss(&self.spec.loss, &logp, known, |v| v.clone());
                let row_grad = self.row_grad(&statistics, &factors, &dlogp, &tokens);
                let dlogits = self.dlogits(&tile, &row_grad, &tokens);
                self.add_chunk(&head, &mut grads, &dlogits, &rows, &tokens, &window.start);
            }
            let scores = [(&carried[0], &logp), (&carried[1], &entropy)].map(|(all, part)| place(all, part, &window));
            scores.into_iter().chain(grads.into_iter().map(|(_, v)| v)).collect()
        });
        self.results(&carried, &grads)
    }

    /// Loops over chunks of `c` tokens: scores; and if `frame` is present, a second loop for gradients, because the
    /// derivative depends on all rows.
    fn token_chunks_twice(&self, c: usize, frame: Option<&Frame>) -> Vec<(Role, Value)> {
        let (trips, c, _) = windows(self.n, c);
        let f = self.hidden.builder();
        let empty = Statistics::empty(&self.vector(0.0), self.spec.numerics.entropy).to_list();
        let carried = f.for_loop(trips, &empty.iter().collect::<Vec<_>>(), |trip, carried| {
            let window = window(trip, self.n, c);
            let (tokens, rows) = self.chunk(&window, c);
            let factors = self.factors(&tokens);
            let tile = self.tile(&self.head.beside(&rows), &rows, &tokens, &factors);
            let parts = self.statistics(&tile, &factors).to_list();
            carried.iter().zip(&parts).map(|(all, part)| place(all, part, &window)).collect()
        });
        let (statistics, factors) = (Statistics::from_list(&carried), self.factors(&self.tokens));
        let (logp, entropy) = self.scores(&statistics.row(&factors.logits), &self.tokens, &factors);
        let Some(frame) = frame else { return vec![(Role::Logp, logp), (Role::Entropy, entropy)] };
        let (_, dlogp) = self.loss(&logp, &entropy);
        let row_grad = self.row_grad(&statistics, &factors, &dlogp, &self.tokens);

        let grads = self.begin(frame);
        let carried = f.for_loop(trips, &grads.iter().map(|(_, v)| v).collect::<Vec<_>>(), |trip, carried| {
            let window = window(trip, self.n, c);
            let (tokens, rows) = self.chunk(&window, c);
            let head = self.head.beside(&rows);
            let tile = self.tile(&head, &rows, &tokens, &self.factors(&tokens));
            let row_grad = row_grad.chunk(&window.start, c);
            let dlogits = self.dlogits(&tile, &row_grad, &tokens);
            let mut grads: Vec<(Role, Value)> =
                grads.iter().zip(carried).map(|((role, _), v)| (*role, v.clone())).collect();
            self.add_chunk(&head, &mut grads, &dlogits, &rows, &tokens, &window.start);
            grads.into_iter().map(|(_, v)| v).collect()
        });
        self.results(&[vec![logp, entropy], carried].concat(), &grads)
    }

    /// Loops over panels of `w` columns: statistics, then gradients if `frame` is present.
    fn vocab_panels(&self, w: usize, frame: Option<&Frame>) -> Vec<(Role, Value)> {
        let (trips, w, overlap) = windows(self.v, w);
        let (f, factors) = (self.hidden.builder(), self.factors(&self.tokens));
        let tile = |trip: &Value| {
            let window = window(trip, self.v, w);
            let head = self.head.panel(&window.start, w);
            let logits = pinned(self.spec, head.logits(self.spec, &self.hidden));
            let first = &self.first_column + &window.start;
            let fresh = &self.first_column + window.fresh.as_ref().unwrap_or(&window.start);
            let limits = (overlap || self.spec.pads_vocab()).then_some((&fresh, &self.end_column));
            let tile = Tile::new(&logits, self.transform, &self.tokens.target, &first, limits, &factors.logits);
            (tile, head, window.start)
        };
        let empty = Statistics::empty(&self.vector(0.0), self.spec.numerics.entropy).to_list();
        let carried = f.for_loop(trips, &empty.iter().collect::<Vec<_>>(), |trip, carried| {
            let part = tile(trip).0.statistics(self.spec.numerics.entropy);
            Statistics::from_list(carried).merge(&part, &factors.logits).to_list()
        });
        let statistics = Statistics::from_list(&carried).over_vocab(&self.coord, &factors.logits);
        let (logp, entropy) = self.scores(&statistics.row(&factors.logits), &self.tokens, &factors);
        let Some(frame) = frame else { return vec![(Role::Logp, logp), (Role::Entropy, entropy)] };
        let (_, dlogp) = self.loss(&logp, &entropy);
        let row_grad = self.row_grad(&statistics, &factors, &dlogp, &self.tokens);

        let grads = self.begin_panels(frame);
        let carried = f.for_loop(trips, &grads.iter().map(|(_, v)| v).collect::<Vec<_>>(), |trip, carried| {
            let (tile, head, start) = tile(trip);
            let dlogits = self.dlogits(&tile, &row_grad, &self.tokens);
            let next = grads.iter().zip(carried).map(|((role, _), sum)| match role {
                Role::GradHidden => accumulate(sum, &head.hidden_gradient(&dlogits)),
                Role::GradLmHead => {
                    let part = head.weight_gradient(&dlogits, &self.tokens.clean(&self.hidden));
                    let part = self.coord.over_data(&part, Reducer::Add);
                    add_at(sum, &part, &head.at(&start).each_ref())
                }
                _ => {
                    let part = dlogits.convert(Dtype::F32).reduce(Reducer::Add, &[0]);
                    add_at(sum, &self.coord.over_data(&part, Reducer::Add), &[&start])
                }
            });
            next.collect()
        });
        let grads = grads.iter().zip(carried).map(|((role, _), sum)| match role {
            Role::GradHidden => (*role, self.coord.over_vocab(&sum, Reducer::Add)),
            role => (*role, sum),
        });
        [(Role::Logp, logp), (Role::Entropy, entropy)].into_iter().chain(grads).collect()
    }

    /// Returns the initial values of gradients in the loop over panels; here, the hidden states' gradient is
    /// all-reduced at the end.
    fn begin_panels(&self, frame: &Frame) -> Vec<(Role, Value)> {
        let roles = self.spec.accumulators(Pass::Gradient).into_iter();
        let once = |role, value| match role {
            Role::GradHidden => self.coord.once_over_vocab(&value),
            _ => value,
        };
        roles.map(|role| (role, once(role, frame.argument(role)))).collect()
    }

    /// Collects scores, then gradients, from the carried values of a loop over chunks.
    fn results(&self, carried: &[Value], grads: &[(Role, Value)]) -> Vec<(Role, Value)> {
        let scores = [(Role::Logp, carried[0].clone()), (Role::Entropy, carried[1].clone())];
        let sums = grads.iter().zip(&carried[2..]).map(|((role, _), v)| (*role, v.clone())).collect();
        scores.into_iter().chain(self.end(sums)).collect()
    }
}
