//! Illegal operations are refused with the operation, the expected and found types, and the line that built it.

use grpo_stablehlo::*;
use proptest::prelude::*;
use std::panic::Location;

/// Asserts the first error of a program with arguments f32 `[2, 3]`, i32 `[2]`, predicates `[2, 3]` and an i32 scalar.
#[track_caller]
fn assert_refused(operation: &str, mentions: &[&str], build: impl FnOnce(&Builder, &[Value; 4])) {
    let called = Location::caller();
    let f = Builder::new();
    let arguments = [
        f.argument("matrix", TensorType::new(Dtype::F32, [2, 3])),
        f.argument("indices", TensorType::new(Dtype::I32, [2])),
        f.argument("mask", TensorType::new(Dtype::Pred, [2, 3])),
        f.argument("index", TensorType::scalar(Dtype::I32)),
    ];
    build(&f, &arguments);
    // Later operations do not hide the first error.
    let after = arguments[0].exp();
    let error = f.finish("refused", &[("after", &after)]).expect_err(operation);
    let text = error.to_string();
    let Error::Operation { operation: found, at, .. } = error else { panic!("{text}") };
    assert_eq!(found, operation, "{text}");
    assert_eq!(at.file(), file!(), "blame the caller: {text}");
    assert!(at.line().abs_diff(called.line()) <= 6, "line {} of a test at {}: {text}", at.line(), called.line());
    for mention in mentions {
        assert!(text.contains(mention), "`{mention}` is not in: {text}");
    }
}

fn f32s(shape: &[usize]) -> TensorType {
    TensorType::new(Dtype::F32, shape)
}

#[test]
fn elementwise() {
    let (matrix, ints) = ("tensor<2x3xf32>", "tensor<2xi32>");
    assert_refused("stablehlo.add", &[matrix, ints], |_, [a, i, ..]| drop(a + i));
    assert_refused("stablehlo.subtract", &[matrix, ints], |_, [a, i, ..]| drop(a.clone() - i));
    assert_refused("stablehlo.multiply", &[matrix, ints], |_, [a, i, ..]| drop(a * i.clone()));
    assert_refused("stablehlo.divide", &[matrix, ints], |_, [a, i, ..]| drop(a.clone() / i.clone()));
    assert_refused("stablehlo.maximum", &[matrix, ints], |_, [a, i, ..]| drop(a.max(i)));
    assert_refused("stablehlo.and", &[matrix], |_, [a, ..]| drop(a & a));
    assert_refused("stablehlo.or", &[matrix], |_, [a, ..]| drop(a | a));
    assert_refused("stablehlo.add", &["i1"], |_, [.., m, _]| drop(m + m));
    assert_refused("stablehlo.exponential", &[ints], |_, [_, i, ..]| drop(i.exp()));
    assert_refused("stablehlo.not", &[matrix], |_, [a, ..]| drop(!a));
    assert_refused("stablehlo.negate", &["i1"], |_, [.., m, _]| drop(-m));
    assert_refused("stablehlo.is_finite", &[ints], |_, [_, i, ..]| drop(i.is_finite()));
    assert_refused("stablehlo.compare", &[matrix, ints], |_, [a, i, ..]| drop(a.lt(i)));
    assert_refused("stablehlo.select", &[matrix], |_, [a, ..]| drop(a.select(a, a)));
    assert_refused("stablehlo.select", &[ints, "2x3xi1"], |_, [_, i, m, _]| drop(m.select(i, i)));
    assert_refused("stablehlo.select", &[matrix, ints], |_, [a, i, m, _]| drop(m.select(a, i)));
    assert_refused("stablehlo.clamp", &[matrix, ints], |_, [a, i, ..]| drop(a.clamp(a, i)));
    for operation in [Unary::Abs, Unary::Sign] {
        let name = operation.name();
        assert_refused(name, &["ui32"], |f, _| drop(f.scalar(1, Dtype::U32).unary(operation)));
    }
}

#[test]
fn constants() {
    assert_refused("stablehlo.constant", &["Float(1.5)", "i32"], |f, _| drop(f.scalar(1.5, Dtype::I32)));
    assert_refused("stablehlo.constant", &["Int(1)", "f32"], |f, _| drop(f.scalar(1, Dtype::F32)));
    assert_refused("stablehlo.constant", &["i1"], |_, [.., m, _]| drop(m.like(0.0)));
    assert_refused("stablehlo.constant", &["Int(-1)", "ui32"], |f, _| drop(f.scalar(-1, Dtype::U32)));
    assert_refused("stablehlo.constant", &["2 numbers", "2x3"], |f, _| drop(f.dense([1.0, 2.0], f32s(&[2, 3]))));
    assert_refused("stablehlo.constant", &["i1"], |f, _| drop(f.dense([1], TensorType::new(Dtype::Pred, [1]))));
    assert_refused("stablehlo.iota", &["dimension 2"], |f, _| drop(f.iota(2, f32s(&[2, 3]))));
    assert_refused("stablehlo.iota", &["predicates"], |f, _| drop(f.iota(0, TensorType::new(Dtype::Pred, [2]))));
}

#[test]
fn products_and_reductions() {
    #[track_caller]
    fn dot(a: &Value, b: &Value, d: DotDimensions, dtype: Dtype) {
        drop(a.dot_general(b, d, dtype, Precision::Default));
    }
    let name = "stablehlo.dot_general";
    assert_refused(name, &["2x3xf32", "2xi32"], |_, [a, i, ..]| dot(a, i, DotDimensions::contract(0, 0), Dtype::F32));
    assert_refused(name, &["dimension 1", "one size"], |_, [a, ..]| {
        dot(a, a, DotDimensions::contract(1, 0), Dtype::F32)
    });
    assert_refused(name, &["[2]"], |_, [a, ..]| dot(a, a, DotDimensions::contract(2, 0), Dtype::F32));
    assert_refused(name, &["bf16"], |_, [a, ..]| dot(a, a, DotDimensions::contract(1, 1), Dtype::Bf16));
    assert_refused(name, &["i32"], |_, [a, ..]| dot(a, a, DotDimensions::contract(1, 1), Dtype::I32));
    let twice = DotDimensions { batch: (vec![0], vec![0]), contract: (vec![0], vec![1]) };
    assert_refused(name, &["distinct"], |_, [a, ..]| dot(a, a, twice, Dtype::F32));
    let uneven = DotDimensions { batch: (vec![0], vec![]), contract: (vec![1], vec![1]) };
    assert_refused(name, &["as many"], |_, [a, ..]| dot(a, a, uneven, Dtype::F32));
    let name = "stablehlo.reduce";
    assert_refused(name, &["[2]"], |_, [a, ..]| drop(a.reduce(Reducer::Add, &[2])));
    assert_refused(name, &["[1, 1]"], |_, [a, ..]| drop(a.reduce(Reducer::Add, &[1, 1])));
    assert_refused(name, &["[2, 3]", "[2]"], |f, [a, i, ..]| {
        drop(f.reduce(&[(a, Reducer::Add), (i, Reducer::Add)], &[0]));
    });
    assert_refused(name, &["no operands"], |f, _| drop(f.reduce(&[], &[0])));
    assert_refused(name, &["f32"], |_, [a, ..]| drop(a.reduce(Reducer::And, &[0])));
}

#[test]
fn shapes() {
    assert_refused("stablehlo.broadcast_in_dim", &["2x3", "[4, 3]"], |_, [a, ..]| {
        drop(a.broadcast_in_dim(&[4, 3], &[0, 1]));
    });
    assert_refused("stablehlo.broadcast_in_dim", &["[1, 0]"], |_, [a, ..]| drop(a.broadcast_in_dim(&[3, 2], &[1, 0])));
    assert_refused("stablehlo.broadcast_in_dim", &["[0, 5]"], |_, [a, ..]| drop(a.broadcast_in_dim(&[2, 3], &[0, 5])));
    assert_refused("stablehlo.reshape", &["2x3", "[5]"], |_, [a, ..]| drop(a.reshape(&[5])));
    assert_refused("stablehlo.reshape", &["2x3"], |_, [a, ..]| drop(a.reshape(&[usize::MAX, usize::MAX])));
    assert_refused("stablehlo.transpose", &["[0]"], |_, [a, ..]| drop(a.transpose(&[0])));
    assert_refused("stablehlo.transpose", &["[0, 0]"], |_, [a, ..]| drop(a.transpose(&[0, 0])));
    assert_refused("stablehlo.slice", &["[0, 0]..[2, 4]"], |_, [a, ..]| drop(a.slice(&[0, 0], &[2, 4])));
    assert_refused("stablehlo.slice", &["[1, 2]..[1, 1]"], |_, [a, ..]| drop(a.slice(&[1, 2], &[1, 1])));
    assert_refused("stablehlo.slice", &["[0]..[1]"], |_, [a, ..]| drop(a.slice(&[0], &[1])));
    let name = "stablehlo.dynamic_slice";
    assert_refused(name, &["[2, 4]"], |_, [a, .., s]| drop(a.dynamic_slice(&[s, s], &[2, 4])));
    assert_refused(name, &["one integer scalar"], |_, [a, .., s]| drop(a.dynamic_slice(&[s], &[1, 1])));
    assert_refused(name, &["tensor<2xi32>"], |_, [a, i, .., s]| drop(a.dynamic_slice(&[s, i], &[1, 1])));
    let name = "stablehlo.dynamic_update_slice";
    assert_refused(name, &["2x3xi1"], |_, [a, _, m, s]| drop(a.dynamic_update_slice(m, &[s, s])));
    assert_refused(name, &["one integer scalar"], |_, [a, .., s]| drop(a.dynamic_update_slice(a, &[s])));
    assert_refused("stablehlo.pad", &["scalar f32"], |_, [a, .., s]| drop(a.pad(s, &[0, 0], &[0, 0])));
    assert_refused("stablehlo.pad", &["[0]"], |f, [a, ..]| drop(a.pad(&f.scalar(0.0, Dtype::F32), &[0], &[0, 0])));
    assert_refused("stablehlo.pad", &[], |f, [a, ..]| {
        drop(a.pad(&f.scalar(0.0, Dtype::F32), &[usize::MAX, 0], &[1, 0]));
    });
    assert_refused("stablehlo.concatenate", &["no operands"], |f, _| drop(f.concatenate(&[], 0)));
    assert_refused("stablehlo.concatenate", &["dimension 2"], |f, [a, ..]| drop(f.concatenate(&[a, a], 2)));
    assert_refused("stablehlo.concatenate", &["2x3xi1"], |f, [a, _, m, _]| drop(f.concatenate(&[a, m], 0)));
    assert_refused("stablehlo.gather", &["integer"], |_, [a, ..]| drop(a.gather(a, GatherDimensions::default(), &[])));
    assert_refused("stablehlo.gather", &["sizes"], |_, [a, i, ..]| drop(a.gather(i, GatherDimensions::default(), &[])));
    let scatter = ScatterDimensions::default;
    assert_refused("stablehlo.scatter", &["integer"], |_, [a, ..]| drop(a.scatter(a, a, scatter(), Reducer::Add)));
    assert_refused("stablehlo.scatter", &["updates"], |_, [a, i, ..]| drop(a.scatter(i, i, scatter(), Reducer::Add)));
}

#[test]
fn bits_and_maxima() {
    assert_refused("stablehlo.shift_left", &["2x3xf32"], |_, [a, ..]| drop(a.shift_left(a)));
    assert_refused("stablehlo.shift_right_arithmetic", &["2xi32", "2x3xf32"], |_, [a, i, ..]| {
        drop(i.shift_right_arithmetic(a));
    });
    assert_refused("stablehlo.bitcast_convert", &["f32", "bf16"], |_, [a, ..]| drop(a.bitcast_convert(Dtype::Bf16)));
    assert_refused("stablehlo.bitcast_convert", &["i1"], |_, [a, ..]| drop(a.bitcast_convert(Dtype::Pred)));
    assert_refused("stablehlo.reduce", &["dimension 2 of tensor<2x3xf32>"], |_, [a, ..]| drop(a.largest(2)));
    assert_refused("stablehlo.reduce", &["with elements"], |_, [a, ..]| drop(a.slice(&[0, 0], &[0, 3]).largest(0)));
}

#[test]
fn calls_and_barriers() {
    let call = |aliases| CustomCall { target: "code".into(), aliases, ..CustomCall::default() };
    assert_refused("stablehlo.custom_call", &["no results"], |f, [a, ..]| drop(f.custom_call(call(vec![]), &[a], &[])));
    assert_refused("stablehlo.custom_call", &["result 0 and operand 1"], |f, [a, i, ..]| {
        drop(f.custom_call(call(vec![(0, 1)]), &[a, i], &[a.ty().clone()]));
    });
    assert_refused("stablehlo.optimization_barrier", &["no operands"], |f, _| drop(f.optimization_barrier(&[])));
}

#[test]
fn regions() {
    let name = "stablehlo.while";
    assert_refused(name, &["tensor<i1>", "tensor<i32>"], |f, [.., s]| {
        drop(f.while_loop(&[s], |c| c[0].clone(), |c| c.to_vec()));
    });
    assert_refused(name, &["(tensor<i32>)", "(tensor<i32>, tensor<i32>)"], |f, [.., s]| {
        drop(f.while_loop(&[s], |c| c[0].lt(&c[0]), |c| vec![c[0].clone(), c[0].clone()]));
    });
    assert_refused(name, &["nothing is carried"], |f, _| {
        drop(f.while_loop(&[], |_| f.scalar(true, Dtype::Pred), |_| vec![]));
    });
    assert_refused(name, &["(tensor<i32>, tensor<f32>)"], |f, _| {
        drop(f.for_loop(2, &[&f.scalar(0.0, Dtype::F32)], |i, _| vec![i.clone()]));
    });
    // A value read outside of its region.
    assert_refused("stablehlo.add", &["region that is closed"], |f, [.., s]| {
        let mut kept = None;
        f.for_loop(2, &[s], |i, c| {
            kept = Some(i.clone());
            c.to_vec()
        });
        drop(kept.expect("a value") + s);
    });
    // A value of the condition, read in the body.
    assert_refused("stablehlo.convert", &["region that is closed"], |f, [.., s]| {
        let inner = std::cell::RefCell::new(None);
        let condition = |c: &[Value]| inner.borrow_mut().insert(c[0].lt(&c[0].like(3))).clone();
        f.while_loop(&[s], condition, |c| vec![&c[0] + inner.borrow().as_ref().expect("a value").convert(Dtype::I32)]);
    });
    assert_refused("func.func", &["`late`"], |f, [.., s]| {
        f.for_loop(2, &[s], |_, c| {
            f.argument("late", f32s(&[]));
            c.to_vec()
        });
    });
}

#[test]
fn values_of_another_function() {
    let other = Builder::new();
    let stranger = other.argument("stranger", f32s(&[2, 3]));
    assert_refused("stablehlo.add", &["another function"], |_, [a, ..]| drop(a + &stranger));
    assert_refused("tf.aliasing_output", &["not an argument"], |f, _| f.alias(&stranger.exp(), 0));
    let whole = Mesh::new("mesh", [("data", 2)]).expect("a mesh").replicated(2);
    assert_refused("sdy.sharding", &["not an argument"], |f, [a, ..]| f.shard(&a.exp(), &whole));
    let f = Builder::new();
    f.argument("own", f32s(&[2, 3]));
    let error = f.finish("main", &[("stranger", &stranger)]).expect_err("a value of another function");
    assert!(error.to_string().contains("return: a tensor<2x3xf32> of another function"), "{error}");
}

#[test]
fn results_and_aliases() {
    let finish = |alias: &[usize]| {
        let f = Builder::new();
        let arguments = [f.argument("a", f32s(&[2])), f.argument("b", f32s(&[2]))];
        alias.iter().zip(&arguments).for_each(|(result, argument)| f.alias(argument, *result));
        let (sum, one) = (&arguments[0] + &arguments[1], arguments[0].reduce(Reducer::Add, &[0]));
        f.finish("main", &[("sum", &sum), ("one", &one)])
    };
    assert!(finish(&[0]).is_ok());
    for (alias, mentions) in [
        (&[1][..], ["`a`", "tensor<2xf32>", "tensor<f32>"]),
        (&[7], ["`a`", "result 7", "no such result"]),
        (&[0, 0], ["`b`", "tensor<2xf32>", "result 0"]),
    ] {
        let error = finish(alias).expect_err("an alias that cannot be");
        let text = error.to_string();
        let Error::Operation { operation, at, .. } = error else { panic!("{text}") };
        assert_eq!((operation, at.file()), ("tf.aliasing_output", file!()));
        mentions.iter().for_each(|mention| assert!(text.contains(mention), "{text}"));
    }
    let error = Builder::new().finish("main", &[]).expect_err("no results");
    assert!(error.to_string().contains("return: no results"), "{error}");
}

/// A builder cannot be used after `finish`; the error says so.
#[test]
fn a_builder_cannot_be_used_after_finish() {
    let f = Builder::new();
    let a = f.argument("a", f32s(&[2]));
    let again = a.builder();
    assert!(f.finish("main", &[("a", &a)]).is_ok());
    let b = a.exp();
    let error = again.finish("again", &[("b", &b)]).expect_err("it is finished");
    assert!(matches!(error, Error::Operation { .. }), "{error}");
}

fn any_shape() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop::sample::select(vec![0_usize, 1, 2, 3, 5, 1 << 33, usize::MAX]), 0..4)
}

fn any_dtype() -> impl Strategy<Value = Dtype> {
    use Dtype::*;
    prop::sample::select(vec![Pred, I32, I64, U32, F16, Bf16, F32, F64])
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    /// Random operations give a program or an error, and both print.
    #[test]
    fn random_programs_build_or_fail_without_panic(
        shapes in [any_shape(), any_shape()],
        dtypes in [any_dtype(), any_dtype()],
        numbers in prop::collection::vec(0..5_usize, 0..4),
        others in prop::collection::vec(prop::sample::select(vec![0_usize, 1, 2, usize::MAX]), 0..4),
        choice in 0..19_usize,
    ) {
        let f = Builder::new();
        let [a, b] = [0, 1].map(|i| f.argument("", TensorType::new(dtypes[i], shapes[i].clone())));
        let index = f.argument("index", TensorType::scalar(Dtype::I32));
        let starts = vec![&index; numbers.len()];
        let dot = DotDimensions { batch: (others.clone(), numbers.clone()), contract: (numbers.clone(), others.clone()) };
        let result = match choice {
            0 => &a + &b,
            1 => a.reduce(Reducer::Add, &numbers),
            2 => a.broadcast_in_dim(&shapes[1], &numbers),
            3 => a.reshape(&shapes[1]),
            4 => a.transpose(&numbers),
            5 => a.slice(&numbers, &others),
            6 => a.dynamic_slice(&starts, &shapes[1]),
            7 => a.dynamic_update_slice(&b, &starts),
            8 => a.pad(&f.scalar(0.0, Dtype::F32), &numbers, &others),
            9 => f.concatenate(&[&a, &b], numbers.len()),
            10 => a.dot_general(&b, dot, dtypes[1], Precision::Default),
            11 => a.dot_general(&a, DotDimensions::contract(numbers.len(), others.len()), dtypes[0], Precision::Default),
            12 => a.largest(numbers.len()).1,
            13 => a.select(&b, &b),
            14 => f.dense(numbers.iter().map(|n| *n as i64), TensorType::new(dtypes[0], shapes[0].clone())),
            15 => f.iota(numbers.len(), a.ty().clone()),
            16 => a.clamp(&b, &a),
            17 => {
                let mesh = Mesh::new("mesh", [("x", 2), ("y", 3)]).expect("a mesh");
                let axes: Vec<&[&str]> = numbers.iter().map(|n| [&["x"][..], &["y"], &[]][n % 3]).collect();
                a.constrain(&mesh.sharding(&axes).unwrap_or(mesh.replicated(others.len())))
            }
            _ => a.convert(dtypes[1]).compare(Comparison::Lt, &b),
        };
        match f.finish("any", &[("result", &result)]) {
            Ok(module) => prop_assert!(module.to_string().contains("func.func")),
            Err(error) => {
                let Error::Operation { at, .. } = &error else { unreachable!("{error}") };
                prop_assert_eq!(at.file(), file!());
            }
        }
    }
}
