//! Meshes, shardings, and their errors.

use grpo_stablehlo::*;

fn mesh() -> Mesh {
    Mesh::new("mesh", [("data", 2), ("tensor", 3)]).expect("a mesh")
}

fn matrix() -> TensorType {
    TensorType::new(Dtype::F32, [4, 6])
}

#[test]
fn invalid_meshes_are_refused() {
    let refused = |name: &str, axes: &[(&str, usize)]| match Mesh::new(name, axes.iter().copied()) {
        Err(Error::Mesh { mesh, reason }) => {
            assert_eq!(mesh, name);
            reason
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(refused("mesh", &[]), "at least one axis expected, got none");
    assert_eq!(refused("mesh", &[("x", 2), ("x", 3)]), "two axes `x`");
    assert_eq!(refused("mesh", &[("x", 2), ("y", 0)]), "axis `y` of at least one device expected, got 0");
    assert!(refused("a mesh", &[("x", 2)]).ends_with("got `a mesh`"));
    assert!(refused("mesh", &[("?", 2)]).ends_with("got `?`"));
    assert!(refused("mesh", &[("x", 1 << 20), ("y", 1 << 20)]).starts_with("at most 2147483647 devices"));
}

#[test]
fn unknown_and_repeated_axes_are_refused() {
    let of = |result: Result<Sharding>| match result {
        Err(Error::Axis { mesh, axis, reason }) => {
            assert_eq!(mesh, "mesh");
            (axis, reason)
        }
        other => panic!("{other:?}"),
    };
    let taken = "it is used twice in one sharding";
    assert_eq!(of(mesh().sharding(&[&["model"]])), ("model".into(), "one of data, tensor expected".into()));
    assert_eq!(of(mesh().sharding(&[&["data"], &["data"]])), ("data".into(), taken.into()));
    assert_eq!(of(mesh().sharding(&[&["tensor", "tensor"]])), ("tensor".into(), taken.into()));
}

#[test]
fn uneven_dimensions_are_refused() {
    let reason = |dimensions: &[&[&str]], shape: &[usize]| {
        let sharding = mesh().sharding(dimensions).expect("a sharding");
        match sharding.part(&TensorType::new(Dtype::F32, shape)) {
            Err(Error::Split { reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(reason(&[&[], &["tensor"]], &[4, 5]), "dimension 1 of size 5 does not split into 3 parts");
    assert_eq!(reason(&[&["tensor", "data"]], &[4]), "dimension 0 of size 4 does not split into 6 parts");
    assert_eq!(reason(&[&["data"]], &[4, 6]), "1 dimensions expected, got 2");
}

#[test]
fn shard_ranges_follow_device_coordinates() {
    let mesh = mesh();
    let range = |dimensions: &[&[&str]], device: usize| {
        mesh.sharding(dimensions).expect("a sharding").range(&TensorType::new(Dtype::F32, [12, 6]), device).expect("it")
    };
    // Device 5 is at (1, 2), device 4 at (1, 1).
    assert_eq!(range(&[&["data"], &["tensor"]], 5), [6..12, 4..6]);
    assert_eq!(range(&[&["data", "tensor"], &[]], 4), [8..10, 0..6]);
    assert_eq!(range(&[&["tensor", "data"], &[]], 4), [6..8, 0..6]);
    assert_eq!(range(&[&[], &["data"]], 4), [0..12, 3..6]);
    let beyond = mesh.replicated(2).range(&matrix(), 6);
    assert!(matches!(&beyond, Err(Error::Mesh { reason, .. }) if reason.contains("got 6")), "{beyond:?}");
    let parts = |dimensions: &[&[&str]]| [0, 1, 2].map(|d| mesh.sharding(dimensions).expect("a sharding").parts(d));
    assert_eq!([parts(&[&["data"], &["tensor"]]), parts(&[&[], &["tensor", "data"]])], [[2, 3, 1], [1, 6, 1]]);
}

#[test]
fn shards_assemble_to_the_whole() {
    let a = Array::ints(Dtype::I32, [4, 6], 0..24).expect("integers");
    for dimensions in [&[&["data"][..], &["tensor"]][..], &[&[], &["tensor", "data"]], &[&["data"], &[]], &[&[], &[]]] {
        let sharding = mesh().sharding(dimensions).expect("a sharding");
        let parts = a.parts(&sharding).expect("parts");
        assert_eq!(parts.len(), 6);
        assert!(parts.iter().all(|part| *part.ty() == sharding.part(a.ty()).expect("a type")));
        assert_eq!(Array::whole(&parts, &sharding).expect("a whole"), a);
    }
    let rows = mesh().sharding(&[&["data"], &[]]).expect("a sharding");
    let mut parts = a.parts(&rows).expect("parts");
    parts[4] = parts[1].clone();
    let error = Array::whole(&parts, &rows).expect_err("device 4 has what device 1 has");
    assert!(matches!(&error, Error::Disagreement { reason, .. } if reason.contains("device 4")), "{error}");
    let error = Array::whole(&parts[1..], &rows).expect_err("5 parts");
    assert!(matches!(&error, Error::Array { reason } if reason.contains("6 devices expected, got 5")), "{error}");
}

/// Returns the error of a program with an argument `[4, 6]`.
fn refused(build: impl FnOnce(&Builder, &Value) -> Value) -> (&'static str, String) {
    let f = Builder::new();
    let x = f.argument("x", matrix());
    let result = build(&f, &x);
    match f.finish("refused", &[("", &result)]) {
        Err(Error::Operation { operation, reason, at }) => {
            assert_eq!(at.file(), file!());
            (operation, reason)
        }
        other => panic!("{other:?}"),
    }
}

fn says(found: (&'static str, String), operation: &str, mention: &str) {
    assert_eq!(found.0, operation, "{}", found.1);
    assert!(found.1.contains(mention), "`{mention}` is not in: {}", found.1);
}

#[test]
fn programs_that_cannot_be_split_are_refused() {
    let mesh = mesh();
    let sharding = |dimensions: &[&[&str]]| mesh.sharding(dimensions).expect("a sharding");
    let third = sharding(&[&["tensor"], &[]]);
    let constraint = "sdy.sharding_constraint";
    says(refused(|_, x| x.constrain(&third)), constraint, "dimension 0 of size 4 does not split into 3 parts");
    says(refused(|_, x| x.constrain(&mesh.replicated(1))), constraint, "1 dimensions expected, got 2");
    let shard = |f: &Builder, x: &Value| {
        f.shard(x, &third);
        x.clone()
    };
    says(refused(shard), "sdy.sharding", "does not split into 3 parts");
    let result = |index: usize| {
        refused(|f, x| {
            f.shard_result(index, &third);
            x.clone()
        })
    };
    says(result(0), "sdy.sharding", "does not split into 3 parts");
    says(result(1), "sdy.sharding", "one of 1 results expected, got 1");

    let moved = refused(|f, x| {
        f.shard(x, &sharding(&[&["data"], &[]]));
        f.shard_result(0, &sharding(&[&[], &["tensor"]]));
        f.alias(x, 0);
        x.exp()
    });
    says(moved, "tf.aliasing_output", "argument `x` is split by <@mesh, [{\"data\"}, {}]>, and result 0 by");

    let with = |name: &str, axes: &[(&str, usize)]| Mesh::new(name, axes.iter().copied()).expect("a mesh");
    let both = |other: Mesh| refused(|_, x| x.constrain(&mesh.replicated(2)).constrain(&other.replicated(2)));
    says(both(with("mesh", &[("data", 6)])), "sdy.mesh", "two meshes of one name");
    says(both(with("other", &[("data", 2)])), "sdy.mesh", "as many devices");
}

#[test]
fn manual_computations_that_cannot_be_are_refused() {
    let mesh = mesh();
    let sharding = |dimensions: &[&[&str]]| mesh.sharding(dimensions).expect("a sharding");
    let rows = sharding(&[&["data"], &[]]);
    let of = |inputs: &[Sharding], outputs: &[Sharding]| Manual::new(&mesh, inputs, outputs);
    let manual = of(std::slice::from_ref(&rows), std::slice::from_ref(&rows)).expect("a manual computation");

    let other = Mesh::new("other", [("data", 6)]).expect("a mesh");
    assert!(matches!(of(&[other.replicated(1)], &[]), Err(Error::Mesh { .. })));
    let third = of(&[sharding(&[&["tensor"], &[]])], std::slice::from_ref(&rows)).expect("a manual computation");
    assert!(matches!(third.trace(&[matrix()], |_, a| a.to_vec()), Err(Error::Split { .. })));

    let name = "sdy.manual_computation";
    let same = manual.trace(&[matrix()], |_, a| a.to_vec()).expect("a body");
    let whole = trace(&[matrix()], |_, a| a.to_vec()).expect("a body");
    let pair = trace(&[TensorType::new(Dtype::F32, [2, 6])], |_, a| vec![a[0].clone(), a[0].clone()]).expect("a body");
    let one = |f: &Builder, body: &Traced, operands: &[&Value]| f.manual(&manual, body, operands).remove(0);
    says(refused(|f, x| one(f, &same, &[x, x])), name, "1 operands expected, got 2");
    says(refused(|f, x| one(f, &whole, &[x])), name, "a body of the parts (tensor<2x6xf32>) expected");
    says(refused(|f, x| one(f, &pair, &[x])), name, "1 results expected, at least 1, got 2");
    says(refused(|f, x| one(f, &same, &[&x.slice(&[0, 0], &[3, 6])])), name, "dimension 0 of size 3");

    // Errors of placement are found when the function is finished.
    let inside = |build: &dyn Fn(&Builder, &Value) -> Value| {
        let body = manual.trace(&[matrix()], |f, a| vec![build(f, &a[0])]).expect("a body");
        refused(|f, x| f.manual(&manual, &body, &[x]).remove(0))
    };
    says(inside(&|_, x| x.constrain(&rows)), "sdy.sharding_constraint", "inside of a manual computation");
    let nested = inside(&|f, x| {
        let again = of(&[mesh.replicated(2)], &[mesh.replicated(2)]).expect("a manual computation");
        let body = trace(&[x.ty().clone()], |_, a| a.to_vec()).expect("a body");
        f.manual(&again, &body, &[x]).remove(0)
    });
    says(nested, name, "inside of a manual computation");
}

/// The interpreter detects devices that disagree.
#[test]
fn devices_that_do_not_agree_are_an_error() {
    let mesh = mesh();
    let rows = mesh.sharding(&[&["data"], &[]]).expect("a sharding");
    let run = |output: &Sharding| {
        let manual = Manual::new(&mesh, std::slice::from_ref(&rows), std::slice::from_ref(output));
        let manual = manual.expect("a computation");
        let body = manual.trace(&[matrix()], |_, a| vec![a[0].exp()]).expect("a body");
        let f = Builder::new();
        let x = f.argument("x", matrix());
        let result = f.manual(&manual, &body, &[&x]).remove(0);
        let module = f.finish("devices", &[("", &result)]).expect("a program");
        module.interpret(&[Array::floats(Dtype::F32, [4, 6], (0..24).map(|i| f64::from(i / 12))).expect("numbers")])
    };
    assert_eq!(run(&rows).expect("a value")[0].to_floats()[23], 1.0_f64.exp());
    let error = run(&mesh.replicated(2)).expect_err("devices have different rows");
    let text = error.to_string();
    assert!(text.contains("result 0: element 0 of tensor<2x6xf32> is 1 on device 0 and 2.71"), "{text}");
    assert!(matches!(error, Error::Disagreement { .. }));
}

/// Loops in manual computations are counted for estimates like other loops.
#[test]
fn loops_of_devices_are_counted() {
    let mesh = mesh();
    let rows = mesh.sharding(&[&["data"], &[]]).expect("a sharding");
    let manual = Manual::new(&mesh, std::slice::from_ref(&rows), std::slice::from_ref(&rows)).expect("a computation");
    let part = TensorType::new(Dtype::F32, [2, 6]);
    let turn = trace(&[part], |_, a| vec![&a[0] + &a[0]]).expect("a turn");
    let body = manual.trace(&[matrix()], |f, a| f.scan(3, &turn, &[&a[0]], &[], &[], Save::Carry).carry);
    let body = body.expect("a body");
    let f = Builder::new();
    let x = f.argument("x", matrix());
    let looped = f.for_loop(5, &[&x], |_, c| f.manual(&manual, &body, &[&c[0]])).remove(0);
    let module = f.finish("loops", &[("", &looped)]).expect("a program");
    let loops = module.main.loops();
    assert_eq!(loops.iter().map(Loop::turns).collect::<Vec<_>>(), [Some(5), Some(15)]);
    let ones = Array::floats(Dtype::F32, [4, 6], vec![1.0; 24]).expect("numbers");
    let run = |module: &Module| module.interpret(std::slice::from_ref(&ones)).expect("a value")[0].to_floats()[0];
    assert_eq!(run(&module), 2.0_f64.powi(15));
    assert_eq!(run(&module.without_loops(&[&loops[1].path])), 1.0);
}

/// The text of sharded programs.
#[test]
fn split_programs_print() {
    let mesh = Mesh::new("mesh", [("data", 2), ("tensor", 2)]).expect("a mesh");
    let sharding = |dimensions: &[&[&str]]| mesh.sharding(dimensions).expect("a sharding");
    let inputs = [sharding(&[&["data"], &["tensor"]]), sharding(&[&["tensor"], &[]])];
    let manual = Manual::new(&mesh, &inputs, &[sharding(&[&["data"], &["tensor"]])]).expect("a computation");
    let types = [matrix(), TensorType::new(Dtype::F32, [6, 8])];
    let body = manual.trace(&types, |_, a| {
        vec![a[0].dot_general(&a[1], DotDimensions::contract(1, 0), Dtype::F32, Precision::Default)]
    });
    let f = Builder::new();
    let (x, w) = (f.argument("x", types[0].clone()), f.argument("w", types[1].clone()));
    f.shard(&x, &inputs[0]);
    f.shard_result(0, &sharding(&[&["data", "tensor"], &[]]));
    let weight = w.constrain(&sharding(&[&["tensor"], &[]]));
    let results = f.manual(&manual, &body.expect("a body"), &[&x, &weight]);
    let module = f.finish("split", &[("product", &results[0].constrain(&mesh.replicated(2)))]).expect("a program");
    insta::assert_snapshot!(module.to_string());
}
