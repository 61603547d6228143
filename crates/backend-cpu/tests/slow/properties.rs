//! Results do not depend on the division, layout or scheduling of a step.

use grpo_backend_cpu::CpuBackend;
use grpo_core::*;
use grpo_testkit::cpu::*;
use grpo_testkit::family::{LOSSES, others};
use grpo_testkit::*;
use proptest::prelude::*;
use rstest::rstest;

/// Returns the maximal difference of two gradients, relative to the largest entry.
fn apart(a: &Output, b: &Output) -> f64 {
    let wide = |l: &[f32]| l.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    difference(&a.lm_head, &wide(&b.lm_head)).max(difference(&a.bias, &wide(&b.bias)))
}

/// Prepares the whole step: the selection among its tokens, and the weight of each token.
fn prepared(plan: &mut dyn LossPlan, case: &Case, loss: &LossConfig) -> Case {
    let whole = loss.prepare(&case.batch, |batch| Ok::<_, Error>(plan.score(case.policy(), batch)?.into()));
    Case { batch: whole.unwrap().into_owned(), ..case.clone() }
}

/// Asserts that `got` has the loss, the gradients of the head and the metrics of `expected`.
fn assert_same(got: &Output, expected: &Output, what: &str) {
    let scale = expected.loss.abs().max(1.0);
    assert!((got.loss - expected.loss).abs() < 1e-9 * scale, "{what}: loss {} and {}", got.loss, expected.loss);
    let off = apart(got, expected);
    assert!(off < 1e-5, "{what}: gradients are {off:e} apart");
    // Metrics of the preparation belong to the whole step.
    let of_tokens = |out: &Output| -> Vec<(String, f64)> {
        let of_step = ["sampling/", "rollout_corr/", "_error", "sequence_kl", "acceptance_rate"];
        let own = |(name, _): &(&str, f64)| !of_step.iter().any(|part| name.contains(part));
        out.metrics.values().filter(own).map(|(name, value)| (name.to_owned(), value)).collect()
    };
    let (got, expected) = (of_tokens(got), of_tokens(expected));
    assert_eq!(got.len(), expected.len(), "{what}: {got:?} and {expected:?}");
    for ((name, got), (same, expected)) in got.iter().zip(&expected) {
        assert!(
            name == same && (got - expected).abs() <= 1e-9 * expected.abs().max(1.0),
            "{what}: {name} {got}, {expected}"
        );
    }
}

/// Runs `property` on every loss, with an implementation that depends on `choice` and differs between losses, with
/// advantages per token for every third `seed`, and with a sampling mask for every second one.
fn on_every_loss(
    shape: &Shape<'_>,
    seed: u64,
    choice: usize,
    property: impl Fn(&mut dyn LossPlan, &LossConfig, &Case, &str),
) {
    let backend = CpuBackend::with_threads(2).unwrap();
    let mut implementations = implementations();
    let places = implementations.len();
    implementations.rotate_left(choice % places);
    for (name, (how, implementation, tiling)) in
        LOSSES.into_iter().chain(others()).zip(implementations.into_iter().cycle())
    {
        let loss = loss(name);
        let mut case = Case::new(&loss, &Shape { sampling_mask: seed.is_multiple_of(2), ..*shape }, seed);
        if seed.is_multiple_of(3) {
            let of = |row: usize| if case.batch.is_active(row) { [1.3, -0.8, 0.4][row % 3] } else { f32::NAN };
            let advantages = Advantages::PerToken((0..case.batch.tokens()).map(of).collect());
            case.batch = case.batch.clone().with_advantages(advantages).unwrap();
        }
        // Enough for every sequence twice.
        let request = PlanRequest { max_tokens: 100, ..case.request(&loss, implementation, tiling) };
        property(&mut *plan(&backend, &request), &loss, &case, &format!("{name}, {how}"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if grpo_testkit::tier::is_all() { 25 } else { 8 }))]

    /// Gradients of a step's micro-batches add up to the step's; log-probabilities are bit-identical.
    #[test]
    fn any_split_gives_the_same_gradient(
        choice in 0..10_usize,
        lengths in prop::collection::vec(0_usize..7, 1..7),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
        bf16 in any::<bool>(),
        seed in 0_u64..1000,
    ) {
        let dtype = if bf16 { Dtype::Bf16 } else { Dtype::F32 };
        let mut cuts: Vec<usize> = cuts.iter().map(|c| c.index(lengths.len() + 1)).collect();
        cuts.extend([0, lengths.len()]);
        cuts.sort_unstable();
        let shape = Shape { lengths: &lengths, h: 12, v: 530, dtype, ..Shape::default() };
        on_every_loss(&shape, seed, choice, |plan, loss, case, what| {
            // The plan prepares unprepared batches itself.
            let whole = run(plan, case);
            let case = prepared(plan, case, loss);
            assert_eq!(run(plan, &case).lm_head, whole.lm_head, "{what}");
            let (lm_head, bias) = (vec![0.0; whole.lm_head.len()], vec![0.0; whole.bias.len()]);
            let mut sum = Output { lm_head, bias, ..Output::default() };
            let (mut hidden, mut logp) = (Vec::new(), Vec::new());
            for cut in cuts.windows(2) {
                let part = case.select(cut[0]..cut[1]);
                sum.hidden = vec![0.0; part.hidden.len()];
                accumulate(plan, &part, &mut sum);
                hidden.append(&mut sum.hidden);
                logp.append(&mut sum.scores.logp);
            }
            // Rejected tokens are scored in the whole step only.
            for row in case.batch.active_rows() {
                assert_eq!(logp[*row], whole.scores.logp[*row], "{what}: logp depends on the split");
            }
            assert_eq!(hidden, whole.hidden, "{what}: dH depends on the split");
            assert_same(&sum, &whole, what);
        });
    }

    /// Reordering sequences, with padding between them, changes only the order of results.
    #[test]
    fn order_and_padding_do_not_matter(
        choice in 0..10_usize,
        order in Just((0..5).collect::<Vec<usize>>()).prop_shuffle(),
        seed in 0_u64..1000,
    ) {
        let shape = Shape { lengths: &[4, 1, 6, 0, 3], h: 12, v: 530, temperatures: seed.is_multiple_of(2), ..Shape::default() };
        on_every_loss(&shape, seed, choice, |plan, _, case, what| {
            let packed = run(plan, case);
            for width in [None, Some(8)] {
                let other = case.arranged(&order, width);
                let got = run(plan, &other);
                for (to, from) in order.iter().enumerate() {
                    for (at, i) in other.batch.range(to).zip(case.batch.range(*from)) {
                        let row = |i: usize| i * case.h..(i + 1) * case.h;
                        assert_eq!(got.scores.logp[at], packed.scores.logp[i], "{what}");
                        assert_eq!(got.hidden[row(at)], packed.hidden[row(i)], "{what}");
                    }
                }
                assert_same(&got, &packed, what);
            }
        });
    }

    /// Repeating every sequence with half of its weight gives the same step.
    #[test]
    fn duplicates_with_half_the_weight_do_not_matter(
        choice in 0..10_usize,
        lengths in prop::collection::vec(0_usize..7, 1..6),
        order in Just((0..10).collect::<Vec<usize>>()).prop_shuffle(),
        bf16 in any::<bool>(),
        seed in 0_u64..1000,
    ) {
        let dtype = if bf16 { Dtype::Bf16 } else { Dtype::F32 };
        let shape = Shape { lengths: &lengths, h: 12, v: 530, dtype, ..Shape::default() };
        let twice: Vec<usize> =
            order.iter().map(|i| i % 5).filter(|sequence| *sequence < lengths.len()).collect();
        on_every_loss(&shape, seed, choice, |plan, loss, case, what| {
            let case = prepared(plan, case, loss);
            let once = run(plan, &case);
            let twice_case = case.arranged(&twice, None);
            let mut weights = twice_case.batch.weights().unwrap().clone();
            for list in [&mut weights.policy, &mut weights.kl, &mut weights.entropy] {
                list.iter_mut().for_each(|weight| *weight *= 0.5);
            }
            let halved = Case { batch: twice_case.batch.clone().with_weights(weights).unwrap(), ..twice_case };
            let got = run(plan, &halved);
            for (to, from) in twice.iter().enumerate() {
                for (at, i) in halved.batch.range(to).zip(case.batch.range(*from)) {
                    let half: Vec<f32> = once.hidden[i * case.h..(i + 1) * case.h].iter().map(|g| 0.5 * g).collect();
                    assert_eq!(got.hidden[at * case.h..(at + 1) * case.h], half, "{what}");
                }
            }
            assert_same(&got, &once, what);
        });
    }
}

/// Checks the losses of these properties: each has a gradient, and if it selects, clips or corrects tokens, it treats
/// some tokens differently from others.
#[test]
fn test_losses_have_gradients_and_select_tokens() {
    let backend = CpuBackend::with_threads(2).unwrap();
    for name in LOSSES {
        let loss = loss(name);
        let case = Case::new(&loss, &Shape { lengths: &[9, 1, 14, 13, 6, 5], h: 12, v: 530, ..Shape::default() }, 3);
        let plan = &mut *plan(&backend, &case.request(&loss, Implementation::Logits, Tiling::default()));
        let whole = prepared(plan, &case, &loss);
        let out = run(plan, &case);
        let expected = case.oracle(&loss);
        assert_flows(&expected);
        Differences::new(&out, &expected).assert_small(name);
        let clips = ["clip_ratio/region_mean", "cispo_clip_ratio"].into_iter().find_map(|name| out.metrics.value(name));
        assert!(clips.is_none_or(|clips| clips > 0.0 && clips < 1.0), "{name} clips {clips:?}");
        let compares = case.batch.sampler_logp().is_some();
        assert_eq!(whole.batch.factors().is_some(), loss.selects_tokens() || compares, "{name}");
        let weighs_kl = loss.kl_importance == Some(KlImportance::Sampler);
        if let Some(factors) = whole.batch.factors().filter(|_| !weighs_kl) {
            let lists = [&factors.policy, &factors.kl_cov_mask, &factors.log_ratio_bias];
            let differs = |list: &&Vec<f64>| {
                let mut values = whole.batch.active_rows().iter().map(|row| list[*row]);
                let first = values.next().unwrap();
                values.any(|value| value != first)
            };
            assert!(lists.iter().any(differs), "{name} treats all tokens alike");
        }
        let rejects = whole.batch.active_tokens() < case.batch.active_tokens();
        assert_eq!(rejects, loss.rollout_rs.is_some(), "{name}");
    }
}

/// Results are bit-identical in every run and for every number of threads.
#[rstest]
fn bits_do_not_depend_on_threads(
    #[values("grpo", "gspo")] loss_type: &str,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
    #[values(HeadLayout::VocabHidden, HeadLayout::HiddenVocab)] layout: HeadLayout,
) {
    let loss = loss(loss_type);
    let shape = Shape { lengths: &[10, 5, 17], h: 520, v: 1100, dtype, layout, ..Shape::default() };
    let case = Case::new(&loss, &shape, 41);
    for (name, implementation, tiling) in implementations() {
        if implementation == Implementation::Reference {
            continue; // single-threaded and slow
        }
        let request = case.request(&loss, implementation, tiling);
        let mut first = None;
        for threads in [1, 2, 5] {
            let mut plan = plan(&CpuBackend::with_threads(threads).unwrap(), &request);
            for _ in 0..2 {
                let got = run(&mut *plan, &case);
                let first: &Output = first.get_or_insert_with(|| got.clone());
                assert_eq!(got.loss.to_bits(), first.loss.to_bits(), "{name}, {threads} threads");
                assert_eq!(got.scores, first.scores, "{name}, {threads} threads");
                assert_eq!(got.hidden, first.hidden, "{name}, {threads} threads");
                assert_eq!((&got.lm_head, &got.bias), (&first.lm_head, &first.bias), "{name}, {threads} threads");
            }
        }
    }
}

/// With tiled products, log-probabilities do not depend on implementation or blocking. In all implementations, a
/// token's values do not depend on the rest of the batch.
#[rstest]
fn log_probabilities_depend_only_on_their_row(#[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype) {
    let (loss, backend) = (loss("grpo"), CpuBackend::with_threads(2).unwrap());
    let shape = Shape { lengths: &[1, 2, 3, 60], h: 896, v: 1013, dtype, mask_every: 0, ..Shape::default() };
    let case = Case::new(&loss, &shape, 43);
    let mut first = None;
    for (name, implementation, tiling) in implementations() {
        let mut plan = plan(&backend, &case.request(&loss, implementation, tiling));
        let scores = plan.score(case.policy(), &case.batch).unwrap();
        if has_tiled_products(&implementation) {
            let first: &Scores = first.get_or_insert_with(|| scores.clone());
            let of = |scores: &Scores, row: usize| (scores.logp[row], scores.entropy[row]);
            let rows = (0..case.batch.tokens()).map(|row| (of(&scores, row), of(first, row)));
            let differs = rows.enumerate().find(|(_, (found, other))| found != other);
            assert_eq!(differs, None, "{name}: a token, its logp and entropy, and those of other tiles");
        }
        for b in 0..4 {
            let part = case.select(b..b + 1);
            let alone = plan.score(part.policy(), &part.batch).unwrap();
            assert_eq!(alone.logp, scores.logp[case.batch.range(b)], "{name}, sequence {b} alone");
        }
    }
}

/// Old log-probabilities of the whole batch give ratios of exactly 1 in any micro-batch of the loss.
#[rstest]
fn on_policy_ratios_are_exactly_one(
    #[values(1, 2, 5)] per_micro_batch: usize,
    #[values(
        "",
        r#", "temperature_mode": "scale_logprobs""#,
        r#", "final_logit_softcapping": 5.0, "logit_scale": 1.3"#
    )]
    transform: &str,
    #[values(false, true)] temperatures: bool,
) {
    // With epsilon 0, every ratio other than 1 is clipped.
    let json = r#""loss_type": "dapo", "epsilon_low": 0.0, "epsilon_high": 0.0, "beta": 0.1, "temperature": 0.7"#;
    let loss = config(&format!("{{{json}{transform}}}"));
    let backend = CpuBackend::with_threads(2).unwrap();
    let case = Case::new(&loss, &Shape { h: 300, temperatures, ..Shape::default() }, 47);
    for (name, implementation, tiling) in implementations() {
        let mut plan = plan(&backend, &case.request(&loss, implementation, tiling));
        let scores = plan.score(case.policy(), &case.batch).unwrap();
        let batch =
            case.batch.clone().with_old_logp(scores.logp.clone()).unwrap().with_ref_logp(scores.logp.clone()).unwrap();
        let case = prepared(&mut *plan, &Case { batch, ..case.clone() }, &loss);
        for start in (0..5).step_by(per_micro_batch) {
            let part = case.select(start..5.min(start + per_micro_batch));
            let got = run(&mut *plan, &part);
            assert_eq!(got.scores.logp, part.batch.old_logp().unwrap(), "{name}");
            assert!(got.metrics.value("clip_ratio/region_mean").is_none_or(|clipped| clipped == 0.0), "{name}");
            assert!(got.metrics.value("kl").is_none_or(|kl| kl == 0.0), "{name}");
        }
    }
}

/// With a minimal workspace, results still match the oracle.
#[rstest]
fn tiny_budgets_match_the_oracle(
    #[values("dapo", "gspo")] loss_type: &str,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
) {
    let (loss, (backend, tolerance)) = (loss(loss_type), backends(dtype, 2).remove(0));
    let case = Case::new(&loss, &Shape { dtype, v: 5000, h: 40, ..Shape::default() }, 53);
    let expected = case.oracle(&loss);
    for order in [None, Some(LoopOrder::TokenChunks), Some(LoopOrder::VocabPanels)] {
        let with = |workspace_budget| {
            let tiling = Tiling { workspace_budget, loop_order: order, ..Tiling::default() };
            case.request(&loss, Implementation::Fused, tiling)
        };
        let Err(Error::Budget { minimum, .. }) = backend.plan(&with(10_000)) else { panic!("10 kB cannot be enough") };
        for budget in [minimum, minimum + 50_000, 2 * minimum] {
            let mut plan = plan(&backend, &with(budget));
            assert!(plan.memory().workspace <= budget);
            let what = format!("{order:?} in {budget} bytes");
            Differences::new(&run(&mut *plan, &case), &expected).assert_within(tolerance, &what);
        }
    }
}
