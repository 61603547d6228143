//! Derivatives of collectives, shardings and manual computations.

use super::*;
use stablehlo::{Array, Interpreter, Manual, Mesh, MeshAxes, Module, Save, Sharding};

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
pub(super) fn collectives_along_axes_have_derivatives() {
    let (data, tensor, all) = (along(&["data"]), along(&["tensor"]), along(&["data", "tensor"]));
    let (rows, both) = (split(&[&["data"], &[]]), split(&[&["data"], &["tensor"]]));
    let one = |what: &str, input: &Sharding, output: &Sharding, meet: &dyn Fn(&Builder, &Value) -> Value| {
        check_manual(what, &[(&[12, 6], input.clone())], std::slice::from_ref(output), |f, a| {
            vec![meet(f, &marked(f, &a[0]))]
        });
    };
    one("all_reduce", &rows, &rows, &|_, v| v.all_reduce(Reducer::Add, &tensor).tanh());
    one("all_reduce over all", &both, &mesh().replicated(2), &|_, v| v.all_reduce(Reducer::Add, &all).tanh());
    one("reduce_scatter", &rows, &both, &|_, v| v.reduce_scatter(Reducer::Add, 1, &tensor).tanh());
    one("reduce_scatter of rows", &both, &both, &|f, v| {
        marked(f, &v.all_gather(0, &data).tanh()).reduce_scatter(Reducer::Add, 0, &data)
    });
    one("all_gather", &both, &rows, &|_, v| v.all_gather(1, &tensor).tanh());
    one("all_to_all", &both, &split(&[&["data", "tensor"], &[]]), &|_, v| v.all_to_all(0, 1, &tensor).tanh());
    one("collective_permute", &both, &both, &|_, v| v.collective_permute_along(&tensor, &[(0, 1), (1, 2)]).tanh());
    one("collective_permute over all", &both, &both, &|_, v| {
        v.collective_permute_along(&all, &[(0, 5), (5, 3), (3, 0), (1, 1)]).tanh()
    });
    one("parts in another order", &split(&[&["tensor", "data"], &[]]), &split(&[&["data", "tensor"], &[]]), &|_, v| {
        v.tanh()
    });
}

/// The derivative adds no unnecessary collectives.
#[test]
fn the_backward_pass_of_an_all_reduce_adds_no_collective() {
    let (rows, columns) = (split(&[&["data"], &["tensor"]]), split(&[&["tensor"], &[]]));
    let computation = manual(&[rows.clone(), columns], &[split(&[&["data"], &[]])]);
    let types = [wide(&[4, 6]), wide(&[6, 2])];
    let body = built(computation.trace(&types, |_, a| {
        let part = a[0].dot_general(&a[1], stablehlo::DotDimensions::contract(1, 0), Dtype::F64, <_>::default());
        let sum = part.all_reduce(Reducer::Add, &along(&["tensor"]));
        vec![&sum + sum.like(1.0)]
    }));
    let function = trace(&types, |f, a| f.manual(&computation, &body, &[&a[0], &a[1]])).expect("a function");
    let (arguments, all) = ([array(&types[0], 0), array(&types[1], 1)], [0, 1]);
    check_at("a sum", &function, &arguments, &all);
    let mut meetings = vec![];
    gradient(&weighted(&function), &all).function().visit(|op| {
        if let stablehlo::Kind::AllReduce { groups: stablehlo::Groups::Axes(axes), .. } = &op.kind {
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
            let hidden = a[0].dot_general(&a[1], stablehlo::DotDimensions::contract(1, 0), Dtype::F64, <_>::default());
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
    let product = |a: &Value, b: &Value| {
        a.dot_general(b, stablehlo::DotDimensions::contract(1, 0), Dtype::F64, <_>::default()).named("product")
    };
    let body = built(turn.trace(&types, |_, a| vec![product(&a[0], &a[1]).tanh().all_gather(1, &tensor).tanh()]));
    let layer = trace(&types, |f, a| f.manual(&turn, &body, &[&a[0], &a[1]])).expect("a layer");
    for save in [Save::Carry, Save::Named(vec!["product".into()]), Save::Products, Save::Everything] {
        check(&format!("in a scan, {save:?}"), &[wide(&[2, 3]), wide(&[2, 3, 3])], |f, a| {
            f.scan(2, &layer, &[&a[0]], &[&a[1]], &[], save.clone()).carry
        });
        check(&format!("in a scan, as constants, {save:?}"), &types, |f, a| {
            f.scan(2, &layer, &[&a[0]], &[], &[&a[1]], save.clone()).carry
        });
        let inside = built(trace(&[wide(&[1, 3]), wide(&[3, 1])], |_, a| {
            vec![product(&a[0], &a[1]).tanh().all_gather(1, &tensor).tanh()]
        }));
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

/// Compares the derivative of the sum over all replicas with finite differences; each replica has its own argument.
fn check_replicas(what: &str, count: usize, meet: impl Fn(&Value) -> Value) {
    let ty = wide(&[4, 2]);
    let function = trace(std::slice::from_ref(&ty), |f, a| {
        let met = meet(&a[0].tanh());
        let place = f.replica_id().convert(Dtype::F64) + f.scalar(0.5, Dtype::F64);
        vec![met.tanh() * place.broadcast_in_dim(met.shape(), &[])]
    });
    let sum = weighted(&function.unwrap_or_else(|error| panic!("{what}: {error}")));
    let arguments: Vec<Vec<Array>> = (0..count).map(|r| vec![array(&ty, r as u64)]).collect();
    let run = |function: &Traced, arguments: &[Vec<Array>]| {
        let module =
            Module { name: "replicas".into(), replicas: count, partitions: 1, main: function.function().clone() };
        Interpreter::default().run_replicas(&module, arguments)
    };
    let all = |arguments: &[Vec<Array>]| {
        let results = run(&sum, arguments).unwrap_or_else(|error| panic!("{what}: {error}"));
        results.iter().map(|list| list[0].to_floats()[0]).sum::<f64>()
    };
    let found = run(&gradient(&sum, &[0]), &arguments).expect("gradients");
    for replica in 0..count {
        let slope = |i: usize| {
            let moved = |by: f64| {
                let mut arguments = arguments.clone();
                let mut numbers = arguments[replica][0].to_floats();
                numbers[i] += by;
                arguments[replica][0] = Array::floats(Dtype::F64, [4, 2], numbers).expect("an array");
                all(&arguments)
            };
            let h = 1e-5;
            (8.0 * (moved(h) - moved(-h)) - (moved(2.0 * h) - moved(-2.0 * h))) / (12.0 * h)
        };
        let expected: Vec<f64> = (0..8).map(slope).collect();
        close(&found[replica][1].to_floats(), &expected, &format!("{what} on replica {replica}"));
    }
}

#[test]
fn collectives_over_replicas_have_derivatives() {
    let (pairs, all) = ([vec![0, 3], vec![2, 1]], [vec![0, 1, 2, 3]]);
    check_replicas("all_reduce", 4, |v| v.all_reduce(Reducer::Add, &pairs));
    check_replicas("reduce_scatter", 4, |v| v.reduce_scatter(Reducer::Add, 0, &all));
    check_replicas("all_gather", 4, |v| v.all_gather(1, &pairs));
    check_replicas("all_to_all", 4, |v| v.all_to_all(0, 1, &pairs));
    check_replicas("all_to_all along one", 4, |v| v.all_to_all(0, 0, &all));
    check_replicas("collective_permute", 3, |v| v.collective_permute(&[(0, 1), (1, 2)]));
}

/// Shardings do not change derivatives, in loops either, and cotangents get the same shardings.
#[test]
pub(super) fn constraints() {
    let (rows, columns) = (split(&[&["data"], &["?"]]), split(&[&[], &["tensor"]]));
    let types = [wide(&[2, 3]), wide(&[3, 3])];
    let layer = built(trace(&types, |_, a| {
        let weight = a[1].constrain(&columns);
        let out = a[0].dot_general(&weight, stablehlo::DotDimensions::contract(1, 0), Dtype::F64, <_>::default());
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
        if let stablehlo::Kind::Constrain(sharding) = &op.kind {
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
