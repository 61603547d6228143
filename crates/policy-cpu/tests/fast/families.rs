//! Every model family: logits, gradients and one optimizer step match transformers and torch.

use crate::checkpoint::{self, Checkpoint, Settings, Tensors};
use crate::ppo_of_torch::Ppo;
use crate::support::{accumulate, assert_close, logits, policy, policy_loss};
use burn::tensor::Device;
use grpo_core::LossConfig;
use grpo_models::NamedTensor;
use grpo_policy::{
    OptimizerSettings, Policy, PolicyState, SequenceBatch, StateGroup, TensorSource, Weights, export_all, token_batch,
};
use grpo_policy_cpu::decoder::Decoder;
use grpo_policy_cpu::{CpuPolicy, PolicyLoss};

#[test]
fn logits_match_transformers_packed_alone_and_padded() {
    for name in checkpoint::ALL.into_iter().chain(checkpoint::GATED_DELTA_NETS) {
        let checkpoint = Checkpoint::open(name);
        let decoder = Decoder::from_weights(checkpoint.config(), &checkpoint.weights, &Device::flex()).unwrap();
        let sequences = checkpoint.sequences();
        let vocab = checkpoint.config().vocab_size;
        let packed = logits(&decoder, &sequences);
        let longest = sequences.iter().map(Vec::len).max().unwrap();
        let mut rest = &packed[..];
        for (i, sequence) in sequences.iter().enumerate() {
            let expected = checkpoint.logits(i, sequence.len());
            let of_sequence;
            (of_sequence, rest) = rest.split_at(sequence.len() * vocab);
            assert_close(&format!("{name}, sequence {i}"), of_sequence, expected);
            assert_close(&format!("{name}, sequence {i} alone"), &logits(&decoder, &[sequence]), expected);
            // Padding follows the sequence, so causal attention does not see it.
            let padded = [&sequence[..], &vec![0; longest - sequence.len()]].concat();
            let found = &logits(&decoder, &[padded])[..expected.len()];
            assert_close(&format!("{name}, sequence {i} padded"), found, expected);
        }
        assert!(rest.is_empty());
    }
}

#[test]
fn logits_with_a_kv_cache_match_transformers() {
    for name in checkpoint::ALL.into_iter().chain(checkpoint::GATED_DELTA_NETS) {
        let checkpoint = Checkpoint::open(name);
        let (sequences, vocab) = (checkpoint.sequences(), checkpoint.config().vocab_size);
        let sequences: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).collect();
        let mut positions = 0;
        let compare = |i: usize, position: usize, found: &[f32]| {
            let expected = &checkpoint.logits(i, sequences[i].len())[position * vocab..(position + 1) * vocab];
            assert_close(&format!("{name}, sequence {i}, position {position}"), found, expected);
            positions += 1;
        };
        policy(&checkpoint).cached_logits(&sequences, compare).unwrap();
        assert_eq!(positions, sequences.concat().len());
    }
}

#[test]
fn gradients_of_every_parameter_match_torch() {
    for name in checkpoint::ALL.into_iter().chain(checkpoint::GATED_DELTA_NETS) {
        let checkpoint = Checkpoint::open(name);
        let (loss, gradients) = accumulate(&mut policy(&checkpoint), &checkpoint);
        let expected = f64::from(checkpoint.expected.0["expected.loss"].data[0]);
        assert!((loss - expected).abs() < 1e-5 * expected, "{name}: {loss} {expected}");
        let of_torch: Vec<_> =
            checkpoint.expected.0.iter().filter_map(|(n, t)| Some((n.strip_prefix("expected.grad.")?, t))).collect();
        assert_eq!(gradients.len(), of_torch.len(), "{name}");
        for (parameter, expected) in of_torch {
            let found = &gradients[parameter];
            assert_eq!(found.shape, expected.shape, "{name}: {parameter}");
            if checkpoint::has_no_gradient(name, parameter) {
                let largest = found.data.iter().chain(&expected.data).fold(0f32, |m, g| m.max(g.abs()));
                assert!(largest < 1e-6, "{name}: {parameter}: {largest}");
                continue;
            }
            assert_close(&format!("{name}: {parameter}"), &found.data, &expected.data);
        }
    }
}

#[test]
fn an_optimizer_step_matches_torch() {
    let mut steps = 0;
    for name in checkpoint::ALL.into_iter().chain(checkpoint::GATED_DELTA_NETS) {
        let checkpoint = Checkpoint::open(name);
        let path = checkpoint.folder.path().join("adamw.safetensors");
        if !path.exists() {
            continue;
        }
        steps += 1;
        let settings = Settings::read(&path);
        let (mut policy, adamw) = (policy(&checkpoint), settings.adamw());
        policy.reset_optimizer(&adamw).unwrap();
        accumulate(&mut policy, &checkpoint);
        let report = policy.apply(settings.number("lr")).unwrap();
        assert!(report.grad_norm > 2.0 * adamw.max_grad_norm, "{name}: the gradient is not clipped");

        let expected = Tensors::read(&path).0;
        let mut found = Vec::new();
        policy.model().export(&mut found).unwrap();
        let (constant, found): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|tensor| checkpoint::is_constant(&tensor.name));
        for tensor in constant {
            assert_eq!(tensor.data, checkpoint.weights.tensor(&tensor.name).unwrap().to_vec(), "{name}");
        }
        assert_eq!(found.len(), expected.len(), "{name}");
        for NamedTensor { name: parameter, shape, data } in found {
            let (expected, before) = (&expected[&parameter], checkpoint.weights.tensor(&parameter).unwrap().to_vec());
            assert_eq!(shape, expected.shape, "{name}: {parameter}");
            // Compare updates, not weights.
            let step = |after: &[f32]| after.iter().zip(&before).map(|(a, b)| a - b).collect::<Vec<_>>();
            let (found, expected) = (step(&data), step(&expected.data));
            let largest = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
            let off = found.iter().zip(&expected).map(|(f, e)| (f - e).abs()).fold(0.0, f32::max);
            // Without a gradient, weights decay.
            let least = if checkpoint::has_no_gradient(name, &parameter) { 1e-5 } else { 1e-3 };
            assert!(largest > least && off <= 2e-4 * largest, "{name}: {parameter}: off by {off} of {largest}");
        }
    }
    assert_eq!(steps, 37);
}

#[test]
fn frozen_routers_are_not_trained() {
    for name in ["qwen3_moe", "gpt_oss"] {
        let checkpoint = Checkpoint::open(name);
        let is_router = |parameter: &str| parameter.contains("mlp.gate.") || parameter.contains("mlp.router.");
        let mut policy = policy(&checkpoint).with_frozen_routers().unwrap();
        let (_, gradients) = accumulate(&mut policy, &checkpoint);
        let trained = checkpoint.config().parameters().into_iter().filter(|parameter| !is_router(&parameter.name));
        assert_eq!(gradients.len(), trained.count(), "{name}");
        assert!(!gradients.keys().any(|parameter| is_router(parameter)), "{name}");
        policy.apply(0.01).unwrap();
        let mut after = Vec::new();
        policy.model().export(&mut after).unwrap();
        for NamedTensor { name: parameter, data, .. } in after {
            let is_same = data == checkpoint.weights.tensor(&parameter).unwrap().to_vec();
            assert_eq!(is_same, is_router(&parameter), "{name}: {parameter}");
        }
    }
    assert!(policy(&Checkpoint::open("qwen3")).with_frozen_routers().is_err());
}

#[test]
fn a_loss_with_another_softcap_than_the_model_is_refused() {
    let checkpoint = Checkpoint::open("gemma4");
    let with = |cap| {
        let config = LossConfig { final_logit_softcapping: Some(cap), ..LossConfig::default() };
        let loss = PolicyLoss { config: config.into(), ..policy_loss() };
        CpuPolicy::from_weights(checkpoint.config(), &checkpoint.weights, loss)
    };
    assert!(with(3.0).is_ok());
    let error = with(2.0).err().unwrap().to_string();
    assert!(error.contains("loss.final_logit_softcapping") && error.contains("3") && error.contains("2"), "{error}");
}

/// Factors of layers and frozen routers are in no state: the policy that imports one keeps its own.
#[test]
fn parameters_that_are_not_trained_are_in_no_state() {
    for (name, has_frozen_routers) in [("gemma4", false), ("qwen3_moe", true), ("gpt_oss", true)] {
        let checkpoint = Checkpoint::open(name);
        let is_frozen = |parameter: &str| {
            checkpoint::is_constant(parameter)
                || has_frozen_routers && (parameter.contains("mlp.gate.") || parameter.contains("mlp.router."))
        };
        let new = || {
            let policy = policy(&checkpoint).with_reference_in_files(&checkpoint.weights).unwrap();
            if has_frozen_routers { policy.with_frozen_routers().unwrap() } else { policy }
        };
        let state = |policy: &CpuPolicy| {
            [StateGroup::Weights(Weights::Policy), StateGroup::Weights(Weights::RefPolicy), StateGroup::Optimizer]
                .map(|group| export_all(policy, group).unwrap())
        };
        let adamw = OptimizerSettings::default();
        // The reference policy is in the files, and then in memory.
        for mixes in [false, true] {
            let (mut policy, mut resumed) = (new(), new());
            policy.reset_optimizer(&adamw).unwrap();
            policy.freeze_ref_policy().unwrap();
            accumulate(&mut policy, &checkpoint);
            policy.apply(0.01).unwrap();
            if mixes {
                policy.mix_ref_policy(0.3).unwrap();
            }
            let saved = state(&policy);
            assert!(!saved.iter().flatten().any(|tensor| is_frozen(&tensor.name)), "{name}");
            assert_eq!(saved[0].len(), saved[1].len(), "{name}");
            let has_moved =
                |tensor: &NamedTensor| tensor.data != checkpoint.weights.tensor(&tensor.name).unwrap().to_vec();
            assert_eq!(saved[1].iter().any(has_moved), mixes, "{name}");
            resumed.freeze_ref_policy().unwrap();
            let [weights, of_ref, moments] = &saved;
            let (optimizer, optimizer_steps) = (moments as &dyn TensorSource, 1);
            let of_state = PolicyState {
                policy: weights,
                ref_policy: Some(of_ref),
                optimizer,
                optimizer_steps,
                optimizer_settings: &adamw,
            };
            resumed.import(&of_state).unwrap();
            assert_eq!(state(&resumed), saved, "{name}");
            let sequences = checkpoint.completions();
            let parts = [SequenceBatch {
                routed_experts: &[],
                sequences: &sequences,
                tokens: token_batch(&sequences).unwrap(),
            }];
            for of in [Weights::Policy, Weights::RefPolicy] {
                let [found, expected] =
                    [&mut resumed, &mut policy].map(|policy| policy.score(of, &parts).unwrap().logp);
                assert_eq!(found, expected, "{name}: {of:?}");
            }
            let mut exported = Vec::new();
            resumed.export_model(&mut exported).unwrap();
            for NamedTensor { name: tensor, data, .. } in exported {
                let is_same = data == checkpoint.weights.tensor(&tensor).unwrap().to_vec();
                assert_eq!(is_same, is_frozen(&tensor), "{name}: {tensor}");
            }
        }
    }
}

/// Two PPO updates of torch with verl's functions: both losses, the value head, and one optimizer for both.
#[test]
fn two_ppo_updates_match_torch() {
    let ppo = Ppo::open();
    let loss = PolicyLoss { config: ppo.loss().into(), ..policy_loss() };
    let policy = CpuPolicy::from_weights(ppo.checkpoint.config(), &ppo.checkpoint.weights, loss).unwrap();
    ppo.check(&mut policy.with_value_head(ppo.of_values()).unwrap());
}
