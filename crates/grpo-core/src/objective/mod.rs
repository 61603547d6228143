//! The loss of one token, written once, over [`Real`]: a file per loss.
//!
//! Everything that knows about clipping, KL or advantages is in this folder. Backends never repeat it: they hand in
//! log-probabilities and take back derivatives (see [`crate::backend_api::evaluate`]).
//!
//! A token's loss depends on its own log-probability and, where tokens of a sequence share one, on a log-ratio that is a
//! sum over the sequence: what a token adds to it is [`shared_part`]. What has to be known of the whole batch (which
//! tokens are chosen, the sampler's weight) comes as a factor without a derivative ([`crate::LossConfig::prepare`]).
//!
//! **A new loss** is a file of this folder that implements [`Loss`], and its line below. The file's documentation is the
//! loss's page in docs/losses; `UPDATE_DOCS=1 cargo test -p grpo-core --test fast documents` writes it.
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

use crate::backend_api::real::{Dual, Real};
use crate::config::LossConfig;
pub(crate) use kl::value as kl_value;
pub use loss::{Average, Bounds, Clipped, Loss, OwnAverage, SharedLogRatio};
pub use ratio::Ratio;
pub use value::{ValueLoss, ValueLossConfig, ValueOutput, ValueTerms, explained_variance, value_loss};
pub use weighted::{BatchLoss, BatchTerms, batch_loss};

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

impl LossType {
    /// The name used in configuration.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The policy term of a token without its factor, and what its clip does.
#[derive(Clone, Debug)]
pub struct PolicyTerm<R> {
    /// The term; minimised.
    pub value: R,
    /// 1 where the clip binds below.
    pub low_clipped: R,
    /// 1 where it binds above.
    pub high_clipped: R,
    /// 1 where the second clip for negative advantages binds.
    pub dual_clipped: R,
    /// A number of the loss's own that a metric of it averages ([`Loss::has_statistic`]), else 0.
    pub statistic: R,
}

impl<R: Real> PolicyTerm<R> {
    /// A term without a clip.
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

/// Whether A < 0 and whether A > 0.
fn signs<R: Real>(advantage: &R) -> (R::Bool, R::Bool) {
    let zero = advantage.constant(0.0);
    (advantage.lt(&zero), zero.lt(advantage))
}

/// What a token adds to the log-ratio of its sequence, where the loss has one.
pub fn shared_part<R: Real>(config: &LossConfig, logp: &R, old_logp: &R, advantage: &R) -> R {
    config.loss_type.shared_part(config, logp, old_logp, advantage)
}

/// Whether a sequence's log-ratio is the mean of its tokens' parts; else it is their sum.
pub fn shares_mean(config: &LossConfig) -> bool {
    config.loss_type.rules().shared_log_ratio() != Some(SharedLogRatio::Sum)
}

/// What the loss of one token depends on.
///
/// `logp` and `shared` are separate inputs because the derivative by a shared log-ratio is pulled back to every token of
/// the sequence, while that by `logp` stays with its token.
#[derive(Clone, Debug)]
pub struct TokenTerms<R> {
    /// Log-probability of the token under the policy, in nats.
    pub logp: R,
    /// Under the policy that the ratio is taken against; the policy's own, detached, on-policy.
    pub old_logp: R,
    /// Log-ratio of the token's sequence, where the loss has one ([`LossConfig::is_token_level`]).
    pub shared: Option<R>,
    /// Log-probability under the reference; needed when beta is not 0.
    pub ref_logp: Option<R>,
    /// Under the engine that sampled, NaN where it gave none; needed where the KL term is weighed against it.
    pub sampler_logp: Option<R>,
    /// Advantage.
    pub advantage: R,
    /// What multiplies the policy term, not the KL term.
    pub factor: R,
    /// kl_cov: 1 for a token that pays the penalty, else 0.
    pub kl_cov_mask: R,
}

/// The loss of one token before its aggregation weights, and what the metrics count.
#[derive(Clone, Debug)]
pub struct TokenLoss<R> {
    /// Policy term; minimised.
    pub policy: R,
    /// The KL term without beta (with its bias correction, as TRL logs it); `None` when beta is 0.
    pub kl: Option<R>,
    /// 1 where the clip binds below.
    pub low_clipped: R,
    /// 1 where it binds above.
    pub high_clipped: R,
    /// 1 where the second clip for negative advantages binds.
    pub dual_clipped: R,
    /// The importance ratio, the sequence's where tokens share one.
    pub ratio: R,
    /// -logp.
    pub nll: R,
    /// [`PolicyTerm::statistic`].
    pub statistic: R,
}

/// The loss of one token.
///
/// `terms.ref_logp` must be there when `config.beta` is not 0, `terms.shared` where the loss shares a log-ratio;
/// [`crate::backend_api::evaluate::Evaluator`] has checked that.
pub fn token_loss<R: Real>(config: &LossConfig, terms: &TokenTerms<R>) -> TokenLoss<R> {
    let ratio = Ratio::new(config, terms);
    let policy = config.loss_type.policy(config, terms, &ratio);
    TokenLoss {
        policy: policy.value * terms.factor.clone(),
        kl: terms.ref_logp.as_ref().filter(|_| config.beta != 0.0).map(|q| kl::term(config, terms, q, &ratio)),
        nll: -terms.logp.clone(),
        low_clipped: policy.low_clipped,
        high_clipped: policy.high_clipped,
        dual_clipped: policy.dual_clipped,
        statistic: policy.statistic,
        ratio: ratio.value,
    }
}

/// What is known of a token beside its log-probability, without derivatives.
#[derive(Clone, Debug)]
pub struct TokenInputs<R> {
    /// [`TokenTerms::old_logp`]; `None` on-policy.
    pub old_logp: Option<R>,
    /// [`TokenTerms::ref_logp`].
    pub ref_logp: Option<R>,
    /// [`TokenTerms::sampler_logp`].
    pub sampler_logp: Option<R>,
    /// [`TokenTerms::advantage`].
    pub advantage: R,
    /// The token's own advantage where `advantage` is its sequence's.
    pub token_advantage: R,
    /// [`TokenTerms::factor`].
    pub factor: R,
    /// [`TokenTerms::kl_cov_mask`].
    pub kl_cov_mask: R,
}

/// How much the terms of a token weigh in the loss of the step ([`crate::aggregate`]).
#[derive(Clone, Debug)]
pub struct TokenWeight<R> {
    /// Of the policy term.
    pub policy: R,
    /// Of the KL term, beta included.
    pub kl: R,
    /// Of the negative log-likelihood, positive_example_nll_weight included.
    pub nll: R,
}

/// The loss of a token and its derivatives.
#[derive(Clone, Debug)]
pub struct TokenGrad<R> {
    /// Values.
    pub value: TokenLoss<R>,
    /// Weighted d loss / d logp, at a fixed shared log-ratio.
    pub of_logp: R,
    /// Weighted d loss / d shared log-ratio; 0 where there is none.
    pub of_shared: R,
}

impl<R: Real> TokenWeight<R> {
    /// The weighted sum of the terms of a token, or of their derivatives.
    pub(crate) fn sum(&self, policy: &R, kl: Option<&R>, nll: &R) -> R {
        let sum = weighted(&self.policy, policy) + weighted(&self.nll, nll);
        kl.map_or(sum.clone(), |kl| sum + weighted(&self.kl, kl))
    }
}

impl<R: Real> TokenInputs<R> {
    /// The loss of the token with its derivatives. `shared`: the log-ratio of its sequence, where the loss has one.
    pub fn grad(&self, config: &LossConfig, weight: &TokenWeight<R>, logp: &R, shared: Option<&R>) -> TokenGrad<R> {
        let terms = |logp: Dual<R>, shared: Option<Dual<R>>| TokenTerms {
            old_logp: self.old_logp.clone().map_or_else(|| logp.stop_gradient(), Dual::fixed),
            logp,
            shared,
            ref_logp: self.ref_logp.clone().map(Dual::fixed),
            sampler_logp: self.sampler_logp.clone().map(Dual::fixed),
            advantage: Dual::fixed(self.advantage.clone()),
            factor: Dual::fixed(self.factor.clone()),
            kl_cov_mask: Dual::fixed(self.kl_cov_mask.clone()),
        };
        let slope = |loss: &TokenLoss<Dual<R>>| {
            weight.sum(&loss.policy.tangent, loss.kl.as_ref().map(|kl| &kl.tangent), &loss.nll.tangent)
        };
        let fixed = shared.map(|shared| Dual::fixed(shared.clone()));
        let by_logp = token_loss(config, &terms(Dual::variable(logp.clone()), fixed));
        let of_shared = match shared {
            Some(shared) => {
                let logp = Dual::fixed(logp.clone());
                slope(&token_loss(config, &terms(logp, Some(Dual::variable(shared.clone())))))
            }
            None => logp.constant(0.0),
        };
        TokenGrad { of_logp: slope(&by_logp), of_shared, value: by_logp.map(|dual| dual.value) }
    }

    /// What the token adds to the log-ratio of its sequence, and the derivative of that by logp.
    pub fn shared_part(&self, config: &LossConfig, logp: &R) -> Dual<R> {
        let logp = Dual::variable(logp.clone());
        let old = self.old_logp.clone().map_or_else(|| logp.stop_gradient(), Dual::fixed);
        shared_part(config, &logp, &old, &Dual::fixed(self.token_advantage.clone()))
    }
}

impl<R> TokenLoss<R> {
    fn map<S>(self, f: impl Fn(R) -> S) -> TokenLoss<S> {
        TokenLoss {
            policy: f(self.policy),
            kl: self.kl.map(&f),
            low_clipped: f(self.low_clipped),
            high_clipped: f(self.high_clipped),
            dual_clipped: f(self.dual_clipped),
            ratio: f(self.ratio),
            nll: f(self.nll),
            statistic: f(self.statistic),
        }
    }
}

/// weight x derivative, where a weight of 0 wins over an infinite derivative.
pub(crate) fn weighted<R: Real>(weight: &R, derivative: &R) -> R {
    let zero = weight.constant(0.0);
    let counts = R::or(&weight.lt(&zero), &zero.lt(weight));
    R::select(&counts, &(weight.clone() * derivative.clone()), &zero)
}
