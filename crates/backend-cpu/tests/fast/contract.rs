//! The contract of backends, and losses of the caller.

use grpo_backend_cpu::CpuBackend;
use grpo_core::contract::Fixture;
use grpo_core::{
    Backend, CustomLoss, Error, Grads, GrpoLoss, Implementation, LossConfig, LossPlan, PlanRequest, PolicyInput,
    Result, Scores, TokenBatch,
};
use grpo_testkit::family::{LOSSES, loss};
use grpo_testkit::{Case, Shape};

struct Cpu;

impl Fixture for Cpu {
    type Backend = CpuBackend;

    fn backend() -> CpuBackend {
        CpuBackend::new()
    }
}

grpo_core::contract_tests!(Cpu);

/// A backend that declares no transform of logits.
#[derive(Clone)]
struct Undeclared(CpuBackend);

impl Backend for Undeclared {
    fn name(&self) -> &str {
        "undeclared"
    }

    fn plan(&self, request: &PlanRequest) -> Result<Box<dyn LossPlan>> {
        self.0.plan(request)
    }
}

impl Fixture for Undeclared {
    type Backend = Self;

    fn backend() -> Self {
        Self(CpuBackend::new())
    }
}

mod undeclared {
    grpo_core::contract_tests!(
        super::Undeclared: losses_and_gradients_match_a_dense_evaluation, undeclared_transforms_of_logits_are_refused,
    );
}

#[test]
fn a_backend_without_a_transform_names_the_setting_that_needs_it() {
    let backend = Undeclared::backend();
    let build = |config: LossConfig| GrpoLoss::builder(config).logits(8).build(&backend);
    let config = LossConfig { final_logit_softcapping: Some(30.0), ..LossConfig::default() };
    let error = build(config).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }));
    let message = error.to_string();
    assert!(message.contains("`undeclared` does not support final_logit_softcapping"), "{message}");
    let batch = TokenBatch::packed(vec![1, 2], vec![0, 2]).unwrap().with_temperatures(vec![0.5; 2]).unwrap();
    let loss = build(LossConfig::default()).unwrap();
    let message = loss.score_logits(&[0.0_f32; 16], &batch).unwrap_err().to_string();
    assert!(message.contains("TokenBatch::with_temperatures") && message.contains("Backend::applies"), "{message}");
}

#[test]
fn build_asks_the_backend_before_the_first_batch() {
    let builder = || GrpoLoss::builder(LossConfig::default()).logits(8).implementation(Implementation::Fused);
    for loss in [builder().build(&CpuBackend::new()), builder().build(&Undeclared::backend())] {
        let message = loss.unwrap_err().to_string();
        assert!(message.contains("`cpu` does not support implementation `fused` on given logits"), "{message}");
    }
    // A backend that compiles is not asked to plan.
    #[derive(Clone)]
    struct Compiling;
    impl Backend for Compiling {
        fn name(&self) -> &str {
            "compiling"
        }
        fn plan(&self, _: &PlanRequest) -> Result<Box<dyn LossPlan>> {
            panic!("a plan takes seconds")
        }
        fn compiles(&self) -> bool {
            true
        }
    }
    builder().build(&Compiling).unwrap();
}

/// The scores of a custom loss and of a built-in loss are equal, so equal derivatives give equal gradients.
#[test]
fn every_built_in_loss_equals_a_custom_loss_of_its_derivatives() {
    for name in LOSSES {
        let config = loss(name);
        let case = Case::new(&config, &Shape { bias: true, v: 130, ..Shape::default() }, 5);
        let grpo = GrpoLoss::builder(config.clone()).head(case.h, case.v).bias().build(&CpuBackend::new()).unwrap();
        let (expected, expected_grads) = grpo.step_owned(case.policy(), &case.batch).unwrap();
        let mut grads = Grads::zeros(grpo.policy(), grpo.gradients(), case.batch.tokens()).unwrap();
        let custom = |scores: &Scores| Ok(config.token_losses(&case.batch, scores)?.into());
        let output = grpo.step_with(case.policy(), &case.batch, grads.as_mut(), custom).unwrap();
        assert!((output.loss - expected.loss).abs() <= 1e-12 * expected.loss.abs().max(1.0), "{name}");
        assert_eq!(output.scores.logp, expected.scores.logp, "{name}");
        // The metrics of a built-in loss leave rejected sequences out.
        if name != "sampler_rejection" {
            assert_eq!(output.metrics.value("entropy"), expected.metrics.value("entropy"), "{name}");
        }
        assert!(grads == expected_grads, "{name}: other bits");
    }
}

#[test]
fn a_custom_loss_is_checked_before_gradients_change() {
    let loss = GrpoLoss::builder(LossConfig::default()).logits(8).build(&CpuBackend::new()).unwrap();
    let batch = TokenBatch::packed(vec![1, 2, 3], vec![0, 1, 3]).unwrap().with_mask(&[1.0, 0.0, 1.0]).unwrap();
    let logits = [0.5_f32; 24];
    let step = |loss_of: &dyn Fn() -> Result<CustomLoss>| {
        let mut dlogits = vec![0.0; 24];
        let output =
            loss.step_with(PolicyInput::Logits((&logits).into()), &batch, Grads::of_logits(&mut dlogits), |_| {
                loss_of()
            });
        (output.map(|output| output.loss), dlogits)
    };
    let custom = |dlogp: [f64; 3], dentropy: Vec<f64>| {
        move || Ok(CustomLoss { loss: 4.0, dlogp: dlogp.to_vec(), dentropy: dentropy.clone() })
    };
    let (output, dlogits) = step(&custom([1.0, f64::NAN, 0.0], vec![]));
    assert_eq!(output, Ok(4.0), "a masked token may hold anything");
    assert!((dlogits[1] - 0.875).abs() < 1e-6 && dlogits[8..].iter().all(|gradient| *gradient == 0.0), "{dlogits:?}");
    let wrong: [(&dyn Fn() -> Result<CustomLoss>, &str); 4] = [
        (&custom([1.0, 0.0, f64::INFINITY], vec![]), "dlogp at token 2 (sequence 1, position 1)"),
        (&custom([1.0; 3], vec![f64::NAN; 3]), "dentropy at token 0"),
        (&custom([1.0; 3], vec![0.0; 2]), "dentropy [N]: expected 3, got 2"),
        (&|| Err(Error::value("rewards", "sequence 0", "absent")), "rewards at sequence 0: absent"),
    ];
    for (loss_of, expected) in wrong {
        let (output, dlogits) = step(loss_of);
        let message = output.unwrap_err().to_string();
        assert!(message.contains(expected), "{expected:?} is not in: {message}");
        assert_eq!(dlogits, [0.0; 24]);
    }
}
