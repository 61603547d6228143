//! Two whole updates of PPO are those of torch with verl's functions (`tests/checkpoints/ppo.py`): advantages and returns, both losses,
//! the value head, and one optimizer over both.

use crate::checkpoint::{Checkpoint, Settings, Tensors};
use grpo_core::advantages::{AdvantageConfig, AdvantageEstimator, AdvantageInputs, Rewards};
use grpo_core::aggregate::token_weights;
use grpo_core::batch::ValueTargets;
use grpo_core::objective::ValueLossConfig;
use grpo_core::{Advantages, LossConfig, LossType};
use models::NamedTensor;
use policy::{Policy, SequenceBatch, StateGroup, StepLoss, Weights, export_all, token_batch};
use policy_burn::{BurnPolicy, PolicyLoss};
use std::sync::Arc;

/// What stands at the completion tokens of the right-padded rows of `of`.
fn packed(of: &NamedTensor, lengths: &[usize]) -> Vec<f32> {
    let rows = of.data.chunks_exact(of.shape[1]).zip(lengths);
    rows.flat_map(|(row, length)| row[..*length].to_vec()).collect()
}

#[track_caller]
fn assert_near(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 2e-5, "{what}: {found} instead of {expected}");
    }
}

#[test]
fn two_updates_of_ppo_are_those_of_torch() {
    let checkpoint = Checkpoint::open("qwen2");
    let path = checkpoint.folder.path().join("ppo.safetensors");
    let settings = Settings::read(&path);
    let setting = |key: &str| settings.number(key);
    let expected = Tensors::read(&path).0;

    // bnpo is a mean over the tokens of the update, which are all of the batch.
    let loss = LossConfig { loss_type: LossType::Bnpo, epsilon_low: setting("cliprange"), ..LossConfig::default() };
    let of_policy = PolicyLoss {
        config: loss.clone(),
        backend: Arc::new(backend_cpu::CpuBackend::new()),
        implementation: grpo_core::Implementation::Fused,
        max_tokens: 64,
    };
    let of_values = ValueLossConfig { vf_coef: setting("vf_coef"), cliprange_value: Some(setting("cliprange_value")) };
    let policy = BurnPolicy::from_weights(checkpoint.config(), &checkpoint.weights, of_policy).unwrap();
    let mut policy = policy.with_value_head(of_values).unwrap();
    let adamw = settings.adamw();
    policy.reset_optimizer(&adamw).unwrap();

    let sequences = checkpoint.completions();
    let lengths: Vec<usize> = sequences.iter().map(|sequence| sequence.completion.len()).collect();
    let old_values = packed(&expected["old_values"], &lengths);
    let batch = token_batch(&sequences).unwrap().with_old_logp(packed(&expected["old_logp"], &lengths)).unwrap();
    let gae = AdvantageConfig {
        estimator: AdvantageEstimator::Gae,
        gamma: setting("gamma"),
        lam: setting("lam"),
        ..AdvantageConfig::default()
    };
    let inputs = AdvantageInputs {
        batch: Some(&batch),
        values: Some(&old_values),
        ..AdvantageInputs::new(Rewards::PerSequence(&expected["rewards"].data), 1)
    };
    let Advantages::PerToken(advantages) = gae.compute(&inputs).unwrap() else { panic!("one per token") };
    let returns = gae.value_targets(&inputs).unwrap();
    assert_near("advantages", &advantages, &packed(&expected["expected.advantages"], &lengths));
    assert_near("returns", &returns, &packed(&expected["expected.returns"], &lengths));
    let batch = batch.clone().with_advantages(Advantages::PerToken(advantages)).unwrap();
    let batch = batch.with_value_targets(ValueTargets { old_values, returns }).unwrap();
    let weights = token_weights(&loss, &batch).unwrap();
    let batch = batch.with_weights(weights).unwrap();

    for of_torch in expected["expected.updates"].data.chunks_exact(6) {
        // Micro-batches of one sequence and of two.
        let parts = [0..1, 1..3].map(|rows| SequenceBatch {
            sequences: &sequences[rows.clone()],
            tokens: batch.select_sequences(rows).unwrap(),
        });
        let output = policy.accumulate(&parts, StepLoss::Grpo).unwrap();
        let report = policy.apply(setting("lr")).unwrap();
        assert!(report.grad_norm > adamw.max_grad_norm);
        let metric = |name: &str| output.metrics.value(name).unwrap();
        let found = [
            output.loss,
            output.policy_loss,
            output.value_loss,
            report.grad_norm,
            metric("value_pred_mean"),
            metric("value_clip_ratio"),
        ];
        assert_near("an update", &found.map(|value| value as f32), of_torch);
    }

    let mut found = Vec::new();
    policy.model().export(&mut found).unwrap();
    let head = export_all(&policy, StateGroup::Weights(Weights::Policy)).unwrap();
    found.extend(head.into_iter().filter(|tensor| tensor.name.starts_with("value_head.")));
    assert_eq!(found.len(), expected.keys().filter(|name| name.starts_with("after.")).count());
    for NamedTensor { name, data, .. } in found {
        let before = match name.starts_with("value_head.") {
            true => vec![0.0; data.len()],
            false => checkpoint.weights.tensor(&name).unwrap().to_vec(),
        };
        // The steps themselves, not the weights that they change.
        let steps = |after: &[f32]| after.iter().zip(&before).map(|(a, b)| a - b).collect::<Vec<_>>();
        let (found, expected) = (steps(&data), steps(&expected[&format!("after.{name}")].data));
        let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
        let off = found.iter().zip(&expected).map(|(f, e)| (f - e).abs()).fold(0.0, f32::max);
        assert!(largest > 1e-3 && off <= 5e-4 * largest, "{name}: off by {off} of {largest}");
    }
}
