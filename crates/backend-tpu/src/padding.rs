//! Padding of tensors: a batch may be smaller than planned, and devices take equal shards of tokens and vocabulary.

use crate::program::{Role, Spec};
use std::borrow::Cow;

/// The shape of a tensor on the host and on the devices, as matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Padding {
    host: [usize; 2],
    device: [usize; 2],
}

impl Padding {
    /// Returns the shapes of the tensor of `role`, for a batch of `tokens`.
    pub(crate) fn new(spec: &Spec, role: Role, tokens: usize) -> Self {
        let matrix = |shape: &[usize]| match *shape {
            [rows, columns] => [rows, columns],
            _ => [shape.iter().product(), 1],
        };
        let host = matrix(&spec.shape_of(role, tokens, spec.policy.vocab()));
        Self { host, device: matrix(&spec.type_of(role).shape) }
    }

    /// Returns the elements of the tensor without padding.
    pub(crate) fn elements(&self) -> usize {
        self.host.iter().product()
    }

    /// Returns `true` if the devices hold no padding.
    pub(crate) fn is_none(&self) -> bool {
        self.host == self.device
    }

    /// Returns the tensor for the devices, padded with zeros; borrowed if there is no padding.
    pub(crate) fn pad<'a, T: Copy + Default>(&self, tensor: &'a [T]) -> Cow<'a, [T]> {
        if self.is_none() {
            return Cow::Borrowed(tensor);
        }
        let mut padded = vec![T::default(); self.device.iter().product()];
        self.rows().for_each(|(host, device)| padded[device].copy_from_slice(&tensor[host]));
        Cow::Owned(padded)
    }

    /// Copies the tensor of the devices into `tensor`, without padding.
    pub(crate) fn crop<T: Copy>(&self, padded: &[T], tensor: &mut [T]) {
        self.rows().for_each(|(host, device)| tensor[host].copy_from_slice(&padded[device]));
    }

    /// Returns the range of every row on the host and on the devices.
    fn rows(&self) -> impl Iterator<Item = (std::ops::Range<usize>, std::ops::Range<usize>)> {
        let ([rows, columns], [_, width]) = (self.host, self.device);
        (0..rows).map(move |row| (row * columns..(row + 1) * columns, row * width..row * width + columns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Blocking, MeshShape, Numerics};
    use grpo_core::{Dtype, GradientSpec, HeadLayout, Implementation, LossConfig, PolicySpec};

    fn spec(mesh: MeshShape, layout: HeadLayout) -> Spec {
        Spec {
            loss: LossConfig::default().into(),
            implementation: Implementation::Fused,
            tokens: 5,
            policy: PolicySpec::Hidden { hidden: 2, vocab: 7, dtype: Dtype::F32, layout, bias: true },
            vocab_padding: 0,
            gradients: GradientSpec::default(),
            blocking: Blocking::TokenChunks(2),
            mosaic: None,
            sampling_mask: false,
            numerics: Numerics::default(),
            mesh,
        }
    }

    #[test]
    fn cropping_inverts_padding() {
        for (data, tensor) in [(1, 1), (2, 1), (1, 4), (3, 2)] {
            for layout in [HeadLayout::VocabHidden, HeadLayout::HiddenVocab] {
                let spec = spec(MeshShape { data, tensor }, layout);
                for role in [Role::Hidden, Role::LmHead, Role::Bias, Role::Logits, Role::Logp] {
                    let padding = Padding::new(&spec, role, 4);
                    let tensor: Vec<f32> = (1..=padding.elements()).map(|i| i as f32).collect();
                    let mut back = vec![0.0; tensor.len()];
                    padding.crop(&padding.pad(&tensor), &mut back);
                    assert_eq!(back, tensor, "{role:?} on {:?}", spec.mesh);
                }
            }
        }
    }

    #[test]
    fn a_vocabulary_is_padded_with_zeros_to_a_multiple_of_the_devices() {
        let spec = spec(MeshShape { data: 2, tensor: 2 }, HeadLayout::HiddenVocab);
        let head: Vec<f32> = (1..=14).map(|i| i as f32).collect(); // [2, 7]
        let padded = Padding::new(&spec, Role::LmHead, 5).pad(&head).into_owned();
        assert_eq!(padded, [&head[..7], &[0.0], &head[7..], &[0.0]].concat());
        assert_eq!(Padding::new(&spec, Role::Hidden, 5).device, [6, 2]);
    }
}
