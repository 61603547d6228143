//! Sharding of tensors over the devices of a mesh: splitting and assembling.
//!
//! Tensors are matrices `[rows, columns]` here; a vector of tokens is `[N, 1]`, a bias `[1, V]`. All devices hold
//! shards of the same size; entries beyond the tensor are padding.

use crate::program::{Mesh, Role, Spec};
use grpo_core::{HeadLayout, PolicySpec};
use std::borrow::Cow;
use std::ops::Range;

/// The sharding of a tensor over the devices of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Rows and columns of the tensor without padding.
    rows: usize,
    columns: usize,
    /// Rows and columns of one shard.
    part: [usize; 2],
    /// The dimensions of the mesh along which rows and columns are sharded.
    cut: [Option<Axis>; 2],
    mesh: Mesh,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Axis {
    Data,
    Vocab,
}

impl Layout {
    /// Returns the layout of the tensor of `role`, for a batch of `tokens`.
    pub(crate) fn new(spec: &Spec, role: Role, tokens: usize) -> Self {
        let vocab = spec.policy.vocab();
        let (h, layout) = match spec.policy {
            PolicySpec::Hidden { hidden, layout, .. } => (hidden, layout),
            PolicySpec::Logits { .. } => (0, HeadLayout::VocabHidden),
        };
        let (by_data, by_vocab) = (Some(Axis::Data), Some(Axis::Vocab));
        let ([rows, columns], cut) = match role {
            Role::Hidden | Role::GradHidden => ([tokens, h], [by_data, None]),
            Role::LmHead | Role::GradLmHead => match layout {
                HeadLayout::VocabHidden => ([vocab, h], [by_vocab, None]),
                HeadLayout::HiddenVocab => ([h, vocab], [None, by_vocab]),
            },
            Role::Bias | Role::GradBias => ([1, vocab], [None, by_vocab]),
            Role::Logits | Role::GradLogits => ([tokens, vocab], [by_data, by_vocab]),
            Role::Logp | Role::Entropy => ([tokens, 1], [by_data, None]),
            Role::TokenIds | Role::TokenNumbers | Role::OnPolicy | Role::Sums => {
                ([1, spec.type_of(role).elements()], [None, None])
            }
        };
        let part = |whole: usize, cut: Option<Axis>| match cut {
            None => whole,
            Some(Axis::Data) => spec.local_tokens(),
            Some(Axis::Vocab) => spec.local_vocab(),
        };
        Self { rows, columns, part: [part(rows, cut[0]), part(columns, cut[1])], cut, mesh: spec.mesh }
    }

    /// Returns the elements of the tensor without padding.
    pub(crate) fn elements(&self) -> usize {
        self.rows * self.columns
    }

    /// Returns the rows and columns of the tensor that `device` holds.
    fn window(&self, device: usize) -> [Range<usize>; 2] {
        let ranks = [device / self.mesh.vocab, device % self.mesh.vocab];
        [0, 1].map(|d| {
            let size = [self.rows, self.columns][d];
            let rank = match self.cut[d] {
                None => 0,
                Some(Axis::Data) => ranks[0],
                Some(Axis::Vocab) => ranks[1],
            };
            let start = (rank * self.part[d]).min(size);
            start..(start + self.part[d]).min(size)
        })
    }

    /// Returns `true` if `device` is the first one with its shard.
    fn is_first(&self, device: usize) -> bool {
        let [data, vocab] = [device / self.mesh.vocab, device % self.mesh.vocab];
        let has = |axis| self.cut.contains(&Some(axis));
        (has(Axis::Data) || data == 0) && (has(Axis::Vocab) || vocab == 0)
    }

    /// Returns the elements of the shard of `device` if they are contiguous and have no padding.
    fn contiguous(&self, [rows, columns]: &[Range<usize>; 2]) -> Option<Range<usize>> {
        let is_whole = columns.len() == self.columns && self.part == [rows.len(), columns.len()];
        is_whole.then(|| rows.start * self.columns..rows.end * self.columns)
    }

    /// Returns the shard of `device`, padded with zeros; borrowed if it is contiguous.
    pub(crate) fn part<'a, T: Copy + Default>(&self, tensor: &'a [T], device: usize) -> Cow<'a, [T]> {
        let window = self.window(device);
        if let Some(elements) = self.contiguous(&window) {
            return Cow::Borrowed(&tensor[elements]);
        }
        let [rows, columns] = window;
        let mut part = vec![T::default(); self.part[0] * self.part[1]];
        for (row, to) in rows.zip(part.chunks_mut(self.part[1].max(1))) {
            to[..columns.len()].copy_from_slice(&tensor[row * self.columns..][columns.clone()]);
        }
        Cow::Owned(part)
    }

    /// Assembles the tensor from shards; `read` fills a slice with the shard of a device. Replicas are read once.
    pub(crate) fn collect<T: Copy + Default, E>(
        &self,
        tensor: &mut [T],
        mut read: impl FnMut(usize, &mut [T]) -> Result<(), E>,
    ) -> Result<(), E> {
        for device in (0..self.mesh.devices()).filter(|d| self.is_first(*d)) {
            let window = self.window(device);
            if let Some(elements) = self.contiguous(&window) {
                read(device, &mut tensor[elements])?;
                continue;
            }
            let [rows, columns] = window;
            let mut part = vec![T::default(); self.part[0] * self.part[1]];
            read(device, &mut part)?;
            for (row, from) in rows.zip(part.chunks(self.part[1].max(1))) {
                tensor[row * self.columns..][columns.clone()].copy_from_slice(&from[..columns.len()]);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Blocking, Numerics};
    use grpo_core::{Dtype, GradientSpec, Implementation, LossConfig};

    fn spec(mesh: Mesh, layout: HeadLayout) -> Spec {
        Spec {
            loss: LossConfig::default().into(),
            implementation: Implementation::Fused,
            tokens: 5,
            policy: PolicySpec::Hidden { hidden: 2, vocab: 7, dtype: Dtype::F32, layout, bias: true },
            gradients: GradientSpec::default(),
            blocking: Blocking::TokenChunks(2),
            mosaic: None,
            numerics: Numerics::default(),
            mesh,
        }
    }

    #[test]
    fn shards_assemble_to_the_tensor() {
        for mesh in
            [Mesh::default(), Mesh { data: 2, vocab: 1 }, Mesh { data: 1, vocab: 4 }, Mesh { data: 3, vocab: 2 }]
        {
            for layout in [HeadLayout::VocabHidden, HeadLayout::HiddenVocab] {
                let spec = spec(mesh, layout);
                for role in [Role::Hidden, Role::LmHead, Role::Bias, Role::Logits, Role::Logp] {
                    let layout = Layout::new(&spec, role, 4);
                    let tensor: Vec<f32> = (1..=layout.elements()).map(|i| i as f32).collect();
                    let mut back = vec![0.0; tensor.len()];
                    let mut read = |device: usize, part: &mut [f32]| {
                        part.copy_from_slice(&layout.part(&tensor, device));
                        Ok::<(), ()>(())
                    };
                    layout.collect(&mut back, &mut read).unwrap();
                    assert_eq!(back, tensor, "{role:?} on {mesh:?}");
                }
            }
        }
    }

    #[test]
    fn shards_are_padded_with_zeros() {
        let spec = spec(Mesh { data: 2, vocab: 2 }, HeadLayout::HiddenVocab);
        let head: Vec<f32> = (0..14).map(|i| i as f32).collect(); // [2, 7]
        let layout = Layout::new(&spec, Role::LmHead, 5);
        assert_eq!(layout.part(&head, 2)[..], [0.0, 1.0, 2.0, 3.0, 7.0, 8.0, 9.0, 10.0]);
        assert_eq!(layout.part(&head, 3)[..], [4.0, 5.0, 6.0, 0.0, 11.0, 12.0, 13.0, 0.0]);
    }
}
