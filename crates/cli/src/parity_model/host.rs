//! The policy in burn on this CPU.

use super::{Gradients, HOST, completions, not_empty};
use backend_cpu::CpuBackend;
use grpo_check::Error;
use grpo_check::model::{Forward, ModelPolicy, SeeGradient, SeeLogits};
use grpo_core::{Implementation, LossConfig};
use models::{Adapter, ModelFolder};
use policy::{Policy, Sequence, SequenceBatch, StepLoss, token_batch};
use policy_burn::{BurnPolicy, PolicyLoss};
use std::sync::Arc;

pub(super) struct Host(BurnPolicy);

impl Host {
    pub(super) fn open(folder: &ModelFolder, adapter: Option<&Adapter>) -> anyhow::Result<Self> {
        // The supervised loss, which is compared here, is its own; GRPO's is not used.
        let loss = PolicyLoss {
            config: LossConfig::default(),
            backend: Arc::new(CpuBackend::new()),
            implementation: Implementation::Fused,
            max_tokens: 0,
        };
        let weights = folder.weights()?;
        let policy = BurnPolicy::from_weights(folder.config(), &weights, loss)?;
        let Some(adapter) = adapter else { return Ok(Self(policy)) };
        adapter.check_base(&weights)?;
        Ok(Self(policy.with_adapter(adapter)?))
    }
}

impl ModelPolicy for Host {
    fn name(&self) -> &str {
        HOST
    }

    fn logits(&mut self, sequences: &[Vec<u32>], forward: Forward, see: &mut SeeLogits<'_>) -> Result<(), Error> {
        let (numbers, sequences) = not_empty(sequences);
        let mut seen = Ok(());
        let mut see = |i: usize, position: usize, logits: &[f32]| {
            if seen.is_ok() {
                seen = see(numbers[i], position, logits);
            }
        };
        match forward {
            Forward::Whole => {
                for (i, ids) in sequences.into_iter().enumerate() {
                    self.0.logits(ids, |position, logits| see(i, position, logits)).map_err(Error::policy)?;
                }
            }
            Forward::Cached => self.0.cached_logits(&sequences, see).map_err(Error::policy)?,
        }
        seen
    }

    fn loss(&mut self, sequences: &[Vec<u32>], gradients: Option<&mut SeeGradient<'_>>) -> Result<f64, Error> {
        let sequences: Vec<Sequence> = completions(sequences);
        let tokens = sequences.iter().map(|sequence| sequence.completion.len()).sum();
        let batches =
            sequences.chunks(1).map(|sequences| Ok(SequenceBatch { sequences, tokens: token_batch(sequences)? }));
        let batches = batches.collect::<Result<Vec<_>, grpo_core::Error>>()?;
        let loss = self.0.accumulate(&batches, StepLoss::CrossEntropy { tokens }).map_err(Error::policy)?.loss;
        if let Some(see) = gradients {
            let mut sink = Gradients { see, seen: Ok(()) };
            let exported = self.0.model().export_values(self.0.gradients().parameters(), &mut sink);
            sink.seen?;
            exported.map_err(Error::policy)?;
        }
        self.0.skip().map_err(Error::policy)?;
        Ok(loss)
    }
}
