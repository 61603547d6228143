//! Operations that move elements: dimensions of size 0 and 1, windows beyond the edge.

use super::*;

pub fn cases() -> Vec<Case> {
    vec![constants(), literals(), whole(), parts(), padding(), dynamic(), indices()]
}

fn constants() -> Case {
    case("constants", &[], |f, _| {
        let iota = [Dtype::I32, Dtype::I64, Dtype::U32, Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64];
        let mut results: Vec<Value> = iota.iter().map(|d| f.iota(1, ty(*d, &[2, 5, 3]))).collect();
        for dtype in [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64] {
            results.push(f.splat(f64::NAN, ty(dtype, &[3])));
            results.push(f.splat(1.0 / 3.0, ty(dtype, &[3])));
        }
        results.push(f.splat(-7, ty(Dtype::I64, &[2, 2])));
        results.push(f.dense([i64::from(i32::MIN), -1, i32::MAX.into()], ty(Dtype::I32, &[3])));
        results.push(f.dense([i64::MIN, i64::MAX], ty(Dtype::I64, &[2])));
        results.push(f.dense([0, i64::from(u32::MAX)], ty(Dtype::U32, &[2])).convert(Dtype::I64));
        results.push(f.dense([true, false, true, true], ty(Dtype::Pred, &[2, 2])));
        results.push(f.dense::<i64>([], ty(Dtype::I32, &[0, 3])));
        results.push(f.dense::<f64>([], ty(Dtype::F32, &[0, 3])));
        results.push(f.iota(0, ty(Dtype::I32, &[0])));
        results
    })
}

/// Zeros, infinities, and the smallest and largest numbers of every type keep their bits.
fn literals() -> Case {
    let numbers = [
        0.0,
        -0.0,
        1.0,
        -1.0 / 3.0,
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
    case("literals", &[], |f, _| {
        let bits =
            [(Dtype::F32, Dtype::I32), (Dtype::F64, Dtype::I64), (Dtype::Bf16, Dtype::I16), (Dtype::F16, Dtype::I16)];
        let dense = bits.map(|(dtype, bits)| f.dense(numbers, ty(dtype, &[numbers.len()])).bitcast_convert(bits));
        let splats = numbers.map(|number| f.splat(number, ty(Dtype::F32, &[1])));
        let splats = f.concatenate(&splats.iter().collect::<Vec<_>>(), 0).bitcast_convert(Dtype::I32);
        dense.into_iter().chain([splats]).collect()
    })
}

fn whole() -> Case {
    let mut random = Random(2);
    let arguments = [
        random.array(Dtype::F32, &[2, 3, 4]),
        random.array(Dtype::I32, &[3, 1]),
        random.array(Dtype::Pred, &[]),
        random.array(Dtype::F32, &[2, 0, 3]),
    ];
    case("broadcast, transpose, reshape, concatenate", &arguments, |f, a| {
        vec![
            a[1].broadcast_in_dim(&[2, 3, 5], &[1, 2]),
            a[1].broadcast_in_dim(&[3, 0], &[0, 1]),
            a[2].broadcast_in_dim(&[2, 2], &[]),
            a[0].transpose(&[2, 0, 1]),
            a[0].transpose(&[1, 0, 2]),
            a[3].transpose(&[2, 0, 1]),
            a[0].reshape(&[4, 6]),
            a[3].reshape(&[0]),
            f.concatenate(
                &[
                    &a[0],
                    &a[3].broadcast_in_dim(&[2, 0, 3], &[0, 1, 2]).transpose(&[0, 1, 2]).pad(
                        &f.scalar(0.0, Dtype::F32),
                        &[0, 0, 0],
                        &[0, 1, 1],
                    ),
                    &a[0],
                ],
                1,
            ),
            f.concatenate(&[&a[0], &a[0].slice(&[0, 0, 0], &[2, 3, 0]), &a[0].slice(&[0, 0, 1], &[2, 3, 2])], 2),
            f.concatenate(&[&a[1]], 0),
        ]
    })
}

fn parts() -> Case {
    let mut random = Random(3);
    let arguments = [random.array(Dtype::F32, &[5, 7]), random.array(Dtype::I64, &[6])];
    case("slice", &arguments, |_, a| {
        vec![a[0].slice(&[1, 2], &[4, 7]), a[0].slice(&[5, 0], &[5, 7]), a[1].slice(&[1], &[6])]
    })
}

fn padding() -> Case {
    let mut random = Random(4);
    let arguments = [random.array(Dtype::F32, &[3, 4]), random.array(Dtype::I32, &[0, 2])];
    case("pad", &arguments, |f, a| {
        let (zero, seven) = (f.scalar(0.0, Dtype::F32), f.scalar(7, Dtype::I32));
        vec![a[0].pad(&zero, &[1, 0], &[0, 2]), a[1].pad(&seven, &[1, 2], &[1, 0])]
    })
}

/// Starts before the beginning, beyond the end, and in between.
fn dynamic() -> Case {
    let mut random = Random(5);
    let scalar = |x: i64| i32s(&[], &[x]);
    let unsigned = Array::ints(Dtype::U32, [], [u32::MAX.into()]).expect("an integer");
    let long = Array::ints(Dtype::I64, [], [i64::MIN]).expect("an integer");
    let arguments = [
        random.array(Dtype::F32, &[4, 5]),
        random.array(Dtype::F32, &[2, 3]),
        scalar(-7),
        scalar(1),
        scalar(100),
        unsigned,
        long,
    ];
    case("dynamic slices", &arguments, |_, a| {
        let mut results = vec![];
        for (row, column) in [(2, 3), (3, 4), (4, 2), (3, 3), (5, 5), (6, 6)] {
            results.push(a[0].dynamic_slice(&[&a[row], &a[column]], &[2, 3]));
            results.push(a[0].dynamic_update_slice(&a[1], &[&a[row], &a[column]]));
        }
        results.push(a[0].dynamic_slice(&[&a[3], &a[3]], &[0, 5]));
        results.push(a[0].dynamic_update_slice(&a[1].slice(&[0, 0], &[0, 3]), &[&a[3], &a[3]]));
        results
    })
}

/// The maximum with ties and with NaN.
fn indices() -> Case {
    let numbers = [1.0, 3.0, 3.0, -1.0, f64::NAN, 2.0, f64::NAN, 9.0, f64::NEG_INFINITY, f64::NEG_INFINITY, -0.0, 0.0];
    let arguments = [f32s(&[3, 4], &numbers), i32s(&[2, 3], &[5, 5, -9, -9, -9, 7])];
    case("largest", &arguments, |_, a| {
        let both = [a[0].largest(1), a[0].largest(0), a[1].largest(1), a[1].largest(0)];
        both.into_iter().flat_map(|(largest, index)| [largest, index]).collect()
    })
}
