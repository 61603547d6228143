//! The loss of tokens with its surroundings: shared log-ratios, weights, the entropy bonus, and all derivatives.
//!
//! A [`Real`] stands for one token, for the tokens of a sequence ([`crate::backend_api::real::List`]), or in a compiled program for all N
//! tokens of a batch, including masked tokens (whose weight is 0). The caller computes sums over a sequence.

use super::{TokenInputs, TokenWeight, shares_mean, weighted};
use crate::backend_api::real::{Dual, List, Real};
use crate::backend_api::token_columns::{Recorded, TokenColumns};
use crate::config::LossConfig;

/// The inputs of the loss; every entry is `[N]`. Masked tokens hold finite numbers and weights of 0.
#[derive(Clone, Debug)]
pub struct BatchTerms<R> {
    /// Log-probabilities under the policy, in nats.
    pub logp: R,
    /// Entropies, in nats.
    pub entropy: R,
    /// The other inputs; `share` is 0 at masked tokens.
    pub columns: TokenColumns<R>,
    /// Which log-probabilities the columns contain.
    pub recorded: Recorded,
}

/// The loss with its derivatives and metrics; every entry is `[N]`, 0 at masked tokens.
#[derive(Clone, Debug)]
pub struct BatchLoss<R> {
    /// Weighted terms of the token, minus its entropy bonus.
    pub loss: R,
    /// The weighted policy term alone.
    pub policy: R,
    /// dL/dlogp.
    pub dlogp: R,
    /// dL/dentropy.
    pub dentropy: R,
    /// The KL term; `None` if beta is 0.
    pub kl: Option<R>,
    /// 1 if the token is clipped below, else 0.
    pub low_clipped: R,
    /// 1 if the token is clipped above, else 0.
    pub high_clipped: R,
    /// 1 if the dual clip binds, else 0.
    pub dual_clipped: R,
    /// The importance ratio.
    pub ratio: R,
    /// logp - old logp of the token; `None` on-policy.
    pub log_ratio: Option<R>,
    /// -logp.
    pub nll: R,
    /// The loss's own statistic, else 0.
    pub statistic: Option<R>,
}

impl<R: Real> TokenColumns<R> {
    /// Returns the inputs of the loss other than the log-probability.
    pub fn inputs(&self, recorded: Recorded) -> TokenInputs<R> {
        TokenInputs {
            old_logp: recorded.old.then(|| self.old_logp.clone()),
            ref_logp: recorded.reference.then(|| self.ref_logp.clone()),
            sampler_logp: recorded.sampler.then(|| self.sampler_logp.clone()),
            advantage: self.advantage.clone(),
            token_advantage: self.token_advantage.clone(),
            factor: self.policy_factor.clone(),
            kl_cov_mask: self.kl_cov_mask.clone(),
        }
    }

    /// Returns the weights of the terms.
    pub fn weight(&self) -> TokenWeight<R> {
        TokenWeight { policy: self.policy_weight.clone(), kl: self.kl_weight.clone(), nll: self.nll_weight.clone() }
    }
}

impl BatchTerms<List<f64>> {
    /// Joins the tokens of a sequence.
    pub(crate) fn of_sequence(tokens: &[BatchTerms<f64>], recorded: Recorded) -> Self {
        let list = |of: &dyn Fn(&BatchTerms<f64>) -> f64| List(tokens.iter().map(of).collect());
        let column = |i| list(&|token| token.columns.iter().nth(i).copied().unwrap_or_default());
        Self {
            logp: list(&|token| token.logp),
            entropy: list(&|token| token.entropy),
            columns: TokenColumns::from_fn(column),
            recorded,
        }
    }
}

impl<R> BatchLoss<R> {
    /// Applies `f` to every entry.
    pub fn map<S>(&self, f: impl Fn(&R) -> S) -> BatchLoss<S> {
        BatchLoss {
            loss: f(&self.loss),
            policy: f(&self.policy),
            dlogp: f(&self.dlogp),
            dentropy: f(&self.dentropy),
            kl: self.kl.as_ref().map(&f),
            low_clipped: f(&self.low_clipped),
            high_clipped: f(&self.high_clipped),
            dual_clipped: f(&self.dual_clipped),
            ratio: f(&self.ratio),
            log_ratio: self.log_ratio.as_ref().map(&f),
            nll: f(&self.nll),
            statistic: self.statistic.as_ref().map(&f),
        }
    }
}

/// Computes the loss of a batch. `sequence_sum` returns, for every token, the sum over the tokens of its sequence.
///
/// The reference's log-probabilities must be present if `config.beta` is not 0; [`crate::backend_api::evaluate::Evaluator::new`] checks that.
pub fn batch_loss<R: Real>(config: &LossConfig, terms: &BatchTerms<R>, sequence_sum: impl Fn(&R) -> R) -> BatchLoss<R> {
    let BatchTerms { logp, entropy, columns, recorded } = terms;
    let TokenColumns { share, .. } = columns;
    let active = share.constant(0.0).lt(share);
    let zero = share.constant(0.0);
    let kept = |value: &R| R::select(&active, value, &zero);
    let (weight, inputs) = (columns.weight(), columns.inputs(*recorded));
    let (value, dlogp) = if config.is_token_level() {
        let grad = inputs.grad(config, &weight, logp, None);
        (grad.value, grad.of_logp)
    } else {
        let part = inputs.shared_part(config, logp) * Dual::fixed(columns.log_ratio_scale.clone());
        // A token contributes its share to a mean and its full value to a sum.
        let shared = |value: R| if shares_mean(config) { value * share.clone() } else { value };
        let log_ratio = sequence_sum(&shared(kept(&part.value))) + columns.log_ratio_bias.clone();
        let grad = inputs.grad(config, &weight, logp, Some(&log_ratio));
        let through = shared(sequence_sum(&grad.of_shared) * part.tangent);
        // A NaN in the sequence must not reach its masked tokens.
        (grad.value, grad.of_logp + kept(&through))
    };
    let bonus = columns.entropy_weight.clone();
    let loss = weight.sum(&value.policy, value.kl.as_ref(), &value.nll);
    BatchLoss {
        // Without a bonus the entropy is not read: at masked tokens it may be any value.
        loss: if config.entropy_coef == 0.0 { loss } else { loss - kept(&(bonus.clone() * entropy.clone())) },
        policy: weighted(&weight.policy, &value.policy),
        dlogp,
        dentropy: -bonus,
        kl: value.kl.map(|kl| kept(&kl)),
        low_clipped: kept(&value.low_clipped),
        high_clipped: kept(&value.high_clipped),
        dual_clipped: kept(&value.dual_clipped),
        ratio: kept(&value.ratio),
        log_ratio: recorded.old.then(|| kept(&(logp.clone() - columns.old_logp.clone()))),
        nll: kept(&value.nll),
        statistic: Some(kept(&value.statistic)),
    }
}
