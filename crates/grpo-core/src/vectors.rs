//! The loss of a whole batch at once, for programs in which a number is a vector over its tokens.
//!
//! The counterpart of [`crate::evaluate::Evaluator`], which feeds one token after the other: here a [`Real`] stands for
//! all N tokens, masked ones included (their weight is 0), and sums over a sequence are the program's business.

use crate::config::{ImportanceSamplingLevel, LossConfig};
use crate::objective::{TokenInputs, sequence_slope, token_slope};
use crate::real::Real;

/// What is known of the tokens; every entry `[N]`. Masked tokens hold finite numbers and weights of 0.
#[derive(Clone, Debug)]
pub struct BatchTerms<R> {
    /// Log-probabilities under the policy, in nats.
    pub logp: R,
    /// Entropies, in nats.
    pub entropy: R,
    /// Under the policy that sampled; without it the ratio is 1.
    pub old_logp: Option<R>,
    /// Under the frozen reference; needed when beta is not 0.
    pub ref_logp: Option<R>,
    /// Advantages.
    pub advantage: R,
    /// [`crate::weights::TokenWeights::policy`].
    pub weight: R,
    /// [`crate::weights::TokenWeights::entropy`].
    pub entropy_weight: R,
    /// 1 / active tokens of the token's sequence; 0 at masked tokens.
    pub share: R,
}

/// The loss and what comes with it; every entry `[N]`, 0 at masked tokens.
#[derive(Clone, Debug)]
pub struct BatchLoss<R> {
    /// weight x token loss - entropy bonus.
    pub loss: R,
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
}

/// The loss of a batch. `sequence_sum` gives every token the sum over the tokens of its sequence.
///
/// `terms.ref_logp` must be there when `config.beta` is not 0; [`crate::evaluate::Evaluator::new`] checks that.
pub fn batch_loss<R: Real>(config: &LossConfig, terms: &BatchTerms<R>, sequence_sum: impl Fn(&R) -> R) -> BatchLoss<R> {
    let BatchTerms { logp, entropy, old_logp, ref_logp, advantage, weight, entropy_weight, share } = terms;
    let active = share.constant(0.0).lt(share);
    let zero = share.constant(0.0);
    let kept = |value: &R| R::select(&active, value, &zero);
    // A weight of 0 wins over an infinite derivative.
    let weighted = |value: R| R::select(&zero.lt(weight), &(weight.clone() * value), &zero);
    let inputs = TokenInputs { logp: logp.clone(), ref_logp: ref_logp.clone(), advantage: advantage.clone() };
    let (value, dlogp) = match config.level() {
        ImportanceSamplingLevel::Token => {
            let (value, slope) = token_slope(config, &inputs, old_logp.as_ref());
            (value, weighted(slope))
        }
        ImportanceSamplingLevel::Sequence => {
            let log_ratio = match old_logp {
                Some(old) => sequence_sum(&(kept(&(logp.clone() - old.clone())) * share.clone())),
                None => zero.clone(),
            };
            let (value, slope, of_ratio) = sequence_slope(config, &inputs, &log_ratio);
            let through_ratio = sequence_sum(&weighted(of_ratio)) * share.clone();
            (value, weighted(slope) + through_ratio)
        }
    };
    let bonus = share.constant(config.entropy_coef) * entropy_weight.clone();
    let loss = weighted(value.loss.value);
    BatchLoss {
        // Without a bonus nothing is subtracted: the entropy of a masked token may be anything.
        loss: if config.entropy_coef == 0.0 { loss } else { loss - kept(&(bonus.clone() * entropy.clone())) },
        dlogp,
        dentropy: -bonus,
        kl: value.kl.map(|kl| kept(&kl.value)),
        low_clipped: kept(&value.low_clipped.value),
        high_clipped: kept(&value.high_clipped.value),
    }
}
