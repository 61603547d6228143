//! The statistics and the load balancing loss of routers match transformers.

use crate::checkpoint::{self, Checkpoint, Tensors};
use crate::support::{assert_close, policy, policy_loss};
use grpo_core::LossOutput;
use grpo_models::{Dtype, TrainingMemory};
use grpo_policy::{
    Completion, Error, Finished, LogitsProcessors, Policy, RolloutRequest, RoutedExperts, RouterStatistics, Sampling,
    Sequence, SequenceBatch, StepLoss, Turn, Weights, token_batch,
};
use grpo_policy_cpu::{CpuPolicy, StepMemory};
use grpo_rng::Purpose;
use std::collections::BTreeMap;
use std::sync::Mutex;

const COEF: f64 = 0.5;

fn batches(sequences: &[Sequence], size: usize) -> Vec<SequenceBatch<'_>> {
    let batch = |sequences| SequenceBatch { routed_experts: &[], sequences, tokens: token_batch(sequences).unwrap() };
    sequences.chunks(size).map(batch).collect()
}

fn accumulate(policy: &mut CpuPolicy, sequences: &[Sequence], size: usize) -> LossOutput {
    let tokens = sequences.iter().map(|sequence| sequence.completion.len()).sum();
    policy.accumulate(&batches(sequences, size), StepLoss::CrossEntropy { tokens }).unwrap()
}

/// Returns the gradients by name, and zeroes them.
fn take_gradients(policy: &mut CpuPolicy) -> BTreeMap<String, Vec<f32>> {
    let mut gradients = Vec::new();
    policy.model().export_values(policy.gradients().parameters(), &mut gradients).unwrap();
    policy.skip().unwrap();
    gradients.into_iter().map(|gradient| (gradient.name, gradient.data)).collect()
}

#[track_caller]
fn assert_metric(what: &str, output: &LossOutput, name: &str, expected: f64) {
    let found = output.metrics.value(name).unwrap();
    assert!((found - expected).abs() < 1e-5 * expected.abs().max(1.0), "{what}: {name}: {found} {expected}");
}

#[test]
fn loads_and_load_balancing_losses_match_transformers() {
    for name in checkpoint::ROUTERS {
        let checkpoint = Checkpoint::open(name);
        let expected = Tensors::read(&checkpoint.folder.path().join("router.safetensors")).0;
        let (sequences, number) = (checkpoint.completions(), |of: &str| f64::from(expected[of].data[0]));
        let mut policy = policy(&checkpoint).with_router_aux_loss(COEF).unwrap();

        let output = accumulate(&mut policy, &sequences, sequences.len());
        let of_tokens = f64::from(checkpoint.expected.0["expected.loss"].data[0]);
        let loss = of_tokens + COEF * number("aux_loss");
        assert!((output.loss - loss).abs() < 1e-5 * loss, "{name}: {} {loss}", output.loss);
        assert_metric(name, &output, "aux_loss", number("aux_loss"));
        let mut metrics = grpo_core::Metrics::default();
        let tokens = &expected["tokens"];
        RouterStatistics::new(tokens.shape[1], tokens.data.iter().map(|x| f64::from(*x)).collect())
            .record(&mut metrics);
        assert!(metrics.values().count() >= 3);
        metrics.values().for_each(|(metric, value)| assert_metric(name, &output, metric, value));

        let found = take_gradients(&mut policy);
        let of_aux_loss = expected.iter().filter_map(|(n, t)| Some((n.strip_prefix("expected.grad.")?, t)));
        let mut compared = 0;
        for (parameter, of_aux_loss) in of_aux_loss.filter(|(p, _)| !checkpoint::has_no_gradient(name, p)) {
            let of_tokens = &checkpoint.expected.0[&format!("expected.grad.{parameter}")].data;
            let sum = of_tokens.iter().zip(&of_aux_loss.data).map(|(a, b)| a + COEF as f32 * b).collect::<Vec<_>>();
            assert_close(&format!("{name}: {parameter}"), &found[parameter], &sum);
            compared += 1;
        }
        assert!(compared > 3, "{name}: {compared}");

        // In micro-batches of one sequence.
        let output = accumulate(&mut policy, &sequences, 1);
        assert_metric(name, &output, "aux_loss", number("aux_loss.mean"));
        let loss = of_tokens + COEF * number("aux_loss.mean");
        assert!((output.loss - loss).abs() < 1e-5 * loss, "{name}: {} {loss}", output.loss);
        metrics.values().for_each(|(metric, value)| assert_metric(name, &output, metric, value));
    }
}

#[test]
fn extreme_loads_are_visible() {
    let of = |name: &str| {
        let checkpoint = Checkpoint::open(name);
        accumulate(&mut policy(&checkpoint), &checkpoint.completions(), 1)
    };
    // Each of two layers sends all tokens to one of four experts.
    let idle = of("qwen3_moe_idle");
    [("load_max", 4.0), ("load_min", 0.0), ("max_vio", 3.0), ("load_entropy", 0.0)]
        .into_iter()
        .for_each(|(metric, value)| assert_metric("idle", &idle, &format!("moe/{metric}"), value));
    // Every expert gets every token.
    let all = of("qwen3_moe_fused");
    [("load_max", 1.0), ("load_min", 1.0), ("max_vio", 0.0), ("load_entropy", 1.0)]
        .into_iter()
        .for_each(|(metric, value)| assert_metric("all", &all, &format!("moe/{metric}"), value));
    assert_metric("one", &of("qwen3_moe_one"), "moe/load_max", 1.0);
    assert_eq!(idle.metrics.value("aux_loss"), None, "there is no such loss by default");
}

#[test]
fn a_shared_prompt_counts_once_for_each_completion() {
    let checkpoint = Checkpoint::open("qwen3_moe");
    let prompt = vec![5, 9, 12, 40, 33, 7];
    let sequences = [vec![3, 8, 21], vec![60, 2], vec![17]];
    let sequences = sequences.map(|completion| Sequence { prompt: prompt.clone(), completion });
    let mut policy = policy(&checkpoint).with_router_aux_loss(COEF).unwrap();
    let [together, apart] = [3, 1].map(|size| accumulate(&mut policy, &sequences, size));
    let loads = |output: &LossOutput| {
        let values = output.metrics.values().filter(|(name, _)| name.starts_with("moe/"));
        values.map(|(name, value)| (name.to_owned(), value)).collect::<Vec<_>>()
    };
    assert_eq!(loads(&together).len(), 4);
    assert_eq!(loads(&together), loads(&apart));
    // The third sequence has only its prompt, so the prompt alone determines its loss.
    let alone = accumulate(&mut policy, &sequences[2..], 1);
    let twice = accumulate(&mut policy, &[sequences[2].clone(), sequences[2].clone()], 2);
    assert_metric("twice", &twice, "aux_loss", alone.metrics.value("aux_loss").unwrap());
}

#[test]
fn invalid_coefficients_are_errors() {
    let moe = Checkpoint::open("qwen3_moe");
    for coef in [-0.1, f64::NAN, f64::INFINITY] {
        let error = policy(&moe).with_router_aux_loss(coef).err().unwrap();
        assert!(matches!(error, Error::Argument { operation: "router_aux_loss_coef", .. }), "{error}");
    }
    let dense = Checkpoint::open("qwen3");
    let error = policy(&dense).with_router_aux_loss(0.1).err().unwrap().to_string();
    assert!(error.contains("a model with a mixture of experts"), "{error}");
    assert!(policy(&dense).with_router_aux_loss(0.0).is_ok());
}

#[test]
fn replayed_experts_match_transformers() {
    for name in checkpoint::ROUTERS {
        let checkpoint = Checkpoint::open(name);
        let expected = Tensors::read(&checkpoint.folder.path().join("router.safetensors")).0;
        let (sequences, experts) = (checkpoint.completions(), &expected["replayed.experts"]);
        let width = experts.shape[2] * experts.shape[3];
        let rows = experts.data.chunks_exact(experts.shape[1] * width);
        let routed = rows.map(|row| RoutedExperts { width, ids: row.iter().map(|id| *id as u16).collect() });
        let routed: Vec<RoutedExperts> = routed.collect();
        let tokens = token_batch(&sequences).unwrap();
        let count = tokens.tokens();
        let batch = [SequenceBatch { sequences: &sequences, tokens, routed_experts: &routed }];
        let mut policy = policy(&checkpoint);
        let output = policy.accumulate(&batch, StepLoss::CrossEntropy { tokens: count }).unwrap();
        let loss = f64::from(expected["replayed.loss"].data[0]);
        assert!((output.loss - loss).abs() < 1e-5 * loss, "{name}: {} {loss}", output.loss);
        // With all experts, or only one, there is no other choice.
        let differing = output.metrics.value("moe/routing_mismatch").unwrap();
        let no_choice = ["qwen3_moe_fused", "qwen3_moe_one"].contains(&name);
        assert_eq!(differing == 0.0, no_choice, "{name}: {differing}");
        let found = take_gradients(&mut policy);
        let of_torch = expected.iter().filter_map(|(n, t)| Some((n.strip_prefix("replayed.grad.")?, t)));
        let mut compared = 0;
        for (parameter, expected) in of_torch.filter(|(p, _)| !checkpoint::has_no_gradient(name, p)) {
            assert_close(&format!("{name}: {parameter}"), &found[parameter], &expected.data);
            compared += 1;
        }
        assert!(compared > 3, "{name}: {compared}");
        // Scores are those of the replayed experts, too.
        let logp = policy.score(Weights::Policy, &batch).unwrap().logp;
        let mean = -logp.iter().map(|logp| f64::from(*logp)).sum::<f64>() / count as f64;
        assert!((mean - loss).abs() < 1e-5 * loss, "{name}: {mean} {loss}");
    }
}

const MIXTURES: [&str; 6] = ["qwen3_moe", "qwen3_moe_one", "qwen3_moe_idle", "qwen2_moe", "glm4_moe", "gpt_oss"];

fn request<'a>(prompts: &'a [Vec<u32>], turn: Option<Turn<'a>>) -> RolloutRequest<'a> {
    let processors = LogitsProcessors::default();
    RolloutRequest {
        prompts,
        num_generations: 2,
        max_completion_length: 6,
        stop_ids: &[2],
        stop: None,
        sampling: Sampling::Random {
            temperature: 1.0,
            processors,
            seed: 3,
            purpose: Purpose::Rollout,
            step: 0,
            first: 0,
        },
        return_sampling_mask: false,
        return_routed_experts: true,
        turn,
    }
}

/// Returns the completions of a request as sequences with their experts.
fn sequences(prompts: &[Vec<u32>], completions: &[Completion]) -> (Vec<Sequence>, Vec<RoutedExperts>) {
    let per_prompt = completions.len() / prompts.len();
    let pairs = completions.iter().enumerate().map(|(i, completion)| {
        let prompt = prompts[i / per_prompt].clone();
        (Sequence { prompt, completion: completion.ids.clone() }, completion.routed_experts.clone())
    });
    pairs.unzip()
}

#[test]
fn experts_of_a_rollout_are_those_of_training_with_the_same_weights() {
    let prompts = [vec![5, 9, 12, 40], vec![33, 7]];
    for name in MIXTURES {
        let checkpoint = Checkpoint::open(name);
        let mut policy = policy(&checkpoint);
        let completions = policy.generate(&request(&prompts, None)).unwrap();
        let (sequences, routed) = sequences(&prompts, &completions);
        let experts = checkpoint.config().experts.as_ref().unwrap();
        for (sequence, routed) in sequences.iter().zip(&routed) {
            assert_eq!(routed.width, experts.num_experts_per_tok * checkpoint.config().routers(), "{name}");
            let tokens = sequence.prompt.len() + sequence.completion.len() - 1;
            assert_eq!(routed.ids.len(), tokens * routed.width, "{name}");
        }
        let tokens = token_batch(&sequences).unwrap().with_advantages(vec![1.0; sequences.len()]).unwrap();
        let chosen = [SequenceBatch { sequences: &sequences, tokens: tokens.clone(), routed_experts: &[] }];
        let replayed = [SequenceBatch { sequences: &sequences, tokens, routed_experts: &routed }];
        let [chosen, replayed] = [chosen, replayed].map(|batch| {
            let output = policy.accumulate(&batch, StepLoss::Grpo).unwrap();
            policy.skip().unwrap();
            output
        });
        assert_eq!(chosen.scores.logp, replayed.scores.logp, "{name}");
        assert_eq!(chosen.metrics.value("moe/routing_mismatch"), None, "{name}");
        assert_eq!(replayed.metrics.value("moe/routing_mismatch"), Some(0.0), "{name}");
        assert_eq!(replayed.metrics.value("moe/routing_mismatch_tokens"), Some(0.0), "{name}");
    }
}

#[test]
fn scores_and_updates_with_other_weights_replay_the_same_experts() {
    let prompts = [vec![5, 9, 12, 40], vec![33, 7]];
    for name in ["qwen3_moe", "gpt_oss"] {
        let checkpoint = Checkpoint::open(name);
        let mut policy = policy(&checkpoint);
        let completions = policy.generate(&request(&prompts, None)).unwrap();
        let (sequences, routed) = sequences(&prompts, &completions);
        let tokens = token_batch(&sequences).unwrap().with_advantages(vec![1.0; sequences.len()]).unwrap();
        let batch = |routed_experts| [SequenceBatch { sequences: &sequences, tokens: tokens.clone(), routed_experts }];
        policy.accumulate(&batch(&[]), StepLoss::CrossEntropy { tokens: tokens.tokens() }).unwrap();
        policy.apply(0.05).unwrap();
        let scores = policy.score(Weights::Policy, &batch(&routed)).unwrap();
        let output = policy.accumulate(&batch(&routed), StepLoss::Grpo).unwrap();
        assert_eq!(output.scores.logp, scores.logp, "{name}: the ratio is not 1");
        let mismatch = |name: &str| output.metrics.value(&format!("moe/routing_mismatch{name}")).unwrap();
        let (of_choices, of_tokens) = (mismatch(""), mismatch("_tokens"));
        assert!(0.0 < of_choices && of_choices <= of_tokens && of_tokens <= 1.0, "{name}: {of_choices} {of_tokens}");
        assert_ne!(policy.score(Weights::Policy, &batch(&[])).unwrap().logp, scores.logp, "{name}");
        // In micro-batches of one sequence, prompts are not shared.
        let apart = |i: usize| policy_batch(&sequences[i..=i], &routed[i..=i]);
        let apart: Vec<_> = (0..sequences.len()).map(apart).collect();
        assert_eq!(policy.score(Weights::Policy, &apart).unwrap().logp, scores.logp, "{name}");
    }
}

fn policy_batch<'a>(sequences: &'a [Sequence], routed_experts: &'a [RoutedExperts]) -> SequenceBatch<'a> {
    SequenceBatch { sequences, tokens: token_batch(sequences).unwrap(), routed_experts }
}

#[test]
fn equal_prompts_with_other_experts_are_computed_apart() {
    let checkpoint = Checkpoint::open("qwen3_moe");
    let mut policy = policy(&checkpoint);
    let sequence = Sequence { prompt: vec![5, 9, 12, 40], completion: vec![33, 7] };
    let routed = [[0, 1, 0, 1], [2, 3, 4, 0]].map(|row| RoutedExperts { width: 4, ids: row.repeat(5) });
    let sequences = [sequence.clone(), sequence];
    let together = policy.score(Weights::Policy, &[policy_batch(&sequences, &routed)]).unwrap().logp;
    let apart = |i: usize| policy_batch(&sequences[i..=i], &routed[i..=i]);
    assert_eq!(policy.score(Weights::Policy, &[apart(0), apart(1)]).unwrap().logp, together);
    assert_ne!(together[..2], together[2..]);
}

#[test]
fn a_reference_policy_has_its_own_routing() {
    let checkpoint = Checkpoint::open("qwen3_moe");
    let (mut policy, sequences) = (policy(&checkpoint), checkpoint.completions());
    policy.freeze_ref_policy().unwrap();
    let of_sequence = |sequence: &Sequence| {
        let tokens = sequence.prompt.len() + sequence.completion.len() - 1;
        RoutedExperts { width: 4, ids: [0, 1, 0, 1].repeat(tokens) }
    };
    let routed: Vec<RoutedExperts> = sequences.iter().map(of_sequence).collect();
    let [free, replayed] = [&[][..], &routed].map(|routed| [policy_batch(&sequences, routed)]);
    let mut score = |of: Weights, batch: &[SequenceBatch<'_>]| policy.score(of, batch).unwrap().logp;
    assert_eq!(score(Weights::RefPolicy, &replayed), score(Weights::RefPolicy, &free));
    assert_ne!(score(Weights::Policy, &replayed), score(Weights::Policy, &free));
}

/// Keeps the completions that are reported while others are sampled.
#[derive(Debug, Default)]
struct Reported(Mutex<BTreeMap<usize, Completion>>);

impl Finished for Reported {
    fn finished(&self, index: usize, completion: &Completion) {
        self.0.lock().unwrap().insert(index, completion.clone());
    }
}

#[test]
fn reported_turns_have_their_experts() {
    let prompts = [vec![5, 9, 12, 40], vec![33, 7]];
    let mut policy = policy(&Checkpoint::open("qwen3_moe"));
    let (reported, limits) = (Reported::default(), [6, 1, 4, 3]);
    let turn = Some(Turn { streams: &[0, 1, 2, 3], limits: &limits, finished: Some(&reported) });
    let completions = policy.generate(&request(&prompts, turn)).unwrap();
    assert!(completions.iter().all(|completion| !completion.routed_experts.ids.is_empty()));
    assert_eq!(reported.0.into_inner().unwrap().into_values().collect::<Vec<_>>(), completions);
}

#[test]
fn memory_tables_count_recorded_experts() {
    let config = Checkpoint::open("qwen3_moe").config().clone();
    let step = StepMemory {
        prompt: 10,
        completion: 20,
        samples: 8,
        per_prompt: 4,
        batch: 8,
        micro_batch: 4,
        products: grpo_core::Dtype::F32,
        head_adapter: false,
        records_experts: true,
    };
    let weights = TrainingMemory::full(&config, Dtype::F32);
    let rows = |step: StepMemory| step.table(&config, &weights, &policy_loss()).unwrap().rows().to_vec();
    // Two layers, two experts per token, 16 bits, twice.
    let row = ("recorded experts (16 bits)".to_owned(), 2 * 8 * 30 * 2 * 2 * 2);
    assert!(rows(step).contains(&row), "{:?}", rows(step));
    assert!(rows(StepMemory { records_experts: false, ..step }).iter().all(|(name, _)| *name != row.0));
}

#[test]
fn later_turns_have_the_experts_of_the_whole_conversation() {
    let prompts = [vec![5, 9, 12, 40], vec![33, 7]];
    let (streams, limits) = ([0, 1, 2, 3], [6, 5, 4, 3]);
    let turn = Some(Turn { streams: &streams, limits: &limits, finished: None });
    for name in ["qwen3_moe", "gpt_oss"] {
        let checkpoint = Checkpoint::open(name);
        let mut policy = policy(&checkpoint);
        let first = policy.generate(&request(&prompts, turn)).unwrap();
        let longer = |(i, completion): (usize, &Completion)| [&prompts[i / 2][..], &completion.ids, &[11, 8]].concat();
        let longer: Vec<Vec<u32>> = first.iter().enumerate().map(longer).collect();
        let second = RolloutRequest { num_generations: 1, ..request(&longer, turn) };
        let continued = policy.generate(&second).unwrap();
        // A score drops the caches of the first turn, so these prompts are new.
        let (sequences, _) = sequences(&prompts, &first);
        let tokens = token_batch(&sequences).unwrap();
        let batch = [SequenceBatch { sequences: &sequences, tokens, routed_experts: &[] }];
        policy.score(Weights::Policy, &batch).unwrap();
        assert_eq!(continued, policy.generate(&second).unwrap(), "{name}");
        for ((prompt, completion), first) in longer.iter().zip(&continued).zip(&first) {
            let routed = &completion.routed_experts;
            assert_eq!(routed.ids.len(), (prompt.len() + completion.ids.len() - 1) * routed.width);
            assert_eq!(routed.ids[..first.routed_experts.ids.len()], first.routed_experts.ids, "{name}");
        }
    }
}

#[test]
fn experts_that_do_not_fit_are_errors() {
    let checkpoint = Checkpoint::open("qwen3_moe");
    let (mut policy, sequences) = (policy(&checkpoint), checkpoint.completions());
    let mut score = |routed_experts: &[RoutedExperts]| {
        let tokens = token_batch(&sequences).unwrap();
        policy.score(Weights::Policy, &[SequenceBatch { sequences: &sequences, tokens, routed_experts }])
    };
    let of = |width: usize, ids: Vec<u16>| vec![RoutedExperts { width, ids }; 2];
    // Tokens without recorded experts go where the router sends them.
    assert_eq!(score(&of(4, vec![])).unwrap(), score(&[]).unwrap());
    for (routed, words) in [
        (of(3, vec![0; 90]), "4 recorded experts per token"),
        (of(4, vec![]).split_off(1), "the recorded experts of 2 sequences, or none, got 1"),
        ([of(4, vec![]), of(4, vec![])].concat(), "of 2 sequences, or none, got 4"),
        (of(4, vec![0, 5, 0, 1]), "different experts below 5"),
        (of(4, vec![1, 1, 0, 1]), "different experts below 5"),
    ] {
        let error = score(&routed).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    let dense = Checkpoint::open("qwen3");
    let error = crate::support::policy(&dense).generate(&request(&[vec![5]], None)).unwrap_err().to_string();
    assert!(error.contains("a model with a mixture of experts"), "{error}");
}
