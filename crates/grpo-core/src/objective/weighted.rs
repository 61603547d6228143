//! The loss of tokens with its surroundings: shared log-ratios, weights, the entropy bonus, and all derivatives.
//!
//! A [`Real`] stands for one token, for the tokens of a sequence ([`crate::backend_api::real::List`]), or in a compiled program for all N
//! tokens of a batch, including masked tokens (whose weight is 0). The caller computes sums over a sequence.

use super::{TokenLoss, TokenTerms, counts, shared_part, shares_mean, token_loss, weighted};
use crate::backend_api::real::{Dual, Real};
use crate::backend_api::token_columns::{LossSums, Recorded, TokenColumns};
use crate::config::LossConfig;

impl<R: Real> TokenColumns<R> {
    /// Returns the inputs of the formula, whose only variables are `logp` and `shared`.
    fn terms(&self, recorded: Recorded, logp: Dual<R>, shared: Option<Dual<R>>) -> TokenTerms<Dual<R>> {
        let fixed = |column: &R| Dual::fixed(column.clone());
        TokenTerms {
            old_logp: if recorded.old { fixed(&self.old_logp) } else { logp.stop_gradient() },
            logp,
            shared,
            ref_logp: recorded.reference.then(|| fixed(&self.ref_logp)),
            sampler_logp: recorded.sampler.then(|| fixed(&self.sampler_logp)),
            advantage: fixed(&self.advantage),
            factor: fixed(&self.policy_factor),
            kl_cov_mask: fixed(&self.kl_cov_mask),
        }
    }

    /// Returns the weighted sum of the token's terms, or of their derivatives.
    fn weigh(&self, loss: &TokenLoss<Dual<R>>, part: impl Fn(&Dual<R>) -> &R) -> R {
        weighted(&self.policy_weight, part(&loss.policy.value))
            + weighted(&self.nll_weight, part(&loss.nll))
            + weighted(&self.kl_weight, part(&loss.kl))
    }
}

/// Computes the loss of a batch: every token's summand of each sum, and dL/dlogp; each is `[N]`, 0 at masked tokens. dL/dentropy is minus
/// the entropy weight.
///
/// `logp` and `entropy` are in nats. Masked tokens hold finite numbers, weights of 0 and a share of 0; only their entropy may be any value.
/// `sequence_sum` returns, for every token, the sum over the tokens of its sequence. Of the summands, the caller multiplies `low_clipped`,
/// `high_clipped` and `statistic` by [`TokenColumns::clip_share`], and averages `low_min` and `high_max` over a sequence.
///
/// The reference's log-probabilities must be present if `config.beta` is not 0; [`crate::backend_api::evaluate::Evaluator::new`] checks that.
pub fn batch_loss<R: Real>(
    config: &LossConfig,
    columns: &TokenColumns<R>,
    recorded: Recorded,
    (logp, entropy): (&R, &R),
    sequence_sum: impl Fn(&R) -> R,
) -> (LossSums<R>, R) {
    let share = &columns.share;
    let zero = share.constant(0.0);
    let active = zero.lt(share);
    let kept = |value: &R| R::select(&active, value, &zero);
    let at = |logp: Dual<R>, shared: Option<Dual<R>>| token_loss(config, &columns.terms(recorded, logp, shared));
    let slope = |loss: &TokenLoss<Dual<R>>| columns.weigh(loss, |term| &term.tangent);
    let variable = Dual::variable(logp.clone());
    let (loss, dlogp) = if config.is_token_level() {
        let loss = at(variable, None);
        let dlogp = slope(&loss);
        (loss, dlogp)
    } else {
        let TokenTerms { logp: own, old_logp, .. } = columns.terms(recorded, variable.clone(), None);
        let part = shared_part(config, &own, &old_logp, &Dual::fixed(columns.token_advantage.clone()))
            * Dual::fixed(columns.log_ratio_scale.clone());
        // A token contributes its share to a mean and its full value to a sum.
        let shared = |value: R| if shares_mean(config) { value * share.clone() } else { value };
        let log_ratio = sequence_sum(&shared(kept(&part.value))) + columns.log_ratio_bias.clone();
        let loss = at(variable, Some(Dual::fixed(log_ratio.clone())));
        let by_shared = at(Dual::fixed(logp.clone()), Some(Dual::variable(log_ratio)));
        let through = shared(sequence_sum(&slope(&by_shared)) * part.tangent);
        // A NaN in the sequence must not reach its masked tokens.
        let dlogp = slope(&loss) + kept(&through);
        (loss, dlogp)
    };
    let sum = columns.weigh(&loss, |term| &term.value);
    let TokenLoss { policy, kl, nll, ratio } = &loss;
    let value = |term: &Dual<R>| kept(&term.value);
    let (low_clipped, high_clipped, ratio) = (value(&policy.low_clipped), value(&policy.high_clipped), value(ratio));
    let bonus = || columns.entropy_weight.clone() * entropy.clone();
    let sums = LossSums {
        // Without a bonus the entropy is not read.
        loss: if config.entropy_coef == 0.0 { sum } else { sum - kept(&bonus()) },
        policy: weighted(&columns.policy_weight, &policy.value.value),
        kl: value(kl),
        entropy: kept(entropy),
        low_clipped: low_clipped.clone(),
        high_clipped: high_clipped.clone(),
        statistic: value(&policy.statistic),
        nll: R::select(&counts(&columns.nll_weight), &nll.value, &zero),
        log_ratio: if recorded.old { kept(&(logp.clone() - columns.old_logp.clone())) } else { zero.clone() },
        ratio: ratio.clone(),
        dual_clipped: value(&policy.dual_clipped),
        low_min: low_clipped,
        ratio_min: ratio.clone(),
        high_max: high_clipped,
        ratio_max: ratio,
    };
    (sums, dlogp)
}
