//! Mixtures of experts (arXiv 1701.06538) in dense form: every expert computes every token, and the weights of the experts that the router
//! has not chosen are 0. Sorting tokens by expert would need products of data-dependent sizes, which StableHLO does not have.
//!
//! Legend: B rows, T tokens of a row, H hidden size, E experts, k experts of a token, I width of an expert's MLP.

use super::layer_ops::Broadcast;
use super::{Axis, Decoder, ParameterValues, Role};
use models::{ClampedSwiglu, Experts};
use stablehlo::{DotDimensions, Dtype, Reducer, TensorType, Unary, Value};

impl Decoder {
    /// Returns the weighted sum `[B, T, H]`, f32, of the outputs of each token's experts, for `x` `[B, T, H]`.
    pub(super) fn experts(&self, layer: &ParameterValues, x: &Value, experts: &Experts) -> Value {
        let logits = self.product(layer, x, Role::Router, Dtype::F32);
        let logits = match layer.get(Role::RouterBias) {
            Some(bias) => &logits + bias.convert(Dtype::F32).along_last(&logits),
            None => logits,
        };
        let weights = route(&logits, experts.num_experts_per_tok, experts.norm_topk_prob);
        // [B, T, E, I]
        let mixed = match experts.clamped {
            Some(clamped) => self.clamped(layer, x, clamped),
            None => {
                let [gate, up] =
                    [Role::ExpertGateProj, Role::ExpertUpProj].map(|role| self.all_experts(layer, x, role, 2));
                self.activated(&gate) * up
            }
        };
        let mixed = &mixed * weights.along_first(&mixed);
        let compute = self.compute();
        let down = &layer[Role::ExpertDownProj];
        // `[E, H, I]`, or `[E, I, H]` in gpt-oss.
        let summed = if experts.clamped.is_some() { vec![0, 1] } else { vec![0, 2] };
        let dimensions = DotDimensions { batch: (vec![], vec![]), contract: (vec![2, 3], summed) };
        let [mixed, down] = [&mixed, down].map(|operand| operand.convert(compute.dtype()));
        let y = mixed.dot_general(&down, dimensions, Dtype::F32, compute.precision());
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
        let axes = [Some(Axis::Batch), None, None, Some(Axis::Mlp)];
        self.split().constrain(&product.convert(Dtype::F32), &axes)
    }

    /// Returns gpt-oss's activations `[B, T, E, I]` of gate and up, whose columns alternate.
    fn clamped(&self, layer: &ParameterValues, x: &Value, clamped: ClampedSwiglu) -> Value {
        let both = self.all_experts(layer, x, Role::ExpertGateUpProj, 1);
        let bias = layer[Role::ExpertGateUpBias].convert(Dtype::F32);
        let both = &both + bias.along_last(&both);
        let [b, t, e, columns] = both.shape() else { unreachable!("four dimensions") };
        let shape = [*b, *t, *e, columns / 2];
        let pairs = both.reshape(&[&shape[..], &[2]].concat());
        let [gate, up] = [0, 1].map(|which| {
            let (mut start, mut limit) = ([0; 5], [shape[0], shape[1], shape[2], shape[3], 0]);
            (start[4], limit[4]) = (which, which + 1);
            pairs.slice(&start, &limit).reshape(&shape)
        });
        let limit = clamped.swiglu_limit;
        let gate = gate.min(&gate.like(limit));
        let up = up.max(&up.like(-limit)).min(&up.like(limit));
        let share = (&gate * gate.like(clamped.swiglu_alpha)).unary(Unary::Logistic);
        (&up + up.like(1.0)) * gate * share
    }
}

/// Returns the weights `[B, T, E]` of all experts: those of the `top` largest logits, and of equal logits those with the lowest index, from a
/// softmax over them if `normalised`, and else over all; 0 for all others.
fn route(logits: &Value, top: usize, normalised: bool) -> Value {
    let [b, t, e] = *logits.shape() else { unreachable!("three dimensions") };
    let pairs = [b, t, e, e];
    let index = logits.builder().iota(2, TensorType::new(Dtype::I32, pairs));
    let other = logits.builder().iota(3, TensorType::new(Dtype::I32, pairs));
    let [own, others] = [2, 3].map(|dimension| logits.broadcast_in_dim(&pairs, &[0, 1, dimension]));
    // The number of experts before this one.
    let before = others.gt(&own) | (others.eq(&own) & other.lt(&index));
    let rank = before.convert(Dtype::I32).reduce(Reducer::Add, &[3]);
    let chosen = rank.lt(&rank.like(top as i64)).convert(Dtype::F32);
    let shares = (logits - logits.reduce(Reducer::Max, &[2]).along_first(logits)).exp();
    let of_chosen = &shares * chosen;
    let sum = if normalised { &of_chosen } else { &shares }.reduce(Reducer::Add, &[2]);
    &of_chosen / sum.along_first(&of_chosen)
}

#[cfg(test)]
mod tests {
    use super::route;
    use stablehlo::{Array, Builder, Dtype, TensorType};

    fn weights(logits: &[f64], top: usize, normalised: bool) -> Vec<f64> {
        let ty = TensorType::new(Dtype::F32, [1, 1, logits.len()]);
        let f = Builder::new();
        let argument = f.argument("logits", ty);
        let result = route(&argument, top, normalised);
        let module = f.finish("route", &[("weights", &result)]).unwrap();
        let logits = Array::floats(Dtype::F32, [1, 1, logits.len()], logits.iter().copied()).unwrap();
        module.interpret(&[logits]).unwrap()[0].to_floats()
    }

    #[test]
    fn ties_go_to_the_lowest_index() {
        assert_eq!(weights(&[1.0, 3.0, 1.0, 1.0, 3.0], 3, true)[2..4], [0.0, 0.0]);
        assert_eq!(weights(&[0.0; 4], 2, true), [0.5, 0.5, 0.0, 0.0]);
        assert_eq!(weights(&[0.0; 4], 2, false), [0.25, 0.25, 0.0, 0.0]);
        assert_eq!(weights(&[0.0; 4], 4, true), [0.25; 4]);
    }
}
