//! The policy on a device of PJRT.

use super::{Gradients, completions, not_empty};
use grpo_check::Error;
use grpo_check::model::{Forward, ModelPolicy, SeeGradient, SeeLogits};
use grpo_core::LossConfig;
use models::{Adapter, ModelFolder};
use policy::{Policy, SequenceBatch, StepLoss, token_batch};
use policy_device::{DevicePolicy, DevicePolicyOptions, Runtime};

/// Sequences of a micro-batch: few, because long ones take memory, and more than one, because every other length has a program.
const ROWS: usize = 4;

pub(super) struct OnDevice {
    name: String,
    policy: DevicePolicy,
}

impl OnDevice {
    pub(super) fn open(
        runtime: &Runtime,
        folder: &ModelFolder,
        adapter: Option<&Adapter>,
        name: String,
    ) -> anyhow::Result<Self> {
        // Nothing is updated, so there is nothing to go back to.
        let options = DevicePolicyOptions { can_roll_back: false, ..DevicePolicyOptions::default() };
        // The supervised loss, which is compared here, is its own; GRPO's is not used.
        let loss = LossConfig::default();
        let weights = folder.weights()?;
        let policy = DevicePolicy::from_weights(runtime, folder.config(), &weights, loss, options)?;
        let Some(adapter) = adapter else { return Ok(Self { name, policy }) };
        adapter.check_base(&weights)?;
        Ok(Self { name, policy: policy.with_adapter(adapter)? })
    }
}

impl ModelPolicy for OnDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn logits(&mut self, sequences: &[Vec<u32>], forward: Forward, see: &mut SeeLogits<'_>) -> Result<(), Error> {
        let (numbers, sequences) = not_empty(sequences);
        let mut seen = Ok(());
        let see = |i: usize, position: usize, logits: &[f32]| {
            if seen.is_ok() {
                seen = see(numbers[i], position, logits);
            }
        };
        match forward {
            Forward::Whole => self.policy.logits(&sequences, see).map_err(Error::policy)?,
            Forward::Cached => self.policy.cached_logits(&sequences, see).map_err(Error::policy)?,
        }
        seen
    }

    fn loss(&mut self, sequences: &[Vec<u32>], gradients: Option<&mut SeeGradient<'_>>) -> Result<f64, Error> {
        let sequences = completions(sequences);
        let tokens = sequences.iter().map(|sequence| sequence.completion.len()).sum();
        let batches =
            sequences.chunks(ROWS).map(|sequences| Ok(SequenceBatch { sequences, tokens: token_batch(sequences)? }));
        let batches = batches.collect::<Result<Vec<_>, grpo_core::Error>>()?;
        let loss = self.policy.accumulate(&batches, StepLoss::CrossEntropy { tokens }).map_err(Error::policy)?.loss;
        if let Some(see) = gradients {
            let mut sink = Gradients { see, seen: Ok(()) };
            let exported = self.policy.export_gradients(&mut sink);
            sink.seen?;
            exported.map_err(Error::policy)?;
        }
        self.policy.skip().map_err(Error::policy)?;
        Ok(loss)
    }
}
