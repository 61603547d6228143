//! A sampler that draws from a part of the vocabulary and reports renormalised log-probabilities.

use super::*;
use grpo_testkit::config;
use rstest::rstest;

/// Under top_p 0.8, two of four tokens remain, with 0.8 of the mass.
const P: [f64; 4] = [0.5, 0.3, 0.15, 0.05];
const KEPT: f64 = 0.8;
/// A sequence of four tokens and one of two.
const TARGETS: [i64; 6] = [0, 1, 0, 0, 1, 0];

/// Returns logits with probabilities `P`, and a batch whose old policy has the same probabilities; if `renormalised`,
/// the sampler reports its probabilities divided by the kept mass.
fn sampled(renormalised: bool) -> (Vec<f32>, TokenBatch) {
    let logp = |divisor: f64| TARGETS.iter().map(|id| (P[*id as usize] / divisor).ln() as f32).collect::<Vec<_>>();
    let batch = TokenBatch::packed(TARGETS.to_vec(), vec![0, 4, 6])
        .and_then(|batch| batch.with_advantages(Advantages::PerSequence(vec![1.0; 2])))
        .and_then(|batch| batch.with_old_logp(logp(1.0)))
        .and_then(|batch| batch.with_sampler_logp(logp(if renormalised { KEPT } else { 1.0 })))
        .unwrap();
    (TARGETS.iter().flat_map(|_| P.map(|p| p.ln() as f32)).collect(), batch)
}

/// (settings, weights of the two sequences, mean of the recorded ratios); all are 1 for a sampler that equals the
/// policy. With renormalised log-probabilities, the ratio is the kept mass at every token: it only shrinks the gradient
/// or, with bounds near 1, removes it.
#[rstest]
#[case::token_truncate(trl("token_truncate", ""), [KEPT; 2], KEPT)]
#[case::token_mask(trl("token_mask", ""), [KEPT; 2], KEPT)]
#[case::sequence_truncate(trl("sequence_truncate", ""), [KEPT * KEPT * KEPT * KEPT, KEPT * KEPT], 0.5248)]
#[case::sequence_mask(trl("sequence_mask", ""), [KEPT * KEPT * KEPT * KEPT, KEPT * KEPT], 0.5248)]
#[case::bounded_below(trl("sequence_mask", r#", "vllm_importance_sampling_clip_min": 0.5"#), [0.0, KEPT * KEPT], 0.32)]
#[case::geometric_truncate(trl("geometric_truncate", ""), [KEPT; 2], KEPT)]
#[case::geometric_mask(trl("geometric_mask", r#", "vllm_importance_sampling_clip_min": 0.99"#), [0.0; 2], 0.0)]
#[case::verl_token(verl(r#""rollout_is": "token""#), [KEPT; 2], KEPT)]
#[case::verl_sequence(verl(r#""rollout_is": "sequence""#), [KEPT * KEPT * KEPT * KEPT, KEPT * KEPT], 0.5248)]
#[case::icepop(verl(r#""rollout_is": "icepop", "rollout_is_threshold": 1.2"#), [0.0; 2], 0.0)]
// Normalisation restores a mean weight of 1 if the kept mass is constant; the metric still has the original mean.
#[case::normalised(verl(r#""rollout_is": "token", "rollout_is_batch_normalize": true"#), [1.0; 2], KEPT)]
fn renormalised_log_probabilities_bias_the_ratio(#[case] json: String, #[case] weights: [f64; 2], #[case] mean: f64) {
    let loss = config(&json);
    let assert = |renormalised: bool, weights: [f64; 2], mean: f64| {
        let (z, batch) = sampled(renormalised);
        let expected = -(4.0 * weights[0] + 2.0 * weights[1]) / 6.0;
        let case = identity(&z, 4, &batch);
        for (how, implementation, tiling) in implementations() {
            let out = run(&mut *plan(&CpuBackend::new(), &case.request(&loss, implementation, tiling)), &case);
            assert!((out.loss - expected).abs() < 1e-6, "{how}: {} for {expected}", out.loss);
            let of = |name: &str| out.metrics.value(&format!("sampling/{name}")).unwrap();
            assert!((of("importance_sampling_ratio/mean") - mean).abs() < 1e-6, "{how}: {:?}", out.metrics);
            let difference = if renormalised { -KEPT.ln() } else { 0.0 };
            assert!((of("sampling_logp_difference/mean") - difference).abs() < 1e-6, "{how}: {:?}", out.metrics);
            // dL/dz of the sampled entry is -A w (1 - p) / 6.
            let dz = transposed(&out.lm_head, 4, 6);
            for (i, id) in TARGETS.into_iter().enumerate() {
                let slope = -weights[usize::from(i >= 4)] * (1.0 - P[id as usize]) / 6.0;
                let got = f64::from(dz[4 * i + id as usize]);
                assert!((got - slope).abs() < 1e-6, "{how}, token {i}: {got} for {slope}");
            }
        }
    };
    assert(true, weights, mean);
    assert(false, [1.0; 2], 1.0);
}

fn trl(mode: &str, more: &str) -> String {
    format!(r#"{{"loss_type": "bnpo", "vllm_importance_sampling_mode": "{mode}"{more}}}"#)
}

fn verl(keys: &str) -> String {
    format!(r#"{{"semantics": "verl", "loss_type": "vanilla", {keys}}}"#)
}

/// With a threshold of 2, rejection keeps ratios of 0.8, but removes a sequence with a product of 0.41; with a threshold
/// near 1, it removes everything.
#[test]
fn rejection_removes_tokens_with_renormalised_log_probabilities() {
    let rejects = |keys: &str| {
        let (_, batch) = sampled(true);
        let score = |_: &TokenBatch| -> Result<grpo_core::batch::PolicyValues> { panic!("needs no forward pass") };
        let kept = config(&verl(keys)).prepare(&batch, score).unwrap().active_tokens();
        batch.active_tokens() - kept
    };
    // ln 0.8 = -0.223; summed over the sequences, -0.893 and -0.446; the bound is ln 2 = 0.693.
    assert_eq!(rejects(r#""rollout_rs": "token_k1", "rollout_rs_threshold": 2.0"#), 0);
    assert_eq!(rejects(r#""rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 2.0"#), 4);
    assert_eq!(rejects(r#""rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.1"#), 6);
}
