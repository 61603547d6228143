//! The slices of TPU generations.

/// The slices of a TPU generation.
#[derive(Debug)]
pub(super) struct Slices {
    /// The name of the generation.
    pub(super) generation: &'static str,
    /// The shape of a target without one.
    pub(super) smallest: &'static str,
    /// The usual shapes, smallest first.
    shapes: &'static [&'static str],
    /// The number of axes, x first.
    axes: usize,
    /// The number of chips of the largest slice.
    most: usize,
    /// The number of devices of a chip, as PJRT counts them.
    devices: usize,
}

/// The slices of every generation. Sizes of pods: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}.
pub(super) const TPUS: [Slices; 5] = [
    Slices { generation: "v4", smallest: "2x2x1", shapes: &BOXES, axes: 3, most: 4096, devices: 2 },
    Slices { generation: "v5e", smallest: "2x2", shapes: &PLANES, axes: 2, most: 256, devices: 1 },
    Slices { generation: "v5p", smallest: "2x2x1", shapes: &BOXES, axes: 3, most: 8960, devices: 1 },
    Slices { generation: "v6e", smallest: "1x1", shapes: &PLANES, axes: 2, most: 256, devices: 1 },
    Slices { generation: "tpu7x", smallest: "2x2x1", shapes: &BOXES, axes: 3, most: 9216, devices: 2 },
];

/// The length of an axis of a plane whose last chip has a link to its first one.
const RING: usize = 16;

const PLANES: [&str; 8] = ["1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"];
const BOXES: [&str; 6] = ["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8"];

impl Slices {
    /// Returns the slices of a generation.
    pub(super) fn of(generation: &str) -> Option<&'static Self> {
        TPUS.iter().find(|slices| slices.generation == generation)
    }

    /// Returns the number of devices of a slice and the number of links through which each receives in a collective of all of them: one per
    /// axis, two along a ring. `None` if the generation has no such slice: hosts have 2 x 2 chips, so that sides above 1 are even.
    pub(super) fn devices_and_links(&self, shape: &str) -> Option<(usize, usize)> {
        let sides = shape.split('x').map(|side| side.parse().ok());
        let sides = sides.collect::<Option<Vec<usize>>>()?;
        let is_legal = |side: &usize| *side == 1 || (*side > 0 && side.is_multiple_of(2));
        let chips = sides.iter().try_fold(1_usize, |all, side| all.checked_mul(*side))?;
        if sides.len() != self.axes || !sides.iter().all(is_legal) || chips > self.most {
            return None;
        }
        // Cubes of 4 x 4 x 4 chips are joined to rings; smaller boxes have none.
        let has_cubes = self.axes == 3 && sides.iter().all(|side| side.is_multiple_of(4));
        let is_ring = |side: usize| has_cubes || (self.axes == 2 && side >= RING);
        let links = sides.iter().filter(|side| **side > 1).map(|side| if is_ring(*side) { 2 } else { 1 });
        Some((chips * self.devices, links.sum::<usize>().max(1)))
    }

    /// Returns the shapes of the generation, for an error.
    pub(super) fn known(&self) -> String {
        format!("{}, ..., of up to {} chips", self.shapes.join(", "), self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_have_links_along_their_axes() {
        let of = |generation, shape| Slices::of(generation).expect("a generation").devices_and_links(shape);
        assert_eq!(of("v6e", "1x1"), Some((1, 1)));
        assert_eq!(of("v6e", "2x4"), Some((8, 2)));
        assert_eq!(of("v6e", "8x16"), Some((128, 3)));
        assert_eq!(of("v5e", "1x4"), Some((4, 1)));
        assert_eq!(of("v5p", "2x2x1"), Some((4, 2)));
        assert_eq!(of("v5p", "2x4x4"), Some((32, 3)));
        assert_eq!(of("v5p", "4x4x8"), Some((128, 6)));
        assert_eq!(of("v4", "2x2x1"), Some((8, 2)));
        assert_eq!(of("tpu7x", "2x2x1"), Some((8, 2)));
        for (generation, shape) in [
            ("v6e", "3x5"),
            ("v6e", "2x2x1"),
            ("v6e", "32x32"),
            ("v6e", ""),
            ("v6e", "0x4"),
            ("v5p", "2x4"),
            ("v5p", "4x4x0"),
            ("v5p", "9999999999x9999999999x2"),
        ] {
            assert_eq!(of(generation, shape), None, "{generation}:{shape}");
        }
    }
}
