//! Mixtures of experts (arXiv 1701.06538). Products are dense or grouped by expert, as [`ExpertProducts`] says. In dense
//! form, every expert computes every token, and the weights of the experts that the router has not chosen are 0.
//!
//! Legend: B rows, T tokens of a row, H hidden size, E experts, k experts of a token, I width of an expert's MLP.

mod adapters;
mod blocks;
mod grouped;
#[cfg(test)]
mod tests;

pub use blocks::ExpertProducts;

use super::layer_ops::{Broadcast, Dims, last_columns};
use super::{Axis, Decoder, Matrix, ParameterValues, Role, zeros};
use crate::leaves::leaves;
use grouped::BlockLoop;
use grpo_models::{ClampedSwiglu, Experts, SigmoidRouter};
use grpo_stablehlo::{DotDimensions, Dtype, Reducer, Result, TensorType, Unary, Value};
use std::ops::Range;

/// A logit whose exponential is 0.
const LOWEST: f64 = -1e30;

/// The choice of a layer's router.
#[derive(Clone, Debug)]
pub struct Routing {
    /// Logits `[B, T, E]`, f32, or the ranks of a sigmoid router.
    pub logits: Value,
    /// 1 for the experts of a token, else 0, `[B, T, E]`, f32.
    pub chosen: Value,
    /// If choices are replaced by recorded ones: 1 for tokens whose router chooses other experts, else 0, `[B, T]`, f32.
    pub differs: Option<Value>,
}

/// Sums over the counted tokens of a forward pass.
#[derive(Clone, Debug)]
pub struct RouterSums {
    /// The number of tokens of each expert, `[L, E]`, f32.
    pub tokens: Value,
    /// The load balancing loss, if the decoder has one ([`Decoder::with_router_aux_loss`]); f32 scalar.
    pub aux_loss: Option<Value>,
    /// If choices are replaced by recorded ones, f32 `[3]`: the number of tokens with recorded experts, of the pairs of such a token and a layer
    /// whose router chooses others, and of the tokens with such a layer.
    pub replay: Option<Value>,
}

/// Sums over the counted tokens in each layer of a loop; the last rows are of the layers so far.
#[derive(Clone)]
pub(super) struct RouterCounts {
    /// See [`RouterSums::tokens`].
    tokens: Value,
    /// The softmax over all experts, `[L, E]`, f32, for the load balancing loss.
    shares: Option<Value>,
    /// The number of layers whose router chooses other experts than the recorded ones, `[B, T]`, f32.
    differing: Option<Value>,
}

leaves!(RouterCounts { tokens, shares, differing });

impl RouterCounts {
    /// Returns the sums of no layer; none for a decoder without experts. `counted` `[B, T]` is 1 for tokens and 0 for padding.
    pub(super) fn new(decoder: &Decoder, counted: &Value, replays: bool) -> Option<Self> {
        let experts = decoder.config.experts.as_ref()?.num_experts;
        let zero = zeros(&counted.builder(), Dtype::F32, &[decoder.config.routers(), experts]);
        let shares = decoder.router_aux_loss.then(|| zero.clone());
        Some(Self { tokens: zero, shares, differing: replays.then(|| counted.like(0.0)) })
    }

    /// Returns the sums followed by the sums of the next layer.
    pub(super) fn with(&self, routing: &Routing, counted: &Value) -> Self {
        let counted = counted.broadcast_in_dim(routing.logits.shape(), &[0, 1]);
        let sum = |values: &Value| (values * &counted).reduce(Reducer::Add, &[0, 1]);
        let shares = self.shares.as_ref().map(|all| {
            let shares = exponentials(&routing.logits);
            (all, sum(&(&shares / shares.reduce(Reducer::Add, &[2]).along_first(&shares))))
        });
        let tokens = append(&self.tokens, &sum(&routing.chosen));
        let shares = shares.map(|(all, shares)| append(all, &shares));
        let differing = self.differing.as_ref().map(|count| match &routing.differs {
            Some(differs) => count + differs,
            None => count.clone(),
        });
        Self { tokens, shares, differing }
    }
}

impl Routing {
    /// Returns the experts `[B, T, k]`, i32, with the `top` largest logits of a token, in the order of their logits.
    pub(crate) fn ids(&self, top: usize) -> Value {
        let [b, t, e] = self.logits.dims();
        let pairs = TensorType::new(Dtype::I32, [b, t, top, e]);
        let [rank, expert] = [2, 3].map(|dimension| self.logits.builder().iota(dimension, pairs.clone()));
        let ranks = ranks(&self.logits).broadcast_in_dim(&pairs.shape, &[0, 1, 3]);
        ranks.eq(&rank).select(&expert, &expert.like(0)).reduce(Reducer::Add, &[3])
    }
}

impl RouterSums {
    /// Creates the sums from the sums in all layers. The load balancing loss is E times the sum over experts of f P, where f is the mean
    /// number of times that a token chooses the expert, and P the mean of its softmax over all experts; both means are over `counted` tokens
    /// `[B, T]` and layers. f has no gradient.
    ///
    /// `routed` are the recorded experts `[L, B, T, k]`.
    pub(super) fn new(counts: &RouterCounts, counted: &Value, routed: Option<&Value>) -> Self {
        let RouterCounts { tokens, shares, differing } = counts;
        let aux_loss = shares.as_ref().map(|shares| {
            let [layers, experts] = tokens.dims();
            let over_layers = |values: &Value| values.reduce(Reducer::Add, &[0]);
            let product = (over_layers(&tokens.stop_gradient()) * over_layers(shares)).reduce(Reducer::Add, &[0]);
            let rows = counted.reduce(Reducer::Add, &[0, 1]);
            let rows = &rows * rows.like(layers as f64);
            &product * product.like(experts as f64) / &rows / &rows
        });
        let replay = routed.zip(differing.as_ref());
        let replay = replay.map(|(routed, differing)| {
            let [_, b, t, _] = routed.dims();
            let first = routed.slice(&[0; 4], &[1, b, t, 1]).reshape(&[b, t]);
            let recorded = first.ge(&first.like(0)).convert(Dtype::F32) * counted;
            let others = differing.gt(&differing.like(0.0)).convert(Dtype::F32);
            let sums = [recorded.clone(), differing * &recorded, others * &recorded];
            let sums = sums.map(|of_tokens| of_tokens.reduce(Reducer::Add, &[0, 1]).reshape(&[1]));
            counted.builder().concatenate(&sums.iter().collect::<Vec<_>>(), 0)
        });
        Self { tokens: tokens.clone(), aux_loss, replay }
    }
}

/// Appends the sums of a layer `[E]` to the sums of earlier layers, the last rows of `sums` `[L, E]`.
pub(super) fn append(sums: &Value, of_layer: &Value) -> Value {
    let [layers, experts] = sums.dims();
    let last = of_layer.reshape(&[1, experts]);
    sums.builder().concatenate(&[&sums.slice(&[1, 0], &[layers, experts]), &last], 0)
}

impl Decoder {
    /// Returns the weighted sum `[B, T, H]`, f32, of the outputs of each token's experts, for `x` `[B, T, H]`, and the choice of the router, which
    /// `routed` `[B, T, k]` replaces, except for tokens with -1.
    ///
    /// # Errors
    /// An operation cannot be built.
    pub(super) fn experts(
        &self,
        layer: &ParameterValues,
        x: &Value,
        routed: Option<&Value>,
    ) -> Result<(Value, Routing)> {
        let experts = &self.config.experts.clone().unwrap_or_default();
        let logits = self.product(layer, x, Role::Router, Dtype::F32);
        let logits = match layer.get(Role::RouterBias) {
            Some(bias) => &logits + bias.convert(Dtype::F32).along_last(&logits),
            None => logits,
        };
        // Scores by sigmoid, and the order of experts.
        let sigmoid = experts.sigmoid.zip(layer.get(Role::CorrectionBias)).map(|(router, bias)| {
            let scores = logits.unary(Unary::Logistic);
            let ranks = &scores + bias.convert(Dtype::F32).along_last(&scores);
            (router, scores, within_groups(&ranks, router))
        });
        let order = sigmoid.as_ref().map_or(&logits, |(.., ranks)| ranks);
        let own = choose(order, experts.num_experts_per_tok);
        let (chosen, differs) = match routed {
            Some(routed) => {
                let (chosen, differs) = replayed(&own, routed);
                (chosen, Some(differs))
            }
            None => (own, None),
        };
        let weights = match (&sigmoid, routed) {
            (Some((router, scores, _)), _) => sigmoid_weights(scores, &chosen, experts.norm_topk_prob, *router),
            // Recorded experts may have logits far below the largest one.
            (None, Some(_)) if experts.norm_topk_prob => weights(&of_chosen(&logits, &chosen), &chosen, true),
            _ => weights(&logits, &chosen, experts.norm_topk_prob),
        };
        let tokens = x.shape()[0] * x.shape()[1];
        let y = match self.expert_products.blocks(tokens, experts, &self.rules) {
            Some(blocks) => BlockLoop { decoder: self, blocks, experts }.outputs(layer, x, [&chosen, &weights])?,
            None => self.dense_experts(layer, x, experts, &weights),
        };
        Ok((y, Routing { logits: order.clone(), chosen, differs }))
    }

    /// Returns the sum of the outputs of all experts times `weights` `[B, T, E]`, `[B, T, H]`, f32.
    fn dense_experts(&self, layer: &ParameterValues, x: &Value, experts: &Experts, weights: &Value) -> Value {
        let width = experts.moe_intermediate_size;
        let low = self.low_of_all(layer, x, Matrix::ExpertGateUpProj);
        let adapted = |product: Value, rows: Range<usize>| match &low {
            Some(low) => product + self.high_of_all(layer, low, Matrix::ExpertGateUpProj, rows),
            None => product,
        };
        // [B, T, E, I]
        let mixed = match experts.clamped {
            Some(of) => {
                let both = adapted(self.all_experts(layer, x, Role::ExpertGateUpProj, 1), 0..2 * width);
                let bias = layer[Role::ExpertGateUpBias].convert(Dtype::F32);
                clamped(&(&both + bias.along_last(&both)), of)
            }
            None => {
                let gate = adapted(self.all_experts(layer, x, Role::ExpertGateProj, 2), 0..width);
                let up = adapted(self.all_experts(layer, x, Role::ExpertUpProj, 2), width..2 * width);
                self.activated(&gate) * up
            }
        };
        let mixed = &mixed * weights.along_first(&mixed);
        let compute = self.compute();
        let down = &layer[Role::ExpertDownProj];
        // `[E, H, I]`, or `[E, I, H]` in gpt-oss.
        let summed = if experts.clamped.is_some() { vec![0, 1] } else { vec![0, 2] };
        let dimensions = DotDimensions { batch: (vec![], vec![]), contract: (vec![2, 3], summed) };
        let low = self.low_of_each(layer, &mixed, Matrix::ExpertDownProj);
        let [mixed, down] = [&mixed, down].map(|operand| operand.convert(compute.dtype()));
        let y = mixed.dot_general(&down, dimensions, Dtype::F32, compute.precision());
        let y = match low {
            Some(low) => y + self.sum_of_high(layer, &low, Matrix::ExpertDownProj),
            None => y,
        };
        match layer.get(Role::ExpertDownBias) {
            Some(bias) => {
                let dimensions = DotDimensions::contract(2, 0);
                y + weights.dot_general(
                    &bias.convert(Dtype::F32),
                    dimensions,
                    Dtype::F32,
                    super::Compute::F32.precision(),
                )
            }
            None => y,
        }
    }

    /// Returns the products `[B, T, E, O]`, f32, of `x` `[B, T, H]` with the matrices of this role of all experts, whose dimension `summed` is
    /// H.
    fn all_experts(&self, layer: &ParameterValues, x: &Value, role: Role, summed: usize) -> Value {
        let compute = self.compute();
        let [x, weight] = [x, &layer[role]].map(|operand| operand.convert(compute.dtype()));
        let product = x.dot_general(&weight, DotDimensions::contract(2, summed), compute.dtype(), compute.precision());
        let axes = [Some(Axis::Batch), None, Some(Axis::Experts), Some(Axis::Mlp)];
        self.axis_rules().constrain(&product.convert(Dtype::F32), &axes)
    }
}

/// Returns gpt-oss's activations `[..., I]` of gate and up `[..., 2I]`, whose columns alternate.
fn clamped(both: &Value, clamped: ClampedSwiglu) -> Value {
    let mut shape = both.shape().to_vec();
    shape.last_mut().into_iter().for_each(|columns| *columns /= 2);
    let pairs = both.reshape(&[&shape[..], &[2]].concat());
    let [gate, up] = [0, 1].map(|which| last_columns(&pairs, which..which + 1).reshape(&shape));
    let limit = clamped.swiglu_limit;
    let gate = gate.min(&gate.like(limit));
    let up = up.max(&up.like(-limit)).min(&up.like(limit));
    let share = (&gate * gate.like(clamped.swiglu_alpha)).unary(Unary::Logistic);
    (&up + up.like(1.0)) * gate * share
}

/// Returns 1 for the experts with the `top` largest of a token's `logits` `[B, T, E]`, and of equal logits those with the lowest index; 0 for
/// all others.
fn choose(logits: &Value, top: usize) -> Value {
    let rank = ranks(logits);
    rank.lt(&rank.like(top as i64)).convert(Dtype::F32)
}

/// Returns the number of experts that come before an expert in the order of a token's `logits`, `[B, T, E]`, i32.
fn ranks(logits: &Value) -> Value {
    let [b, t, e] = logits.dims();
    let pairs = [b, t, e, e];
    let index = logits.builder().iota(2, TensorType::new(Dtype::I32, pairs));
    let other = logits.builder().iota(3, TensorType::new(Dtype::I32, pairs));
    let [own, others] = [2, 3].map(|dimension| logits.broadcast_in_dim(&pairs, &[0, 1, dimension]));
    // The number of experts before this one.
    let before = others.gt(&own) | (others.eq(&own) & other.lt(&index));
    before.convert(Dtype::I32).reduce(Reducer::Add, &[3])
}

/// Returns the experts of each token, 1 or 0, `[B, T, E]`: the recorded ones in `routed` `[B, T, k]` or, where these are -1, the router's `own`
/// `[B, T, E]`. Also returns 1 for tokens whose recorded experts are not the router's, else 0, `[B, T]`.
fn replayed(own: &Value, routed: &Value) -> (Value, Value) {
    let ([b, t, e], [_, _, k]) = (own.dims(), routed.dims());
    let pairs = [b, t, e, k];
    let expert = own.builder().iota(2, TensorType::new(Dtype::I32, pairs));
    let is_routed = routed.broadcast_in_dim(&pairs, &[0, 1, 3]).eq(&expert).reduce(Reducer::Or, &[3]);
    let first = routed.slice(&[0; 3], &[b, t, 1]).reshape(&[b, t]);
    let is_recorded = first.ge(&first.like(0)).broadcast_in_dim(own.shape(), &[0, 1]);
    let chosen = is_recorded.select(&is_routed.convert(Dtype::F32), own);
    let differs = chosen.ne(own).reduce(Reducer::Or, &[2]).convert(Dtype::F32);
    (chosen, differs)
}

/// Returns the logits of the `chosen` experts; all others are [`LOWEST`].
fn of_chosen(logits: &Value, chosen: &Value) -> Value {
    chosen.gt(&chosen.like(0.0)).select(logits, &logits.like(LOWEST))
}

/// Returns `ranks` `[B, T, E]`, and [`LOWEST`] for experts outside of the groups of a token: those with the largest sums of their two best ranks.
fn within_groups(ranks: &Value, router: SigmoidRouter) -> Value {
    let ([b, t, e], groups) = (ranks.dims(), router.n_group);
    if router.topk_group == groups {
        return ranks.clone();
    }
    let in_groups = ranks.reshape(&[b, t * groups, e / groups]);
    let sums = (&in_groups * choose(&in_groups, 2)).reduce(Reducer::Add, &[2]).reshape(&[b, t, groups]);
    let kept = choose(&sums, router.topk_group).reshape(&[b, t * groups]).along_first(&in_groups);
    kept.gt(&kept.like(0.0)).select(&in_groups, &in_groups.like(LOWEST)).reshape(ranks.shape())
}

/// Returns the weights `[B, T, E]` of the `chosen` experts: their `scores`, divided by the sum of a token's if `normalised`, times the factor of the router; 0
/// for all others.
fn sigmoid_weights(scores: &Value, chosen: &Value, normalised: bool, router: SigmoidRouter) -> Value {
    let mut weights = scores * chosen;
    if normalised {
        let sum = weights.reduce(Reducer::Add, &[2]);
        weights = &weights / (&sum + sum.like(1e-20)).along_first(&weights);
    }
    &weights * weights.like(router.routed_scaling_factor)
}

/// Returns the exponential of the distance of each of a token's logits to the largest one, `[B, T, E]`.
fn exponentials(logits: &Value) -> Value {
    (logits - logits.reduce(Reducer::Max, &[2]).along_first(logits)).exp()
}

/// Returns the weights `[B, T, E]` of the `chosen` experts, from a softmax over them if `normalised`, and else over all; 0 for all others.
fn weights(logits: &Value, chosen: &Value, normalised: bool) -> Value {
    let shares = exponentials(logits);
    let of_chosen = &shares * chosen;
    let sum = if normalised { &of_chosen } else { &shares }.reduce(Reducer::Add, &[2]);
    &of_chosen / sum.along_first(&of_chosen)
}
