//! Packed rows: gradients and scores match those of separate rows and torch, in every family.

use crate::checkpoint::{self, Checkpoint};
use crate::gradients::{gradients, host_gradients, on_device, policy_loss};
use crate::support::assert_close;
use grpo_core::aggregate::token_weights;
use grpo_core::batch::ValueTargets;
use grpo_core::objective::ValueLossConfig;
use grpo_core::{Advantages, LossConfig};
use models::{LoraConfig, NamedTensor, TargetModules};
use policy::{Policy, PolicyState, Sequence, SequenceBatch, StateGroup, StepLoss, Weights, export_all, token_batch};
use policy_cpu::CpuPolicy;
use policy_pjrt::decoder::Attention;
use policy_pjrt::{PjrtPolicy, PjrtPolicyOptions, TrainShape};
use std::num::NonZeroUsize;

/// Materialised attention, and blocks whose boundaries lie within sequences.
fn attentions() -> [Attention; 2] {
    [Attention::Materialised, Attention::Blockwise { block: NonZeroUsize::new(5).unwrap() }]
}

fn options(attention: Attention) -> PjrtPolicyOptions {
    PjrtPolicyOptions { attention, ..PjrtPolicyOptions::default() }
}

/// Packs all sequences of a checkpoint into one of two rows; the other row is a masked sequence with the length of all others together.
#[test]
fn gradients_of_packed_rows_match_torch_and_the_cpu_policy() {
    for (name, attention) in checkpoint::ALL.into_iter().zip(attentions().into_iter().cycle()) {
        let checkpoint = Checkpoint::open(name);
        let mut sequences = checkpoint.completions();
        let tokens: usize = sequences.iter().map(|s| s.completion.len()).sum();
        let mut host = CpuPolicy::from_weights(checkpoint.config(), &checkpoint.weights, policy_loss()).unwrap();
        let plain = SequenceBatch { sequences: &sequences, tokens: token_batch(&sequences).unwrap() };
        host.accumulate(&[plain], StepLoss::CrossEntropy { tokens }).unwrap();
        let of_host = host_gradients(&host);

        sequences.push(Sequence { prompt: vec![3], completion: vec![4; tokens] });
        let shape = TrainShape::of(&sequences);
        assert!(shape.rows == 2 && shape.shared, "{name}: {shape:?}");
        let mask: Vec<f32> = (0..2 * tokens).map(|t| if t < tokens { 1.0 } else { 0.0 }).collect();
        let batch = token_batch(&sequences).unwrap().with_mask(&mask).unwrap();
        let batch = SequenceBatch { sequences: &sequences, tokens: batch };
        let mut policy = on_device(&checkpoint, options(attention));
        let loss = policy.accumulate(&[batch], StepLoss::CrossEntropy { tokens }).unwrap().loss;
        let expected = f64::from(checkpoint.expected.0["expected.loss"].data[0]);
        assert!((loss - expected).abs() < 1e-5 * expected, "{name}: {loss} {expected}");
        let found = gradients(&mut policy);
        let of_torch = checkpoint.expected.0.iter().filter_map(|(n, t)| Some((n.strip_prefix("expected.grad.")?, t)));
        let mut compared = 0;
        for (parameter, expected) in of_torch {
            let gradient = &found[parameter].data;
            assert_close(&format!("{name}: {parameter}, torch"), gradient, &expected.data, 1e-4);
            assert_close(&format!("{name}: {parameter}, host"), gradient, &of_host[parameter].data, 1e-5);
            compared += 1;
        }
        assert_eq!(compared, found.len(), "{name}");
    }
}

/// Returns sequences for 4 rows of 16 tokens: one fills a row, three fill another one, and one row has padding.
fn sequences(config: &models::ModelConfig) -> Vec<Sequence> {
    let lengths = [(4, 6), (3, 14), (2, 5), (1, 1), (5, 9), (2, 2), (3, 3)];
    let mut next = 7;
    let mut tokens = |count: usize| -> Vec<u32> {
        let draw = |_| {
            next = (next * 1_103 + 12_345) % 1_000_003;
            next % config.vocab_size as u32
        };
        (0..count).map(draw).collect()
    };
    lengths.iter().map(|(p, c)| Sequence { prompt: tokens(*p), completion: tokens(*c) }).collect()
}

/// Returns all sequences as one micro-batch with all inputs of the losses.
fn whole(sequences: &[Sequence]) -> SequenceBatch<'_> {
    let tokens = token_batch(sequences).unwrap();
    let n = tokens.tokens();
    let number = |scale: f32, shift: f32| (0..n).map(|t| scale * (t as f32 + shift).cos()).collect::<Vec<_>>();
    let targets = ValueTargets { old_values: number(0.2, 1.0), returns: number(1.0, 0.0) };
    let tokens = tokens.with_value_targets(targets).unwrap();
    let tokens = tokens.with_advantages(Advantages::PerToken(number(1.0, 2.0))).unwrap();
    let weights = token_weights(&LossConfig::default(), &tokens).unwrap();
    SequenceBatch { sequences, tokens: tokens.with_weights(weights).unwrap() }
}

/// Returns the same sequences, one per micro-batch.
fn alone<'a>(batch: &SequenceBatch<'a>) -> Vec<SequenceBatch<'a>> {
    let one = |i: usize| SequenceBatch {
        sequences: &batch.sequences[i..=i],
        tokens: batch.tokens.select_sequences(i..i + 1).unwrap(),
    };
    (0..batch.sequences.len()).map(one).collect()
}

/// Creates a policy with nonzero adapters of all matrices and a nonzero value head.
fn extended(checkpoint: &Checkpoint, attention: Attention) -> PjrtPolicy {
    let all = TargetModules::Pattern("all-linear".into());
    let lora = LoraConfig { r: 2, target_modules: all, ..LoraConfig::default() };
    let of_values = ValueLossConfig { vf_coef: 0.4, cliprange_value: Some(0.1) };
    let policy = on_device(checkpoint, options(attention)).with_lora(&lora, 3).unwrap();
    let mut policy = policy.with_value_head(of_values).unwrap();
    let mut weights = export_all(&policy, StateGroup::Weights(Weights::Policy)).unwrap();
    for (i, tensor) in weights.iter_mut().enumerate() {
        if tensor.name.starts_with("value_head.") || tensor.name.contains(".lora_B.") {
            tensor.data.iter_mut().enumerate().for_each(|(k, value)| *value = 0.2 * ((i + 2 * k) as f32).sin());
        }
    }
    let adamw = policy::AdamWConfig::default();
    let state = PolicyState { policy: &weights, ref_policy: None, optimizer: &[], optimizer_steps: 0, adamw: &adamw };
    policy.import(&state).unwrap();
    policy
}

#[test]
fn packed_adapters_values_and_losses_match_separate_rows() {
    for (name, attention) in ["qwen2", "llama3"].into_iter().zip(attentions()) {
        let checkpoint = Checkpoint::open(name);
        let sequences = sequences(checkpoint.config());
        assert_eq!(TrainShape::of(&sequences), TrainShape { rows: 4, length: 16, tokens: 48, shared: true });
        let one = [whole(&sequences)];
        let parts = alone(&one[0]);
        let mut policy = extended(&checkpoint, attention);
        policy.freeze_ref_policy().unwrap();
        let [found, expected] = [&one[..], &parts[..]].map(|batches| policy.values(batches).unwrap());
        assert_close(&format!("{name}: values"), &found, &expected, 1e-5);
        for of in [Weights::Policy, Weights::RefPolicy] {
            let [found, expected] = [&one[..], &parts[..]].map(|batches| policy.score(of, batches).unwrap());
            assert_close(&format!("{name}: {of:?}"), &found.logp, &expected.logp, 1e-5);
            assert_close(&format!("{name}: {of:?}"), &found.entropy, &expected.entropy, 1e-5);
        }
        let [found, expected] = [&one[..], &parts[..]].map(|batches| {
            let output = policy.accumulate(batches, StepLoss::Grpo).unwrap();
            let gradients = gradients(&mut policy);
            policy.skip().unwrap();
            (output, gradients)
        });
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs().max(0.1);
        assert!(near(found.0.loss, expected.0.loss) && near(found.0.value_loss, expected.0.value_loss), "{name}");
        assert_close(&format!("{name}: logp"), &found.0.scores.logp, &expected.0.scores.logp, 1e-5);
        assert_close(&format!("{name}: entropy"), &found.0.scores.entropy, &expected.0.scores.entropy, 1e-5);
        assert_eq!(found.1.len(), expected.1.len());
        for (parameter, NamedTensor { data, .. }) in &expected.1 {
            assert_close(&format!("{name}: {parameter}"), &found.1[parameter].data, data, 1e-5);
        }
    }
}

#[test]
fn scores_of_packed_sequences_are_independent_bit_for_bit() {
    for (name, attention) in ["qwen2_5_sharded", "qwen3"].into_iter().zip(attentions()) {
        let checkpoint = Checkpoint::open(name);
        let vocab = checkpoint.config().vocab_size as u32;
        let mut policy = on_device(&checkpoint, options(attention));
        let before = sequences(checkpoint.config());
        let batch = token_batch(&before).unwrap();
        let mut score = |sequences: &[Sequence]| {
            let tokens = token_batch(sequences).unwrap();
            let scores = policy.score(Weights::Policy, &[SequenceBatch { sequences, tokens }]).unwrap();
            scores.logp.iter().chain(&scores.entropy).map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let expected = score(&before);
        for changed in 0..before.len() {
            let mut after = before.clone();
            let Sequence { prompt, completion } = &mut after[changed];
            prompt.iter_mut().chain(completion).for_each(|id| *id = (*id + 1) % vocab);
            let found = score(&after);
            for i in 0..before.len() {
                let of = |bits: &[u32]| {
                    [&bits[batch.range(i)], &bits[batch.tokens()..][batch.range(i)]].map(<[u32]>::to_vec)
                };
                assert_eq!(of(&found) == of(&expected), i != changed, "{name}: sequence {i}, {changed} was changed");
            }
        }
    }
}
