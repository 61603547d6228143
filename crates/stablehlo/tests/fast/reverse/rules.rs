//! Compares the rule of every operation with finite differences.

use super::*;
use crate::interpret::cases::windows::{corners, elements, entries, rows};
use grpo_stablehlo::*;
use strum::VariantArray;

#[test]
pub(super) fn derivatives_of_elementwise_operations() {
    let ty = wide(&[7]);
    for operation in [
        Unary::Abs,
        Unary::Negate,
        Unary::Exponential,
        Unary::ExponentialMinusOne,
        Unary::Logistic,
        Unary::Tanh,
        Unary::Cosine,
        Unary::Sine,
        Unary::LogPlusOne,
    ] {
        check(operation.name(), std::slice::from_ref(&ty), |_, a| vec![a[0].unary(operation)]);
    }
    for operation in [Unary::Log, Unary::Sqrt, Unary::Rsqrt] {
        check(operation.name(), std::slice::from_ref(&ty), |_, a| vec![(&a[0] * &a[0]).unary(operation)]);
    }
    check("sign", std::slice::from_ref(&ty), |_, a| vec![a[0].unary(Unary::Sign) * &a[0]]);
    for operation in [Binary::Add, Binary::Subtract, Binary::Multiply, Binary::Divide, Binary::Maximum, Binary::Minimum]
    {
        check(operation.name(), &[ty.clone(), ty.clone()], |_, a| vec![a[0].binary(operation, &a[1])]);
        check(operation.name(), std::slice::from_ref(&ty), |_, a| {
            vec![a[0].binary(operation, &(&a[0] * a[0].like(0.3)))]
        });
    }
    check("select", &[ty.clone(), ty.clone()], |_, a| vec![a[0].lt(&a[1]).select(&a[0].exp(), &(&a[0] * &a[1]))]);
    check("convert", std::slice::from_ref(&ty), |_, a| vec![a[0].convert(Dtype::F32).exp().convert(Dtype::F64)]);
}

/// Predicates, integers and step functions have zero derivative; in a product with them, only the other factor has one.
#[test]
pub(super) fn operations_with_zero_derivative() {
    let ty = wide(&[6]);
    let two = [ty.clone(), ty.clone()];
    let times = |what: &str, mask: &dyn Fn(&Builder, &[Value]) -> Value| {
        check(what, &two, |f, a| {
            let mask = mask(f, a);
            // Reductions return fewer elements.
            let total: Vec<usize> = (0..mask.shape().len()).collect();
            let factor = mask.convert(Dtype::F64).reduce(Reducer::Add, &total) + f.scalar(0.5, Dtype::F64);
            vec![&a[0] * factor.broadcast_in_dim(&[6], &[]), a[1].exp()]
        });
    };
    for comparison in Comparison::VARIANTS.iter().copied() {
        times(&format!("{comparison:?}"), &|_, a| a[0].compare(comparison, &a[1]));
    }
    times("is_finite", &|_, a| a[0].unary(Unary::IsFinite));
    times("not", &|_, a| a[0].lt(&a[1]).unary(Unary::Not));
    for operation in [Binary::And, Binary::Or, Binary::Xor] {
        times(operation.name(), &|_, a| a[0].lt(&a[1]).binary(operation, &a[0].gt(&a[0].like(0.2))));
    }
    for operation in [Binary::ShiftLeft, Binary::ShiftRightLogical, Binary::ShiftRightArithmetic] {
        times(operation.name(), &|_, a| {
            let bits = (a[0].abs() * a[0].like(50.0)).convert(Dtype::I32);
            bits.binary(operation, &bits.like(1))
        });
    }
    for reducer in [Reducer::And, Reducer::Or] {
        times(&format!("reduce {reducer:?}"), &|_, a| a[0].lt(&a[1]).reduce(reducer, &[0]));
        times(&format!("scatter {reducer:?}"), &|f, a| {
            let updates = a[1].gt(&a[1].like(0.1)).slice(&[0], &[2]);
            a[0].lt(&a[1]).scatter(&ids(f, &[4, 0], &[2, 1]), &updates, elements(), reducer)
        });
    }
}

/// Returns the cotangents of arguments for these cotangents of results.
fn pulled(f: &Traced, arguments: &[Array], with_respect_to: &[usize], cotangents: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let gradient = trace(&f.argument_types(), |b, a| {
        let (results, pullback) = b.vjp(f, &a.iter().collect::<Vec<_>>(), with_respect_to).expect("a derivative");
        let cts = results.iter().zip(cotangents).map(|(r, ct)| b.dense(ct.iter().copied(), r.ty().clone()));
        pullback.call(&cts.collect::<Vec<_>>().iter().collect::<Vec<_>>())
    });
    let found = gradient.expect("a function").function().interpret(arguments).expect("cotangents");
    found.iter().map(Array::to_floats).collect()
}

#[test]
fn equal_elements_share_the_cotangent() {
    let ty = wide(&[4]);
    let tied = [1.0, 2.0, 2.0, -1.0];
    let arguments = [Array::floats(Dtype::F64, [4], tied).unwrap(), Array::floats(Dtype::F64, [4], [2.0; 4]).unwrap()];
    let two = |operation| trace(&[ty.clone(), ty.clone()], |_, a| vec![a[0].binary(operation, &a[1])]).unwrap();
    let found = pulled(&two(Binary::Maximum), &arguments, &[0, 1], &[vec![1.0; 4]]);
    assert_eq!(found, [vec![0.0, 0.5, 0.5, 0.0], vec![1.0, 0.5, 0.5, 1.0]]);
    let found = pulled(&two(Binary::Minimum), &arguments, &[0, 1], &[vec![1.0; 4]]);
    assert_eq!(found, [vec![1.0, 0.5, 0.5, 1.0], vec![0.0, 0.5, 0.5, 0.0]]);
    let many = trace(std::slice::from_ref(&ty), |_, a| vec![a[0].reduce(Reducer::Max, &[0])]).unwrap();
    assert_eq!(pulled(&many, &arguments[..1], &[0], &[vec![3.0]]), [[0.0, 1.5, 1.5, 0.0]]);
    // `largest` returns an index, whose element gets the whole cotangent.
    let first = trace(std::slice::from_ref(&ty), |_, a| vec![a[0].largest(0).0]).unwrap();
    assert_eq!(pulled(&first, &arguments[..1], &[0], &[vec![3.0]]), [[0.0, 3.0, 0.0, 0.0]]);
}

#[test]
pub(super) fn products() {
    let dot = |what: &str, a: &[usize], b: &[usize], batch: (&[usize], &[usize]), contract: (&[usize], &[usize])| {
        let dimensions = DotDimensions {
            batch: (batch.0.to_vec(), batch.1.to_vec()),
            contract: (contract.0.to_vec(), contract.1.to_vec()),
        };
        check(what, &[wide(a), wide(b)], |_, v| {
            vec![v[0].dot_general(&v[1], dimensions, Dtype::F64, Precision::Default)]
        });
    };
    dot("vectors", &[3], &[3], (&[], &[]), (&[0], &[0]));
    dot("outer", &[2], &[3], (&[], &[]), (&[], &[]));
    dot("x w", &[2, 3], &[3, 4], (&[], &[]), (&[1], &[0]));
    dot("x wᵀ", &[2, 3], &[4, 3], (&[], &[]), (&[1], &[1]));
    dot("xᵀ w", &[3, 2], &[3, 4], (&[], &[]), (&[0], &[0]));
    dot("three", &[2, 5, 3], &[3, 4], (&[], &[]), (&[2], &[0]));
    dot("heads", &[2, 3, 4, 2], &[2, 3, 5, 2], (&[0, 1], &[0, 1]), (&[3], &[3]));
    dot("any order", &[3, 2, 4, 5], &[5, 2, 6, 3, 4], (&[2, 1], &[4, 1]), (&[3, 0], &[0, 3]));
    dot("crossed", &[2, 3, 4], &[4, 3, 5], (&[], &[]), (&[1, 2], &[1, 0]));
    dot("batch last", &[3, 4, 2], &[4, 5, 2], (&[2], &[2]), (&[1], &[0]));
}

#[test]
pub(super) fn reductions_and_broadcasts() {
    let ty = wide(&[2, 3, 4]);
    for reducer in [Reducer::Add, Reducer::Max, Reducer::Min] {
        for dimensions in [&[0][..], &[1], &[2], &[0, 2], &[2, 0], &[0, 1, 2], &[]] {
            let what = format!("{reducer:?} over {dimensions:?}");
            check(&what, std::slice::from_ref(&ty), |_, a| vec![a[0].reduce(reducer, dimensions)]);
        }
    }
    for dimension in 0..3 {
        let what = format!("largest along {dimension}");
        check(&what, std::slice::from_ref(&ty), |_, a| vec![a[0].largest(dimension).0]);
    }
    check("several at once", &[ty.clone(), ty.clone()], |f, a| {
        f.reduce(&[(&a[0], Reducer::Max), (&a[1], Reducer::Add)], &[1])
    });
    check("broadcast", &[wide(&[3])], |_, a| vec![a[0].broadcast_in_dim(&[2, 3, 4], &[1])]);
    check("repeat", &[wide(&[1, 3])], |_, a| vec![a[0].broadcast_in_dim(&[2, 3, 4], &[0, 1])]);
    check("scalar", &[wide(&[])], |_, a| vec![a[0].broadcast_in_dim(&[2, 2], &[])]);
    check("size 1 stays", &[wide(&[1, 2])], |_, a| vec![a[0].broadcast_in_dim(&[1, 2, 3], &[0, 1])]);
}

#[test]
pub(super) fn moves() {
    let ty = wide(&[3, 4]);
    check("reshape", std::slice::from_ref(&ty), |_, a| vec![a[0].reshape(&[2, 6])]);
    check("transpose", &[wide(&[2, 3, 4])], |_, a| vec![a[0].transpose(&[2, 0, 1])]);
    check("concatenate", &[ty.clone(), wide(&[3, 2])], |f, a| vec![f.concatenate(&[&a[0], &a[1], &a[0]], 1)]);
    check("slice", std::slice::from_ref(&ty), |_, a| vec![a[0].slice(&[1, 0], &[3, 2])]);
    check("pad", &[ty.clone(), wide(&[])], |_, a| vec![a[0].pad(&a[1], &[1, 0], &[0, 2])]);
    check("barrier", &[ty.clone(), wide(&[2])], |f, a| f.optimization_barrier(&[&a[0], &a[1]]));
    check("named", std::slice::from_ref(&ty), |_, a| vec![a[0].exp().named("a name")]);
}

#[test]
pub(super) fn derivatives_at_dynamic_positions() {
    let ty = wide(&[4, 5]);
    // Includes starts at which the window does not fit.
    for (row, column) in [(1, 2), (3, 9), (-2, 0)] {
        let starts = move |f: &Builder| [f.scalar(row, Dtype::I32), f.scalar(column, Dtype::I32)];
        check("dynamic slice", std::slice::from_ref(&ty), |f, a| {
            let [row, column] = starts(f);
            vec![a[0].dynamic_slice(&[&row, &column], &[2, 3])]
        });
        check("dynamic update slice", &[ty.clone(), wide(&[2, 3])], |f, a| {
            let [row, column] = starts(f);
            vec![a[0].dynamic_update_slice(&a[1], &[&row, &column])]
        });
    }
}

fn ids(f: &Builder, ids: &[i64], shape: &[usize]) -> Value {
    f.dense(ids.iter().copied(), TensorType::new(Dtype::I32, shape))
}

#[test]
pub(super) fn gathers_and_scatters() {
    type Places<'a> = (&'a [i64], &'a [usize]);
    let gather = |what: &str, from: [usize; 2], (numbers, shape): Places<'_>, d: GatherDimensions, to: &[usize]| {
        check(what, &[wide(&from)], |f, a| vec![a[0].gather(&ids(f, numbers, shape), d, to)]);
    };
    gather("an embedding", [5, 3], (&[4, 0, 4, 7, -1], &[5, 1]), rows(3), &[5, 3]);
    gather("ids without a dimension of their own", [5, 3], (&[4, 0, 4], &[3]), rows(3), &[3, 3]);
    gather("one per row", [4, 6], (&[5, 0, 2, 9], &[4, 1]), entries(1), &[4]);
    gather("windows", [4, 6], (&[1, 5, 0, 2, 2, -1], &[2, 3]), corners([2, 3]), &[2, 3, 3]);
    let scatter = |what: &str, into: [usize; 2], (numbers, shape): Places<'_>, d: GatherDimensions, from: &[usize]| {
        check(what, &[wide(&into), wide(from)], |f, a| {
            vec![a[0].scatter(&ids(f, numbers, shape), &a[1], ScatterDimensions::from(&d), Reducer::Add)]
        });
    };
    scatter("into rows", [5, 3], (&[4, 0, 4, 5], &[4, 1]), rows(3), &[4, 3]);
    // One window that fits, and two that are fully outside.
    scatter("into windows", [4, 6], (&[1, 7, 0, 2, 2, -2], &[2, 3]), corners([2, 3]), &[2, 3, 3]);
    scatter("one into each row", [4, 6], (&[5, 0, 2, 6], &[4, 1]), entries(1), &[4]);
}

#[test]
fn gathered_rows_are_added_to_the_accumulator() {
    let table = wide(&[5, 3]);
    let function = trace(std::slice::from_ref(&table), |f, a| {
        let rows = a[0].gather(&ids(f, &[4, 0, 4], &[3, 1]), rows(3), &[3, 3]);
        let total = |x: Value| x.reduce(Reducer::Add, &[0, 1]);
        vec![total(&rows * &rows) + total(&a[0] * &a[0] * &a[0])]
    })
    .expect("a function");
    let program = trace(&[table.clone(), table.clone()], |f, a| {
        let (results, pullback) = f.vjp(&function, &[&a[0]], &[0]).expect("a derivative");
        let one = results[0].like(1.0);
        [pullback.call(&[&one]), pullback.add_to(&[&one], &[&a[1]])].concat()
    })
    .expect("a program");
    let arguments = [array(&table, 1), array(&table, 2)];
    let found = program.function().interpret(&arguments).expect("gradients");
    let [gradient, sum, begun] = [&found[0], &found[1], &arguments[1]].map(Array::to_floats);
    close(&sum, &gradient.iter().zip(begun).map(|(g, b)| g + b).collect::<Vec<_>>(), "a sum");
    // The scatter adds to the accumulator, without a table of zeros.
    let body = &program.function().body();
    let mut scatters = body.operations.iter().filter(|op| matches!(op.kind, Kind::Scatter(..)));
    assert_eq!(scatters.next_back().expect("a scatter").operands[0], body.arguments[1]);
}
