//! Derivatives of collectives, shardings and manual computations.

use super::*;
use stablehlo::{DotDimensions, Groups, Kind, Manual, Mesh, MeshAxes, Save, Sharding};

/// A mesh of 2 x 3 devices.
fn mesh() -> Mesh {
    Mesh::new("mesh", [("data", 2), ("tensor", 3)]).expect("a mesh")
}

fn along(axes: &[&str]) -> MeshAxes {
    mesh().along(axes).expect("axes")
}

fn split(dimensions: &[&[&str]]) -> Sharding {
    mesh().sharding(dimensions).expect("a sharding")
}

fn manual(inputs: &[Sharding], outputs: &[Sharding]) -> Manual {
    Manual::new(&along(&["data", "tensor"]), inputs, outputs).expect("a manual computation")
}

/// Runs [`check`] on a manual computation.
fn check_manual(
    what: &str,
    arguments: &[(&[usize], Sharding)],
    outputs: &[Sharding],
    body: impl FnOnce(&Builder, &[Value]) -> Vec<Value>,
) {
    let (types, inputs): (Vec<TensorType>, Vec<Sharding>) =
        arguments.iter().map(|(shape, sharding)| (wide(shape), sharding.clone())).unzip();
    let manual = manual(&inputs, outputs);
    let body = manual.trace(&types, body).unwrap_or_else(|error| panic!("{what}: {error}"));
    check(what, &types, |f, a| f.manual(&manual, &body, &a.iter().collect::<Vec<_>>()));
}

/// Multiplies the value by a factor that differs on every device.
fn marked(f: &Builder, v: &Value) -> Value {
    let place = f.axis_index(&along(&["data", "tensor"])).convert(Dtype::F64);
    v * (place + f.scalar(0.5, Dtype::F64)).broadcast_in_dim(v.shape(), &[])
}

#[test]
pub(super) fn sums_over_axes_have_derivatives() {
    let (rows, both) = (split(&[&["data"], &[]]), split(&[&["data"], &["tensor"]]));
    for (axes, input, output) in
        [(&["tensor"][..], &rows, rows.clone()), (&["data", "tensor"], &both, mesh().replicated(2))]
    {
        check_manual(&format!("a sum over {axes:?}"), &[(&[12, 6], input.clone())], &[output], |f, a| {
            vec![marked(f, &a[0]).all_reduce(Reducer::Add, &along(axes)).tanh()]
        });
    }
    let transposed = [split(&[&["tensor", "data"], &[]]), split(&[&["data", "tensor"], &[]])];
    check_manual("parts in another order", &[(&[12, 6], transposed[0].clone())], &transposed[1..], |f, a| {
        vec![marked(f, &a[0]).tanh()]
    });
}

/// The derivative adds no unnecessary collectives.
#[test]
fn the_backward_pass_of_an_all_reduce_adds_no_collective() {
    let (rows, columns) = (split(&[&["data"], &["tensor"]]), split(&[&["tensor"], &[]]));
    let computation = manual(&[rows.clone(), columns], &[split(&[&["data"], &[]])]);
    let types = [wide(&[4, 6]), wide(&[6, 2])];
    let body = built(computation.trace(&types, |_, a| {
        let part = a[0].dot_general(&a[1], DotDimensions::contract(1, 0), Dtype::F64, <_>::default());
        let sum = part.all_reduce(Reducer::Add, &along(&["tensor"]));
        vec![&sum + sum.like(1.0)]
    }));
    let function = trace(&types, |f, a| f.manual(&computation, &body, &[&a[0], &a[1]])).expect("a function");
    let (arguments, all) = ([array(&types[0], 0), array(&types[1], 1)], [0, 1]);
    check_at("a sum", &function, &arguments, &all);
    let mut meetings = vec![];
    gradient(&weighted(&function), &all).function().visit(|op| {
        if let Kind::AllReduce { groups: Groups::Axes(axes), .. } = &op.kind {
            meetings.push(axes.names().join(", "));
        }
    });
    // One for the value, and one for the weight's gradient, which is replicated over `data`.
    assert_eq!(meetings, ["tensor", "data"]);
}

/// Nested sums in which each sum is used twice.
#[test]
fn sums_of_sums() {
    let whole = mesh().replicated(2);
    check_manual("doubled", &[(&[2, 2], whole.clone())], std::slice::from_ref(&whole), |_, a| {
        let sum = a[0].tanh().all_reduce(Reducer::Add, &along(&["tensor"]));
        let part = (&sum + &a[0]) * sum.like(0.5_f64.powi(40));
        vec![(0..40).fold(part, |doubled, _| &doubled + &doubled) + &sum]
    });
}

/// Replicated operands, replicated results, and both.
#[test]
fn replicated_operands_and_results() {
    let tensor = along(&["tensor"]);
    let whole = mesh().replicated(2);
    check_manual("an operand on all", &[(&[2, 6], whole.clone())], &[split(&[&["data", "tensor"], &[]])], |f, a| {
        vec![marked(f, &a[0]).tanh()]
    });
    check_manual("a result of all", &[(&[2, 6], whole.clone())], std::slice::from_ref(&whole), |_, a| {
        vec![(&a[0] * &a[0]).tanh()]
    });
    check_manual(
        "a scalar of all, and parts",
        &[(&[4, 6], split(&[&["data"], &[]])), (&[6, 3], split(&[&[], &["tensor"]])), (&[], mesh().replicated(0))],
        &[split(&[&["data"], &["tensor"]]), mesh().replicated(0)],
        |_, a| {
            let scale = a[2].exp();
            let hidden = a[0].dot_general(&a[1], DotDimensions::contract(1, 0), Dtype::F64, <_>::default());
            let hidden = (hidden * scale.broadcast_in_dim(&[2, 1], &[])).tanh();
            let sum = (&hidden * &hidden).reduce(Reducer::Add, &[0, 1]);
            let sum = sum.all_reduce(Reducer::Add, &along(&["data", "tensor"]));
            vec![hidden, sum.log() * &scale]
        },
    );
    check_manual(
        "a softmax over devices",
        &[(&[4, 6], split(&[&["data"], &["tensor"]]))],
        &[split(&[&["data"]])],
        |_, a| {
            let largest = a[0].reduce(Reducer::Max, &[1]).stop_gradient().all_reduce(Reducer::Max, &tensor);
            let shifted = &a[0] - largest.broadcast_in_dim(&[2, 2], &[0]);
            vec![shifted.exp().reduce(Reducer::Add, &[1]).all_reduce(Reducer::Add, &tensor).log() + largest]
        },
    );
}

/// Manual computations in loops, and loops in manual computations.
#[test]
fn manual_computations_in_loops_and_loops_in_them() {
    let tensor = along(&["tensor"]);
    let (row, weight) = (split(&[&["data"], &[]]), split(&[&[], &["tensor"]]));
    let turn = manual(&[row.clone(), weight], std::slice::from_ref(&row));
    let types = [wide(&[2, 3]), wide(&[3, 3])];
    // The row times the sum of a column per device.
    let next = |row: &Value, column: &Value| {
        let product = row.dot_general(column, DotDimensions::contract(1, 0), Dtype::F64, <_>::default());
        let sum = product.named("product").tanh().all_reduce(Reducer::Add, &tensor);
        vec![(row * sum.broadcast_in_dim(row.shape(), &[0, 1])).tanh()]
    };
    let body = built(turn.trace(&types, |_, a| next(&a[0], &a[1])));
    let layer = trace(&types, |f, a| f.manual(&turn, &body, &[&a[0], &a[1]])).expect("a layer");
    for save in [Save::Carry, Save::Named(vec!["product".into()]), Save::Products, Save::Everything] {
        check(&format!("in a scan, {save:?}"), &[wide(&[2, 3]), wide(&[2, 3, 3])], |f, a| {
            f.scan(2, &layer, &[&a[0]], &[&a[1]], &[], save.clone()).carry
        });
        check(&format!("in a scan, as constants, {save:?}"), &types, |f, a| {
            f.scan(2, &layer, &[&a[0]], &[], &[&a[1]], save.clone()).carry
        });
        let inside = built(trace(&[wide(&[1, 3]), wide(&[3, 1])], |_, a| next(&a[0], &a[1])));
        check_manual(
            &format!("a scan inside, {save:?}"),
            &[(&[2, 3], row.clone()), (&[2, 3, 3], split(&[&[], &[], &["tensor"]]))],
            std::slice::from_ref(&row),
            |f, a| f.scan(2, &inside, &[&a[0]], &[&a[1]], &[], save.clone()).carry,
        );
    }
}

/// A custom derivative of code before a collective.
#[test]
fn custom_derivatives_in_manual_computations() {
    let part = wide(&[2, 2]);
    let forward = trace(std::slice::from_ref(&part), |_, a| vec![&a[0] * &a[0] * &a[0], a[0].clone()]);
    let backward = trace(&[part.clone(), part.clone()], |_, a| vec![a[0].like(3.0) * &a[0] * &a[0] * &a[1]]);
    let (forward, backward) = (forward.expect("a function"), backward.expect("a function"));
    check_manual(
        "own derivative",
        &[(&[4, 6], split(&[&["data"], &["tensor"]]))],
        &[split(&[&["data"], &[]])],
        |f, a| {
            let own = f.custom_vjp(&forward, &backward, &[&marked(f, &a[0])], 1).remove(0);
            vec![own.all_reduce(Reducer::Add, &along(&["tensor"]))]
        },
    );
}

/// Shardings do not change derivatives, in loops either, and cotangents get the same shardings.
#[test]
pub(super) fn constraints() {
    let (rows, columns) = (split(&[&["data"], &["?"]]), split(&[&[], &["tensor"]]));
    let types = [wide(&[2, 3]), wide(&[3, 3])];
    let layer = built(trace(&types, |_, a| {
        let weight = a[1].constrain(&columns);
        let out = a[0].dot_general(&weight, DotDimensions::contract(1, 0), Dtype::F64, <_>::default());
        vec![out.tanh().constrain(&rows)]
    }));
    for save in [Save::Carry, Save::Products, Save::Everything] {
        check(&format!("{save:?}"), &[wide(&[2, 3]), wide(&[2, 3, 3])], |f, a| {
            f.scan(2, &layer, &[&a[0]], &[&a[1]], &[], save.clone()).carry
        });
    }
    let gradient = gradient(&weighted(&layer), &[0, 1]);
    let mut constraints = vec![];
    gradient.function().visit(|op| {
        if let Kind::Constrain(sharding) = &op.kind {
            constraints.push(sharding.to_string());
        }
    });
    assert_eq!(constraints, [&columns, &rows, &rows, &columns].map(Sharding::to_string));
}

#[test]
fn collectives_without_a_derivative_are_refused() {
    let both = split(&[&["data"], &["tensor"]]);
    let computation = manual(std::slice::from_ref(&both), &[mesh().replicated(2)]);
    let ty = wide(&[2, 3]);
    let line = line!() + 2;
    let body = computation
        .trace(std::slice::from_ref(&ty), |_, a| vec![a[0].all_reduce(Reducer::Max, &along(&["data", "tensor"]))]);
    let body = body.expect("a body");
    let function = trace(std::slice::from_ref(&ty), |f, a| f.manual(&computation, &body, &[&a[0]]));
    let f = Builder::new();
    let x = f.argument("x", ty);
    match f.vjp(&function.expect("a function"), &[&x], &[0]) {
        Err(stablehlo::Error::NoDerivative { operation, reason, at }) => {
            assert_eq!(operation, "stablehlo.all_reduce");
            assert_eq!(reason, "a derivative is implemented for sums only; use `stop_gradient`");
            assert_eq!(at.line(), line);
        }
        other => panic!("{other:?}"),
    }
}
