//! The KL to the reference policy as part of the reward.

use crate::advantages::RewardList;
use crate::batch::TokenBatch;
use crate::config::KlEstimator;
use crate::error::{Error, Result};
use crate::objective::kl_value;

/// The result of [`kl_in_reward`].
#[derive(Clone, Debug, PartialEq)]
pub struct KlRewards {
    /// Rewards per token `[N]`, 0 at masked tokens: for [`crate::advantages::RewardValues::PerToken`]. A missing score is a missing reward of
    /// the completion's last active token.
    pub token_rewards: Vec<Option<f32>>,
    /// Mean over completions of the mean over their active tokens; a completion without active tokens counts as 0. The input of an
    /// adaptive controller (verl's `actor/reward_kl_penalty`).
    pub kl: f64,
}

/// Computes reward_t = (score, at the last active token) - beta kl_t, as verl's `apply_kl_penalty`. The sum over a completion
/// is the sequence reward of TRL's RLOO: score - beta sum_t (old_logp - ref_logp).
///
/// k3 is clamped to verl's bounds: the difference to +-20, the value to +-10. The `+` forms of an estimator differ only in their
/// gradient, which a reward does not have.
///
/// `scores: [B]`; a score may be missing.
///
/// ```
/// use grpo_core::rewards::kl_in_reward;
/// use grpo_core::{KlEstimator, TokenBatch};
///
/// let batch = TokenBatch::packed(vec![3, 7], vec![0, 2])?
///     .with_old_logp(vec![-0.5, -1.0])?
///     .with_ref_logp(vec![-0.75, -1.0])?;
/// let rewards = kl_in_reward(&[1.0], &batch, KlEstimator::K1, 0.1)?;
/// assert_eq!(rewards.token_rewards, [Some(-0.025), Some(1.0)]);
/// # Ok::<(), grpo_core::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`] for a wrong number of scores; [`Error::Value`] for a score that is not finite; [`Error::Config`] for a batch
/// without old or reference log-probabilities, or a beta that is not finite.
pub fn kl_in_reward<'a>(
    scores: impl Into<RewardList<'a>>,
    batch: &TokenBatch,
    estimator: KlEstimator,
    beta: f64,
) -> Result<KlRewards> {
    const OP: &str = "KL in the reward";
    let scores = scores.into();
    if scores.len() != batch.sequences() {
        return Err(Error::shape(OP, "scores [B]", batch.sequences(), scores.len()));
    }
    let scores = scores.of_completions("scores")?;
    if !beta.is_finite() {
        return Err(Error::Config(format!("{OP}: beta must be a finite number, got {beta}")));
    }
    let needed = |name: &str| Error::Config(format!("{OP}: the batch has no {name}: set it before"));
    let old = batch.old_logp().ok_or_else(|| needed("old_logp"))?;
    let reference = batch.ref_logp().ok_or_else(|| needed("ref_logp"))?;
    let base = estimator.parts().0;
    let bounds = match base {
        KlEstimator::K3 | KlEstimator::LowVarKl => (Some(20.0), Some(10.0)),
        _ => (None, None),
    };
    let mut token_rewards = vec![0.0; batch.tokens()];
    let mut means = 0.0;
    for (b, score) in scores.iter().enumerate() {
        let mut sum = 0.0;
        let mut last = None;
        for i in batch.range(b).filter(|i| batch.is_active(*i)) {
            let kl = kl_value(base, &(f64::from(reference[i]) - f64::from(old[i])), bounds);
            sum += kl;
            token_rewards[i] = -beta * kl;
            last = Some(i);
        }
        if let Some(last) = last {
            token_rewards[last] += score;
        }
        means += sum / batch.active_in(b).max(1) as f64;
    }
    Ok(KlRewards {
        token_rewards: token_rewards.into_iter().map(|r: f64| Some(r as f32).filter(|r| !r.is_nan())).collect(),
        kl: means / scores.len().max(1) as f64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch() -> TokenBatch {
        TokenBatch::packed(vec![0; 5], vec![0, 3, 3, 5])
            .unwrap()
            .with_mask(&[1.0, 1.0, 0.0, 1.0, 1.0])
            .unwrap()
            .with_old_logp(vec![-1.0, -2.0, f32::NAN, -3.0, -100.0])
            .unwrap()
    }

    #[test]
    fn score_is_added_at_the_last_active_token() {
        let batch = batch().with_ref_logp(vec![-1.5, -1.0, f32::NAN, -3.0, -1.0]).unwrap();
        let k1 = kl_in_reward(&[Some(10.0), Some(5.0), None], &batch, KlEstimator::K1, 0.5).unwrap();
        assert_eq!(k1.token_rewards, [Some(-0.25), Some(10.5), Some(0.0), Some(0.0), None]);
        assert_eq!(k1.kl, (-0.25 + 0.0 - 49.5) / 3.0);
        // exp(99) is clamped: d to 20, the estimate to 10.
        let k3 = kl_in_reward(&[0.0; 3], &batch, KlEstimator::K3, 1.0).unwrap();
        assert_eq!(k3.token_rewards[3..], [0.0, -10.0].map(Some));
        let k2 = kl_in_reward(&[0.0; 3], &batch, KlEstimator::K2, 1.0).unwrap();
        assert_eq!(k2.token_rewards, [-0.125, -0.5, 0.0, 0.0, -4900.5].map(Some));
        let abs = kl_in_reward(&[0.0; 3], &batch, KlEstimator::Abs, 1.0).unwrap();
        assert_eq!(abs.token_rewards, [-0.5, -1.0, 0.0, 0.0, -99.0].map(Some));
    }

    #[test]
    fn kl_in_reward_names_missing_inputs() {
        let without = batch();
        let refusal = |scores: &[f32], batch: &TokenBatch, beta| {
            kl_in_reward(scores, batch, KlEstimator::K1, beta).unwrap_err().to_string()
        };
        assert!(refusal(&[0.0; 3], &without, 1.0).contains("no ref_logp"));
        let batch = without.with_ref_logp(vec![0.0; 5]).unwrap();
        assert!(refusal(&[0.0; 2], &batch, 1.0).contains("expected 3, got 2"));
        assert!(refusal(&[0.0, f32::INFINITY, 0.0], &batch, 1.0).contains("completion 1"));
        assert!(refusal(&[0.0, f32::NAN, 0.0], &batch, 1.0).contains("a missing reward is None"));
        assert!(refusal(&[0.0; 3], &batch, f64::NAN).contains("beta"));
    }
}
