//! Statistics and the load balancing loss of the routers of a forward pass.
//!
//! Letters in shapes: L layers, E experts, k experts of a token.

use super::autodiff_ops::{fitting, operand, read, reread};
use super::host::to_host;
use burn::backend::flex::FlexTensor;
use burn::tensor::{Tensor, TensorData};
use grpo_backend_cpu::layers::{Layers, Routing};
use grpo_burn::custom_op::{Derivative, Graph, record, tensor};
use grpo_policy::{Error, Result, RouterStatistics};
use std::sync::Arc;

/// Marks a token without recorded experts.
pub(super) const MISSING: u16 = u16::MAX;

/// Observes the routers of a forward pass, and replaces their choices by recorded ones. The default does neither.
#[derive(Debug, Default)]
pub(crate) struct Routers {
    /// The number of times that each row counts, `[N]`.
    counts: Arc<[f32]>,
    /// `true` if the load balancing loss is computed.
    with_aux_loss: bool,
    experts: usize,
    /// The number of tokens of each expert, `[L, E]`.
    tokens: Vec<f64>,
    /// The sum of the shares `[1, E]` of all counted rows and layers.
    shares: Option<Tensor<2>>,
    /// The experts `[N, L, k]` that replace the choices; [`MISSING`] for tokens whose experts are chosen.
    recorded: Option<Vec<u16>>,
    /// The next layer of the recorded experts.
    layer: usize,
    /// The number of pairs of token and layer with recorded experts, and of those in which the router chooses others.
    replayed: [f64; 2],
    /// For each row with recorded experts, `true` if the router of a layer chooses others.
    differs: Vec<Option<bool>>,
}

impl Routers {
    /// Creates an observer that counts each row `counts` `[N]` times.
    pub(super) fn new(counts: Arc<[f32]>, with_aux_loss: bool) -> Self {
        Self { counts, with_aux_loss, ..Self::default() }
    }

    /// Replaces the choices by the experts `[N, L, k]`.
    pub(super) fn with_recorded(self, recorded: Option<Vec<u16>>) -> Self {
        Self { recorded, ..self }
    }

    /// Returns the experts `[N, k]` of the next layer, which the router has `chosen` or which are recorded.
    pub(super) fn replay(&mut self, mut chosen: Vec<u32>, top: usize) -> Vec<u32> {
        let Some(recorded) = &self.recorded else { return chosen };
        let width = recorded.len() * top / chosen.len().max(1);
        self.differs.resize(chosen.len() / top.max(1), None);
        let rows = chosen.chunks_exact_mut(top).zip(recorded.chunks_exact(width.max(1))).enumerate();
        for (row, (chosen, recorded)) in rows {
            let recorded = &recorded[self.layer * top..(self.layer + 1) * top];
            if recorded[0] == MISSING {
                continue;
            }
            let differs = !chosen.iter().all(|expert| recorded.iter().any(|other| u32::from(*other) == *expert));
            let count = self.counts.get(row).copied().map_or(1.0, f64::from);
            self.replayed[0] += count;
            self.replayed[1] += if differs { count } else { 0.0 };
            *self.differs[row].get_or_insert_default() |= differs;
            chosen.iter_mut().zip(recorded).for_each(|(to, expert)| *to = u32::from(*expert));
        }
        self.layer += 1;
        chosen
    }

    /// Returns `true` if the load balancing loss is computed.
    pub(super) fn with_aux_loss(&self) -> bool {
        self.with_aux_loss
    }

    /// Adds the router of the next layer, with its logits `[N, E]`.
    pub(super) fn observe(&mut self, logits: Tensor<2>, routing: &Routing) -> Result<()> {
        let [n, experts] = logits.dims();
        if self.counts.is_empty() {
            return Ok(());
        }
        if self.counts.len() != n {
            return Err(Error::argument("a router", format!("{} rows", self.counts.len()), n));
        }
        let first = self.tokens.len();
        self.tokens.resize(first + experts, 0.0);
        self.experts = experts;
        let top = routing.chosen().len() / n.max(1);
        for (chosen, count) in routing.chosen().chunks_exact(top.max(1)).zip(&*self.counts) {
            chosen.iter().for_each(|expert| self.tokens[first + *expert as usize] += f64::from(*count));
        }
        if self.with_aux_loss {
            let shares = expert_shares(logits, &self.counts)?;
            self.shares = Some(match self.shares.take() {
                Some(sum) => sum + shares,
                None => shares,
            });
        }
        Ok(())
    }

    /// Returns the statistics, and the load balancing loss of all layers together as a differentiable tensor `[1]` and its value, if it is computed:
    /// E times the sum over experts of f P, where f is the mean number of times that a token chooses the expert, and P the mean of its softmax
    /// over all experts. f has no gradient, as in `load_balancing_loss_func` of transformers.
    pub(crate) fn finish(self) -> (RouterStatistics, Option<(Tensor<1>, f64)>) {
        let Self { counts, experts, tokens, shares, replayed, differs, .. } = self;
        let layers = tokens.len() / experts.max(1);
        let rows = layers as f64 * counts.iter().map(|count| f64::from(*count)).sum::<f64>();
        let aux_loss = shares.map(|shares| {
            let chosen = |expert: usize| tokens.chunks_exact(experts).map(|layer| layer[expert]).sum::<f64>();
            let factors = (0..experts).map(|expert| (experts as f64 * chosen(expert) / rows / rows) as f32);
            let factors = TensorData::new(factors.collect::<Vec<_>>(), [1, experts]);
            let factors = Tensor::<2>::from_data(factors, &shares.device());
            (shares * factors).sum()
        });
        let rows = differs.into_iter().enumerate().filter_map(|(row, differs)| Some((row, differs?)));
        let replayed_tokens = rows.fold([0.0; 2], |[all, others], (row, differs)| {
            let count = counts.get(row).copied().map_or(1.0, f64::from);
            [all + count, others + if differs { count } else { 0.0 }]
        });
        let statistics = RouterStatistics::new(experts, tokens).with_replay(replayed, replayed_tokens);
        match aux_loss {
            Some(aux_loss) => {
                let value = to_host(aux_loss.clone().inner()).first().copied().unwrap_or(f32::NAN);
                (statistics.with_aux_loss(value.into()), Some((aux_loss, value.into())))
            }
            None => (statistics, None),
        }
    }
}

/// Returns the sum `[1, E]` over rows of `counts` `[N]` times the softmax of `logits` `[N, E]`.
fn expert_shares(logits: Tensor<2>, counts: &Arc<[f32]>) -> Result<Tensor<2>> {
    let [n, experts] = logits.dims();
    let mut graph = Graph::default();
    let logits = operand(&mut graph, "logits", logits)?;
    let sums = Layers::new().expert_shares(read("logits", &logits.storage)?, counts, experts)?;
    let derivative = ExpertSharesGrad { logits: logits.storage, counts: Arc::clone(counts), dims: [n, experts] };
    Ok(record(graph, tensor(sums, [1, experts]), [logits.node], derivative))
}

#[derive(Clone, Debug)]
struct ExpertSharesGrad {
    logits: FlexTensor,
    counts: Arc<[f32]>,
    dims: [usize; 2],
}

impl Derivative<1> for ExpertSharesGrad {
    fn gradients(self, upstream: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let gradient = Layers::new().expert_shares_grad(reread(&self.logits), &self.counts, reread(&upstream));
        [Some(tensor(fitting(gradient), self.dims))]
    }
}
