//! Features around the loss: KL in the reward, adaptive entropy bonus, dynamic sampling, synced reference policy.

use crate::support::*;
use grpo_core::AdvantageEstimator;
use grpo_models::NamedTensor;
use grpo_run_config::KlControlType;
use grpo_trainer::coefficients::Exact;
use grpo_trainer::{Error, TrainConfig, Trainer};
use rstest::rstest;

/// Returns a configuration with the KL in the reward only and completions of one token.
fn one_token_kl() -> TrainConfig {
    let mut config = small();
    config.loss.beta = 0.0;
    config.rollout.max_completion_length = Some(1);
    config.grpo.use_kl_in_reward = true;
    config.grpo.advantages.estimator = AdvantageEstimator::Reinforce;
    config.optimizer.learning_rate = 0.01;
    config
}

#[test]
fn kl_in_reward_is_subtracted_from_the_reward() {
    let mut config = one_token_kl();
    config.grpo.kl_ctrl.kl_coef = 0.5;
    let mut run = warmed_up(config);
    // In the first step the reference equals the policy.
    let first = run.grpo_step().unwrap();
    assert_eq!(first.metrics.value("actor/reward_kl_penalty"), Some(0.0));
    assert!(first.samples.iter().all(|s| Some(s.advantage) == s.reward.total));
    let second = run.grpo_step().unwrap();
    let kl = second.metric("actor/reward_kl_penalty");
    assert!(kl.abs() > 1e-4, "{kl}");
    // reinforce has no baseline: the advantage is the reward minus the coefficient times the KL.
    let missing = |s: &grpo_trainer::step::Sample| f64::from(s.reward.total.unwrap_or(f32::NAN) - s.advantage);
    let taken = second.samples.iter().map(missing).sum::<f64>() / second.samples.len() as f64;
    assert!((taken - 0.5 * kl).abs() < 1e-6, "{taken} and {kl}");
    assert_eq!(second.metric("actor/reward_kl_penalty_coeff"), 0.5);
    assert!(second.metrics.get("kl").is_none(), "the loss has no KL term");
}

#[test]
fn the_adaptive_kl_coefficient_follows_the_kl() {
    let mut config = one_token_kl();
    config.grpo.kl_ctrl.r#type = KlControlType::Adaptive;
    config.grpo.kl_ctrl.kl_coef = 0.5;
    config.grpo.kl_ctrl.target_kl = 1e-9;
    config.grpo.kl_ctrl.horizon = 96.0;
    config.grpo.kl_penalty = grpo_core::KlEstimator::K3;
    let mut run = warmed_up(config);
    // 24 completions per step, a quarter of the horizon. Without a KL, the coefficient falls by a fifth of that; far above the target, it rises.
    let coefs = [0, 1, 2].map(|_| run.grpo_step().unwrap().metric("actor/reward_kl_penalty_coeff"));
    let expected = [0.5, 0.5 * (1.0 - 0.05), 0.5 * (1.0 - 0.05) * (1.0 + 0.05)];
    assert!(coefs.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-15), "{coefs:?}");
}

const ESTIMATORS: [&str; 12] = [
    "group",
    "mean_only",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "reinforce",
    "opo",
    "remax",
    "gpg",
    "grpo_passk",
    "gdpo",
    "dapo_mix",
];

/// Every pair of estimator, KL and whitening.
#[rstest]
fn every_estimator_trains_with_and_without_the_kl(#[values(false, true)] kl: bool) {
    for (index, estimator) in ESTIMATORS.into_iter().enumerate() {
        assert_estimator_trains(estimator, kl, (index % 2 == 0) == kl);
    }
}

#[rstest]
#[ignore = "GRPO_TESTS=all"]
fn every_estimator_trains_with_the_other_whitening(#[values(false, true)] kl: bool) {
    for (index, estimator) in ESTIMATORS.into_iter().enumerate() {
        assert_estimator_trains(estimator, kl, (index % 2 == 0) != kl);
    }
}

fn assert_estimator_trains(estimator: &str, kl: bool, whitens: bool) {
    let mut config = small();
    config.grpo.max_steps = 2;
    config.grpo.use_kl_in_reward = kl;
    let mut advantages = serde_json::json!({"estimator": estimator});
    // reinforce_plus_plus is defined with this whitening.
    if whitens || estimator == "reinforce_plus_plus" {
        advantages["whiten"] = "tokens".into();
    }
    config.grpo.advantages = serde_json::from_value(advantages).unwrap();
    if kl && estimator == "gdpo" {
        let error = config.validate().unwrap_err().to_string();
        assert!(error.contains("grpo.advantages.estimator") && error.contains("use_kl_in_reward"), "{error}");
        return;
    }
    let mut run = warmed_up(config);
    for _ in 0..2 {
        let report = run.grpo_step().unwrap();
        let trains = report.samples.iter().any(|s| s.advantage != 0.0) && report.metric("grad_norm") > 0.0;
        assert!(trains, "{estimator}: {:?}", report.metrics);
        assert!(report.samples.iter().all(|s| s.advantage.is_finite()), "{estimator}");
    }
}

#[test]
fn the_entropy_coefficient_moves_with_every_optimizer_step() {
    let ends = |target: f64| {
        let mut config = small();
        config.loss.entropy_coef = 0.02;
        config.grpo.use_adaptive_entropy = true;
        config.grpo.entropy_coef_delta = 0.001;
        config.grpo.entropy_coef_min = 0.0185;
        config.grpo.entropy_target = target;
        let mut run = warmed_up(config);
        let report = run.grpo_step().unwrap();
        let state = run.state().unwrap().coefficients;
        let (coef, last) = (state.entropy_coef.unwrap().0, state.last_entropy.unwrap().0);
        assert!(last > 0.1 && last < 4.0, "{last} nats");
        (report.metric("entropy_coef"), coef)
    };
    // Four updates per step; each logs the coefficient after it.
    let (logged, coef) = ends(100.0);
    assert!((logged - 0.0225).abs() < 1e-12 && (coef - 0.024).abs() < 1e-12, "{logged} {coef}");
    let (logged, coef) = ends(0.0);
    assert!((logged - (0.019 + 3.0 * 0.0185) / 4.0).abs() < 1e-12 && coef == 0.0185, "{logged} {coef}");
}

#[rstest]
fn an_adaptive_entropy_coefficient_without_change_equals_a_static_one(
    #[values("{}", r#"{"top_entropy_quantile": 0.5}"#)] loss: &str,
) {
    let run_with = |adaptive: bool| {
        let mut config = small();
        config.loss = grpo_core::LossConfig::from_json(loss).unwrap();
        config.loss.entropy_coef = 0.3;
        config.grpo.max_steps = 1;
        config.grpo.use_adaptive_entropy = adaptive;
        config.grpo.entropy_coef_delta = 0.0;
        config.grpo.entropy_target = 100.0;
        let mut run = warmed_up(config);
        let mut state = run.state().unwrap();
        // Before the first measurement there is no bonus.
        state.coefficients.last_entropy = adaptive.then_some(Exact(1.0));
        run.restore(&state).unwrap();
        let report = run.grpo_step().unwrap();
        (report.metric("loss"), report.metric("entropy_coef"), weights(&run))
    };
    let ((static_loss, static_coef, static_weights), (loss, coef, weights)) = (run_with(false), run_with(true));
    assert!((static_loss - loss).abs() < 1e-6 && static_loss < -0.3, "{static_loss} {loss}");
    assert_eq!((static_coef, coef), (0.3, 0.3));
    for (a, b) in static_weights.iter().zip(&weights) {
        assert!(a.data.iter().zip(&b.data).all(|(x, y)| (x - y).abs() < 1e-4), "{}", a.name);
    }
}

#[test]
fn dynamic_sampling_replaces_filtered_groups() {
    let config = |enable| {
        let mut config = small();
        // Few groups have a correct answer; completions without one all have the same reward.
        config.rewards.partial = 0.0;
        config.rewards.terminated = 1.0;
        config.grpo.num_generations = 2;
        config.grpo.filter_groups.enable = enable;
        config
    };
    let mut run = warmed_up(config(true));
    let before = run.counters().data_cursor;
    let report = run.grpo_step().unwrap();
    let count = |name: &str| report.metric(&format!("filter_groups/{name}")) as usize;
    let (batches, evicted, surplus) =
        (count("num_gen_batches"), count("evicted_groups"), count("discarded_surplus_groups"));
    assert!(batches > 1, "{batches}");
    assert_eq!(batches * 6 - evicted - surplus, 6);
    assert!(run.counters().data_cursor >= before + 6 * batches as u64);
    assert_eq!(report.samples.len(), 12);
    for group in report.samples.chunks(2) {
        assert_eq!(group[0].prompt, group[1].prompt);
        assert_ne!(group[0].reward.total, group[1].reward.total);
        assert!(group[0].advantage * group[1].advantage < 0.0);
    }
    // Metrics of samples cover all samples.
    let equal = report.metric("frac_reward_zero_std") * (6 * batches) as f64;
    assert!((equal - evicted as f64).abs() < 1e-9, "{equal} {evicted}");
    let plain = warmed_up(config(false)).grpo_step().unwrap();
    assert!(report.tokens > plain.tokens);
    assert!(plain.samples.chunks(2).any(|group| group[0].reward.total == group[1].reward.total));
}

#[rstest]
fn the_reference_is_mixed_every_ref_model_sync_steps(#[values(false, true)] sync_ref_model: bool) {
    let mut config = small();
    config.grpo.sync_ref_model = sync_ref_model;
    config.grpo.ref_model_mixup_alpha = 0.75;
    // Four optimizer steps per GRPO step.
    config.grpo.ref_model_sync_steps = 8;
    let mut run = warmed_up(config);
    for is_due in [false, true, false, true] {
        let before = run.state().unwrap().ref_policy;
        run.grpo_step().unwrap();
        let state = run.state().unwrap();
        let alpha = if is_due && sync_ref_model { 0.75 } else { 0.0 };
        for ((policy, before), after) in state.policy.iter().zip(&before).zip(&state.ref_policy) {
            for ((policy, before), after) in policy.data.iter().zip(&before.data).zip(&after.data) {
                assert!((alpha * policy + (1.0 - alpha) * before - after).abs() < 1e-6, "{policy} {before} {after}");
            }
        }
        assert_eq!(state.ref_policy != before, is_due && sync_ref_model);
    }
}

#[rstest]
fn ppo_trains_values_with_the_policy(#[values(1, 4)] num_generations: usize, #[values(false, true)] kl: bool) {
    let mut config = ppo();
    config.grpo.num_generations = num_generations;
    config.grpo.use_kl_in_reward = kl;
    config.grpo.advantages.lam = 0.95;
    config.optimizer.learning_rate = 0.01;
    let mut run = warmed_up(config);
    let head = |run: &Trainer| {
        let of_head = |tensor: &NamedTensor| tensor.name.starts_with("value_head");
        weights(run).into_iter().filter(of_head).collect::<Vec<_>>()
    };
    assert_eq!(head(&run).len(), 2);
    assert!(head(&run).iter().all(|tensor| tensor.data.iter().all(|value| *value == 0.0)), "it is not warmed up");
    let first = run.grpo_step().unwrap();
    assert!(head(&run).iter().all(|tensor| tensor.data.iter().any(|value| *value != 0.0)));
    // The first values are 0, so the returns are the discounted rewards.
    assert_eq!(first.metric("explained_variance"), 0.0);
    assert!(first.metric("value_loss") > 0.0 && first.metric("return_mean") > 0.0);
    assert!(first.samples.iter().any(|sample| sample.advantage != 0.0));
    let second = run.grpo_step().unwrap();
    assert_ne!(second.metric("value_pred_mean"), 0.0);
    assert!((second.metric("loss") - second.metric("policy_loss") - 0.5 * second.metric("value_loss")).abs() < 0.02);
    assert!(second.times.metrics().any(|(name, _)| name == "timing_s/values"));
    let speed: Vec<_> = second.speed.metrics().collect();
    assert_eq!(
        speed.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
        ["tokens_per_second/gen", "tokens_per_second/update_actor", "mfu"]
    );
    assert!(speed.iter().all(|(_, value)| *value > 0.0 && value.is_finite()), "{speed:?}");
}

/// Returns a run of PPO right after its warm-up, in which all completions get the same reward.
fn judged_by(reward: Option<f32>, change: fn(&mut TrainConfig)) -> Trainer {
    let mut config = ppo();
    config.grpo.use_kl_in_reward = false;
    config.loss.beta = 0.0;
    change(&mut config);
    let mut parts = grpo_setup::parts(&config).unwrap();
    parts.rewards = scored("always", move |_| reward);
    warm(Trainer::with_parts(config, parts).unwrap())
}

#[test]
fn trained_values_predict_the_rewards() {
    let mut run = judged_by(Some(1.0), |config| {
        config.grpo.max_steps = 40;
        config.grpo.cliprange_value = None;
        config.grpo.num_iterations = 1;
        config.grpo.advantage_scale = 0.0;
        config.optimizer.learning_rate = 0.01;
    });
    let losses: Vec<f64> = (0..40).map(|_| run.grpo_step().unwrap().metric("value_loss")).collect();
    // The values start at 0, and every return is 1.
    assert!(losses[0] > 0.3 && losses[30..].iter().all(|loss| *loss < 0.05), "{losses:?}");
}

#[test]
fn completions_without_a_reward_do_not_train_values() {
    let report = judged_by(None, |_| {}).grpo_step().unwrap();
    assert_eq!((report.metric("value_loss"), report.metric("grad_norm")), (0.0, 0.0));
    assert_eq!(report.metrics.value("return_mean"), None);
}

#[test]
fn ppo_requires_a_value_head_and_nothing_else_allows_one() {
    let parts = |config: &TrainConfig| grpo_setup::parts(config).unwrap();
    let without = Trainer::with_parts(ppo(), parts(&small())).err().unwrap();
    assert!(matches!(without, Error::Policy(grpo_policy::Error::NoValueHead)), "{without}");
    let idle = Trainer::with_parts(small(), parts(&ppo())).err().unwrap().to_string();
    assert!(idle.contains("grpo.advantages.estimator") && idle.contains("value head"), "{idle}");
}
