//! Mixtures of experts: the router's choice, and the MLPs of the chosen experts on the rows of their tokens.
//!
//! ```text
//! for each token: the k largest logits choose its experts and their weights
//! sort the pairs of token and expert by expert
//! for each expert with tokens, in parallel:
//!     out[pairs of the expert] = down(activation(gate_up(x[tokens of the pairs])))
//! for each token: y = sum over its pairs of weight * out[pair]
//! ```
//!
//! Legend: N tokens, E experts, k experts of a token, P = N k pairs, H hidden size, I width of an expert's MLP.

mod routing;
mod weights;

pub use routing::{ExpertGroups, Routing};
pub use weights::{ExpertAdapter, ExpertAdapterGrad, ExpertMatrix, ExpertWeights};

use super::{Activation, Layers, fits};
use crate::threads::slices::*;
use grpo_core::error::{Error, Result};

/// The gradients of [`Layers::experts`].
#[derive(Clone, Debug, Default)]
pub struct ExpertsGrad {
    /// dL/dx `[N, H]`.
    pub dx: Vec<f32>,
    /// dL/d(weights) `[N, k]`.
    pub dweights: Vec<f32>,
    /// dL/d(gate and up) `[E, H, 2I]`; empty if it was not requested.
    pub dgate_up: Vec<f32>,
    /// dL/d(bias of gate and up) `[E, 2I]`; empty if there is none, or it was not requested.
    pub dgate_up_bias: Vec<f32>,
    /// dL/d(down) `[E, I, H]`; empty if it was not requested.
    pub ddown: Vec<f32>,
    /// dL/d(bias of down) `[E, H]`; empty if there is none, or it was not requested.
    pub ddown_bias: Vec<f32>,
    /// The gradients of the adapters of gate and up.
    pub dgate_up_adapter: ExpertAdapterGrad,
    /// The gradients of the adapters of down.
    pub ddown_adapter: ExpertAdapterGrad,
}

/// The contribution of one expert to [`ExpertsGrad`].
#[derive(Default)]
struct Part {
    dx: Vec<f32>,
    dweights: Vec<f32>,
    dgate_up: Vec<f32>,
    dgate_up_bias: Vec<f32>,
    ddown: Vec<f32>,
    ddown_bias: Vec<f32>,
    dgate_up_adapter: ExpertAdapterGrad,
    ddown_adapter: ExpertAdapterGrad,
}

/// Checks the weights of the experts of a routing, that gate and up `[H, 2I]` and down `[I, H]` fit each other, and x `[N, H]`. Returns N.
///
/// # Errors
/// [`Error::Shape`].
fn check(
    operation: &'static str,
    x: &[f32],
    routing: &Routing,
    [gate_up, down]: [&ExpertWeights<'_>; 2],
) -> Result<usize> {
    let (experts, n) = (routing.starts.len() - 1, routing.chosen.len() / routing.top);
    gate_up.check(experts)?;
    down.check(experts)?;
    let ([hidden, both], [width, out]) = (gate_up.dims, down.dims);
    if both != 2 * width || out != hidden {
        let expected = format!("[{}, {hidden}], for gate and up [{hidden}, {both}]", both / 2);
        return Err(Error::shape("experts", "down", expected, format!("{:?}", down.dims)));
    }
    fits(operation, "x", x.len(), &[n, hidden])?;
    Ok(n)
}

impl Layers {
    /// Computes y `[N, H]` of x `[N, H]`, the weighted sum of the outputs of each token's experts, and gate and up of all pairs, sorted by
    /// expert, `[P, 2I]`, which the backward pass needs.
    ///
    /// # Errors
    /// [`Error::Shape`] if weights or x do not match the routing.
    pub fn experts(
        &self,
        x: &[f32],
        routing: &Routing,
        gate_up: &ExpertWeights<'_>,
        down: &ExpertWeights<'_>,
        activation: Activation,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let (experts, top) = (routing.starts.len() - 1, routing.top);
        let ([hidden, both], [width, _]) = (gate_up.dims, down.dims);
        let n = check("experts", x, routing, [gate_up, down])?;
        let (mut gates, mut outs) = (vec![0.0; n * top * both], vec![0.0; n * top * hidden]);
        let (mut rest_of_gates, mut rest_of_outs, mut tasks) = (&mut gates[..], &mut outs[..], Vec::new());
        for expert in 0..experts {
            let count = routing.places_of(expert).len();
            let (gates, outs);
            (gates, rest_of_gates) = rest_of_gates.split_at_mut(count * both);
            (outs, rest_of_outs) = rest_of_outs.split_at_mut(count * hidden);
            if count > 0 {
                tasks.push((expert, gates, outs, Ok(())));
            }
        }
        let run = |expert: usize, gates: &mut [f32], outs: &mut [f32]| -> Result<()> {
            let (rows, count) = (routing.rows_of(expert, x, hidden), gates.len() / both);
            gates.copy_from_slice(&gate_up.product(self, expert, &rows, count)?);
            let mixed = self.gated(gates, activation, width)?;
            outs.copy_from_slice(&down.product(self, expert, &mixed, count)?);
            Ok(())
        };
        tasks.par_chunks_mut(1).for_each(|tasks| {
            tasks.iter_mut().for_each(|(expert, gates, outs, result)| *result = run(*expert, gates, outs));
        });
        tasks.into_iter().try_for_each(|(.., result)| result)?;
        let mut y = vec![0.0; n * hidden];
        sum_pairs(routing, &outs, Some(&routing.weights), hidden, &mut y);
        Ok((y, gates))
    }

    /// Computes the gradients of [`Layers::experts`] from dL/dy `[N, H]`; `gates` are the second result of the forward pass. `needs_dweights`
    /// requests the gradients of the experts' matrices and biases; gradients of adapters are always computed.
    ///
    /// # Errors
    /// As [`Layers::experts`]; packed weights.
    #[allow(clippy::too_many_arguments)]
    pub fn experts_grad(
        &self,
        x: &[f32],
        routing: &Routing,
        gate_up: &ExpertWeights<'_>,
        down: &ExpertWeights<'_>,
        activation: Activation,
        gates: &[f32],
        dy: &[f32],
        needs_dweights: bool,
    ) -> Result<ExpertsGrad> {
        let (experts, top) = (routing.starts.len() - 1, routing.top);
        let ([hidden, both], [width, _]) = (gate_up.dims, down.dims);
        let n = check("experts_grad", x, routing, [gate_up, down])?;
        fits("experts_grad", "gates", gates.len(), &[n, top, both])?;
        fits("experts_grad", "dy", dy.len(), &[n, hidden])?;
        let run = |expert: usize| -> Result<Part> {
            let places = routing.places_of(expert);
            let count = places.len();
            let (rows, dy) = (routing.rows_of(expert, x, hidden), routing.rows_of(expert, dy, hidden));
            let gates = &gates[places.start * both..places.end * both];
            let weights: Vec<f32> = routing.pairs[places].iter().map(|pair| routing.weights[*pair as usize]).collect();
            let mut mixed = self.gated(gates, activation, width)?;
            // dL/d(output of the expert) is the weight times dL/dy.
            let mut dmixed = down.dx(self, expert, &dy, count)?;
            let bias_product = |dy: &[f32]| down.bias(expert).map_or(0.0, |bias| dot(dy, bias));
            let products = dmixed.chunks_exact(width).zip(mixed.chunks_exact(width)).zip(dy.chunks_exact(hidden));
            let dweights = products.map(|((dmixed, mixed), dy)| dot(dmixed, mixed) + bias_product(dy)).collect();
            scale_rows(&mut dmixed, &weights, width);
            let dgates = self.gated_grad(gates, &dmixed, activation, width)?;
            let dx = gate_up.dx(self, expert, &dgates, count)?;
            let mut part = Part { dx, dweights, ..Part::default() };
            if needs_dweights || down.adapter.is_some() {
                scale_rows(&mut mixed, &weights, width);
            }
            if let Some(adapter) = gate_up.adapter {
                part.dgate_up_adapter = adapter.grad(expert, &rows, &dgates, gate_up.dims)?;
            }
            if let Some(adapter) = down.adapter {
                part.ddown_adapter = adapter.grad(expert, &mixed, &dy, down.dims)?;
            }
            if needs_dweights {
                part.dgate_up = self.linear_dweight(&rows, &dgates, [count, hidden, both])?;
                part.ddown = self.linear_dweight(&mixed, &dy, [count, width, hidden])?;
                if gate_up.biases.is_some() {
                    part.dgate_up_bias = self.linear_dbias(&dgates, [count, both])?;
                }
                if down.biases.is_some() {
                    let mut dy = dy;
                    scale_rows(&mut dy, &weights, hidden);
                    part.ddown_bias = self.linear_dbias(&dy, [count, hidden])?;
                }
            }
            Ok(part)
        };
        let used = (0..experts).filter(|expert| !routing.places_of(*expert).is_empty());
        let mut tasks: Vec<(usize, Result<Part>)> = used.map(|expert| (expert, Ok(Part::default()))).collect();
        tasks.par_chunks_mut(1).for_each(|tasks| tasks.iter_mut().for_each(|(expert, part)| *part = run(*expert)));
        let zeros = |is_needed: bool, size: usize| vec![0.0; if is_needed { experts * size } else { 0 }];
        let zeros_of_adapter = |of: &ExpertWeights<'_>| {
            let zeros = |values: fn(&ExpertAdapter<'_>) -> usize| vec![0.0; of.adapter.as_ref().map_or(0, values)];
            ExpertAdapterGrad { da: zeros(|adapter| adapter.a.len()), db: zeros(|adapter| adapter.b.len()) }
        };
        let mut grad = ExpertsGrad {
            dx: vec![0.0; n * hidden],
            dweights: vec![0.0; n * top],
            dgate_up: zeros(needs_dweights, hidden * both),
            dgate_up_bias: zeros(needs_dweights && gate_up.biases.is_some(), both),
            ddown: zeros(needs_dweights, width * hidden),
            ddown_bias: zeros(needs_dweights && down.biases.is_some(), hidden),
            dgate_up_adapter: zeros_of_adapter(gate_up),
            ddown_adapter: zeros_of_adapter(down),
        };
        let mut dpairs = Vec::with_capacity(n * top * hidden);
        for (expert, part) in tasks {
            let part = part?;
            for (pair, dweight) in routing.pairs[routing.places_of(expert)].iter().zip(part.dweights) {
                grad.dweights[*pair as usize] = dweight;
            }
            dpairs.extend(part.dx);
            for (to, expert_grad) in [
                (&mut grad.dgate_up, part.dgate_up),
                (&mut grad.dgate_up_bias, part.dgate_up_bias),
                (&mut grad.ddown, part.ddown),
                (&mut grad.ddown_bias, part.ddown_bias),
                (&mut grad.dgate_up_adapter.da, part.dgate_up_adapter.da),
                (&mut grad.dgate_up_adapter.db, part.dgate_up_adapter.db),
                (&mut grad.ddown_adapter.da, part.ddown_adapter.da),
                (&mut grad.ddown_adapter.db, part.ddown_adapter.db),
            ] {
                to[expert * expert_grad.len()..(expert + 1) * expert_grad.len()].copy_from_slice(&expert_grad);
            }
        }
        sum_pairs(routing, &dpairs, None, hidden, &mut grad.dx);
        Ok(grad)
    }
}

/// Adds the rows `[P, width]` of each token's pairs, times their weights, to the token's row of `to` `[N, width]`, in the order of the
/// pairs.
fn sum_pairs(routing: &Routing, rows: &[f32], weights: Option<&[f32]>, width: usize, to: &mut [f32]) {
    let (top, block) = (routing.top, super::ROWS);
    to.par_chunks_mut((block * width).max(1)).enumerate().for_each(|(number, to)| {
        for (token, to) in to.chunks_exact_mut(width).enumerate().map(|(i, to)| (number * block + i, to)) {
            for pair in token * top..(token + 1) * top {
                let (weight, place) = (weights.map_or(1.0, |weights| weights[pair]), routing.places[pair] as usize);
                let row = &rows[place * width..(place + 1) * width];
                to.iter_mut().zip(row).for_each(|(to, value)| *to += weight * value);
            }
        }
    });
}

fn scale_rows(rows: &mut [f32], factors: &[f32], width: usize) {
    for (row, factor) in rows.chunks_exact_mut(width.max(1)).zip(factors) {
        row.iter_mut().for_each(|value| *value *= factor);
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
