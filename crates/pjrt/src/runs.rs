//! Parts of row-major arrays.

use std::ops::Range;

/// Returns the contiguous runs of elements, in order, of a part of a row-major array. `part` has the range along each
/// dimension of `dims`.
///
/// ```
/// // Columns 2 to 4 of the rows 1 and 2.
/// assert_eq!(grpo_pjrt::runs(&[4, 6], &[1..3, 2..5]).collect::<Vec<_>>(), [8..11, 14..17]);
/// ```
pub fn runs(dims: &[usize], part: &[Range<usize>]) -> impl ExactSizeIterator<Item = Range<usize>> {
    // From dimension `inner` on, the part is contiguous: all later dimensions are whole.
    let whole = |d: &usize| part[*d] == (0..dims[*d]);
    let inner = (0..dims.len()).rev().find(|d| !whole(d)).unwrap_or(0);
    let stride = |d: usize| dims[d + 1..].iter().product::<usize>();
    let (begin, length) = match part.get(inner) {
        Some(range) => (range.start * stride(inner), range.len() * stride(inner)),
        None => (0, 1),
    };
    let outer: Vec<(Range<usize>, usize)> = (0..inner).map(|d| (part[d].clone(), stride(d))).collect();
    let count = outer.iter().map(|(range, _)| range.len()).product::<usize>();
    (0..if length == 0 { 0 } else { count }).map(move |mut index| {
        let mut at = begin;
        for (range, stride) in outer.iter().rev() {
            at += (range.start + index % range.len()) * stride;
            index /= range.len();
        }
        at..at + length
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_have_the_elements_of_the_part() {
        let part = |dims: &[usize], part: &[Range<usize>]| runs(dims, part).flatten().collect::<Vec<_>>();
        assert_eq!(part(&[4, 6], &[1..3, 2..5]), [8, 9, 10, 14, 15, 16]);
        assert_eq!(part(&[4, 6], &[2..4, 0..6]), (12..24).collect::<Vec<_>>());
        assert_eq!(part(&[2, 3, 4], &[0..2, 1..2, 0..4]), [4, 5, 6, 7, 16, 17, 18, 19]);
        assert_eq!(part(&[2, 3, 4], &[1..2, 0..3, 3..4]), [15, 19, 23]);
        assert_eq!(part(&[24], std::slice::from_ref(&(5..7))), [5, 6]);
        assert_eq!(part(&[], &[]), [0]);
        assert_eq!(part(&[4, 6], &[1..1, 0..6]), [0; 0]);
        assert_eq!(part(&[4, 6], &[1..1, 2..3]), [0; 0]);
    }

    #[test]
    fn contiguous_parts_are_one_run() {
        for part in [[0..4, 0..6], [2..4, 0..6], [3..4, 2..5]] {
            assert_eq!(runs(&[4, 6], &part).len(), 1, "{part:?}");
        }
    }
}
