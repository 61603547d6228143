//! The router's choice of experts.
//!
//! Legend: N tokens, E experts, k experts of a token, P = N k pairs.

use crate::layers::{Layers, fits};
use grpo_core::error::{Error, Result};
use std::ops::Range;

/// The experts of each of N tokens.
#[derive(Clone, Debug)]
pub struct Routing {
    /// The weight of each token's experts, `[N, k]`, from the largest logit to the smallest.
    pub weights: Vec<f32>,
    /// The experts `[N, k]`.
    pub(super) chosen: Vec<u32>,
    /// The sorted place of each pair, `[N, k]`.
    pub(super) places: Vec<u32>,
    /// The pair `n k + j` at each sorted place, `[P]`.
    pub(super) pairs: Vec<u32>,
    /// The first sorted place of each expert, and P.
    pub(super) starts: Vec<usize>,
    pub(super) top: usize,
    normalised: bool,
    /// The factor of sigmoid scores; `None` for a softmax.
    sigmoid: Option<f32>,
}

/// Selects among experts in groups, as GLM-4.x and DeepSeek-V3 do (arXiv 2412.19437).
#[derive(Clone, Copy, Debug)]
pub struct ExpertGroups<'a> {
    /// The correction bias of each expert, `[E]`.
    pub bias: &'a [f32],
    /// The number of groups.
    pub count: usize,
    /// The number of groups of a token.
    pub chosen: usize,
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

    pub(super) fn places_of(&self, expert: usize) -> Range<usize> {
        self.starts[expert]..self.starts[expert + 1]
    }

    /// Copies the rows `[tokens of the expert, width]` of `x` `[N, width]`.
    pub(super) fn rows_of(&self, expert: usize, x: &[f32], width: usize) -> Vec<f32> {
        self.tokens(expert).flat_map(|token| &x[token * width..(token + 1) * width]).copied().collect()
    }
}

impl Layers {
    /// Chooses the `top` experts of each token with the largest of `experts` logits; of equal logits, those with the lowest index. The
    /// weights are a softmax over the chosen logits if `normalised`, and otherwise taken from the softmax over all logits.
    ///
    /// # Errors
    /// [`Error::Shape`] if `logits` is not `[N, experts]`, or `top` is 0 or above `experts`.
    ///
    /// ```
    /// use grpo_backend_cpu::layers::Layers;
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
        self.arrange(logits, experts, top, chosen, normalised, None)
    }

    /// Returns the ranks `[N, experts]` of experts for [`Layers::choose`]: the sigmoid of a logit plus the bias of its expert, and negative infinity
    /// outside of the groups of a token, whose two largest ranks have the largest sums.
    ///
    /// # Errors
    /// [`Error::Shape`] if the sizes do not fit each other, or a group has fewer than two experts.
    pub fn sigmoid_ranks(&self, logits: &[f32], experts: usize, groups: ExpertGroups<'_>) -> Result<Vec<f32>> {
        let ExpertGroups { bias, count, chosen } = groups;
        fits("sigmoid_ranks", "bias", bias.len(), &[experts])?;
        fits("sigmoid_ranks", "logits", logits.len(), &[logits.len() / experts.max(1), experts])?;
        if count == 0 || !experts.is_multiple_of(count) || experts / count < 2 || !(1..=count).contains(&chosen) {
            let expected = format!("a divisor of {experts} with two experts in a group, and at least {chosen} groups");
            return Err(Error::shape("sigmoid_ranks", "groups", expected, count));
        }
        let mut ranks: Vec<f32> = logits.iter().zip(bias.iter().cycle()).map(|(x, bias)| sigmoid(*x) + bias).collect();
        let size = experts / count;
        let best_two = |group: &[f32]| {
            group.iter().fold([f32::NEG_INFINITY; 2], |[first, second], rank| match *rank > first {
                true => [*rank, first],
                false => [first, second.max(*rank)],
            })
        };
        for ranks in ranks.chunks_exact_mut(experts) {
            let sums: Vec<f32> = ranks.chunks_exact(size).map(best_two).map(|[first, second]| first + second).collect();
            let kept = self.choose(&sums, count, chosen)?;
            for (group, ranks) in ranks.chunks_exact_mut(size).enumerate() {
                if !kept.contains(&(group as u32)) {
                    ranks.fill(f32::NEG_INFINITY);
                }
            }
        }
        Ok(ranks)
    }

    /// Returns the routing of tokens to given experts `chosen` `[N, top]`. Their weights are the sigmoids of their logits times `factor`, divided by the
    /// sum of a token's sigmoids if `normalised`.
    ///
    /// # Errors
    /// As [`Layers::route_to`].
    pub fn route_by_sigmoid(
        &self,
        logits: &[f32],
        experts: usize,
        top: usize,
        chosen: Vec<u32>,
        normalised: bool,
        factor: f32,
    ) -> Result<Routing> {
        self.arrange(logits, experts, top, chosen, normalised, Some(factor))
    }

    fn arrange(
        &self,
        logits: &[f32],
        experts: usize,
        top: usize,
        chosen: Vec<u32>,
        normalised: bool,
        sigmoid: Option<f32>,
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
            let best_logits = || best.iter().map(|expert| logits[*expert as usize]);
            if let Some(factor) = sigmoid {
                let sum = if normalised { best_logits().map(self::sigmoid).sum::<f32>() + SMALL } else { 1.0 };
                weights.extend(best_logits().map(|logit| self::sigmoid(logit) / sum * factor));
                continue;
            }
            let max = match normalised {
                true => best_logits().fold(f32::NEG_INFINITY, f32::max),
                false => logits.iter().copied().fold(f32::NEG_INFINITY, f32::max),
            };
            let sum: f32 = match normalised {
                true => best_logits().map(|logit| (logit - max).exp()).sum(),
                false => logits.iter().map(|logit| (logit - max).exp()).sum(),
            };
            weights.extend(best_logits().map(|logit| (logit - max).exp() / sum));
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
        Ok(Routing { weights, chosen, places, pairs, starts, top, normalised, sigmoid })
    }

    /// Returns the sum `[E]` over tokens of `counts` `[N]` times the softmax of each token's `logits` `[N, E]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if `logits` is not `[N, experts]`.
    ///
    /// ```
    /// use grpo_backend_cpu::layers::Layers;
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
            if let Some(factor) = routing.sigmoid {
                let scores = || chosen.iter().map(|expert| sigmoid(logits[*expert as usize]));
                let sum = if routing.normalised { scores().sum::<f32>() + SMALL } else { 1.0 };
                let shared = if routing.normalised { mean } else { 0.0 };
                for ((score, dweight), expert) in scores().zip(dweights).zip(chosen) {
                    to[*expert as usize] = (factor * dweight - shared) / sum * score * (1.0 - score);
                }
                continue;
            }
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
}

/// The number that the sum of a token's scores is increased by, as in transformers.
const SMALL: f32 = 1e-20;

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns the largest of a token's logits, and the sum of the exponentials of their distances to it.
fn softmax_parts(logits: &[f32]) -> (f32, f64) {
    let max = logits.iter().fold(f32::NEG_INFINITY, |max, logit| max.max(*logit));
    (max, logits.iter().map(|logit| f64::from(logit - max).exp()).sum())
}
