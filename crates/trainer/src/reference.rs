//! The reference of the KL: the policy of a moment, which may follow the policy from afar.

use crate::error::Result;
use crate::model::Decoder;
use crate::train_config::GrpoConfig;
use burn::module::Module;

/// Moves `reference` towards `policy` where `optimizer_steps` says that it is time: reference = alpha x policy + (1 -
/// alpha) x reference. TR-DPO, arXiv 2404.09656; TRL's SyncRefModelCallback, which fires after every
/// `ref_model_sync_steps`th optimizer step, counted from 1.
///
/// # Errors
/// [`crate::Error::State`] when the two are of different models.
pub(crate) fn follow(
    reference: &mut Option<Decoder>,
    policy: &Decoder,
    optimizer_steps: u64,
    config: &GrpoConfig,
) -> Result<()> {
    let due = config.sync_ref_model && optimizer_steps.is_multiple_of(config.ref_model_sync_steps);
    if let Some(old) = reference.as_ref().filter(|_| due) {
        *reference = Some(mix(old, policy, config.ref_model_mixup_alpha)?);
    }
    Ok(())
}

fn mix(reference: &Decoder, policy: &Decoder, alpha: f64) -> Result<Decoder> {
    let (of_policy, of_reference) = (alpha as f32, (1.0 - alpha) as f32);
    let mut mixed = policy.valid().parameters();
    // Both are of one model: the order of its walk.
    for (new, old) in mixed.iter_mut().zip(reference.parameters()) {
        for (new, old) in new.data.iter_mut().zip(old.data) {
            *new = of_policy * *new + of_reference * old;
        }
    }
    reference.clone().with_parameters(&mixed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelConfig;
    use burn::tensor::Device;

    /// A model all of whose weights are `value`.
    fn filled(value: f32) -> Decoder {
        let model = Decoder::new(&ModelConfig::default(), 0, &Device::flex()).unwrap();
        let mut weights = model.parameters();
        weights.iter_mut().for_each(|tensor| tensor.data.fill(value));
        model.with_parameters(&weights).unwrap()
    }

    #[test]
    fn the_mix_is_made_every_so_many_optimizer_steps() {
        let config = GrpoConfig {
            sync_ref_model: true,
            ref_model_mixup_alpha: 0.75,
            ref_model_sync_steps: 3,
            ..Default::default()
        };
        let (policy, mut reference) = (filled(2.0), Some(filled(-2.0)));
        let mut seen = Vec::new();
        for step in 1..=6 {
            follow(&mut reference, &policy, step, &config).unwrap();
            let weights = reference.as_ref().unwrap().parameters();
            let first = weights[0].data[0];
            assert!(weights.iter().all(|tensor| tensor.data.iter().all(|w| *w == first)));
            seen.push(first);
        }
        // 0.75 x 2 - 0.25 x 2 = 1, then 0.75 x 2 + 0.25 x 1 = 1.75.
        assert_eq!(seen, [-2.0, -2.0, 1.0, 1.0, 1.0, 1.75]);
    }

    #[test]
    fn without_being_asked_or_without_a_reference_nothing_moves() {
        let off = GrpoConfig { ref_model_sync_steps: 1, ..GrpoConfig::default() };
        let mut reference = Some(filled(-2.0));
        follow(&mut reference, &filled(2.0), 1, &off).unwrap();
        assert_eq!(reference.unwrap().parameters(), filled(-2.0).parameters());
        let mut none = None;
        follow(&mut none, &filled(2.0), 1, &GrpoConfig { sync_ref_model: true, ..off }).unwrap();
        assert!(none.is_none());
    }
}
