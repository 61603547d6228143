//! The value head on every family, with and without adapters: its gradients, and the decoder's, match finite differences of the value loss.

use crate::checkpoint::Checkpoint;
use crate::support::policy;
use grpo_core::Advantages;
use grpo_core::aggregate::token_weights;
use grpo_core::batch::ValueTargets;
use grpo_core::objective::ValueLossConfig;
use grpo_models::LoraConfig;
use grpo_policy::{Policy, SequenceBatch, StateGroup, StepLoss, Weights, export_all, token_batch};

#[test]
fn gradients_of_the_value_loss_match_finite_differences() {
    for (name, adapted) in ["qwen2", "qwen3", "llama3"].into_iter().flat_map(|name| [(name, false), (name, true)]) {
        let checkpoint = Checkpoint::open(name);
        let loss = ValueLossConfig { vf_coef: 0.5, cliprange_value: None };
        let mut policy = policy(&checkpoint).with_value_head(loss).unwrap();
        if adapted {
            policy = policy.with_lora(&LoraConfig { r: 2, ..Default::default() }, 3).unwrap();
        }
        // Use nonzero weights, because value heads and B of adapters are initialised to zero.
        let mut start = export_all(&policy, StateGroup::Weights(Weights::Policy)).unwrap();
        for (i, tensor) in start.iter_mut().enumerate() {
            if tensor.name.starts_with("value_head.") || tensor.name.contains(".lora_B.") {
                let values = tensor.data.iter_mut().enumerate();
                values.for_each(|(k, value)| *value = 0.3 * ((i + 2 * k) as f32).sin());
            }
        }
        policy.import_weights(&start).unwrap();

        let sequences = checkpoint.completions();
        let tokens = token_batch(&sequences).unwrap();
        let n = tokens.tokens();
        let returns = (0..n).map(|t| (t as f32).cos()).collect();
        let tokens = tokens.with_value_targets(ValueTargets { old_values: vec![0.0; n], returns }).unwrap();
        // Without advantages, the policy loss and its gradient are 0.
        let tokens = tokens.with_advantages(Advantages::PerToken(vec![0.0; n])).unwrap();
        let grpo = grpo_core::LossConfig::default();
        let weighted = token_weights(&grpo, &tokens).unwrap();
        let batch = [SequenceBatch {
            routed_experts: &[],
            sequences: &sequences,
            tokens: tokens.with_weights(weighted).unwrap(),
        }];
        let values = policy.values(&batch).unwrap();
        assert!(values.iter().any(|value| value.abs() > 0.01), "{name}: {values:?}");

        let output = policy.accumulate(&batch, StepLoss::Grpo).unwrap();
        assert!(output.policy_loss.abs() < 1e-12 && output.loss > 0.01, "{name}: {}", output.loss);
        let mut gradients = Vec::new();
        policy.model().export_values(policy.gradients().parameters(), &mut gradients).unwrap();
        assert!(gradients.iter().any(|gradient| gradient.name.contains(".lora_A.")) == adapted, "{name}");
        let mut compared = 0;
        for gradient in &gradients {
            let by_size = |a: &(usize, &f32), b: &(usize, &f32)| a.1.abs().total_cmp(&b.1.abs());
            let (at, slope) = gradient.data.iter().enumerate().max_by(by_size).unwrap();
            // The LM head has no gradient, and small gradients are below the rounding error of the loss.
            if slope.abs() < 3e-3 {
                continue;
            }
            let mut loss_at = |step: f32| {
                let mut moved = start.clone();
                moved.iter_mut().find(|tensor| tensor.name == gradient.name).unwrap().data[at] += step;
                policy.import_weights(&moved).unwrap();
                policy.accumulate(&batch, StepLoss::Grpo).unwrap().loss
            };
            let step = 2e-4_f32;
            let difference = (loss_at(step) - loss_at(-step)) / (2.0 * f64::from(step));
            let (off, slope) = ((difference - f64::from(*slope)).abs(), f64::from(*slope));
            assert!(
                off < 0.03 * slope.abs() + 2e-4,
                "{name}, adapted {adapted}: {} {difference} {slope}",
                gradient.name
            );
            compared += 1;
        }
        assert!(compared >= 6, "{name}, adapted {adapted}: {compared} of {}", gradients.len());
    }
}
