//! The state of a policy as named tensors, which come and go one by one.

use super::{DevicePolicy, Moments};
use crate::error::Result;
use crate::weights::DeviceWeights;
use models::NamedTensor;
use policy::{Error, PolicyState, StateGroup, TensorSink, Weights};
use stablehlo::Dtype;

const FIRST: &str = "exp_avg.";
const SECOND: &str = "exp_avg_sq.";

impl DevicePolicy {
    /// Hands a group of tensors to `sink`, under the names of `transformers`.
    pub(super) fn export_group(&self, group: StateGroup, sink: &mut dyn TensorSink) -> Result<()> {
        self.weights()?;
        match group {
            StateGroup::Weights(Weights::Policy) => self.weights.export(sink),
            StateGroup::Weights(Weights::RefPolicy) => {
                self.ref_policy.as_ref().map_or(Ok(()), |weights| weights.export(sink))
            }
            StateGroup::Optimizer => {
                let Some(Moments { first, second }) = &self.moments else { return Ok(()) };
                for (prefix, buffers) in [(FIRST, first), (SECOND, second)] {
                    self.weights.with_buffers(buffers.clone()).export(&mut Prefixed { prefix, sink })?;
                }
                Ok(())
            }
        }
    }

    pub(super) fn import_state(&mut self, state: &PolicyState<'_>) -> Result<()> {
        let parameters = self.config().parameters().len();
        let counted = |what: &str, tensors: &[NamedTensor], expected: usize| match tensors.len() == expected {
            true => Ok(()),
            false => Err(Error::state(what, format!("{expected} tensors"), tensors.len())),
        };
        counted("the policy", state.policy, parameters)?;
        if let Some(of_ref) = state.ref_policy {
            counted("the reference policy", of_ref, parameters)?;
        }
        counted("the optimizer", state.optimizer, if state.optimizer_steps > 0 { 2 * parameters } else { 0 })?;
        let read = |prefix: &str, tensors: &[NamedTensor]| {
            DeviceWeights::from_prefixed(&self.runtime, self.config(), prefix, tensors, Dtype::F32)
        };
        let weights = read("", state.policy)?;
        let ref_policy = state.ref_policy.map(|tensors| read("", tensors)).transpose()?;
        let moments = match state.optimizer_steps {
            0 => None,
            _ => {
                let moments = |prefix| Ok::<_, crate::Error>(read(prefix, state.optimizer)?.take_buffers());
                Some(Moments { first: moments(FIRST)?, second: moments(SECOND)? })
            }
        };
        (self.weights, self.ref_policy, self.moments) = (weights, ref_policy, moments);
        (self.adamw, self.steps) = (state.adamw.clone(), state.optimizer_steps);
        (self.remembered, self.rounded) = (None, None);
        self.forget_gradient();
        Ok(())
    }
}

/// Puts a prefix before names.
struct Prefixed<'a> {
    prefix: &'static str,
    sink: &'a mut dyn TensorSink,
}

impl TensorSink for Prefixed<'_> {
    fn tensor(&mut self, tensor: NamedTensor) -> policy::Result<()> {
        let name = format!("{}{}", self.prefix, tensor.name);
        self.sink.tensor(NamedTensor { name, ..tensor })
    }
}
