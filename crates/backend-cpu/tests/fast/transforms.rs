//! Logit scale and softcap: precomputed logits, and a case computed by hand. `parity.rs` has the other inputs.

use grpo_backend_cpu::CpuBackend;
use grpo_backend_cpu::oracle::{Policy, evaluate, score};
use grpo_core::*;
use grpo_testkit::cpu::*;
use grpo_testkit::{Tensor, *};
use rstest::rstest;

/// Precomputed logits of any size, with their gradient in a separate buffer and in place.
#[rstest]
fn precomputed_logits_match_the_oracle(
    #[values("softcap", "softcap_logprobs", "logit_scale", "negative_scale")] name: &str,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
    #[values(Implementation::Reference, Implementation::Logits)] implementation: Implementation,
    #[values((None, None), (Some(4), Some(512)), (Some(1), Some(1)))] (token_chunk, vocab_block): (
        Option<usize>,
        Option<usize>,
    ),
    #[values(3.0, 300.0)] size: f32,
) {
    let loss = LossConfig { beta: 0.0, ..loss(name) };
    let case = Case::new(&loss, &Shape { dtype, temperatures: true, ..Shape::default() }, 3);
    let (n, v) = (case.batch.tokens(), case.v);
    let z = Tensor::new((0..n * v).map(|i| size * ((i * 29 % 1013) as f32 / 506.0 - 1.0)).collect(), dtype);
    let wide = z.in_f64();
    let policy = Policy::logits(&wide, v);
    let logp = score(&loss, &policy, &case.batch).unwrap().logp;
    let old = logp.iter().enumerate().map(|(i, l)| *l as f32 + [0.02, -0.1, 0.03][i % 3]).collect();
    let batch = case.batch.clone().with_old_logp(old).unwrap();
    let expected = evaluate(&loss, &policy, &batch).unwrap();
    let tiling = Tiling { token_chunk, vocab_block, ..Tiling::default() };
    let request = logits_request(&loss, implementation, tiling, [n, v], dtype);
    let (got, gradient) = run_logits(&mut *plan(&CpuBackend::with_threads(2).unwrap(), &request), &z, &batch);
    // This is the f32 precision of logits of 300, and of the distance of a capped logit from its cap.
    let by_size = 2.0 * f64::from(f32::EPSILON * size);
    let off = (got.loss - expected.loss).abs() / expected.magnitude;
    assert!(off <= 3e-6 + by_size, "loss is off by {off:e}");
    for (got, expected) in [(&got.scores.logp, &expected.logp), (&got.scores.entropy, &expected.entropy)] {
        for (got, expected) in got.iter().zip(expected) {
            assert!((f64::from(*got) - expected).abs() <= 3e-6 * expected.abs().max(1.0), "{got} for {expected}");
        }
    }
    let largest = expected.grad_logits.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
    assert!(largest > 1e-6, "largest gradient is only {largest}");
    let off = difference(&gradient, &expected.grad_logits);
    assert!(off <= EXACT + by_size, "gradient is off by {off:e}");
}

const LOGP_OF_SCALED_LOGITS: f64 = -0.348_687_550_358_27;
const SLOPES_OF_SCALED_LOGITS: [f64; 2] = [-0.194_402_215_435_289, 0.294_386_435_463_703];
const LOGP_OF_SCALED_LOGPROBS: f64 = -0.080_234_386_318_826;
const SLOPES_OF_SCALED_LOGPROBS: [f64; 2] = [-0.097_902_652_968_889, 0.148_255_579_111_675];

/// A hand-computed case: z = (1, 0) and the first entry sampled, logit_scale 2, cap 3, T = 2 for the token (5 in the
/// configuration). u = (2, 0), w = (3 tanh(2/3), 0), and w / 2 or log p / 2. Temperature before cap would give 3
/// tanh(1/3).
#[rstest]
#[case::scale_logits("scale_logits", LOGP_OF_SCALED_LOGITS, SLOPES_OF_SCALED_LOGITS)]
#[case::scale_logprobs("scale_logprobs", LOGP_OF_SCALED_LOGPROBS, SLOPES_OF_SCALED_LOGPROBS)]
fn the_order_is_scale_cap_temperature(#[case] mode: &str, #[case] logp: f64, #[case] slopes: [f64; 2]) {
    let loss = config(&format!(
        r#"{{"logit_scale": 2, "final_logit_softcapping": 3, "temperature": 5, "temperature_mode": "{mode}"}}"#
    ));
    let batch = TokenBatch::packed(vec![0], vec![0, 1]).unwrap().with_temperatures(vec![2.0]).unwrap();
    let batch = batch.with_advantages(Advantages::PerSequence(vec![1.0])).unwrap();
    let close = |found: f32, expected: f64| (f64::from(found) - expected).abs() <= 1e-6;
    for implementation in Implementation::ALL {
        let given = takes_logits(&implementation);
        let policy = match given {
            true => PolicySpec::Logits { vocab: 2, dtype: Dtype::F32 },
            false => PolicySpec::Hidden {
                hidden: 1,
                vocab: 2,
                dtype: Dtype::F32,
                layout: HeadLayout::VocabHidden,
                bias: false,
            },
        };
        let (loss, tiling, gradients) = (loss.clone().into(), Tiling::default(), GradientSpec::default());
        let request = PlanRequest { loss, implementation, tiling, max_tokens: 1, policy, gradients };
        let mut plan = CpuBackend::new().plan(&request).unwrap();
        // With a hidden state of 1, the head is the logits, and dhead is dlogits.
        let (z, one, mut grad, mut dhidden) = ([1.0_f32, 0.0], [1.0_f32], [0.0_f32; 2], [0.0_f32]);
        let out = if given {
            let grads = GradsMut { logits: Some((&mut grad[..]).into()), ..GradsMut::default() };
            plan.value_and_grad(PolicyInput::Logits(z[..].into()), &batch, grads)
        } else {
            let policy = PolicyInput::Hidden { hidden: one[..].into(), lm_head: z[..].into(), bias: None };
            let (hidden, lm_head) = (Some((&mut dhidden[..]).into()), Some((&mut grad[..]).into()));
            plan.value_and_grad(policy, &batch, GradsMut { hidden, lm_head, ..GradsMut::default() })
        };
        let found = out.unwrap().scores.logp[0];
        assert!(close(found, logp), "{implementation:?}: log p {found} for {logp}");
        assert!(close(grad[0], slopes[0]) && close(grad[1], slopes[1]), "{implementation:?}: {grad:?} for {slopes:?}");
    }
}
