//! Every loss on the device against the same loss on the CPU.

use crate::support::{
    Named, assert_near, assert_same_losses, assert_same_metrics, assert_same_tensors, exported, gradients,
    host_gradients, host_loss, runtime, weights, whole,
};
use crate::value_head::parts;
use grpo_core::aggregate::token_weights;
use grpo_core::{Advantages, LossConfig, TokenBatch};
use grpo_models::{ModelConfig, NamedTensor};
use grpo_policy::contract::Setup;
use grpo_policy::{OptimizerSettings, Policy, Sequence, SequenceBatch, StepLoss, Weights};
use grpo_policy_cpu::CpuPolicy;
use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions};
use grpo_testkit::family;
use grpo_testkit::margin::assert_below;
use rstest::rstest;

/// Losses with transformed logits, which [`family::LOSSES`] does not list.
const OF_OTHER_LOGITS: [&str; 4] = ["softcap", "softcap_logprobs", "logit_scale", "negative_scale"];

fn config() -> ModelConfig {
    ModelConfig { num_hidden_layers: 1, ..Setup::default().config }
}

fn on_host(loss: &LossConfig) -> CpuPolicy {
    CpuPolicy::new(&config(), 1, host_loss(loss.clone())).unwrap()
}

/// Creates a device policy with the weights of the CPU policy.
fn on_device(host: &CpuPolicy, loss: &LossConfig) -> PjrtPolicy {
    let weights: Vec<NamedTensor> = exported(host).into_values().collect();
    PjrtPolicy::from_tensors(runtime(), &config(), &weights, loss.clone(), PjrtPolicyOptions::default()).unwrap()
}

/// Returns pseudo-random numbers from 0 up to 1.
fn numbers(seed: u64, name: &str, n: usize) -> Vec<f32> {
    grpo_rng::uniform_weights(n, 0.5, seed, name).into_iter().map(|x| (x + 0.5).clamp(0.0, 0.999)).collect()
}

/// Returns four sequences; one has a single completion token.
fn sequences() -> Vec<Sequence> {
    let lengths = [(3, 9), (1, 1), (5, 12), (2, 10)];
    let ids = |i: usize, part: &str, n: usize| {
        let of = |x: &f32| 3 + (x * (config().vocab_size - 3) as f32) as u32;
        numbers(i as u64, part, n).iter().map(of).collect()
    };
    let sequence = |(i, (p, c)): (usize, &(usize, usize))| Sequence {
        prompt: ids(i, "prompt", *p),
        completion: ids(i, "completion", *c),
    };
    lengths.iter().enumerate().map(sequence).collect()
}

/// Returns log-ratios on both sides of every bound of [`family::loss`], and not close to any, as in [`grpo_testkit::Case`].
fn log_ratios(name: &str, n: usize) -> Vec<f32> {
    let [sizes, kinds, signs] = [1, 2, 3].map(|seed| numbers(seed, name, n));
    let of = |i: usize| {
        let (low, high) = [(0.01, 0.04), (0.08, 0.16), (0.29, 0.36)][(3.0 * kinds[i]) as usize];
        (low + (high - low) * sizes[i]).copysign(signs[i] - 0.5)
    };
    (0..n).map(of).collect()
}

/// Returns the sequences as one micro-batch with all inputs of a loss.
fn batch<'a>(policy: &mut dyn Policy, sequences: &'a [Sequence], loss: &LossConfig) -> SequenceBatch<'a> {
    let part = [whole(sequences)];
    let logp = policy.score(Weights::Policy, &part).unwrap().logp;
    let [SequenceBatch { tokens: plain, .. }] = part;
    // Ratios of long sequences are biased, so that sequence-level ratios are clipped, too.
    let lean = |row: usize| {
        let sequence = (0..plain.sequences()).find(|i| plain.range(*i).contains(&row)).unwrap();
        [0.07, 0.0, -0.07, 0.02][sequence]
    };
    let near = |name: &str| -> Vec<f32> {
        let ratios = log_ratios(name, logp.len());
        logp.iter().zip(&ratios).enumerate().map(|(row, (logp, ratio))| logp - lean(row) - ratio).collect()
    };
    let old = near("old");
    let advantages = [1.3, -0.9, -0.7, 0.8];
    let of_ref = near("reference");
    let batch = plain.with_advantages(Advantages::PerSequence(advantages.to_vec())).unwrap();
    let batch = batch.with_ref_logp(of_ref).unwrap();
    let sampler = loss.asks_for_sampler_logp().then(|| {
        let ratios = log_ratios("sampler", old.len());
        // Every fourth token has no sampler log-probability.
        let of = |(i, (old, ratio)): (usize, (&f32, &f32))| if i % 4 == 2 { f32::NAN } else { old - ratio };
        old.iter().zip(&ratios).enumerate().map(of).collect()
    });
    let batch = match sampler {
        Some(sampler) => batch.with_sampler_logp(sampler).unwrap(),
        None => batch,
    };
    SequenceBatch { routed_experts: &[], sequences, tokens: batch.with_old_logp(old).unwrap() }
}

/// Fails unless loss, scores, metrics and gradients of a batch match on the device and the CPU.
#[track_caller]
fn assert_same_on_both(name: &str, loss: &LossConfig, change: impl FnOnce(TokenBatch) -> TokenBatch) {
    let sequences = sequences();
    let mut host = on_host(loss);
    let mut device = on_device(&host, loss);
    let SequenceBatch { sequences, tokens, .. } = batch(&mut host, &sequences, loss);
    let part = [SequenceBatch { routed_experts: &[], sequences, tokens: change(tokens) }];
    let expected = host.accumulate(&part, StepLoss::Grpo).unwrap();
    let found = device.accumulate(&part, StepLoss::Grpo).unwrap();
    assert_same_losses(name, &found, &expected);
    assert_same_metrics(name, &found, &expected);
    assert_same_tensors(name, &gradients(&mut device), &host_gradients(&host), 1e-5);
}

/// One loss of each kind: independent tokens, ratios of sequences, weights by the sampler, a selection from the batch, transformed logits.
#[test]
fn a_loss_of_each_kind_matches_the_cpu_policy() {
    for name in ["dapo", "gspo", "sampler_seq_mask_tis", "kl_cov", "softcap"] {
        assert_same_on_both(name, &family::loss(name), |batch| batch);
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn every_loss_matches_the_cpu_policy() {
    for name in family::LOSSES.into_iter().chain(family::others()).chain(OF_OTHER_LOGITS) {
        assert_same_on_both(name, &family::loss(name), |batch| batch);
    }
}

#[rstest]
#[case("grpo")]
#[ignore = "GRPO_TESTS=all"]
#[case("dapo")]
#[ignore = "GRPO_TESTS=all"]
#[case("verl_vanilla")]
fn losses_with_advantages_and_temperatures_per_token_match_the_cpu_policy(#[case] name: &str) {
    assert_same_on_both(name, &family::loss(name), |batch| {
        let n = batch.tokens();
        let advantages = numbers(1, "advantages", n).into_iter().map(|x| 3.0 * x - 1.5).collect();
        let temperatures = numbers(1, "temperatures", n).into_iter().map(|x| 0.9 + 0.2 * x).collect();
        let batch = batch.with_advantages(Advantages::PerToken(advantages)).unwrap();
        batch.with_temperatures(temperatures).unwrap()
    });
}

const RATE: f64 = 0.01;

/// The loss of an update, its gradients, and the weights after a step.
struct Update(f64, [Named; 2]);

impl Update {
    fn of(host: &CpuPolicy, loss: &LossConfig, parts: &[SequenceBatch<'_>]) -> Self {
        let mut device = on_device(host, loss);
        // AdamW divides differences of small gradients by epsilon.
        device.reset_optimizer(&OptimizerSettings { adam_epsilon: 1e-2, ..OptimizerSettings::default() }).unwrap();
        let output = device.accumulate(parts, StepLoss::Grpo).unwrap();
        let gradients = gradients(&mut device);
        device.skip().unwrap();
        let (of_step, report) = device.step(parts, StepLoss::Grpo, RATE).unwrap();
        assert!(report.applied);
        assert_below(
            "the loss of both programs",
            (of_step.loss - output.loss).abs() / output.loss.abs().max(0.1),
            1e-6,
        );
        Self(output.loss, [gradients, weights(&device)])
    }

    #[track_caller]
    fn assert_same(&self, what: &str, expected: &Self) {
        assert_near(what, self.0, expected.0);
        self.1.iter().zip(&expected.1).for_each(|(found, expected)| assert_same_tensors(what, found, expected, 1e-5));
    }
}

/// Token selections, masks and sequence weights of an update must not depend on the number of micro-batches, if the whole batch is prepared
/// first, as in the trainer.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case("top_entropy")]
#[ignore = "GRPO_TESTS=all"]
#[case("clip_cov")]
#[case("kl_cov")]
#[ignore = "GRPO_TESTS=all"]
#[case("gspo")]
#[ignore = "GRPO_TESTS=all"]
#[case("grpo_sequence")]
#[ignore = "GRPO_TESTS=all"]
#[case("geo_mean")]
#[ignore = "GRPO_TESTS=all"]
#[case("vespo")]
#[ignore = "GRPO_TESTS=all"]
#[case("luspo")]
#[ignore = "GRPO_TESTS=all"]
#[case("off_policy")]
#[ignore = "GRPO_TESTS=all"]
#[case("sampler_sequence_mask")]
#[ignore = "GRPO_TESTS=all"]
#[case("sampler_rejection")]
#[ignore = "GRPO_TESTS=all"]
#[case("sampler_seq_mask_tis")]
fn an_update_does_not_depend_on_the_number_of_micro_batches(#[case] name: &str) {
    let (loss, sequences) = (family::loss(name), sequences());
    let mut host = on_host(&loss);
    let whole = batch(&mut host, &sequences, &loss);
    let expected = Update::of(&host, &loss, std::slice::from_ref(&whole));
    for size in [2, 1] {
        let what = format!("{name}, micro-batches of {size}");
        let of_size = |tokens: &TokenBatch| parts(&SequenceBatch { tokens: tokens.clone(), ..whole.clone() }, size);
        let mut device = on_device(&host, &loss);
        let scored = |batch: &TokenBatch| {
            let scores = device.score(Weights::Policy, &of_size(batch)).unwrap();
            Ok::<_, grpo_core::Error>(scores.into())
        };
        let prepared = loss.prepare(&whole.tokens, scored).unwrap().into_owned();
        assert_eq!(prepared.active_tokens() < whole.tokens.active_tokens(), name == "sampler_rejection", "{what}");
        let weighted = |batch: TokenBatch| match batch.weights() {
            Some(_) => batch,
            None => {
                let weights = token_weights(&loss, &batch).unwrap();
                batch.with_weights(weights).unwrap()
            }
        };
        Update::of(&host, &loss, &of_size(&weighted(prepared))).assert_same(&what, &expected);
        if ["top_entropy", "clip_cov", "kl_cov"].contains(&name) {
            // If tokens are selected per micro-batch, the selection differs.
            let apart = Update::of(&host, &loss, &of_size(&weighted(whole.tokens.clone())));
            assert!((apart.0 - expected.0).abs() > 1e-4, "{what}: the choice does not depend on the batch");
        }
    }
}

/// A micro-batch without active tokens is not an error.
#[test]
fn a_micro_batch_without_active_tokens_adds_nothing() {
    let (loss, sequences) = (family::loss("grpo_sequence"), sequences());
    let mut host = on_host(&loss);
    let SequenceBatch { sequences, tokens, .. } = batch(&mut host, &sequences, &loss);
    let mut mask = tokens.mask();
    mask[tokens.range(2)].fill(0.0);
    let tokens = tokens.with_mask(&mask).unwrap();
    let weights = token_weights(&loss, &tokens).unwrap();
    let whole = SequenceBatch { routed_experts: &[], sequences, tokens: tokens.with_weights(weights).unwrap() };
    let expected = Update::of(&host, &loss, std::slice::from_ref(&whole));
    Update::of(&host, &loss, &parts(&whole, 1)).assert_same("one sequence each", &expected);
}
