//! The update of the reference policy of the KL towards the policy.

use crate::decoder::{Decoder, Which, for_each_parameter};
use burn::module::Module;
use policy::{Result, TensorSource};
use std::collections::HashMap;

/// Returns the weights of `policy` as a reference policy: without value head, adapters and autodiff. Weights below adapters are shared, not
/// copied.
pub(crate) fn freeze(policy: &Decoder) -> Decoder {
    let mut frozen = policy.clone().without_adapters().valid();
    frozen.value_head = None;
    frozen
}

/// Computes alpha x policy + (1 - alpha) x ref for all weights. `policy` is on a device with autodiff, the result is not.
///
/// # Errors
/// [`policy::Error::State`] if the two models differ.
pub(crate) fn mix(ref_policy: &Decoder, policy: &Decoder, alpha: f64) -> Result<Decoder> {
    let (of_policy, of_ref) = (alpha as f32, (1.0 - alpha) as f32);
    let frozen = freeze(policy);
    let mut mixed = frozen.parameters();
    // Both have the same model, so their parameters are in the same order.
    let mut all = mixed.iter_mut();
    for_each_parameter(ref_policy, Which::All, |_, _, old| {
        for (new, old) in all.next().into_iter().flat_map(|new| &mut new.data).zip(old) {
            *new = of_policy * *new + of_ref * old;
        }
        Ok(())
    })?;
    frozen.with_parameters(&mixed)
}

/// Returns `true` if `tensors` equals all weights of `model` bit for bit.
pub(crate) fn has_values(model: &Decoder, tensors: &dyn TensorSource) -> bool {
    let shapes: HashMap<&str, &[usize]> = tensors.shapes().into_iter().collect();
    let mut count = 0;
    let equal = for_each_parameter(model, Which::All, |name, shape, values| {
        count += 1;
        let equal = shapes.get(name) == Some(&shape) && {
            let found = tensors.values(name)?;
            let bits = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
            found.len() == values.len() && found.iter().zip(values).all(bits)
        };
        if equal { Ok(()) } else { Err(policy::Error::state(name, "the same values", "others")) }
    });
    equal.is_ok() && count == shapes.len()
}
