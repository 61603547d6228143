//! Runs give the same bits with any number of threads, after an interruption, and with other micro-batches.

use crate::support::*;
use grpo_trainer::{Error, Phase, TrainConfig, TrainState};
use rstest::rstest;

#[track_caller]
fn assert_same_bits(a: &TrainState, b: &TrainState) {
    assert_eq!((a.counters, &a.coefficients), (b.counters, &b.coefficients));
    for (a, b) in [(&a.policy, &b.policy), (&a.optimizer, &b.optimizer), (&a.ref_policy, &b.ref_policy)] {
        assert_eq!(a.len(), b.len());
        for (a, b) in a.iter().zip(b) {
            assert_eq!((&a.name, &a.shape), (&b.name, &b.shape));
            assert!(a.data.iter().zip(&b.data).all(|(x, y)| x.to_bits() == y.to_bits()), "{} differs", a.name);
        }
    }
}

#[test]
fn equal_seeds_give_equal_bits_and_other_seeds_differ() {
    let first = whole_run(small());
    assert_same_bits(&first, &whole_run(small()));
    assert_ne!(first.policy, whole_run(TrainConfig { seed: 1, ..small() }).policy);
}

#[test]
fn the_number_of_threads_does_not_matter() {
    let on = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| whole_run(small()))
    };
    assert_same_bits(&on(1), &on(3));
}

#[rstest]
#[case::in_the_warmup(2, everything())]
#[case::between_the_phases(3, ppo())]
#[case::in_grpo(5, everything())]
#[case::in_grpo_with_adapters(5, adapters())]
#[case::at_the_end(7, small())]
fn a_restored_run_continues_bit_for_bit(#[case] steps: usize, #[case] config: TrainConfig) {
    assert_continues(steps, config);
}

#[rstest]
#[ignore = "GRPO_TESTS=all"]
fn a_run_of_every_kind_continues_bit_for_bit(
    #[values(2, 3, 5, 7)] steps: usize,
    #[values(small(), everything(), ppo(), adapters())] config: TrainConfig,
) {
    assert_continues(steps, config);
}

fn assert_continues(steps: usize, config: TrainConfig) {
    let uninterrupted = whole_run(config.clone());
    let mut first = grpo_setup::trainer(config.clone()).unwrap();
    for _ in 0..steps {
        match first.phase() {
            Phase::Warmup => drop(first.warmup_step().unwrap()),
            Phase::Grpo => drop(first.grpo_step().unwrap()),
            Phase::Done => unreachable!("the run has 7 steps"),
        }
    }
    // An evaluation in between changes nothing.
    first.evaluate().unwrap();
    let saved = first.state().unwrap();
    let mut second = grpo_setup::trainer(config).unwrap();
    second.restore(&saved).unwrap();
    assert_same_bits(&saved, &second.state().unwrap());
    assert_same_bits(&uninterrupted, &finished(second).state().unwrap());
}

#[test]
fn a_mismatched_state_is_refused_and_changes_nothing() {
    let good = whole_run(small());
    let mut run = grpo_setup::trainer(small()).unwrap();
    let fresh = run.state().unwrap();
    let mut refuse = |change: &dyn Fn(&mut TrainState)| {
        let mut state = good.clone();
        change(&mut state);
        assert!(matches!(run.restore(&state), Err(Error::Policy(grpo_policy::Error::State { .. }))));
        assert_same_bits(&run.state().unwrap(), &fresh);
    };
    refuse(&|s| s.policy.truncate(1));
    refuse(&|s| s.optimizer.truncate(1));
    refuse(&|s| s.ref_policy.clear());
    refuse(&|s| s.coefficients.kl_coef = Some(grpo_trainer::coefficients::Exact(0.1)));
    refuse(&|s| s.counters.grpo_steps = 99);
    refuse(&|s| s.counters.warm = false);
    refuse(&|s| s.policy[0].shape.reverse());
}

/// Among them are losses that share a ratio, choose tokens or correct for the sampler.
#[rstest]
#[case::grpo(r#"{"beta": 0.05}"#)]
#[case::vespo(r#"{"loss_type": "vespo", "vllm_importance_sampling_correction": true, "vllm_importance_sampling_mode": "token_truncate"}"#)]
#[case::geo_mean(r#"{"loss_type": "geo_mean", "beta": 0.1}"#)]
#[case::high_entropy(r#"{"top_entropy_quantile": 0.5, "entropy_coef": 0.01}"#)]
#[case::truncated(r#"{"loss_type": "dapo", "mask_truncated_completions": true}"#)]
#[case::kl_cov(r#"{"semantics": "verl", "loss_type": "kl_cov", "kl_cov_ratio": 0.1}"#)]
#[case::verl(r#"{"semantics": "verl", "loss_agg_mode": "seq-mean-token-mean", "rollout_is": "token", "rollout_rs": "seq_mean_k3",
    "rollout_rs_threshold": 0.5}"#)]
#[case::imitation(r#"{"loss_type": "dapo", "positive_example_nll_weight": 0.2}"#)]
#[case::kl_against_the_sampler(r#"{"kl_importance": "sampler", "beta": 0.1}"#)]
#[case::prompts(r#"{"loss_agg_mode": "prompt-mean", "kl_importance": "score_function", "beta": 0.1}"#)]
fn results_do_not_depend_on_micro_batches(#[case] loss: &str) {
    let with = |gradient_accumulation_steps| {
        let mut config = small();
        config.loss = serde_json::from_str(loss).unwrap();
        config.grpo.gradient_accumulation_steps = gradient_accumulation_steps;
        config.grpo.max_steps = 1;
        config.warmup.steps = 1;
        let mut run = warmed_up(config);
        let report = run.grpo_step().unwrap();
        let masks = run.config().loss.mask_truncated_completions;
        let counts = |sample: &grpo_trainer::step::Sample| sample.advantage != 0.0 && !(masks && sample.truncated);
        let trains = report.samples.iter().any(counts);
        assert_eq!(report.metric("grad_norm") > 0.0, trains);
        weights(&run)
    };
    for (a, b) in with(1).iter().zip(&with(3)) {
        let largest = a.data.iter().zip(&b.data).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
        assert!(largest < 2e-4, "{} {largest}", a.name);
    }
}

#[test]
fn phases_keep_their_order() {
    let mut run = grpo_setup::trainer(small()).unwrap();
    assert!(matches!(run.grpo_step(), Err(Error::Argument { .. })));
    let mut run = finished(run);
    assert_eq!(run.phase(), Phase::Done);
    assert!(run.warmup_step().is_err() && run.grpo_step().is_err());
    let counters = run.counters();
    assert_eq!((counters.warmup_steps, counters.grpo_steps, counters.optimizer_steps), (3, 4, 16));
}
