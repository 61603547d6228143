//! Derivatives of programs that are sharded over devices.

use super::*;
use grpo_stablehlo::{DotDimensions, Kind, Manual, Mesh, Save, Sharding};

/// A mesh of 2 x 3 devices.
fn mesh() -> Mesh {
    Mesh::new("mesh", [("data", 2), ("tensor", 3)]).expect("a mesh")
}

fn split(dimensions: &[&[&str]]) -> Sharding {
    mesh().sharding(dimensions).expect("a sharding")
}

/// Shardings do not change derivatives, in loops either, and cotangents get the same shardings.
#[test]
pub(super) fn constraints() {
    let (rows, columns) = (split(&[&["data"], &[]]), split(&[&[], &["tensor"]]));
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
pub(super) fn manual_computations_have_no_derivative() {
    let rows = split(&[&["data"], &[]]);
    let computation = Manual::new(&mesh(), std::slice::from_ref(&rows), std::slice::from_ref(&rows));
    let computation = computation.expect("a manual computation");
    let ty = wide(&[2, 3]);
    let body = built(computation.trace(std::slice::from_ref(&ty), |_, a| vec![a[0].exp()]));
    let function = trace(std::slice::from_ref(&ty), |f, a| f.manual(&computation, &body, &[&a[0]]));
    let (function, f) = (function.expect("a function"), Builder::new());
    let x = f.argument("x", ty);
    match f.vjp(&function, &[&x], &[0]) {
        Err(grpo_stablehlo::Error::NoDerivative { operation, reason, .. }) => {
            assert_eq!(operation, "sdy.manual_computation");
            assert!(reason.contains("use `constrain`"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    listed::refused(&function, "sdy.manual_computation");
}
