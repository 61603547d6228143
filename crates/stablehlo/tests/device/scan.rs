//! Functions that are called and scanned, on XLA's CPU plugin.

use crate::device::{Tensor, close, f32s, run};
use stablehlo::{Dtype, Save, TensorType, Traced, trace};

/// (carry, x, constant) -> (carry * constant + x, carry - x).
fn body() -> Traced {
    let ty = TensorType::new(Dtype::F32, [2]);
    let types = [ty.clone(), ty.clone(), ty];
    trace(&types, |_, a| vec![&a[0] * &a[2] + &a[1], &a[0] - &a[1]]).expect("a function")
}

fn on_host(xs: &[[f32; 2]], mut carry: [f32; 2], constant: [f32; 2]) -> ([f32; 2], Vec<[f32; 2]>) {
    let mut ys = vec![];
    for x in xs {
        ys.push([carry[0] - x[0], carry[1] - x[1]]);
        carry = [carry[0] * constant[0] + x[0], carry[1] * constant[1] + x[1]];
    }
    (carry, ys)
}

const XS: [[f32; 2]; 3] = [[1.0, -2.0], [0.5, 4.0], [-3.0, 0.25]];

fn arguments() -> [Tensor; 3] {
    [Tensor::f32(&[1.0, 2.0], &[2]), Tensor::f32(XS.as_flattened(), &[3, 2]), Tensor::f32(&[0.5, -1.5], &[2])]
}

#[test]
fn a_scan_visits_its_slices_in_order() {
    let body = body();
    let found = run(&arguments(), |f, a| {
        let scanned = f.scan(3, &body, &[&a[0]], &[&a[1]], &[&a[2]], Save::Carry);
        vec![scanned.carry[0].clone(), scanned.ys[0].clone()]
    });
    let (carry, ys) = on_host(&XS, [1.0, 2.0], [0.5, -1.5]);
    close(&f32s(&found[0]), &carry, 1e-6, "carry");
    close(&f32s(&found[1]), ys.as_flattened(), 1e-6, "ys");

    let found = run(&arguments(), |f, a| {
        let scanned = f.scan_reverse(3, &body, &[&a[0]], &[&a[1]], &[&a[2]], Save::Carry);
        vec![scanned.carry[0].clone(), scanned.ys[0].clone()]
    });
    let reversed: Vec<[f32; 2]> = XS.iter().rev().copied().collect();
    let (carry, mut ys) = on_host(&reversed, [1.0, 2.0], [0.5, -1.5]);
    ys.reverse();
    close(&f32s(&found[0]), &carry, 1e-6, "carry");
    close(&f32s(&found[1]), ys.as_flattened(), 1e-6, "ys");
}

#[test]
fn a_scan_is_its_body_called_for_every_slice() {
    let body = body();
    let found = run(&arguments(), |f, a| {
        let row = |i: usize| a[1].slice(&[i, 0], &[i + 1, 2]).reshape(&[2]);
        let first = f.call(&body, &[&a[0], &row(0), &a[2]]);
        let second = f.call(&body, &[&first[0], &row(1), &a[2]]);
        f.call(&body, &[&second[0], &row(2), &a[2]])
    });
    let (carry, ys) = on_host(&XS, [1.0, 2.0], [0.5, -1.5]);
    close(&f32s(&found[0]), &carry, 1e-6, "carry");
    close(&f32s(&found[1]), &ys[2], 1e-6, "y");
}

#[test]
fn scans_nest() {
    let inner = body();
    let row = TensorType::new(Dtype::F32, [2]);
    let outer = trace(&[row.clone(), TensorType::new(Dtype::F32, [3, 2]), row], |f, a| {
        let scanned = f.scan(3, &inner, &[&a[0]], &[&a[1]], &[&a[2]], Save::Carry);
        vec![scanned.carry[0].clone(), scanned.ys[0].clone()]
    });
    let outer = outer.expect("a function");
    let found = run(&arguments(), |f, a| {
        let stack = f.concatenate(&[&a[1].reshape(&[1, 3, 2]), &(-&a[1]).reshape(&[1, 3, 2])], 0);
        let scanned = f.scan(2, &outer, &[&a[0]], &[&stack], &[&a[2]], Save::Carry);
        vec![scanned.carry[0].clone(), scanned.ys[0].clone()]
    });
    let (carry, first) = on_host(&XS, [1.0, 2.0], [0.5, -1.5]);
    let (carry, second) = on_host(&XS.map(|x| x.map(|x| -x)), carry, [0.5, -1.5]);
    close(&f32s(&found[0]), &carry, 1e-6, "carry");
    close(&f32s(&found[1]), [first, second].concat().as_flattened(), 1e-6, "ys");
}
