//! Export and import of a policy's state as named tensors, one by one.

use super::layout::{Imported, Layout};
use super::{Moments, PjrtPolicy};
use crate::decoder::Parameter;
use crate::error::Result;
use crate::storage::Storage;
use crate::weights::DeviceWeights;
use policy::{Error, PolicyState, StateGroup, TensorSink, TensorSource, Weights};
use stablehlo::Dtype;

const FIRST: &str = "exp_avg.";
const SECOND: &str = "exp_avg_sq.";

impl PjrtPolicy {
    /// Passes a group of tensors to `sink`.
    pub(super) fn export_group(&self, group: StateGroup, sink: &mut dyn TensorSink) -> Result<()> {
        let (weights, decoder) = (self.weights()?, self.modules.decoder());
        let trained = Layout::of_trained(decoder);
        match group {
            StateGroup::Weights(Weights::Policy) => trained.export("", weights.reader(), sink),
            StateGroup::Weights(Weights::RefPolicy) => match &self.ref_policy {
                // With adapters, the reference policy is the frozen model, which checkpoints do not store.
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
        // Check everything before the first upload.
        let weights = of_trained.import("", state.policy)?;
        let ref_policy = match state.ref_policy {
            // With adapters, the reference policy is the frozen model.
            Some(tensors) if has_adapters && tensors.shapes().is_empty() => None,
            tensors => tensors.map(|tensors| of_model.import("", tensors)).transpose()?,
        };
        let (of_optimizer, of_policy) = (state.optimizer.shapes().len(), state.policy.shapes().len());
        let moments = match state.optimizer_steps {
            0 if of_optimizer == 0 => None,
            0 => {
                return Err(Error::state("the optimizer", "no tensors before its first step", of_optimizer).into());
            }
            _ if of_optimizer != 2 * of_policy => {
                let expected = format!("{} tensors", 2 * of_policy);
                return Err(Error::state("the optimizer", expected, of_optimizer).into());
            }
            _ => {
                let of = |prefix| of_trained.import(prefix, state.optimizer);
                Some((of(FIRST)?, of(SECOND)?))
            }
        };
        // Frozen weights are not imported; fail first if they are lost.
        let frozen = self.frozen()?;
        let (storage, single) = (self.weights.storage(), Storage::Plain(Dtype::F32));
        let moments = match moments {
            None => None,
            Some((first, second)) => {
                let first = self.upload(trained.clone(), single, &first)?.into_buffers();
                let second = self.upload(trained.clone(), single, &second)?.into_buffers();
                Some(Moments { first, second, bounds: None })
            }
        };
        let weights = self.upload(trained, storage, &weights)?;
        let ref_policy = match (ref_policy, &frozen) {
            (Some(tensors), _) => {
                // A reference policy that was never mixed has exact bf16 weights.
                let is_narrow =
                    model.parameters().iter().filter(|p| storage.of(p) == Storage::Split).all(|parameter| {
                        let shape = parameter.tensor_shape();
                        let narrow =
                            |name| tensors.values(name, shape).is_ok_and(|values| values.iter().all(has_bf16_digits));
                        parameter.tensors().all(|(_, name)| narrow(name))
                    });
                let storage = if is_narrow { storage.without_remainders() } else { storage };
                Some(self.upload(model.parameters(), storage, &tensors)?)
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

    /// Replaces the trained weights; moments and reference policy stay the same.
    ///
    /// # Errors
    /// [`crate::Error::Lost`] if a device failure lost the state: the moments are then lost, too.
    pub(super) fn import_trained(&mut self, weights: &dyn TensorSource) -> Result<()> {
        self.weights()?;
        let decoder = self.modules.decoder();
        let layout = Layout::of_trained(decoder);
        let (weights, frozen) = (layout.import("", weights)?, self.frozen()?);
        let weights = self.upload(decoder.trained(), self.weights.storage(), &weights)?;
        self.weights = match frozen {
            Some(frozen) => frozen.followed_by(weights),
            None => weights,
        };
        if let Some(moments) = &mut self.moments {
            moments.bounds = None;
        }
        self.remembered = None;
        self.forget_gradient();
        Ok(())
    }

    /// Returns the frozen weights; `None` if all weights are trained.
    fn frozen(&self) -> Result<Option<DeviceWeights>> {
        let has_adapters = self.modules.decoder().adapters().is_some();
        has_adapters.then(|| Ok(self.weights()?.subset(|role| role.is_of_model()))).transpose()
    }

    /// Uploads tensors of a checkpoint, one by one.
    fn upload(&self, table: Vec<Parameter>, storage: Storage, tensors: &Imported<'_>) -> Result<DeviceWeights> {
        DeviceWeights::from_values(&self.runtime, table, storage, |name, shape| tensors.values(name, shape))
    }
}

/// Returns `true` if the f32 number is exact in bf16.
fn has_bf16_digits(value: &f32) -> bool {
    value.to_bits().trailing_zeros() >= 16
}
