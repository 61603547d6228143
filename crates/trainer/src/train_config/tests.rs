//! What a run's configuration accepts and refuses, beyond the types of its keys.

use super::TrainConfig;
use grpo_files::{Layers, Result};

fn resolve(layers: Result<Layers>) -> Result<TrainConfig> {
    layers?.resolve()
}

fn set(assignments: &[&str]) -> Result<Layers> {
    Layers::new().set(&assignments.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>())
}

#[test]
fn advantages_that_a_run_cannot_feed_are_refused_before_it_starts() {
    let refusal = |assignments: &[&str]| resolve(set(assignments)).unwrap().validate().unwrap_err().to_string();
    for (estimator, needed) in [
        ("gae", "no critic"),
        ("optimal_token_baseline", "sums of squared probabilities"),
        ("tir_optimal_token_baseline", "sums of squared probabilities"),
    ] {
        let text = refusal(&[&format!("grpo.advantages.estimator={estimator}")]);
        assert!(text.contains("grpo.advantages.estimator") && text.contains(needed), "{text}");
    }
    assert!(refusal(&["grpo.advantages.reward_weights=[1, 2]"]).contains("those of the section rewards"));
    let gdpo = refusal(&["grpo.advantages.estimator=gdpo", "grpo.use_kl_in_reward=true"]);
    assert!(gdpo.contains("Gdpo") && gdpo.contains("grpo.use_kl_in_reward"), "{gdpo}");
    let remax = ["grpo.advantages.estimator=remax", "grpo.advantages.whiten=sequences"];
    resolve(set(&remax)).unwrap().validate().unwrap();
    let remax = refusal(&[&remax[..], &["grpo.use_kl_in_reward=true"]].concat());
    assert!(remax.contains("grpo.advantages.whiten"), "{remax}");
    assert!(refusal(&["grpo.advantages.gamma=0.5"]).contains("gamma is used by gae"));
    assert!(refusal(&["grpo.advantages.estimator=grpo_passk", "grpo.num_generations=1"]).contains("at least 2"));
    let dapo = ["grpo.advantages.estimator=dapo_mix", "grpo.advantages.ddof=0", "grpo.advantages.clip=5"];
    resolve(set(&dapo)).unwrap().validate().unwrap();
}

#[rstest::rstest]
#[case(&["grpo.use_kl_in_reward=true", "grpo.kl_ctrl.kl_coef=-1"], "grpo.kl_ctrl.kl_coef")]
#[case(&["grpo.use_kl_in_reward=true", "grpo.kl_ctrl={type: adaptive, horizon: 100}"], "horizon above 102.4")]
#[case(&["grpo.use_kl_in_reward=true", "grpo.kl_ctrl={type: adaptive, target_kl: 0}"], "target_kl")]
#[case(&["grpo.filter_groups.enable=true", "grpo.filter_groups.max_num_gen_batches=0"], "max_num_gen_batches")]
#[case(&["grpo.filter_groups.enable=true", "grpo.filter_groups.keep.reward_range=[1, 0]"], "reward_range must rise")]
#[case(&["grpo.use_adaptive_entropy=true", "grpo.entropy_coef_min=2"], "entropy_coef_min (2)")]
#[case(&["grpo.sync_ref_model=true"], "grpo.sync_ref_model")]
#[case(&["grpo.sync_ref_model=true", "loss.beta=0.1", "grpo.ref_model_mixup_alpha=1.5"], "grpo.ref_model_mixup_alpha")]
#[case(&["grpo.sync_ref_model=true", "loss.beta=0.1", "grpo.ref_model_sync_steps=0"], "grpo.ref_model_sync_steps")]
#[case(&["rewards.soft_overlong_punishment={max_completion_len: 4, soft_punish_cache: 5}"], "soft_punish_cache (5)")]
#[case(&["rewards.soft_overlong_punishment={max_completion_len: 20, soft_punish_cache: 4}"], "begins below")]
fn what_surrounds_the_loss_is_checked_before_a_run_starts(#[case] assignments: &[&str], #[case] words: &str) {
    let text = resolve(set(assignments)).unwrap().validate().unwrap_err().to_string();
    assert!(text.contains(words), "{text}");
}

#[test]
fn what_surrounds_the_loss_reads_as_in_trl_and_verl() {
    let legal = [
        "grpo.use_kl_in_reward=true",
        "grpo.kl_penalty=kl",
        "grpo.kl_ctrl={type: adaptive, kl_coef: 0.01, target_kl: 0.2}",
        "grpo.use_adaptive_entropy=true",
        "grpo.entropy_target=0.3",
        "grpo.sync_ref_model=true",
        "grpo.filter_groups={enable: true, metric: correct}",
        "rewards.soft_overlong_punishment={max_completion_len: 8, soft_punish_cache: 4}",
    ];
    let config = resolve(set(&legal)).unwrap();
    config.validate().unwrap();
    assert_eq!((config.grpo.kl_ctrl.horizon, config.grpo.ref_model_sync_steps), (10_000.0, 512));
    let error = resolve(set(&["grpo.filter_groups.max_gen_batches=3"])).unwrap_err();
    let text = std::error::Error::source(&error).unwrap().to_string();
    assert!(text.contains("did you mean `max_num_gen_batches`?"), "{text}");
}
