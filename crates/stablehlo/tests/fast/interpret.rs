//! The interpreter: every operation runs, limits, and malformed programs. `device` compares its numbers with XLA.

#[path = "../cases/mod.rs"]
pub(crate) mod cases;

use cases::{all, every_form, forms};
use grpo_stablehlo::*;

/// Every operation has a case, and the interpreter runs it. `device` compares the same cases with XLA.
#[test]
fn every_operation_has_a_case() {
    let cases = all();
    for case in &cases {
        let results = case.module.interpret(&case.arguments).unwrap_or_else(|error| panic!("{}: {error}", case.name));
        let types: Vec<&TensorType> = results.iter().map(Array::ty).collect();
        let main = &case.module.main;
        assert_eq!(types, main.body().results.iter().map(|id| main.type_of(*id)).collect::<Vec<_>>(), "{}", case.name);
    }
    let (expected, found) = (every_form(), forms(&cases));
    assert_eq!(expected.difference(&found).collect::<Vec<_>>(), Vec::<&String>::new(), "no case");
    assert_eq!(found.difference(&expected).collect::<Vec<_>>(), Vec::<&String>::new(), "not listed");
}

/// The interpreter runs scans and similar operations directly; their lowered form, for compilers, gives the same
/// results.
#[test]
fn lowered_programs_give_equal_results() {
    let mut changed = 0;
    for case in all().into_iter().chain(cases::split::programs()) {
        let lowered = case.module.lowered();
        changed += usize::from(*lowered != case.module);
        let [plain, lowered] =
            [&case.module, &*lowered].map(|module| module.interpret(&case.arguments).expect("values"));
        // Bit by bit, including NaN.
        assert_eq!(format!("{plain:?}"), format!("{lowered:?}"), "{}", case.name);
    }
    assert!(changed >= 2, "{changed} programs with scans, or with a word on derivatives");
}

/// Floats keep f64 precision unless rounding is requested.
#[test]
fn floats_keep_f64_precision() {
    let case = cases::case("digits", &[cases::f32s(&[2], &[1e30, 16_777_216.0])], |_, a| {
        vec![&a[0] * &a[0], &a[0] + a[0].like(1.0), a[0].like(1.0 / 3.0).convert(Dtype::Bf16)]
    });
    let plain = case.module.interpret(&case.arguments).expect("numbers");
    assert_eq!(plain[0].to_floats()[0], 1e30 * 1e30);
    assert_eq!(plain[1].to_floats()[1], 16_777_217.0);
    assert_eq!(plain[2].to_floats()[0], 1.0 / 3.0);
    let rounding = Interpreter { rounding: Rounding::Dtypes, ..Interpreter::default() };
    let rounded = rounding.run(&case.module, &case.arguments).expect("numbers");
    assert_eq!(rounded[0].to_floats()[0], f64::INFINITY);
    assert_eq!(rounded[1].to_floats()[1], 16_777_216.0);
    assert_eq!(rounded[2].to_floats()[0], 0.333984375);
}

/// Returns the interpreter's error for a program with arguments f32 [2, 3] and i32 [2].
fn refused(build: impl FnOnce(&Builder, &[Value]) -> Value) -> Error {
    let arguments = [cases::f32s(&[2, 3], &[0.5; 6]), cases::i32s(&[2], &[1, 2])];
    let case = cases::case("refused", &arguments, |f, a| vec![build(f, a)]);
    case.module.interpret(&arguments).expect_err("it cannot be run")
}

#[test]
fn uninterpretable_operations_are_refused_by_name() {
    let uninterpreted = |operation: &str, mention: &str, error: Error| {
        let text = error.to_string();
        let Error::Uninterpreted { operation: found, .. } = error else { panic!("{text}") };
        assert_eq!(found, operation, "{text}");
        assert!(text.contains(mention), "{text}");
    };
    let call = |f: &Builder, a: &[Value]| {
        let call = CustomCall { target: "topk".into(), ..CustomCall::default() };
        f.custom_call(call, &[&a[0]], &[a[0].ty().clone()]).remove(0)
    };
    uninterpreted("stablehlo.custom_call", "`topk`", refused(call));
    // A window of two columns that starts at the last of three.
    let partly = |_: &Builder, a: &[Value]| {
        let dimensions = ScatterDimensions {
            update_window_dims: vec![0, 1],
            scatter_dims_to_operand_dims: vec![0, 1],
            ..ScatterDimensions::default()
        };
        let start = a[1].like(1) * a[1].builder().dense([0, 2], a[1].ty().clone());
        a[0].scatter(&start, &a[0].slice(&[0, 0], &[2, 2]), dimensions, Reducer::Add)
    };
    uninterpreted("stablehlo.scatter", "[0, 2] that is partly outside of tensor<2x3xf32>", refused(partly));
}

#[test]
fn limits_stop_endless_and_large_programs() {
    let limit = |operation: &str, mention: &str, error: Error| {
        let text = error.to_string();
        let Error::Limit { operation: found, .. } = error else { panic!("{text}") };
        assert_eq!(found, operation, "{text}");
        assert!(text.contains(mention), "{text}");
    };
    limit("func.func", "1099511627776x2xi32", refused(|_, a| a[1].broadcast_in_dim(&[1 << 40, 2], &[1])));
    limit(
        "func.func",
        "Interpreter::elements",
        refused(|f, _| f.iota(0, TensorType::new(Dtype::F32, [usize::MAX, 9]))),
    );
    // A size that overflows, in a tensor without elements.
    let empty = cases::case("empty", &[], |f, _| vec![f.iota(0, TensorType::new(Dtype::F32, [1 << 40, 1 << 40, 0]))]);
    assert!(empty.module.interpret(&[]).expect("a value")[0].to_floats().is_empty());
    let case = cases::case("forever", &[], |f, _| {
        f.while_loop(&[&f.scalar(0, Dtype::I32)], |_| f.scalar(true, Dtype::Pred), |c| vec![&c[0] + c[0].like(1)])
    });
    let short = Interpreter { work: 1000, ..Interpreter::default() };
    // The limit may be reached at any operation of the loop.
    let error = short.run(&case.module, &[]).expect_err("it never ends");
    assert!(matches!(&error, Error::Limit { reason, .. } if reason.contains("1000 elements")), "{error}");
    let product = cases::case("product", &[], |f, _| {
        let ones = f.splat(1.0, TensorType::new(Dtype::F32, [10, 10]));
        vec![ones.dot_general(&ones, DotDimensions::contract(1, 0), Dtype::F32, Precision::Default)]
    });
    limit("stablehlo.dot_general", "1000 elements", short.run(&product.module, &[]).expect_err("1000 products"));
    // Deeper nesting than any real program, and than the stack allows.
    let deep = cases::case("deep", &[cases::i32s(&[], &[0])], |f, a| {
        fn nest(f: &Builder, value: &Value, depth: usize) -> Vec<Value> {
            if depth == 0 { vec![value + value] } else { f.for_loop(1, &[value], |_, c| nest(f, &c[0], depth - 1)) }
        }
        nest(f, &a[0], 100)
    });
    limit("stablehlo.while", "regions in", deep.module.interpret(&deep.arguments).expect_err("deep"));
}

/// The builder does not check dimension numbers and arguments.
#[test]
fn malformed_programs_are_refused() {
    let malformed = |operation: &str, mention: &str, error: Error| {
        let text = error.to_string();
        let Error::Malformed { operation: found, .. } = error else { panic!("{text}") };
        assert_eq!(found, operation, "{text}");
        assert!(text.contains(mention), "{text}");
    };
    let case = cases::case("sum", &[cases::f32s(&[2], &[0.0; 2])], |_, a| vec![&a[0] + &a[0]]);
    malformed("func.func", "(tensor<2xf32>) expected, got ()", case.module.interpret(&[]).expect_err("none"));
    let other = case.module.interpret(&[cases::i32s(&[2], &[0; 2])]).expect_err("another dtype");
    malformed("func.func", "(tensor<2xf32>) expected, got (tensor<2xi32>)", other);
    let rows = cases::windows::rows(3);
    for (mention, wrong, shape) in [
        ("dimension numbers", GatherDimensions { slice_sizes: vec![1, 1], ..GatherDimensions::default() }, &[7][..]),
        ("dimension numbers", GatherDimensions { start_index_map: vec![2], ..rows.clone() }, &[2, 3]),
        ("dimension numbers", GatherDimensions { offset_dims: vec![0, 0], ..rows.clone() }, &[2, 3]),
        ("dimension numbers", rows.clone(), &[5, 3]),
        ("windows of [0, 3]", GatherDimensions { slice_sizes: vec![0, 3], ..rows.clone() }, &[2, 3]),
        ("windows of [1, 2]", GatherDimensions { slice_sizes: vec![1, 2], ..rows.clone() }, &[2, 3]),
    ] {
        malformed("stablehlo.gather", mention, refused(|_, a| a[0].gather(&a[1], wrong, shape)));
    }
    let scatter = ScatterDimensions::from(&rows);
    let wide = |f: &Builder, a: &[Value]| {
        a[0].scatter(&a[1], &f.splat(0.0, TensorType::new(Dtype::F32, [2, 4])), scatter, Reducer::Add)
    };
    malformed("stablehlo.scatter", "windows of tensor<2x4xf32>", refused(wide));
}
