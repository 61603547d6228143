//! Denominators of means: empty batches, and tokens whose policy term is removed.

use super::*;
use grpo_testkit::{Shape, config};
use rstest::rstest;

/// Returns the configuration of a loss type under `semantics`, or the error if there is none.
fn legal(semantics: &str, loss_type: &str) -> Result<LossConfig> {
    let own = match loss_type {
        "dr_grpo" => r#", "max_completion_length": 8"#,
        "cispo" => r#", "epsilon_high": 1.3"#,
        "dro" => r#", "dro_beta": 0.5"#,
        "vespo" => r#", "vllm_importance_sampling_mode": "token_mask""#,
        _ => "",
    };
    LossConfig::from_json(&format!(
        r#"{{"semantics": "{semantics}", "loss_type": "{loss_type}", "beta": 0.1, "entropy_coef": 0.02,
            "top_entropy_quantile": 0.5, "off_policy_mask_threshold": 0.1 {own}}}"#
    ))
}

/// verl's token mean computes 0 / 0 here.
#[rstest]
fn a_batch_without_active_tokens_is_zero_loss_and_zero_gradient(
    #[values("trl", "verl", "mllm_jax")] semantics: &str,
    #[values(&[2, 0, 3][..], &[0][..], &[][..])] lengths: &[usize],
) {
    let naive = 0.0_f64 / lengths.iter().map(|_| 0.0).sum::<f64>();
    assert!(naive.is_nan());
    let backend = CpuBackend::with_threads(2).unwrap();
    let mut tested = 0;
    for name in LossType::ALL.iter().map(|loss_type| loss_type.name()) {
        // Some losses exist in one system only.
        let Ok(loss) = legal(semantics, name) else { continue };
        tested += 1;
        // Every token is masked, with NaN values.
        let shape = Shape { lengths, h: 6, v: 20, mask_every: 1, ..Shape::default() };
        let case = Case::new(&loss, &shape, 73);
        let sampler = vec![f32::NAN; case.batch.tokens()];
        let case = Case { batch: case.batch.clone().with_sampler_logp(sampler).unwrap(), ..case };
        assert_eq!(case.batch.active_tokens(), 0);
        let exact = case.oracle(&loss);
        assert!(exact.loss == 0.0 && exact.grad_lm_head.iter().all(|g| *g == 0.0), "{name}: oracle");
        for (how, implementation, tiling) in implementations() {
            let out = run(&mut *plan(&backend, &case.request(&loss, implementation, tiling)), &case);
            assert_eq!(out.loss, 0.0, "{name}, {how}");
            let gradients = [&out.hidden, &out.lm_head, &out.bias];
            assert!(gradients.into_iter().flatten().all(|g| *g == 0.0), "{name}, {how}");
            assert!(out.metrics.values().all(|(_, value)| value.is_finite()), "{name}, {how}: {:?}", out.metrics);
        }
    }
    assert!(tested > 12, "{tested} losses");
}

/// Four tokens in sequences of three and one, with p = 1/2 each unless `z` sets other logits, and a k1 of l + 1.2 each.
struct Four {
    loss: LossConfig,
    z: [f32; 8],
    batch: TokenBatch,
}

impl Four {
    fn new(json: &str, z: [f32; 8], advantages: [f32; 2]) -> Self {
        let kl = r#""loss_type": "bnpo", "beta": 0.1, "kl_estimator": "k1", "use_bias_correction_kl": false"#;
        let batch = TokenBatch::packed(vec![0; 4], vec![0, 3, 4])
            .and_then(|batch| batch.with_advantages(Advantages::PerSequence(advantages.to_vec())))
            .and_then(|batch| batch.with_ref_logp(vec![-1.2; 4]))
            .unwrap();
        Self { loss: config(&format!("{{{kl}, {json}}}")), z, batch }
    }

    /// `policy` has each token's terms of the loss and of dL/dlogp, before the division by 4.
    fn assert(&self, policy: [(f64, f64); 4]) {
        let logp = |i: usize| -(f64::from(self.z[2 * i + 1] - self.z[2 * i])).exp().ln_1p();
        let expected: f64 = (0..4).map(|i| (policy[i].0 + 0.1 * (logp(i) + 1.2)) / 4.0).sum();
        let naive_count = policy.iter().filter(|(value, _)| *value != 0.0).count() as f64;
        let (sum, kl): (f64, f64) =
            (0..4).map(|i| (policy[i].0, 0.1 * (logp(i) + 1.2) / 4.0)).fold((0.0, 0.0), |s, t| (s.0 + t.0, s.1 + t.1));
        let naive = sum / naive_count + kl;
        assert!((naive - expected).abs() > 0.2, "naive: {naive} where {expected} is right");
        for Found { how, loss, dz, .. } in everywhere(&self.loss, &self.z, 2, &self.batch) {
            assert!((loss - expected).abs() <= 1e-6, "{how}: {loss} for {expected}");
            for (i, (_, slope)) in policy.into_iter().enumerate() {
                // Tokens without a policy term keep their KL.
                let slope = (slope + 0.1) / 4.0 * (1.0 - logp(i).exp());
                let got = [f64::from(dz[2 * i]), f64::from(dz[2 * i + 1])];
                assert!(
                    (got[0] - slope).abs() < 1e-6 && (got[1] + slope).abs() < 1e-6,
                    "{how}, {i}: {got:?} for {slope}"
                );
            }
        }
    }
}

/// Logits with p = 1/2, and the policy terms of kept and removed tokens: -A r at r = 1, and 0.
const EVEN: [f32; 8] = [0.0; 8];
const KEPT: (f64, f64) = (-1.0, -1.0);
const TAKEN: (f64, f64) = (0.0, 0.0);

#[test]
fn tokens_that_the_sampler_masks_stay_in_the_denominator_and_keep_their_kl() {
    let mut four = Four::new(r#""vllm_importance_sampling_mode": "token_mask""#, EVEN, [1.0, 1.0]);
    // A ratio of e^2 exceeds 3; a missing sampler log-probability gives a ratio of 1.
    let half = -2.0_f32.ln();
    four.batch = four.batch.with_sampler_logp(vec![half, half - 2.0, f32::NAN, half]).unwrap();
    four.assert([KEPT, TAKEN, KEPT, KEPT]);
}

#[test]
fn off_policy_sequences_stay_in_the_denominator_and_keep_their_kl() {
    let mut four = Four::new(r#""off_policy_mask_threshold": 0.1"#, EVEN, [-1.0, 1.0]);
    let half = -2.0_f32.ln();
    four.batch = four.batch.with_old_logp(vec![half + 0.5, half + 0.4, half, half]).unwrap();
    four.assert([TAKEN, TAKEN, TAKEN, KEPT]);
}

#[test]
fn tokens_of_low_entropy_stay_in_the_denominator_and_keep_their_kl() {
    let z = [3.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0];
    Four::new(r#""top_entropy_quantile": 0.5"#, z, [1.0, 1.0]).assert([TAKEN, KEPT, TAKEN, KEPT]);
}
