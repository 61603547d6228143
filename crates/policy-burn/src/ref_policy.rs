//! The reference policy of the KL, moved towards the policy.

use crate::decoder::Decoder;
use burn::module::Module;
use policy::Result;

/// The weights of `policy` as a reference policy, which has neither a value head nor adapters, on a device without autodiff. What lies
/// beneath adapters is shared and not copied.
pub(crate) fn freeze(policy: &Decoder) -> Decoder {
    let mut frozen = policy.clone().without_adapters().valid();
    frozen.value_head = None;
    frozen
}

/// alpha x policy + (1 - alpha) x ref, weight by weight. `policy` is on a device with autodiff, the result is not.
///
/// # Errors
/// [`policy::Error::State`] when the two are of different models.
pub(crate) fn mix(ref_policy: &Decoder, policy: &Decoder, alpha: f64) -> Result<Decoder> {
    let (of_policy, of_ref) = (alpha as f32, (1.0 - alpha) as f32);
    let mut mixed = freeze(policy).parameters();
    // Both are of one model, so their parameters come in the same order.
    for (new, old) in mixed.iter_mut().zip(ref_policy.parameters()) {
        for (new, old) in new.data.iter_mut().zip(old.data) {
            *new = of_policy * *new + of_ref * old;
        }
    }
    ref_policy.clone().with_parameters(&mixed)
}
