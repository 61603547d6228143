//! Compares every operation with its formula in f64, and every gradient with central differences of that formula, for
//! every instruction set of this machine.

mod attention;
mod packed;

grpo_testkit::tiers!();

use super::*;
use crate::arch::IsaToken;
use approx::assert_relative_eq;
use grpo_testkit::margin::{assert_below, largest_difference};

pub(super) fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

pub(super) fn all_layers() -> impl Iterator<Item = Layers> {
    IsaToken::available().map(Layers::of)
}

#[track_caller]
pub(super) fn assert_close(found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
    assert!(scale > 0.01, "numbers too small to tell anything");
    let at = std::panic::Location::caller();
    assert_below(
        &format!("{}:{}", at.file(), at.line()),
        largest_difference(&wide(found), expected) / scale,
        tolerance,
    );
}

/// Computes d(sum of g y(x)) / dx by central differences.
pub(super) fn differences(x: &[f32], g: &[f32], y: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let sum = |x: &[f64]| y(x).iter().zip(g).map(|(y, g)| y * f64::from(*g)).sum::<f64>();
    let mut x = wide(x);
    (0..x.len())
        .map(|i| {
            let at = x[i];
            x[i] = at + STEP;
            let above = sum(&x);
            x[i] = at - STEP;
            let below = sum(&x);
            x[i] = at;
            (above - below) / (2.0 * STEP)
        })
        .collect()
}

pub(super) fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

fn spans(rows: &[(std::ops::Range<usize>, std::ops::Range<usize>)]) -> Vec<Span> {
    rows.iter().map(|(rows, prefix)| Span { rows: rows.clone(), prefix: prefix.clone() }).collect()
}

/// Returns results of earlier calls, longer and shorter than `length`.
fn used_memory(length: usize) -> [Vec<f32>; 3] {
    [vec![f32::NAN; length + 7], vec![f32::NAN; length], vec![f32::NAN; length / 2]]
}

#[test]
fn linear_layers_match_f64() {
    // Shapes around panels of 12 rows and 32 columns, pieces of 256 and blocks of 240, divided by rows or by columns.
    let shapes = [
        [1, 1, 1],
        [5, 7, 3],
        [12, 256, 32],
        [13, 300, 37],
        [250, 33, 70],
        [20, 40, 300],
        [260, 300, 290],
        [500, 20, 150],
    ];
    for (seed, [n, i, o]) in shapes.into_iter().enumerate() {
        let (x, w, dy) =
            (noise(n * i, 1 + seed as u64), noise(i * o, 20 + seed as u64), noise(n * o, 30 + seed as u64));
        let (bias, residual) = (noise(o, 3), noise(n * o, 4));
        let (x64, w64, dy64) = (wide(&x), wide(&w), wide(&dy));
        let sum = |m: usize, n: usize, k: usize, f: &dyn Fn(usize, usize, usize) -> f64| -> Vec<f64> {
            (0..m * n).map(|at| (0..k).map(|k| f(at / n, at % n, k)).sum()).collect()
        };
        let product = sum(n, o, i, &|r, c, k| x64[r * i + k] * w64[k * o + c]);
        let plus = |f: &dyn Fn(usize) -> f32| -> Vec<f64> {
            product.iter().enumerate().map(|(at, y)| y + f64::from(f(at))).collect()
        };
        let dims = [n, i, o];
        for layers in all_layers() {
            let of = |add| layers.linear(&x, &w, add, dims).unwrap();
            assert_close(&of(Add::Nothing), &product, 1e-5);
            assert_close(&of(Add::Rows(&bias)), &plus(&|at| bias[at % o]), 1e-5);
            assert_close(&of(Add::Residual(&residual)), &plus(&|at| residual[at]), 1e-5);
            let packed = layers.pack_weight(&w, [i, o]).unwrap();
            assert_eq!(layers.linear_packed(&x, &packed, Add::Rows(&bias), n).unwrap(), of(Add::Rows(&bias)));
            let turned: Vec<f32> = (0..i * o).map(|at| w[at % i * o + at / i]).collect();
            let packed = layers.pack_transposed(&turned, [o, i]).unwrap();
            assert_eq!(layers.linear_packed(&x, &packed, Add::Nothing, n).unwrap(), of(Add::Nothing));
            let dx = sum(n, i, o, &|r, c, k| dy64[r * o + k] * w64[c * o + k]);
            assert_close(&layers.linear_dx(&w, &dy, dims).unwrap(), &dx, 1e-5);
            let dweight = sum(i, o, n, &|r, c, k| x64[k * i + r] * dy64[k * o + c]);
            assert_close(&layers.linear_dweight(&x, &dy, dims).unwrap(), &dweight, 1e-5);
            let dbias = sum(1, o, n, &|_, c, k| dy64[k * o + c]);
            assert_close(&layers.linear_dbias(&dy, [n, o]).unwrap(), &dbias, 1e-5);
        }
    }
}

/// Returns layers with bf16 products by every kernel of this machine, with tiles on any machine, and by f32 kernels.
fn all_bf16_layers() -> impl Iterator<Item = Layers> {
    let narrow = all_layers().map(|layers| layers.with_products(Dtype::Bf16));
    let tiles = IsaToken::available().map(|isa| Layers { linear: Gemm::rounding_tiles(isa), ..Layers::of(isa) });
    narrow.chain(tiles)
}

#[test]
fn bf16_products_are_f32_sums_of_rounded_operands() {
    let nearest = |x: &[f32]| x.iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect::<Vec<_>>();
    // The last weight is packed in half the memory by f32 kernels.
    for (seed, [n, i, o]) in
        [[1, 7, 3], [13, 300, 37], [40, 33, 70], [260, 90, 130], [5, 700, 1200]].into_iter().enumerate()
    {
        let seed = seed as u64;
        let (x, w, dy) = (noise(n * i, 1 + seed), noise(i * o, 20 + seed), noise(n * o, 30 + seed));
        let (x16, w16, dy16) = (nearest(&x), nearest(&w), nearest(&dy));
        let turned: Vec<f32> = (0..i * o).map(|at| w[at % i * o + at / i]).collect();
        let turned16: Vec<half::bf16> = turned.iter().map(|x| half::bf16::from_f32(*x)).collect();
        let (bias, dims) = (noise(o, 3), [n, i, o]);
        for layers in all_bf16_layers() {
            let exact = Layers::with_isa(layers.gemm.isa().get()).unwrap();
            let y = layers.linear(&x, &w, Add::Rows(&bias), dims).unwrap();
            assert_close(&y, &wide(&exact.linear(&x16, &w16, Add::Rows(&bias), dims).unwrap()), 1e-5);
            let dx = layers.linear_dx(&w, &dy, dims).unwrap();
            assert_close(&dx, &wide(&exact.linear_dx(&w16, &dy16, dims).unwrap()), 1e-5);
            let dweight = layers.linear_dweight(&x, &dy, dims).unwrap();
            assert_close(&dweight, &wide(&exact.linear_dweight(&x16, &dy16, dims).unwrap()), 1e-5);
            // The same bits in every form of the weight.
            let packed = layers.pack_weight(&w, [i, o]).unwrap();
            assert!(packed.bytes() <= layers.packed_bytes([i, o], true), "{layers:?}");
            let stored = [
                StoredWeight::new(&[turned.as_slice().into()], i).unwrap(),
                StoredWeight::new(&[turned16.as_slice().into()], i).unwrap(),
            ];
            let packed_stored = stored.each_ref().map(|weight| layers.pack_stored(weight));
            for packed in [packed, layers.pack_transposed(&turned, [o, i]).unwrap()].iter().chain(&packed_stored) {
                assert_eq!(exact.linear_packed(&x, packed, Add::Rows(&bias), n).unwrap(), y, "{layers:?}");
            }
            for weight in &stored {
                assert_eq!(layers.linear_stored(&x, weight, Add::Rows(&bias), n).unwrap(), y, "{layers:?}");
                assert_eq!(layers.linear_stored_dx(weight, &dy, n).unwrap(), dx, "{layers:?}");
            }
        }
    }
}

#[test]
fn rows_of_a_product_do_not_depend_on_other_rows() {
    let (n, i, o) = (61, 300, 45);
    let (x, w) = (noise(n * i, 1), noise(i * o, 2));
    for layers in all_layers() {
        let all = layers.linear(&x, &w, Add::Nothing, [n, i, o]).unwrap();
        for row in [0, 11, 12, 60] {
            let one = layers.linear(&x[row * i..(row + 1) * i], &w, Add::Nothing, [1, i, o]).unwrap();
            assert_eq!(one, all[row * o..(row + 1) * o]);
        }
    }
}

#[test]
fn rms_norm_and_its_gradient_match_the_formulas() {
    for (n, h) in [(1, 1), (3, 40), (70, 33)] {
        let (x, w, dy) = (noise(n * h, 1), noise(h, 2), noise(n * h, 3));
        let of = |x: &[f64], w: &[f64]| -> Vec<f64> {
            x.chunks_exact(h)
                .flat_map(|row| {
                    let rms = (row.iter().map(|x| x * x).sum::<f64>() / h as f64 + 1e-3).sqrt();
                    row.iter().zip(w).map(|(x, w)| x / rms * w).collect::<Vec<_>>()
                })
                .collect()
        };
        let dx = differences(&x, &dy, |x| of(x, &wide(&w)));
        let dw = differences(&w, &dy, |w| of(&wide(&x), w));
        for layers in all_layers() {
            let (y, scale) = layers.rms_norm(&x, &w, 1e-3).unwrap();
            assert_close(&y, &of(&wide(&x), &wide(&w)), 1e-6);
            let found = layers.rms_norm_grad(&x, &w, &scale, &dy).unwrap();
            // With a single entry, the gradient comes from epsilon only.
            if h > 1 {
                assert_close(&found.0, &dx, 1e-5);
            }
            assert_close(&found.1, &dw, 1e-5);
        }
    }
}

#[test]
fn norms_of_queries_and_keys_and_their_gradients_match_the_formulas() {
    // Fewer and more rows than a task has; a norm per head, and one over all heads.
    for (n, over_heads) in [(2, false), (70, false), (2, true), (70, true)] {
        let (d, width) = (HEADS.width, HEADS.row());
        let [queries, keys] = [HEADS.query, HEADS.key_value].map(|heads| if over_heads { heads * d } else { d });
        let (qkv, dy, query, key) = (noise(n * width, 1), noise(n * width, 2), noise(queries, 3), noise(keys, 4));
        let of = |x: &[f64], query: &[f64], key: &[f64]| -> Vec<f64> {
            let normed = |x: &[f64], weight: &[f64]| {
                let rms = (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + 1e-3).sqrt();
                x.iter().zip(weight).map(|(x, w)| x / rms * w).collect::<Vec<_>>()
            };
            let row = |row: &[f64]| {
                let (query_row, rest) = row.split_at(HEADS.query * d);
                let (key_row, values) = rest.split_at(HEADS.key_value * d);
                let query_row = query_row.chunks_exact(query.len()).flat_map(|part| normed(part, query));
                let key_row = key_row.chunks_exact(key.len()).flat_map(|part| normed(part, key));
                query_row.chain(key_row).chain(values.iter().copied()).collect::<Vec<_>>()
            };
            x.chunks_exact(width).flat_map(row).collect()
        };
        let (x64, query64, key64) = (wide(&qkv), wide(&query), wide(&key));
        let dqkv = differences(&qkv, &dy, |x| of(x, &query64, &key64));
        let dquery = differences(&query, &dy, |query| of(&x64, query, &key64));
        let dkey = differences(&key, &dy, |key| of(&x64, &query64, key));
        let norms = HeadNorms { query: &query, key: &key, eps: 1e-3 };
        for layers in all_layers() {
            let (y, scale) = layers.norm_heads(&qkv, HEADS, norms).unwrap();
            assert_close(&y, &of(&x64, &query64, &key64), 1e-6);
            let found = layers.norm_heads_grad(&qkv, HEADS, norms, &scale, &dy).unwrap();
            assert_close(&found.dqkv, &dqkv, 1e-5);
            assert_close(&found.dquery, &dquery, 1e-5);
            assert_close(&found.dkey, &dkey, 1e-5);
        }
        let narrow = HeadNorms { key: &key[1..], ..norms };
        assert!(Layers::new().norm_heads(&qkv, HEADS, narrow).unwrap_err().to_string().contains("key weight"));
    }
}

#[test]
fn gated_activations_and_their_gradients_match_the_formulas() {
    let (n, width) = (67, 19);
    let gate_up: Vec<f32> = noise(2 * n * width, 1).iter().map(|x| x * 12.0).collect();
    let dy = noise(n * width, 2);
    let silu = |z: f64| z / (1.0 + (-z).exp());
    let gelu = |z: f64| 0.5 * z * (1.0 + (std::f64::consts::FRAC_2_PI.sqrt() * (z + 0.044_715 * z.powi(3))).tanh());
    let formulas: [(Activation, &dyn Fn(f64) -> f64); 2] = [(Activation::Silu, &silu), (Activation::GeluTanh, &gelu)];
    for (activation, f) in formulas {
        let of = |x: &[f64]| -> Vec<f64> {
            let row = |row: &[f64]| (0..width).map(|i| f(row[i]) * row[width + i]).collect::<Vec<_>>();
            x.chunks_exact(2 * width).flat_map(row).collect()
        };
        let gradient = differences(&gate_up, &dy, of);
        for layers in all_layers() {
            let y = layers.gated(&gate_up, activation, width).unwrap();
            assert_close(&y, &of(&wide(&gate_up)), 1e-6);
            for memory in used_memory(y.len()) {
                assert_eq!(layers.gated_in(memory, &gate_up, activation, width).unwrap(), y);
            }
            assert_close(&layers.gated_grad(&gate_up, &dy, activation, width).unwrap(), &gradient, 1e-5);
            // Large gates saturate, and a NaN propagates.
            let far = layers.gated(&[200.0, -200.0, 2.0, 3.0], activation, 2).unwrap();
            assert_eq!(far, [400.0, 0.0]);
            assert!(layers.gated(&[f32::NAN, 1.0], activation, 1).unwrap()[0].is_nan());
        }
    }
}

const HEADS: Heads = Heads { query: 4, key_value: 2, width: 6 };

#[test]
fn rotary_embedding_keeps_norms_and_is_invertible() {
    let table = RopeTable::new(HEADS.width, 50, 100.0);
    let rows = noise(3 * HEADS.row(), 1);
    for layers in all_layers() {
        let mut turned = rows.clone();
        layers.rotate(&mut turned, HEADS, &table, &[0, 7, 49]).unwrap();
        assert_eq!(turned[..HEADS.row()], rows[..HEADS.row()], "position 0 does not turn");
        for (i, position) in [(1, 7.0), (2, 49.0)] {
            let (from, to) = (&rows[i * HEADS.row()..], &turned[i * HEADS.row()..]);
            assert_eq!(from[HEADS.values(0).start..HEADS.row()], to[HEADS.values(0).start..HEADS.row()]);
            for (column, found) in to[..HEADS.values(0).start].iter().enumerate() {
                let (first, j) = (column - column % 6, column % 3);
                let angle = position * 100_f64.powf(-2.0 * j as f64 / 6.0);
                let (x, y) = (f64::from(from[first + j]), f64::from(from[first + j + 3]));
                let (sin, cos) = angle.sin_cos();
                let expected = if column % 6 < 3 { x * cos - y * sin } else { y * cos + x * sin };
                assert_relative_eq!(f64::from(*found), expected, epsilon = 1e-5);
            }
        }
        layers.rotate_grad(&mut turned, HEADS, &table, &[0, 7, 49]).unwrap();
        assert!(turned.iter().zip(&rows).all(|(a, b)| (a - b).abs() < 1e-5));
        let text = layers.rotate(&mut turned, HEADS, &table, &[0, 7, 50]).unwrap_err().to_string();
        assert!(text.contains("below 50") && text.contains("50"), "{text}");
    }
}

#[test]
fn part_of_a_head_is_rotated_and_queries_grow() {
    // Two of three pairs, scaled by 1.5; the queries of position 7 have a factor of 2.
    let table = RopeTable::of_frequencies(&[1.0, 0.1], 50).scaled(1.5).with_query_factors(|at| 1.0 + at as f64 / 7.0);
    let (rows, dy) = (noise(HEADS.row(), 1), noise(HEADS.row(), 2));
    for layers in all_layers() {
        let mut turned = rows.clone();
        layers.rotate(&mut turned, HEADS, &table, &[7]).unwrap();
        let (keys, values) = (HEADS.keys(0).start, HEADS.values(0).start);
        for (column, found) in turned.iter().enumerate() {
            let (first, j) = (column - column % 6, column % 6);
            let factor = if column < keys { 2.0 } else { 1.0 };
            let (sin, cos) = (7.0 * [1.0_f64, 0.1][j % 2]).sin_cos();
            let at = |j: usize| f64::from(rows[first + j]);
            let expected = match j {
                _ if column >= values => at(j),
                0 | 1 => factor * 1.5 * (at(j) * cos - at(j + 2) * sin),
                2 | 3 => factor * 1.5 * (at(j) * cos + at(j - 2) * sin),
                _ => factor * at(j),
            };
            assert_relative_eq!(f64::from(*found), expected, epsilon = 1e-5);
        }
        // The derivative is the transposed map: <y(x), dy> = <x, dx>.
        let mut dx = dy.clone();
        layers.rotate_grad(&mut dx, HEADS, &table, &[7]).unwrap();
        let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
        assert_relative_eq!(product(&turned, &dy), product(&rows, &dx), epsilon = 1e-5);
    }
    let wide = RopeTable::of_frequencies(&[1.0; 4], 50);
    let text = Layers::new().rotate(&mut rows.clone(), HEADS, &wide, &[7]).unwrap_err().to_string();
    assert!(text.contains("head width") && text.contains("at least 8"), "{text}");
}

#[test]
fn layer_errors_name_the_argument() {
    let layers = Layers::new();
    let error = |result: Result<Vec<f32>>| result.unwrap_err().to_string();
    let text = error(layers.linear(&[0.0; 5], &[0.0; 6], Add::Nothing, [2, 3, 2]));
    assert!(
        text.contains("linear") && text.contains('x') && text.contains("[2, 3]") && text.contains("5 values"),
        "{text}"
    );
    let text = error(layers.linear(&[0.0; 6], &[0.0; 6], Add::Rows(&[0.0; 3]), [2, 3, 2]));
    assert!(text.contains("bias"), "{text}");
    let gap = spans(&[(0..2, 0..0), (3..4, 0..2)]);
    let text = layers.attention(&[0.0; 4 * 48], HEADS, Scores::default(), &gap).unwrap_err().to_string();
    assert!(text.contains("rows from 2 on"), "{text}");
    let ahead = spans(&[(0..2, 0..3), (2..4, 0..0)]);
    assert!(layers.attention(&[0.0; 4 * 48], HEADS, Scores::default(), &ahead).is_err());
    let none = Scores { window: Some(0), ..Scores::default() };
    let text = layers.attention(&[0.0; 2 * 48], HEADS, none, &spans(&[(0..2, 0..0)])).unwrap_err().to_string();
    assert!(text.contains("window") && text.contains("at least 1"), "{text}");
}

#[cfg(feature = "rayon")]
#[test]
fn layer_results_do_not_depend_on_threads() {
    let (n, h) = (150, 48);
    let spans = spans(&[(0..90, 0..0), (90..120, 0..90), (120..150, 0..90)]);
    let (x, w, qkv, dout) = (noise(n * h, 1), noise(h * 300, 2), noise(n * HEADS.row(), 3), noise(n * 24, 4));
    let scores = Scores { window: Some(40), ..Scores::default() };
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let layers = Layers::new();
            let y = layers.linear(&x, &w, Add::Nothing, [n, h, 300]).unwrap();
            let packed = layers.pack_weight(&w, [h, 300]).unwrap();
            assert_eq!(layers.linear_packed(&x, &packed, Add::Nothing, n).unwrap(), y);
            let dweight = layers.linear_dweight(&x, &y, [n, h, 300]).unwrap();
            let (_, scale) = layers.rms_norm(&x, &w[..h], 1e-6).unwrap();
            let norm = layers.rms_norm_grad(&x, &w[..h], &scale, &x).unwrap();
            let mixed = layers.attention(&qkv, HEADS, scores, &spans).unwrap();
            let of = AttentionGrad { qkv: &qkv, values: &mixed.values, lse: &mixed.lse, dvalues: &dout };
            let dqkv = layers.attention_grad(of, HEADS, scores, &spans).unwrap();
            [y, dweight, norm.0, norm.1, mixed.values.clone(), dqkv]
        })
    };
    let one = run(1);
    assert!(one.iter().all(|values| values.iter().any(|x| *x != 0.0)));
    assert!([2, 3, 5].into_iter().all(|threads| run(threads) == one));
}
