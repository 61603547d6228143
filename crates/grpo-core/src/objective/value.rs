//! The loss of PPO's value function (arXiv 1707.06347), written once over [`Real`].
//!
//! Legend: v = output of the value head for the state before a token, w = its value when the completion was sampled, R = return
//! (advantage + w), e = `cliprange_value`. The loss of a token is 0.5 x max((v - R)^2, (clip(v, w - e, w + e) - R)^2), as in TRL's PPOTrainer
//! and verl's `compute_value_loss`; without a clip it is 0.5 x (v - R)^2. Tokens are averaged with the weights of the policy loss
//! ([`crate::aggregate`]).

use super::weighted;
use crate::aggregate::batch_weights;
use crate::backend_api::real::{Dual, Real};
use crate::batch::{TokenBatch, ValueTargets};
use crate::config::LossConfig;
use crate::error::{Error, Result};
use crate::metrics::Metrics;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The inputs of the value loss of one token.
#[derive(Clone, Debug)]
pub struct ValueTerms<R> {
    /// The value of the state before the token; the loss is differentiated by it.
    pub value: R,
    /// The value when the completion was sampled.
    pub old_value: R,
    /// The return, the regression target.
    pub target: R,
}

/// The value loss of one token before its weight.
#[derive(Clone, Debug)]
pub struct ValueLoss<R> {
    /// Half the larger square.
    pub loss: R,
    /// 1 if the clipped square is the larger one, else 0.
    pub clipped: R,
}

/// Computes the value loss of one token; `cliprange_value` is e, `None` for no clip.
pub fn value_loss<R: Real>(cliprange_value: Option<f64>, terms: &ValueTerms<R>) -> ValueLoss<R> {
    let ValueTerms { value, old_value, target } = terms;
    let square = |value: &R| {
        let error = value.clone() - target.clone();
        error.clone() * error
    };
    let (plain, half) = (square(value), value.constant(0.5));
    let Some(range) = cliprange_value else {
        return ValueLoss { loss: half * plain, clipped: value.constant(0.0) };
    };
    let (low, high) = (old_value.clone() - value.constant(range), old_value.clone() + value.constant(range));
    let held = square(&value.max(&low).min(&high));
    ValueLoss { clipped: value.indicator(&plain.lt(&held)), loss: half * plain.max(&held) }
}

/// The settings of the value loss, with TRL's names.
///
/// ```
/// use grpo_core::batch::ValueTargets;
/// use grpo_core::objective::ValueLossConfig;
/// use grpo_core::{LossConfig, TokenBatch};
///
/// // Outputs of the value head for a completion of two tokens, and their values when it was sampled.
/// let batch = TokenBatch::packed(vec![3, 7], vec![0, 2])?
///     .with_value_targets(ValueTargets { old_values: vec![0.0, 0.5], returns: vec![1.0, 1.0] })?;
/// let out = ValueLossConfig::default().compute(&[0.1, 0.5], &LossConfig::default(), &batch)?;
/// // The mean of 0.81 / 2 and 0.25 / 2, times vf_coef.
/// assert!((out.value_loss - 0.265).abs() < 1e-6 && (out.loss - 0.5 * 0.265).abs() < 1e-6);
/// assert!((out.dvalues[1] + 0.5 * 0.5 * 0.5).abs() < 1e-6);
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ValueLossConfig {
    /// Factor of the value loss in the loss of a step, at least 0.
    #[default(0.5)]
    pub vf_coef: f64,
    /// Largest change of a value from its old value before the clipped square applies, above 0; `None` turns the clip off.
    #[default(Some(0.2))]
    pub cliprange_value: Option<f64>,
}

/// The value loss of a batch with its derivatives.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct ValueOutput {
    /// The weighted mean of the tokens' value losses.
    pub value_loss: f64,
    /// `vf_coef` times the value loss: its share of the step's loss.
    pub loss: f64,
    /// d `loss` / d value `[N]`; 0 at masked tokens and at tokens without a return.
    pub dvalues: Vec<f32>,
    /// Over tokens with a return: `value_pred_mean`, `return_mean`, `value_clip_ratio` (share of tokens whose clipped
    /// square is the larger one).
    pub metrics: Metrics,
}

impl ValueLossConfig {
    /// Checks both numbers.
    ///
    /// # Errors
    /// [`Error::Config`] that names the field.
    pub fn validate(&self) -> Result<()> {
        if !(self.vf_coef >= 0.0 && self.vf_coef.is_finite()) {
            return Err(Error::of_key(
                "vf_coef",
                format!("vf_coef must be finite and not negative, got {}", self.vf_coef),
            ));
        }
        match self.cliprange_value {
            Some(range) if !(range > 0.0 && range.is_finite()) => Err(Error::of_key(
                "cliprange_value",
                format!("cliprange_value must be finite and above 0, or null for no clip, got {range}"),
            )),
            _ => Ok(()),
        }
    }

    /// Computes the value loss of `batch` for the current values `values: [N]`. The weights are those of the policy's terms: the batch's own
    /// weights, or else the weights that `config` gives if the batch is one whole step.
    ///
    /// # Errors
    /// [`Error::Config`] for illegal settings and for a batch without [`TokenBatch::value_targets`]; [`Error::Shape`] for a different number
    /// of values; the errors of [`batch_weights`]. A value that is not finite is no error: it appears in the loss.
    pub fn compute(&self, values: &[f32], config: &LossConfig, batch: &TokenBatch) -> Result<ValueOutput> {
        self.validate()?;
        let Some(ValueTargets { old_values, returns }) = batch.value_targets() else {
            return Err(Error::Config(
                "the value loss needs values of the old policy and returns: give them with TokenBatch::with_value_targets"
                    .into(),
            ));
        };
        if values.len() != batch.tokens() {
            return Err(Error::shape("value loss", "values [N]", batch.tokens(), values.len()));
        }
        let weights = batch_weights(config, batch)?;
        let (mut value_loss_sum, mut dvalues) = (0.0, vec![0.0; values.len()]);
        let (mut count, mut of_values, mut of_returns, mut clipped) = (0.0, 0.0, 0.0, 0.0);
        for &row in batch.active_rows().iter().filter(|row| !returns[**row].is_nan()) {
            let fixed = |value: f32| Dual::fixed(f64::from(value));
            let terms = ValueTerms {
                value: Dual::variable(f64::from(values[row])),
                old_value: fixed(old_values[row]),
                target: fixed(returns[row]),
            };
            let token = value_loss(self.cliprange_value, &terms);
            let weight = weights.policy[row];
            value_loss_sum += weighted(&weight, &token.loss.value);
            dvalues[row] = (self.vf_coef * weighted(&weight, &token.loss.tangent)) as f32;
            count += 1.0;
            of_values += f64::from(values[row]);
            of_returns += f64::from(returns[row]);
            clipped += token.clipped.value;
        }
        let mut metrics = Metrics::default();
        metrics.mean("value_pred_mean", of_values, count);
        metrics.mean("return_mean", of_returns, count);
        metrics.mean("value_clip_ratio", clipped, count);
        Ok(ValueOutput { value_loss: value_loss_sum, loss: self.vf_coef * value_loss_sum, dvalues, metrics })
    }
}

/// Returns 1 - var(returns - values) / var(returns) over the active tokens with a return (verl's `critic/vf_explained_var`): the share of
/// the returns' variance that the values predict. `None` if all returns are equal or there are none.
pub fn explained_variance(batch: &TokenBatch) -> Option<f64> {
    let ValueTargets { old_values, returns } = batch.value_targets()?;
    let rows: Vec<usize> = batch.active_rows().iter().copied().filter(|row| !returns[*row].is_nan()).collect();
    let variance = |of: &dyn Fn(usize) -> f64| {
        let count = rows.len().max(1) as f64;
        let mean = rows.iter().map(|row| of(*row)).sum::<f64>() / count;
        rows.iter().map(|row| (of(*row) - mean).powi(2)).sum::<f64>() / count
    };
    let of_returns = variance(&|row| f64::from(returns[row]));
    let of_errors = variance(&|row| f64::from(returns[row]) - f64::from(old_values[row]));
    (of_returns > 0.0).then(|| 1.0 - of_errors / of_returns)
}
