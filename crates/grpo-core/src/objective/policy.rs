//! The policy terms, one function each.

use super::TokenTerms;
use super::ratio::{Ratio, vespo_bounded};
use crate::config::{LossConfig, Objective, Region, Trust};
use crate::real::Real;

/// The policy term of a token without its factor, and what its clip does.
#[derive(Clone)]
pub(super) struct PolicyTerm<R> {
    pub(super) value: R,
    /// 1 where the clip binds, below, above, and for negative advantages once more.
    pub(super) low_clipped: R,
    pub(super) high_clipped: R,
    pub(super) dual_clipped: R,
    /// vespo: the weight of the token's sequence; else 0.
    pub(super) phi: R,
}

/// The policy term.
pub(super) fn policy<R: Real>(config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> PolicyTerm<R> {
    match config.objective() {
        Objective::Clipped => clipped(config, terms, &ratio.value),
        Objective::Cispo => cispo(config, terms, &ratio.value),
        Objective::Sapo => unclipped(sapo(config, terms, &ratio.value)),
        Objective::Vespo => vespo(config, terms),
        Objective::GeoMean => geo_mean(config, terms),
        Objective::PolicyGradient => unclipped(-(terms.advantage.clone() * terms.logp.clone())),
        Objective::KlCov => unclipped(kl_cov(config, terms, ratio)),
        Objective::Dppo(trust) => dppo(config, trust, terms, &ratio.value),
        Objective::Dro => unclipped(dro(config, terms, ratio)),
        Objective::PrimeRl(region) => prime_rl(config, region, terms, ratio),
    }
}

fn unclipped<R: Real>(value: R) -> PolicyTerm<R> {
    let zero = value.constant(0.0);
    PolicyTerm { value, low_clipped: zero.clone(), high_clipped: zero.clone(), dual_clipped: zero.clone(), phi: zero }
}

/// Whether A < 0 and whether A > 0.
fn signs<R: Real>(advantage: &R) -> (R::Bool, R::Bool) {
    let zero = advantage.constant(0.0);
    (advantage.lt(&zero), zero.lt(advantage))
}

/// -min(min(r, delta) A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A): PPO's clip (arXiv 1707.06347) with asymmetric
/// bounds (DAPO) and the two-sided cap (INTELLECT-2, arXiv 2505.07291); for A < 0 at most -A c (dual clip, arXiv
/// 1912.09729).
fn clipped<R: Real>(config: &LossConfig, terms: &TokenTerms<R>, ratio: &R) -> PolicyTerm<R> {
    let capped = config.delta.map_or(ratio.clone(), |delta| ratio.min(&ratio.constant(delta)));
    let bounded = ratio.clamp(config.ratio_low(), config.ratio_high());
    let advantage = &terms.advantage;
    let loss = -(capped.clone() * advantage.clone()).min(&(bounded * advantage.clone()));
    let (negative, positive) = signs(advantage);
    let zero = ratio.constant(0.0);
    let (policy, dual_clipped) = match config.dual_clip() {
        Some(c) => {
            let bound = -(ratio.constant(c) * advantage.clone());
            let binds = R::and(&bound.lt(&loss), &negative);
            (R::select(&negative, &loss.min(&bound), &loss), ratio.indicator(&binds))
        }
        None => (loss, zero),
    };
    let below = capped.lt(&ratio.constant(config.ratio_low()));
    let above = ratio.constant(config.ratio_high()).lt(&capped);
    PolicyTerm {
        low_clipped: ratio.indicator(&R::and(&below, &negative)),
        high_clipped: ratio.indicator(&R::and(&above, &positive)),
        dual_clipped,
        ..unclipped(policy)
    }
}

/// -sg(min(r, epsilon_high)) A l (arXiv 2506.13585, TRL's meaning of epsilon_high); verl: -sg(clip(r, 1 - epsilon_low,
/// 1 + epsilon_high)) A l.
fn cispo<R: Real>(config: &LossConfig, terms: &TokenTerms<R>, ratio: &R) -> PolicyTerm<R> {
    let (low, high) = (ratio.constant(config.ratio_low()), ratio.constant(config.ratio_high()));
    let (_, positive) = signs(&terms.advantage);
    let above = high.lt(ratio);
    let (weight, below, above) = match config.bounds_raw_ratio() {
        true => (ratio.min(&high), None, R::and(&above, &positive)),
        false => (ratio.clamp(config.ratio_low(), config.ratio_high()), Some(ratio.lt(&low)), above),
    };
    let policy = -(weight.stop_gradient() * terms.advantage.clone() * terms.logp.clone());
    PolicyTerm {
        low_clipped: below.map_or(ratio.constant(0.0), |below| ratio.indicator(&below)),
        high_clipped: ratio.indicator(&above),
        ..unclipped(policy)
    }
}

/// -(4 / tau) sigmoid(tau (r - 1)) A, with a tau for positive advantages and one for the others (arXiv 2511.20347).
fn sapo<R: Real>(config: &LossConfig, terms: &TokenTerms<R>, ratio: &R) -> R {
    let (_, positive) = signs(&terms.advantage);
    let (tau_pos, tau_neg) = config.sapo_temperatures();
    let gate = |tau: f64| {
        let tau = ratio.constant(tau);
        (tau.clone() * (ratio.clone() - ratio.constant(1.0))).sigmoid() * (ratio.constant(4.0) / tau)
    };
    -(R::select(&positive, &gate(tau_pos), &gate(tau_neg)) * terms.advantage.clone())
}

/// -phi A l, phi = exp(lambda + k log w - lambda w) of the sequence's detached ratio w, with k and lambda by the sign of A.
/// The sampler's ratio is inside w (`terms.shared`), not a factor.
fn vespo<R: Real>(config: &LossConfig, terms: &TokenTerms<R>) -> PolicyTerm<R> {
    let own = || terms.logp.clone() - terms.old_logp.clone();
    let log_w = vespo_bounded(&terms.shared.clone().unwrap_or_else(own)).stop_gradient();
    let (negative, _) = signs(&terms.advantage);
    let phi = |k: f64, lambda: f64| {
        let lambda = log_w.constant(lambda.max(1e-4));
        (lambda.clone() + log_w.constant(k) * log_w.clone() - lambda * log_w.exp()).exp()
    };
    let phi = R::select(
        &negative,
        &phi(config.vespo_k_neg, config.vespo_lambda_neg),
        &phi(config.vespo_k_pos, config.vespo_lambda_pos),
    );
    PolicyTerm { phi: phi.clone(), ..unclipped(-(phi * terms.advantage.clone() * terms.logp.clone())) }
}

/// -exp(mean of the sequence's clipped log-ratios) A, the same for every token of the sequence (GMPO, arXiv 2507.20673).
fn geo_mean<R: Real>(config: &LossConfig, terms: &TokenTerms<R>) -> PolicyTerm<R> {
    let own = terms.logp.clone() - terms.old_logp.clone();
    let (negative, positive) = signs(&terms.advantage);
    let below = own.lt(&own.constant(-config.epsilon_low));
    let above = own.constant(config.upper_epsilon()).lt(&own);
    let mean = terms.shared.clone().unwrap_or_else(|| own.clone());
    PolicyTerm {
        low_clipped: own.indicator(&R::and(&below, &negative)),
        high_clipped: own.indicator(&R::and(&above, &positive)),
        ..unclipped(-(super::ratio::held(&mean, false).exp() * terms.advantage.clone()))
    }
}

/// -A r, and ppo_kl_coef |l - o| on top where the token's covariance is among the largest (arXiv 2505.22617).
fn kl_cov<R: Real>(config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> R {
    let penalty = terms.kl_cov_mask.clone() * ratio.log.constant(config.ppo_kl_coef) * ratio.log.abs();
    penalty - ratio.value.clone() * terms.advantage.clone()
}

/// -A sg(min(r, c)) l where the token is within the trust region or on its way back to it (DPPO, arXiv 2602.04879), with
/// p = e^l and p_o = e^o: |p - p_o|, or the KL divergence of "this token or another", bounded by epsilon_high where the
/// token gains and A > 0, by epsilon_low where it loses and A <= 0.
fn dppo<R: Real>(config: &LossConfig, trust: Trust, terms: &TokenTerms<R>, ratio: &R) -> PolicyTerm<R> {
    let (logp, old_logp) = (terms.logp.stop_gradient(), terms.old_logp.stop_gradient());
    let (p, old) = (logp.exp(), old_logp.exp());
    let (low, high) = (p.constant(config.epsilon_low), p.constant(config.upper_epsilon()));
    let (rises, falls) = match trust {
        Trust::TotalVariation => ((p.clone() - old.clone()).le(&high), (old.clone() - p.clone()).le(&low)),
        Trust::BinaryKl => {
            // verl adds 1e-8 to the probability of another token.
            let other = |p: &R| p.constant(1.0) - p.clone() + p.constant(1e-8);
            let divergence =
                old.clone() * (old_logp - logp) + (old.constant(1.0) - old.clone()) * (other(&old) / other(&p)).ln();
            (R::or(&divergence.le(&high), &p.le(&old)), R::or(&divergence.le(&low), &old.le(&p)))
        }
    };
    let (_, positive) = signs(&terms.advantage);
    let (zero, one) = (p.constant(0.0), p.constant(1.0));
    let outside = |within: &R::Bool| R::select(within, &zero, &one);
    let high_clipped = R::select(&positive, &outside(&rises), &zero);
    let low_clipped = R::select(&positive, &zero, &outside(&falls));
    let kept = one.clone() - high_clipped.clone() - low_clipped.clone();
    let weight = ratio.min(&ratio.constant(config.dual_clip().unwrap_or(f64::INFINITY))).stop_gradient();
    let policy = -(weight * kept * terms.advantage.clone() * terms.logp.clone());
    PolicyTerm { low_clipped, high_clipped, ..unclipped(policy) }
}

/// -(A l - dro_beta / 2 (l - o)^2) (DRO, arXiv 2405.19107).
fn dro<R: Real>(config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> R {
    let half = ratio.log.constant(0.5 * config.dro_beta.unwrap_or_default());
    half * ratio.log.clone() * ratio.log.clone() - terms.advantage.clone() * terms.logp.clone()
}

/// -keep adv_tau A r + kl_tau (l - o)^2, o being the sampler's log-probability. keep: the probability has not risen by more than
/// epsilon_high where A > 0, nor fallen by more than epsilon_low elsewhere (DPPO's region, arXiv 2602.04879); two-sided, neither.
/// Tokens outside pay the penalty all the same (prime-rl).
fn prime_rl<R: Real>(config: &LossConfig, region: Region, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> PolicyTerm<R> {
    let change = terms.logp.stop_gradient().exp() - terms.old_logp.stop_gradient().exp();
    let too_high = change.constant(config.upper_epsilon()).lt(&change);
    let too_low = change.lt(&change.constant(-config.epsilon_low));
    let (high, low) = match region {
        Region::OneSided => {
            let (_, positive) = signs(&terms.advantage);
            (R::and(&too_high, &positive), R::and(&too_low, &R::not(&positive)))
        }
        Region::TwoSided => (too_high, too_low),
    };
    let (high_clipped, low_clipped) = (change.indicator(&high), change.indicator(&low));
    let kept = change.constant(1.0) - high_clipped.clone() - low_clipped.clone();
    let gain = kept * change.constant(config.adv_tau) * terms.advantage.clone() * ratio.value.clone();
    let penalty = change.constant(config.kl_tau) * ratio.log.clone() * ratio.log.clone();
    PolicyTerm { low_clipped, high_clipped, ..unclipped(penalty - gain) }
}
