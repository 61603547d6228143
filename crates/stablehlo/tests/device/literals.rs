//! Constants, bit by bit.

use crate::device::{f32s, run, run_one, ty};
use half::{bf16, f16};
use stablehlo::*;

/// NaN, zero, infinity, and the smallest and largest numbers of every type keep their bits.
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
