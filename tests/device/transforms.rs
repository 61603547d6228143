//! Logit scale, softcap and temperatures per token.

use crate::evaluation::{DTYPES, check_on};
use crate::{SMALL, backend, cispo, grpo, implementations, on_mesh, softcap, softcap_logprobs};
use grpo_core::{
    Advantages, Dtype, GradientSpec, GradsMut, HeadLayout, Implementation, LossConfig, LossPlan, PlanRequest,
    PolicyInput, PolicySpec, Tiling, TokenBatch,
};
use grpo_testkit::margin::{assert_below, largest_difference};
use grpo_testkit::{Case, Shape, config};
use rstest::rstest;

#[test]
fn capped_log_probabilities_with_temperatures_match_the_oracle() {
    check_transform(&softcap_logprobs(), true);
}

#[rstest]
#[case::softcap(softcap())]
#[case::softcap_logprobs(softcap_logprobs())]
#[case::logit_scale(LossConfig { logit_scale: 0.4, ..grpo() })]
#[case::temperatures_of_logprobs(cispo())]
#[ignore = "GRPO_TESTS=all"]
fn transformed_hidden_states_match_the_oracle(#[case] loss: LossConfig, #[values(false, true)] temperatures: bool) {
    check_transform(&loss, temperatures);
}

fn check_transform(loss: &LossConfig, temperatures: bool) {
    for (i, (name, implementation, tiling)) in implementations().into_iter().enumerate() {
        let (dtype, layout) = (DTYPES[i % 2], [HeadLayout::VocabHidden, HeadLayout::HiddenVocab][i / 2]);
        let case = Case::new(loss, &Shape { dtype, layout, bias: true, temperatures, ..SMALL }, 3);
        let request = case.request(loss, implementation, tiling);
        check_on(&backend(), name, &case, &request);
        // Tokens are sharded on one axis; the vocabulary, which 2 does not divide, on the other.
        check_on(&on_mesh(2, 2), &format!("{name} on a mesh"), &case, &request);
    }
}

#[rstest]
#[case(softcap(), Dtype::Bf16, Implementation::Logits)]
#[ignore = "GRPO_TESTS=all"]
#[case(softcap(), Dtype::Bf16, Implementation::Reference)]
#[ignore = "GRPO_TESTS=all"]
#[case(softcap(), Dtype::F32, Implementation::Logits)]
#[ignore = "GRPO_TESTS=all"]
#[case(softcap(), Dtype::F32, Implementation::Reference)]
#[ignore = "GRPO_TESTS=all"]
#[case(softcap_logprobs(), Dtype::Bf16, Implementation::Logits)]
#[ignore = "GRPO_TESTS=all"]
#[case(softcap_logprobs(), Dtype::Bf16, Implementation::Reference)]
#[ignore = "GRPO_TESTS=all"]
#[case(softcap_logprobs(), Dtype::F32, Implementation::Logits)]
#[ignore = "GRPO_TESTS=all"]
#[case(softcap_logprobs(), Dtype::F32, Implementation::Reference)]
fn transformed_logits_match_the_oracle(
    #[case] loss: LossConfig,
    #[case] dtype: Dtype,
    #[case] implementation: Implementation,
) {
    let case = Case::new(&loss, &Shape { dtype, temperatures: true, ..SMALL }, 3);
    let mut plan = backend().plan_on_device(&crate::logits::request(&case, &loss, implementation)).unwrap();
    crate::logits::check(implementation.name(), &mut plan, &case, &loss);
}

/// Computed by hand: z = (1, 0) and the first entry sampled, logit_scale 2, cap 3, T = 2 for the token (the configuration has 5):
/// log p = -ln(1 + exp(-3 tanh(2/3) / 2)). With the temperature before the cap it would be -0.32292.
#[test]
fn logits_are_scaled_then_capped_then_divided_by_temperature() {
    let loss = config(r#"{"logit_scale": 2, "final_logit_softcapping": 3, "temperature": 5}"#);
    let batch = TokenBatch::packed(vec![0], vec![0, 1]).unwrap().with_temperatures(vec![2.0]).unwrap();
    let batch = batch.with_advantages(Advantages::PerSequence(vec![1.0])).unwrap();
    let request = PlanRequest {
        loss: loss.into(),
        implementation: Implementation::Logits,
        tiling: Tiling::default(),
        max_tokens: 1,
        policy: PolicySpec::Logits { vocab: 2, dtype: Dtype::F32 },
        gradients: GradientSpec::default(),
    };
    let mut grad = [0.0_f32; 2];
    let grads = GradsMut { logits: Some((&mut grad[..]).into()), ..GradsMut::default() };
    let policy = PolicyInput::Logits([1.0_f32, 0.0][..].into());
    let logp =
        backend().plan_on_device(&request).unwrap().value_and_grad(policy, &batch, grads).unwrap().scores.logp[0];
    let found = [logp, grad[0], grad[1]].map(f64::from);
    assert_below("two logits", largest_difference(&found, &[-0.348_687_550, -0.194_402_215, 0.294_386_435]), 1e-6);
}
