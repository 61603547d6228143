//! verl's `rollout_rs`: rejection of tokens or sequences by the divergence of sampler and old policy.

use super::{KlEstimator, LossConfig, Threshold};
use crate::error::{Error, Result};

/// One of verl's rejection rules.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rejection {
    /// The set over which the statistic is computed.
    pub(crate) over: Over,
    /// The divergence of a token.
    pub(crate) estimator: KlEstimator,
    /// Bounds of the statistic.
    pub(crate) low: f64,
    pub(crate) high: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Over {
    /// Each token.
    Token,
    /// The sum over a sequence.
    Sum,
    /// The mean over a sequence.
    Mean,
    /// The maximum over a sequence.
    Max,
}

/// The rules of `rollout_rs` with their thresholds.
///
/// # Errors
/// [`Error::Config`] for a rule or threshold that verl does not have.
pub(crate) fn rejections(config: &LossConfig) -> Result<Vec<Rejection>> {
    let fail = |message: String| Err(Error::of_key("rollout_rs", message));
    let list = |text: Option<&str>| -> Vec<String> {
        let parts = text.into_iter().flat_map(|text| text.split(',')).map(|part| part.trim().to_owned());
        parts.filter(|part| !part.is_empty()).collect()
    };
    let rules = list(config.rollout_rs.as_deref());
    let thresholds = list(config.rollout_rs_threshold.as_ref().map(|thresholds| thresholds.0.as_str()));
    if rules.is_empty() {
        return match thresholds.is_empty() {
            true => Ok(vec![]),
            false => fail("rollout_rs_threshold is set without rollout_rs: set rollout_rs, too".into()),
        };
    }
    if thresholds.len() != 1 && thresholds.len() != rules.len() {
        return fail(format!(
            "rollout_rs_threshold: expected one bound, or one for each of the {} rules of rollout_rs, got {}",
            rules.len(),
            thresholds.len()
        ));
    }
    let pairs = rules.iter().zip(thresholds.iter().cycle());
    pairs.map(|(rule, threshold)| Rejection::parse(rule, threshold)).collect()
}

impl Rejection {
    fn parse(rule: &str, threshold: &str) -> Result<Self> {
        let fail = |message: String| Err(Error::of_key("rollout_rs", message));
        let (over, estimator) = match rule.rsplit_once("_k") {
            Some(("token", k @ ("1" | "2" | "3"))) => (Over::Token, k),
            Some(("seq_sum", k @ ("1" | "2" | "3"))) => (Over::Sum, k),
            Some(("seq_mean", k @ ("1" | "2" | "3"))) => (Over::Mean, k),
            Some(("seq_max", k @ ("2" | "3"))) => (Over::Max, k),
            _ => {
                return fail(format!(
                    "rollout_rs: expected token_k1..3, seq_sum_k1..3, seq_mean_k1..3 or seq_max_k2..3, got `{rule}`"
                ));
            }
        };
        let bounds = Threshold::parse(threshold)
            .map_err(|e| Error::of_key("rollout_rs_threshold", format!("rollout_rs_threshold: {e}")))?;
        let positive = |v: f64| v > 0.0 && v.is_finite();
        if !positive(bounds.high) || !bounds.low.is_none_or(|low| positive(low) && low <= bounds.high) {
            return fail(format!("rollout_rs_threshold: bounds must be positive and in order, got `{threshold}`"));
        }
        match (estimator, bounds.low) {
            // k1 has bounds on both sides, given as ratios.
            ("1", low) => {
                let low = low.unwrap_or(1.0 / bounds.high);
                if low > bounds.high {
                    return fail(format!(
                        "rollout_rs_threshold: bounds of {rule} must be in order, got {low} and {}",
                        bounds.high
                    ));
                }
                Ok(Self { over, estimator: KlEstimator::K1, low: low.ln(), high: bounds.high.ln() })
            }
            (_, Some(_)) => fail(format!("rollout_rs_threshold: {rule} has an upper bound only, got `{threshold}`")),
            (k, None) => {
                let estimator = if k == "2" { KlEstimator::K2 } else { KlEstimator::K3 };
                Ok(Self { over, estimator, low: f64::NEG_INFINITY, high: bounds.high })
            }
        }
    }
}
