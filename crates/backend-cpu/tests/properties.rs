//! Results do not depend on how a step is cut, laid out or scheduled.

mod common;

use backend_cpu::CpuBackend;
use common::*;
use grpo_core::weights::token_weights;
use grpo_core::*;
use proptest::prelude::*;
use rstest::rstest;

/// Largest difference of two gradients, relative to the largest entry.
fn apart(a: &Output, b: &Output) -> f64 {
    let wide = |l: &[f32]| l.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    difference(&a.lm_head, &wide(&b.lm_head)).max(difference(&a.bias, &wide(&b.bias)))
}

fn with_step_weights(case: Case, loss: &LossConfig) -> Case {
    let weights = token_weights(loss, &case.batch);
    Case { batch: case.batch.clone().with_weights(weights).unwrap(), ..case }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Micro-batches of a step add up to the step; their log-probabilities are the same to the bit.
    #[test]
    fn any_split_gives_the_same_gradient(
        loss_type in prop::sample::select(LOSSES.to_vec()),
        choice in 0..10_usize,
        lengths in prop::collection::vec(0_usize..7, 1..7),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
        bf16 in any::<bool>(),
        seed in 0_u64..1000,
    ) {
        let (loss, backend) = (loss(loss_type), CpuBackend::with_threads(2).unwrap());
        let dtype = if bf16 { Dtype::Bf16 } else { Dtype::F32 };
        let shape = Shape { lengths: &lengths, h: 12, v: 530, dtype, ..Shape::default() };
        let case = with_step_weights(Case::new(&loss, &shape, seed), &loss);
        let (name, implementation, tiling) = implementations().swap_remove(choice);
        let mut plan = plan(&backend, &case.request(&loss, implementation, tiling));
        let whole = run(&mut *plan, &case);
        let mut cuts: Vec<usize> = cuts.iter().map(|c| c.index(lengths.len() + 1)).collect();
        cuts.extend([0, lengths.len()]);
        cuts.sort_unstable();
        let mut sum = Output { lm_head: vec![0.0; whole.lm_head.len()], bias: vec![0.0; whole.bias.len()], ..Output::default() };
        let (mut hidden, mut logp) = (Vec::new(), Vec::new());
        for cut in cuts.windows(2) {
            let part = case.select(cut[0]..cut[1]);
            sum.hidden = vec![0.0; part.hidden.len()];
            accumulate(&mut *plan, &part, &mut sum);
            hidden.append(&mut sum.hidden);
            logp.append(&mut sum.scores.logp);
        }
        prop_assert_eq!(&logp, &whole.scores.logp, "{}: logp depends on the split", name);
        prop_assert_eq!(&hidden, &whole.hidden, "{}: dH depends on the split", name);
        prop_assert!((sum.loss - whole.loss).abs() < 1e-9, "{}: loss {} and {}", name, sum.loss, whole.loss);
        let off = apart(&sum, &whole);
        prop_assert!(off < 1e-5, "{}: gradients are {:e} apart", name, off);
    }

    /// Sequences in another order, and padding between them, change nothing but the order.
    #[test]
    fn order_and_padding_do_not_matter(
        loss_type in prop::sample::select(LOSSES.to_vec()),
        choice in 0..10_usize,
        order in Just((0..5).collect::<Vec<usize>>()).prop_shuffle(),
        seed in 0_u64..1000,
    ) {
        let (loss, backend) = (loss(loss_type), CpuBackend::with_threads(2).unwrap());
        let case = Case::new(&loss, &Shape { lengths: &[4, 1, 6, 0, 3], h: 12, v: 530, ..Shape::default() }, seed);
        let (name, implementation, tiling) = implementations().swap_remove(choice);
        let packed = run(&mut *plan(&backend, &case.request(&loss, implementation, tiling.clone())), &case);

        // [B, T] of the permuted sequences, padded with whatever.
        let (t, h, b) = (8, case.h, order.len());
        let (mut hidden, mut targets, mut mask) = (vec![f32::NAN; b * t * h], vec![-7; b * t], vec![0.0; b * t]);
        let (mut old, mut reference) = (vec![f32::NAN; b * t], vec![f32::NAN; b * t]);
        let mut advantages = vec![0.0; b];
        for (to, from) in order.iter().enumerate() {
            advantages[to] = case.batch.advantage(*from, 0);
            for (k, i) in case.batch.range(*from).enumerate() {
                let at = to * t + k;
                hidden[at * h..(at + 1) * h].copy_from_slice(&case.hidden[i * h..(i + 1) * h]);
                targets[at] = case.batch.targets()[i];
                mask[at] = f32::from(u8::from(case.batch.is_active(i)));
                (old[at], reference[at]) = (case.batch.old_logp().unwrap()[i], case.batch.ref_logp().unwrap()[i]);
            }
        }
        let batch = TokenBatch::padded(&targets, &mask, [b, t]).unwrap()
            .with_advantages(Advantages::PerSequence(advantages)).unwrap()
            .with_old_logp(old).unwrap()
            .with_ref_logp(reference).unwrap();
        let padded = Case { hidden, batch, ..case.clone() };
        let got = run(&mut *plan(&backend, &padded.request(&loss, implementation, tiling)), &padded);
        for (to, from) in order.iter().enumerate() {
            for (k, i) in case.batch.range(*from).enumerate() {
                let at = to * t + k;
                prop_assert_eq!(got.scores.logp[at], packed.scores.logp[i], "{}", name);
                prop_assert_eq!(&got.hidden[at * h..(at + 1) * h], &packed.hidden[i * h..(i + 1) * h], "{}", name);
            }
        }
        prop_assert!((got.loss - packed.loss).abs() < 1e-9);
        let off = apart(&got, &packed);
        prop_assert!(off < 1e-5, "{}: gradients are {:e} apart", name, off);
    }
}

/// The same bits on every run and for every number of threads.
#[rstest]
fn bits_do_not_depend_on_threads(
    #[values("grpo", "gspo")] loss_type: &str,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
    #[values(HeadLayout::VocabHidden, HeadLayout::HiddenVocab)] layout: HeadLayout,
) {
    let loss = loss(loss_type);
    let shape = Shape { lengths: &[10, 5, 17], h: 520, v: 1100, dtype, layout, ..Shape::default() };
    let case = Case::new(&loss, &shape, 41);
    for (name, implementation, tiling) in implementations().into_iter().skip(1) {
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

/// Log-probabilities do not depend on implementation or blocking (the reference apart), nor do those of one token on
/// what else is in the batch.
#[rstest]
fn log_probabilities_are_those_of_the_row(#[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype) {
    let (loss, backend) = (loss("grpo"), CpuBackend::with_threads(2).unwrap());
    let shape = Shape { lengths: &[1, 2, 3, 60], h: 896, v: 1013, dtype, mask_every: 0, ..Shape::default() };
    let case = Case::new(&loss, &shape, 43);
    let mut first = None;
    for (name, implementation, tiling) in implementations().into_iter().skip(1) {
        let mut plan = plan(&backend, &case.request(&loss, implementation, tiling));
        let inputs = Inputs::new(&case);
        let scores = plan.score(inputs.policy(&case), &case.batch).unwrap();
        let first = first.get_or_insert_with(|| scores.clone());
        assert_eq!(&scores, first, "{name}");
        for b in 0..4 {
            let part = case.select(b..b + 1);
            let alone = plan.score(Inputs::new(&part).policy(&part), &part.batch).unwrap();
            assert_eq!(alone.logp, scores.logp[case.batch.range(b)], "{name}, sequence {b} alone");
        }
    }
}

/// Old log-probabilities scored over the whole batch give ratios of exactly 1 in any micro-batch of the loss.
#[rstest]
fn on_policy_ratios_are_exactly_one(
    #[values(1, 2, 5)] per_micro_batch: usize,
    #[values("", r#", "final_logit_softcapping": 5.0, "logit_scale": 1.3"#)] transform: &str,
    #[values(false, true)] temperatures: bool,
) {
    // With epsilon 0 any ratio but 1 is clipped on one side or the other.
    let json = r#""loss_type": "dapo", "epsilon_low": 0.0, "epsilon_high": 0.0, "beta": 0.1, "temperature": 0.7"#;
    let loss = config(&format!("{{{json}{transform}}}"));
    let backend = CpuBackend::with_threads(2).unwrap();
    let case = Case::new(&loss, &Shape { h: 300, temperatures, ..Shape::default() }, 47);
    for (name, implementation, tiling) in implementations() {
        let mut plan = plan(&backend, &case.request(&loss, implementation, tiling));
        let scores = plan.score(Inputs::new(&case).policy(&case), &case.batch).unwrap();
        let batch =
            case.batch.clone().with_old_logp(scores.logp.clone()).unwrap().with_ref_logp(scores.logp.clone()).unwrap();
        let case = with_step_weights(Case { batch, ..case.clone() }, &loss);
        for start in (0..5).step_by(per_micro_batch) {
            let part = case.select(start..5.min(start + per_micro_batch));
            let got = run(&mut *plan, &part);
            assert_eq!(got.scores.logp, part.batch.old_logp().unwrap(), "{name}");
            assert!(got.metrics.value("clip_ratio/region_mean").is_none_or(|clipped| clipped == 0.0), "{name}");
            assert!(got.metrics.value("kl").is_none_or(|kl| kl == 0.0), "{name}");
        }
    }
}

/// Results stay the same when there is hardly any workspace.
#[rstest]
fn tiny_budgets(#[values("dapo", "gspo")] loss_type: &str, #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype) {
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
