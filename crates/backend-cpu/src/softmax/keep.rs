//! The restriction of a row to the ids of its sampling mask.

/// Replaces the logits `z` of the vocabulary entries from `first` on by -inf, which adds nothing to sums and has a gradient of 0, except for
/// the entries `kept`, which ascend.
pub(crate) fn keep_only(z: &mut [f32], first: usize, kept: &[u32]) {
    let begin = kept.partition_point(|id| (*id as usize) < first);
    let width = z.len();
    let mut gap = 0;
    for place in kept[begin..].iter().map(|id| *id as usize - first).take_while(|place| *place < width) {
        z[gap..place].fill(f32::NEG_INFINITY);
        gap = place + 1;
    }
    z[gap..].fill(f32::NEG_INFINITY);
}

#[cfg(test)]
mod tests {
    use super::keep_only;

    #[test]
    fn other_entries_than_the_kept_ones_become_minus_infinity() {
        let of = |kept: &[u32]| {
            let mut z = [1.0, 2.0, 3.0, 4.0];
            keep_only(&mut z, 10, kept);
            z.map(|z| z > f32::NEG_INFINITY)
        };
        assert_eq!(of(&[]), [false; 4]);
        assert_eq!(of(&[3, 9, 14, 99]), [false; 4]);
        assert_eq!(of(&[2, 10, 12, 13, 14]), [true, false, true, true]);
        assert_eq!(of(&[10, 11, 12, 13]), [true; 4]);
    }
}
