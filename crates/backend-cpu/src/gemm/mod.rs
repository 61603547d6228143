//! f32 matrix products over strided views: a safe wrapper around the `gemm` crate.
//!
//! One product runs on one thread; callers split work over the *output*, so no sum is ever shared between threads.
//!
//! Every element of a result has the same bits whatever the shape of the product it was computed in: it is a chain of
//! fused multiply-adds over each piece of K, the pieces added in order. Two things are needed for that. K is cut here
//! ([`pieces`]), by a rule that looks at K alone; at most [`K_PIECE`] is what the crate would cut into as well, so it
//! costs nothing. And the crate's special cases for tiny outputs, single rows and columns, and K <= 2, which sum in
//! another order, are kept out by computing such outputs inside a slightly larger one.
#![allow(unsafe_code)]

pub(crate) mod amx;
mod view;

pub(crate) use view::{View, ViewMut};

use std::ops::Range;

/// Most of K that is summed before it is added to the output.
pub(crate) const K_PIECE: usize = 512;

/// Outputs of at most this many elements take another path in the `gemm` crate (horizontal kernels).
const HORIZONTAL: usize = 256;

/// Cuts `0..k` into equal pieces of at most [`K_PIECE`].
pub(crate) fn pieces(k: usize) -> impl Iterator<Item = Range<usize>> {
    let size = k.div_ceil(k.div_ceil(K_PIECE).max(1)).max(1);
    (0..k).step_by(size).map(move |start| start..k.min(start + size))
}

/// Bytes that [`product`] makes the `gemm` crate allocate for packed operands, for a row-major output `[n, m]` (the
/// crate turns it around, so its m is the width). `along_m`: whether the operand that spans m is contiguous along it;
/// `along_k`: whether the other one is contiguous along k. The crate's slab of L2 size per thread, which it makes once
/// and keeps, is not counted.
pub(crate) fn packing_bytes(m: usize, n: usize, k: usize, along_m: bool, along_k: bool) -> usize {
    // Its rules, with the height of its register tile; a tile is rounded up to that.
    #[cfg(target_arch = "x86_64")]
    let (lanes, height) = if is_x86_feature_detected!("avx512f") { (16, 64) } else { (8, 24) };
    #[cfg(not(target_arch = "x86_64"))]
    let (lanes, height) = (4, 16);
    let spans_m = m <= 16 * height && (!along_m || !m.is_multiple_of(lanes));
    let spans_n = !along_k && m > 2 * height;
    let elements =
        if spans_m { m.next_multiple_of(height) } else { 0 } + if spans_n { n.next_multiple_of(6) } else { 0 };
    4 * k.div_ceil(k.div_ceil(K_PIECE).max(1)) * elements
}

/// `dst = lhs * rhs`, or `dst += lhs * rhs` when `add`.
///
/// `dst: [m, n]`, `lhs: [m, k]`, `rhs: [k, n]`.
///
/// # Panics
/// When the shapes do not fit: an error of this crate, not of its caller.
pub(crate) fn product(mut dst: ViewMut<'_>, lhs: View<'_>, rhs: View<'_>, add: bool) {
    assert_eq!((dst.rows(), lhs.cols(), dst.cols()), (lhs.rows(), rhs.rows(), rhs.cols()), "shapes of a product");
    if lhs.cols() == 0 && !add {
        dst.fill(0.0);
    }
    for piece in pieces(lhs.cols()) {
        let add = add || piece.start > 0;
        one_piece(&mut dst, lhs.columns(piece.clone()), rhs.transposed().columns(piece).transposed(), add);
    }
}

fn one_piece(dst: &mut ViewMut<'_>, lhs: View<'_>, rhs: View<'_>, add: bool) {
    let (m, n) = (dst.rows(), dst.cols());
    if lhs.cols() <= 2 {
        for i in 0..m {
            for j in 0..n {
                let sum = (0..lhs.cols()).map(|k| lhs.get(i, k) * rhs.get(k, j)).sum::<f32>();
                let there = if add { dst.get(i, j) } else { 0.0 };
                dst.set(i, j, there + sum);
            }
        }
    } else if m > 1 && n > 1 && m * n > HORIZONTAL {
        call(dst, lhs, rhs, add);
    } else {
        widened(dst, lhs, rhs, add);
    }
}

/// A small output, row by row, each row repeated until the output is no longer small.
fn widened(dst: &mut ViewMut<'_>, lhs: View<'_>, rhs: View<'_>, add: bool) {
    const BLOCK: usize = HORIZONTAL;
    // Enough for BLOCK columns twice, and for 2 columns 129 times.
    let mut scratch = [0.0_f32; 3 * HORIZONTAL];
    for i in 0..dst.rows() {
        for start in (0..dst.cols()).step_by(BLOCK) {
            let columns = start..dst.cols().min(start + BLOCK);
            // A single column is repeated too.
            let (width, rhs) = match columns.len() {
                1 => (2, rhs.columns(columns.clone()).repeated_column(2)),
                width => (width, rhs.columns(columns.clone())),
            };
            let height = (HORIZONTAL / width + 1).max(2);
            let scratch = &mut scratch[..height * width];
            if add {
                for (index, value) in scratch.iter_mut().enumerate() {
                    *value = dst.get(i, start + (index % width).min(columns.len() - 1));
                }
            }
            let lhs = lhs.transposed().columns(i..i + 1).repeated_column(height).transposed();
            call(&mut ViewMut::new(scratch, height, width, width), lhs, rhs, add);
            for (value, j) in scratch.iter().zip(columns) {
                dst.set(i, j, *value);
            }
        }
    }
}

fn call(dst: &mut ViewMut<'_>, lhs: View<'_>, rhs: View<'_>, add: bool) {
    let (m, n, k) = (dst.rows(), dst.cols(), lhs.cols());
    assert_eq!((m, k, n), (lhs.rows(), rhs.rows(), rhs.cols()), "shapes of a product");
    let (dst_rs, dst_cs) = dst.strides();
    let ((lhs_rs, lhs_cs), (rhs_rs, rhs_cs)) = (lhs.strides(), rhs.strides());
    // SAFETY: a view's constructor has checked that every (row, column) within its shape lies in its slice and that
    // its strides fit isize, and the shapes agree (asserted above), so all reads and writes stay within the slices.
    // `dst` is an exclusive borrow whose elements do not overlap each other, so it aliases neither operand.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            dst_cs,
            dst_rs,
            add,
            lhs.as_ptr(),
            lhs_cs,
            lhs_rs,
            rhs.as_ptr(),
            rhs_cs,
            rhs_rs,
            1.0_f32,
            1.0_f32,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn values(n: usize, seed: u32) -> Vec<f32> {
        let mut state = u64::from(seed) * 2 + 1;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    #[test]
    fn pieces_cover_k_evenly() {
        for k in [0, 1, 2, 511, 512, 513, 896, 1024, 1025, 4096] {
            let list: Vec<_> = pieces(k).collect();
            assert_eq!(list.iter().map(ExactSizeIterator::len).sum::<usize>(), k);
            assert!(list.iter().all(|p| p.len() <= K_PIECE), "{k}");
            assert!(list.windows(2).all(|w| w[0].end == w[1].start), "{k}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// The element of a row and a column has the same bits alone as within any larger product.
        #[test]
        fn bits_do_not_depend_on_the_shape(
            (m, n, k) in (1_usize..80, 1_usize..600, 1_usize..1100),
            (row, column) in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
            (lhs_transposed, rhs_transposed, add) in any::<(bool, bool, bool)>(),
            (height, width) in (1_usize..40, 1_usize..200),
        ) {
            let (a, b, c) = (values(m * k, 1), values(k * n, 2), values(m * n, 3));
            let lhs = if lhs_transposed { View::new(&a, k, m, m).transposed() } else { View::new(&a, m, k, k) };
            let rhs = if rhs_transposed { View::new(&b, n, k, k).transposed() } else { View::new(&b, k, n, n) };
            let mut whole = c.clone();
            product(ViewMut::new(&mut whole, m, n, n), lhs, rhs, add);
            let (i, j) = (row.index(m), column.index(n));
            let (rows, columns) = (i..m.min(i + height), j..n.min(j + width));
            let lhs = lhs.transposed().columns(rows.clone()).transposed();
            let mut part: Vec<f32> = rows.clone().flat_map(|r| c[r * n + j..r * n + columns.end].to_vec()).collect();
            product(ViewMut::new(&mut part, rows.len(), columns.len(), columns.len()), lhs, rhs.columns(columns.clone()), add);
            for (x, r) in rows.enumerate() {
                for (y, col) in columns.clone().enumerate() {
                    let exact: f64 = (0..k).map(|h| f64::from(lhs.get(x, h)) * f64::from(rhs.get(h, col))).sum();
                    let exact = exact + if add { f64::from(c[r * n + col]) } else { 0.0 };
                    let got = part[x * columns.len() + y];
                    prop_assert_eq!(got.to_bits(), whole[r * n + col].to_bits());
                    prop_assert!((f64::from(got) - exact).abs() < 1e-6 * (k as f64 + 1.0));
                }
            }
        }
    }
}
