//! The order of devices in a mesh.

use crate::plugins::Kind;
use grpo_pjrt::{DeviceDescription, NamedValue};

/// Returns the indices of the first `count` devices of a client in the order of a mesh: by id, and TPUs in the order of a ring
/// of neighbours. All processes of a run have the same order.
pub fn mesh_order(kind: Kind, devices: &[DeviceDescription], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..devices.len()).collect();
    order.sort_by_key(|at| devices[*at].id);
    order.truncate(count);
    if kind != Kind::Tpu {
        return order;
    }
    let chips: Vec<DeviceDescription> = order.iter().map(|at| devices[*at].clone()).collect();
    ring_order(&chips).into_iter().map(|at| order[at]).collect()
}

/// Returns the indices of the chips of a TPU slice in the order of a ring of neighbours: the collectives of a mesh axis pass data
/// between devices that follow one another.
///
/// The order goes back and forth along the longest axis of the slice. For 2 x 2 and 2 x 2 x 2 chips it is the order of JAX's
/// `mesh_utils`: 0, 1, 3, 2 and 0, 1, 3, 2, 6, 7, 5, 4. For eight chips in a plane, JAX has 0, 1, 2, 3, 7, 6, 5, 4, which is a ring if four
/// chips are along x; libtpu places the chips of `v6e:2x4` two along x and four along y, where the ring is 0, 2, 4, 6, 7, 5, 3, 1.
///
/// A slice whose shortest axis does not have two chips has no such ring, and devices without coordinates or with several cores per chip
/// have no known neighbours: they stay in the given order.
fn ring_order(devices: &[DeviceDescription]) -> Vec<usize> {
    let in_ring = positions(devices);
    let mut order: Vec<usize> = (0..devices.len()).collect();
    if let Some(in_ring) = in_ring {
        order.sort_by_key(|i| in_ring[*i]);
    }
    order
}

/// Returns the position of each device in the ring; `None` if there is none.
fn positions(devices: &[DeviceDescription]) -> Option<Vec<i64>> {
    let all = devices.iter().map(coordinates).collect::<Option<Vec<_>>>()?;
    let rank = all.first()?.len();
    if all.iter().any(|one| one.len() != rank) {
        return None;
    }
    let bounds = |axis: usize| {
        let along = || all.iter().map(|one| one[axis]);
        let first = along().min()?;
        Some((axis, first, along().max()?.checked_sub(first)?.checked_add(1)?))
    };
    let mut axes = (0..rank).map(bounds).collect::<Option<Vec<_>>>()?;
    axes.retain(|(_, _, size)| *size > 1);
    // The longest axis is the innermost; of equal ones, the first.
    axes.sort_by_key(|(axis, _, size)| (*size, std::cmp::Reverse(*axis)));
    let chips = axes.iter().try_fold(1_i64, |product, (_, _, size)| product.checked_mul(*size))?;
    if axes.len() < 2 || axes[0].2 != 2 || chips != devices.len() as i64 {
        return None;
    }
    let position = |one: &&[i64]| {
        axes.iter().fold(0, |at, (axis, first, size)| {
            let along = one[*axis] - first;
            // An odd row goes back.
            at * size + if at % 2 == 0 { along } else { size - 1 - along }
        })
    };
    let positions: Vec<i64> = all.iter().map(position).collect();
    let mut sorted = positions.clone();
    sorted.sort_unstable();
    sorted.into_iter().eq(0..chips).then_some(positions)
}

/// Returns the coordinates of a chip with one core.
fn coordinates(device: &DeviceDescription) -> Option<&[i64]> {
    let core = device.attributes.get("core_on_chip");
    match device.attributes.get("coords") {
        Some(NamedValue::Ints(coordinates)) if core.is_none_or(|core| *core == NamedValue::Int(0)) => Some(coordinates),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(id: usize, attributes: &[(&str, NamedValue)]) -> DeviceDescription {
        DeviceDescription {
            id: id as i32,
            process_index: 0,
            kind: "TPU v6 lite".into(),
            debug_string: String::new(),
            attributes: attributes.iter().map(|(name, value)| ((*name).into(), value.clone())).collect(),
        }
    }

    /// Returns the chips of a slice, the first axis innermost.
    fn slice(sizes: [i64; 3]) -> Vec<DeviceDescription> {
        let [x, y, z] = sizes;
        let at = |i: i64| NamedValue::Ints(vec![i % x, i / x % y, i / x / y]);
        (0..x * y * z).map(|i| device(i as usize, &[("coords", at(i)), ("core_on_chip", 0.into())])).collect()
    }

    #[test]
    fn the_order_of_a_mesh_does_not_depend_on_the_order_of_a_client() {
        let ids = |kind, devices: &[DeviceDescription], count| -> Vec<i32> {
            mesh_order(kind, devices, count).into_iter().map(|at| devices[at].id).collect()
        };
        let mut devices = slice([4, 2, 1]);
        for _ in 0..devices.len() {
            devices.rotate_left(3);
            assert_eq!(ids(Kind::Tpu, &devices, 8), [0, 1, 2, 3, 7, 6, 5, 4]);
            assert_eq!(ids(Kind::Cuda, &devices, 8), [0, 1, 2, 3, 4, 5, 6, 7]);
            assert_eq!(ids(Kind::Cpu, &devices, 3), [0, 1, 2]);
        }
    }

    #[test]
    fn small_slices_are_in_the_order_of_a_ring() {
        assert_eq!(ring_order(&slice([2, 2, 1])), [0, 1, 3, 2]);
        assert_eq!(ring_order(&slice([4, 2, 1])), [0, 1, 2, 3, 7, 6, 5, 4]);
        assert_eq!(ring_order(&slice([2, 4, 1])), [0, 2, 4, 6, 7, 5, 3, 1]);
        assert_eq!(ring_order(&slice([2, 2, 2])), [0, 1, 3, 2, 6, 7, 5, 4]);
    }

    #[test]
    fn neighbours_in_the_ring_are_neighbours_in_the_slice() {
        for sizes in [[2, 2, 1], [4, 2, 1], [2, 4, 1], [1, 2, 2], [2, 2, 2], [4, 2, 2], [2, 2, 4], [2, 4, 4], [3, 2, 1]]
        {
            let slice = slice(sizes);
            let order = ring_order(&slice);
            let mut all = order.clone();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..slice.len()), "{order:?}");
            let next = order.iter().skip(1).chain(&order[..1]);
            for (a, b) in order.iter().zip(next) {
                let [a, b] = [*a, *b].map(|i| coordinates(&slice[i]).unwrap());
                let distance: i64 = a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum();
                assert_eq!(distance, 1, "{sizes:?}: {a:?} and {b:?}");
            }
        }
    }

    #[test]
    fn the_order_does_not_depend_on_the_order_or_the_origin_of_the_slice() {
        let mut slice = slice([4, 2, 1]);
        let shift = |device: &mut DeviceDescription| {
            let Some(NamedValue::Ints(at)) = device.attributes.get_mut("coords") else { panic!("no coordinates") };
            at[1] += 6;
        };
        slice.iter_mut().for_each(shift);
        slice.rotate_left(3);
        let ids: Vec<i32> = ring_order(&slice).into_iter().map(|i| slice[i].id).collect();
        assert_eq!(ids, [0, 1, 2, 3, 7, 6, 5, 4]);
    }

    #[test]
    fn devices_without_a_known_ring_stay_in_the_given_order() {
        let without = |i| device(i, &[]);
        let mut with_hole = slice([4, 2, 1]);
        with_hole.pop();
        let mut twice = slice([2, 2, 1]);
        twice[3] = twice[0].clone();
        let mut cores = slice([2, 2, 1]);
        cores[1].attributes.insert("core_on_chip".into(), 1.into());
        for devices in
            [(0..8).map(without).collect(), with_hole, twice, cores, slice([4, 1, 1]), slice([4, 4, 1]), vec![]]
        {
            assert!(ring_order(&devices).into_iter().eq(0..devices.len()), "{devices:?}");
        }
    }
}
