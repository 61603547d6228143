//! The loss as a burn user would write it: dense, with burn's operations, differentiated by burn.

use super::case::{B, Case, N, OFFSETS, V, tensor};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use grpo_core::{KlImportance, LossConfig, LossType, TemperatureMode};

/// Returns log-probabilities of the targets `[N]` and entropies `[N]` of logits `[N, V]`.
pub(crate) fn log_probabilities(config: &LossConfig, logits: Tensor<2>, case: &Case) -> (Tensor<1>, Tensor<1>) {
    let ids: Vec<i64> = case.targets.iter().map(|t| *t.max(&0)).collect();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [N, 1]), &logits.device());
    let (before, after) = match config.temperature_mode() {
        TemperatureMode::ScaleLogits => (config.temperature, 1.0),
        TemperatureMode::ScaleLogprobs => (1.0, config.temperature),
    };
    let all = log_softmax(logits.div_scalar(before), 1);
    let entropy = (all.clone().exp() * all.clone()).sum_dim(1).reshape([N]).neg();
    (all.gather(1, ids).reshape([N]).div_scalar(after), entropy)
}

/// Returns the loss `[1]` of logits `[N, V]`.
pub(crate) fn loss(config: &LossConfig, logits: Tensor<2>, case: &Case) -> Tensor<1> {
    assert_eq!(logits.dims(), [N, V]);
    let device = logits.device();
    let row = |values: &[f32]| tensor(values, [N], &device);
    let (logp, entropy) = log_probabilities(config, logits, case);
    let delta = logp.clone() - row(&case.old_logp);
    let log_ratio = if config.is_token_level() { delta } else { sequence_mean(case, delta, &device) };
    let ratio = log_ratio.exp();
    let per_token: Vec<f32> = (0..N).map(|i| case.advantages[sequence_of(i)]).collect();
    let advantage = row(&per_token);
    let policy = if config.loss_type == LossType::Cispo {
        ratio.clone().clamp_max(config.ratio_high()).detach() * advantage * logp.clone()
    } else {
        let capped = config.delta.map_or(ratio.clone(), |d| ratio.clone().clamp_max(d));
        let clipped = ratio.clone().clamp(config.ratio_low(), config.ratio_high());
        (capped * advantage.clone()).min_pair(clipped * advantage)
    };
    let d = row(&case.ref_logp) - logp;
    let kl = (d.clone().exp() - d - 1.0)
        * if config.kl_importance() == KlImportance::Ratio { ratio } else { ratio.ones_like() };
    let token = kl.mul_scalar(config.beta) - policy;
    let active: f32 = case.mask.iter().sum();
    let bonus = (entropy * row(&case.mask)).sum().mul_scalar(config.entropy_coef / f64::from(active));
    (token * row(&weights(config, case))).sum() - bonus
}

fn weights(config: &LossConfig, case: &Case) -> Vec<f32> {
    let active: f32 = case.mask.iter().sum();
    let weight = |i: usize| match config.loss_type {
        LossType::Grpo | LossType::Gspo => 1.0 / (B as f32 * length(case, sequence_of(i))),
        LossType::Dapo | LossType::Cispo => 1.0 / active,
        other => panic!("the plain formulation does not know {other:?}"),
    };
    (0..N).map(|i| if case.mask[i] == 1.0 { weight(i) } else { 0.0 }).collect()
}

/// Returns, for each token, the mean over the active tokens of its sequence.
fn sequence_mean(case: &Case, values: Tensor<1>, device: &Device) -> Tensor<1> {
    let (mut mean, mut spread) = (vec![0.0; B * N], vec![0.0; N * B]);
    for i in 0..N {
        let b = sequence_of(i);
        spread[i * B + b] = 1.0;
        mean[b * N + i] = case.mask[i] / length(case, b).max(1.0);
    }
    let spread = tensor(&spread, [N, B], device);
    spread.matmul(tensor(&mean, [B, N], device).matmul(values.reshape([N, 1]))).reshape([N])
}

fn sequence_of(row: usize) -> usize {
    (0..B).find(|b| row < OFFSETS[b + 1]).expect("a row of the case")
}

fn length(case: &Case, sequence: usize) -> f32 {
    case.mask[OFFSETS[sequence]..OFFSETS[sequence + 1]].iter().sum()
}
