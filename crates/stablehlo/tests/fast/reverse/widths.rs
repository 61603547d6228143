//! Dtypes of cotangents: they have the values' dtypes, but are summed in f32.

use super::*;
use crate::interpret::cases::windows::rows;
use grpo_stablehlo::{DotDimensions, Interpreter, Mesh, Precision, Rounding, Save, Sharding};

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
    let one = Array::floats(Dtype::Bf16, [], [1.0]).unwrap();
    let found = rounded(&gradient(&function.expect("a function"), &[0]), &[one]);
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
    let one = Array::floats(Dtype::Bf16, [], [1.0]).unwrap();
    let found = rounded(&gradient(&function.expect("a function"), &[0]), &[one]);
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

/// Gradients of the weights of two layers of products, as a scan slices them; f32 weights are rounded to bf16 within
/// it. A layer's weights have these columns, have the sharding, if any, and are concatenated to one operand. Returns
/// the sums with accumulators, the sums where only the first weight has an accumulator, the rounded gradients, and the
/// accumulators.
fn sums_of_layers(
    columns: &[usize],
    sharding: Option<&Sharding>,
    stored: Dtype,
    save: Save,
    unrounded: bool,
) -> [Vec<Array>; 4] {
    let n = columns.len();
    let slices = columns.iter().map(|columns| TensorType::new(stored, [3, *columns]));
    let slices: Vec<TensorType> = std::iter::once(narrow(&[4, 3])).chain(slices).collect();
    let body = built(trace(&slices, |f, a| {
        let weight = |weight: &Value| {
            let reshaped = weight.reshape(&[1, 3, weight.shape()[1]]).reshape(weight.shape());
            let sharded = sharding.map_or(reshaped.clone(), |sharding| reshaped.constrain(sharding));
            sharded.convert(Dtype::Bf16)
        };
        let weights: Vec<Value> = a[1..].iter().map(weight).collect();
        let weight = match &weights[..] {
            [weight] => weight.clone(),
            weights => f.concatenate(&weights.iter().collect::<Vec<_>>(), 1),
        };
        let product = a[0].dot_general(&weight, DotDimensions::contract(1, 0), Dtype::F32, Precision::Default);
        vec![product.tanh().convert(Dtype::Bf16)]
    }));
    let stacks = |dtype| columns.iter().map(move |columns| TensorType::new(dtype, [2, 3, *columns]));
    let types: Vec<TensorType> = std::iter::once(narrow(&[4, 3])).chain(stacks(stored)).collect();
    let function = built(trace(&types, |f, a| {
        let xs: Vec<&Value> = a[1..].iter().collect();
        let last = f.scan(2, &body, &[&a[0]], &xs, &[], save).carry.remove(0).convert(Dtype::F32);
        vec![(&last * &last).reduce(Reducer::Add, &[0, 1])]
    }));
    let all: Vec<TensorType> = types.into_iter().chain(stacks(Dtype::F32)).collect();
    let program = built(trace(&all, |f, a| {
        let (arguments, sums) = a.split_at(n + 1);
        let arguments: Vec<&Value> = arguments.iter().collect();
        let weights: Vec<usize> = (1..=n).collect();
        let pulled = match unrounded {
            true => f.vjp_unrounded(&function, &arguments, &weights),
            false => f.vjp(&function, &arguments, &weights),
        };
        let (results, pullback) = pulled.expect("a derivative");
        let one = results[0].like(1.0);
        let first: Vec<Option<&Value>> = sums.iter().enumerate().map(|(i, sum)| (i == 0).then_some(sum)).collect();
        let sums: Vec<&Value> = sums.iter().collect();
        [pullback.add_to(&[&one], &sums), pullback.add_to_begun(&[&one], &first), pullback.call(&[&one])].concat()
    }));
    // The same numbers for all dtypes.
    let numbers = |(ty, seed): (&TensorType, u8)| {
        let number = |i: usize| half::bf16::from_f64((i as f64 * (0.7 - 0.1 * f64::from(seed))).sin()).to_f64();
        Array::floats(ty.dtype, &ty.shape[..], (0..ty.elements()).map(number)).unwrap()
    };
    let mut arguments: Vec<Array> = all.iter().zip(0..).map(numbers).collect();
    let mut found = rounded(&program, &arguments);
    let [rounded, first] = [2 * n, n].map(|at| found.split_off(at));
    [found, first, rounded, arguments.split_off(n + 1)]
}

#[test]
fn gradients_of_narrow_weights_accumulate_in_f32() {
    let mesh = Mesh::new("mesh", [("data", 2), ("fsdp", 3)]).expect("a mesh");
    let rows = mesh.sharding(&[&["fsdp"], &[]]).expect("a sharding");
    for (columns, sharding) in [(&[3][..], None), (&[2, 1], None), (&[3], Some(&rows)), (&[2, 1], Some(&rows))] {
        for save in [Save::Carry, Save::Products, Save::Everything] {
            let sums =
                |stored: Dtype, unrounded: bool| sums_of_layers(columns, sharding, stored, save.clone(), unrounded);
            let [wide, narrow] = [Dtype::F32, Dtype::Bf16].map(|stored| sums(stored, true));
            assert_eq!(narrow[0], wide[0], "{save:?}");
            assert_eq!(narrow[1], wide[1], "{save:?}");
            assert!(narrow[1].iter().all(|sum| sum.ty().dtype == Dtype::F32));
            // Without an accumulator, the result is the gradient itself.
            assert_eq!(narrow[0][0], narrow[1][0], "{save:?}");
            for ((sum, gradient), begun) in narrow[0].iter().zip(&narrow[1]).zip(&narrow[3]).skip(1) {
                let added = gradient.to_floats().into_iter().zip(begun.to_floats()).map(|(x, y)| x + y);
                assert_eq!(sum.to_floats(), added.map(|x| f64::from(x as f32)).collect::<Vec<_>>(), "{save:?}");
            }
            // The returned gradients have the dtype of the weights: they are rounded once.
            for (narrow, wide) in narrow[2].iter().zip(&wide[2]) {
                assert_eq!((narrow.ty().dtype, wide.ty().dtype), (Dtype::Bf16, Dtype::F32));
                let once: Vec<f64> = wide.to_floats().into_iter().map(|x| half::bf16::from_f64(x).to_f64()).collect();
                assert_eq!(narrow.to_floats(), once, "{save:?}");
            }
            // Without `vjp_unrounded`, products return bf16.
            let plain = sums(Dtype::Bf16, false);
            assert!(plain[0].iter().zip(&wide[0]).all(|(plain, wide)| plain != wide), "{save:?}");
        }
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
            if matches!(op.kind, grpo_stablehlo::Kind::DotGeneral(..)) {
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
