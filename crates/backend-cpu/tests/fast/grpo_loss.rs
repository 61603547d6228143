//! [`GrpoLoss`] gives bit-identical results to a plan of its request, and replans only when necessary.

use grpo_backend_cpu::oracle;
use grpo_core::{
    Backend, Dtype, Error, GradientSpec, Grads, GradsMut, GrpoLoss, GrpoLossBuilder, HeadLayout, Implementation,
    LogitTransform, LossConfig, LossOutput, LossPlan, PlanRequest, PolicyInput, PolicySpec, Result, Tiling, TokenBatch,
};
use grpo_testkit::{Case, Shape, config};
use half::bf16;
use rstest::rstest;
use std::sync::{Arc, Mutex};
use std::thread;

fn dapo() -> LossConfig {
    config(r#"{"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.04, "entropy_coef": 0.01}"#)
}

fn case(shape: &Shape<'_>) -> Case {
    Case::new(&dapo(), shape, 11)
}

/// Returns the builder for `case`.
fn builder(case: &Case) -> GrpoLossBuilder {
    let builder = GrpoLoss::builder(dapo()).head(case.h, case.v).dtype(case.dtype()).head_layout(case.layout);
    if case.bias.is_some() { builder.bias() } else { builder }
}

/// A CPU backend that records the planned sizes.
#[derive(Clone, Default)]
struct Watched {
    backend: grpo_backend_cpu::CpuBackend,
    max_tokens: Arc<Mutex<Vec<usize>>>,
}

impl Backend for Watched {
    fn name(&self) -> &str {
        "watched"
    }

    fn applies(&self, transform: LogitTransform) -> bool {
        self.backend.applies(transform)
    }

    fn check(&self, request: &PlanRequest) -> Result<()> {
        self.backend.check(request)
    }

    fn plan(&self, request: &PlanRequest) -> Result<Box<dyn LossPlan>> {
        self.max_tokens.lock().unwrap().push(request.max_tokens);
        self.backend.plan(request)
    }
}

#[track_caller]
fn assert_same(found: &LossOutput, expected: &LossOutput) {
    assert_eq!((found.loss, found.policy_loss), (expected.loss, expected.policy_loss));
    assert_eq!(found.scores, expected.scores);
    assert_eq!(found.metrics, expected.metrics);
}

#[rstest]
fn a_step_equals_a_call_of_the_plan(
    #[values(Implementation::Reference, Implementation::Logits, Implementation::Fused)] implementation: Implementation,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
    #[values((HeadLayout::VocabHidden, true), (HeadLayout::HiddenVocab, false))] (layout, bias): (HeadLayout, bool),
) {
    let case = case(&Shape { dtype, layout, bias, v: 300, ..Shape::default() });
    let backend = grpo_backend_cpu::CpuBackend::with_threads(2).unwrap();
    let request = case.request(&dapo(), implementation, Tiling::default());
    let mut plan = backend.plan(&request).unwrap();
    // Gradients are added to nonzero accumulators.
    let begin = || {
        let mut grads = Grads::zeros(request.policy, request.gradients, case.batch.tokens()).unwrap();
        [&mut grads.hidden, &mut grads.lm_head, &mut grads.bias].into_iter().flatten().for_each(|g| g.fill(0.5));
        grads
    };
    let (mut expected, mut found) = (begin(), begin());
    let out = plan.value_and_grad(case.policy(), &case.batch, expected.as_mut()).unwrap();

    let loss = builder(&case).implementation(implementation).max_tokens(case.batch.tokens()).build(&backend).unwrap();
    assert_eq!(loss.memory(), Some(plan.memory()));
    let scores = loss.score_policy(case.policy(), &case.batch).unwrap();
    assert_eq!(scores, plan.score(case.policy(), &case.batch).unwrap());
    assert_same(&loss.step_policy(case.policy(), &case.batch, found.as_mut()).unwrap(), &out);
    assert_eq!(found, expected);
    assert!(expected.lm_head.as_ref().is_some_and(|g| g.iter().any(|g| (g - 0.5).abs() > 1e-3)));

    let (owned_out, owned) = loss.step_owned(case.policy(), &case.batch).unwrap();
    let mut zeros = Grads::zeros(request.policy, request.gradients, case.batch.tokens()).unwrap();
    plan.value_and_grad(case.policy(), &case.batch, zeros.as_mut()).unwrap();
    assert_same(&owned_out, &out);
    assert_eq!(owned, zeros);
}

#[rstest]
fn dlogits_can_replace_logits_in_place(
    #[values(Implementation::Reference, Implementation::Logits)] implementation: Implementation,
) {
    let case = case(&Shape { v: 300, ..Shape::default() });
    let (n, v) = (case.batch.tokens(), case.v);
    let logits: Vec<f32> = (0..n * v).map(|i| ((i * 37) % 101) as f32 / 25.0 - 2.0).collect();
    let loss = GrpoLoss::builder(dapo()).logits(v).implementation(implementation);
    let loss = loss.build(&grpo_backend_cpu::CpuBackend::new()).unwrap();
    let mut dlogits = vec![0.0; n * v];
    let out = loss.step_logits(&logits, &case.batch, &mut dlogits).unwrap();
    assert_eq!(loss.score_logits(&logits, &case.batch).unwrap(), out.scores);
    let (owned_out, owned) = loss.step_owned(PolicyInput::Logits((&logits).into()), &case.batch).unwrap();
    assert_same(&owned_out, &out);
    assert_eq!(owned.logits.as_ref(), Some(&dlogits));
    let mut in_place = logits.clone();
    let overwritten = loss.step_logits_in_place(&mut in_place, &case.batch).unwrap();
    assert_eq!(overwritten.scores, out.scores);
    let largest = dlogits.iter().fold(0.0_f32, |m, g| m.max(g.abs()));
    assert!(largest > 1e-3);
    for (found, expected) in in_place.iter().zip(&dlogits) {
        assert!((found - expected).abs() <= 1e-6 * largest, "{found} for {expected}");
    }

    let narrow: Vec<bf16> = logits.iter().map(|z| bf16::from_f32(*z)).collect();
    let message = loss.step_logits(&narrow, &case.batch, &mut dlogits).unwrap_err().to_string();
    assert!(message.contains("dtype of logits") && message.contains("bf16"), "{message}");
}

#[test]
fn only_larger_batches_need_a_new_plan() {
    let case = case(&Shape { bias: false, ..Shape::default() });
    let (small, watched) = (case.select(0..1), Watched::default());
    let (few, many) = (small.batch.tokens(), case.batch.tokens());
    let score = |loss: &GrpoLoss, case: &Case| loss.score(&case.hidden[..], &case.lm_head[..], &case.batch).unwrap();
    let plans = || watched.max_tokens.lock().unwrap().clone();

    let loss = builder(&case).build(&watched).unwrap();
    assert_eq!((plans(), loss.max_tokens(), loss.memory()), (vec![], 0, None));
    let first = score(&loss, &small);
    score(&loss, &small);
    assert_eq!((plans(), loss.max_tokens()), (vec![few], few));
    let all = score(&loss, &case);
    assert_eq!(all.logp[..few], first.logp);
    score(&loss, &small);
    assert_eq!((plans(), loss.max_tokens()), (vec![few, many], many));

    // A clone plans again, for as many tokens.
    let clone = loss.clone();
    assert_eq!(score(&clone, &small), first);
    assert_eq!(plans(), [few, many, many]);

    builder(&case).max_tokens(100).build(&watched).unwrap();
    assert_eq!(plans()[3..], [100], "planned when it was built");
}

#[test]
fn threads_can_share_or_clone_a_loss() {
    let case = case(&Shape { bias: false, ..Shape::default() });
    let loss = builder(&case).max_tokens(case.batch.tokens()).build(&grpo_backend_cpu::CpuBackend::new()).unwrap();
    let policy = || PolicyInput::head(&case.hidden[..], &case.lm_head[..]);
    let (expected, expected_grads) = loss.step_owned(policy(), &case.batch).unwrap();
    thread::scope(|scope| {
        let shared = (0..3).map(|_| scope.spawn(|| loss.step_owned(policy(), &case.batch).unwrap()));
        let cloned = (0..3).map(|_| {
            let loss = loss.clone();
            scope.spawn(|| {
                let loss = loss;
                loss.step_owned(policy(), &case.batch).unwrap()
            })
        });
        for thread in shared.chain(cloned).collect::<Vec<_>>() {
            let (out, grads) = thread.join().unwrap();
            assert_same(&out, &expected);
            assert_eq!(grads, expected_grads);
        }
    });
}

#[test]
fn a_frozen_head_has_no_gradient() {
    let case = case(&Shape { bias: false, ..Shape::default() });
    let backend: Arc<dyn Backend> = Arc::new(grpo_backend_cpu::CpuBackend::new());
    let all = builder(&case).build(&backend).unwrap();
    let frozen = builder(&case).frozen_head().build(&backend).unwrap();
    assert_eq!(frozen.gradients(), GradientSpec { hidden: true, lm_head: false, bias: false });
    let (_, expected) = all.step_owned(PolicyInput::head(&case.hidden[..], &case.lm_head[..]), &case.batch).unwrap();
    let mut dhidden = vec![0.0; case.batch.tokens() * case.h];
    frozen.step(&case.hidden[..], &case.lm_head[..], &case.batch, Grads::of_hidden(&mut dhidden)).unwrap();
    assert_eq!(Some(&dhidden), expected.hidden.as_ref());
    let mut dlm_head = vec![0.0; case.v * case.h];
    let grads = Grads::new(&mut dhidden, &mut dlm_head);
    let message = frozen.step(&case.hidden[..], &case.lm_head[..], &case.batch, grads).unwrap_err().to_string();
    assert!(message.contains("lm_head"), "{message}");
}

#[test]
fn invalid_losses_are_errors_at_build() {
    let (backend, build) = (grpo_backend_cpu::CpuBackend::new(), || GrpoLoss::builder(dapo()));
    let message = build().build(&backend).unwrap_err().to_string();
    assert!(message.contains("head(hidden, vocab)") && message.contains("logits(vocab)"), "{message}");
    let fused = build().logits(10).implementation(Implementation::Fused).max_tokens(4).build(&backend);
    assert!(matches!(fused, Err(Error::Unsupported { .. })));
    // Without a size, too: the first batch would be late.
    let fused = build().logits(10).implementation(Implementation::Fused).build(&backend);
    assert!(matches!(fused, Err(Error::Unsupported { .. })));
    assert!(matches!(build().head(0, 10).build(&backend), Err(Error::Shape { .. })));
    let tiling = Tiling { workspace_budget: 1, ..Tiling::default() };
    assert!(matches!(build().head(8, 10).tiling(tiling).max_tokens(4).build(&backend), Err(Error::Budget { .. })));
    let config = LossConfig { temperature: 0.0, ..dapo() };
    assert!(GrpoLoss::builder(config).head(8, 10).build(&backend).is_err());
    let no_bias = GradientSpec { bias: true, ..GradientSpec::default() };
    assert!(build().head(8, 10).gradients(no_bias).build(&backend).is_err());

    // The loss is usable after an error in a call.
    let case = case(&Shape { bias: false, ..Shape::default() });
    let loss = builder(&case).build(&backend).unwrap();
    let message = loss.score(&case.hidden[1..], &case.lm_head[..], &case.batch).unwrap_err().to_string();
    assert!(message.contains("hidden"), "{message}");
    loss.score(&case.hidden[..], &case.lm_head[..], &case.batch).unwrap();
}

/// Without advantages, a loss would silently be 0; scores do not need advantages.
#[rstest]
fn a_loss_without_advantages_is_an_error(
    #[values(Implementation::Reference, Implementation::Logits, Implementation::Fused)] implementation: Implementation,
) {
    let case = case(&Shape { v: 300, ..Shape::default() });
    let batch = TokenBatch::packed(case.batch.targets().to_vec(), case.batch.offsets().to_vec()).unwrap();
    let batch = batch.with_mask(&case.batch.mask()).unwrap();
    let batch = batch.with_ref_logp(case.batch.ref_logp().unwrap().to_vec()).unwrap();
    assert!(!batch.has_advantages() && case.batch.select_independent(1..3).unwrap().has_advantages());
    let backend = grpo_backend_cpu::CpuBackend::new();
    let loss = builder(&case).implementation(implementation).build(&backend).unwrap();
    assert_eq!(loss.step_owned(case.policy(), &batch).unwrap_err(), Error::NoAdvantages);
    assert!(Error::NoAdvantages.to_string().contains("TokenBatch::with_advantages"));
    case.with_policy(|policy| {
        assert_eq!(oracle::evaluate(&dapo(), policy, &batch).unwrap_err(), Error::NoAdvantages);
    });
    let scores = loss.score_policy(case.policy(), &batch).unwrap();
    assert_eq!(scores, loss.score_policy(case.policy(), &case.batch).unwrap());
    let zeros = batch.with_advantages(vec![0.0; case.batch.sequences()]).unwrap();
    assert!(loss.step_owned(case.policy(), &zeros).is_ok(), "zeros that were meant");
}

/// A call with missing buffers is refused before anything is written.
#[test]
fn a_missing_buffer_is_named() {
    let case = case(&Shape::default());
    let loss = builder(&case).build(&grpo_backend_cpu::CpuBackend::new()).unwrap();
    assert!(matches!(loss.policy(), PolicySpec::Hidden { bias: true, .. }));
    let message = loss.step_policy(case.policy(), &case.batch, GradsMut::default()).unwrap_err().to_string();
    assert!(message.contains("gradient for hidden"), "{message}");
}

#[test]
fn a_loss_and_its_clones_share_one_configuration() {
    let config = Arc::new(LossConfig::default());
    let loss = GrpoLoss::builder(Arc::clone(&config))
        .head(3, 5)
        .max_tokens(2)
        .build(&grpo_backend_cpu::CpuBackend::new())
        .unwrap();
    assert!(std::ptr::eq(loss.config(), &*config) && std::ptr::eq(loss.clone().config(), &*config));
}
