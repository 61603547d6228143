//! The state of a policy as named tensors, which come and go one by one.

use super::layout::Layout;
use super::{DevicePolicy, Moments};
use crate::error::Result;
use crate::storage::Storage;
use crate::weights::DeviceWeights;
use policy::{Error, PolicyState, StateGroup, TensorSink, Weights};
use stablehlo::Dtype;

const FIRST: &str = "exp_avg.";
const SECOND: &str = "exp_avg_sq.";

impl DevicePolicy {
    /// Hands a group of tensors to `sink`.
    pub(super) fn export_group(&self, group: StateGroup, sink: &mut dyn TensorSink) -> Result<()> {
        let (weights, decoder) = (self.weights()?, self.modules.decoder());
        let trained = Layout::of_trained(decoder);
        match group {
            StateGroup::Weights(Weights::Policy) => trained.export("", weights.reader(), sink),
            StateGroup::Weights(Weights::RefPolicy) => match &self.ref_policy {
                // Those of a reference beneath adapters are the model's own, which no checkpoint repeats.
                Some(weights) if decoder.adapters().is_none() => {
                    Layout::of_trained(&decoder.model()).export("", weights.reader(), sink)
                }
                _ => Ok(()),
            },
            StateGroup::Optimizer => {
                let Some(Moments { first, second, .. }) = &self.moments else { return Ok(()) };
                for (prefix, buffers) in [(FIRST, first), (SECOND, second)] {
                    trained.export(prefix, self.like_trained(buffers.clone()).reader(), sink)?;
                }
                Ok(())
            }
        }
    }

    pub(super) fn import_state(&mut self, state: &PolicyState<'_>) -> Result<()> {
        let (model, trained) = (self.modules.decoder().model(), self.modules.decoder().trained());
        let (of_model, of_trained) = (Layout::of_trained(&model), Layout::of_trained(self.modules.decoder()));
        let has_adapters = self.modules.decoder().adapters().is_some();
        // Everything is looked at before anything goes to the device.
        let weights = of_trained.import("", state.policy)?;
        let ref_policy = match state.ref_policy {
            // That beneath the adapters.
            None | Some([]) if has_adapters => None,
            tensors => tensors.map(|tensors| of_model.import("", tensors)).transpose()?,
        };
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
            _ => {
                let of = |prefix| of_trained.import(prefix, state.optimizer);
                Some((of(FIRST)?, of(SECOND)?))
            }
        };
        // What is frozen is there: if it is not, nothing is imported.
        let frozen = match has_adapters {
            true => Some(self.weights()?.subset(|role| role.is_of_model())),
            false => None,
        };
        let upload = |table, storage, tensors: &super::layout::Imported<'_>| {
            DeviceWeights::from_values(&self.runtime, table, storage, |name, shape| tensors.values(name, shape))
        };
        let (storage, single) = (self.weights.storage(), Storage::Plain(Dtype::F32));
        let moments = match moments {
            None => None,
            Some((first, second)) => {
                let first = upload(trained.clone(), single, &first)?.into_buffers();
                let second = upload(trained.clone(), single, &second)?.into_buffers();
                Some(Moments { first, second, bounds: None })
            }
        };
        let weights = upload(trained, storage, &weights)?;
        let ref_policy = match (ref_policy, &frozen) {
            (Some(tensors), _) => {
                // One that was not mixed has nothing beyond bf16.
                let is_narrow =
                    model.parameters().iter().filter(|p| storage.of(p) == Storage::Split).all(|parameter| {
                        let shape = parameter.tensor_shape();
                        let narrow =
                            |name| tensors.values(name, shape).is_ok_and(|values| values.iter().all(has_bf16_digits));
                        parameter.tensors().all(|(_, name)| narrow(name))
                    });
                let storage = if is_narrow { storage.without_remainders() } else { storage };
                Some(upload(model.parameters(), storage, &tensors)?)
            }
            (None, Some(frozen)) if state.ref_policy.is_some() => Some(frozen.clone().without_remainders()),
            (None, _) => None,
        };
        self.weights = match frozen {
            Some(frozen) => frozen.followed_by(weights),
            None => weights,
        };
        (self.ref_policy, self.moments) = (ref_policy, moments);
        (self.adamw, self.steps) = (state.adamw.clone(), state.optimizer_steps);
        self.remembered = None;
        self.forget_gradient();
        Ok(())
    }
}

/// Whether a number of f32 is one of bf16.
fn has_bf16_digits(value: &f32) -> bool {
    value.to_bits().trailing_zeros() >= 16
}
