//! Statistics and the load balancing loss of the routers of a forward pass.
//!
//! Letters in shapes: L layers, E experts, k experts of a token.

use super::autodiff_ops::{fitting, operand, read, reread};
use super::params::to_host;
use backend_cpu::layers::{Layers, Routing};
use burn::backend::flex::FlexTensor;
use burn::tensor::{Tensor, TensorData};
use grpo_burn::custom_op::{Derivative, Graph, record, tensor};
use policy::{Error, Result, RouterStatistics};
use std::sync::Arc;

/// Observes the routers of a forward pass. The default observes nothing.
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
}

impl Routers {
    /// Creates an observer that counts each row `counts` `[N]` times.
    pub(super) fn new(counts: Arc<[f32]>, with_aux_loss: bool) -> Self {
        Self { counts, with_aux_loss, ..Self::default() }
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
        let Self { counts, experts, tokens, shares, .. } = self;
        let layers = tokens.len() / experts.max(1);
        let rows = layers as f64 * counts.iter().map(|count| f64::from(*count)).sum::<f64>();
        let aux_loss = shares.map(|shares| {
            let chosen = |expert: usize| tokens.chunks_exact(experts).map(|layer| layer[expert]).sum::<f64>();
            let factors = (0..experts).map(|expert| (experts as f64 * chosen(expert) / rows / rows) as f32);
            let factors = TensorData::new(factors.collect::<Vec<_>>(), [1, experts]);
            let factors = Tensor::<2>::from_data(factors, &shares.device());
            (shares * factors).sum()
        });
        let statistics = RouterStatistics::new(experts, tokens);
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
