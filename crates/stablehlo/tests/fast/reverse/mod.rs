//! Compares derivatives with finite differences in f64, with the interpreter.

mod decoder;
mod devices;
mod listed;
mod own;
mod properties;
mod refusals;
mod rules;
mod scans;
mod widths;

use crate::interpret::cases::built;
use grpo_stablehlo::{Array, Builder, Dtype, Function, Reducer, TensorType, Traced, Value, trace};

/// Returns random numbers between -0.9 and 0.9.
pub(crate) fn numbers(n: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x2545_f491_4f6c_dd1d);
    let mut next = || {
        // splitmix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) as f64 / u64::MAX as f64 * 1.8 - 0.9
    };
    (0..n).map(|_| next()).map(|x| x + 0.1_f64.copysign(x)).collect()
}

pub(crate) fn wide(shape: &[usize]) -> TensorType {
    TensorType::new(Dtype::F64, shape)
}

/// Makes an argument of random numbers.
pub(crate) fn array(ty: &TensorType, seed: u64) -> Array {
    Array::floats(ty.dtype, &ty.shape[..], numbers(ty.elements(), seed)).expect("an array")
}

/// Returns the sum of all float results with random weights, so that every element contributes differently.
pub(crate) fn weighted(function: &Traced) -> Traced {
    let scalar = |f: &Builder, value: &Value, seed: usize| {
        let ty = value.ty().with_dtype(Dtype::F64);
        let weights = f.dense(numbers(ty.elements(), 100 + seed as u64), ty);
        let all: Vec<usize> = (0..value.shape().len()).collect();
        (value.convert(Dtype::F64) * weights).reduce(Reducer::Add, &all)
    };
    trace(&function.argument_types(), |f, arguments| {
        let results = f.call(function, &arguments.iter().collect::<Vec<_>>());
        let floats = results.iter().enumerate().filter(|(_, v)| v.dtype().is_float());
        let sum = floats.map(|(i, v)| scalar(f, v, i)).reduce(|a, b| a + b).expect("a float result");
        vec![sum]
    })
    .expect("a sum")
}

/// Returns a function of the scalar value and its gradients.
pub(crate) fn gradient(function: &Traced, with_respect_to: &[usize]) -> Traced {
    trace(&function.argument_types(), |f, arguments| {
        let arguments: Vec<&Value> = arguments.iter().collect();
        let (mut results, pullback) = f.vjp(function, &arguments, with_respect_to).expect("a derivative");
        results.extend(pullback.call(&[&results[0].like(1.0)]));
        results
    })
    .expect("a gradient")
}

/// Makes random arguments of a function of floats.
pub(crate) fn arguments(function: &Traced, seed: u64) -> Vec<Array> {
    function.argument_types().iter().zip(seed..).map(|(ty, seed)| array(ty, seed)).collect()
}

/// Returns the weighted sum of all float results and its gradients, at random arguments.
pub(crate) fn gradients(function: &Traced, seed: u64) -> Vec<f64> {
    let arguments = arguments(function, seed);
    let all: Vec<usize> = (0..arguments.len()).collect();
    let gradient = gradient(&weighted(function), &all);
    gradient.function().interpret(&arguments).expect("gradients").iter().flat_map(Array::to_floats).collect()
}

pub(crate) fn value(function: &Function, arguments: &[Array]) -> f64 {
    function.interpret(arguments).expect("a value")[0].to_floats()[0]
}

/// Computes central differences of a scalar function with respect to one argument.
pub(crate) fn differences(function: &Function, arguments: &[Array], index: usize) -> Vec<f64> {
    let (ty, numbers) = (arguments[index].ty().clone(), arguments[index].to_floats());
    let moved = |i: usize, by: f64| {
        let mut numbers = numbers.clone();
        numbers[i] += by;
        let mut arguments = arguments.to_vec();
        arguments[index] = Array::floats(ty.dtype, &ty.shape[..], numbers).expect("an array");
        value(function, &arguments)
    };
    let h = 1e-5;
    // Fourth order, so that rounding dominates the error.
    let slope = |i: usize| {
        let near = moved(i, h) - moved(i, -h);
        let far = moved(i, 2.0 * h) - moved(i, -2.0 * h);
        (8.0 * near - far) / (12.0 * h)
    };
    (0..numbers.len()).map(slope).collect()
}

pub(crate) fn close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (f, e) in found.iter().zip(expected) {
        assert!((f - e).abs() <= 1e-7 * (1.0 + e.abs()), "{what}: {found:?} and should be {expected:?}");
    }
}

/// Compares the gradients with respect to `with_respect_to` with finite differences.
pub(crate) fn check_at(what: &str, function: &Traced, arguments: &[Array], with_respect_to: &[usize]) {
    listed::checked(function, with_respect_to);
    let sum = weighted(function);
    let gradient = gradient(&sum, with_respect_to);
    let found = gradient.function().interpret(arguments).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(found[0].to_floats()[0], value(sum.function(), arguments), "{what}: the value");
    for (found, index) in found[1..].iter().zip(with_respect_to) {
        assert_eq!(found.ty(), arguments[*index].ty(), "{what}");
        close(&found.to_floats(), &differences(sum.function(), arguments, *index), what);
    }
}

/// Runs [`check_at`] with respect to all arguments, which are random floats.
pub(crate) fn check(what: &str, types: &[TensorType], body: impl FnOnce(&Builder, &[Value]) -> Vec<Value>) {
    let function = trace(types, body).unwrap_or_else(|error| panic!("{what}: {error}"));
    let with_respect_to: Vec<usize> = (0..types.len()).collect();
    check_at(what, &function, &arguments(&function, 0), &with_respect_to);
}
