//! Constants, bit by bit.

use crate::device::{interpreter_agrees, run_module};
use crate::interpreter::cases::{case, ty};
use half::{bf16, f16};
use stablehlo::*;

fn run(build: impl FnOnce(&Builder) -> Vec<Value>) -> Vec<Array> {
    let case = case("literals", &[], |f, _| build(f));
    let found = run_module(&case.module, &[]);
    interpreter_agrees(&case.module, &[], &found, case.slack);
    found
}

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
    let outputs = run(|f| {
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
        let found = |output: usize| outputs[output].to_floats()[i];
        let single = (number as f32).to_bits();
        assert!(!number.is_nan() || (found(0).is_nan() && found(1).is_nan()));
        same((found(0) as f32).to_bits().into(), single.into(), "f32");
        same((found(4) as f32).to_bits().into(), single.into(), "f32 splat");
        same(found(1).to_bits(), number.to_bits(), "f64");
        same(bf16::from_f64(found(2)).to_bits().into(), bf16::from_f64(number).to_bits().into(), "bf16");
        same(f16::from_f64(found(3)).to_bits().into(), f16::from_f64(number).to_bits().into(), "f16");
    }
    let ints = run(|f| {
        vec![
            f.dense([i64::from(i32::MIN), -1, i32::MAX.into()], ty(Dtype::I32, &[3])),
            f.dense([i64::MIN, i64::MAX], ty(Dtype::I64, &[2])),
            f.dense([0, i64::from(u32::MAX)], ty(Dtype::U32, &[2])).convert(Dtype::I64),
            f.dense([true, false, true, true], ty(Dtype::Pred, &[2, 2])),
        ]
    });
    assert_eq!(ints[0].to_ints(), [i32::MIN.into(), -1, i32::MAX.into()]);
    assert_eq!(ints[1].to_ints(), [i64::MIN, i64::MAX]);
    assert_eq!(ints[2].to_ints(), [0, i64::from(u32::MAX)]);
    assert_eq!(ints[3].to_preds(), [true, false, true, true]);
    let empty = run(|f| vec![f.dense::<f64>([], ty(Dtype::F32, &[0, 3]))]).remove(0);
    assert_eq!((empty.shape(), empty.to_floats()), (&[0, 3][..], vec![]));
}
