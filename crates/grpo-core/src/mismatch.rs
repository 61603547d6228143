//! Metrics of the mismatch between the sampling engine and the old policy: verl's `rollout_corr/*` and NeMo-RL's `*_error`.
//!
//! Legend: o = old logp, s = sampler logp, d = o - s, at the active tokens with a known sampler log-probability.

use crate::batch::TokenBatch;
use crate::config::{KlEstimator, Threshold};
use crate::metrics::Metrics;
use crate::objective::kl_value;

/// verl's bound on |log ratio| before exp.
const SAFE: f64 = 20.0;
/// Largest other exponent, so that every metric is finite.
const LARGEST: f64 = 80.0;

/// Records the metrics of a batch, with `log_ratios` d `[N]`.
pub(crate) fn record(batch: &TokenBatch, log_ratios: &[f64], metrics: &mut Metrics) {
    let Some(sampler) = batch.sampler_logp() else { return };
    let (mut sums, mut count) = ([0.0; OF_TOKENS.len()], 0.0);
    for rows in batch.active_sequences() {
        let rows: Vec<usize> = rows.into_iter().filter(|row| !sampler[*row].is_nan()).collect();
        if rows.is_empty() {
            continue;
        }
        for row in &rows {
            sums.iter_mut().zip(of_token(log_ratios[*row])).for_each(|(sum, value)| *sum += value);
        }
        let tokens = rows.len() as f64;
        count += tokens;
        let d: f64 = rows.iter().map(|row| log_ratios[*row]).sum();
        let s: f64 = rows.iter().map(|row| f64::from(sampler[*row])).sum();
        of_sequence(d, (s + d) / tokens, s / tokens, metrics);
    }
    for (name, sum) in OF_TOKENS.into_iter().zip(sums) {
        metrics.mean(name, sum, count);
    }
}

const OF_TOKENS: [&str; 7] = [
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/chi2_token",
    "token_mult_prob_error",
    "gen_kl_error",
    "policy_kl_error",
    "js_divergence_error",
];

/// Returns the values of [`OF_TOKENS`].
fn of_token(d: f64) -> [f64; OF_TOKENS.len()] {
    let k3 = |d: f64| kl_value(KlEstimator::K3, &d, (None, None));
    // m - s and m - o, where m is the log of the mean of both probabilities.
    let to_mixture = |d: f64| (0.5 * d.min(LARGEST).exp_m1()).ln_1p();
    [
        -d,
        k3(d),
        (2.0 * d.clamp(-SAFE, SAFE)).exp_m1(),
        d.abs().min(LARGEST).exp(),
        k3(d),
        k3(-d),
        0.5 * (k3(-to_mixture(d)) + k3(-to_mixture(-d))),
    ]
}

/// Records the metrics of a sequence. `d`: sum over the tokens; `o` and `s`: means.
fn of_sequence(d: f64, o: f64, s: f64, metrics: &mut Metrics) {
    let exp = |exponent: f64| exponent.min(LARGEST).exp();
    let difference = s - o;
    for (name, value) in [
        ("rollout_corr/training_ppl", exp(-o)),
        ("rollout_corr/training_log_ppl", -o),
        ("rollout_corr/rollout_ppl", exp(-s)),
        ("rollout_corr/rollout_log_ppl", -s),
        ("rollout_corr/log_ppl_diff", difference),
        ("rollout_corr/log_ppl_abs_diff", difference.abs()),
        ("rollout_corr/ppl_ratio", exp(difference)),
        ("rollout_corr/chi2_seq", (2.0 * d.clamp(-SAFE, SAFE)).exp_m1()),
    ] {
        metrics.mean(name, value, 1.0);
    }
    metrics.max("rollout_corr/log_ppl_diff_max", difference);
    metrics.min("rollout_corr/log_ppl_diff_min", difference);
}

/// Records verl's metrics of the weights of `rollout_is`: bounded `weights` `[N]`, and unbounded `ratios` per token or, if
/// `of_sequences`, per sequence.
pub(crate) fn record_weights(
    batch: &TokenBatch,
    weights: &[f64],
    (ratios, of_sequences): (&[f64], bool),
    threshold: Threshold,
    metrics: &mut Metrics,
) {
    if batch.active_tokens() == 0 {
        return;
    }
    let low = threshold.low.unwrap_or(1.0 / threshold.high);
    let mean = |values: &mut dyn Iterator<Item = f64>| {
        let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
        sum / f64::max(count, 1.0)
    };
    let applied = || batch.active_rows().iter().map(|row| weights[*row]);
    let (first, second) = (mean(&mut applied()), mean(&mut applied().map(|weight| weight * weight)));
    let share = |outside: &dyn Fn(f64) -> bool| mean(&mut ratios.iter().map(|r| f64::from(u8::from(outside(*r)))));
    for weight in if of_sequences { ratios.to_vec() } else { applied().collect() } {
        // As in verl: the bounded ratio for weights per sequence, the weight itself for weights per token.
        metrics.max("rollout_corr/rollout_is_max", weight.min(SAFE.exp()));
        metrics.min("rollout_corr/rollout_is_min", weight);
    }
    for (name, value) in [
        ("rollout_corr/rollout_is_mean", first),
        ("rollout_corr/rollout_is_std", (second - first * first).max(0.0).sqrt()),
        ("rollout_corr/rollout_is_eff_sample_size", if second > 0.0 { first * first / second } else { 0.0 }),
        ("rollout_corr/rollout_is_ratio_fraction_high", share(&|ratio| ratio > threshold.high)),
        ("rollout_corr/rollout_is_ratio_fraction_low", share(&|ratio| ratio < low)),
    ] {
        metrics.mean(name, value, 1.0);
    }
}

/// Records the shares of tokens and sequences that `rollout_rs` rejects. `kept`: the mask `[N]` after rejection.
pub(crate) fn record_rejected(batch: &TokenBatch, kept: &[f32], metrics: &mut Metrics) {
    for rows in batch.active_sequences() {
        let rejected = rows.iter().filter(|row| kept[**row] == 0.0).count();
        metrics.mean("rollout_corr/rollout_rs_masked_fraction", rejected as f64, rows.len() as f64);
        metrics.mean("rollout_corr/rollout_rs_seq_masked_fraction", f64::from(u8::from(rejected > 0)), 1.0);
    }
}
