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

use super::stored::StoredWeight;
use super::{Activation, Add, Layers, PackedWeight, fits};
use crate::threads::slices::*;
use grpo_core::error::{Error, Result};
use std::ops::Range;

/// The experts of each of N tokens.
#[derive(Clone, Debug)]
pub struct Routing {
    /// The weight of each token's experts, `[N, k]`, from the largest logit to the smallest.
    pub weights: Vec<f32>,
    /// The experts `[N, k]`.
    chosen: Vec<u32>,
    /// The sorted place of each pair, `[N, k]`.
    places: Vec<u32>,
    /// The pair `n k + j` at each sorted place, `[P]`.
    pairs: Vec<u32>,
    /// The first sorted place of each expert, and P.
    starts: Vec<usize>,
    top: usize,
    normalised: bool,
}

impl Routing {
    /// Returns the number of tokens of each expert, `[E]`.
    pub fn loads(&self) -> Vec<usize> {
        self.starts.windows(2).map(|ends| ends[1] - ends[0]).collect()
    }

    /// Returns the experts `[N, k]` of each token.
    pub fn chosen(&self) -> &[u32] {
        &self.chosen
    }

    fn tokens(&self, expert: usize) -> impl Iterator<Item = usize> {
        self.pairs[self.places_of(expert)].iter().map(|pair| *pair as usize / self.top)
    }

    fn places_of(&self, expert: usize) -> Range<usize> {
        self.starts[expert]..self.starts[expert + 1]
    }

    /// Copies the rows `[tokens of the expert, width]` of `x` `[N, width]`.
    fn rows_of(&self, expert: usize, x: &[f32], width: usize) -> Vec<f32> {
        self.tokens(expert).flat_map(|token| &x[token * width..(token + 1) * width]).copied().collect()
    }
}

/// The same matrix of all experts, such as gate and up, in one of three forms.
#[derive(Debug)]
pub struct ExpertWeights<'a> {
    /// The matrix of each expert.
    pub matrices: Vec<ExpertMatrix<'a>>,
    /// Biases `[E, out]`.
    pub biases: Option<&'a [f32]>,
    /// LoRA adapters of the matrices.
    pub adapter: Option<ExpertAdapter<'a>>,
    /// `[in, out]`.
    pub dims: [usize; 2],
}

/// LoRA adapters of the same matrix of all experts: an expert adds `scale` x A^T B^T to its output, in f32.
#[derive(Clone, Copy, Debug)]
pub struct ExpertAdapter<'a> {
    /// A `[E, r, in]`.
    pub a: &'a [f32],
    /// B `[E, out, r]`.
    pub b: &'a [f32],
    /// r, the rank of an expert's adapter.
    pub rank: usize,
    /// The scaling of B A.
    pub scale: f32,
}

/// The gradients of an [`ExpertAdapter`]; empty without an adapter.
#[derive(Clone, Debug, Default)]
pub struct ExpertAdapterGrad {
    /// dL/dA `[E, r, in]`.
    pub da: Vec<f32>,
    /// dL/dB `[E, out, r]`.
    pub db: Vec<f32>,
}

impl<'a> ExpertAdapter<'a> {
    /// Returns A `[r, in]` and B `[out, r]` of an expert.
    fn of(&self, expert: usize, [input, output]: [usize; 2]) -> [&'a [f32]; 2] {
        let (a, b) = (self.rank * input, output * self.rank);
        [&self.a[expert * a..(expert + 1) * a], &self.b[expert * b..(expert + 1) * b]]
    }

    /// Adds `scale` x A^T B^T to y `[n, out]`.
    fn add_to(&self, y: &mut [f32], expert: usize, x: &[f32], dims: [usize; 2]) -> Result<()> {
        let ([a, b], layers, [input, output]) = (self.of(expert, dims), Layers::new(), dims);
        let n = x.len() / input;
        let inner = layers.linear_dx(a, x, [n, self.rank, input])?;
        let outer = layers.linear_dx(b, &inner, [n, output, self.rank])?;
        y.iter_mut().zip(outer).for_each(|(y, added)| *y += self.scale * added);
        Ok(())
    }

    /// Adds `scale` dy B A to dx `[n, in]`.
    fn add_dx_to(&self, dx: &mut [f32], expert: usize, dy: &[f32], dims: [usize; 2]) -> Result<()> {
        let ([a, b], layers, [input, output]) = (self.of(expert, dims), Layers::new(), dims);
        let n = dy.len() / output;
        let inner = layers.linear(dy, b, Add::Nothing, [n, output, self.rank])?;
        let outer = layers.linear(&inner, a, Add::Nothing, [n, self.rank, input])?;
        dx.iter_mut().zip(outer).for_each(|(dx, added)| *dx += self.scale * added);
        Ok(())
    }

    /// Returns the gradients of an expert's A `[r, in]` and B `[out, r]` for x `[n, in]` and dL/dy `[n, out]`.
    fn grad(&self, expert: usize, x: &[f32], dy: &[f32], dims: [usize; 2]) -> Result<ExpertAdapterGrad> {
        let ([a, b], layers, [input, output]) = (self.of(expert, dims), Layers::new(), dims);
        let n = x.len() / input;
        let scaled: Vec<f32> = dy.iter().map(|dy| self.scale * dy).collect();
        let dinner = layers.linear(&scaled, b, Add::Nothing, [n, output, self.rank])?;
        let inner = layers.linear_dx(a, x, [n, self.rank, input])?;
        Ok(ExpertAdapterGrad {
            da: layers.linear_dweight(&dinner, x, [n, self.rank, input])?,
            db: layers.linear_dweight(&scaled, &inner, [n, output, self.rank])?,
        })
    }
}

/// The matrix of an expert.
#[derive(Debug)]
pub enum ExpertMatrix<'a> {
    /// `[in, out]`.
    Plain(&'a [f32]),
    /// In the layout of model files.
    Stored(StoredWeight<'a>),
    /// Packed for products.
    Packed(&'a PackedWeight),
}

impl ExpertWeights<'_> {
    fn product(&self, layers: &Layers, expert: usize, x: &[f32], n: usize) -> Result<Vec<f32>> {
        let [input, output] = self.dims;
        let bias = self.bias(expert);
        let add = bias.map_or(Add::Nothing, Add::Rows);
        let mut y = match &self.matrices[expert] {
            ExpertMatrix::Plain(weight) => layers.linear(x, weight, add, [n, input, output]),
            ExpertMatrix::Stored(weight) => layers.linear_stored(x, weight, add, n),
            ExpertMatrix::Packed(weight) => layers.linear_packed(x, weight, add, n),
        }?;
        if let Some(adapter) = &self.adapter {
            adapter.add_to(&mut y, expert, x, self.dims)?;
        }
        Ok(y)
    }

    fn dx(&self, layers: &Layers, expert: usize, dy: &[f32], n: usize) -> Result<Vec<f32>> {
        let [input, output] = self.dims;
        let mut dx = match &self.matrices[expert] {
            ExpertMatrix::Plain(weight) => layers.linear_dx(weight, dy, [n, input, output]),
            ExpertMatrix::Stored(weight) => layers.linear_stored_dx(weight, dy, n),
            ExpertMatrix::Packed(_) => Err(Error::shape("experts_grad", "weights", "plain or stored", "packed")),
        }?;
        if let Some(adapter) = &self.adapter {
            adapter.add_dx_to(&mut dx, expert, dy, self.dims)?;
        }
        Ok(dx)
    }

    fn bias(&self, expert: usize) -> Option<&[f32]> {
        self.biases.map(|biases| &biases[expert * self.dims[1]..(expert + 1) * self.dims[1]])
    }

    fn has_dims(&self, found: [usize; 2]) -> Result<()> {
        let expected = format!("{:?}", self.dims);
        if found == self.dims {
            Ok(())
        } else {
            Err(Error::shape("experts", "weights", expected, format!("{found:?}")))
        }
    }

    fn check(&self, experts: usize) -> Result<()> {
        if self.matrices.len() != experts {
            let found = format!("{} matrices", self.matrices.len());
            return Err(Error::shape("experts", "weights", format!("{experts} matrices"), found));
        }
        for matrix in &self.matrices {
            match matrix {
                ExpertMatrix::Plain(weight) => fits("experts", "weights", weight.len(), &self.dims)?,
                ExpertMatrix::Stored(weight) => self.has_dims(weight.dims())?,
                ExpertMatrix::Packed(weight) => self.has_dims(weight.dims())?,
            }
        }
        if let Some(ExpertAdapter { a, b, rank, .. }) = self.adapter {
            fits("experts", "A of adapters", a.len(), &[experts, rank, self.dims[0]])?;
            fits("experts", "B of adapters", b.len(), &[experts, self.dims[1], rank])?;
        }
        match self.biases {
            Some(biases) => fits("experts", "biases", biases.len(), &[experts, self.dims[1]]),
            None => Ok(()),
        }
    }
}

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

/// What an expert adds to the gradients.
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

/// Checks that the matrices of gate and up `[H, 2I]` and of the output `[I, H]` fit each other.
///
/// # Errors
/// [`Error::Shape`].
fn check_widths(gate_up: &ExpertWeights<'_>, down: &ExpertWeights<'_>) -> Result<()> {
    let ([hidden, both], [width, out]) = (gate_up.dims, down.dims);
    if both == 2 * width && out == hidden {
        return Ok(());
    }
    let expected = format!("[{}, {hidden}], for gate and up [{hidden}, {both}]", both / 2);
    Err(Error::shape("experts", "down", expected, format!("{:?}", down.dims)))
}

impl Layers {
    /// Chooses the `top` experts of each token with the largest of `experts` logits; of equal logits, those with the lowest index. The
    /// weights are a softmax over the chosen logits if `normalised`, and otherwise those of the softmax over all logits.
    ///
    /// # Errors
    /// [`Error::Shape`] if `logits` is not `[N, experts]`, or `top` is 0 or above `experts`.
    ///
    /// ```
    /// use backend_cpu::layers::Layers;
    ///
    /// let routing = Layers::new().route(&[0.0, 2.0, 2.0, 1.0], 4, 2, true)?;
    /// assert_eq!((routing.weights.as_slice(), routing.loads()), (&[0.5, 0.5][..], vec![0, 1, 1, 0]));
    /// # Ok::<(), grpo_core::Error>(())
    /// ```
    pub fn route(&self, logits: &[f32], experts: usize, top: usize, normalised: bool) -> Result<Routing> {
        self.route_to(logits, experts, top, self.choose(logits, experts, top)?, normalised)
    }

    /// Returns the experts `[N, top]` that [`Layers::route`] chooses, from the largest logit to the smallest.
    ///
    /// # Errors
    /// As [`Layers::route`].
    pub fn choose(&self, logits: &[f32], experts: usize, top: usize) -> Result<Vec<u32>> {
        if !(1..=experts).contains(&top) {
            return Err(Error::shape("route", "top", format!("between 1 and {experts}"), top));
        }
        let n = logits.len() / experts;
        fits("route", "logits", logits.len(), &[n, experts])?;
        let mut chosen = Vec::with_capacity(n * top);
        let mut order: Vec<u32> = Vec::with_capacity(experts);
        for logits in logits.chunks_exact(experts) {
            order.clear();
            order.extend(0..experts as u32);
            let descending = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
            if top < experts {
                order.select_nth_unstable_by(top - 1, descending);
            }
            let best = &mut order[..top];
            best.sort_unstable_by(descending);
            chosen.extend_from_slice(best);
        }
        Ok(chosen)
    }

    /// Returns the routing of tokens to given experts `chosen` `[N, top]`, with the weights of [`Layers::route`].
    ///
    /// # Errors
    /// [`Error::Shape`] if the sizes do not fit each other, or a token has an unknown expert or the same one twice.
    pub fn route_to(
        &self,
        logits: &[f32],
        experts: usize,
        top: usize,
        chosen: Vec<u32>,
        normalised: bool,
    ) -> Result<Routing> {
        let n = chosen.len() / top.max(1);
        fits("route_to", "chosen", chosen.len(), &[n, top])?;
        fits("route_to", "logits", logits.len(), &[n, experts])?;
        let mut weights = Vec::with_capacity(n * top);
        for (logits, best) in logits.chunks_exact(experts.max(1)).zip(chosen.chunks_exact(top.max(1))) {
            let repeats = |i: usize| best[..i].contains(&best[i]);
            if best.iter().any(|expert| *expert as usize >= experts) || (0..top).any(repeats) {
                let expected = format!("different experts below {experts} for each token");
                return Err(Error::shape("route_to", "chosen", expected, format!("{best:?}")));
            }
            let of_best = || best.iter().map(|expert| logits[*expert as usize]);
            let max = match normalised {
                true => of_best().fold(f32::NEG_INFINITY, f32::max),
                false => logits.iter().copied().fold(f32::NEG_INFINITY, f32::max),
            };
            let sum: f32 = match normalised {
                true => of_best().map(|logit| (logit - max).exp()).sum(),
                false => logits.iter().map(|logit| (logit - max).exp()).sum(),
            };
            weights.extend(of_best().map(|logit| (logit - max).exp() / sum));
        }
        let mut starts = vec![0; experts + 1];
        chosen.iter().for_each(|expert| starts[*expert as usize + 1] += 1);
        (0..experts).for_each(|expert| starts[expert + 1] += starts[expert]);
        let (mut next, mut pairs) = (starts.clone(), vec![0; n * top]);
        let place = |(pair, expert): (usize, &u32)| {
            let next = &mut next[*expert as usize];
            pairs[*next] = pair as u32;
            *next += 1;
            (*next - 1) as u32
        };
        let places = chosen.iter().enumerate().map(place).collect();
        Ok(Routing { weights, chosen, places, pairs, starts, top, normalised })
    }

    /// Returns the sum `[E]` over tokens of `counts` `[N]` times the softmax of each token's `logits` `[N, E]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if `logits` is not `[N, experts]`.
    ///
    /// ```
    /// use backend_cpu::layers::Layers;
    ///
    /// let sums = Layers::new().expert_shares(&[0.0, 0.0, 1.0, 1.0], &[1.0, 2.0], 2)?;
    /// assert_eq!(sums, [1.5, 1.5]);
    /// # Ok::<(), grpo_core::Error>(())
    /// ```
    pub fn expert_shares(&self, logits: &[f32], counts: &[f32], experts: usize) -> Result<Vec<f32>> {
        fits("expert_shares", "logits", logits.len(), &[counts.len(), experts])?;
        let mut sums = vec![0.0; experts];
        for (logits, count) in logits.chunks_exact(experts.max(1)).zip(counts) {
            let (max, sum) = softmax_parts(logits);
            let factor = f64::from(*count) / sum;
            sums.iter_mut().zip(logits).for_each(|(to, logit)| *to += factor * f64::from(logit - max).exp());
        }
        Ok(sums.into_iter().map(|sum| sum as f32).collect())
    }

    /// Computes dL/d(logits) `[N, E]` of [`Layers::expert_shares`] from dL/d(sums) `[E]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if a slice does not match the others.
    pub fn expert_shares_grad(&self, logits: &[f32], counts: &[f32], dsums: &[f32]) -> Result<Vec<f32>> {
        let experts = dsums.len();
        fits("expert_shares_grad", "logits", logits.len(), &[counts.len(), experts])?;
        let mut dlogits = Vec::with_capacity(logits.len());
        for (logits, count) in logits.chunks_exact(experts.max(1)).zip(counts) {
            let (max, sum) = softmax_parts(logits);
            let share = |logit: &f32| f64::from(logit - max).exp() / sum;
            let mean: f64 = logits.iter().zip(dsums).map(|(logit, dsum)| share(logit) * f64::from(*dsum)).sum();
            let slopes = logits.iter().zip(dsums).map(|(logit, dsum)| share(logit) * (f64::from(*dsum) - mean));
            dlogits.extend(slopes.map(|slope| (f64::from(*count) * slope) as f32));
        }
        Ok(dlogits)
    }

    /// Computes dL/d(logits) `[N, E]` of [`Layers::route`] from dL/d(weights) `[N, k]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if a slice does not match the routing.
    pub fn route_grad(&self, routing: &Routing, logits: &[f32], dweights: &[f32]) -> Result<Vec<f32>> {
        let (experts, top) = (routing.starts.len() - 1, routing.top);
        let n = routing.chosen.len() / top;
        fits("route_grad", "logits", logits.len(), &[n, experts])?;
        fits("route_grad", "dweights", dweights.len(), &[n, top])?;
        let mut dlogits = vec![0.0; n * experts];
        for (token, (to, logits)) in dlogits.chunks_exact_mut(experts).zip(logits.chunks_exact(experts)).enumerate() {
            let of = token * top..(token + 1) * top;
            let (weights, chosen, dweights) =
                (&routing.weights[of.clone()], &routing.chosen[of.clone()], &dweights[of]);
            let mean: f32 = weights.iter().zip(dweights).map(|(weight, dweight)| weight * dweight).sum();
            if !routing.normalised {
                let max = logits.iter().fold(f32::NEG_INFINITY, |max, logit| max.max(*logit));
                let sum: f32 = logits.iter().map(|logit| (logit - max).exp()).sum();
                to.iter_mut().zip(logits).for_each(|(to, logit)| *to = -mean * (logit - max).exp() / sum);
            }
            for ((weight, dweight), expert) in weights.iter().zip(dweights).zip(chosen) {
                let to = &mut to[*expert as usize];
                *to = if routing.normalised { weight * (dweight - mean) } else { *to + weight * dweight };
            }
        }
        Ok(dlogits)
    }

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
        let n = routing.chosen.len() / top;
        gate_up.check(experts)?;
        down.check(experts)?;
        check_widths(gate_up, down)?;
        fits("experts", "x", x.len(), &[n, hidden])?;
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

    /// Computes the gradients of [`Layers::experts`] from dL/dy `[N, H]`; `gates` are the second result of the forward pass. `of_weights`
    /// requests the gradients of the experts' matrices and biases; those of adapters are always computed.
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
        of_weights: bool,
    ) -> Result<ExpertsGrad> {
        let (experts, top) = (routing.starts.len() - 1, routing.top);
        let ([hidden, both], [width, _]) = (gate_up.dims, down.dims);
        let n = routing.chosen.len() / top;
        gate_up.check(experts)?;
        down.check(experts)?;
        check_widths(gate_up, down)?;
        fits("experts_grad", "x", x.len(), &[n, hidden])?;
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
            let of_bias = |dy: &[f32]| down.bias(expert).map_or(0.0, |bias| dot(dy, bias));
            let products = dmixed.chunks_exact(width).zip(mixed.chunks_exact(width)).zip(dy.chunks_exact(hidden));
            let dweights = products.map(|((dmixed, mixed), dy)| dot(dmixed, mixed) + of_bias(dy)).collect();
            scale_rows(&mut dmixed, &weights, width);
            let dgates = self.gated_grad(gates, &dmixed, activation, width)?;
            let dx = gate_up.dx(self, expert, &dgates, count)?;
            let mut part = Part { dx, dweights, ..Part::default() };
            if of_weights || down.adapter.is_some() {
                scale_rows(&mut mixed, &weights, width);
            }
            if let Some(adapter) = gate_up.adapter {
                part.dgate_up_adapter = adapter.grad(expert, &rows, &dgates, gate_up.dims)?;
            }
            if let Some(adapter) = down.adapter {
                part.ddown_adapter = adapter.grad(expert, &mixed, &dy, down.dims)?;
            }
            if of_weights {
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
        let zeros = |is_there: bool, size: usize| vec![0.0; if is_there { experts * size } else { 0 }];
        let zeros_of_adapter = |of: &ExpertWeights<'_>| {
            let zeros = |values: fn(&ExpertAdapter<'_>) -> usize| vec![0.0; of.adapter.as_ref().map_or(0, values)];
            ExpertAdapterGrad { da: zeros(|adapter| adapter.a.len()), db: zeros(|adapter| adapter.b.len()) }
        };
        let mut grad = ExpertsGrad {
            dx: vec![0.0; n * hidden],
            dweights: vec![0.0; n * top],
            dgate_up: zeros(of_weights, hidden * both),
            dgate_up_bias: zeros(of_weights && gate_up.biases.is_some(), both),
            ddown: zeros(of_weights, width * hidden),
            ddown_bias: zeros(of_weights && down.biases.is_some(), hidden),
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
            for (to, of_expert) in [
                (&mut grad.dgate_up, part.dgate_up),
                (&mut grad.dgate_up_bias, part.dgate_up_bias),
                (&mut grad.ddown, part.ddown),
                (&mut grad.ddown_bias, part.ddown_bias),
                (&mut grad.dgate_up_adapter.da, part.dgate_up_adapter.da),
                (&mut grad.dgate_up_adapter.db, part.dgate_up_adapter.db),
                (&mut grad.ddown_adapter.da, part.ddown_adapter.da),
                (&mut grad.ddown_adapter.db, part.ddown_adapter.db),
            ] {
                to[expert * of_expert.len()..(expert + 1) * of_expert.len()].copy_from_slice(&of_expert);
            }
        }
        sum_pairs(routing, &dpairs, None, hidden, &mut grad.dx);
        Ok(grad)
    }
}

/// Returns the largest of a token's logits, and the sum of the exponentials of their distances to it.
fn softmax_parts(logits: &[f32]) -> (f32, f64) {
    let max = logits.iter().fold(f32::NEG_INFINITY, |max, logit| max.max(*logit));
    (max, logits.iter().map(|logit| f64::from(logit - max).exp()).sum())
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
