//! Programs that XLA's partitioner shards over four devices.

use crate::device::{compile, run_on_mesh};
use crate::interpreter::cases::{case, split, ty};
use grpo_stablehlo::*;
use grpo_testkit::margin::{assert_below, largest_difference};
use proptest::prelude::*;
use split::mesh;

/// Asserts that the program on four devices agrees with the interpreter on whole tensors.
fn agree(what: &str, module: &Module, arguments: &[Array], slack: f64) {
    let expected = module.interpret(arguments).unwrap_or_else(|error| panic!("{what}: {error}"));
    let found = run_on_mesh(&compile(module), module, arguments);
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert_eq!(found.ty(), expected.ty(), "{what}");
        let (found, expected) = (found.to_floats(), expected.to_floats());
        let largest = expected.iter().fold(1e-3_f64, |m, x| m.max(x.abs()));
        let off = largest_difference(&found, &expected) / largest;
        assert!(off <= slack, "{what}, result {i}: {found:?}, and should be {expected:?}\n{module}");
        assert_below(&format!("{what}, result {i}"), off, slack);
    }
}

#[test]
fn sharded_programs_match_the_interpreter() {
    for case in split::programs() {
        println!("{}", case.name);
        agree(&case.name, &case.module, &case.arguments, case.slack);
    }
}

/// With rows, columns, both or neither sharded, each device has the shard at `Sharding::range`.
#[test]
fn shards_follow_sharding_range() {
    for dimensions in
        [&[&["data", "tensor"][..], &[]][..], &[&["tensor", "data"], &[]], &[&["data"], &["tensor"]], &[&[], &[]]]
    {
        let sharding = split::split(dimensions);
        let numbers = Array::floats(Dtype::F32, [4, 4], (0..16).map(f64::from)).unwrap();
        let doubled = case("doubled", std::slice::from_ref(&numbers), |f, a| {
            f.shard(&a[0], &sharding);
            f.shard_result(0, &sharding);
            f.shard_result(1, &mesh().replicated(0));
            let doubled = &a[0] + &a[0];
            vec![doubled.constrain(&sharding), doubled.reduce(Reducer::Add, &[0, 1])]
        });
        let found = run_on_mesh(&compile(&doubled.module), &doubled.module, std::slice::from_ref(&numbers));
        assert_eq!(found[0].to_floats(), (0..16).map(|i| f64::from(2 * i)).collect::<Vec<_>>(), "{sharding}");
        assert_eq!(found[1].to_floats(), [240.0]);
    }
}

/// The partitioner gives an argument without a sharding the sharding of its use.
#[test]
fn the_partitioner_shards_arguments_without_a_sharding() {
    let numbers = Array::floats(Dtype::F32, [4, 4], (0..16).map(f64::from)).unwrap();
    let rows = split::split(&[&["data"], &[]]);
    let sum = case("sum", &[numbers.clone(), numbers.clone()], |f, a| {
        f.shard(&a[0], &rows);
        f.shard_result(0, &rows);
        vec![(&a[0] * &a[1]).constrain(&rows)]
    });
    let parameters = compile(&sum.module).executable().parameters().expect("a program").expect("types");
    assert_eq!(parameters.into_iter().map(|ty| ty.dims).collect::<Vec<_>>(), [[2, 4], [2, 4]]);
}

/// The shards of a donated parameter reuse memory for the new parameter.
#[test]
fn donated_shards_share_memory() {
    let numbers = Array::floats(Dtype::F32, [4, 4], (0..16).map(f64::from)).unwrap();
    let both = split::split(&[&["data"], &["tensor"]]);
    let step = case("step", &[numbers.clone(), numbers], |f, a| {
        a.iter().for_each(|value| f.shard(value, &both));
        f.shard_result(0, &both);
        f.alias(&a[0], 0);
        vec![&a[0] - &a[1]]
    });
    let stats = compile(&step.module).executable().memory_stats().unwrap();
    assert_eq!((stats.alias, stats.argument), (16, 32), "{stats:?}");
}

type Step = [u8; 4];

/// Applies an operation to two of the values so far, all `[4, 4]`.
fn step(f: &Builder, values: &[Value], [operation, a, b, _]: Step) -> Value {
    let [a, b] = [a, b].map(|i| &values[usize::from(i) % values.len()]);
    match operation % 9 {
        0 => a + b,
        1 => (a * b).tanh(),
        2 => a.dot_general(b, DotDimensions::contract(1, 0), Dtype::F32, Precision::Highest).tanh(),
        3 => a.transpose(&[1, 0]),
        4 => a.max(b),
        5 => a.reduce(Reducer::Add, &[0]).broadcast_in_dim(&[4, 4], &[1]).tanh(),
        6 => f.concatenate(&[&a.slice(&[1, 0], &[4, 4]), &b.slice(&[0, 0], &[1, 4])], 0),
        7 => a.reshape(&[2, 8]).reshape(&[4, 4]),
        _ => a.unary(Unary::Logistic),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(12) })]

    /// Random shardings of values do not change the results on four devices.
    #[test]
    fn random_shardings_change_no_results(steps in prop::collection::vec(any::<Step>(), 2..12), seed in any::<u64>()) {
        let choices: [&[&[&str]]; 6] = [
            &[&["data"], &["tensor"]],
            &[&["tensor"], &[]],
            &[&[], &["data", "tensor"]],
            &[&[], &["data"]],
            &[&["data"], &[]],
            &[&["tensor"], &["data"]],
        ];
        let mut random = crate::interpreter::cases::Random(seed);
        let number = |i: usize| Array::floats(Dtype::F32, [4, 4], (0..16).map(|_| random.float() / (4.0 + i as f64)));
        let arguments: Vec<Array> = (0..2).map(number).map(|array| array.expect("numbers")).collect();
        let function = trace(&vec![ty(Dtype::F32, &[4, 4]); 2], |f, a| {
            let mut values = a.to_vec();
            for one in &steps {
                let next = step(f, &values, *one);
                let constrained = match choices.get(usize::from(one[3] % 8)) {
                    Some(choice) => next.constrain(&split::split(choice)),
                    None => next,
                };
                values.push(constrained);
            }
            let last = values.pop().expect("a value");
            vec![(&last * &last).reduce(Reducer::Add, &[0, 1]), last]
        });
        let function = function.expect("a function");
        let case = case("random", &arguments, |f, a| {
            f.shard(&a[0], &split::split(choices[0]));
            f.shard(&a[1], &split::split(choices[2]));
            let results = f.value_and_grad(&function, &[&a[0], &a[1]], &[0, 1]).expect("gradients");
            let shardings = [&[][..], choices[0], choices[5], choices[2]];
            shardings.iter().enumerate().for_each(|(i, choice)| f.shard_result(i, &split::split(choice)));
            results.0.into_iter().chain(results.1).collect()
        });
        agree("random", &case.module, &arguments, 1e-4);
    }
}
