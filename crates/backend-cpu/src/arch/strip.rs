//! The product of a few rows with up to 32 columns of a matrix that is not packed. Attention of one new position computes its scores and its
//! values with it.
//!
//! The sums of 8 rows and 32 columns stay in 16 AVX-512 registers. Every element is one chain of multiply-adds in the order of K.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use super::Isa;
use super::{IsaToken, MulAdd, simd_dispatch};
use std::ops::Range;

/// The columns of a vector.
pub(crate) const VECTOR: usize = 16;
/// The most rows of a product.
pub(crate) const ROWS: usize = 8;

/// Up to 32 columns of a matrix with K rows, as two vectors of 16 columns. The rows of a vector start `step` elements apart, and the second
/// vector starts `second` elements after the first.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct Strip<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) step: usize,
    pub(crate) second: usize,
    /// The number of elements between a loaded row of a vector and the prefetched one.
    pub(crate) ahead: usize,
}

/// Rows of elements that start `stride` elements apart.
#[derive(Debug)]
pub(crate) struct Strided<T> {
    pub(crate) values: T,
    pub(crate) stride: usize,
}

/// Computes `out[rows, columns] = lhs[rows, k] strip[k, columns]`, or adds the product to `out` if `add`, for at most [`ROWS`] rows. `columns` is
/// a range of the strip's columns; column `columns.start` of the strip belongs to column 0 of `out`. Other columns of the strip may lie outside
/// of its slice.
///
/// # Panics
/// If an operand is too short, or for too many rows or columns.
#[allow(clippy::too_many_arguments)]
#[inline]
pub(crate) fn multiply(
    isa: IsaToken,
    rows: usize,
    k: usize,
    lhs: Strided<&[f32]>,
    strip: Strip<'_>,
    columns: Range<usize>,
    out: Strided<&mut [f32]>,
    add: bool,
) {
    if rows == 0 || k == 0 || columns.is_empty() {
        return;
    }
    // The end of the last of `count` rows of `len` elements.
    let end = |count: usize, stride: usize, len: usize| (count - 1).saturating_mul(stride).saturating_add(len);
    let ends = |vector: usize| columns.end.saturating_sub(vector * VECTOR).min(VECTOR);
    let first = |vector: usize| vector.saturating_mul(strip.second);
    let holds = |vector: usize| end(k, strip.step, first(vector).saturating_add(ends(vector))) <= strip.values.len();
    assert!(rows <= ROWS && columns.end <= 2 * VECTOR, "a strip of columns");
    assert!(end(rows, lhs.stride, k) <= lhs.values.len(), "the rows of a product");
    assert!(end(rows, out.stride, columns.len()) <= out.values.len(), "the output of a product");
    assert!(holds(0) && (ends(1) == 0 || holds(1)), "the columns of a product");
    #[cfg(target_arch = "x86_64")]
    if isa.get() >= Isa::Avx512 {
        use super::x86_64::avx512::multiply_strip;
        let (a, c) = (lhs.values.as_ptr(), out.values.as_mut_ptr().wrapping_sub(columns.start));
        let mask = ((1_u64 << columns.end) - (1_u64 << columns.start)) as u32;
        macro_rules! dispatch_rows {
            ($($rows:literal)*) => {
                match rows {
                    // SAFETY: the token proves the instruction set. Both operands have `k` elements in every row and column of the mask,
                    // checked above, as has the output. The output is borrowed mutably.
                    $($rows if ends(1) == 0 => unsafe {
                        multiply_strip::<$rows, 1>(k, a, lhs.stride, strip, c, out.stride, mask, add)
                    },
                    // SAFETY: as above.
                    $rows => unsafe {
                        multiply_strip::<$rows, 2>(k, a, lhs.stride, strip, c, out.stride, mask, add)
                    },)*
                    _ => unreachable!("at most 8 rows, checked above"),
                }
            };
        }
        dispatch_rows!(1 2 3 4 5 6 7 8);
        return;
    }
    let rows = lhs.values.chunks(lhs.stride.max(1)).zip(out.values.chunks_mut(out.stride.max(1))).take(rows);
    for (row, out) in rows {
        let vector_columns = |vector: usize| {
            let place = |column: usize| column.saturating_sub(vector * VECTOR).min(VECTOR);
            place(columns.start)..place(columns.end)
        };
        let (first, second) = out.split_at_mut(vector_columns(0).len());
        for (vector, out) in [first, second].into_iter().enumerate() {
            let columns = vector_columns(vector);
            if !columns.is_empty() {
                multiply_row(isa, &row[..k], &strip.values[vector * strip.second..], strip.step, columns, out, add);
            }
        }
    }
}

simd_dispatch! {
    /// Computes the `columns` of one row and one vector of columns.
    fn multiply_row(row: &[f32], strip: &[f32], step: usize, columns: Range<usize>, out: &mut [f32], add: bool) = multiply_row_body
}

#[inline(always)]
fn multiply_row_body<M: MulAdd>(
    row: &[f32],
    strip: &[f32],
    step: usize,
    columns: Range<usize>,
    out: &mut [f32],
    add: bool,
) {
    let out = &mut out[..columns.len()];
    let mut sums = [0.0; VECTOR];
    if add {
        sums[columns.clone()].copy_from_slice(out);
    }
    for (x, values) in row.iter().zip(strip.chunks(step)) {
        match values.first_chunk::<VECTOR>() {
            Some(values) if columns.end == VECTOR => {
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum = M::mul_add(*x, *value, *sum));
            }
            _ => {
                sums.iter_mut().zip(&values[..columns.end]).for_each(|(sum, value)| *sum = M::mul_add(*x, *value, *sum))
            }
        }
    }
    out.copy_from_slice(&sums[columns]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_strips_match_the_formula_and_leave_other_columns() {
        const K: usize = 37;
        let number = |i: usize| (i * 2_654_435_761 % 1009) as f32 / 1009.0 - 0.5;
        let lhs: Vec<f32> = (0..ROWS * (K + 3)).map(number).collect();
        // Two vectors of columns one after the other, and side by side in rows of 40.
        let (panels, wide): (Vec<f32>, Vec<f32>) =
            ((0..2 * K * VECTOR).map(number).collect(), (0..K * 40).map(number).collect());
        let strips = [
            Strip { values: &panels, step: VECTOR, second: K * VECTOR, ahead: 64 },
            Strip { values: &wide, step: 40, second: VECTOR, ahead: 640 },
        ];
        for isa in IsaToken::available() {
            for (strip, columns) in
                strips.iter().flat_map(|s| [0..32, 0..16, 5..16, 3..20, 0..31, 7..7].map(|c| (s, c)))
            {
                for (rows, add) in (1..=ROWS).flat_map(|rows| [(rows, false), (rows, true)]) {
                    let mut out = vec![2.0; ROWS * 50];
                    let (strided_lhs, strided_out) =
                        (Strided { values: &lhs[..], stride: K + 3 }, Strided { values: &mut out[1..], stride: 50 });
                    multiply(isa, rows, K, strided_lhs, *strip, columns.clone(), strided_out, add);
                    for (i, found) in out.iter().enumerate() {
                        let (row, column) = (i / 50, (columns.start + i % 50).wrapping_sub(1));
                        let is_made = row < rows && i % 50 > 0 && columns.contains(&column);
                        let element =
                            |t: usize| strip.values[t * strip.step + column / VECTOR * strip.second + column % VECTOR];
                        let product = |t: usize| f64::from(lhs[row * (K + 3) + t]) * f64::from(element(t));
                        let expected = match is_made {
                            true => (0..K).map(product).sum::<f64>() + if add { 2.0 } else { 0.0 },
                            false => 2.0,
                        };
                        assert!(
                            (f64::from(*found) - expected).abs() < 1e-5,
                            "{isa:?} {rows} {columns:?} {add} {i}: {found} {expected}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "the columns of a product")]
    fn a_strip_without_its_last_element_is_refused() {
        let strip = Strip { values: &[0.0; 63], step: 32, second: VECTOR, ahead: 0 };
        let (lhs, out) =
            (Strided { values: &[1.0; 2][..], stride: 2 }, Strided { values: &mut [0.0; 32][..], stride: 32 });
        multiply(IsaToken::detect(), 1, 2, lhs, strip, 0..32, out, false);
    }
}
