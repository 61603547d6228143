//! The statistics and the load balancing loss of routers match transformers and the CPU policy.

use crate::checkpoint::{self, Checkpoint, Tensors};
use crate::support::{
    assert_close, assert_near, assert_same_gradients, assert_same_scores, both, cross_entropy, gradients, halves,
    on_device, on_host, random, request, to_host, whole,
};
use grpo_core::LossOutput;
use grpo_policy::{
    Completion, LogitsProcessors, Policy, RolloutRequest, RoutedExperts, Sampling, Sequence, SequenceBatch, Turn,
    Weights, token_batch,
};
use grpo_policy_pjrt::decoder::ExpertProducts;
use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions};
use grpo_stablehlo::Save;
use grpo_testkit::margin::assert_below;
use std::num::NonZeroUsize;

const COEF: f64 = 0.5;

fn with_aux_loss(checkpoint: &Checkpoint, save: Save) -> PjrtPolicy {
    on_device(checkpoint, PjrtPolicyOptions { router_aux_loss_coef: COEF, save, ..PjrtPolicyOptions::default() })
}

/// Returns the metrics of routers.
fn of_routers(output: &LossOutput) -> Vec<(String, f64)> {
    let values = output.metrics.values().filter(|(name, _)| name.starts_with("moe/") || *name == "aux_loss");
    values.map(|(name, value)| (name.to_owned(), value)).collect()
}

#[track_caller]
fn assert_same_metrics(what: &str, found: &LossOutput, expected: &LossOutput) {
    let (found, expected) = (of_routers(found), of_routers(expected));
    assert!(found.len() >= 4, "{what}: {found:?}");
    assert_eq!(found.len(), expected.len(), "{what}: {found:?} {expected:?}");
    for ((name, found), (other, expected)) in found.iter().zip(&expected) {
        assert_eq!(name, other, "{what}");
        assert_below(&format!("{what}: {name}"), (found - expected).abs() / expected.abs().max(1.0), 1e-5);
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn loads_and_load_balancing_losses_match_transformers_and_the_cpu_policy() {
    let mut saves = [Save::Carry, Save::Every(1), Save::Everything].into_iter().cycle();
    for name in checkpoint::ROUTERS {
        let checkpoint = Checkpoint::open(name);
        let expected = Tensors::read(&checkpoint.folder.path().join("router.safetensors")).0;
        let (sequences, number) = (checkpoint.completions(), |of: &str| f64::from(expected[of].data[0]));
        let loss = cross_entropy(&sequences);
        let mut policy = with_aux_loss(&checkpoint, saves.next().unwrap());
        let mut host = on_host(&checkpoint).with_router_aux_loss(COEF).unwrap();

        let output = policy.accumulate(&[whole(&sequences)], loss).unwrap();
        let of_tokens = f64::from(checkpoint.expected.0["expected.loss"].data[0]);
        assert_near(name, output.loss, of_tokens + COEF * number("aux_loss"));
        assert_near(name, output.metrics.value("aux_loss").unwrap(), number("aux_loss"));
        assert_same_metrics(name, &output, &host.accumulate(&[whole(&sequences)], loss).unwrap());
        let found = gradients(&mut policy);
        let of_aux_loss = expected.iter().filter_map(|(n, t)| Some((n.strip_prefix("expected.grad.")?, t)));
        let mut compared = 0;
        for (parameter, of_aux_loss) in of_aux_loss.filter(|(p, _)| !checkpoint::has_no_gradient(name, p)) {
            let of_tokens = &checkpoint.expected.0[&format!("expected.grad.{parameter}")].data;
            let sum = of_tokens.iter().zip(&of_aux_loss.data).map(|(a, b)| a + COEF as f32 * b).collect::<Vec<_>>();
            assert_close(&format!("{name}: {parameter}"), &found[parameter].data, &sum, 1e-4);
            compared += 1;
        }
        assert!(compared > 3, "{name}: {compared}");
        let of_one = policy.skip().unwrap().grad_norm;

        let parts = policy.accumulate(&halves(&sequences), loss).unwrap();
        assert_near(name, parts.metrics.value("aux_loss").unwrap(), number("aux_loss.mean"));
        assert_same_metrics(name, &parts, &host.accumulate(&halves(&sequences), loss).unwrap());
        policy.skip().unwrap();

        // The loss and AdamW in one program.
        policy.reset_optimizer(&grpo_policy::OptimizerSettings::default()).unwrap();
        let (at_once, report) = policy.step(&[whole(&sequences)], loss, 1e-3).unwrap();
        assert!(report.applied);
        assert_near(name, report.grad_norm, of_one);
        assert_near(name, at_once.loss, output.loss);
        assert_same_metrics(name, &at_once, &output);
    }
}

#[test]
fn grouped_products_match_transformers_and_dense_products() {
    assert_grouped_products(["qwen3_moe"]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn grouped_products_of_every_checkpoint_match_transformers_and_dense_products() {
    assert_grouped_products(checkpoint::ROUTERS);
}

/// Padding tokens are in the blocks, too.
fn assert_grouped_products(names: impl IntoIterator<Item = &'static str>) {
    let sampling = || random(1.0, LogitsProcessors::default(), 3);
    for name in names {
        let checkpoint = Checkpoint::open(name);
        let sequences = checkpoint.completions();
        let loss = cross_entropy(&sequences);
        let of = |rows: Option<usize>| {
            let expert_products = match rows {
                Some(rows) => ExpertProducts::Grouped { rows: NonZeroUsize::new(rows) },
                None => ExpertProducts::Dense,
            };
            let mut policy =
                on_device(&checkpoint, PjrtPolicyOptions { expert_products, ..PjrtPolicyOptions::default() });
            let output = policy.accumulate(&[whole(&sequences)], loss).unwrap();
            let gradients = gradients(&mut policy);
            policy.skip().unwrap();
            let prompts = [vec![1, 5, 6], vec![9]];
            let completions = policy.generate(&request(&prompts, 2, 12, &[2], sampling())).unwrap();
            (output.loss, gradients, completions)
        };
        let (loss, dense, completions) = of(None);
        for rows in [2, 16] {
            let what = format!("{name}, {rows} rows");
            let (found, gradients, sampled) = of(Some(rows));
            assert_near(&what, found, loss);
            assert_near(&what, found, f64::from(checkpoint.expected.0["expected.loss"].data[0]));
            assert_same_gradients(&what, &gradients, &dense, 1e-5);
            let ids = |completions: &[Completion]| completions.iter().map(|c| c.ids.clone()).collect::<Vec<_>>();
            assert_eq!(ids(&sampled), ids(&completions), "{what}");
        }
    }
}

#[test]
fn packed_rows_and_shared_prompts_count_as_on_the_host() {
    let checkpoint = Checkpoint::open("gpt_oss");
    let prompt = vec![5, 9, 12, 40, 33, 7];
    let sequences = [vec![3, 8, 21], vec![60, 2], vec![17], vec![4; 9]];
    let sequences = sequences.map(|completion| Sequence { prompt: prompt.clone(), completion });
    let loss = cross_entropy(&sequences);
    let mut policy = with_aux_loss(&checkpoint, Save::Carry);
    let mut host = on_host(&checkpoint).with_router_aux_loss(COEF).unwrap();
    let found = policy.accumulate(&[whole(&sequences)], loss).unwrap();
    let expected = host.accumulate(&[whole(&sequences)], loss).unwrap();
    assert_near("loss", found.loss, expected.loss);
    assert_same_metrics("packed", &found, &expected);
}

#[test]
fn a_dense_model_has_no_load_balancing_loss() {
    let checkpoint = Checkpoint::open("qwen3");
    let options = PjrtPolicyOptions { router_aux_loss_coef: COEF, ..PjrtPolicyOptions::default() };
    let (config, weights) = (checkpoint.config(), &checkpoint.weights);
    let loss = grpo_core::LossConfig::default();
    let error = PjrtPolicy::from_weights(crate::support::runtime(), config, weights, loss, options).err().unwrap();
    assert!(error.to_string().contains("a model with a mixture of experts"), "{error}");
}

fn grouped(rows: usize) -> PjrtPolicyOptions {
    let expert_products = ExpertProducts::Grouped { rows: NonZeroUsize::new(rows) };
    PjrtPolicyOptions { expert_products, ..PjrtPolicyOptions::default() }
}

/// Returns all sequences as one micro-batch, with their experts.
fn replayed<'a>(sequences: &'a [Sequence], routed_experts: &'a [RoutedExperts]) -> SequenceBatch<'a> {
    SequenceBatch { sequences, tokens: token_batch(sequences).unwrap(), routed_experts }
}

/// Returns the experts of sequences in transformers.
fn of_transformers(expected: &std::collections::BTreeMap<String, grpo_models::NamedTensor>) -> Vec<RoutedExperts> {
    let experts = &expected["replayed.experts"];
    let width = experts.shape[2] * experts.shape[3];
    let rows = experts.data.chunks_exact(experts.shape[1] * width);
    rows.map(|row| RoutedExperts { width, ids: row.iter().map(|id| *id as u16).collect() }).collect()
}

#[test]
fn replayed_experts_match_transformers_and_the_cpu_policy() {
    assert_replayed_experts(["gpt_oss"], &[grouped(2)]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn replayed_experts_of_every_checkpoint_match_transformers_and_the_cpu_policy() {
    assert_replayed_experts(checkpoint::ROUTERS, &[PjrtPolicyOptions::default(), grouped(2)]);
}

fn assert_replayed_experts(names: impl IntoIterator<Item = &'static str>, all: &[PjrtPolicyOptions]) {
    for name in names {
        let checkpoint = Checkpoint::open(name);
        let expected = Tensors::read(&checkpoint.folder.path().join("router.safetensors")).0;
        let (sequences, routed) = (checkpoint.completions(), of_transformers(&expected));
        let loss = cross_entropy(&sequences);
        let mut host = on_host(&checkpoint).with_router_aux_loss(COEF).unwrap();
        for options in all.iter().cloned() {
            let what = format!("{name}, {:?}", options.expert_products);
            let mut plain = on_device(&checkpoint, options.clone());
            let output = plain.accumulate(&[replayed(&sequences, &routed)], loss).unwrap();
            assert_near(&what, output.loss, f64::from(expected["replayed.loss"].data[0]));
            let found = gradients(&mut plain);
            let of_torch = expected.iter().filter_map(|(n, t)| Some((n.strip_prefix("replayed.grad.")?, t)));
            let mut compared = 0;
            for (parameter, expected) in of_torch.filter(|(p, _)| !checkpoint::has_no_gradient(name, p)) {
                assert_close(&format!("{what}: {parameter}"), &found[parameter].data, &expected.data, 1e-4);
                compared += 1;
            }
            assert!(compared > 3, "{what}: {compared}");

            // With the load balancing loss, and for tokens of which some have no recorded experts.
            let mut partly = routed.clone();
            let width = partly[0].width;
            partly[0].ids.truncate(2 * width);
            let mut device = on_device(&checkpoint, PjrtPolicyOptions { router_aux_loss_coef: COEF, ..options });
            let batch = || replayed(&sequences, &partly);
            let [scores, of_host] =
                both(&mut device, &mut host, |policy| policy.score(Weights::Policy, &[batch()]).unwrap());
            assert_same_scores(&what, &scores, &of_host);
            let [output, of_host] = both(&mut device, &mut host, |policy| policy.accumulate(&[batch()], loss).unwrap());
            assert_near(&what, output.loss, of_host.loss);
            let mismatch = output.metrics.value("moe/routing_mismatch_tokens").unwrap();
            // With all experts, or only one, there is no other choice.
            assert_eq!(mismatch == 0.0, ["qwen3_moe_fused", "qwen3_moe_one"].contains(&name), "{what}: {mismatch}");
            assert_same_metrics(&what, &output, &of_host);
            let found = gradients(&mut device);
            assert_same_gradients(&what, &found, &crate::support::host_gradients(&host), to_host(name));
            both(&mut device, &mut host, |policy| policy.skip().unwrap());

            // The loss and AdamW in one program.
            device.reset_optimizer(&grpo_policy::OptimizerSettings::default()).unwrap();
            let (at_once, report) = device.step(&[batch()], loss, 1e-3).unwrap();
            assert!(report.applied, "{what}");
            assert_same_metrics(&what, &at_once, &of_host);
        }
    }
}

#[test]
fn a_reference_policy_chooses_its_own_experts() {
    let checkpoint = Checkpoint::open("qwen3_moe");
    let (mut policy, sequences) = (on_device(&checkpoint, PjrtPolicyOptions::default()), checkpoint.completions());
    policy.freeze_ref_policy().unwrap();
    let expected = Tensors::read(&checkpoint.folder.path().join("router.safetensors")).0;
    let routed = of_transformers(&expected);
    let mut score = |of, routed: &[RoutedExperts]| policy.score(of, &[replayed(&sequences, routed)]).unwrap().logp;
    assert_eq!(score(Weights::RefPolicy, &routed), score(Weights::RefPolicy, &[]));
    assert_ne!(score(Weights::Policy, &routed), score(Weights::Policy, &[]));
}

/// Returns the completions of two turns of conversations.
fn two_turns(policy: &mut dyn Policy, prompts: &[Vec<u32>]) -> Vec<Completion> {
    let (mut conversations, mut all) = (prompts.to_vec(), vec![]);
    for number in 0..2 {
        let streams: Vec<u64> = (0..prompts.len() as u64).map(|index| (number << 32) + index).collect();
        let limits = vec![6; prompts.len()];
        let turn = Some(Turn { streams: &streams, limits: &limits, finished: None });
        let of_turn = request(&conversations, 1, 60, &[], Sampling::Greedy);
        let of_turn = RolloutRequest { turn, return_routed_experts: true, ..of_turn };
        let completions = policy.generate(&of_turn).unwrap();
        for (conversation, completion) in conversations.iter_mut().zip(&completions) {
            // More tokens than one call of the extension processes.
            let between = [4, 9, 11].iter().cycle().take(20 + conversation.len());
            conversation.extend(completion.ids.iter().chain(between));
        }
        all.extend(completions);
    }
    all
}

#[test]
fn experts_of_a_rollout_are_those_of_the_cpu_policy() {
    assert_routed_experts(["qwen3_moe"]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn experts_of_a_rollout_of_other_checkpoints_are_those_of_the_cpu_policy() {
    assert_routed_experts(["qwen3_moe_one", "qwen3_moe_idle", "gpt_oss"]);
}

/// Several calls of the decode program, slots that are used again, and conversations whose KV cache continues.
fn assert_routed_experts(names: impl IntoIterator<Item = &'static str>) {
    let prompts = [vec![5, 9, 12, 40], vec![33, 7], vec![1, 20, 21, 22, 23, 24]];
    for name in names {
        let checkpoint = Checkpoint::open(name);
        let rollout = grpo_policy_pjrt::RolloutOptions { slots: 4, tokens_per_call: 4 };
        let mut device = on_device(&checkpoint, PjrtPolicyOptions { rollout, ..PjrtPolicyOptions::default() });
        let mut host = on_host(&checkpoint);
        let of_request = request(&prompts, 2, 10, &[], Sampling::Greedy);
        let of_request = RolloutRequest { return_routed_experts: true, ..of_request };
        let single = both(&mut device, &mut host, |policy| policy.generate(&of_request).unwrap());
        let conversations = both(&mut device, &mut host, |policy| two_turns(policy, &prompts));
        for [found, expected] in [&single, &conversations] {
            for (found, expected) in found.iter().zip(expected) {
                assert_eq!(found.ids, expected.ids, "{name}");
                assert_eq!(found.routed_experts, expected.routed_experts, "{name}");
            }
        }
        let sequences = single[0]
            .iter()
            .enumerate()
            .map(|(i, completion)| Sequence { prompt: prompts[i / 2].clone(), completion: completion.ids.clone() });
        let sequences: Vec<Sequence> = sequences.collect();
        let routed: Vec<RoutedExperts> = single[0].iter().map(|completion| completion.routed_experts.clone()).collect();
        let output = device.accumulate(&[replayed(&sequences, &routed)], cross_entropy(&sequences)).unwrap();
        assert_eq!(output.metrics.value("moe/routing_mismatch"), Some(0.0), "{name}");
    }
}

#[test]
fn invalid_experts_are_errors() {
    let checkpoint = Checkpoint::open("qwen3_moe");
    let (mut policy, sequences) = (on_device(&checkpoint, PjrtPolicyOptions::default()), checkpoint.completions());
    let routed = vec![RoutedExperts { width: 4, ids: vec![0, 0, 1, 2] }; sequences.len()];
    let error = policy.score(Weights::Policy, &[replayed(&sequences, &routed)]).unwrap_err().to_string();
    assert!(error.contains("different experts below 5 for each token"), "{error}");
    let dense = Checkpoint::open("qwen3");
    let mut policy = on_device(&dense, PjrtPolicyOptions::default());
    let prompts = [vec![1, 2]];
    let of_request = request(&prompts, 1, 4, &[], Sampling::Greedy);
    let error = policy.generate(&RolloutRequest { return_routed_experts: true, ..of_request }).unwrap_err().to_string();
    assert!(error.contains("a model with a mixture of experts"), "{error}");
}
