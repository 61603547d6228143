//! Dtypes of cotangents: they have the values' dtypes, but are summed in f32.

use super::*;
use crate::interpret::cases::windows::rows;
use stablehlo::{DotDimensions, Interpreter, Precision, Rounding, Save};

fn narrow(shape: &[usize]) -> TensorType {
    TensorType::new(Dtype::Bf16, shape)
}

fn rounded(function: &Traced, arguments: &[Array]) -> Vec<Array> {
    let f = Builder::new();
    let values: Vec<Value> = function.argument_types().into_iter().map(|ty| f.argument("", ty)).collect();
    let results = f.call(function, &values.iter().collect::<Vec<_>>());
    let results: Vec<(&str, &Value)> = results.iter().map(|v| ("", v)).collect();
    let module = f.finish("rounded", &results).expect("a module");
    let interpreter = Interpreter { rounding: Rounding::Dtypes, ..Interpreter::default() };
    interpreter.run(&module, arguments).expect("results")
}

/// 1 and 256 times 1/256: added one by one in bf16, the small numbers vanish; their exact sum is 1.
const MANY: usize = 256;

#[test]
fn values_used_often_are_summed_wide() {
    let function = trace(&[narrow(&[])], |f, a| {
        let small = f.scalar(1.0 / 256.0, Dtype::Bf16);
        let used = (0..MANY).map(|_| (&a[0] * &small).convert(Dtype::F32));
        vec![used.fold(a[0].convert(Dtype::F32), |sum, part| sum + part)]
    });
    let found =
        rounded(&gradient(&function.expect("a function"), &[0]), &[Array::floats(Dtype::Bf16, [], [1.0]).unwrap()]);
    assert_eq!((found[1].ty(), found[1].to_floats()), (&narrow(&[]), vec![2.0]));
}

#[test]
fn constants_of_a_scan_are_summed_wide() {
    let scalar = TensorType::scalar(Dtype::F32);
    let body = built(trace(&[scalar.clone(), scalar.clone(), narrow(&[])], |_, a| {
        vec![&a[0] + &a[1] * a[2].convert(Dtype::F32)]
    }));
    let function = trace(&[narrow(&[])], |f, a| {
        let xs = f.splat(1.0 / 256.0, TensorType::new(Dtype::F32, [MANY]));
        let begin = a[0].convert(Dtype::F32);
        f.scan(MANY, &body, &[&begin], &[&xs], &[&a[0]], Save::Carry).carry
    });
    let found =
        rounded(&gradient(&function.expect("a function"), &[0]), &[Array::floats(Dtype::Bf16, [], [1.0]).unwrap()]);
    assert_eq!((found[1].ty(), found[1].to_floats()), (&narrow(&[]), vec![2.0]));
}

#[test]
fn rows_read_often_are_summed_wide() {
    let function = trace(&[narrow(&[2, 1])], |f, a| {
        let ids = f.splat(1, TensorType::new(Dtype::I32, [MANY + 1, 1]));
        let weights = (0..=MANY).map(|i| if i == 0 { 1.0 } else { 1.0 / 256.0 });
        let weights = f.dense(weights, TensorType::new(Dtype::F32, [MANY + 1, 1]));
        let rows = a[0].gather(&ids, rows(1), &[MANY + 1, 1]).convert(Dtype::F32);
        vec![(rows * weights).reduce(Reducer::Add, &[0, 1])]
    });
    let arguments = [Array::floats(Dtype::Bf16, [2, 1], [1.0, 2.0]).unwrap()];
    let found = rounded(&gradient(&function.expect("a function"), &[0]), &arguments);
    assert_eq!((found[1].ty(), found[1].to_floats()), (&narrow(&[2, 1]), vec![0.0, 2.0]));
}

/// Two layers of products with weights that a scan slices; f32 weights are rounded to bf16 within it.
fn layers(stored: Dtype, save: Save) -> Traced {
    let (x, weights) = (narrow(&[4, 3]), TensorType::new(stored, [2, 3, 3]));
    let body = built(trace(&[x.clone(), TensorType::new(stored, [3, 3])], |_, a| {
        let weight = a[1].convert(Dtype::Bf16);
        let product = a[0].dot_general(&weight, DotDimensions::contract(1, 0), Dtype::F32, Precision::Default);
        vec![product.unary(stablehlo::Unary::Tanh).convert(Dtype::Bf16)]
    }));
    let function = trace(&[x, weights], |f, a| {
        let last = f.scan(2, &body, &[&a[0]], &[&a[1]], &[], save).carry.remove(0).convert(Dtype::F32);
        vec![(&last * &last).reduce(Reducer::Add, &[0, 1])]
    });
    function.expect("a function")
}

#[test]
fn gradients_of_narrow_weights_accumulate_in_f32() {
    let sums = |stored: Dtype, save: Save, unrounded: bool| {
        let function = layers(stored, save);
        let sum = TensorType::new(Dtype::F32, [2, 3, 3]);
        let types = [function.argument_types(), vec![sum]].concat();
        let program = trace(&types, |f, a| {
            let arguments = [&a[0], &a[1]];
            let pulled = match unrounded {
                true => f.vjp_unrounded(&function, &arguments, &[1]),
                false => f.vjp(&function, &arguments, &[1]),
            };
            let (results, pullback) = pulled.expect("a derivative");
            let one = results[0].like(1.0);
            [pullback.add_to(&[&one], &[&a[2]]), pullback.call(&[&one])].concat()
        });
        let numbers = |n: usize, by: f64| (0..n).map(move |i| (i as f64 * by).sin());
        let arguments = [
            Array::floats(Dtype::Bf16, [4, 3], numbers(12, 0.7)).unwrap(),
            // The same numbers for both dtypes.
            Array::floats(stored, [2, 3, 3], numbers(18, 0.3).map(|x| half::bf16::from_f64(x).to_f64())).unwrap(),
            Array::floats(Dtype::F32, [2, 3, 3], numbers(18, 0.1)).unwrap(),
        ];
        rounded(&program.expect("a program"), &arguments)
    };
    for save in [Save::Carry, Save::Products, Save::Everything] {
        let [wide, narrow] = [Dtype::F32, Dtype::Bf16].map(|stored| sums(stored, save.clone(), true));
        assert_eq!(narrow[0], wide[0], "{save:?}");
        // The returned gradients have the dtype of the weights: they are rounded once.
        assert_eq!((narrow[1].ty().dtype, wide[1].ty().dtype), (Dtype::Bf16, Dtype::F32));
        let once: Vec<f64> = wide[1].to_floats().into_iter().map(|x| half::bf16::from_f64(x).to_f64()).collect();
        assert_eq!(narrow[1].to_floats(), once, "{save:?}");
        // Without `vjp_unrounded`, products return bf16.
        let plain = sums(Dtype::Bf16, save.clone(), false);
        assert_ne!(plain[0], wide[0], "{save:?}");
    }
}

/// Concatenated weights, sliced by a scan, as operands of one product.
#[test]
fn gradients_of_concatenated_narrow_weights_keep_f32_precision() {
    let sums = |stored: Dtype, save: Save, unrounded: bool| {
        let x = narrow(&[4, 3]);
        let body =
            built(trace(&[x.clone(), TensorType::new(stored, [3, 2]), TensorType::new(stored, [3, 1])], |f, a| {
                let weight = f.concatenate(&[&a[1].convert(Dtype::Bf16), &a[2].convert(Dtype::Bf16)], 1);
                let product = a[0].dot_general(&weight, DotDimensions::contract(1, 0), Dtype::F32, Precision::Default);
                vec![product.unary(stablehlo::Unary::Tanh).convert(Dtype::Bf16)]
            }));
        let types = [x, TensorType::new(stored, [2, 3, 2]), TensorType::new(stored, [2, 3, 1])];
        let function = built(trace(&types, |f, a| {
            let last =
                f.scan(2, &body, &[&a[0]], &[&a[1], &a[2]], &[], save.clone()).carry.remove(0).convert(Dtype::F32);
            vec![(&last * &last).reduce(Reducer::Add, &[0, 1])]
        }));
        let wide = |ty: &TensorType| TensorType::new(Dtype::F32, ty.shape.clone());
        let all = [types.to_vec(), types[1..].iter().map(wide).collect()].concat();
        let program = trace(&all, |f, a| {
            let arguments = [&a[0], &a[1], &a[2]];
            let pulled = match unrounded {
                true => f.vjp_unrounded(&function, &arguments, &[1, 2]),
                false => f.vjp(&function, &arguments, &[1, 2]),
            };
            let (results, pullback) = pulled.expect("a derivative");
            let one = results[0].like(1.0);
            // In the second call, only the first weight has an accumulator.
            [pullback.add_to(&[&one], &[&a[3], &a[4]]), pullback.add_to_begun(&[&one], &[Some(&a[3]), None])].concat()
        });
        let numbers = |n: usize, by: f64| (0..n).map(move |i| (i as f64 * by).sin());
        let of = |dtype, shape: &[usize], by: f64| {
            let n = shape.iter().product();
            // The same numbers for all dtypes.
            Array::floats(dtype, shape, numbers(n, by).map(|x| half::bf16::from_f64(x).to_f64())).unwrap()
        };
        let arguments = [
            of(Dtype::Bf16, &[4, 3], 0.7),
            of(stored, &[2, 3, 2], 0.3),
            of(stored, &[2, 3, 1], 0.4),
            of(Dtype::F32, &[2, 3, 2], 0.1),
            of(Dtype::F32, &[2, 3, 1], 0.2),
        ];
        let found = rounded(&program.expect("a program"), &arguments);
        assert_eq!(found[0], found[2], "{save:?}");
        let begun = arguments[4].to_floats();
        let added: Vec<f64> = found[3].to_floats().iter().zip(begun).map(|(x, y)| f64::from((x + y) as f32)).collect();
        (found, added)
    };
    for save in [Save::Carry, Save::Products, Save::Everything] {
        let [(wide, _), (narrow, added)] = [Dtype::F32, Dtype::Bf16].map(|stored| sums(stored, save.clone(), true));
        assert!(narrow.iter().all(|sum| sum.ty().dtype == Dtype::F32));
        assert_eq!(narrow, wide, "{save:?}");
        // Without an accumulator, the result is the gradient itself.
        assert_eq!(narrow[1].to_floats(), added, "{save:?}");
        // Without `vjp_unrounded`, products return bf16.
        let (plain, _) = sums(Dtype::Bf16, save.clone(), false);
        assert!(plain[0] != wide[0] && plain[1] != wide[1], "{save:?}");
    }
}

#[test]
fn products_of_bf16_stay_products_of_bf16() {
    let product = |precision: Precision, operands: Dtype, stored: Dtype| {
        let types = [TensorType::new(operands, [4, 3]), TensorType::new(stored, [3, 5])];
        let function = trace(&types, |_, a| {
            let weight = a[1].convert(operands);
            let product = a[0].dot_general(&weight, DotDimensions::contract(1, 0), Dtype::F32, precision);
            vec![(&product * &product).reduce(Reducer::Add, &[0, 1])]
        });
        let gradient = gradient(&function.expect("a function"), &[0, 1]);
        assert_eq!(gradient.result_types()[1..], types);
        let function = gradient.function().clone();
        let mut dtypes = vec![];
        function.visit(|op| {
            if matches!(op.kind, stablehlo::Kind::DotGeneral(..)) {
                dtypes.push((function.type_of(op.operands[0]).dtype, function.type_of(op.results[0]).dtype));
            }
        });
        dtypes
    };
    use Dtype::*;
    assert_eq!(product(Precision::Default, Bf16, Bf16), [(Bf16, F32), (Bf16, Bf16), (Bf16, Bf16)]);
    // The gradient of an f32 weight keeps the precision of the product's accumulator.
    assert_eq!(product(Precision::Default, Bf16, F32), [(Bf16, F32), (Bf16, Bf16), (Bf16, F32)]);
    // `Highest` keeps the precision of the cotangent; f16 operands do too, because of f16's range.
    assert_eq!(product(Precision::Highest, Bf16, Bf16), [(Bf16, F32), (F32, F32), (F32, F32)]);
    assert_eq!(product(Precision::Default, F16, F16), [(F16, F32), (F32, F32), (F32, F32)]);
}
