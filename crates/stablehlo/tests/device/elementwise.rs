//! Element-wise operations, comparisons and conversions.

use crate::device::{Tensor, close, f32s, on_vectors, run, run_one};
use half::{bf16, f16};
use stablehlo::*;

const XS: [f32; 7] = [-2.5, -1.0, -0.25, 0.0, 0.5, 1.0, 3.0];

#[test]
fn unary_operations() {
    type Case = (Unary, fn(f32) -> f32);
    let cases: [Case; 15] = [
        (Unary::Abs, f32::abs),
        (Unary::Negate, |x| -x),
        (Unary::Sign, |x| if x == 0.0 { 0.0 } else { x.signum() }),
        (Unary::Exponential, f32::exp),
        (Unary::ExponentialMinusOne, f32::exp_m1),
        (Unary::Log, f32::ln),
        (Unary::LogPlusOne, f32::ln_1p),
        (Unary::Logistic, |x| 1.0 / (1.0 + (-x).exp())),
        (Unary::Tanh, f32::tanh),
        (Unary::Sqrt, f32::sqrt),
        (Unary::Rsqrt, |x| 1.0 / x.sqrt()),
        (Unary::Floor, f32::floor),
        (Unary::Ceil, f32::ceil),
        (Unary::Cosine, f32::cos),
        (Unary::Sine, f32::sin),
    ];
    for (operation, plain) in cases {
        let found = on_vectors(&[&XS], |a| a[0].unary(operation));
        close(&f32s(&found), &XS.map(plain), 2e-6, operation.name());
    }
    let finite = on_vectors(&[&[1.0, f32::NAN, f32::INFINITY, -f32::INFINITY]], |a| a[0].is_finite());
    assert_eq!(finite.bools(), [true, false, false, false]);
    let tiny = on_vectors(&[&[1e-10, -1e-10]], |a| a[0].expm1() + a[0].log1p());
    close(&f32s(&tiny), &[2e-10, -2e-10], 1e-6, "exact near 0");
    let ints = run_one(&[Tensor::i32(&[5, 0, -3], &[3])], |_, a| !&a[0]);
    assert_eq!(ints.i32s(), [!5, !0, !-3]);
    let ints = run_one(&[Tensor::i32(&[5, 0, -3], &[3])], |_, a| a[0].abs() + a[0].unary(Unary::Sign) + -&a[0]);
    assert_eq!(ints.i32s(), [1, 0, 5]);
    let bools = run_one(&[Tensor::bool(&[true, false], &[2])], |_, a| !&a[0]);
    assert_eq!(bools.bools(), [false, true]);
}

#[test]
fn binary_operations() {
    let (xs, ys) = ([-2.5_f32, 7.0, 4.0, -1.0], [2.0_f32, -3.0, 0.5, -1.0]);
    type Case = (Binary, fn(f32, f32) -> f32);
    let cases: [Case; 8] = [
        (Binary::Add, |x, y| x + y),
        (Binary::Subtract, |x, y| x - y),
        (Binary::Multiply, |x, y| x * y),
        (Binary::Divide, |x, y| x / y),
        (Binary::Remainder, |x, y| x % y),
        (Binary::Power, f32::powf),
        (Binary::Maximum, f32::max),
        (Binary::Minimum, f32::min),
    ];
    for (operation, plain) in cases {
        let expected: Vec<f32> = xs.iter().zip(ys).map(|(x, y)| plain(*x, y)).collect();
        let found = on_vectors(&[&xs, &ys], |a| a[0].binary(operation, &a[1]));
        close(&f32s(&found), &expected, 1e-6, operation.name());
    }
    for found in [
        on_vectors(&[&[1.0, f32::NAN], &[f32::NAN, 1.0]], |a| a[0].max(&a[1])),
        on_vectors(&[&[1.0, f32::NAN], &[f32::NAN, 1.0]], |a| a[0].min(&a[1])),
    ] {
        assert!(f32s(&found).iter().all(|x| x.is_nan()));
    }
    let (a, b) = ([12, -7, 1 << 30], [10, 3, 1 << 30]);
    let both = |f: fn(&Value, &Value) -> Value| {
        run_one(&[Tensor::i32(&a, &[3]), Tensor::i32(&b, &[3])], |_, v| f(&v[0], &v[1])).i32s()
    };
    assert_eq!(both(|a, b| a & b), [12 & 10, -7 & 3, 1 << 30]);
    assert_eq!(both(|a, b| a | b), [12 | 10, -7 | 3, 1 << 30]);
    assert_eq!(both(|a, b| a.binary(Binary::Xor, b)), [12 ^ 10, -7 ^ 3, 0]);
    assert_eq!(both(|a, b| a.rem(b)), [2, -1, 0]);
    assert_eq!(both(|a, b| a / b), [1, -2, 1]);
    assert_eq!(both(|a, b| a + b), [22, -4, i32::MIN]);
    let bools =
        run_one(&[Tensor::bool(&[true, true, false], &[3]), Tensor::bool(&[true, false, false], &[3])], |_, a| {
            (&a[0] & &a[1]).binary(Binary::Xor, &(&a[0] | &a[1]))
        });
    assert_eq!(bools.bools(), [false, true, false]);
}

#[test]
fn compare_select_and_clamp() {
    let (xs, ys) = ([1.0_f32, 2.0, 3.0, f32::NAN], [2.0_f32, 2.0, 2.0, 2.0]);
    type Case = (fn(&Value, &Value) -> Value, [bool; 4]);
    let cases: [Case; 6] = [
        (Value::eq, [false, true, false, false]),
        (Value::ne, [true, false, true, true]),
        (Value::lt, [true, false, false, false]),
        (Value::le, [true, true, false, false]),
        (Value::gt, [false, false, true, false]),
        (Value::ge, [false, true, true, false]),
    ];
    for (compare, expected) in cases {
        assert_eq!(on_vectors(&[&xs, &ys], |a| compare(&a[0], &a[1])).bools(), expected);
    }
    // Unsigned integers and predicates compare as unsigned.
    let u32s = [Tensor::u32(&[u32::MAX, 1], &[2]), Tensor::u32(&[1, 2], &[2])];
    assert_eq!(run_one(&u32s, |_, a| a[0].gt(&a[1])).bools(), [true, false]);
    let i32s = [Tensor::i32(&[-1, 1], &[2]), Tensor::i32(&[1, 2], &[2])];
    assert_eq!(run_one(&i32s, |_, a| a[0].gt(&a[1])).bools(), [false, false]);
    let bools = [Tensor::bool(&[true, false], &[2]), Tensor::bool(&[false, false], &[2])];
    assert_eq!(run_one(&bools, |_, a| a[0].gt(&a[1])).bools(), [true, false]);

    let choice = on_vectors(&[&xs[..3], &ys[..3]], |a| a[0].lt(&a[1]).select(&a[0], &-&a[1]));
    assert_eq!(f32s(&choice), [1.0, -2.0, -2.0]);
    let scalar = on_vectors(&[&xs[..2]], |a| a[0].builder().scalar(true, Dtype::Pred).select(&a[0], &a[0].like(9.0)));
    assert_eq!(f32s(&scalar), [1.0, 2.0]);
    let held = on_vectors(&[&XS], |a| {
        let f = a[0].builder();
        a[0].clamp(&f.scalar(-1.0, Dtype::F32), &a[0].like(0.5))
    });
    assert_eq!(f32s(&held), XS.map(|x| x.clamp(-1.0, 0.5)));
}

/// Converts between all pairs of dtypes, through f64, with numbers that all of them represent.
#[test]
fn conversions() {
    const ALL: [Dtype; 8] =
        [Dtype::Pred, Dtype::I32, Dtype::I64, Dtype::U32, Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64];
    let outputs = run(&[Tensor::f32(&[0.0, 1.0, 3.0], &[3])], |_, a| {
        let converted = ALL.iter().flat_map(|from| {
            let from = a[0].convert(*from);
            ALL.map(|to| from.convert(to).convert(Dtype::F32))
        });
        converted.collect()
    });
    for (i, found) in outputs.iter().enumerate() {
        let (from, to) = (ALL[i / 8], ALL[i % 8]);
        let three = if from == Dtype::Pred || to == Dtype::Pred { 1.0 } else { 3.0 };
        assert_eq!(f32s(found), [0.0, 1.0, three], "{from} to {to}");
    }
    let narrowed = on_vectors(&[&[1.0 / 3.0, 1e-40, 65_520.0, -2.7]], |a| a[0].convert(Dtype::F16).convert(Dtype::F32));
    assert_eq!(f32s(&narrowed), [1.0 / 3.0, 1e-40, 65_520.0, -2.7].map(|x| f16::from_f32(x).to_f32()));
    let narrowed = on_vectors(&[&[1.0 / 3.0, 1.0 + 1.0 / 256.0, 1e39_f64 as f32]], |a| {
        a[0].convert(Dtype::Bf16).convert(Dtype::F32)
    });
    assert_eq!(f32s(&narrowed), [1.0 / 3.0, 1.0 + 1.0 / 256.0, f32::INFINITY].map(|x| bf16::from_f32(x).to_f32()));
    let cut = on_vectors(&[&[2.9, -2.9]], |a| a[0].convert(Dtype::I32).convert(Dtype::F32));
    assert_eq!(f32s(&cut), [2.0, -2.0]);
}
