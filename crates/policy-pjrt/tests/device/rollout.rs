//! Sampling on the device.

use crate::checkpoint::{self, Checkpoint};
use crate::support::runtime;
use policy::{Completion, LogitsProcessors, Policy, RolloutRequest, Sampling};
use policy_cpu::{CpuPolicy, PolicyLoss};
use policy_pjrt::decoder::Compute;
use policy_pjrt::{DeviceRollout, DeviceWeights, Error, RolloutOptions};
use rng::Purpose;
use stablehlo::Dtype;
use std::sync::Arc;

fn host(checkpoint: &Checkpoint) -> CpuPolicy {
    let loss = PolicyLoss {
        config: grpo_core::LossConfig::default().into(),
        backend: Arc::new(backend_cpu::CpuBackend::new()),
        implementation: grpo_core::Implementation::Fused,
        max_tokens: 64,
    };
    CpuPolicy::from_weights(checkpoint.config(), &checkpoint.weights, loss).unwrap()
}

fn weights(checkpoint: &Checkpoint) -> DeviceWeights {
    DeviceWeights::from_weights(runtime(), checkpoint.config(), &checkpoint.weights, Dtype::F32).unwrap()
}

fn rollout(checkpoint: &Checkpoint, options: RolloutOptions) -> DeviceRollout {
    DeviceRollout::new(runtime(), checkpoint.config(), Compute::F32, options).unwrap()
}

/// Returns random sampling of one step.
fn random(temperature: f64, processors: LogitsProcessors) -> Sampling {
    Sampling::Random { temperature, processors, seed: 5, purpose: Purpose::Rollout, step: 3, first: 0 }
}

/// Returns prompts of various lengths.
fn prompts() -> Vec<Vec<u32>> {
    vec![vec![1, 9, 4], vec![7], vec![1, 20, 21, 22, 23, 24, 25], vec![3, 2], (0..19).collect()]
}

#[test]
fn greedy_completions_match_the_cpu_policy() {
    let prompts = prompts();
    for name in checkpoint::ALL {
        let checkpoint = Checkpoint::open(name);
        let request = |stop_ids| RolloutRequest {
            prompts: &prompts,
            num_generations: 2,
            max_completion_length: 9,
            stop_ids,
            stop: None,
            sampling: Sampling::Greedy,
        };
        let mut rollout = rollout(&checkpoint, RolloutOptions { slots: 8, tokens_per_call: 4 });
        let (mut host, weights) = (host(&checkpoint), weights(&checkpoint));
        let found = rollout.generate(&weights, &request(&[])).unwrap();
        let expected = host.generate(&request(&[])).unwrap();
        assert_same(name, &found, &expected);
        assert!(found.iter().all(|completion| completion.truncated && completion.ids.len() == 9));
        // Use tokens that occur as stop ids.
        let stop_ids = [found[0].ids[2], found[4].ids[5]];
        let found = rollout.generate(&weights, &request(&stop_ids)).unwrap();
        assert_same(name, &found, &host.generate(&request(&stop_ids)).unwrap());
        assert!(found.iter().any(|completion| !completion.truncated), "{name}");
    }
}

/// Ends a completion after two adjacent tokens whose sum is divisible by 5.
#[derive(Debug)]
struct Fives;
impl policy::StopCondition for Fives {
    fn is_met(&self, completion: &[u32]) -> policy::Result<bool> {
        Ok(matches!(completion, [.., a, b] if (a + b) % 5 == 0))
    }
}

#[test]
fn a_stop_condition_ends_completions_where_it_does_on_the_host() {
    let (checkpoint, prompts) = (Checkpoint::open("qwen2"), prompts());
    let (mut host, weights) = (host(&checkpoint), weights(&checkpoint));
    let request = |stop: Option<&'static dyn policy::StopCondition>, stop_ids| RolloutRequest {
        prompts: &prompts,
        num_generations: 4,
        max_completion_length: 11,
        stop_ids,
        stop,
        sampling: Sampling::Greedy,
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
    // Slots that others leave are used again, and a call adds tokens behind the end.
    for (slots, tokens_per_call) in [(3, 4), (64, 16), (20, 1)] {
        let mut rollout = rollout(&checkpoint, RolloutOptions { slots, tokens_per_call });
        assert_same("stop", &rollout.generate(&weights, &request(Some(&Fives), &[])).unwrap(), &expected);
        assert_same("stop", &rollout.generate(&weights, &request(Some(&Fives), &stop_ids)).unwrap(), &both);
    }
}

/// Fails unless ids are equal and log-probabilities within 1e-5.
#[track_caller]
fn assert_same(name: &str, found: &[Completion], expected: &[Completion]) {
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!((&found.ids, found.truncated), (&expected.ids, expected.truncated), "{name}, sample {i}");
        for (found, expected) in found.logps.iter().zip(&expected.logps) {
            assert!((found - expected).abs() < 1e-5, "{name}, sample {i}: {found} {expected}");
        }
    }
}

#[test]
fn a_sample_does_not_depend_on_its_slot_or_on_other_samples() {
    let (checkpoint, prompts) = (Checkpoint::open("qwen2"), prompts());
    let weights = weights(&checkpoint);
    let generate = |prompts: &[Vec<u32>], first: u64, options| {
        let mut sampling = random(0.8, LogitsProcessors::default());
        let Sampling::Random { first: of_request, .. } = &mut sampling else { panic!("random") };
        *of_request = first;
        let request = RolloutRequest {
            prompts,
            num_generations: 4,
            max_completion_length: 11,
            stop_ids: &[5, 6, 7],
            stop: None,
            sampling,
        };
        rollout(&checkpoint, options).generate(&weights, &request).unwrap()
    };
    let options = |slots| RolloutOptions { slots, tokens_per_call: 4 };
    let all = generate(&prompts, 0, options(64));
    assert!(all.iter().any(|completion| completion.truncated) && all.iter().any(|completion| !completion.truncated));
    assert!(all[..4].iter().any(|completion| completion.ids != all[0].ids), "samples of a prompt differ");
    for slots in [1, 12, 17] {
        assert_eq!(generate(&prompts, 0, options(slots)), all, "{slots} slots");
    }
    // Each prompt alone.
    for (i, prompt) in prompts.iter().enumerate() {
        let found = generate(std::slice::from_ref(prompt), 4 * i as u64, options(64));
        assert_eq!(found, all[4 * i..4 * i + 4], "prompt {i} alone");
    }
}

#[test]
fn samples_follow_the_distribution_of_the_processors() {
    let checkpoint = Checkpoint::open("qwen3");
    let (weights, mut rollout) =
        (weights(&checkpoint), rollout(&checkpoint, RolloutOptions { slots: 512, tokens_per_call: 1 }));
    let prompt: Vec<u32> = vec![1, 9, 4, 9];
    let (_, logits, _) =
        crate::support::forward(checkpoint.config(), &weights, Compute::F32, std::slice::from_ref(&prompt));
    let vocab = checkpoint.config().vocab_size;
    let logits = &logits[3 * vocab..];
    let off = LogitsProcessors::default();
    let prompts = [prompt.clone()];
    for processors in [
        off,
        LogitsProcessors { top_k: Some(7), ..off },
        LogitsProcessors { repetition_penalty: Some(1.7), top_p: Some(0.8), min_p: Some(0.02), ..off },
    ] {
        let (temperature, draws) = (0.9, 2048);
        let sampling = random(temperature, processors);
        let request = RolloutRequest {
            prompts: &prompts,
            num_generations: draws,
            max_completion_length: 1,
            stop_ids: &[],
            stop: None,
            sampling,
        };
        let completions = rollout.generate(&weights, &request).unwrap();
        let scores = processors.scores(logits, temperature, &prompt.iter().copied().collect());
        let total: f64 = scores.iter().map(|score| score.exp()).sum();
        let probability = |id: usize| scores[id].exp() / total;
        let mut counts = vec![0.0; vocab];
        for completion in &completions {
            let id = completion.ids[0] as usize;
            counts[id] += 1.0;
            let (found, expected) = (f64::from(completion.logps[0]), probability(id).ln());
            assert!((found - expected).abs() < 1e-4, "{processors:?}, token {id}: {found} {expected}");
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
fn completions_and_prompts_of_one_token_match_the_cpu_policy() {
    let checkpoint = Checkpoint::open("llama3");
    let (prompts, sampling) = ([vec![3], vec![2, 8]], Sampling::Greedy);
    for max_completion_length in [1, 3] {
        let request = RolloutRequest {
            prompts: &prompts,
            num_generations: 1,
            max_completion_length,
            stop_ids: &[],
            stop: None,
            sampling,
        };
        let found = rollout(&checkpoint, RolloutOptions { slots: 4, tokens_per_call: 2 })
            .generate(&weights(&checkpoint), &request)
            .unwrap();
        assert_same("llama3", &found, &host(&checkpoint).generate(&request).unwrap());
    }
}

#[test]
fn a_cache_filled_to_its_last_column_matches_the_cpu_policy() {
    let checkpoint = Checkpoint::open("qwen2");
    let (mut host, weights) = (host(&checkpoint), weights(&checkpoint));
    // 16 columns: the last call begins after 12 tokens and writes 4. Slots of finished samples are reused.
    let prompts = [(3..12).collect(), vec![7, 2], vec![1, 9, 4, 20, 21, 22]];
    let request = |stop_ids| RolloutRequest {
        prompts: &prompts,
        num_generations: 5,
        max_completion_length: 8,
        stop_ids,
        stop: None,
        sampling: Sampling::Greedy,
    };
    let mut rollout = rollout(&checkpoint, RolloutOptions { slots: 8, tokens_per_call: 4 });
    let all = rollout.generate(&weights, &request(&[])).unwrap();
    assert_same("qwen2", &all, &host.generate(&request(&[])).unwrap());
    let stop_ids = [all[5].ids[2]];
    let found = rollout.generate(&weights, &request(&stop_ids)).unwrap();
    assert_same("qwen2", &found, &host.generate(&request(&stop_ids)).unwrap());
}

#[test]
fn invalid_requests_are_errors() {
    let checkpoint = Checkpoint::open("qwen2");
    let (weights, mut rollout) = (weights(&checkpoint), rollout(&checkpoint, RolloutOptions::default()));
    let (limit, vocab) = (checkpoint.config().max_position_embeddings, checkpoint.config().vocab_size as u32);
    let mut of = |prompts: &[Vec<u32>], num_generations, max_completion_length, sampling| {
        let request =
            RolloutRequest { prompts, num_generations, max_completion_length, stop_ids: &[], stop: None, sampling };
        rollout.generate(&weights, &request).unwrap_err()
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
    assert!(policy(of(&legal, 1, 1, random(1.0, top_p))).contains("top_p"));
    assert!(policy(of(&legal, 1, 1, random(0.0, LogitsProcessors::default()))).contains("temperature"));
    let unknown = of(&[vec![1, vocab]], 1, 1, Sampling::Greedy);
    assert!(matches!(unknown, Error::Model(models::Error::UnknownToken { id, .. }) if id == vocab));
    let options = RolloutOptions { slots: 0, tokens_per_call: 4 };
    assert!(DeviceRollout::new(runtime(), checkpoint.config(), Compute::F32, options).is_err());
}

#[test]
fn weights_that_are_not_finite_are_an_error() {
    let checkpoint = Checkpoint::open("qwen2");
    let mut tensors = Vec::new();
    weights(&checkpoint).export(&mut tensors).unwrap();
    let norm = tensors.iter_mut().find(|tensor| tensor.name == "model.norm.weight").unwrap();
    norm.data[0] = f32::NAN;
    let weights = DeviceWeights::from_tensors(runtime(), checkpoint.config(), &tensors, Dtype::F32).unwrap();
    let prompts = prompts();
    for sampling in [Sampling::Greedy, random(1.0, LogitsProcessors::default())] {
        let request = RolloutRequest {
            prompts: &prompts,
            num_generations: 2,
            max_completion_length: 9,
            stop_ids: &[],
            stop: None,
            sampling,
        };
        let error = rollout(&checkpoint, RolloutOptions { slots: 8, tokens_per_call: 4 }).generate(&weights, &request);
        assert!(matches!(error, Err(Error::NotFinite { sample: 0, token: 0 })), "{error:?}");
    }
}
