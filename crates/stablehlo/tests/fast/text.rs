//! The text of a program in which every printed form appears once. XLA parses each of them in `operations.rs`; this
//! test shows changes of the printer.

use crate::interpret::cases::windows;
use grpo_stablehlo::*;

#[test]
fn every_printed_form() {
    let f = Builder::new();
    let x = f.argument("x", TensorType::new(Dtype::F32, [4, 6]));
    let sum = f.argument("sum", TensorType::new(Dtype::F32, [4]));
    let ids = f.argument("ids", TensorType::new(Dtype::I32, [4, 1]));
    f.alias(&sum, 1);

    let weight = f.splat(0.1, TensorType::new(Dtype::Bf16, [6, 6]));
    let product =
        x.convert(Dtype::Bf16).dot_general(&weight, DotDimensions::contract(1, 0), Dtype::F32, Precision::Highest);
    let column = f.iota(1, TensorType::new(Dtype::I32, [4, 6]));
    let hit = column.eq(&ids.reshape(&[4]).broadcast_in_dim(&[4, 6], &[0]));
    let picked = hit.select(&product, &x.like(f64::NEG_INFINITY));
    let (largest, best) = picked.largest(1);
    let clamped = largest.clamp(&largest.like(-1.0), &largest.like(1.0));
    let looped = f.for_loop(3, &[&clamped], |turn, carried| {
        let one = sum.dynamic_slice(&[turn], &[1]);
        vec![carried[0].dynamic_update_slice(&one.exp(), &[turn])]
    });
    let padded = looped[0].pad(&f.scalar(0.0, Dtype::F32), &[1], &[2]).slice(&[1], &[5]);
    let joined = f
        .concatenate(&[&padded, &f.reduce(&[(&picked, Reducer::Max), (&x, Reducer::Add)], &[1])[1]], 0)
        .reduce(Reducer::Add, &[0]);
    let entries = windows::entries(1);
    let scatter = ScatterDimensions::from(&entries);
    let gathered = x.gather(&ids, entries, &[4]);
    let scattered = x.scatter(&ids, &gathered, scatter, Reducer::Add).transpose(&[1, 0]);
    let met = gathered + &sum;
    let bits = best.bitcast_convert(Dtype::U32);
    let kept = f.optimization_barrier(&[&scattered, &bits]);
    let call = CustomCall {
        target: "target".into(),
        backend_config: "{\"quoted\": true}".into(),
        aliases: vec![(0, 0)],
        row_major: true,
        ..CustomCall::default()
    };
    let called = f.custom_call(call, &[&kept[0]], &[kept[0].ty().clone()]);
    let flag = joined.is_finite();
    let mut module = f.finish("forms", &[("called", &called[0]), ("sum", &met), ("flag", &flag)]).unwrap();
    module.main.arguments[0].row_major = true;
    insta::assert_snapshot!(module.to_string());
}
