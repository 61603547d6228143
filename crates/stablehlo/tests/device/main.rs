//! Every operation of the builder, compiled by XLA and run on its CPU plugin, beside plain Rust.

mod derivative;
mod device;
mod interpreter;
mod scan;

use device::{Tensor, close, f32s, on_replicas, run, run_one, text_on_partitions};
use half::{bf16, f16};
use stablehlo::*;

fn ty(dtype: Dtype, shape: &[usize]) -> TensorType {
    TensorType::new(dtype, shape)
}

/// Runs `build` on f32 vectors.
fn on_vectors(arguments: &[&[f32]], build: impl FnOnce(&[Value]) -> Value) -> Tensor {
    let tensors: Vec<Tensor> = arguments.iter().map(|a| Tensor::f32(a, &[a.len()])).collect();
    run_one(&tensors, |_, values| build(values))
}

const XS: [f32; 7] = [-2.5, -1.0, -0.25, 0.0, 0.5, 1.0, 3.0];

#[test]
fn elementwise_of_one() {
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
fn elementwise_of_two() {
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
fn comparisons_choices_and_bounds() {
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
    // Unsigned numbers and predicates have an order of their own.
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

/// Every pair of types, by way of f64, on numbers that every one of them holds.
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

fn counting(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i % 7) as f32 - 2.0).collect()
}

#[test]
fn products() {
    let (a, b) = (counting(2 * 3 * 4), counting(2 * 4 * 5));
    let sum = |f: &dyn Fn(usize) -> f32| (0..4).map(f).sum::<f32>();
    // [2, 3, 4] x [2, 4, 5] over 4, with a batch of 2.
    let found = run_one(&[Tensor::f32(&a, &[2, 3, 4]), Tensor::f32(&b, &[2, 4, 5])], |_, v| {
        let dimensions = DotDimensions { batch: (vec![0], vec![0]), contract: (vec![2], vec![1]) };
        v[0].dot_general(&v[1], dimensions, Dtype::F32, Precision::Highest)
    });
    let at = |i: usize| (i / 15, i / 5 % 3, i % 5);
    let expected: Vec<f32> =
        (0..30).map(at).map(|(n, i, j)| sum(&|k| a[n * 12 + i * 4 + k] * b[n * 20 + k * 5 + j])).collect();
    assert_eq!((found.shape(), f32s(&found)), (&[2, 3, 5][..], expected));
    // Each side by each of its dimensions.
    for (left, right) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let shape = |d: usize, other: usize| if d == 0 { [4, other] } else { [other, 4] };
        let found =
            run_one(&[Tensor::f32(&a[..12], &shape(left, 3)), Tensor::f32(&b[..20], &shape(right, 5))], |_, v| {
                v[0].dot_general(&v[1], DotDimensions::contract(left, right), Dtype::F32, Precision::Default)
            });
        let x = |i: usize, k: usize| if left == 0 { a[k * 3 + i] } else { a[i * 4 + k] };
        let y = |j: usize, k: usize| if right == 0 { b[k * 5 + j] } else { b[j * 4 + k] };
        let expected: Vec<f32> = (0..15).map(|ij| sum(&|k| x(ij / 5, k) * y(ij % 5, k))).collect();
        assert_eq!(f32s(&found), expected, "over {left} and {right}");
    }
    // bf16 operands, f32 sums: 1024 ones are more than bf16 can count.
    let found = run_one(&[], |f, _| {
        let ones = f.splat(1.0, ty(Dtype::Bf16, &[2, 1025]));
        ones.dot_general(&ones, DotDimensions::contract(1, 1), Dtype::F32, Precision::High)
    });
    assert_eq!(f32s(&found), [1025.0; 4]);
}

#[test]
fn reductions() {
    let values: Vec<f32> = vec![3.0, -1.0, 2.0, 5.0, 0.5, -4.0];
    let reduce = |reducer| f32s(&run_one(&[Tensor::f32(&values, &[2, 3])], |_, a| a[0].reduce(reducer, &[1])));
    assert_eq!(reduce(Reducer::Add), [4.0, 1.5]);
    assert_eq!(reduce(Reducer::Multiply), [-6.0, -10.0]);
    assert_eq!(reduce(Reducer::Max), [3.0, 5.0]);
    assert_eq!(reduce(Reducer::Min), [-1.0, -4.0]);
    let all = run_one(&[Tensor::f32(&values, &[2, 3])], |_, a| a[0].reduce(Reducer::Add, &[1, 0]));
    assert_eq!((all.shape(), f32s(&all)), (&[][..], vec![5.5]));
    // Of nothing: the identity.
    for (reducer, identity) in [
        (Reducer::Add, 0.0),
        (Reducer::Multiply, 1.0),
        (Reducer::Max, f32::NEG_INFINITY),
        (Reducer::Min, f32::INFINITY),
    ] {
        let found = run_one(&[], |f, _| f.splat(0.0, ty(Dtype::F32, &[2, 0])).reduce(reducer, &[1]));
        assert_eq!(f32s(&found), [identity; 2], "{reducer:?}");
    }
    let ints = |reducer| run_one(&[Tensor::i32(&[6, 12, -4, -1], &[4])], |_, a| a[0].reduce(reducer, &[0])).i32s();
    assert_eq!(ints(Reducer::Add), [13]);
    assert_eq!(ints(Reducer::Multiply), [288]);
    assert_eq!(ints(Reducer::Max), [12]);
    assert_eq!(ints(Reducer::Min), [-4]);
    assert_eq!(ints(Reducer::And), [6 & 12 & -4]);
    assert_eq!(ints(Reducer::Or), [-1]);
    let unsigned = |reducer| {
        run_one(&[Tensor::u32(&[6, 12, u32::MAX], &[3])], |_, a| a[0].reduce(reducer, &[0]).convert(Dtype::I64)).i64s()
    };
    assert_eq!(unsigned(Reducer::And), [4]);
    assert_eq!(unsigned(Reducer::Max), [i64::from(u32::MAX)]);
    assert_eq!(unsigned(Reducer::Min), [6]);
    let bools = |reducer| {
        run_one(&[Tensor::bool(&[true, false, true, true], &[2, 2])], |_, a| a[0].reduce(reducer, &[1])).bools()
    };
    assert_eq!(bools(Reducer::And), [false, true]);
    assert_eq!(bools(Reducer::Or), [true, true]);
    // Several in one pass, of several dtypes.
    let outputs = run(&[Tensor::f32(&values, &[2, 3]), Tensor::i32(&[1, 2, 3, 4, 5, 6], &[2, 3])], |f, a| {
        f.reduce(&[(&a[0], Reducer::Max), (&a[1], Reducer::Add), (&a[0], Reducer::Add)], &[0])
    });
    assert_eq!(f32s(&outputs[0]), [5.0, 0.5, 2.0]);
    assert_eq!(outputs[1].i32s(), [5, 7, 9]);
    assert_eq!(f32s(&outputs[2]), [8.0, -0.5, -2.0]);
}

#[test]
fn shapes() {
    let a = Tensor::f32(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]);
    let one = |build: &dyn Fn(&Value) -> Value| {
        let found = run_one(std::slice::from_ref(&a), |_, v| build(&v[0]));
        (found.shape().to_vec(), f32s(&found))
    };
    assert_eq!(one(&|a| a.transpose(&[1, 0])), (vec![3, 2], vec![1.0, 4.0, 2.0, 5.0, 3.0, 6.0]));
    assert_eq!(one(&|a| a.reshape(&[3, 2])), (vec![3, 2], vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]));
    assert_eq!(one(&|a| a.slice(&[0, 1], &[2, 2])), (vec![2, 1], vec![2.0, 5.0]));
    let sum = f32s(&a).iter().sum::<f32>();
    let spread = one(&|a| a.reduce(Reducer::Add, &[0, 1]).broadcast_in_dim(&[2, 2], &[]));
    assert_eq!(spread, (vec![2, 2], vec![sum; 4]));
    let stretched = one(&|a| a.slice(&[0, 0], &[2, 1]).broadcast_in_dim(&[2, 2], &[0, 1]));
    assert_eq!(stretched.1, [1.0, 1.0, 4.0, 4.0]);
    let inner = one(&|a| a.broadcast_in_dim(&[2, 2, 3], &[0, 2]));
    assert_eq!(inner.1, [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 4.0, 5.0, 6.0]);
    let joined = one(&|a| a.builder().concatenate(&[a, &a.slice(&[0, 0], &[2, 1])], 1));
    assert_eq!(joined, (vec![2, 4], vec![1.0, 2.0, 3.0, 1.0, 4.0, 5.0, 6.0, 4.0]));
    let padded = one(&|a| a.pad(&a.builder().scalar(9.0, Dtype::F32), &[1, 0], &[0, 2]));
    assert_eq!(padded.1, [9.0, 9.0, 9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 9.0, 9.0, 4.0, 5.0, 6.0, 9.0, 9.0]);
    let count = run_one(&[], |f, _| f.iota(1, ty(Dtype::I32, &[2, 3])));
    assert_eq!(count.i32s(), [0, 1, 2, 0, 1, 2]);
    for dtype in [Dtype::I64, Dtype::U32, Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64] {
        let count = run_one(&[], |f, _| f.iota(0, ty(dtype, &[3])).convert(Dtype::F32));
        assert_eq!(f32s(&count), [0.0, 1.0, 2.0], "{dtype}");
    }
}

#[test]
fn windows_are_held_within_the_value() {
    let a = Tensor::f32(&[0.0, 1.0, 2.0, 3.0, 4.0], &[5]);
    for (start, expected) in [(-3, [0.0, 1.0]), (1, [1.0, 2.0]), (3, [3.0, 4.0]), (9, [3.0, 4.0])] {
        let arguments = [a.clone(), Tensor::i32(&[start], &[])];
        let found = run_one(&arguments, |_, v| v[0].dynamic_slice(&[&v[1]], &[2]));
        assert_eq!(f32s(&found), expected, "from {start}");
        let found = run_one(&arguments, |_, v| v[0].dynamic_update_slice(&v[0].slice(&[0], &[2]).like(9.0), &[&v[1]]));
        let from = expected[0] as usize;
        let updated: Vec<f32> = (0..5).map(|i| if i == from || i == from + 1 { 9.0 } else { i as f32 }).collect();
        assert_eq!(f32s(&found), updated, "from {start}");
    }
}

#[test]
fn gathers_and_scatters() {
    let table = Tensor::f32(&[0.0, 1.0, 10.0, 11.0, 20.0, 21.0], &[3, 2]);
    let rows = Tensor::i32(&[2, 0, 2], &[3, 1]);
    let gathered = run_one(&[table.clone(), rows.clone()], |_, v| {
        let dimensions = GatherDimensions {
            offset_dims: vec![1],
            collapsed_slice_dims: vec![0],
            start_index_map: vec![0],
            index_vector_dim: 1,
            slice_sizes: vec![1, 2],
            ..GatherDimensions::default()
        };
        v[0].gather(&v[1], dimensions, &[3, 2])
    });
    assert_eq!(f32s(&gathered), [20.0, 21.0, 0.0, 1.0, 20.0, 21.0]);
    for (reducer, expected) in
        [(Reducer::Add, [1.0, 2.0, 10.0, 11.0, 24.0, 27.0]), (Reducer::Max, [1.0, 1.0, 10.0, 11.0, 20.0, 21.0])]
    {
        let updates = Tensor::f32(&[1.0, 2.0, 1.0, 1.0, 3.0, 4.0], &[3, 2]);
        let found = run_one(&[table.clone(), rows.clone(), updates], |_, v| {
            let dimensions = ScatterDimensions {
                update_window_dims: vec![1],
                inserted_window_dims: vec![0],
                scatter_dims_to_operand_dims: vec![0],
                index_vector_dim: 1,
                ..ScatterDimensions::default()
            };
            v[0].scatter(&v[1], &v[2], dimensions, reducer)
        });
        assert_eq!(f32s(&found), expected, "{reducer:?}");
    }
}

#[test]
fn loops() {
    // Fibonacci numbers below 100, with a step from outside of both regions.
    let found = run(&[Tensor::i32(&[100], &[])], |f, a| {
        let (zero, one) = (f.scalar(0, Dtype::I32), f.scalar(1, Dtype::I32));
        f.while_loop(&[&zero, &one], |c| c[1].lt(&a[0]), |c| vec![c[1].clone(), &c[0] + &c[1]])
    });
    assert_eq!((found[0].i32s(), found[1].i32s()), (vec![89], vec![144]));
    // A loop in a loop, and one that never turns.
    let found = run_one(&[Tensor::f32(&[1.0, 2.0], &[2])], |f, a| {
        let step = a[0].like(0.5);
        let nested = f.for_loop(3, &[&a[0]], |i, outer| {
            let i = i.convert(Dtype::F32).broadcast_in_dim(&[2], &[]);
            f.for_loop(2, &[&outer[0]], |_, inner| vec![&inner[0] + &i * &step])
        });
        f.for_loop(0, &[&nested[0]], |_, c| vec![c[0].like(0.0)]).remove(0)
    });
    assert_eq!(f32s(&found), [1.0 + 2.0 * 0.5 * 3.0, 2.0 + 2.0 * 0.5 * 3.0]);
    let kept = run(&[Tensor::f32(&[1.0, 2.0], &[2])], |f, a| f.optimization_barrier(&[&a[0], &a[0].exp()]));
    assert_eq!(f32s(&kept[0]), [1.0, 2.0]);
    close(&f32s(&kept[1]), &[1.0_f32.exp(), 2.0_f32.exp()], 1e-6, "barrier");
}

/// Bit for bit: what is not a number, what has no digits, the smallest and largest of every type.
#[test]
fn literals_keep_their_bits() {
    let numbers = [
        0.0,
        -0.0,
        1.0,
        -1.0 / 3.0,
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        1e-40,
        -1e-45,
        6e-8,
        1e-310,
        5e-324,
        f64::from(f32::MAX),
        f64::MAX,
        65_504.0,
        1.0 + 1.0 / 256.0,
        16_777_217.0,
        0.1,
    ];
    let shape = [numbers.len()];
    let outputs = run(&[], |f, _| {
        let dense = |dtype| f.dense(numbers, ty(dtype, &shape));
        let splats = numbers.map(|number| f.splat(number, ty(Dtype::F32, &[1])));
        vec![
            dense(Dtype::F32),
            dense(Dtype::F64),
            dense(Dtype::Bf16),
            dense(Dtype::F16),
            f.concatenate(&splats.iter().collect::<Vec<_>>(), 0),
        ]
    });
    for (i, number) in numbers.into_iter().enumerate() {
        let same = |found: u64, expected: u64, dtype: &str| {
            assert!(
                number.is_nan() || found == expected,
                "{number:e} as {dtype}: {found:x} and should be {expected:x}"
            );
        };
        let single = (number as f32).to_bits();
        assert!(!number.is_nan() || (f32s(&outputs[0])[i].is_nan() && outputs[1].f64s()[i].is_nan()));
        same(f32s(&outputs[0])[i].to_bits().into(), single.into(), "f32");
        same(f32s(&outputs[4])[i].to_bits().into(), single.into(), "f32 splat");
        same(outputs[1].f64s()[i].to_bits(), number.to_bits(), "f64");
        same(outputs[2].bf16s()[i].to_bits().into(), bf16::from_f64(number).to_bits().into(), "bf16");
        same(outputs[3].f16s()[i].to_bits().into(), f16::from_f64(number).to_bits().into(), "f16");
    }
    let ints = run(&[], |f, _| {
        vec![
            f.dense([i64::from(i32::MIN), -1, i32::MAX.into()], ty(Dtype::I32, &[3])),
            f.dense([i64::MIN, i64::MAX], ty(Dtype::I64, &[2])),
            f.dense([0, i64::from(u32::MAX)], ty(Dtype::U32, &[2])).convert(Dtype::I64),
            f.dense([true, false, true, true], ty(Dtype::Pred, &[2, 2])),
        ]
    });
    assert_eq!(ints[0].i32s(), [i32::MIN, -1, i32::MAX]);
    assert_eq!(ints[1].i64s(), [i64::MIN, i64::MAX]);
    assert_eq!(ints[2].i64s(), [0, i64::from(u32::MAX)]);
    assert_eq!(ints[3].bools(), [true, false, true, true]);
    let empty = run_one(&[], |f, _| f.dense::<f64>([], ty(Dtype::F32, &[0, 3])));
    assert_eq!((empty.shape(), f32s(&empty)), (&[0, 3][..], vec![]));
}

#[test]
fn replicas_meet() {
    let arguments: Vec<Tensor> = (0..4).map(|r| Tensor::f32(&[r as f32 + 1.0, 10.0 * r as f32], &[2])).collect();
    let outputs = on_replicas(&arguments, |f, a| {
        let pairs = [vec![0, 1], vec![2, 3]];
        let all = [vec![0, 1, 2, 3]];
        vec![
            a.all_reduce(Reducer::Add, &all),
            a.all_reduce(Reducer::Max, &pairs),
            a.reduce_scatter(Reducer::Add, 0, &pairs),
            f.replica_id().convert(Dtype::F32),
            a.all_reduce(Reducer::Min, &[vec![3, 0], vec![1, 2]]),
        ]
    });
    for (r, outputs) in outputs.iter().enumerate() {
        let pair = r / 2 * 2;
        let value = |r: usize| [r as f32 + 1.0, 10.0 * r as f32];
        assert_eq!(f32s(&outputs[0]), [10.0, 60.0]);
        assert_eq!(f32s(&outputs[1]), value(pair + 1));
        assert_eq!(f32s(&outputs[2]), [value(pair)[r % 2] + value(pair + 1)[r % 2]]);
        assert_eq!(f32s(&outputs[3]), [r as f32]);
        assert_eq!(f32s(&outputs[4]), value(if r == 0 || r == 3 { 0 } else { 1 }));
    }
}

#[test]
fn replicas_give_each_other_what_they_have() {
    let arguments: Vec<Tensor> =
        (0..4).map(|r| Tensor::f32(&[0.0, 1.0, 2.0, 3.0].map(|i| 10.0 * r as f32 + i), &[2, 2])).collect();
    let outputs = on_replicas(&arguments, |_, a| {
        let pairs = [vec![1, 0], vec![2, 3]];
        vec![
            a.all_gather(0, &pairs),
            a.all_gather(1, &[vec![0, 1, 2, 3]]),
            a.all_to_all(0, 1, &pairs),
            a.all_to_all(1, 1, &pairs),
            a.collective_permute(&[(0, 1), (1, 2), (2, 0)]),
        ]
    });
    let value = |r: usize| [0.0, 1.0, 2.0, 3.0].map(|i| 10.0 * r as f32 + i);
    for (r, outputs) in outputs.iter().enumerate() {
        let group = if r < 2 { [1, 0] } else { [2, 3] };
        let [first, second] = group.map(value);
        assert_eq!((outputs[0].shape(), f32s(&outputs[0])), (&[4, 2][..], [first, second].concat()));
        let rows = |row: usize| (0..4).flat_map(move |r| value(r)[2 * row..2 * row + 2].to_vec());
        assert_eq!((outputs[1].shape(), f32s(&outputs[1])), (&[2, 8][..], rows(0).chain(rows(1)).collect()));
        let place = group.iter().position(|member| *member == r).unwrap();
        // The row, or the column, of each that belongs to this one.
        let row = [first, second].map(|v| [v[2 * place], v[2 * place + 1]]).concat();
        assert_eq!((outputs[2].shape(), f32s(&outputs[2])), (&[1, 4][..], row));
        let column = vec![first[place], second[place], first[2 + place], second[2 + place]];
        assert_eq!((outputs[3].shape(), f32s(&outputs[3])), (&[2, 2][..], column));
        let source = [Some(2), Some(0), Some(1), None][r];
        assert_eq!(f32s(&outputs[4]), source.map_or([0.0; 4], value));
    }
}

/// The compiler splits a program by its annotations: of rows, of columns, of both, of none.
#[test]
fn partitions_split_a_program() {
    let a: Vec<f32> = (0..16).map(|i| i as f32).collect();
    for (tiles, devices) in [
        (vec![4, 1], vec![0, 1, 2, 3]),
        (vec![1, 4], vec![0, 1, 2, 3]),
        (vec![2, 2], vec![0, 1, 2, 3]),
        (vec![2, 1], vec![0, 1, 2, 3]),
    ] {
        let split = Sharding::Tiled { tiles: tiles.clone(), devices };
        let f = Builder::new();
        let whole = f.argument("a", ty(Dtype::F32, &[4, 4]));
        f.shard(&whole, split.clone());
        let doubled = (&whole + &whole).sharded(&split);
        let sum = doubled.reduce(Reducer::Add, &[0, 1]).sharded(&Sharding::Replicated);
        let mut module = f.finish("split", &[("doubled", &doubled), ("sum", &sum)]).unwrap();
        module.main.results[0].sharding = Some(split);
        module.main.results[1].sharding = Some(Sharding::Replicated);
        module.partitions = 4;
        let part = |device: usize| -> Vec<f32> {
            let (rows, columns) = (4 / tiles[0], 4 / tiles[1]);
            // Devices beyond the tiles hold copies, in turn.
            let tile = device * (tiles[0] * tiles[1]) / 4;
            let (r, c) = (tile / tiles[1] * rows, tile % tiles[1] * columns);
            (r..r + rows).flat_map(|i| (c..c + columns).map(move |j| 4 * i + j)).map(|i| a[i]).collect()
        };
        let shape = [4 / tiles[0], 4 / tiles[1]];
        let arguments: Vec<Tensor> = (0..4).map(|d| Tensor::f32(&part(d), &shape)).collect();
        for (device, outputs) in text_on_partitions(&module, &arguments).iter().enumerate() {
            let expected: Vec<f32> = part(device).iter().map(|x| 2.0 * x).collect();
            assert_eq!(f32s(&outputs[0]), expected, "{tiles:?} on device {device}");
            assert_eq!(f32s(&outputs[1]), [240.0]);
        }
    }
}

/// A donated argument's memory becomes the result's.
#[test]
fn aliases_share_memory() {
    let f = Builder::new();
    let (a, b) = (f.argument("a", ty(Dtype::F32, &[4])), f.argument("b", ty(Dtype::F32, &[4])));
    f.alias(&b, 0);
    let sum = &a + &b;
    let module = f.finish("sum", &[("sum", &sum)]).unwrap();
    let stats = device::compile(&module).executable().memory_stats().unwrap();
    assert_eq!(stats.alias, 16, "{stats:?}");
    let found =
        device::run_donating(&module, &[Tensor::f32(&[1.0; 4], &[4])], &[Tensor::f32(&[1.0, 2.0, 3.0, 4.0], &[4])]);
    assert_eq!(f32s(&found[0]), [2.0, 3.0, 4.0, 5.0]);
}
