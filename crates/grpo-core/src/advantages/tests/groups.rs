//! Groups of different sizes.

use super::*;

#[test]
fn groups_of_different_sizes_match_values_computed_by_hand() {
    // Means 2, 5 and 4; the last group has one completion.
    let (rewards, offsets) = ([1.0, 2.0, 3.0, 1.0, 5.0, 9.0, 4.0], [0, 3, 6, 7]);
    let of = |json: &str| with(json).advantages(&rewards, &offsets[..]).unwrap();
    let std = [1.0, 4.0];
    let expected = [-1.0 / std[0], 0.0, 1.0 / std[0], -4.0 / std[1], 0.0, 4.0 / std[1], 0.0];
    assert_eq!(of(r#"{"eps": 0.0}"#), expected);
    assert_eq!(of(r#"{"eps": 0.0, "group_of_one": "keep"}"#)[6], 4.0);
    assert_eq!(of(r#"{"estimator": "mean_only"}"#), [-1.0, 0.0, 1.0, -4.0, 0.0, 4.0, 0.0]);
    assert_eq!(of(r#"{"estimator": "rloo"}"#), [-1.5, 0.0, 1.5, -6.0, 0.0, 6.0, 0.0]);
    assert_eq!(of(r#"{"estimator": "gpg"}"#), [-1.0, 0.0, 1.0, -4.0, 0.0, 4.0, 0.0]);
    // Baselines weighted by length: (1 + 2 + 2 x 3) / 4, (2 x 1 + 5 + 9) / 4, and 4 for the single completion.
    let batch = batch(&[1, 1, 2, 2, 1, 1, 3]);
    let inputs = AdvantageInputs {
        batch: Some(&batch),
        ..AdvantageInputs::new(RewardValues::per_sequence(&rewards), &offsets[..])
    };
    let opo = with(r#"{"estimator": "opo"}"#).compute(&inputs).unwrap();
    assert_eq!(opo, Advantages::PerSequence(vec![-1.25, -0.25, 0.75, -3.0, 1.0, 5.0, 0.0]));
    // The best of a group gets its distance to the second best.
    let passk = with(r#"{"estimator": "grpo_passk", "scale_rewards": "none"}"#);
    assert_eq!(passk.advantages(&rewards[..6], &[0, 2, 6][..]).unwrap(), [0.0, 1.0, 0.0, 0.0, 0.0, 4.0]);
}

/// Groups of different sizes equal groups of one size that are padded with completions without tokens and reward.
#[rstest]
fn groups_of_different_sizes_equal_padded_groups(
    #[values(
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
        "gae",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
        "dapo_mix"
    )]
    estimator: &str,
    #[values(&[3, 3, 2], &[2, 4, 2], &[2, 6])] sizes: &[usize],
) {
    let mut rewards = [1.0, 0.0, 0.5, 2.0, 0.25, 1.5, 0.0, 3.0].map(Some);
    rewards[6] = None;
    let lengths = [2, 1, 3, 1, 2, 2, 1, 3];
    let greedy = [0.5, 0.25, 0.0, 1.0, 0.125, 0.75, 0.0, 2.0].map(Some);
    let tokens = lengths.iter().sum::<usize>();
    let values: Vec<f32> = (0..tokens).map(|i| (i * 5 % 7) as f32 / 7.0).collect();
    let logp: Vec<f32> = (0..tokens).map(|i| -0.5 - (i * 3 % 5) as f32 / 5.0).collect();
    let config = with(&format!(r#"{{"estimator": "{estimator}"}}"#));
    let run = |rewards: &[Option<f32>], lengths: &[usize], greedy: &[Option<f32>], groups: Groups<'_>| {
        let batch = batch(lengths).with_old_logp(logp.clone()).unwrap();
        let inputs = AdvantageInputs {
            batch: Some(&batch),
            greedy_rewards: Some(greedy.into()),
            values: Some(&values),
            sum_pi_squared: Some(&values),
            ..AdvantageInputs::new(RewardValues::per_sequence(rewards), groups)
        };
        config.compute(&inputs).unwrap()
    };
    let offsets: Vec<usize> = (0..=sizes.len()).map(|p| sizes[..p].iter().sum()).collect();
    let found = run(&rewards, &lengths, &greedy, Groups::from(&offsets));

    let largest = sizes.iter().copied().max().unwrap();
    // Row of each completion in its padded group; `None` for padding.
    let rows: Vec<Option<usize>> = offsets
        .windows(2)
        .flat_map(|group| (0..largest).map(|i| Some(group[0] + i).filter(|row| *row < group[1])))
        .collect();
    let filled = |of: &[Option<f32>]| -> Vec<Option<f32>> { rows.iter().map(|row| of[(*row)?]).collect() };
    let filled_lengths: Vec<usize> = rows.iter().map(|row| row.map_or(0, |row| lengths[row])).collect();
    let expected = run(&filled(&rewards), &filled_lengths, &filled(&greedy), Groups::OfSize(largest));
    let expected = match expected {
        Advantages::PerSequence(of) => {
            Advantages::PerSequence(rows.iter().zip(of).filter(|(row, _)| row.is_some()).map(|(_, a)| a).collect())
        }
        per_token => per_token,
    };
    assert_eq!(found, expected);
    let (Advantages::PerSequence(list) | Advantages::PerToken(list)) = found;
    assert!(list.iter().filter(|a| **a != 0.0).count() >= 2, "{list:?}");
}

#[rstest]
#[case(&[0, 3], "0 to 3")]
#[case(&[1, 4], "1 to 4")]
#[case(&[0, 2, 2, 4], "end of group 1")]
#[case(&[0, 3, 2, 4], "end of group 1")]
#[case(&[0, 5], "0 to 5")]
#[case(&[], "offsets of groups")]
fn illegal_group_offsets_are_refused(#[case] offsets: &[usize], #[case] reason: &str) {
    let rewards = [1.0, 0.0, 0.5, 2.0];
    for error in [
        AdvantageConfig::default().advantages(&rewards, offsets).unwrap_err(),
        DynamicSampling::default().filter(&rewards, offsets).unwrap_err(),
    ] {
        assert!(matches!(error, Error::Shape { .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error} lacks {reason}");
    }
}

#[test]
fn dynamic_sampling_filters_groups_of_different_sizes() {
    let rewards = [Some(0.0), Some(1.0), Some(0.5), Some(0.5), Some(0.5), Some(0.7), None];
    let kept = DynamicSampling::default().filter(&rewards, &[0, 3, 5, 6, 7][..]).unwrap();
    assert_eq!(kept, KeptGroups { kept: vec![0, 2], zero_variance: 1, without_reward: 1, ..Default::default() });
}

#[test]
fn pass_at_k_names_the_group_that_is_too_small() {
    let config = with(r#"{"estimator": "grpo_passk"}"#);
    let message = config.advantages(&[1.0, 0.0, 2.0], &[0, 2, 3][..]).unwrap_err().to_string();
    assert!(message.contains("group 1") && message.contains("at least 2"), "{message}");
}
