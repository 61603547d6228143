//! Conversations: a turn continues from the keys and values of the turn before.

use crate::checkpoint::Checkpoint;
use crate::prefills::{prompts_of_prefills, rows_of_prefills};
use crate::support::{
    assert_same_completions, cross_entropy, device_weights, on_device, random, request, rollout, whole,
};
use grpo_policy::{
    Completion, LogitsProcessors, Policy, RolloutRequest, Sequence, StateGroup, Turn, Weights, export_all,
};
use grpo_policy_pjrt::{DeviceRollout, DeviceWeights, PjrtPolicy, PjrtPolicyOptions};
use grpo_stablehlo::Dtype;
use rstest::rstest;

/// Largest number of tokens of a conversation behind its prompt.
const LONGEST: usize = 160;

/// Ends a turn after two adjacent tokens whose sum is divisible by 5.
#[derive(Debug)]
struct Fives;
impl grpo_policy::StopCondition for Fives {
    fn is_met(&self, completion: &[u32]) -> grpo_policy::Result<bool> {
        Ok(matches!(completion, [.., a, b] if (a + b) % 5 == 0))
    }
}

/// Holds conversations of three turns about five prompts, two of each, and returns their turns and the prompts of the prefills of every turn.
/// Between two turns are 1 to 70 tokens; a conversation of each turn ends. Without `keeps`, every turn is prefilled.
fn converse(
    rollout: &mut DeviceRollout,
    weights: &DeviceWeights,
    processors: LogitsProcessors,
    keeps: bool,
) -> (Vec<Completion>, Vec<Vec<u64>>) {
    let prompts = [vec![1, 9, 4], vec![7], vec![1, 20, 21, 22, 23, 24, 25], vec![3, 2], (0..19).collect()];
    let (mut turns, mut prefills) = (vec![], vec![]);
    let mut open: Vec<usize> = (0..10).collect();
    let mut sequences: Vec<Vec<u32>> = open.iter().map(|i| prompts[i / 2].clone()).collect();
    for turn in 0..3 {
        let streams: Vec<u64> = open.iter().map(|i| ((turn as u64) << 32) + *i as u64).collect();
        let room = |i: &usize| (LONGEST + prompts[i / 2].len() - sequences[*i].len()).min(5 + i).max(1);
        let limits: Vec<usize> = open.iter().map(room).collect();
        let (prompts, per_prompt) = match turn {
            0 => (prompts.to_vec(), 2),
            _ => (open.iter().map(|i| sequences[*i].clone()).collect(), 1),
        };
        let request = RolloutRequest {
            stop: Some(&Fives),
            turn: Some(Turn { streams: &streams, limits: &limits, finished: None }),
            ..request(&prompts, per_prompt, LONGEST, &[5, 6], random(1.0, processors, 0))
        };
        if !keeps {
            rollout.forget_turns();
        }
        let (completions, prompts) = prompts_of_prefills(|| rollout.generate(weights, &request).unwrap());
        for (i, completion) in open.iter().zip(&completions) {
            sequences[*i].extend(&completion.ids);
            let between = [1, 20, 7, 33, 16, 3, 17, 1, 70, 2][(i + turn) % 10];
            sequences[*i].extend((0..between).map(|token| 8 + (token + *i as u32) % 20));
        }
        turns.extend(completions);
        prefills.push(prompts);
        open.remove(turn);
    }
    (turns, prefills)
}

#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case::plain("qwen2", 16)]
#[case::fewer_slots_than_conversations("qwen2", 8)]
#[ignore = "GRPO_TESTS=all"]
#[case::sliding_windows("gemma3", 16)]
#[case::other_heads("gemma4", 16)]
#[ignore = "GRPO_TESTS=all"]
#[case::layers_without_rotation("smollm3", 16)]
fn turns_that_continue_sample_what_a_prefill_does(#[case] name: &str, #[case] slots: usize) {
    let checkpoint = Checkpoint::open(name);
    let weights = device_weights(&checkpoint, Dtype::F32);
    let hold = |keeps| converse(&mut rollout(&checkpoint, slots, 4), &weights, LogitsProcessors::default(), keeps);
    let ((fresh, all), (kept, few)) = (hold(false), hold(true));
    assert_same_completions(name, &kept, &fresh);
    let prompts = |turns: &[Vec<u64>]| turns[1..].iter().flatten().sum::<u64>();
    // Conversations whose slots were refilled are prefilled again.
    assert_eq!(prompts(&few) == 0, slots == 16, "{few:?}");
    assert!(prompts(&few) < prompts(&all), "{few:?} {all:?}");
}

/// The state of a Gated DeltaNet cannot drop tokens: a conversation is prefilled again if the stop condition drops a token that is in the state.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case::as_many_slots_as_conversations(16)]
#[case::fewer_slots(8)]
fn turns_that_continue_states_sample_what_a_prefill_does(#[case] slots: usize) {
    let checkpoint = Checkpoint::open("qwen3_5");
    let weights = device_weights(&checkpoint, Dtype::F32);
    let hold = |keeps| converse(&mut rollout(&checkpoint, slots, 4), &weights, LogitsProcessors::default(), keeps);
    let ((fresh, all), (kept, few)) = (hold(false), hold(true));
    assert_same_completions("qwen3_5", &kept, &fresh);
    let prompts = |turns: &[Vec<u64>]| turns[1..].iter().flatten().sum::<u64>();
    assert!(prompts(&few) < prompts(&all), "{few:?} {all:?}");
    assert!(prompts(&few) > 0, "the stop condition drops tokens: {few:?}");
}

#[test]
fn a_repetition_penalty_prefills_every_turn() {
    let checkpoint = Checkpoint::open("qwen2");
    let weights = device_weights(&checkpoint, Dtype::F32);
    let processors = LogitsProcessors { repetition_penalty: Some(1.3), ..LogitsProcessors::default() };
    let hold = |keeps| converse(&mut rollout(&checkpoint, 16, 4), &weights, processors, keeps);
    let ((fresh, all), (kept, prefills)) = (hold(false), hold(true));
    assert_same_completions("qwen2", &kept, &fresh);
    assert_eq!(prefills, all);
}

#[test]
fn a_policy_keeps_turns_until_it_does_something_else() {
    let checkpoint = Checkpoint::open("qwen2");
    let mut policy = on_device(&checkpoint, PjrtPolicyOptions::default());
    let sequences = [Sequence { prompt: vec![1, 2], completion: vec![3, 4] }];
    let mut prompt = vec![1, 9, 4];
    let mut turn = |policy: &mut PjrtPolicy, number: u64| {
        let prompts = [prompt.clone()];
        let (streams, limits) = ([number << 32], [6]);
        let turn = Some(Turn { streams: &streams, limits: &limits, finished: None });
        let sampling = random(1.0, LogitsProcessors::default(), 0);
        let request = RolloutRequest { turn, ..request(&prompts, 1, 100, &[], sampling) };
        let (completions, rows) = rows_of_prefills(|| policy.generate(&request).unwrap());
        prompt.extend(completions[0].ids.iter().copied().chain([5, 6, 7]));
        rows.len()
    };
    assert_eq!([turn(&mut policy, 0), turn(&mut policy, 1)], [1, 0]);
    policy.score(Weights::Policy, &[whole(&sequences)]).unwrap();
    assert_eq!([turn(&mut policy, 2), turn(&mut policy, 3)], [1, 0]);
    policy.step(&[whole(&sequences)], cross_entropy(&sequences), 0.1).unwrap();
    assert_eq!([turn(&mut policy, 4), turn(&mut policy, 5)], [1, 0]);
    let trained = export_all(&policy, StateGroup::Weights(Weights::Policy)).unwrap();
    policy.import_weights(&trained).unwrap();
    assert_eq!([turn(&mut policy, 6), turn(&mut policy, 7)], [1, 0]);
}

#[rstest]
#[case::keys_and_values("qwen2")]
#[case::states("qwen3_5")]
fn the_turns_of_other_conversations_drop_no_cache(#[case] name: &str) {
    let checkpoint = Checkpoint::open(name);
    let weights = device_weights(&checkpoint, Dtype::F32);
    let mut rollout = rollout(&checkpoint, 8, 4);
    let mut conversations = [vec![1, 9, 4], vec![7, 8]];
    let mut turn = |conversation: usize, number: u64| {
        let prompts = [conversations[conversation].clone()];
        let turn = Turn { streams: &[(number << 32) + conversation as u64], limits: &[6], finished: None };
        let request = RolloutRequest {
            turn: Some(turn),
            ..request(&prompts, 1, 100, &[], random(1.0, LogitsProcessors::default(), 0))
        };
        let (completions, rows) = rows_of_prefills(|| rollout.generate(&weights, &request).unwrap());
        conversations[conversation].extend(completions[0].ids.iter().copied().chain([5, 6, 7]));
        rows.len()
    };
    assert_eq!([turn(0, 0), turn(1, 0), turn(0, 1), turn(1, 1), turn(0, 2)], [1, 1, 0, 0, 0]);
}
