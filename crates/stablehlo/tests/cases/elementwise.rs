//! Element-wise operations on NaN, infinities, signed zeros, and the smallest and largest integers.

use super::*;

const FLOATS: [f64; 12] =
    [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 7.25, -1e4, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];

/// Returns all pairs of the numbers.
fn pairs<T: Copy>(numbers: &[T]) -> (Vec<T>, Vec<T>) {
    numbers.iter().flat_map(|a| numbers.iter().map(|b| (*a, *b))).unzip()
}

fn integers(dtype: Dtype) -> Vec<i64> {
    match dtype {
        Dtype::U8 => vec![0, 1, 2, 6, 7, 8, 127, 128, u8::MAX.into()],
        Dtype::U32 => vec![0, 1, 2, 7, 31, 32, 1 << 31, u32::MAX.into()],
        Dtype::I16 => vec![i16::MIN.into(), -33, -2, -1, 0, 1, 2, 3, 7, 15, 16, i16::MAX.into()],
        Dtype::I32 => vec![i32::MIN.into(), -33, -2, -1, 0, 1, 2, 3, 7, 31, 32, i32::MAX.into()],
        _ => vec![i64::MIN, -2, -1, 0, 1, 2, 3, 31, 32, 63, 64, i64::MAX],
    }
}

fn ints(dtype: Dtype, numbers: Vec<i64>) -> Array {
    Array::ints(dtype, [numbers.len()], numbers).expect("integers")
}

fn floats(dtype: Dtype, numbers: Vec<f64>) -> Array {
    Array::floats(dtype, [numbers.len()], numbers).expect("floats")
}

/// Applies binary operations and all comparisons.
fn binary(a: &Value, b: &Value, operations: &[Binary]) -> Vec<Value> {
    let compared = Comparison::VARIANTS.iter().map(|c| a.compare(*c, b));
    operations.iter().map(|operation| a.binary(*operation, b)).chain(compared).collect()
}

pub fn cases() -> Vec<Case> {
    let mut cases = vec![];
    for dtype in [Dtype::F32, Dtype::F64, Dtype::Bf16, Dtype::F16] {
        let (xs, ys) = pairs(&FLOATS);
        // XLA computes some of these in f32 for every dtype.
        let legal = |u: &&Unary| **u != Unary::Not;
        cases.push(case(format!("unary {dtype}"), &[floats(dtype, FLOATS.to_vec())], |_, a| {
            Unary::VARIANTS.iter().filter(legal).map(|u| a[0].unary(*u)).collect()
        }));
        cases.push(case(format!("binary {dtype}"), &[floats(dtype, xs), floats(dtype, ys)], |_, a| {
            binary(&a[0], &a[1], &Binary::VARIANTS[..6])
        }));
    }
    for dtype in [Dtype::I16, Dtype::I32, Dtype::I64, Dtype::U8, Dtype::U32] {
        let (xs, ys) = pairs(&integers(dtype));
        cases.push(case(format!("binary {dtype}"), &[ints(dtype, xs), ints(dtype, ys)], |_, a| {
            let signed = !dtype.is_unsigned();
            let unary = [Unary::Not, Unary::Negate, Unary::Abs, Unary::Sign];
            let unary = unary[..if signed { 4 } else { 2 }].iter().map(|u| a[0].unary(*u));
            binary(&a[0], &a[1], Binary::VARIANTS).into_iter().chain(unary).collect()
        }));
    }
    let (xs, ys) = pairs(&[false, true]);
    let [xs, ys] = [xs, ys].map(|x| Array::preds([4], x).expect("predicates"));
    cases.push(case("predicates", &[xs, ys], |_, a| {
        binary(&a[0], &a[1], &Binary::VARIANTS[6..9]).into_iter().chain([!&a[0]]).collect()
    }));
    cases.extend([choices(), bounds(), near_zero(), narrowed()]);
    cases.extend(conversions());
    cases
}

fn choices() -> Case {
    let mut random = Random(1);
    let arguments = [
        random.array(Dtype::Pred, &[3, 4]),
        random.array(Dtype::F32, &[3, 4]),
        random.array(Dtype::F32, &[3, 4]),
        random.array(Dtype::I64, &[3, 4]),
        Array::preds([], [false]).expect("a predicate"),
    ];
    case("select", &arguments, |_, a| {
        vec![
            a[0].select(&a[1], &a[2]),
            a[0].select(&a[3], &a[3].like(7)),
            a[4].select(&a[1], &a[2]),
            a[0].select(&a[0], &!&a[0]),
        ]
    })
}

/// Includes bounds in the wrong order, and NaN bounds.
fn bounds() -> Case {
    let arguments = [
        f32s(&[6], &[-3.0, 0.25, 5.0, f64::NAN, 1.0, f64::INFINITY]),
        f32s(&[6], &[-1.0, -1.0, 4.0, 0.0, f64::NAN, 0.0]),
        i32s(&[3], &[-9, 4, 12]),
    ];
    case("clamp", &arguments, |f, a| {
        let scalar = |x: f64| f.scalar(x, Dtype::F32);
        vec![
            a[0].clamp(&scalar(-1.0), &scalar(2.0)),
            a[0].clamp(&a[1], &scalar(2.0)),
            a[0].clamp(&scalar(-2.0), &a[1]),
            a[0].clamp(&scalar(2.0), &scalar(1.0)),
            a[2].clamp(&f.scalar(-5, Dtype::I32), &a[2].like(5)),
        ]
    })
}

fn near_zero() -> Case {
    let case = case("near zero", &[f32s(&[2], &[1e-10, -1e-10])], |_, a| vec![a[0].expm1(), a[0].log1p()]);
    Case { slack: 0.0, ..case }
}

/// Conversions to narrower floats round to the nearest even number, to the bit.
fn narrowed() -> Case {
    let numbers = [1.0 / 3.0, 1.0 + 1.0 / 256.0, 1e-40, 65_520.0, -2.7, f64::INFINITY];
    case("narrowed", &[f32s(&[6], &numbers), f32s(&[2], &[2.9, -2.9])], |_, a| {
        let bits = [Dtype::F16, Dtype::Bf16].map(|dtype| a[0].convert(dtype).bitcast_convert(Dtype::I16));
        bits.into_iter().chain([a[1].convert(Dtype::I32)]).collect()
    })
}

/// Conversions between all pairs of dtypes, including numbers out of range, and bit casts.
fn conversions() -> Vec<Case> {
    let arguments = Dtype::VARIANTS.iter().map(|dtype| match *dtype {
        Dtype::Pred => Array::preds([2], [false, true]).expect("predicates"),
        dtype if dtype.is_float() => {
            floats(dtype, vec![0.0, -0.0, 1.5, -2.75, 1e4, -1e4, 3e9, -3e9, f64::INFINITY, f64::NEG_INFINITY, f64::NAN])
        }
        dtype => ints(dtype, integers(dtype)),
    });
    let arguments: Vec<Array> = arguments.collect();
    let all = case("convert", &arguments, |_, a| {
        let pairs = a.iter().flat_map(|v| Dtype::VARIANTS.iter().map(move |to| (v, *to)));
        pairs.filter(|(v, to)| v.dtype() != *to).map(|(v, to)| v.convert(to)).collect()
    });
    let bits = case("bitcast", &arguments, |_, a| {
        let pairs = a.iter().flat_map(|v| Dtype::VARIANTS.iter().map(move |to| (v, *to)));
        let legal = |v: &Value, to: Dtype| {
            v.dtype() != to && v.dtype() != Dtype::Pred && to != Dtype::Pred && v.dtype().bytes() == to.bytes()
        };
        // The bits of NaN may differ.
        let plain = |v: &Value| if v.dtype().is_float() { v.slice(&[0], &[10]) } else { v.clone() };
        pairs.filter(|(v, to)| legal(v, *to)).map(|(v, to)| plain(v).bitcast_convert(to)).collect()
    });
    vec![all, bits]
}
