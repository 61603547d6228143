//! The loss of a whole batch at once, for programs in which a number is a vector over its tokens.
//!
//! The counterpart of [`crate::evaluate::Evaluator`], which feeds one token after the other: here a [`Real`] stands for
//! all N tokens, masked ones included (their weight is 0), and sums over a sequence are the program's business.

use crate::config::LossConfig;
use crate::objective::{TokenInputs, TokenWeight, shares_mean, weighted};
use crate::real::{Dual, Real};

/// What is known of the tokens; every entry `[N]`. Masked tokens hold finite numbers and weights of 0.
#[derive(Clone, Debug)]
pub struct BatchTerms<R> {
    /// Log-probabilities under the policy, in nats.
    pub logp: R,
    /// Entropies, in nats.
    pub entropy: R,
    /// Under the policy that sampled; without it the ratio is 1.
    pub old_logp: Option<R>,
    /// Under the reference; needed when beta is not 0.
    pub ref_logp: Option<R>,
    /// Under the engine that sampled, NaN where it gave none; needed where the KL term is weighed against it.
    pub sampler_logp: Option<R>,
    /// [`crate::evaluate::Evaluator::advantage`].
    pub advantage: R,
    /// The tokens' own advantages.
    pub direction: R,
    /// [`crate::weights::TokenWeights::policy`].
    pub weight: R,
    /// beta x [`crate::weights::TokenWeights::kl`].
    pub kl_weight: R,
    /// positive_example_nll_weight x [`crate::weights::TokenWeights::nll`].
    pub nll_weight: R,
    /// [`crate::evaluate::Evaluator::entropy_weight`].
    pub entropy_weight: R,
    /// [`crate::factors::TokenFactors::policy`].
    pub factor: R,
    /// [`crate::factors::TokenFactors::part`].
    pub part: R,
    /// [`crate::factors::TokenFactors::penalised`].
    pub penalised: R,
    /// [`crate::factors::TokenFactors::shift`].
    pub shift: R,
    /// 1 / active tokens of the token's sequence; 0 at masked tokens.
    pub share: R,
}

/// The loss and what comes with it; every entry `[N]`, 0 at masked tokens.
#[derive(Clone, Debug)]
pub struct BatchLoss<R> {
    /// Weighted terms of the token, less its entropy bonus.
    pub loss: R,
    /// Its weighted policy term alone.
    pub policy: R,
    /// dL/dlogp.
    pub dlogp: R,
    /// dL/dentropy.
    pub dentropy: R,
    /// The KL term; `None` when beta is 0.
    pub kl: Option<R>,
    /// 1 where the token is clipped below.
    pub low_clipped: R,
    /// 1 where the token is clipped above.
    pub high_clipped: R,
    /// 1 where the second clip for negative advantages binds.
    pub dual_clipped: R,
    /// The importance ratio.
    pub ratio: R,
    /// logp - old logp of the token; `None` on-policy.
    pub log_ratio: Option<R>,
    /// -logp.
    pub nll: R,
    /// vespo's weight; `None` where there is none.
    pub phi: Option<R>,
}

/// The loss of a batch. `sequence_sum` gives every token the sum over the tokens of its sequence.
///
/// `terms.ref_logp` must be there when `config.beta` is not 0; [`crate::evaluate::Evaluator::new`] checks that.
pub fn batch_loss<R: Real>(config: &LossConfig, terms: &BatchTerms<R>, sequence_sum: impl Fn(&R) -> R) -> BatchLoss<R> {
    let BatchTerms { logp, entropy, entropy_weight, share, .. } = terms;
    let active = share.constant(0.0).lt(share);
    let zero = share.constant(0.0);
    let kept = |value: &R| R::select(&active, value, &zero);
    let weight =
        TokenWeight { policy: terms.weight.clone(), kl: terms.kl_weight.clone(), nll: terms.nll_weight.clone() };
    let inputs = TokenInputs {
        old_logp: terms.old_logp.clone(),
        ref_logp: terms.ref_logp.clone(),
        sampler_logp: terms.sampler_logp.clone(),
        advantage: terms.advantage.clone(),
        direction: terms.direction.clone(),
        factor: terms.factor.clone(),
        penalised: terms.penalised.clone(),
    };
    let (value, dlogp) = if config.is_token_level() {
        let slopes = inputs.slopes(config, &weight, logp, None);
        (slopes.value, slopes.of_logp)
    } else {
        let part = inputs.shared_part(config, logp) * Dual::fixed(terms.part.clone());
        // Of a mean each token has its share, of a sum all.
        let shared = |value: R| if shares_mean(config) { value * share.clone() } else { value };
        let log_ratio = sequence_sum(&shared(kept(&part.value))) + terms.shift.clone();
        let slopes = inputs.slopes(config, &weight, logp, Some(&log_ratio));
        let through = shared(sequence_sum(&slopes.of_shared) * part.tangent);
        // A NaN of the sequence stops at its masked tokens.
        (slopes.value, slopes.of_logp + kept(&through))
    };
    let bonus = share.constant(config.entropy_coef) * entropy_weight.clone();
    let loss = weight.sum(&value.policy, value.kl.as_ref(), &value.nll);
    BatchLoss {
        // Without a bonus nothing is subtracted: the entropy of a masked token may be anything.
        loss: if config.entropy_coef == 0.0 { loss } else { loss - kept(&(bonus.clone() * entropy.clone())) },
        policy: weighted(&weight.policy, &value.policy),
        dlogp,
        dentropy: -bonus,
        kl: value.kl.map(|kl| kept(&kl)),
        low_clipped: kept(&value.low_clipped),
        high_clipped: kept(&value.high_clipped),
        dual_clipped: kept(&value.dual_clipped),
        ratio: kept(&value.ratio),
        log_ratio: terms.old_logp.as_ref().map(|old| kept(&(logp.clone() - old.clone()))),
        nll: kept(&value.nll),
        phi: (config.objective() == crate::config::Objective::Vespo).then(|| kept(&value.phi)),
    }
}
