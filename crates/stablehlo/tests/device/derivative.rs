//! Derivatives that only XLA can run, or whose semantics XLA determines.

use crate::device::{on_replicas, run_module};
use crate::interpreter::cases::f32s;
use stablehlo::*;

/// Collectives between replicas are linear; the derivative is the transpose over all replicas together: the inner
/// product of results and cotangents equals the inner product of arguments and their cotangents.
#[test]
fn derivatives_of_collectives_are_transposes() {
    let numbers = |r: usize| [0.5, -1.0, 2.0, 3.5, 1.0, -0.25, 4.0, -2.0].map(|x| x * (r as f64 + 0.75) - 1.0);
    let arguments: Vec<Array> = (0..4).map(|r| Array::floats(Dtype::F32, [4, 2], numbers(r)).unwrap()).collect();
    type Meet = fn(&Value) -> Value;
    let meetings: [(&str, Meet); 6] = [
        ("all_reduce", |a| a.all_reduce(Reducer::Add, &[vec![0, 3], vec![1, 2]])),
        ("reduce_scatter", |a| a.reduce_scatter(Reducer::Add, 0, &[vec![0, 1, 2, 3]])),
        ("all_gather", |a| a.all_gather(1, &[vec![1, 0], vec![2, 3]])),
        ("all_to_all", |a| a.all_to_all(0, 1, &[vec![1, 0], vec![2, 3]])),
        ("all_to_all along one", |a| a.all_to_all(0, 0, &[vec![0, 1, 2, 3]])),
        ("collective_permute", |a| a.collective_permute(&[(0, 1), (1, 2), (2, 0)])),
    ];
    for (what, meet) in meetings {
        let outputs = on_replicas(&arguments, |f, a| {
            let function = trace(std::slice::from_ref(a.ty()), |_, a| vec![meet(&a[0])]).expect("a function");
            let (results, pullback) = f.vjp(&function, &[a], &[0]).expect("a derivative");
            let rank = f.replica_id().convert(Dtype::F32) + f.scalar(0.5, Dtype::F32);
            let weights = f.iota(0, results[0].ty().clone()) + f.iota(1, results[0].ty().clone()).like(0.25);
            let ct = weights * rank.broadcast_in_dim(results[0].shape(), &[]);
            let pulled = pullback.call(&[&ct]).remove(0);
            vec![results[0].clone(), ct, pulled]
        });
        let dot = |a: &Array, b: &Array| a.to_floats().iter().zip(b.to_floats()).map(|(a, b)| a * b).sum::<f64>();
        let results: f64 = outputs.iter().map(|o| dot(&o[0], &o[1])).sum();
        let given: f64 = outputs.iter().zip(&arguments).map(|(o, a)| dot(&o[2], a)).sum();
        assert!((results - given).abs() < 1e-3 * results.abs(), "{what}: {results} and {given}");
    }
}

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
    let scatter = ScatterDimensions {
        update_window_dims: vec![1],
        scatter_dims_to_operand_dims: vec![0],
        index_vector_dim: 1,
        ..ScatterDimensions::default()
    };
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
    let found = run_module(&module, &[x, updates]);
    assert_eq!(found[0].to_floats(), [1.0, 2.5, 3.5, 4.5, 5.0]);
    assert_eq!(found[1].to_floats(), [2.0, 4.0, 8.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!(found[2].to_floats(), [2.0, 3.0, 4.0, 3.0, 4.0, 5.0, 1.0, 2.0, 3.0]);
    assert_eq!(found[3].to_floats(), [7.0, 9.0, 15.0, 8.0, 6.0]);
}
