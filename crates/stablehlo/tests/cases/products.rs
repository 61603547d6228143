//! Products and reductions, including empty ones.

use super::*;

pub fn cases() -> Vec<Case> {
    vec![products(), reductions()]
}

fn products() -> Case {
    let mut random = Random(7);
    let arguments = [
        random.array(Dtype::F32, &[2, 3, 4, 5]),
        random.array(Dtype::F32, &[5, 2, 6, 4]),
        random.array(Dtype::I32, &[3, 4]),
        random.array(Dtype::Bf16, &[4, 3]),
        random.array(Dtype::F32, &[3, 0]),
        random.array(Dtype::F32, &[4, 3]),
        random.array(Dtype::F32, &[5, 4]),
    ];
    case("dot_general", &arguments, |f, a| {
        let dot = |x: &Value, y: &Value, d: DotDimensions, dtype| x.dot_general(y, d, dtype, Precision::Highest);
        let batch = DotDimensions { batch: (vec![0], vec![1]), contract: (vec![3, 2], vec![0, 3]) };
        let last = DotDimensions { batch: (vec![2, 0], vec![3, 1]), contract: (vec![3], vec![0]) };
        let outer = DotDimensions::default();
        // bf16 cannot represent the sum.
        let ones = f.splat(1.0, ty(Dtype::Bf16, &[2, 1025]));
        vec![
            dot(&a[0], &a[1], batch, Dtype::F32),
            dot(&a[0], &a[1], last, Dtype::F32),
            dot(&a[2], &a[2], DotDimensions::contract(1, 1), Dtype::I32),
            dot(&a[2], &a[2], outer, Dtype::I32),
            dot(&a[3], &a[3], DotDimensions::contract(0, 0), Dtype::F32),
            dot(&a[4], &a[4], DotDimensions::contract(1, 1), Dtype::F32),
            dot(&a[4], &a[4], DotDimensions::contract(0, 0), Dtype::F32),
            dot(&a[5], &a[6], DotDimensions::contract(0, 1), Dtype::F32),
            dot(&a[6], &a[5], DotDimensions::contract(1, 0), Dtype::F32),
            ones.dot_general(&ones, DotDimensions::contract(1, 1), Dtype::F32, Precision::Highest),
        ]
    })
}

fn reductions() -> Case {
    let mut random = Random(8);
    let with_nan = f32s(&[2, 3], &[1.0, f64::NAN, 2.0, f64::INFINITY, -3.0, 4.0]);
    let arguments = [
        random.array(Dtype::F32, &[2, 3, 4]),
        random.array(Dtype::I32, &[2, 3, 4]),
        random.array(Dtype::U32, &[2, 3, 4]),
        random.array(Dtype::Pred, &[2, 3, 4]),
        random.array(Dtype::F32, &[2, 0]),
        with_nan,
        random.array(Dtype::I64, &[2, 3, 4]),
    ];
    case("reduce", &arguments, |f, a| {
        let mut results = vec![];
        for reducer in Reducer::VARIANTS.iter().copied() {
            for value in a.iter().filter(|v| reducer.fits(v.dtype())) {
                let dimensions: &[&[usize]] =
                    if value.shape().len() == 3 { &[&[1], &[2, 0], &[]] } else { &[&[1], &[0]] };
                results.extend(dimensions.iter().map(|d| value.reduce(reducer, d)));
            }
        }
        results.extend(f.reduce(&[(&a[0], Reducer::Max), (&a[1], Reducer::Add), (&a[3], Reducer::Or)], &[0, 2]));
        results
    })
}
