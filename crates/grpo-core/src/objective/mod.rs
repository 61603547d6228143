//! The loss of one token, written once over [`Real`], with one file per loss.
//!
//! All knowledge of clipping, KL and advantages is in this folder. Backends do not repeat it: they pass log-probabilities and
//! receive derivatives (see [`crate::backend_api::evaluate`]).
//!
//! The loss of a token depends on its own log-probability and, if the tokens of a sequence share a log-ratio, on a sum over the
//! sequence, to which each token contributes [`shared_part`]. Quantities that need the whole batch (the selected tokens, the
//! sampler's weight) enter as factors without derivatives ([`crate::LossConfig::prepare`]).
//!
//! **To add a loss**, add a file to this folder that implements [`Loss`], and a line to the macro below. The file's documentation is the
//! loss's page in docs/losses; `UPDATE_DOCS=1 cargo test -p grpo-core --test fast documents` writes the page.
//!
//! Legend: l = logp, o = old logp, q = ref logp, A = advantage, r = ratio = exp(log-ratio), sg = stop_gradient.

#[macro_use]
mod registry;

mod clip;
mod covariance;
mod kl;
mod loss;
mod ratio;
mod trust_region;
mod value;
mod weighted;

use crate::backend_api::real::Real;
use crate::batch::{PolicyValues, TokenBatch, TokenFactors};
use crate::config::LossConfig;
use crate::metrics::Metrics;
pub(crate) use kl::value as kl_value;
pub use loss::{Average, Bounds, Clip, Clipped, Loss, LossTraits, OwnAverage, SharedLogRatio};
pub use ratio::Ratio;
pub use value::{ValueLoss, ValueLossConfig, ValueOutput, ValueTerms, explained_variance, value_loss};
pub use weighted::batch_loss;

losses! {
    #[default]
    grpo::Grpo,
    bnpo::Bnpo,
    dr_grpo::DrGrpo,
    dapo::Dapo,
    cispo::Cispo,
    gspo::Gspo,
    luspo::Luspo,
    sapo::Sapo with Parameters,
    vespo::Vespo with Parameters,
    #[serde(alias = "gmpo")]
    geo_mean::GeoMean,
    vanilla::Vanilla,
    gpg::Gpg,
    reinforce::Reinforce,
    clip_cov::ClipCov with Parameters,
    kl_cov::KlCov with Parameters,
    dppo_tv::DppoTv,
    dppo_kl::DppoKl,
    dro::Dro with Parameters,
    prime_rl::PrimeRl with Parameters,
    ipo::Ipo,
    cfpo::Cfpo,
    flash_reinforce::FlashReinforce with Parameters,
}

/// The policy term of a token before its factor, and indicators of its clip.
#[derive(Clone, Debug)]
pub struct PolicyTerm<R> {
    /// The term; minimised.
    pub value: R,
    /// 1 if the clip binds below, else 0.
    pub low_clipped: R,
    /// 1 if the clip binds above, else 0.
    pub high_clipped: R,
    /// 1 if the dual clip binds, else 0.
    pub dual_clipped: R,
    /// A statistic of the loss that one of its metrics averages, else 0.
    pub statistic: R,
}

impl<R: Real> PolicyTerm<R> {
    /// Returns a term without a clip.
    pub fn unclipped(value: R) -> Self {
        let zero = value.constant(0.0);
        Self {
            value,
            low_clipped: zero.clone(),
            high_clipped: zero.clone(),
            dual_clipped: zero.clone(),
            statistic: zero,
        }
    }
}

/// Returns A < 0 and A > 0.
fn signs<R: Real>(advantage: &R) -> (R::Bool, R::Bool) {
    let zero = advantage.constant(0.0);
    (advantage.lt(&zero), zero.lt(advantage))
}

/// Returns the contribution of a token to the log-ratio of its sequence, for losses that share one.
pub fn shared_part<R: Real>(config: &LossConfig, logp: &R, old_logp: &R, advantage: &R) -> R {
    config.loss_type.shared_part(config, logp, old_logp, advantage)
}

/// Returns `true` if a sequence's log-ratio is the mean of its tokens' contributions, `false` if it is their sum.
pub fn shares_mean(config: &LossConfig) -> bool {
    config.traits().shared_log_ratio != Some(SharedLogRatio::Sum)
}

/// The inputs of the loss of one token.
///
/// `logp` and `shared` are separate inputs: the derivative with respect to a shared log-ratio goes to every token of the sequence,
/// the derivative with respect to `logp` to one token.
#[derive(Clone, Debug)]
pub struct TokenTerms<R> {
    /// Log-probability of the token under the policy, in nats.
    pub logp: R,
    /// Log-probability under the old policy, the denominator of the ratio. On-policy it is `logp`, detached.
    pub old_logp: R,
    /// Log-ratio of the token's sequence, if the loss has one ([`LossConfig::is_token_level`]).
    pub shared: Option<R>,
    /// Log-probability under the reference policy; required if beta is not 0.
    pub ref_logp: Option<R>,
    /// Log-probability under the sampling engine, NaN if unknown. A KL term that is weighted by the sampler's ratio uses `old_logp`
    /// where it is missing.
    pub sampler_logp: Option<R>,
    /// Advantage of the token.
    pub advantage: R,
    /// Factor of the policy term; the KL term does not have it.
    pub factor: R,
    /// kl_cov: 1 if the token has the penalty, else 0.
    pub kl_cov_mask: R,
}

/// The loss of one token before its aggregation weights.
#[derive(Clone, Debug)]
pub struct TokenLoss<R> {
    /// The policy term times its factor, with the indicators of its clip.
    pub policy: PolicyTerm<R>,
    /// The KL term without beta (with its bias correction, as TRL logs it); 0 if beta is 0.
    pub kl: R,
    /// -logp.
    pub nll: R,
    /// The importance ratio of the token, or of its sequence if its tokens share one.
    pub ratio: R,
}

/// Computes the loss of one token.
///
/// `terms.ref_logp` must be present if `config.beta` is not 0, and `terms.shared` if the loss shares a log-ratio;
/// [`crate::backend_api::evaluate::Evaluator`] checks both.
pub fn token_loss<R: Real>(config: &LossConfig, terms: &TokenTerms<R>) -> TokenLoss<R> {
    let ratio = Ratio::new(config, terms);
    let policy = config.loss_type.policy(config, terms, &ratio);
    let reference = terms.ref_logp.as_ref().filter(|_| config.beta != 0.0);
    TokenLoss {
        policy: PolicyTerm { value: policy.value * terms.factor.clone(), ..policy },
        kl: reference.map_or(terms.logp.constant(0.0), |q| kl::term(config, terms, q, &ratio)),
        nll: -terms.logp.clone(),
        ratio: ratio.value,
    }
}

/// Returns `true` where the weight is not 0.
fn counts<R: Real>(weight: &R) -> R::Bool {
    let zero = weight.constant(0.0);
    R::or(&weight.lt(&zero), &zero.lt(weight))
}

/// Returns weight x derivative, and 0 if the weight is 0 even where the derivative is infinite.
pub(crate) fn weighted<R: Real>(weight: &R, derivative: &R) -> R {
    R::select(&counts(weight), &(weight.clone() * derivative.clone()), &weight.constant(0.0))
}
