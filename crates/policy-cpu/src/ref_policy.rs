//! The update of the reference policy of the KL towards the policy.

use crate::decoder::{Decoder, Tensors, Which, for_each_parameter, update_parameters};
use burn::module::Module;
use grpo_models::Parameter;
use grpo_policy::{Result, TensorSource, check_tensors};

/// Returns the weights of `policy` as a reference policy: without value head, adapters and autodiff. Weights below adapters are shared, not
/// copied.
pub(crate) fn freeze(policy: &Decoder) -> Decoder {
    let mut frozen = policy.clone().without_adapters().valid();
    frozen.value_head = None;
    frozen
}

/// Computes alpha x policy + (1 - alpha) x ref for all trained weights; the others are equal. `policy` is on a device with autodiff, the result
/// is not.
pub(crate) fn mix(ref_policy: &Decoder, policy: &Decoder, alpha: f64) -> Result<Decoder> {
    let (of_policy, of_ref) = (alpha as f32, (1.0 - alpha) as f32);
    // Both have the same model, so their parameters are in the same order.
    let mut old = Vec::new();
    for_each_parameter(ref_policy, Which::Trained, |_, _, values| {
        old.push(values.to_vec());
        Ok(())
    })?;
    let mut all = old.iter();
    Ok(update_parameters(freeze(policy), |_, _, values| {
        for (new, old) in values.iter_mut().zip(all.next().into_iter().flatten()) {
            *new = of_policy * *new + of_ref * old;
        }
    }))
}

/// Returns `true` if `tensors` are the tensors `trained` and equal the trained weights of the reference policy `model` bit for bit.
pub(crate) fn has_values(model: &Decoder, trained: &[Parameter], tensors: &dyn TensorSource) -> bool {
    if check_tensors(trained, "", tensors).is_err() {
        return false;
    }
    let tensors = Tensors { config: model.config(), adapted: &model.adapted, prefix: "", tensors };
    let equal = for_each_parameter(model, Which::Trained, |name, shape, values| {
        let mut found = vec![0.0; values.len()];
        tensors.read(name, shape, &mut found)?;
        let is_equal = found.iter().zip(values).all(|(a, b)| a.to_bits() == b.to_bits());
        if is_equal { Ok(()) } else { Err(grpo_policy::Error::state(name, "the same values", "others")) }
    });
    equal.is_ok()
}
