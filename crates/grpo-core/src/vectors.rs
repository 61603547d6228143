//! The loss of a whole batch at once, for programs in which a number is a vector over its tokens.
//!
//! The counterpart of [`crate::evaluate::Evaluator`], which feeds one token after the other: here a [`Real`] stands for
//! all N tokens, masked ones included (their weight is 0), and sums over a sequence are the program's business.

use crate::columns::{Recorded, TokenColumns};
use crate::config::LossConfig;
use crate::objective::{shares_mean, weighted};
use crate::real::{Dual, Real};

/// What is known of the tokens; every entry `[N]`. Masked tokens hold finite numbers and weights of 0.
#[derive(Clone, Debug)]
pub struct BatchTerms<R> {
    /// Log-probabilities under the policy, in nats.
    pub logp: R,
    /// Entropies, in nats.
    pub entropy: R,
    /// Everything else; `share` is 0 at masked tokens.
    pub columns: TokenColumns<R>,
    /// Which log-probabilities among the columns are there.
    pub recorded: Recorded,
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
    /// The loss's own statistic; `None` where it has none.
    pub statistic: Option<R>,
}

/// The loss of a batch. `sequence_sum` gives every token the sum over the tokens of its sequence.
///
/// Those of the reference must be there when `config.beta` is not 0; [`crate::evaluate::Evaluator::new`] checks that.
pub fn batch_loss<R: Real>(config: &LossConfig, terms: &BatchTerms<R>, sequence_sum: impl Fn(&R) -> R) -> BatchLoss<R> {
    let BatchTerms { logp, entropy, columns, recorded } = terms;
    let TokenColumns { share, .. } = columns;
    let active = share.constant(0.0).lt(share);
    let zero = share.constant(0.0);
    let kept = |value: &R| R::select(&active, value, &zero);
    let (weight, inputs) = (columns.weight(), columns.inputs(*recorded));
    let (value, dlogp) = if config.is_token_level() {
        let slopes = inputs.slopes(config, &weight, logp, None);
        (slopes.value, slopes.of_logp)
    } else {
        let part = inputs.shared_part(config, logp) * Dual::fixed(columns.log_ratio_scale.clone());
        // Of a mean each token has its share, of a sum all.
        let shared = |value: R| if shares_mean(config) { value * share.clone() } else { value };
        let log_ratio = sequence_sum(&shared(kept(&part.value))) + columns.log_ratio_bias.clone();
        let slopes = inputs.slopes(config, &weight, logp, Some(&log_ratio));
        let through = shared(sequence_sum(&slopes.of_shared) * part.tangent);
        // A NaN of the sequence stops at its masked tokens.
        (slopes.value, slopes.of_logp + kept(&through))
    };
    let bonus = columns.entropy_weight.clone();
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
        log_ratio: recorded.old.then(|| kept(&(logp.clone() - columns.old_logp.clone()))),
        nll: kept(&value.nll),
        statistic: config.rules().has_statistic().then(|| kept(&value.statistic)),
    }
}
