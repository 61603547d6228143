//! Export and import of a policy's state as named tensors, one by one.

use super::PjrtPolicy;
use crate::decoder::{Parameter, Role};
use crate::error::Result;
use crate::storage::Storage;
use crate::train::Optimizer;
use crate::weights::DeviceWeights;
use grpo_policy::{
    PolicyState, StateGroup, TensorSink, TensorSource, Weights, check_moments, check_optimizer, check_tensors,
};

impl PjrtPolicy {
    /// Passes a group of tensors to `sink`.
    pub(super) fn export_group(&self, group: StateGroup, sink: &mut dyn TensorSink) -> Result<()> {
        let (weights, decoder) = (self.weights()?, self.modules.decoder());
        match group {
            StateGroup::Weights(Weights::Policy) => weights.subset(|role| decoder.trains(role)).export(sink),
            StateGroup::Weights(Weights::RefPolicy) => match &self.ref_policy {
                // With adapters, the reference policy is the frozen model, which checkpoints do not store.
                Some(weights) if decoder.adapters().is_none() => {
                    weights.subset(|role| decoder.trains(role)).export(sink)
                }
                _ => Ok(()),
            },
            StateGroup::Optimizer => {
                let Some(moments) = &self.moments else { return Ok(()) };
                self.optimizer.export(&self.runtime, moments, sink)
            }
        }
    }

    pub(super) fn import_state(&mut self, state: &PolicyState<'_>) -> Result<()> {
        let trained = self.modules.decoder().trained();
        let of_ref: Vec<Parameter> = trained.iter().filter(|p| p.role.is_of_model()).cloned().collect();
        let has_adapters = self.modules.decoder().adapters().is_some();
        // Check everything before the first upload.
        check_tensors(&tensors_of(&trained), "", state.policy)?;
        // With adapters, the reference policy is the frozen model.
        let ref_policy = state.ref_policy.filter(|tensors| !has_adapters || !tensors.shapes().is_empty());
        if let Some(tensors) = ref_policy {
            check_tensors(&tensors_of(&of_ref), "", tensors)?;
        }
        check_optimizer(state.optimizer_settings.name, has_adapters)?;
        check_moments(&tensors_of(&trained), state.optimizer_steps, state.optimizer_settings.name, state.optimizer)?;
        // Frozen weights are not imported; fail first if they are lost.
        let frozen = self.frozen()?;
        let storage = self.weights.storage();
        let optimizer = Optimizer::new(trained.clone(), storage, state.optimizer_settings.name);
        let moments = match state.optimizer_steps {
            0 => None,
            _ => Some(optimizer.import(&self.runtime, state.optimizer)?),
        };
        let weights = DeviceWeights::from_source(&self.runtime, trained, storage, "", state.policy)?;
        let ref_policy = match ref_policy {
            Some(tensors) => {
                // A reference policy that was never mixed has exact bf16 weights.
                let is_narrow = of_ref.iter().filter(|p| storage.of(p) == Storage::Split).all(|parameter| {
                    let narrow =
                        |name: &str| tensors.values(name).is_ok_and(|values| values.iter().all(has_bf16_digits));
                    parameter.tensors().all(|(_, name)| narrow(&name))
                });
                let frozen = if is_narrow { frozen.clone().without_remainders() } else { frozen.clone() };
                let of_ref = DeviceWeights::from_source(&self.runtime, of_ref, frozen.storage(), "", tensors)?;
                Some(frozen.followed_by(of_ref))
            }
            None if state.ref_policy.is_some() => Some(frozen.clone().without_remainders()),
            None => None,
        };
        self.weights = frozen.followed_by(weights);
        (self.ref_policy, self.moments) = (ref_policy, moments);
        self.set_optimizer(state.optimizer_settings);
        self.steps = state.optimizer_steps;
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
        check_tensors(&tensors_of(&decoder.trained()), "", weights)?;
        let frozen = self.frozen()?;
        let weights =
            DeviceWeights::from_source(&self.runtime, decoder.trained(), self.weights.storage(), "", weights)?;
        self.weights = frozen.followed_by(weights);
        if let Some(moments) = &mut self.moments {
            moments.bounds = None;
        }
        self.remembered = None;
        self.forget_gradient();
        Ok(())
    }

    /// Returns the weights that are not trained: the model below adapters, or frozen routers and factors of layers.
    ///
    /// # Errors
    /// [`crate::Error::Lost`] if there are such weights, and a device failure lost the state.
    pub(super) fn frozen(&self) -> Result<DeviceWeights> {
        let decoder = self.modules.decoder();
        let is_frozen = |role: Role| !decoder.trains(role);
        if decoder.parameters().iter().any(|parameter| is_frozen(parameter.role)) {
            self.weights()?;
        }
        Ok(self.weights.subset(is_frozen))
    }
}

/// Returns the tensors of `transformers` in a table.
fn tensors_of(table: &[Parameter]) -> Vec<grpo_models::Parameter> {
    let named = |p: &Parameter, name| grpo_models::Parameter { name, shape: p.file_shape() };
    table.iter().flat_map(|p| p.tensors().map(move |(_, name)| named(p, name))).collect()
}

/// Returns `true` if the f32 number is exact in bf16.
fn has_bf16_digits(value: &f32) -> bool {
    value.to_bits().trailing_zeros() >= 16
}
