//! The loss as a candle user would write it: dense, with candle's operations, differentiated by candle.

use super::case::tensor;
use candle_core::{D, Device, Result, Tensor};
use grpo_core::aggregate::token_weights;
use grpo_core::{Dtype, KlImportance, LossConfig, LossType, TemperatureMode, TokenBatch};

/// Returns the loss `[]` of f32 logits `[N, V]`.
pub(crate) fn loss(config: &LossConfig, logits: &Tensor, batch: &TokenBatch) -> Result<Tensor> {
    let n = batch.tokens();
    // Values at masked tokens are replaced by 0, because candle would multiply NaN by a weight of 0.
    let row = |value: &dyn Fn(usize) -> f32| {
        let values: Vec<f32> = (0..n).map(|i| if batch.is_active(i) { value(i) } else { 0.0 }).collect();
        tensor(&values, n, Dtype::F32)
    };
    let ids: Vec<i64> = (0..n).map(|i| if batch.is_active(i) { batch.targets()[i] } else { 0 }).collect();
    let (before, after) = match config.temperature_mode() {
        TemperatureMode::ScaleLogits => (config.temperature, 1.0),
        TemperatureMode::ScaleLogprobs => (1.0, config.temperature),
    };
    let logits = (logits / before)?;
    let all = logits.broadcast_sub(&logits.log_sum_exp(D::Minus1)?.unsqueeze(1)?)?;
    let entropy = (all.exp()? * &all)?.sum(1)?.neg()?;
    let logp = (all.gather(&Tensor::from_vec(ids, (n, 1), &Device::Cpu)?, 1)?.squeeze(1)? / after)?;

    let old = row(&|i| batch.old_logp().expect("old log-probabilities")[i]);
    let log_ratio = (&logp - old)?;
    let log_ratio = if config.is_token_level() {
        log_ratio
    } else {
        sequence_mean(batch)?.matmul(&log_ratio.unsqueeze(1)?)?.squeeze(1)?
    };
    let ratio = log_ratio.exp()?;
    let sequence = |i: usize| batch.offsets().partition_point(|offset| *offset <= i) - 1;
    let advantage = row(&|i| batch.advantage(sequence(i), i));
    let policy = if config.loss_type == LossType::Cispo {
        ((ratio.minimum(config.ratio_high())?.detach() * advantage)? * &logp)?
    } else {
        let clipped = ratio.clamp(config.ratio_low(), config.ratio_high())?;
        (&ratio * &advantage)?.minimum(&(clipped * &advantage)?)?
    };
    let d = (row(&|i| batch.ref_logp().expect("reference log-probabilities")[i]) - &logp)?;
    let k3 = ((d.exp()? - &d)? - 1.0)?;
    let kl = if config.kl_importance() == KlImportance::Ratio { (k3 * &ratio)? } else { k3 };
    let weights = token_weights(config, batch).expect("weights");
    let weighted = |values: &Tensor, list: &[f64]| (values * row(&|i| list[i] as f32))?.sum_all();
    // The weights of KL and entropy include their coefficients.
    (weighted(&kl, &weights.kl)? - weighted(&policy, &weights.policy)?)? - weighted(&entropy, &weights.entropy)?
}

/// Returns the matrix `[N, N]` that gives every token the mean over the active tokens of its sequence.
fn sequence_mean(batch: &TokenBatch) -> Result<Tensor> {
    let n = batch.tokens();
    let mut mean = vec![0.0; n * n];
    for sequence in 0..batch.sequences() {
        for i in batch.range(sequence) {
            for j in batch.range(sequence).filter(|j| batch.is_active(*j)) {
                mean[i * n + j] = 1.0 / batch.active_in(sequence) as f32;
            }
        }
    }
    Tensor::from_vec(mean, (n, n), &Device::Cpu)
}
