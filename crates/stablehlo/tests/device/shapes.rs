//! Products, reductions, data movement, and loops.

use crate::device::{Tensor, close, counting, f32s, run, run_one, ty};
use stablehlo::*;

#[test]
fn products() {
    let (a, b) = (counting(2 * 3 * 4), counting(2 * 4 * 5));
    let sum = |f: &dyn Fn(usize) -> f32| (0..4).map(f).sum::<f32>();
    // [2, 3, 4] x [2, 4, 5], contracted over 4, with a batch of 2.
    let found = run_one(&[Tensor::f32(&a, &[2, 3, 4]), Tensor::f32(&b, &[2, 4, 5])], |_, v| {
        let dimensions = DotDimensions { batch: (vec![0], vec![0]), contract: (vec![2], vec![1]) };
        v[0].dot_general(&v[1], dimensions, Dtype::F32, Precision::Highest)
    });
    let at = |i: usize| (i / 15, i / 5 % 3, i % 5);
    let expected: Vec<f32> =
        (0..30).map(at).map(|(n, i, j)| sum(&|k| a[n * 12 + i * 4 + k] * b[n * 20 + k * 5 + j])).collect();
    assert_eq!((found.shape(), f32s(&found)), (&[2, 3, 5][..], expected));
    // Every choice of contracted dimensions.
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
    // bf16 operands with f32 accumulation: bf16 cannot represent 1025.
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
    // Empty reductions return the identity.
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
    // Several reductions of different dtypes in one pass.
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
fn dynamic_windows_are_clamped() {
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
    // Fibonacci numbers up to 100, with a bound from outside of both regions.
    let found = run(&[Tensor::i32(&[100], &[])], |f, a| {
        let (zero, one) = (f.scalar(0, Dtype::I32), f.scalar(1, Dtype::I32));
        f.while_loop(&[&zero, &one], |c| c[1].lt(&a[0]), |c| vec![c[1].clone(), &c[0] + &c[1]])
    });
    assert_eq!((found[0].i32s(), found[1].i32s()), (vec![89], vec![144]));
    // A nested loop, and a loop without iterations.
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
