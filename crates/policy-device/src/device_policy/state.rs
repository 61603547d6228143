//! The state of a policy as named tensors, which come and go one by one.

use super::layout::Layout;
use super::{DevicePolicy, Moments};
use crate::error::Result;
use crate::weights::DeviceWeights;
use policy::{Error, PolicyState, StateGroup, TensorSink, Weights};
use stablehlo::Dtype;

const FIRST: &str = "exp_avg.";
const SECOND: &str = "exp_avg_sq.";

impl DevicePolicy {
    /// Hands a group of tensors to `sink`.
    pub(super) fn export_group(&self, group: StateGroup, sink: &mut dyn TensorSink) -> Result<()> {
        self.weights()?;
        let layout = Layout::new(self.config());
        match group {
            StateGroup::Weights(Weights::Policy) => layout.export("", self.weights.reader(), sink),
            StateGroup::Weights(Weights::RefPolicy) => match &self.ref_policy {
                Some(weights) => layout.export("", weights.reader(), sink),
                None => Ok(()),
            },
            StateGroup::Optimizer => {
                let Some(Moments { first, second }) = &self.moments else { return Ok(()) };
                for (prefix, buffers) in [(FIRST, first), (SECOND, second)] {
                    layout.export(prefix, self.weights.with_buffers(buffers.clone()).reader(), sink)?;
                }
                Ok(())
            }
        }
    }

    pub(super) fn import_state(&mut self, state: &PolicyState<'_>) -> Result<()> {
        let layout = Layout::new(self.config());
        // Everything is looked at before anything goes to the device.
        let weights = layout.import("", state.policy)?;
        let ref_policy = state.ref_policy.map(|tensors| layout.import("", tensors)).transpose()?;
        let moments = match state.optimizer_steps {
            0 if state.optimizer.is_empty() => None,
            0 => {
                return Err(
                    Error::state("the optimizer", "no tensors before its first step", state.optimizer.len()).into()
                );
            }
            _ if state.optimizer.len() != 2 * state.policy.len() => {
                let expected = format!("{} tensors", 2 * state.policy.len());
                return Err(Error::state("the optimizer", expected, state.optimizer.len()).into());
            }
            _ => Some([FIRST, SECOND].map(|prefix| layout.import(prefix, state.optimizer))),
        };
        let upload = |tensors: &super::layout::Imported<'_>| {
            let values = |name: &str, shape: &[usize]| tensors.values(name, shape);
            DeviceWeights::from_values(&self.runtime, self.config(), Dtype::F32, values)
        };
        let moments = match moments {
            None => None,
            Some([first, second]) => {
                let (first, second) = (first?, second?);
                Some(Moments { first: upload(&first)?.take_buffers(), second: upload(&second)?.take_buffers() })
            }
        };
        let (weights, ref_policy) = (upload(&weights)?, ref_policy.as_ref().map(upload).transpose()?);
        (self.weights, self.ref_policy, self.moments) = (weights, ref_policy, moments);
        (self.adamw, self.steps) = (state.adamw.clone(), state.optimizer_steps);
        (self.remembered, self.rounded) = (None, None);
        self.forget_gradient();
        Ok(())
    }
}
