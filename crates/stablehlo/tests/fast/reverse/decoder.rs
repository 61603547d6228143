//! The derivative of a small decoder.

use super::*;
use crate::interpret::cases::transformer::{self, PARAMETERS, Sizes};
use grpo_stablehlo::Save;

fn arguments(sizes: Sizes) -> Vec<Array> {
    let types = sizes.types();
    let ids = (0..sizes.batch * sizes.length).map(|i| (i * i % sizes.vocabulary) as i64);
    let ids = Array::ints(Dtype::I32, &types[0].shape[..], ids).expect("ids");
    std::iter::once(ids).chain(types[1..].iter().zip(1..).map(|(ty, seed)| array(ty, seed))).collect()
}

fn policies() -> [Save; 4] {
    [Save::Carry, Save::Named(vec!["query".into(), "value".into()]), Save::Products, Save::Everything]
}

#[test]
fn decoder_gradients_match_finite_differences() {
    let loss = transformer::loss(Sizes::TOY, Save::Carry);
    let arguments = arguments(Sizes::TOY);
    let gradient = transformer::gradient(Sizes::TOY, Save::Carry);
    let found = gradient.function().interpret(&arguments).expect("gradients");
    assert_eq!(found[0].to_floats()[0], value(loss.function(), &arguments));
    for (found, parameter) in found[1..].iter().zip(PARAMETERS) {
        let expected = differences(loss.function(), &arguments, parameter);
        close(&found.to_floats(), &expected, &format!("parameter {parameter}"));
        assert!(expected.iter().any(|x| x.abs() > 1e-4), "parameter {parameter} counts");
    }
}

#[test]
fn save_policies_give_equal_decoder_gradients() {
    let arguments = arguments(Sizes::TOY);
    let found = policies().map(|save| {
        let found = transformer::gradient(Sizes::TOY, save).function().interpret(&arguments).expect("gradients");
        found.iter().flat_map(Array::to_floats).collect::<Vec<_>>()
    });
    for other in &found[1..] {
        assert!(other.iter().zip(&found[0]).all(|(a, b)| (a - b).abs() <= 1e-13), "{other:?} {:?}", found[0]);
    }
}

/// The size of the program does not depend on the number of layers.
#[test]
fn program_size_does_not_depend_on_layers() {
    let text = |layers| {
        let sizes = Sizes { layers, ..Sizes::TOY };
        let gradient = transformer::gradient(sizes, Save::Carry);
        let f = Builder::new();
        let a: Vec<Value> = sizes.types().into_iter().map(|ty| f.argument("", ty)).collect();
        let results = f.call(&gradient, &a.iter().collect::<Vec<_>>());
        let module = f.finish("g", &results.iter().map(|v| ("", v)).collect::<Vec<_>>()).expect("a program");
        let lowered = module.lowered().into_owned();
        assert_eq!(lowered.main.loops().iter().map(|l| l.trips).collect::<Vec<_>>(), [Some(layers as u64); 2]);
        module.to_string()
    };
    assert_eq!(text(2).lines().count(), text(64).lines().count());
}
