//! Errors of derivatives, traces, calls and scans.

use super::*;
use crate::interpret::cases::windows::elements;
use grpo_stablehlo::{Error, Save};

/// Returns the error of a derivative, and the line of this file that it reports.
fn refused(types: &[TensorType], body: impl FnOnce(&Builder, &[Value]) -> Vec<Value>) -> (String, u32) {
    let function = trace(types, body).expect("a function");
    let f = Builder::new();
    let arguments: Vec<Value> = types.iter().map(|ty| f.argument("", ty.clone())).collect();
    match f.vjp(&function, &arguments.iter().collect::<Vec<_>>(), &[0]) {
        Err(Error::NoDerivative { operation, reason, at }) => {
            assert!(at.file().ends_with("refusals.rs"), "{at}");
            listed::refused(&function, operation);
            (format!("{operation}: {reason}"), at.line())
        }
        other => panic!("{other:?}"),
    }
}

#[test]
pub(super) fn while_loops_have_no_derivative() {
    let ty = wide(&[2]);
    let line = line!() + 2;
    let (reason, at) =
        refused(std::slice::from_ref(&ty), |f, a| f.for_loop(3, &[&a[0]], |_, carried| vec![carried[0].exp()]));
    assert_eq!(reason, "stablehlo.while: a loop with an unknown number of iterations saves no residuals; use `scan`");
    assert_eq!(at, line);
    // Also if the loop only reads the argument, and inside of a scan.
    let (reason, _) = refused(std::slice::from_ref(&ty), |f, a| {
        let one = f.scalar(1.0, Dtype::F64);
        f.for_loop(3, &[&one], |_, carried| vec![&carried[0] + a[0].reduce(Reducer::Add, &[0])])
    });
    assert!(reason.starts_with("stablehlo.while"), "{reason}");
    let line = line!() + 2;
    let body =
        built(trace(std::slice::from_ref(&ty), |f, a| f.for_loop(3, &[&a[0]], |_, carried| vec![carried[0].exp()])));
    let (reason, at) =
        refused(std::slice::from_ref(&ty), |f, a| f.scan(2, &body, &[&a[0]], &[], &[], Save::Carry).carry);
    assert!(reason.starts_with("stablehlo.while"), "{reason}");
    assert_eq!(at, line);
}

#[test]
fn a_loop_off_the_path_needs_no_derivative() {
    let ty = wide(&[2]);
    let function = trace(std::slice::from_ref(&ty), |f, a| {
        let looped = f.for_loop(3, &[&a[0].stop_gradient()], |_, carried| vec![carried[0].exp()]).remove(0);
        vec![&a[0] * looped]
    });
    let sum = weighted(&function.expect("a function"));
    let found = gradient(&sum, &[0]).function().interpret(&[array(&ty, 1)]).expect("a gradient");
    assert_eq!(found.len(), 2);
    // Its result is unused, so it needs no derivative, inside of a scan either.
    let body = trace(std::slice::from_ref(&ty), |f, a| {
        let looped = f.for_loop(3, &[&a[0]], |_, carried| vec![carried[0].exp()]).remove(0);
        vec![a[0].exp(), looped]
    });
    let function = trace(std::slice::from_ref(&ty), |f, a| {
        f.scan(2, body.as_ref().expect("a body"), &[&a[0]], &[], &[], Save::Carry).carry
    });
    check_at("a part that nobody reads", &function.expect("a function"), &[array(&ty, 1)], &[0]);
}

#[test]
fn custom_calls_need_a_custom_derivative() {
    let ty = wide(&[2]);
    let call = || grpo_stablehlo::CustomCall { target: "kernel".into(), ..Default::default() };
    let (reason, _) =
        refused(std::slice::from_ref(&ty), |f, a| f.custom_call(call(), &[&a[0]], std::slice::from_ref(&ty)));
    assert_eq!(reason, "stablehlo.custom_call: it is a custom call; use `custom_vjp` to give its derivative");
}

#[test]
pub(super) fn only_additive_scatters_have_derivatives() {
    let (ty, row) = (wide(&[4]), wide(&[2]));
    for reducer in [Reducer::Max, Reducer::Min] {
        // With respect to the operand, and to the updates.
        for operand in [true, false] {
            let (reason, _) = refused(&[if operand { ty.clone() } else { row.clone() }], |f, a| {
                let ids = f.dense([3_i64, 0], TensorType::new(Dtype::I32, [2, 1]));
                let constant = f.splat(2.0, if operand { row.clone() } else { ty.clone() });
                let (to, from) = if operand { (&a[0], &constant) } else { (&constant, &a[0]) };
                vec![to.scatter(&ids, from, elements(), reducer)]
            });
            assert_eq!(reason, "stablehlo.scatter: a derivative is implemented for addition only");
        }
    }
}

#[test]
pub(super) fn operations_without_a_rule_are_refused() {
    let said = |dtype: Dtype, reason: &str, body: fn(&Value) -> Value| {
        let (found, _) = refused(&[TensorType::new(dtype, [4])], |_, a| vec![body(&a[0])]);
        assert_eq!(found, reason);
    };
    let bits = "stablehlo.bitcast_convert: bits are not differentiable; use `convert` for numbers";
    said(Dtype::F16, bits, |a| a.bitcast_convert(Dtype::Bf16));
    let clamp = "stablehlo.clamp: a derivative is not implemented; use `max` and `min`";
    said(Dtype::F64, clamp, |a| a.clamp(&a.like(-1.0), &a.like(1.0)));
}

fn said(result: Result<Traced, Error>) -> String {
    match result {
        Err(Error::Operation { operation, reason, at }) => {
            assert!(at.file().ends_with("refusals.rs"), "{at}: {reason}");
            format!("{operation}: {reason}")
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn calls_check_argument_types() {
    let (two, three) = (wide(&[2]), wide(&[3]));
    let double = trace(std::slice::from_ref(&two), |_, a| vec![&a[0] + &a[0]]).expect("a function");
    let wrong = |body: &dyn Fn(&Builder, &[Value]) -> Vec<Value>| said(trace(std::slice::from_ref(&three), body));
    assert_eq!(
        wrong(&|f, a| f.call(&double, &[&a[0]])),
        "call: arguments (tensor<2xf64>) expected, got (tensor<3xf64>)"
    );
    assert_eq!(
        wrong(&|f, a| f.custom_vjp(&double, &double, &[&a[0]], 1)),
        "stablehlo.custom_vjp: arguments (tensor<2xf64>) expected, got (tensor<3xf64>)"
    );
    let other = Builder::new();
    let stranger = other.argument("", three.clone());
    assert_eq!(wrong(&|_, a| vec![&a[0] + &stranger]), "stablehlo.add: a tensor<3xf64> of another function");
    let same = trace(std::slice::from_ref(&three), |_, a| vec![a[0].clone()]).expect("a function");
    assert_eq!(
        wrong(&|f, a| f.custom_vjp(&same, &double, &[&a[0]], 1)),
        "stablehlo.custom_vjp: a backward from (tensor<3xf64>) to (tensor<3xf64>) expected, got one from \
         (tensor<2xf64>) to (tensor<2xf64>)"
    );
    assert_eq!(
        wrong(&|f, a| f.custom_vjp(&same, &same, &[&a[0]], 2)),
        "stablehlo.custom_vjp: from 1 to 1 results expected, got 2"
    );
}

#[test]
fn scans_check_argument_types() {
    let row = wide(&[2]);
    let body = trace(&[row.clone(), row.clone()], |_, a| vec![&a[0] + &a[1]]).expect("a body");
    let scan = |n: usize, carry: usize, xs: &[usize]| {
        said(trace(&[row.clone(), wide(xs), wide(&[])], |f, a| {
            f.scan(n, &body, &[[&a[0], &a[2]][carry]], &[&a[1]], &[], Save::Carry).carry
        }))
    };
    assert_eq!(scan(3, 0, &[4, 2]), "stablehlo.scan: xs with 3 slices expected, got tensor<4x2xf64>");
    assert_eq!(scan(0, 0, &[0, 2]), "stablehlo.scan: a number of iterations from 1 to 2147483647 expected, got 0");
    assert_eq!(
        scan(3, 1, &[3, 2]),
        "stablehlo.scan: the body takes (tensor<2xf64>, tensor<2xf64>), got (tensor<f64>, tensor<2xf64>)"
    );
    let narrows = trace(std::slice::from_ref(&row), |_, a| vec![a[0].slice(&[0], &[1])]).expect("a body");
    let found =
        said(trace(std::slice::from_ref(&row), |f, a| f.scan(3, &narrows, &[&a[0]], &[], &[], Save::Carry).carry));
    assert_eq!(found, "stablehlo.scan: the body should return (tensor<2xf64>) first, got (tensor<1xf64>)");
}

#[test]
fn vjp_checks_arguments_and_cotangents() {
    let types = [wide(&[2]), TensorType::new(Dtype::I32, [2])];
    let function = trace(&types, |_, a| vec![&a[0] * a[1].convert(Dtype::F64), a[1].clone()]).expect("a function");
    let asked = |index: usize| {
        let f = Builder::new();
        let a: Vec<Value> = types.iter().map(|ty| f.argument("", ty.clone())).collect();
        f.vjp(&function, &a.iter().collect::<Vec<_>>(), &[index]).expect_err("no derivative").to_string()
    };
    let begins = |text: String, with: &str| assert!(text.starts_with(with), "{text}");
    begins(asked(1), "vjp: a floating-point argument 1 expected, got tensor<2xi32> (built at ");
    begins(asked(2), "vjp: a floating-point argument 2 expected, got none (built at ");
    let pulled = |count: usize| {
        said(trace(&types, |f, a| {
            let (_, pullback) = f.vjp(&function, &[&a[0], &a[1]], &[0]).expect("a derivative");
            pullback.call(&vec![&a[1]; count])
        }))
    };
    assert_eq!(pulled(1), "vjp: cotangents (tensor<2xf64>) expected, got (tensor<2xi32>)");
    assert_eq!(pulled(2), "vjp: cotangents (tensor<2xf64>) expected, got (tensor<2xi32>, tensor<2xi32>)");
}

#[test]
fn value_and_grad_needs_a_scalar_result() {
    let ty = wide(&[2]);
    let of = |body: fn(&Builder, &[Value]) -> Vec<Value>| {
        let f = Builder::new();
        let a = f.argument("", ty.clone());
        f.value_and_grad(&trace(std::slice::from_ref(&ty), body).expect("a function"), &[&a], &[0])
            .map(|(r, g)| (r.len(), g.len()))
    };
    let refused = of(|_, a| vec![a[0].exp()]).expect_err("no scalar").to_string();
    let expected = "value_and_grad: a floating-point scalar as first result expected, got tensor<2xf64> (built at ";
    assert!(refused.starts_with(expected), "{refused}");
    // A loop that only a metric depends on needs no derivative.
    let found = of(|f, a| {
        let metric = f.for_loop(3, &[&a[0]], |_, carried| vec![carried[0].exp()]).remove(0);
        vec![a[0].reduce(Reducer::Add, &[0]), metric]
    });
    assert_eq!(found, Ok((2, 1)));
}
