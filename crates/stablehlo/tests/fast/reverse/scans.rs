//! Derivatives of scans.

use super::*;
use grpo_stablehlo::{DotDimensions, Kind, Precision, Save, Unary};

/// (carry [2, 3], weight [3, 3], constant [3]) -> (tanh(carry weight) + constant carry, a result to stack).
fn layer() -> Traced {
    trace(&[wide(&[2, 3]), wide(&[3, 3]), wide(&[3])], |_, a| {
        let product = a[0].dot_general(&a[1], DotDimensions::contract(1, 0), Dtype::F64, Precision::Default);
        let hidden = product.named("product").tanh();
        let next = &hidden + a[2].broadcast_in_dim(&[2, 3], &[1]) * &a[0];
        vec![next, (&hidden * &hidden).reduce(Reducer::Add, &[1])]
    })
    .expect("a layer")
}

fn policies() -> [Save; 5] {
    [Save::Carry, Save::Every(2), Save::Named(vec!["product".into()]), Save::Products, Save::Everything]
}

/// (hidden, weights of four layers, constant) -> (hidden, stacked results), by a scan.
fn scanned(save: Save) -> Traced {
    let layer = layer();
    trace(&[wide(&[2, 3]), wide(&[4, 3, 3]), wide(&[3])], |f, a| {
        let scanned = f.scan(4, &layer, &[&a[0]], &[&a[1]], &[&a[2]], save);
        vec![scanned.carry[0].clone(), scanned.ys[0].clone()]
    })
    .expect("layers")
}

#[test]
pub(super) fn scan_gradients_match_finite_differences() {
    for save in policies() {
        let function = scanned(save.clone());
        check_at(&format!("{save:?}"), &function, &arguments(&function, 0), &[0, 1, 2]);
        check_at(&format!("{save:?}, weights"), &function, &arguments(&function, 0), &[1]);
        check_at(&format!("{save:?}, a constant"), &function, &arguments(&function, 0), &[2]);
    }
}

#[test]
fn groups_must_divide_the_iterations() {
    let layer = layer();
    for turns in [0, 3, 8] {
        let function = trace(&[wide(&[2, 3]), wide(&[4, 3, 3]), wide(&[3])], |f, a| {
            f.scan(4, &layer, &[&a[0]], &[&a[1]], &[&a[2]], Save::Every(turns)).carry
        });
        let error = function.expect_err("an error").to_string();
        assert!(error.contains("4 iterations") && error.contains(&format!("groups of {turns}")), "{error}");
    }
}

/// Returns the sorted sizes of the residuals that the forward scan of a gradient stacks.
fn kept(save: Save) -> Vec<usize> {
    let gradient = gradient(&weighted(&scanned(save)), &[0, 1, 2]);
    let function = gradient.function();
    let mut sizes = vec![];
    let is_forward = |kind: &Kind| matches!(kind, Kind::Scan(scan) if !scan.reverse);
    for operation in function.body().operations.iter().filter(|op| is_forward(&op.kind)) {
        sizes.extend(operation.results[2..].iter().map(|id| function.type_of(*id).elements()));
    }
    sizes.sort_unstable();
    sizes
}

#[test]
fn save_policies_select_the_residuals() {
    let one = 4 * 2 * 3;
    assert_eq!(kept(Save::Carry), [one]);
    assert_eq!(kept(Save::Every(1)), [one]);
    assert_eq!(kept(Save::Every(2)), [one / 2]);
    assert_eq!(kept(Save::Every(4)), [one / 4]);
    assert_eq!(kept(Save::Products), [one, one]);
    assert_eq!(kept(Save::Named(vec!["product".into()])), [one, one]);
    assert_eq!(kept(Save::Named(vec!["nothing".into()])), [one]);
    // The result of tanh, from which its derivative is computed; the product is not needed.
    assert_eq!(kept(Save::Everything), [one, one]);
}

#[test]
fn recomputation_waits_for_the_cotangent() {
    let barriers = |save| {
        let text = |f: &Traced| format!("{:?}", f.function());
        text(&gradient(&weighted(&scanned(save)), &[0])).matches("OptimizationBarrier").count()
    };
    assert_eq!(barriers(Save::Carry), 1);
    assert_eq!(barriers(Save::Every(2)), 1);
    assert_eq!(barriers(Save::Products), 1);
    assert_eq!(barriers(Save::Everything), 0);
}

#[test]
fn scans_nest() {
    for save in policies() {
        let layer = layer();
        let block = trace(&[wide(&[2, 3]), wide(&[2, 3, 3]), wide(&[3])], |f, a| {
            let scanned = f.scan(2, &layer, &[&a[0]], &[&a[1]], &[&a[2]], save.clone());
            vec![scanned.carry[0].unary(Unary::Sine) + scanned.carry[0].unary(Unary::Cosine), scanned.ys[0].clone()]
        })
        .expect("a block");
        for outer in policies() {
            let function = trace(&[wide(&[2, 3]), wide(&[2, 2, 3, 3]), wide(&[3])], |f, a| {
                let scanned = f.scan(2, &block, &[&a[0]], &[&a[1]], &[&a[2]], outer.clone());
                vec![scanned.carry[0].clone(), scanned.ys[0].clone()]
            })
            .expect("blocks");
            check_at(&format!("{save:?} in {outer:?}"), &function, &arguments(&function, 0), &[0, 1, 2]);
        }
    }
}

#[test]
fn a_scan_carries_values_without_derivative() {
    // A counter, a value that becomes active in the first iteration, and an unused sum.
    let body = trace(
        &[TensorType::scalar(Dtype::I32), wide(&[]), wide(&[]), wide(&[]), TensorType::scalar(Dtype::I32)],
        |_, a| {
            let number = a[0].convert(Dtype::F64);
            let next = &a[1] * &a[3] + &number;
            let index = a[4].convert(Dtype::F64);
            vec![&a[0] + a[0].like(1), next.clone(), &a[2] + &next, next * index, a[0].clone()]
        },
    )
    .expect("a body");
    let function = trace(&[wide(&[3]), TensorType::new(Dtype::I32, [3])], |f, a| {
        let (count, zero) = (f.scalar(0, Dtype::I32), f.scalar(0.5, Dtype::F64));
        let scanned = f.scan(3, &body, &[&count, &zero, &zero], &[&a[0], &a[1]], &[], Save::Carry);
        vec![scanned.carry[1].clone(), scanned.ys[0].clone(), scanned.ys[1].clone()]
    })
    .expect("a function");
    let arguments = [array(&wide(&[3]), 0), Array::ints(Dtype::I32, [3], [2, -1, 3]).expect("an array")];
    check_at("counters", &function, &arguments, &[0]);
}

#[test]
pub(super) fn second_derivatives_of_scans() {
    for save in [Save::Carry, Save::Every(2), Save::Everything] {
        let function = scanned(save);
        // A function of the squared norm of the gradient.
        let first = gradient(&weighted(&function), &[0, 1, 2]);
        let length = trace(&function.argument_types(), |f, a| {
            let found = f.call(&first, &a.iter().collect::<Vec<_>>());
            let square = |v: &Value| (v * v).reduce(Reducer::Add, &(0..v.shape().len()).collect::<Vec<_>>());
            vec![found[1..].iter().map(square).reduce(|a, b| a + b).expect("gradients")]
        })
        .expect("a length");
        check_at("second order", &length, &arguments(&function, 0), &[0, 1, 2]);
    }
}

#[test]
fn gradients_are_added_to_accumulators() {
    for save in policies() {
        let function = weighted(&scanned(save));
        let types = [function.argument_types(), function.argument_types()].concat();
        let program = trace(&types, |f, a| {
            let (arguments, sums) = a.split_at(3);
            let [arguments, sums] = [arguments, sums].map(|values| values.iter().collect::<Vec<_>>());
            let (results, pullback) = f.vjp(&function, &arguments, &[0, 1, 2]).expect("a derivative");
            let one = results[0].like(1.0);
            [pullback.call(&[&one]), pullback.add_to(&[&one], &sums)].concat()
        })
        .expect("a program");
        let arguments: Vec<Array> = types.iter().zip(0..).map(|(ty, seed)| array(ty, seed)).collect();
        let found = program.function().interpret(&arguments).expect("gradients");
        for i in 0..3 {
            let [gradient, sum, begun] = [&found[i], &found[i + 3], &arguments[i + 3]].map(Array::to_floats);
            close(&sum, &gradient.iter().zip(begun).map(|(g, b)| g + b).collect::<Vec<_>>(), "a sum");
        }
        // Gradients of weights are added slice by slice: the loop carries the accumulators, and stacks nothing.
        let last = program.function().body().operations.iter().rev().find(|op| matches!(op.kind, Kind::Scan(_)));
        let last = last.expect("a scan");
        let Kind::Scan(scan) = &last.kind else { panic!("a scan") };
        assert_eq!((scan.carry, last.results.len()), (3, 3));
    }
}
