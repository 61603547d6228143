mod groups;

use super::*;
use crate::batch::TokenBatch;
use approx::assert_relative_eq;
use rstest::rstest;

#[test]
fn advantages_refuse_illegal_settings_and_rewards() {
    let config = AdvantageConfig::default();
    assert!(config.advantages(&[1.0, 2.0, 3.0], 2).unwrap_err().to_string().contains("multiple"));
    assert!(config.advantages(&[1.0], 0).is_err());
    for wrong in [f32::INFINITY, f32::NAN] {
        let message = config.advantages(&[wrong, 0.0], 2).unwrap_err().to_string();
        assert!(message.contains("completion 0") && message.contains("a missing reward is None"), "{message}");
    }
    assert!(AdvantageConfig { ddof: 2, ..config.clone() }.advantages(&[1.0, 2.0], 2).is_err());
    assert!(AdvantageConfig { eps: f64::NAN, ..config }.advantages(&[1.0, 2.0], 2).is_err());
}

fn batch(lengths: &[usize]) -> TokenBatch {
    let ends = lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end)
    });
    let offsets: Vec<usize> = std::iter::once(0).chain(ends).collect();
    TokenBatch::packed(vec![0; lengths.iter().sum()], offsets).unwrap()
}

fn with(json: &str) -> AdvantageConfig {
    crate::backend_api::strict::from_value(serde_json::from_str(json).unwrap()).unwrap()
}

#[test]
fn dapo_mix_adds_the_batch_term_and_clips_last() {
    // Groups: means 1 and 6, std 1 and 2. Batch: mean 3.5, squares 12.25 + 2.25 + 0.25 + 20.25 = 35.
    let rewards = [0.0, 2.0, 4.0, 8.0];
    let whole = (35.0_f32 / 4.0).sqrt();
    let expected = [-1.0 - 0.7 / whole, 1.0 - 0.3 / whole, -1.0 + 0.1 / whole, 1.0 + 0.9 / whole];
    let mix = |clip| {
        let config = AdvantageConfig {
            estimator: AdvantageEstimator::DapoMix,
            ddof: 0,
            eps: 0.0,
            clip,
            ..AdvantageConfig::default()
        };
        config.advantages(&rewards, 2).unwrap()
    };
    for (a, e) in mix(None).into_iter().zip(expected) {
        assert_relative_eq!(a, e, max_relative = 1e-6);
    }
    for (a, e) in mix(Some(1.0)).into_iter().zip(expected) {
        assert_relative_eq!(a, e.clamp(-1.0, 1.0), max_relative = 1e-6);
    }
}

#[test]
fn reinforce_plus_plus_of_mllm_jax_is_whitened_leave_one_out() {
    let config = with(r#"{"estimator": "rloo", "whiten": "sequences", "ddof": 0, "eps": 0.0}"#);
    // Leave-one-out advantages: -2, 2, -6, 6; mean 0, variance 20.
    let expected = [-2.0, 2.0, -6.0, 6.0].map(|a: f32| a / 20.0_f32.sqrt());
    for (a, e) in config.advantages(&[0.0, 2.0, 1.0, 7.0], 2).unwrap().into_iter().zip(expected) {
        assert_relative_eq!(a, e, max_relative = 1e-6);
    }
}

#[test]
fn group_of_one_selects_the_advantage_of_a_single_reward() {
    let rewards = [Some(3.0), None, Some(1.0), Some(2.0)];
    let lone = |estimator: &str, group_of_one: &str| {
        with(&format!(r#"{{"estimator": "{estimator}", "group_of_one": "{group_of_one}", "eps": 0.5}}"#))
            .advantages(&rewards, 2)
            .unwrap()[..2]
            .to_vec()
    };
    for estimator in ["group", "mean_only", "rloo", "gpg"] {
        assert_eq!(lone(estimator, "zero"), [0.0, 0.0], "{estimator}");
    }
    assert_eq!(lone("group", "keep"), [2.0, 0.0]);
    assert_eq!(lone("mean_only", "keep"), [3.0, 0.0]);
    assert_eq!(lone("rloo", "keep"), [3.0, 0.0]);
    // A group with one reward left has no second best. That is no error; its advantages are 0.
    assert_eq!(lone("grpo_passk", "zero"), [0.0, 0.0]);
}

#[test]
fn completion_without_active_tokens_counts_in_its_group_mean() {
    let rewards = RewardValues::per_sequence(&[1.0, 3.0, 5.0, 9.0]);
    let batch = batch(&[2, 1, 0, 3]);
    let inputs = AdvantageInputs { batch: Some(&batch), ..AdvantageInputs::new(rewards, 2) };
    // After the group means: -1, 1, -2, 2, for 2, 1, 0 and 3 tokens: mean 5/6, squares 12 + 3 - 25/6... = 15 - 25/6.
    let std = ((15.0_f32 - 25.0 / 6.0) / 5.0).sqrt();
    let whitened = with(r#"{"estimator": "reinforce_plus_plus_baseline"}"#).compute(&inputs).unwrap();
    let Advantages::PerSequence(whitened) = whitened else { panic!("one advantage per completion") };
    for (a, centred) in whitened.into_iter().zip([-1.0, 1.0, -2.0, 2.0]) {
        assert_relative_eq!(a, (centred - 5.0 / 6.0) / std, max_relative = 1e-5);
    }
    let opo = with(r#"{"estimator": "opo"}"#).compute(&inputs).unwrap();
    assert_eq!(opo, Advantages::PerSequence(vec![-2.0 / 3.0, 4.0 / 3.0, -4.0, 0.0]));
    // With rewards per token the completion has no reward.
    let tokens = [0.0, 1.0, 3.0, 0.0, 0.0, 9.0];
    let inputs = AdvantageInputs { batch: Some(&batch), ..AdvantageInputs::new(RewardValues::per_token(&tokens), 2) };
    let advantages = with(r#"{"estimator": "mean_only"}"#).compute(&inputs).unwrap();
    assert_eq!(advantages, Advantages::PerSequence(vec![-1.0, 1.0, 0.0, 0.0]));
}

#[test]
fn a_missing_reward_leaves_all_its_tokens_out() {
    let batch = batch(&[2, 1, 2]).with_mask(&[1.0, 1.0, 1.0, 1.0, 0.0]).unwrap();
    let batch = batch.with_old_logp(vec![-1.0; 5]).unwrap();
    let rewards = [None, Some(1.0), Some(2.0)];
    let (values, sums) = ([0.5, 0.5, 0.5, 0.5, f32::NAN], [0.5; 5]);
    let inputs = AdvantageInputs {
        batch: Some(&batch),
        values: Some(&values),
        sum_pi_squared: Some(&sums),
        ..AdvantageInputs::new(RewardValues::per_sequence(&rewards), 3)
    };
    let whitened = Advantages::PerToken(vec![0.0, 0.0, -0.5_f32.sqrt(), 0.5_f32.sqrt(), 0.0]);
    for json in [r#"{"estimator": "gae"}"#, r#"{"estimator": "reinforce_plus_plus", "whiten": "tokens"}"#] {
        assert_eq!(with(json).compute(&inputs).unwrap(), whitened, "{json}");
    }
    assert_eq!(with(r#"{"estimator": "gae"}"#).value_targets(&inputs).unwrap(), [0.0, 0.0, 1.0, 2.0, 0.0]);
    let Advantages::PerToken(a) = with(r#"{"estimator": "optimal_token_baseline"}"#).compute(&inputs).unwrap() else {
        panic!("one advantage per token")
    };
    // Both completions have the same weight at their first token.
    assert_relative_eq!(a[..], [0.0, 0.0, -0.5, 0.5, 0.0][..], epsilon = 1e-6);
}

#[rstest]
fn equal_sums_of_weighted_rewards_give_exactly_zero(
    #[values("group", "mean_only", "rloo", "reinforce_plus_plus", "gpg", "grpo_passk", "gdpo", "dapo_mix")] name: &str,
    #[values(3, 7, 11)] group: usize,
) {
    // 0.3 x 0.7 + 0.9 x 0.6 in f64: the mean of 3, 7 or 11 such sums differs from the sum, and the deviation is not 0.
    let rewards = [0.7, 0.6].repeat(group);
    let config = with(&format!(r#"{{"estimator": "{name}", "reward_weights": [0.3, 0.9], "eps": 0.0}}"#));
    assert_eq!(config.advantages(&rewards, group).unwrap(), vec![0.0; group]);
}

#[test]
fn one_missing_token_reward_leaves_the_whole_completion_out() {
    let batch = batch(&[2, 2]);
    let rewards = RewardValues::per_token(&[None, Some(1.0), Some(0.5), Some(2.0)]);
    let inputs = AdvantageInputs {
        batch: Some(&batch),
        greedy_rewards: Some((&[0.0; 2]).into()),
        ..AdvantageInputs::new(rewards, 1)
    };
    let remax = with(r#"{"estimator": "remax"}"#).compute(&inputs).unwrap();
    assert_eq!(remax, Advantages::PerToken(vec![0.0, 0.0, 2.5, 2.0]));
}

#[rstest]
#[case(r#"{"estimator": "rloo", "scale_rewards": "group"}"#, "scale_rewards")]
#[case(r#"{"estimator": "mean_only", "scale_rewards": "batch"}"#, "scale_rewards")]
#[case(r#"{"estimator": "grpo_passk", "scale_rewards": "batch"}"#, "scale_rewards")]
#[case(r#"{"estimator": "group", "gamma": 0.9}"#, "gamma is used by gae")]
#[case(r#"{"estimator": "reinforce_plus_plus", "gamma": 0.9}"#, "whiten: tokens")]
#[case(r#"{"estimator": "reinforce_plus_plus", "whiten": "none"}"#, "use estimator reinforce")]
#[case(r#"{"estimator": "group", "lam": 0.9}"#, "lam is used by gae")]
#[case(r#"{"estimator": "group", "global_weight": 0.5}"#, "dapo_mix")]
#[case(r#"{"estimator": "gae", "gamma": 1.5}"#, "gamma must lie in [0, 1]")]
#[case(r#"{"estimator": "dapo_mix", "global_weight": -1}"#, "global_weight")]
#[case(r#"{"clip": 0}"#, "clip must be")]
fn advantages_refuse_settings_that_the_estimator_ignores(#[case] json: &str, #[case] reason: &str) {
    let message = with(json).advantages(&[1.0, 2.0], 2).unwrap_err().to_string();
    assert!(message.contains(reason), "{message}");
}

#[rstest]
#[case(r#"{"estimator": "opo"}"#, "batch")]
#[case(r#"{"estimator": "gae"}"#, "batch")]
#[case(r#"{"estimator": "remax"}"#, "greedy_rewards")]
#[case(r#"{"estimator": "group", "whiten": "tokens"}"#, "batch")]
fn advantages_name_the_missing_input(#[case] json: &str, #[case] field: &str) {
    assert!(with(json).needs().is_some());
    let message = with(json).advantages(&[1.0, 2.0], 2).unwrap_err().to_string();
    assert!(message.contains(&format!("set `{field}`")), "{message}");
}

#[test]
fn advantages_refuse_inputs_of_wrong_lengths() {
    let batch = batch(&[1, 2]);
    let refusal = |json: &str, inputs: &AdvantageInputs<'_>| with(json).compute(inputs).unwrap_err().to_string();
    let of = |rewards| AdvantageInputs { batch: Some(&batch), ..AdvantageInputs::new(rewards, 2) };
    let two = of(RewardValues::per_sequence(&[1.0, 2.0]));
    let wrong = [
        (refusal("{}", &of(RewardValues::per_sequence(&[1.0; 4]))), "2 sequences"),
        (refusal("{}", &of(RewardValues::per_token(&[1.0; 4]))), "rewards [N]"),
        (refusal("{}", &of(RewardValues::per_token(&[1.0, f32::INFINITY, 0.0]))), "token 1"),
        (refusal(r#"{"reward_weights": [1, 2]}"#, &of(RewardValues::per_token(&[1.0; 3]))), "reward_weights"),
        (refusal(r#"{"reward_weights": [1, 2]}"#, &of(RewardValues::per_sequence(&[1.0; 3]))), "multiple of the 2"),
        (
            refusal(r#"{"reward_weights": [1, 2]}"#, &of(RewardValues::per_sequence(&[1.0, 1.0, 1.0, f32::INFINITY]))),
            "completion 1, reward function 1",
        ),
        (refusal(r#"{"estimator": "gae"}"#, &two), "set `values`"),
        (refusal(r#"{"estimator": "gae"}"#, &AdvantageInputs { values: Some(&[0.0; 2]), ..two }), "values [N]"),
        (
            refusal(r#"{"estimator": "gae"}"#, &AdvantageInputs { values: Some(&[0.0, f32::NAN, 0.0]), ..two }),
            "values at token 1",
        ),
        (
            refusal(r#"{"estimator": "remax"}"#, &AdvantageInputs { greedy_rewards: Some((&[0.0]).into()), ..two }),
            "[B]",
        ),
        (refusal(r#"{"estimator": "optimal_token_baseline"}"#, &two), "set `batch.old_logp`"),
        (
            refusal(r#"{"estimator": "grpo_passk"}"#, &AdvantageInputs { groups: Groups::OfSize(1), ..two }),
            "at least 2",
        ),
        (
            refusal(
                r#"{"estimator": "gae", "whiten": "sequences"}"#,
                &AdvantageInputs { values: Some(&[0.0; 3]), ..two },
            ),
            "one advantage per completion",
        ),
    ];
    for (message, reason) in wrong {
        assert!(message.contains(reason), "{message} lacks {reason}");
    }
    assert!(with("{}").value_targets(&two).unwrap_err().to_string().contains("only gae"));
}

#[test]
fn dynamic_sampling_drops_groups_without_a_signal() {
    let some = Some::<f32>;
    let pairs = [[some(0.0), some(1.0)], [some(0.1); 2], [None; 2], [some(1.0), None]];
    let rewards = [pairs.concat(), vec![some(0.9), some(0.95), some(0.5), some(0.51)]].concat();
    let sampling = DynamicSampling::default();
    let kept = sampling.filter(&rewards, 2).unwrap();
    assert_eq!(kept, KeptGroups { kept: vec![0, 4, 5], without_reward: 1, zero_variance: 2, ..Default::default() });
    assert_eq!((kept.to_refill(4), kept.to_refill(2)), (1, 0));
    let kept = DynamicSampling { reward_range: Some([0.0, 0.9]), min_std: Some(0.01), ..sampling };
    let kept = kept.filter(&rewards, 2).unwrap();
    let expected = KeptGroups { kept: vec![0], without_reward: 1, zero_variance: 2, out_of_range: 1, low_std: 1 };
    assert_eq!(kept, expected);
    // OpenRLHF compares only the mean, and a mean of 0.1 is not above 0.1.
    let range = DynamicSampling { drop_zero_variance: false, reward_range: Some([0.1_f32.into(), 1.0]), min_std: None };
    assert_eq!(range.filter(&[0.1; 7], 7).unwrap().out_of_range, 1);
    assert_eq!(range.filter(&[0.2; 7], 7).unwrap().kept, [0]);
    // Groups of one completion are kept.
    assert_eq!(sampling.filter(&[some(0.0), None], 1).unwrap().kept, [0]);
}

#[test]
fn dynamic_sampling_refuses_illegal_thresholds() {
    let sampling = DynamicSampling::default();
    let refusal = |s: DynamicSampling, r: &[f32]| s.filter(r, 2).unwrap_err().to_string();
    assert!(refusal(DynamicSampling { reward_range: Some([1.0, 0.0]), ..sampling }, &[]).contains("reward_range"));
    assert!(refusal(DynamicSampling { min_std: Some(-1.0), ..sampling }, &[]).contains("min_std"));
    assert!(refusal(sampling, &[0.0]).contains("group size"));
    assert!(refusal(sampling, &[0.0, f32::INFINITY]).contains("completion 1"));
}
