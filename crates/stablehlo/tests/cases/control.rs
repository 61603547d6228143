//! Loops, barriers, and shardings on one device.

use super::*;
use std::slice;

pub fn cases() -> Vec<Case> {
    vec![loops(), scans(), derivatives(), barriers(), one_device()]
}

fn loops() -> Case {
    let mut random = Random(12);
    let arguments = [random.array(Dtype::F32, &[3]), i32s(&[], &[100])];
    case("while", &arguments, |f, a| {
        let (zero, one) = (f.scalar(0, Dtype::I32), f.scalar(1, Dtype::I32));
        let mut results = f.while_loop(&[&zero, &one], |c| c[1].lt(&a[1]), |c| vec![c[1].clone(), &c[0] + &c[1]]);
        let nested = f.for_loop(3, &[&a[0]], |i, outer| {
            let i = i.convert(Dtype::F32).broadcast_in_dim(&[3], &[]);
            f.for_loop(2, &[&outer[0]], |_, inner| vec![&inner[0] + &i * &a[0]])
        });
        results.extend(nested);
        results.extend(f.for_loop(0, &[&a[0]], |_, c| vec![c[0].like(0.0)]));
        results
    })
}

/// Scans, nested, without stacked results, and without carried values.
fn scans() -> Case {
    let mut random = Random(15);
    let arguments = [random.array(Dtype::F32, &[3]), random.array(Dtype::F32, &[4, 3]), random.array(Dtype::I32, &[4])];
    let row = ty(Dtype::F32, &[3]);
    let number = ty(Dtype::I32, &[]);
    let body = trace(&[row.clone(), row.clone(), number.clone(), row.clone()], |_, a| {
        let next = &a[0] * a[0].like(0.5) + &a[1];
        vec![next.clone(), &next - &a[3], &a[2] + a[2].like(1), a[1].gt(&next)]
    })
    .expect("a body");
    let outer = trace(&[row.clone(), row.clone(), ty(Dtype::I32, &[4]), ty(Dtype::F32, &[4, 3])], |f, a| {
        let inner = f.scan(4, &body, &[&a[0]], &[&a[3], &a[2]], &[&a[1]], Save::Everything);
        vec![&inner.carry[0] + &a[1], inner.ys[0].clone()]
    })
    .expect("a body");
    let stack = trace(&[number], |_, a| vec![&a[0] * &a[0]]).expect("a body");
    case("scan", &arguments, |f, a| {
        let mut results = vec![];
        for scanned in [
            f.scan(4, &body, &[&a[0]], &[&a[1], &a[2]], &[&a[0]], Save::Carry),
            f.scan(4, &outer, &[&a[0]], &[&a[1]], &[&a[2], &a[1]], Save::Carry),
            f.scan(4, &stack, &[], &[&a[2]], &[], Save::Carry),
        ] {
            results.extend(scanned.carry);
            results.extend(scanned.ys);
        }
        results
    })
}

/// Annotations for derivatives change no value.
fn derivatives() -> Case {
    let mut random = Random(16);
    let arguments = [random.array(Dtype::F32, &[3])];
    let row = ty(Dtype::F32, &[3]);
    let forward = trace(slice::from_ref(&row), |_, a| vec![a[0].tanh(), &a[0] * &a[0]]).expect("a function");
    let backward = trace(&[row.clone(), row], |_, a| vec![&a[0] * &a[1]]).expect("a function");
    case("derivatives", &arguments, |f, a| {
        let mut results = f.custom_vjp(&forward, &backward, &[&a[0]], 1);
        results.push(a[0].named("hidden").stop_gradient());
        results
    })
}

fn barriers() -> Case {
    let mut random = Random(14);
    let arguments = [random.array(Dtype::F32, &[4, 2])];
    case("barriers", &arguments, |f, a| f.optimization_barrier(&[&a[0], &a[0].exp()]))
}

/// Shardings on a mesh of one device.
fn one_device() -> Case {
    let mut random = Random(19);
    let arguments = [random.array(Dtype::F32, &[4, 2])];
    let mesh = Mesh::new("mesh", [("data", 1), ("tensor", 1)]).expect("a mesh");
    let rows = mesh.sharding(&[&["data"], &[]]).expect("a sharding");
    let manual = Manual::new(&mesh, &[mesh.replicated(2)], &[mesh.replicated(2)]).expect("a computation");
    let body = built(manual.trace(&[arguments[0].ty().clone()], |_, a| vec![&a[0] + a[0].like(1.0)]));
    case("one device", &arguments, |f, a| f.manual(&manual, &body, &[&a[0].constrain(&rows)]))
}
