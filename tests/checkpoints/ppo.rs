//! Two PPO updates computed by torch with verl's functions (`ppo.py`), for the tests of every policy.

use crate::checkpoint::{Checkpoint, Settings, Tensors};
use grpo_core::aggregate::token_weights;
use grpo_core::batch::{TokenBatch, ValueTargets};
use grpo_core::objective::ValueLossConfig;
use grpo_core::{Advantages, LossConfig, LossType};
use grpo_models::NamedTensor;
use grpo_policy::{Policy, Sequence, SequenceBatch, StateGroup, StepLoss, Weights, export_all, token_batch};

pub(crate) struct Ppo {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) settings: Settings,
    pub(crate) expected: Tensors,
    pub(crate) sequences: Vec<Sequence>,
}

impl Ppo {
    pub(crate) fn open() -> Self {
        let checkpoint = Checkpoint::open("qwen2");
        let path = checkpoint.folder.path().join("ppo.safetensors");
        let sequences = checkpoint.completions();
        Self { settings: Settings::read(&path), expected: Tensors::read(&path), checkpoint, sequences }
    }

    /// Returns the loss. bnpo is a mean over the tokens of the update, which is the whole batch.
    pub(crate) fn loss(&self) -> LossConfig {
        let epsilon_low = Some(self.settings.number("cliprange"));
        LossConfig { loss_type: LossType::Bnpo, epsilon_low, ..LossConfig::default() }
    }

    pub(crate) fn of_values(&self) -> ValueLossConfig {
        let cliprange_value = Some(self.settings.number("cliprange_value"));
        ValueLossConfig { vf_coef: self.settings.number("vf_coef"), cliprange_value }
    }

    /// Returns the file's values of every completion token, without padding.
    pub(crate) fn tokens(&self, name: &str) -> Vec<f32> {
        let of = &self.expected.0[name];
        let rows = of.data.chunks_exact(of.shape[1]).zip(&self.sequences);
        rows.flat_map(|(row, sequence)| row[..sequence.completion.len()].to_vec()).collect()
    }

    /// Returns the completions with the log-probabilities of the old policy.
    pub(crate) fn batch(&self) -> TokenBatch {
        token_batch(&self.sequences).unwrap().with_old_logp(self.tokens("old_logp")).unwrap()
    }

    /// Makes the two updates with `policy`, which has its value head, in micro-batches of one and of two sequences, and compares the results
    /// with torch's.
    pub(crate) fn check(&self, policy: &mut dyn Policy) {
        let Self { settings, expected, sequences, checkpoint } = self;
        let adamw = settings.adamw();
        policy.reset_optimizer(&adamw).unwrap();
        let batch = self.batch().with_advantages(Advantages::PerToken(self.tokens("expected.advantages"))).unwrap();
        let targets = ValueTargets { old_values: self.tokens("old_values"), returns: self.tokens("expected.returns") };
        let batch = batch.with_value_targets(targets).unwrap();
        let weights = token_weights(&self.loss(), &batch).unwrap();
        let batch = batch.with_weights(weights).unwrap();
        for of_torch in expected.0["expected.updates"].data.chunks_exact(6) {
            let parts = [0..1, 1..3].map(|rows| SequenceBatch {
                sequences: &sequences[rows.clone()],
                tokens: batch.select_sequences(rows).unwrap(),
                routed_experts: &[],
            });
            let output = policy.accumulate(&parts, StepLoss::Grpo).unwrap();
            let grad_norm = policy.apply(settings.number("lr")).unwrap().grad_norm;
            assert!(grad_norm > adamw.max_grad_norm, "an update that is clipped");
            let metric = |name: &str| output.metrics.value(name).unwrap();
            let losses = [output.loss, output.policy_loss, output.value_loss, grad_norm];
            let found = losses.into_iter().chain([metric("value_pred_mean"), metric("value_clip_ratio")]);
            for (found, expected) in found.zip(of_torch) {
                assert!((found - f64::from(*expected)).abs() < 2e-5, "an update: {found} instead of {expected}");
            }
        }

        let mut found = Vec::new();
        policy.export_model(&mut found).unwrap();
        let head = export_all(policy, StateGroup::Weights(Weights::Policy)).unwrap();
        found.extend(head.into_iter().filter(|tensor| tensor.name.starts_with("value_head.")));
        assert_eq!(found.len(), expected.0.keys().filter(|name| name.starts_with("after.")).count());
        for NamedTensor { name, data, .. } in found {
            let before = match name.starts_with("value_head.") {
                true => vec![0.0; data.len()],
                false => checkpoint.weights.tensor(&name).unwrap().to_vec(),
            };
            // Compare the changes of the weights, not the weights.
            let steps = |after: &[f32]| after.iter().zip(&before).map(|(a, b)| a - b).collect::<Vec<_>>();
            let (found, expected) = (steps(&data), steps(&expected.0[&format!("after.{name}")].data));
            let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
            let off = found.iter().zip(&expected).map(|(f, e)| (f - e).abs());
            // NaN must fail the comparison.
            let off = off.fold(0.0, |m: f32, x| if x > m || x.is_nan() { x } else { m });
            assert!(largest > 1e-3 && off <= 5e-4 * largest, "{name}: off by {off} of {largest}");
        }
    }
}
