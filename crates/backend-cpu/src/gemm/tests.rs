//! Compares products with f64, for every instruction set of this machine, and for tiles on every machine.

use super::*;
use crate::arch::IsaToken;
use crate::host::Slice;
use grpo_testkit::margin::{assert_below, largest_difference};
use half::bf16;

fn noise(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Exact in bf16, so that all kernels get the same values.
        bf16::from_f32((state >> 40) as f32 / (1 << 23) as f32 - 1.0).to_f32()
    }
}

/// Returns every kernel, with packing by every instruction set.
fn kinds() -> impl Iterator<Item = Gemm> {
    IsaToken::available().flat_map(|isa| exact(isa).into_iter().chain(exact(isa).map(rounding)))
}

/// Returns every kernel for values that are exact in bf16.
fn exact(isa: IsaToken) -> [Gemm; 3] {
    [Gemm::new(isa, false), Gemm::new(isa, true), Gemm::of_tiles(isa, TILE_WORDS)]
}

fn rounding(gemm: Gemm) -> Gemm {
    Gemm { rounds: true, ..gemm }
}

/// A matrix `[outer, k]` and its transpose, in both dtypes.
struct Operand {
    outer: usize,
    k: usize,
    wide: [Vec<f32>; 2],
    narrow: [Vec<bf16>; 2],
}

impl Operand {
    fn new(outer: usize, k: usize, seed: u64) -> Self {
        let values: Vec<f32> = std::iter::repeat_with(noise(seed)).take(outer * k).collect();
        let turned: Vec<f32> = (0..k * outer).map(|i| values[i % outer * k + i / outer]).collect();
        let narrow = |v: &[f32]| v.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>();
        Self { outer, k, narrow: [narrow(&values), narrow(&turned)], wide: [values, turned] }
    }

    fn part(&self, along: KAxis, bf16: bool, k: Range<usize>) -> Rows<'_> {
        let of = usize::from(along == KAxis::Rows);
        let data = if bf16 { Slice::Bf16(&self.narrow[of]) } else { Slice::F32(&self.wide[of]) };
        match along {
            KAxis::Columns => Rows::new(data, self.k, 0..self.outer, k),
            KAxis::Rows => Rows::new(data, self.outer, k, 0..self.outer),
        }
    }
}

/// Computes the product of a piece, with operands packed along the given axes; the lhs is packed in parts if its rows
/// are K.
fn product(gemm: Gemm, lhs: &Operand, rhs: &Operand, along: [KAxis; 2], bf16: bool, add: f32) -> Vec<f32> {
    let (m, n, k) = (lhs.outer, rhs.outer, lhs.k);
    // NaN, to detect words that are not packed.
    let mut a = vec![u32::MAX; gemm.lhs_words(m, k)];
    let mut b = vec![u32::MAX; gemm.rhs_words(n, k)];
    let (lhs_stride, rhs_stride) = (gemm.lhs_stride(k), gemm.rhs_stride(k));
    let parts = |along, step: usize| {
        let step = if along == KAxis::Rows { step } else { k };
        (0..k).step_by(step.max(1)).map(move |from| from..k.min(from + step))
    };
    for part in parts(along[0], gemm.lhs_panel()) {
        gemm.pack_lhs(lhs.part(along[0], bf16, part.clone()), along[0], part.start, &mut a, lhs_stride);
    }
    for part in parts(along[1], gemm.lhs_panel()) {
        gemm.pack_rhs(rhs.part(along[1], bf16, part.clone()), along[1], part.start, &mut b, rhs_stride);
    }
    let stride = n + 3;
    let mut out = vec![add; m * stride];
    // The order must not affect the elements.
    let order = if m % 2 == 0 { Order::ByRows } else { Order::ByColumns };
    let (a, b) = (Packed { words: &a, stride: lhs_stride }, Packed { words: &b, stride: rhs_stride });
    gemm.multiply(k, a, b, &mut MatMut::new(&mut out, m, n, stride), add != 0.0, order);
    assert!(out.chunks(stride).all(|row| row[n..].iter().all(|x| *x == add)), "elements beside the output");
    out.chunks(stride).flat_map(|row| row[..n].to_vec()).collect()
}

#[test]
fn products_match_f64() {
    let shapes = [
        (1, 1, 1),
        (12, 32, 2),
        (13, 33, 31),
        (31, 65, 16),
        (32, 32, 32),
        (5, 100, 47),
        (70, 31, 96),
        (40, 40, 160),
        (40, 40, 256),
    ];
    for (m, n, k) in shapes {
        let (lhs, rhs) = (Operand::new(m, k, 1), Operand::new(n, k, 2));
        let exact: Vec<f64> = (0..m * n)
            .map(|at| {
                (0..k).map(|x| f64::from(lhs.wide[0][at / n * k + x]) * f64::from(rhs.wide[0][at % n * k + x])).sum()
            })
            .collect();
        for (gemm, bf16) in kinds().flat_map(|gemm| [(gemm, false), (gemm, true)]) {
            // The longest pieces for any size of the L1 cache.
            let gemm = Gemm { most: most_words(48 << 10), ..gemm };
            for along in [KAxis::Rows, KAxis::Columns].into_iter().flat_map(|a| [[a, KAxis::Rows], [a, KAxis::Columns]])
            {
                for add in [0.0, 0.5] {
                    let got = product(gemm, &lhs, &rhs, along, bf16, add);
                    let got: Vec<f64> = got.into_iter().map(|x| f64::from(x) - f64::from(add)).collect();
                    let what = format!("{gemm:?} {m}x{n}x{k} {along:?}");
                    assert_below(&what, largest_difference(&got, &exact), 1e-6 * (k as f64 + 1.0));
                }
            }
        }
    }
}

#[test]
fn an_element_has_the_same_bits_in_any_product_shape() {
    let (k, m, n) = (77, 45, 70);
    let (lhs, rhs) = (Operand::new(m, k, 3), Operand::new(n, k, 4));
    for gemm in kinds() {
        let whole = product(gemm, &lhs, &rhs, [KAxis::Columns; 2], true, 0.25);
        for (i, j) in [(0, 0), (11, 31), (12, 32), (44, 69), (30, 5)] {
            let one = |operand: &Operand, row: usize| {
                let wide = operand.wide[0][row * k..(row + 1) * k].to_vec();
                let narrow: Vec<bf16> = wide.iter().map(|x| bf16::from_f32(*x)).collect();
                Operand { outer: 1, k, wide: [wide.clone(), wide], narrow: [narrow.clone(), narrow] }
            };
            let alone = product(gemm, &one(&lhs, i), &one(&rhs, j), [KAxis::Rows; 2], true, 0.25);
            assert_eq!(alone[0].to_bits(), whole[i * n + j].to_bits(), "{gemm:?} ({i}, {j})");
        }
        // One panel per group, and all panels in one group; both orders.
        for near in [1, usize::MAX] {
            for m in [m, m - 1] {
                let part = Operand { outer: m, k, wide: lhs.wide.clone(), narrow: lhs.narrow.clone() };
                let other = product(Gemm { near, ..gemm }, &part, &rhs, [KAxis::Columns; 2], true, 0.25);
                assert_eq!(other, whole[..m * n], "{gemm:?} in blocks of {near} words");
            }
        }
    }
}

#[test]
fn rounding_while_packing_gives_the_bits_of_rounded_operands() {
    let (m, n, k) = (37, 70, 93);
    let uneven = |outer: usize, seed: u64| {
        let mut operand = Operand::new(outer, k, seed);
        operand.wide.iter_mut().flatten().for_each(|x| *x *= 1.000_7);
        operand.wide[0][5] = f32::MAX;
        operand
    };
    let nearest = |operand: &Operand| {
        let wide = operand.wide.clone().map(|values| values.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect());
        Operand { wide, narrow: operand.narrow.clone(), ..*operand }
    };
    let (lhs, rhs) = (uneven(m, 5), uneven(n, 6));
    let (lhs_of_bf16, rhs_of_bf16) = (nearest(&lhs), nearest(&rhs));
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    for gemm in IsaToken::available().flat_map(exact) {
        for along in [[KAxis::Columns; 2], [KAxis::Rows; 2]] {
            let expected = bits(product(gemm, &lhs_of_bf16, &rhs_of_bf16, along, false, 0.0));
            assert_eq!(bits(product(rounding(gemm), &lhs, &rhs, along, false, 0.0)), expected, "{gemm:?} {along:?}");
            if gemm.packs_f32() {
                assert_ne!(bits(product(gemm, &lhs, &rhs, along, false, 0.0)), expected, "{gemm:?} {along:?}");
            }
        }
    }
}

#[test]
fn piece_length_follows_from_the_l1_size() {
    let kibibytes = [0, 16, 32, 40, 48, 64, 128];
    assert_eq!(kibibytes.map(|size| most_words(size << 10)), [160, 160, 160, 224, 256, 256, 256]);
}

#[test]
fn pieces_are_few_and_of_equal_size() {
    let sizes = [32, 40, 48].map(|size| most_words(size << 10));
    for gemm in kinds().flat_map(|gemm| sizes.map(|most| Gemm { most, ..gemm })) {
        for k in [0, 1, 31, 64, 160, 161, 320, 512, 700, 2048, 5000] {
            for (pieces, grain, most) in [
                (gemm.pieces(k).collect::<Vec<_>>(), GRAIN, gemm.depth()),
                (gemm.panel_pieces(k).collect(), gemm.lhs_panel(), gemm.depth() / gemm.lhs_panel() * gemm.lhs_panel()),
            ] {
                assert_eq!(pieces.len(), k.div_ceil(most), "{gemm:?} {k}: {pieces:?}");
                assert!(
                    pieces.iter().all(|piece| !piece.is_empty() && piece.len() <= most),
                    "{gemm:?} {k}: {pieces:?}"
                );
                assert!(pieces.windows(2).all(|two| two[0].end == two[1].start && two[0].len() % grain == 0));
                assert_eq!((pieces.first().map_or(0, |p| p.start), pieces.last().map_or(0, |p| p.end)), (0, k));
            }
        }
    }
}

#[test]
fn matrices_split_into_rows_or_columns() {
    let mut data = vec![0.0; 5 * 7];
    for (i, mut block) in MatMut::split(&mut data, [5, 7], Cut::Rows, 2, 1..3).enumerate() {
        assert_eq!((block.rows(), block.cols()), ([2, 1][i], 7));
        let (rows, cols) = (0..block.rows(), 0..7);
        block.store(Isa::Portable.checked().unwrap(), rows, cols, &[1.0 + i as f32; 64], false);
    }
    for (i, mut block) in MatMut::split(&mut data, [5, 7], Cut::Columns, 3, 0..3).enumerate() {
        let (rows, cols) = (0..1, 0..block.cols());
        block.store(Isa::Portable.checked().unwrap(), rows, cols, &[10.0 * i as f32; 32], true);
    }
    let rows: Vec<&[f32]> = data.chunks(7).collect();
    assert_eq!(rows[0], [0.0, 0.0, 0.0, 10.0, 10.0, 10.0, 20.0]);
    assert_eq!((rows[1], rows[2], rows[3], rows[4]), (&[0.0; 7][..], &[1.0; 7][..], &[1.0; 7][..], &[2.0; 7][..]));
}

#[test]
fn adding_to_part_of_a_matrix_leaves_the_rest() {
    let mut data = vec![1.0; 5 * 7];
    let isa = Isa::Portable.checked().unwrap();
    let mut whole = MatMut::new(&mut data, 5, 6, 7);
    let mut part = whole.some_rows(1..3);
    part.columns(2..5).add(isa, &[1.0, 2.0, 3.0, f32::NAN, 4.0, 5.0, 6.0], 4);
    part.row(1)[0] = 9.0;
    let rows: Vec<&[f32]> = data.chunks(7).collect();
    assert_eq!(
        (rows[1], rows[2]),
        (&[1.0, 1.0, 2.0, 3.0, 4.0, 1.0, 1.0][..], &[9.0, 1.0, 5.0, 6.0, 7.0, 1.0, 1.0][..])
    );
    assert!([0, 3, 4].iter().all(|row| rows[*row] == [1.0; 7]));
}

#[test]
#[should_panic(expected = "a [3, 4] matrix with rows 5 apart in 13 elements")]
fn a_matrix_larger_than_its_buffer_is_refused() {
    MatMut::new(&mut [0.0; 13], 3, 4, 5);
}
