//! Sampling on the device.

use crate::checkpoint::{self, Checkpoint};
use crate::support::{assert_same_completions, device_weights, on_device, on_host, random, request, rollout, runtime};
use grpo_policy::{Completion, LogitsProcessors, Policy, RolloutRequest, Sampling};
use grpo_policy_pjrt::decoder::Compute;
use grpo_policy_pjrt::{DeviceRollout, DeviceWeights, Error, PjrtPolicyOptions, RolloutOptions};
use grpo_stablehlo::Dtype;
use grpo_testkit::margin::assert_below;
use rstest::rstest;

/// The size of the vocabulary of qwen2.
const VOCAB: usize = 256;

/// Returns prompts of various lengths.
fn prompts() -> Vec<Vec<u32>> {
    vec![vec![1, 9, 4], vec![7], vec![1, 20, 21, 22, 23, 24, 25], vec![3, 2], (0..19).collect()]
}

/// Compares greedy completions with the CPU policy, without stop ids, and with stop ids that occur at these tokens of samples.
fn assert_greedy(
    name: &str,
    prompts: &[Vec<u32>],
    num_generations: usize,
    length: usize,
    [slots, tokens_per_call]: [usize; 2],
    stops: &[[usize; 2]],
) {
    let checkpoint = Checkpoint::open(name);
    let (mut rollout, weights) =
        (rollout(&checkpoint, slots, tokens_per_call), device_weights(&checkpoint, Dtype::F32));
    let mut host = on_host(&checkpoint);
    let mut completions = |stop_ids: &[u32]| {
        let request = request(prompts, num_generations, length, stop_ids, Sampling::Greedy);
        let found = rollout.generate(&weights, &request).unwrap();
        assert_same_completions(name, &found, &host.generate(&request).unwrap());
        found
    };
    let found = completions(&[]);
    assert!(found.iter().all(|completion| completion.truncated && completion.ids.len() == length));
    if !stops.is_empty() {
        let stop_ids: Vec<u32> = stops.iter().map(|[sample, token]| found[*sample].ids[*token]).collect();
        assert!(completions(&stop_ids).iter().any(|completion| !completion.truncated), "{name}");
    }
}

#[test]
fn greedy_completions_of_two_families_match_the_cpu_policy() {
    ["gemma4", "gpt_oss"].iter().for_each(|name| assert_greedy(name, &prompts(), 2, 9, [8, 4], &[[0, 2], [4, 5]]));
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn greedy_completions_of_every_family_match_the_cpu_policy() {
    checkpoint::ALL.iter().for_each(|name| assert_greedy(name, &prompts(), 2, 9, [8, 4], &[[0, 2], [4, 5]]));
}

#[test]
fn completions_and_prompts_of_one_token_match_the_cpu_policy() {
    [1, 3].iter().for_each(|length| assert_greedy("llama3", &[vec![3], vec![2, 8]], 1, *length, [4, 2], &[]));
}

#[test]
fn a_cache_filled_to_its_last_column_matches_the_cpu_policy() {
    // 16 columns: the last call begins after 12 tokens and writes 4. Slots of finished samples are reused.
    let prompts = [(3..12).collect(), vec![7, 2], vec![1, 9, 4, 20, 21, 22]];
    assert_greedy("qwen2", &prompts, 5, 8, [8, 4], &[[5, 2]]);
}

/// Ends a completion after two adjacent tokens whose sum is divisible by 5.
#[derive(Debug)]
struct Fives;
impl grpo_policy::StopCondition for Fives {
    fn is_met(&self, completion: &[u32]) -> grpo_policy::Result<bool> {
        Ok(matches!(completion, [.., a, b] if (a + b) % 5 == 0))
    }
}

/// Slots that others leave are used again, and a call adds tokens behind the end.
#[rstest]
#[case(3, 4)]
#[ignore = "GRPO_TESTS=all"]
#[case(64, 16)]
#[ignore = "GRPO_TESTS=all"]
#[case(20, 1)]
fn a_stop_condition_ends_completions_where_it_does_on_the_host(#[case] slots: usize, #[case] tokens_per_call: usize) {
    let (checkpoint, prompts) = (Checkpoint::open("qwen2"), prompts());
    let (mut host, weights) = (on_host(&checkpoint), device_weights(&checkpoint, Dtype::F32));
    let request = |stop: Option<&'static dyn grpo_policy::StopCondition>, stop_ids| RolloutRequest {
        stop,
        ..request(&prompts, 4, 11, stop_ids, Sampling::Greedy)
    };
    let whole = host.generate(&request(None, &[])).unwrap();
    let expected = host.generate(&request(Some(&Fives), &[])).unwrap();
    assert!(expected.iter().any(|completion| !completion.truncated && completion.ids.len() < 11));
    for (cut, whole) in expected.iter().zip(&whole) {
        let at = (2..=whole.ids.len()).find(|length| (whole.ids[length - 2] + whole.ids[length - 1]) % 5 == 0);
        assert_eq!((cut.ids.len(), cut.truncated), (at.unwrap_or(11), at.is_none()));
        assert_eq!(cut.ids, whole.ids[..cut.ids.len()], "what was sampled stays");
    }
    let stop_ids = [whole[0].ids[4]];
    let both = host.generate(&request(Some(&Fives), &stop_ids)).unwrap();
    let mut rollout = rollout(&checkpoint, slots, tokens_per_call);
    assert_same_completions("stop", &rollout.generate(&weights, &request(Some(&Fives), &[])).unwrap(), &expected);
    assert_same_completions("stop", &rollout.generate(&weights, &request(Some(&Fives), &stop_ids)).unwrap(), &both);
}

#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case(1)]
#[case(12)]
#[ignore = "GRPO_TESTS=all"]
#[case(17)]
fn a_sample_does_not_depend_on_its_slot_or_on_other_samples(#[case] slots: usize) {
    let (checkpoint, prompts) = (Checkpoint::open("qwen2"), prompts());
    let weights = device_weights(&checkpoint, Dtype::F32);
    let generate = |prompts: &[Vec<u32>], first, slots| {
        let request = request(prompts, 4, 11, &[5, 6, 7], random(0.8, LogitsProcessors::default(), first));
        rollout(&checkpoint, slots, 4).generate(&weights, &request).unwrap()
    };
    let all = generate(&prompts, 0, 64);
    assert!(all.iter().any(|completion| completion.truncated) && all.iter().any(|completion| !completion.truncated));
    assert!(all[..4].iter().any(|completion| completion.ids != all[0].ids), "samples of a prompt differ");
    assert_eq!(generate(&prompts, 0, slots), all);
    // Each prompt alone.
    for (i, prompt) in prompts.iter().enumerate() {
        let found = generate(std::slice::from_ref(prompt), 4 * i, 64);
        assert_eq!(found, all[4 * i..4 * i + 4], "prompt {i} alone");
    }
}

#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case::top_k(LogitsProcessors { top_k: Some(7), ..LogitsProcessors::default() }, 7)]
#[case::top_p(LogitsProcessors { top_p: Some(0.8), min_p: Some(0.05), ..LogitsProcessors::default() }, VOCAB - 1)]
#[ignore = "GRPO_TESTS=all"]
#[case::every_token(LogitsProcessors { top_k: Some(VOCAB), ..LogitsProcessors::default() }, 0)]
fn sampling_masks_have_the_kept_tokens_of_every_call_and_slot(
    #[case] processors: LogitsProcessors,
    #[case] most: usize,
) {
    let (checkpoint, prompts) = (Checkpoint::open("qwen2"), prompts());
    let weights = device_weights(&checkpoint, Dtype::F32);
    assert_eq!(checkpoint.config().vocab_size, VOCAB);
    let request = RolloutRequest {
        stop: Some(&Fives),
        return_sampling_mask: true,
        return_routed_experts: false,
        ..request(&prompts, 4, 11, &[5, 6, 7], random(0.8, processors, 0))
    };
    let of =
        |slots, tokens_per_call| rollout(&checkpoint, slots, tokens_per_call).generate(&weights, &request).unwrap();
    let all = of(64, 16);
    assert!(all.iter().any(|completion| completion.ids.len() < 11));
    for Completion { ids, sampling_mask: mask, .. } in &all {
        assert_eq!(mask.tokens(), ids.len());
        for (token, id) in ids.iter().enumerate() {
            let kept = mask.kept(token).unwrap_or_default();
            assert!(kept.len() <= most && (most == 0 || kept.contains(id)), "{processors:?}: {kept:?}, {id}");
            assert!(processors.top_k != Some(7) || kept.len() == 7, "{kept:?}");
        }
    }
    // Samples that wait for a slot, and calls that end within a completion.
    for (slots, tokens_per_call) in [(3, 4), (20, 1)] {
        let found = of(slots, tokens_per_call);
        let parts = |c: &Completion| (c.ids.clone(), c.sampling_mask.clone());
        assert!(found.iter().map(parts).eq(all.iter().map(parts)), "{processors:?}, {slots} slots");
    }
}

#[test]
fn samples_follow_the_distribution_of_the_processors() {
    let checkpoint = Checkpoint::open("qwen3");
    let (weights, mut rollout) = (device_weights(&checkpoint, Dtype::F32), rollout(&checkpoint, 512, 1));
    let prompt: Vec<u32> = vec![1, 9, 4, 9];
    let vocab = checkpoint.config().vocab_size;
    let mut last = Vec::new();
    let policy = on_device(&checkpoint, PjrtPolicyOptions::default());
    policy.logits(&[&prompt], |_, _, logits| last = logits[3 * vocab..].to_vec()).unwrap();
    let off = LogitsProcessors::default();
    let prompts = [prompt.clone()];
    for processors in [
        off,
        LogitsProcessors { top_k: Some(7), ..off },
        LogitsProcessors { repetition_penalty: Some(1.7), top_p: Some(0.8), min_p: Some(0.02), ..off },
    ] {
        let (temperature, draws) = (0.9, 2048);
        let request = request(&prompts, draws, 1, &[], random(temperature, processors, 0));
        let completions = rollout.generate(&weights, &request).unwrap();
        let scores = processors.scores(&last, temperature, &prompt.iter().copied().collect());
        let total: f64 = scores.iter().map(|score| score.exp()).sum();
        let probability = |id: usize| scores[id].exp() / total;
        let mut counts = vec![0.0; vocab];
        for completion in &completions {
            let id = completion.ids[0] as usize;
            counts[id] += 1.0;
            let (found, expected) = (f64::from(completion.logps[0]), probability(id).ln());
            assert_below(&format!("{processors:?}, token {id}"), (found - expected).abs(), 1e-4);
        }
        // Rare tokens form one class.
        let expected: Vec<f64> = (0..vocab).map(|id| probability(id) * draws as f64).collect();
        let (mut statistic, mut classes, mut rare) = (0.0, 0, (0.0, 0.0));
        for (count, expected) in counts.iter().zip(&expected) {
            if *expected >= 5.0 {
                statistic += (count - expected) * (count - expected) / expected;
                classes += 1;
            } else {
                rare = (rare.0 + count, rare.1 + expected);
            }
        }
        if rare.1 > 0.0 {
            statistic += (rare.0 - rare.1).powi(2) / rare.1;
            classes += 1;
        }
        // Chi-square has mean classes - 1 and twice that variance; the limit is four standard deviations.
        let freedom = f64::from(classes - 1);
        assert!(
            classes > 3 && statistic < freedom + 4.0 * (2.0 * freedom).sqrt(),
            "{processors:?}: {statistic}, {classes}"
        );
    }
}

#[test]
fn invalid_requests_are_errors() {
    let checkpoint = Checkpoint::open("qwen2");
    let (weights, mut rollout) = (device_weights(&checkpoint, Dtype::F32), rollout(&checkpoint, 64, 16));
    let (limit, vocab) = (checkpoint.config().max_position_embeddings, checkpoint.config().vocab_size as u32);
    let mut of = |prompts: &[Vec<u32>], num_generations, length, sampling| {
        rollout.generate(&weights, &request(prompts, num_generations, length, &[], sampling)).unwrap_err()
    };
    let legal = [vec![1, 2]];
    let policy = |error: Error| match error {
        Error::Policy(error) => error.to_string(),
        other => panic!("{other}"),
    };
    assert!(policy(of(&[], 1, 1, Sampling::Greedy)).contains("at least one prompt"));
    assert!(policy(of(&legal, 0, 1, Sampling::Greedy)).contains("1 x 0 x 1"));
    assert!(policy(of(&[vec![1], vec![]], 1, 1, Sampling::Greedy)).contains("prompt 1 without tokens"));
    assert!(policy(of(&legal, 1, limit, Sampling::Greedy)).contains("max_position_embeddings"));
    let top_p = LogitsProcessors { top_p: Some(2.0), ..LogitsProcessors::default() };
    assert!(policy(of(&legal, 1, 1, random(1.0, top_p, 0))).contains("top_p"));
    assert!(policy(of(&legal, 1, 1, random(0.0, LogitsProcessors::default(), 0))).contains("temperature"));
    let unknown = of(&[vec![1, vocab]], 1, 1, Sampling::Greedy);
    assert!(matches!(unknown, Error::Model(grpo_models::Error::UnknownToken { id, .. }) if id == vocab));
    let options = RolloutOptions { slots: 0, tokens_per_call: 4 };
    assert!(DeviceRollout::new(runtime(), checkpoint.config(), Compute::F32, options).is_err());
}

#[test]
fn weights_that_are_not_finite_are_an_error() {
    let checkpoint = Checkpoint::open("qwen2");
    let mut tensors = Vec::new();
    device_weights(&checkpoint, Dtype::F32).export(&mut tensors).unwrap();
    let norm = tensors.iter_mut().find(|tensor| tensor.name == "model.norm.weight").unwrap();
    norm.data[0] = f32::NAN;
    let weights = DeviceWeights::from_tensors(runtime(), checkpoint.config(), &tensors, Dtype::F32).unwrap();
    let prompts = prompts();
    for sampling in [Sampling::Greedy, random(1.0, LogitsProcessors::default(), 0)] {
        let error = rollout(&checkpoint, 8, 4).generate(&weights, &request(&prompts, 2, 9, &[], sampling));
        assert!(matches!(error, Err(Error::NotFinite { sample: 0, token: 0 })), "{error:?}");
    }
}
