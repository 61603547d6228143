//! The policy on a PJRT device.

use super::compared::Shown;
use grpo_check::model::Forward;
use grpo_core::LossConfig;
use models::{Adapter, ModelFolder};
use policy::TensorSink;
use policy_pjrt::{PjrtPolicy, PjrtPolicyOptions, Runtime};

pub(super) fn open(runtime: &Runtime, folder: &ModelFolder, adapter: Option<&Adapter>) -> anyhow::Result<PjrtPolicy> {
    // Nothing is updated, so no state is saved for a rollback.
    let options = PjrtPolicyOptions { can_roll_back: false, ..PjrtPolicyOptions::default() };
    // The supervised loss that is compared here does not depend on the GRPO loss.
    let loss = LossConfig::default();
    let weights = folder.weights()?;
    let policy = PjrtPolicy::from_weights(runtime, folder.config(), &weights, loss, options)?;
    let Some(adapter) = adapter else { return Ok(policy) };
    adapter.check_base(&weights)?;
    Ok(policy.with_adapter(adapter)?)
}

impl Shown for PjrtPolicy {
    /// Few, because long sequences take memory; more than one, because other lengths need another program.
    const ROWS: usize = 4;

    fn show_logits(
        &mut self,
        sequences: &[&[u32]],
        forward: Forward,
        see: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> policy::Result<()> {
        match forward {
            Forward::Whole => self.logits(sequences, see)?,
            Forward::Cached => self.cached_logits(sequences, see)?,
        }
        Ok(())
    }

    fn show_gradients(&mut self, sink: &mut dyn TensorSink) -> policy::Result<()> {
        Ok(self.export_gradients(sink)?)
    }
}
