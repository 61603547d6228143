//! The loss of one token, written once, over [`Real`].
//!
//! Everything that knows about clipping, KL or advantages is in this file. Backends never repeat it: they hand in
//! log-probabilities and take back derivatives (see [`crate::evaluate`]).
//!
//! Legend: l = logp, o = old logp, q = ref logp, A = advantage, r = exp(log_ratio) with log_ratio = l - o per token, or
//! its mean over the sequence's active tokens. Exponents are held at 20 (`LARGEST_EXPONENT`).

use crate::config::{KlEstimator, LossConfig, LossType};
use crate::real::{Dual, Real};

/// What the loss of one token depends on.
///
/// `logp` and `log_ratio` are separate inputs because at sequence level the ratio is shared: its derivative is pulled
/// back to every token of the sequence, while that of `logp` stays with its token.
#[derive(Clone, Debug)]
pub struct TokenTerms<R> {
    /// Log-probability of the token under the policy, in nats.
    pub logp: R,
    /// Logarithm of the importance ratio that applies to this token.
    pub log_ratio: R,
    /// Log-probability under the frozen reference; needed when beta is not 0.
    pub ref_logp: Option<R>,
    /// Advantage.
    pub advantage: R,
}

/// The loss of one token before its aggregation weight, and what the metrics count.
#[derive(Clone, Debug)]
pub struct TokenLoss<R> {
    /// Policy term + beta * KL; minimised.
    pub loss: R,
    /// The KL term without beta (with its bias correction, as TRL logs it); `None` when beta is 0.
    pub kl: Option<R>,
    /// 1 where the ratio is under its lower bound and the advantage is negative (cispo: always 0).
    pub low_clipped: R,
    /// 1 where the ratio is over its upper bound and the advantage is positive.
    pub high_clipped: R,
}

/// The loss of one token.
///
/// `terms.ref_logp` must be there when `config.beta` is not 0; [`crate::evaluate::Evaluator`] has checked that.
pub fn token_loss<R: Real>(config: &LossConfig, terms: &TokenTerms<R>) -> TokenLoss<R> {
    let ratio = saturated(&terms.log_ratio).exp();
    let policy = match config.loss_type {
        LossType::Cispo => cispo(config, terms, &ratio),
        LossType::Grpo | LossType::Bnpo | LossType::DrGrpo | LossType::Dapo | LossType::Gspo => {
            clipped_ratio(config, terms, &ratio)
        }
    };
    let kl = terms.ref_logp.as_ref().filter(|_| config.beta != 0.0).map(|ref_logp| {
        let kl = kl(config.kl_estimator, &terms.logp, ref_logp);
        if config.use_bias_correction_kl { kl * ratio.clone() } else { kl }
    });
    let loss = match &kl {
        Some(kl) => policy + kl.constant(config.beta) * kl.clone(),
        None => policy,
    };

    let zero = ratio.constant(0.0);
    let capped = match config.delta {
        Some(delta) => ratio.min(&ratio.constant(delta)),
        None => ratio.clone(),
    };
    let negative = terms.advantage.lt(&zero);
    let positive = zero.lt(&terms.advantage);
    let below = capped.lt(&ratio.constant(config.ratio_low()));
    let above = ratio.constant(config.ratio_high()).lt(&capped);
    let low_clipped = match config.loss_type {
        LossType::Cispo => zero,
        _ => ratio.indicator(&R::and(&below, &negative)),
    };
    TokenLoss { loss, kl, low_clipped, high_clipped: ratio.indicator(&R::and(&above, &positive)) }
}

/// What is known of a token beside its ratio, without derivatives.
#[derive(Clone, Debug)]
pub struct TokenInputs<R> {
    /// Log-probability of the token under the policy, in nats.
    pub logp: R,
    /// Under the frozen reference; needed when beta is not 0.
    pub ref_logp: Option<R>,
    /// Advantage.
    pub advantage: R,
}

/// The loss of a token whose ratio is its own, exp(logp - old_logp), and d loss / d logp. Without `old_logp` the policy is
/// its own old one: the ratio is 1.
pub fn token_slope<R: Real>(
    config: &LossConfig,
    inputs: &TokenInputs<R>,
    old_logp: Option<&R>,
) -> (TokenLoss<Dual<R>>, R) {
    let logp = Dual::variable(inputs.logp.clone());
    let old = old_logp.map_or_else(|| logp.stop_gradient(), |old| Dual::fixed(old.clone()));
    let log_ratio = logp.clone() - old;
    let value = token_loss(config, &inputs.terms(logp, log_ratio));
    let slope = value.loss.tangent.clone();
    (value, slope)
}

/// The loss of a token that shares the ratio of its sequence, with d loss / d logp and d loss / d log_ratio. The latter,
/// summed over the sequence and divided by its active tokens, belongs to each of them.
pub fn sequence_slope<R: Real>(
    config: &LossConfig,
    inputs: &TokenInputs<R>,
    log_ratio: &R,
) -> (TokenLoss<Dual<R>>, R, R) {
    let (logp, ratio) = (inputs.logp.clone(), log_ratio.clone());
    let of_logp = token_loss(config, &inputs.terms(Dual::variable(logp.clone()), Dual::fixed(ratio.clone())));
    let of_ratio = token_loss(config, &inputs.terms(Dual::fixed(logp), Dual::variable(ratio)));
    let slope = of_logp.loss.tangent.clone();
    (of_logp, slope, of_ratio.loss.tangent)
}

impl<R: Real> TokenInputs<R> {
    fn terms(&self, logp: Dual<R>, log_ratio: Dual<R>) -> TokenTerms<Dual<R>> {
        TokenTerms {
            logp,
            log_ratio,
            ref_logp: self.ref_logp.clone().map(Dual::fixed),
            advantage: Dual::fixed(self.advantage.clone()),
        }
    }
}

/// -min(min(r, delta) A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A): PPO's clip (arXiv 1707.06347) with asymmetric
/// bounds (DAPO) and the two-sided cap (INTELLECT-2, arXiv 2505.07291).
fn clipped_ratio<R: Real>(config: &LossConfig, terms: &TokenTerms<R>, ratio: &R) -> R {
    let capped = match config.delta {
        Some(delta) => ratio.min(&ratio.constant(delta)),
        None => ratio.clone(),
    };
    let clipped = ratio.clamp(config.ratio_low(), config.ratio_high());
    -(capped * terms.advantage.clone()).min(&(clipped * terms.advantage.clone()))
}

/// -stop_gradient(min(r, epsilon_high)) A l (arXiv 2506.13585, TRL's meaning of epsilon_high).
fn cispo<R: Real>(config: &LossConfig, terms: &TokenTerms<R>, ratio: &R) -> R {
    let weight = ratio.min(&ratio.constant(config.ratio_high())).stop_gradient();
    -(weight * terms.advantage.clone() * terms.logp.clone())
}

/// Estimate of KL(policy || reference) from one sampled token.
fn kl<R: Real>(estimator: KlEstimator, logp: &R, ref_logp: &R) -> R {
    let d = ref_logp.clone() - logp.clone();
    match estimator {
        KlEstimator::K1 => -d,
        KlEstimator::K2 => d.constant(0.5) * d.clone() * d,
        KlEstimator::K3 => {
            let d = saturated(&d);
            d.exp() - d.clone() - d.constant(1.0)
        }
    }
}

/// Largest exponent of a ratio or a KL term, as in verl, tunix and OpenRLHF; e^20 is 5e8. Much more would leave no digits
/// for the derivative of their product, in which the large parts cancel.
const LARGEST_EXPONENT: f64 = 20.0;

/// `exponent` held at [`LARGEST_EXPONENT`], so that a finite input gives a finite loss. Its derivative stays 1: beyond
/// the bound a term keeps the slope it has there and goes on pulling back, where a clamp would let go.
///
/// TRL has no such bound and overflows; below it nothing changes, to the bit.
fn saturated<R: Real>(exponent: &R) -> R {
    let held = exponent.min(&exponent.constant(LARGEST_EXPONENT)).stop_gradient();
    held + (exponent.clone() - exponent.stop_gradient())
}
