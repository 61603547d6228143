//! Steps with scripted completions, whose numbers can be computed by hand.

use super::*;
use crate::Scored;
use grpo_data::task::{Comparison, Task};
use grpo_models::{CharTokenizer, Tokenizer};
use grpo_policy::{Completion, RolloutEngine, RolloutRequest, Sampling};
use grpo_trainer::step::StepReport;
use std::sync::Mutex;

/// An engine that returns the same texts for every prompt; texts without a full stop are truncated.
pub(super) struct Script {
    pub(super) sampled: &'static [&'static str],
    pub(super) greedy: &'static str,
}

impl RolloutEngine for Script {
    fn generate(&mut self, _: &mut dyn Policy, request: &RolloutRequest<'_>) -> grpo_policy::Result<Vec<Completion>> {
        let texts: &[&str] = if request.sampling == Sampling::Greedy { &[self.greedy] } else { self.sampled };
        let texts = texts.iter().cycle().take(request.prompts.len() * request.num_generations);
        texts.map(|text| completion(text)).collect()
    }
}

fn completion(text: &str) -> grpo_policy::Result<Completion> {
    let (text, truncated) = text.strip_suffix('.').map_or((text, true), |text| (text, false));
    let mut ids = CharTokenizer.encode(text)?;
    if !truncated {
        ids.push(CharTokenizer::EOS);
    }
    let logps = vec![-1.0; ids.len()];
    Ok(Completion::sampled(ids, logps, truncated))
}

/// Reward functions with their weights.
pub(super) type Terms = Vec<(Box<dyn RewardFn>, f32)>;

/// Returns a reward with a weight: the number in the completion to some power.
pub(super) fn power(name: &'static str, exponent: i32, weight: f32) -> (Box<dyn RewardFn>, f32) {
    let score = move |input: &RewardInput<'_>| input.completion.parse::<f32>().ok().map(|number| number.powi(exponent));
    (Box::new(Scored(name, score)), weight)
}

/// Returns `config` with one group per step, completions of up to four tokens and no warm-up.
pub(super) fn one_group(config: TrainConfig, num_generations: usize) -> TrainConfig {
    let mut config = TrainConfig { warmup: WarmupConfig { steps: 0, ..Default::default() }, ..config };
    (config.grpo.prompts_per_step, config.grpo.num_generations) = (1, num_generations);
    config.grpo.steps_per_generation = 1;
    config.model.shape_mut().max_position_embeddings = 32;
    config.rollout.max_completion_length = Some(4);
    config
}

/// Returns a run of one group per step. Rewards are the number in the completion, and with `squares` also half its negative square.
pub(super) fn scripted(script: Script, config: TrainConfig, squares: bool) -> Trainer {
    let config = one_group(config, script.sampled.len());
    let mut terms = vec![power("number", 1, 1.0)];
    terms.extend(squares.then(|| power("square", 2, -0.5)));
    with_parts(config, Comparison { max_number: 50 }, terms, script).unwrap()
}

/// Returns a run of one task.
pub(super) fn with_parts(
    config: TrainConfig,
    task: impl Task + 'static,
    terms: Terms,
    engine: impl RolloutEngine + 'static,
) -> Result<Trainer> {
    let mut parts = grpo_setup::parts(&config).unwrap().with_engine(engine);
    parts.dataset = Box::new(TaskMixture::from_tasks(vec![(Arc::new(task), 1.0)], 0.1, 0)?);
    parts.rewards = Rewards::from_terms(terms)?;
    Trainer::with_parts(config, parts)
}

/// 2 tokens with reward 1, and 4 tokens, truncated, with reward 3.
const TWO: Script = Script { sampled: &["1.", "0003"], greedy: "2." };

fn step(script: Script, advantages: &str, squares: bool) -> StepReport {
    let mut config = small();
    config.grpo.advantages = serde_json::from_str(advantages).unwrap();
    scripted(script, config, squares).grpo_step().unwrap()
}

#[track_caller]
fn assert_advantages(report: &StepReport, expected: [f32; 2]) {
    for (sample, expected) in report.samples.iter().zip(expected) {
        assert!((sample.advantage - expected).abs() < 1e-5, "{} instead of {expected}", sample.advantage);
    }
}

/// Two rewards, 1 and 3: mean 2, deviation sqrt 2; lengths 2 and 4.
#[rstest]
#[case::group(r#"{"estimator": "group"}"#, [-0.707057, 0.707057])]
#[case::rloo(r#"{"estimator": "rloo"}"#, [-2.0, 2.0])]
// Baseline (2 x 1 + 4 x 3) / 6 = 7 / 3.
#[case::opo(r#"{"estimator": "opo"}"#, [-4.0 / 3.0, 2.0 / 3.0])]
// The greedy answer gets 2.
#[case::remax(r#"{"estimator": "remax"}"#, [-1.0, 1.0])]
#[case::gpg(r#"{"estimator": "gpg"}"#, [-1.0, 1.0])]
// -1 / 2 and 1 / 2.
#[case::max_rl(r#"{"estimator": "max_rl"}"#, [-0.5, 0.5])]
#[case::flash_reinforce(r#"{"estimator": "flash_reinforce"}"#, [-1.0, 1.0])]
// 2 / (sqrt 2 + 1e-4).
#[case::grpo_passk(r#"{"estimator": "grpo_passk"}"#, [0.0, 1.414114])]
// -1 twice and 1 four times: mean 1 / 3, variance 16 / 15.
#[case::reinforce_plus_plus_baseline(r#"{"estimator": "reinforce_plus_plus_baseline"}"#, [-1.290994, 0.645497])]
// Returns 1/2 1 and 3/8 3/4 3/2 3: mean 1.1875, sum of squared deviations 4.7421875, divided by 5: 0.9484375.
#[case::whitened(r#"{"estimator": "reinforce_plus_plus", "whiten": "tokens", "gamma": 0.5}"#, [-0.4492345, 0.2246173])]
// PPO's values are 0 in the first step, so advantages are discounted rewards: means over (gamma lam)^t.
#[case::gae_lam(r#"{"estimator": "gae", "whiten": "none", "lam": 0.5}"#, [0.75, 3.0 * 1.875 / 4.0])]
#[case::gae_gamma(r#"{"estimator": "gae", "whiten": "none", "gamma": 0.5, "lam": 1.0}"#, [0.75, 3.0 * 1.875 / 4.0])]
fn advantages_match_their_estimator(#[case] advantages: &str, #[case] expected: [f32; 2]) {
    assert_advantages(&step(TWO, advantages, false), expected);
}

#[test]
fn gdpo_normalises_each_reward_separately() {
    // The sums are 1 - 1/2 and 3 - 9/2, so the first is better. Normalised separately, the functions give -1 + 1/2 and 1 - 1/2 times
    // 1 / sqrt 2, and the second is better after whitening.
    assert_advantages(&step(TWO, r#"{"estimator": "group"}"#, true), [0.707057, -0.707057]);
    assert_advantages(&step(TWO, r#"{"estimator": "gdpo"}"#, true), [-0.706965, 0.706965]);
}

#[test]
fn sampling_metrics_match_trl() {
    let report = step(TWO, "{}", true);
    // Sums 0.5 and -1.5.
    for (name, expected) in [
        ("reward", -0.5),
        ("reward_std", 2f64.sqrt()),
        ("rewards/number/mean", 2.0),
        ("rewards/number/std", 2f64.sqrt()),
        ("rewards/square/mean", 5.0),
        ("rewards/square/std", 32f64.sqrt()),
        ("frac_reward_zero_std", 0.0),
        ("completions/mean_length", 3.0),
        ("completions/min_length", 2.0),
        ("completions/max_length", 4.0),
        ("completions/mean_terminated_length", 2.0),
        ("completions/min_terminated_length", 2.0),
        ("completions/max_terminated_length", 2.0),
        ("completions/clipped_ratio", 0.5),
    ] {
        let found = report.metrics.value(name).unwrap_or_else(|| panic!("no {name}"));
        assert!((found - expected).abs() < 1e-9, "{name}: {found} instead of {expected}");
    }
    assert_eq!(report.metrics.value("num_tokens"), Some(report.tokens as f64));
    assert!(report.metrics.get("filter_groups/num_gen_batches").is_none());
}

#[test]
fn nll_on_correct_answers_is_applied() {
    let mut config = small();
    config.loss.positive_example_nll_weight = 0.5;
    // Sums 0.5 (of two tokens) and -1.5.
    let report = scripted(TWO, config, true).grpo_step().unwrap();
    let updates = 2.0;
    match report.metrics.get("positive_nll_loss") {
        Some(grpo_core::Metric::Mean { sum, count }) => {
            assert!(*count == 2.0 * updates && *sum > 0.0, "{sum} of {count}")
        }
        other => panic!("{other:?}"),
    }
    assert!(report.metric("loss") - report.metric("policy_loss") > 0.4 * report.metric("positive_nll_loss"));
}

#[test]
fn missing_rewards_and_truncated_completions_leave_metrics_out() {
    let report = step(Script { sampled: &["x", "yy"], greedy: "" }, "{}", false);
    for name in ["reward", "reward_std", "rewards/number/mean", "rewards/number/std"] {
        assert!(report.metrics.get(name).is_none(), "{name}");
    }
    assert_eq!(report.metrics.value("frac_reward_zero_std"), Some(1.0));
    assert_eq!(report.metrics.value("completions/max_terminated_length"), Some(0.0));
    assert!(report.samples.iter().all(|s| s.advantage == 0.0));
    // One of two rewards is missing, so there is a mean but no deviation.
    let report = step(Script { sampled: &["x", "4."], greedy: "" }, "{}", false);
    assert_eq!((report.metrics.value("reward"), report.metrics.value("reward_std")), (Some(4.0), None));
}

#[test]
fn too_few_groups_are_an_error() {
    let same = || Script { sampled: &["1.", "01."], greedy: "" };
    let mut config = small();
    // Without the filter there is no limit.
    config.grpo.filter_groups.max_num_gen_batches = 0;
    scripted(same(), config.clone(), false).grpo_step().unwrap();
    config.grpo.filter_groups.enable = true;
    config.grpo.filter_groups.max_num_gen_batches = 3;
    let mut run = scripted(same(), config, false);
    let before = run.counters();
    let error = run.grpo_step().unwrap_err();
    assert!(matches!(error, Error::TooFewGroups { found: 0, wanted: 1, batches: 3, .. }), "{error}");
    assert!(error.to_string().contains("grpo.filter_groups.max_num_gen_batches"), "{error}");
    assert_eq!(run.counters(), before, "the failed step changed nothing");
}

#[test]
fn generation_batches_of_a_step_use_different_random_streams() {
    /// Returns equal rewards twice, then different ones; records the requested samples.
    struct Slow(Arc<Mutex<Vec<(u64, u64)>>>);

    impl RolloutEngine for Slow {
        fn generate(
            &mut self,
            policy: &mut dyn Policy,
            request: &RolloutRequest<'_>,
        ) -> grpo_policy::Result<Vec<Completion>> {
            let Sampling::Random { step, first, .. } = request.sampling else { panic!("greedy") };
            let mut seen = self.0.lock().unwrap();
            seen.push((step, first));
            let texts: &[&str] = if seen.len().is_multiple_of(3) { TWO.sampled } else { &["1.", "1."] };
            Script { sampled: texts, greedy: "" }.generate(policy, request)
        }
    }

    let seen = Arc::new(Mutex::new(Vec::new()));
    let mut config = small();
    config.grpo.filter_groups.enable = true;
    let (config, slow) = (one_group(config, TWO.sampled.len()), Slow(Arc::clone(&seen)));
    let mut run = with_parts(config, Comparison { max_number: 50 }, vec![power("number", 1, 1.0)], slow).unwrap();
    for _ in 0..2 {
        let report = run.grpo_step().unwrap();
        assert_eq!(report.metrics.value("filter_groups/num_gen_batches"), Some(3.0));
        assert_eq!(report.metrics.value("filter_groups/evicted_groups"), Some(2.0));
        // Four completions of `1` and EOS, and TWO.
        assert_eq!(report.metrics.value("completions/mean_length"), Some((4.0 * 2.0 + 2.0 + 4.0) / 6.0));
    }
    assert_eq!(*seen.lock().unwrap(), [(0, 0), (0, 2), (0, 4), (1, 0), (1, 2), (1, 4)]);
}

#[test]
fn the_group_filter_uses_the_configured_metric() {
    let with = |metric: &str, script| {
        let mut config = small();
        config.grpo.filter_groups.enable = true;
        config.grpo.filter_groups.max_num_gen_batches = 1;
        config.grpo.filter_groups.metric = metric.into();
        scripted(script, config, true).grpo_step().map(drop)
    };
    // -1 and 1 have equal squares, 0 and 2 equal sums: 0 - 0 = 2 - 4 / 2.
    for (metric, differing, equal) in
        [("square", &["0.", "2."], &["-1.", "1."]), ("reward", &["-1.", "1."], &["0.", "2."])]
    {
        with(metric, Script { sampled: differing, greedy: "" }).unwrap();
        assert!(
            matches!(with(metric, Script { sampled: equal, greedy: "" }), Err(Error::TooFewGroups { .. })),
            "{metric}"
        );
    }
}

#[test]
fn a_skipped_update_only_advances_the_data() {
    let mut config = small();
    config.grpo.num_iterations = 2;
    config.grpo.max_steps = 9;
    config.grpo.use_adaptive_entropy = true;
    config.grpo.entropy_target = 10.0;
    config.loss.beta = 0.1;
    config.grpo.sync_ref_model = true;
    config.grpo.ref_model_sync_steps = 1;
    let mut plain = scripted(TWO, config.clone(), false);
    config.optimizer.settings.skip_grad_norm = Some(1e-30);
    config.optimizer.max_consecutive_skips = 5;
    let mut guarded = scripted(TWO, config, false);
    let before = guarded.state().unwrap();
    let [first, skipped] = [&mut plain, &mut guarded].map(|run| run.grpo_step().unwrap());
    assert!(first.metric("grad_norm") > 0.0 && skipped.metric("grad_norm") > 0.0);
    let trained = plain.state().unwrap();
    assert!(trained.policy != before.policy && trained.coefficients != before.coefficients);
    let after = guarded.state().unwrap();
    let counters = after.counters;
    assert_eq!((counters.grpo_steps, counters.optimizer_steps, counters.skipped_in_a_row), (1, 0, 2));
    assert_eq!(TrainState { counters: before.counters, ..after }, before);
    // The schedule waits for updates that are applied.
    let (second, again) = (plain.grpo_step().unwrap(), guarded.grpo_step().unwrap());
    assert_ne!(second.metric("learning_rate"), first.metric("learning_rate"));
    assert_eq!(again.metric("learning_rate"), skipped.metric("learning_rate"));
    assert_eq!(again.metrics.value("skipped_updates"), Some(2.0));
    assert!(second.metrics.get("skipped_updates").is_none(), "off by default");
    // Of the next two updates, the first would be the fifth skip.
    let before = guarded.state().unwrap();
    let error = guarded.grpo_step().unwrap_err();
    assert!(matches!(error, Error::TooManySkips { skipped: 5, .. }), "{error}");
    assert_eq!(guarded.state().unwrap(), before);
}

#[test]
fn non_finite_losses_are_skipped_only_with_skip_grad_norm() {
    // A policy whose gradients are not finite.
    let broken = |skip_grad_norm| {
        let mut config = small();
        config.warmup.steps = 5;
        config.warmup.optimizer.settings.skip_grad_norm = skip_grad_norm;
        let mut run = grpo_setup::trainer(config).unwrap();
        let mut state = run.state().unwrap();
        state.policy.iter_mut().for_each(|tensor| tensor.data.fill(f32::NAN));
        run.restore(&state).unwrap();
        run
    };
    assert!(
        matches!(broken(None).warmup_step(), Err(Error::Policy(grpo_policy::Error::NotFinite { what, .. })) if what.contains("the warm-up loss"))
    );
    let mut guarded = broken(Some(1e30));
    let report = guarded.warmup_step().unwrap();
    assert!(report.skipped && report.loss.is_nan() && report.step == 1);
    assert_eq!((guarded.counters().optimizer_steps, guarded.counters().skipped_in_a_row), (0, 1));
}

#[test]
fn returns_of_the_first_step_are_discounted_rewards() {
    let report = step(TWO, r#"{"estimator": "gae", "whiten": "none", "gamma": 0.5, "lam": 1.0}"#, false);
    // 0.5 1 and 0.375 0.75 1.5 3; a clip at 0.2 leaves values of 0 unchanged.
    assert!((report.metric("return_mean") - 7.125 / 6.0).abs() < 1e-6);
    assert!(report.metric("value_loss") > 0.0);
}
