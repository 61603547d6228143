//! The burn policy on this CPU.

use super::compared::Shown;
use backend_cpu::CpuBackend;
use grpo_check::model::Forward;
use grpo_core::{Implementation, LossConfig};
use models::{Adapter, ModelFolder};
use policy::TensorSink;
use policy_cpu::{CpuPolicy, PolicyLoss};
use std::sync::Arc;

pub(super) fn open(folder: &ModelFolder, adapter: Option<&Adapter>) -> anyhow::Result<CpuPolicy> {
    // The supervised loss that is compared here does not depend on the GRPO loss.
    let loss = PolicyLoss {
        config: LossConfig::default().into(),
        backend: Arc::new(CpuBackend::new()),
        implementation: Implementation::Fused,
        max_tokens: 0,
    };
    let weights = folder.weights()?;
    let policy = CpuPolicy::from_weights(folder.config(), &weights, loss)?;
    let Some(adapter) = adapter else { return Ok(policy) };
    adapter.check_base(&weights)?;
    Ok(policy.with_adapter(adapter)?)
}

impl Shown for CpuPolicy {
    const ROWS: usize = 1;

    fn show_logits(
        &mut self,
        sequences: &[&[u32]],
        forward: Forward,
        see: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> policy::Result<()> {
        match forward {
            Forward::Whole => (sequences.iter().enumerate())
                .try_for_each(|(i, ids)| self.logits(ids, |position, logits| see(i, position, logits))),
            Forward::Cached => self.cached_logits(sequences, see),
        }
    }

    fn show_gradients(&mut self, sink: &mut dyn TensorSink) -> policy::Result<()> {
        self.model().export_values(self.gradients().parameters(), sink)
    }
}
