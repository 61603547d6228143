//! Derivatives that only XLA can run, or whose semantics XLA determines.

use crate::device::{compile, run};
use crate::interpreter::cases::f32s;
use grpo_stablehlo::*;

/// A scatter in XLA drops a whole window that does not fit, where the specification drops only the elements outside; a
/// gather clamps the window. Derivatives follow XLA.
#[test]
fn derivatives_of_windows_out_of_bounds_follow_xla() {
    let gather = GatherDimensions {
        offset_dims: vec![1],
        start_index_map: vec![0],
        index_vector_dim: 1,
        slice_sizes: vec![3],
        ..GatherDimensions::default()
    };
    let scatter = ScatterDimensions::from(&gather);
    let (x, updates) = (f32s(&[5], &[1.0, 2.0, 3.0, 4.0, 5.0]), f32s(&[3, 3], &[0.5; 9]));
    let f = &Builder::new();
    let a = [&x, &updates].map(|a| f.argument("", a.ty().clone()));
    let found = {
        let at = |f: &Builder| f.dense([1, 4, -1], TensorType::new(Dtype::I32, [3, 1]));
        let function = trace(&[a[0].ty().clone(), a[1].ty().clone()], |f, a| {
            vec![a[0].scatter(&at(f), &a[1], scatter, Reducer::Add), a[0].gather(&at(f), gather, &[3, 3])]
        });
        let (results, pullback) =
            f.vjp(&function.expect("a function"), &[&a[0], &a[1]], &[0, 1]).expect("a derivative");
        let none = results[1].like(0.0);
        let ct = f.dense([1.0, 2.0, 4.0, 8.0, 16.0], results[0].ty().clone());
        let of_scatter = pullback.call(&[&ct, &none]);
        let ct = f.dense((1..10).map(f64::from), results[1].ty().clone());
        let of_gather = pullback.call(&[&results[0].like(0.0), &ct]);
        [results[0].clone(), of_scatter[1].clone(), results[1].clone(), of_gather[0].clone()]
    };
    // Not compared with the interpreter, which refuses such windows.
    let module = f.clone().finish("windows", &found.each_ref().map(|v| ("", v))).expect("a program");
    let found = run(&compile(&module), &[x, updates]);
    assert_eq!(found[0].to_floats(), [1.0, 2.5, 3.5, 4.5, 5.0]);
    assert_eq!(found[1].to_floats(), [2.0, 4.0, 8.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!(found[2].to_floats(), [2.0, 3.0, 4.0, 3.0, 4.0, 5.0, 1.0, 2.0, 3.0]);
    assert_eq!(found[3].to_floats(), [7.0, 9.0, 15.0, 8.0, 6.0]);
}
