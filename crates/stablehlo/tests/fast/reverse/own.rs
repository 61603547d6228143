//! Custom derivatives, and values without a derivative.

use super::*;
use grpo_stablehlo::Save;

/// A loss of (logits, ids, scale) whose forward pass also computes the gradients, as fused losses do.
fn fused() -> (Traced, Traced) {
    let (logits, ids) = (wide(&[3, 4]), TensorType::new(Dtype::I32, [3]));
    let forward = trace(&[logits.clone(), ids, wide(&[])], |_, a| {
        let rows = |v: &Value| v.broadcast_in_dim(&[3, 4], &[0]);
        let total = a[0].exp().reduce(Reducer::Add, &[1]);
        let column = a[0].builder().iota(1, TensorType::new(Dtype::I32, [3, 4]));
        let hit = column.eq(&rows(&a[1])).select(&a[0].like(1.0), &a[0].like(0.0));
        let picked = (&hit * &a[0]).reduce(Reducer::Add, &[1]);
        let unscaled = (total.log() - picked).reduce(Reducer::Add, &[0]);
        let slope = a[0].exp() / rows(&total) - hit;
        let d_logits = slope * a[2].broadcast_in_dim(&[3, 4], &[]);
        vec![&unscaled * &a[2], a[1].clone(), d_logits, unscaled]
    });
    let backward =
        trace(&[logits, wide(&[]), wide(&[])], |_, a| vec![&a[0] * a[2].broadcast_in_dim(&[3, 4], &[]), &a[1] * &a[2]]);
    (forward.expect("forward"), backward.expect("backward"))
}

fn arguments() -> [Array; 3] {
    let ids = Array::ints(Dtype::I32, [3], [2, 0, 3]).expect("an array");
    [array(&wide(&[3, 4]), 1), ids, array(&wide(&[]), 2)]
}

#[test]
pub(super) fn custom_vjp_matches_finite_differences() {
    let (forward, backward) = fused();
    let types = forward.argument_types();
    let fused = built(trace(&types, |f, a| f.custom_vjp(&forward, &backward, &a.iter().collect::<Vec<_>>(), 2)));
    assert_eq!(fused.result_types(), forward.result_types()[..2]);
    check_at("fused", &fused, &arguments(), &[0, 2]);
    check_at("fused", &fused, &arguments(), &[2]);
    // The custom derivative is used: no further exponential is added.
    let text = format!("{:?}", gradient(&weighted(&fused), &[0]).function());
    assert_eq!(text.matches("Exponential").count(), 2, "{text}");

    for save in [Save::Carry, Save::Everything] {
        let body = trace(&[wide(&[]), types[0].clone(), types[1].clone(), types[2].clone()], |f, a| {
            vec![&a[0] + &f.call(&fused, &[&a[1], &a[2], &a[3]])[0]]
        });
        let chunks = [wide(&[2, 3, 4]), TensorType::new(Dtype::I32, [2, 3]), wide(&[])];
        let scanned = trace(&chunks, |f, a| {
            let zero = f.scalar(0.0, Dtype::F64);
            f.scan(2, body.as_ref().expect("a body"), &[&zero], &[&a[0], &a[1]], &[&a[2]], save).carry
        });
        let ids = Array::ints(Dtype::I32, [2, 3], [2, 0, 3, 1, 1, 0]).expect("an array");
        let chunks = [array(&chunks[0], 3), ids, array(&chunks[2], 2)];
        check_at("chunks", &scanned.expect("a function"), &chunks, &[0, 2]);
    }
}

#[test]
fn a_stopped_value_is_a_constant() {
    let ty = wide(&[4]);
    let stopped = trace(&[ty.clone(), ty.clone()], |_, a| vec![&a[0] * a[1].stop_gradient(), a[1].exp()]);
    let known = trace(&[ty.clone(), ty.clone()], |_, a| vec![&a[0] * &a[1], a[1].exp()]);
    let arguments = [array(&ty, 1), array(&ty, 2)];
    let gradients = |f: &Traced| {
        let found = gradient(&weighted(f), &[0, 1]).function().interpret(&arguments).expect("gradients");
        found[1..].iter().map(Array::to_floats).collect::<Vec<_>>()
    };
    let (stopped, known) = (gradients(&stopped.expect("a function")), gradients(&known.expect("a function")));
    assert_eq!(stopped[0], known[0]);
    let weights = numbers(4, 101);
    let exps = arguments[1].to_floats().into_iter().map(f64::exp);
    close(&stopped[1], &weights.iter().zip(exps).map(|(w, e)| w * e).collect::<Vec<_>>(), "the other way only");
    assert!(stopped[1] != known[1]);
}

#[test]
fn unused_arguments_get_zero_gradients() {
    let ty = wide(&[2]);
    let function = trace(&[ty.clone(), ty.clone(), ty.clone()], |_, a| {
        let count = a[1].gt(&a[0]).convert(Dtype::I32);
        vec![a[0].exp(), count.convert(Dtype::F64), a[2].stop_gradient()]
    });
    let function = gradient(&weighted(&function.expect("a function")), &[0, 1, 2]);
    let found = function.function().interpret(&[array(&ty, 1), array(&ty, 2), array(&ty, 3)]).expect("gradients");
    assert!(found[1].to_floats().iter().all(|x| *x != 0.0));
    assert_eq!((found[2].to_floats(), found[3].to_floats()), (vec![0.0; 2], vec![0.0; 2]));
}

#[test]
fn a_pullback_can_be_called_twice() {
    let ty = wide(&[2]);
    let square = trace(std::slice::from_ref(&ty), |_, a| vec![&a[0] * &a[0]]).expect("a function");
    let function = trace(std::slice::from_ref(&ty), |f, a| {
        let (results, pullback) = f.vjp(&square, &[&a[0]], &[0]).expect("a derivative");
        let ones = results[0].like(1.0);
        [pullback.call(&[&ones]), pullback.call(&[&(&ones + &ones)])].concat()
    });
    let x = array(&ty, 1);
    let found = function.expect("a function").function().interpret(std::slice::from_ref(&x)).expect("cotangents");
    let times = |by: f64| x.to_floats().iter().map(|x| by * x).collect::<Vec<_>>();
    assert_eq!((found[0].to_floats(), found[1].to_floats()), (times(2.0), times(4.0)));
}
