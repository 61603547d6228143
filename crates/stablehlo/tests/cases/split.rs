//! Programs that are sharded over four devices.

use super::*;

/// A mesh of 2 x 2 devices.
pub fn mesh() -> Mesh {
    Mesh::new("mesh", [("data", 2), ("tensor", 2)]).expect("a mesh")
}

pub fn split(dimensions: &[&[&str]]) -> Sharding {
    mesh().sharding(dimensions).expect("a sharding")
}

pub fn programs() -> Vec<Case> {
    let layers = [Save::Carry, Save::Products, Save::Everything].map(layers);
    layers.into_iter().chain([shards(), loops_of_devices()]).collect()
}

/// Builds a case whose random arguments and results are sharded.
fn split_case(
    name: &str,
    seed: u64,
    arguments: &[(TensorType, Sharding)],
    results: &[Sharding],
    build: impl FnOnce(&Builder, &[Value]) -> Vec<Value>,
) -> Case {
    let mut random = Random(seed);
    let numbers = |ty: &TensorType, random: &mut Random| {
        Array::floats(ty.dtype, &ty.shape[..], (0..ty.elements()).map(|_| random.float() / 4.0)).expect("numbers")
    };
    let arrays: Vec<Array> = arguments.iter().map(|(ty, _)| numbers(ty, &mut random)).collect();
    let case = case(name, &arrays, |f, a| {
        a.iter().zip(arguments).for_each(|(value, (_, sharding))| f.shard(value, sharding));
        results.iter().enumerate().for_each(|(i, sharding)| f.shard_result(i, sharding));
        build(f, a)
    });
    Case { slack: 1e-5, ..case }
}

/// Builds a case of a loss and its gradients with respect to all arguments.
fn gradient_case(name: &str, seed: u64, types: &[TensorType], whole: &[Sharding], loss: Result<Traced>) -> Case {
    let loss = built(loss);
    let arguments: Vec<_> = types.iter().cloned().zip(whole.iter().cloned()).collect();
    let results = [&[split(&[])][..], whole].concat();
    split_case(name, seed, &arguments, &results, |f, a| {
        let all: Vec<usize> = (0..a.len()).collect();
        let (results, gradients) = f.value_and_grad(&loss, &a.iter().collect::<Vec<_>>(), &all).expect("gradients");
        results.into_iter().chain(gradients).collect()
    })
}

fn product(a: &Value, b: &Value) -> Value {
    a.dot_general(b, DotDimensions::contract(1, 0), Dtype::F32, Precision::Highest)
}

fn sum_of_squares(x: &Value) -> Value {
    (x * x).reduce(Reducer::Add, &[0, 1])
}

/// The types of a layer's arguments: rows [8, 4], weights [4, 6] and [6, 4].
fn layer_types() -> [TensorType; 3] {
    [ty(Dtype::F32, &[8, 4]), ty(Dtype::F32, &[4, 6]), ty(Dtype::F32, &[6, 4])]
}

/// Two layers in a scan over stacked weights.
fn two_layers(name: &str, seed: u64, save: Save, whole: &[Sharding], layer: Result<Traced>) -> Case {
    let layer = built(layer);
    let types = [ty(Dtype::F32, &[8, 4]), ty(Dtype::F32, &[2, 4, 6]), ty(Dtype::F32, &[2, 6, 4])];
    let loss = trace(&types, |f, a| {
        let out = f.scan(2, &layer, &[&a[0]], &[&a[1], &a[2]], &[], save.clone()).carry.remove(0);
        vec![sum_of_squares(&out)]
    });
    gradient_case(&format!("{name}, {save:?}"), seed, &types, whole, loss)
}

/// A feed-forward network of two layers. Every activation and weight has a sharding as in decoders: rows over `data`,
/// columns over `tensor`.
fn layers(save: Save) -> Case {
    let whole =
        [split(&[&["data"], &[]]), split(&[&[], &["data"], &["tensor"]]), split(&[&[], &["tensor"], &["data"]])];
    let (rows, columns) = (split(&[&["data"], &[]]), split(&[&["data"], &["tensor"]]));
    let weights = [split(&[&["data"], &["tensor"]]), split(&[&["tensor"], &["data"]])];
    let layer = trace(&layer_types(), |_, a| {
        let hidden = product(&a[0], &a[1].constrain(&weights[0])).constrain(&columns).tanh();
        vec![(&a[0] + product(&hidden, &a[2].constrain(&weights[1]))).constrain(&rows)]
    });
    two_layers("split layers", 31, save, &whole, layer)
}

/// A computation on the shards of rows and columns: each device normalises its rows.
fn shards() -> Case {
    let (rows, columns) = (split(&[&["data", "tensor"], &[]]), split(&[&[], &["tensor"]]));
    let manual = Manual::new(&mesh(), &[rows.clone(), columns.clone()], &[rows.clone(), columns.clone()]);
    let manual = manual.expect("a manual computation");
    let types = [ty(Dtype::F32, &[8, 3]), ty(Dtype::F32, &[4, 6])];
    let body = built(manual.trace(&types, |_, a| {
        let sums = a[0].reduce(Reducer::Add, &[1]).broadcast_in_dim(a[0].shape(), &[0]);
        vec![&a[0] - sums, a[1].reduce(Reducer::Max, &[0, 1]).broadcast_in_dim(a[1].shape(), &[])]
    }));
    let arguments = [(types[0].clone(), split(&[&["data"], &[]])), (types[1].clone(), columns)];
    split_case("shards", 33, &arguments, &[rows, split(&[&["data"], &[]])], |f, a| {
        f.manual(&manual, &body, &[&a[0], &a[1]])
    })
}

/// Devices whose loops have different trip counts: as many as their rows have numbers above 0.
fn loops_of_devices() -> Case {
    let both = split(&[&["data", "tensor"], &[]]);
    let manual = Manual::new(&mesh(), std::slice::from_ref(&both), std::slice::from_ref(&both));
    let manual = manual.expect("a manual computation");
    let body = built(manual.trace(&[ty(Dtype::F32, &[4, 3])], |f, a| {
        let turns = a[0].gt(&a[0].like(0.0)).convert(Dtype::I32).reduce(Reducer::Add, &[0, 1]);
        let begin = f.scalar(0, Dtype::I32);
        f.while_loop(&[&begin, &a[0]], |c| c[0].lt(&turns), |c| vec![&c[0] + c[0].like(1), &c[1] + &a[0]]).split_off(1)
    }));
    let arguments = [(ty(Dtype::F32, &[4, 3]), both.clone())];
    split_case("loops of devices", 36, &arguments, &[both], |f, a| f.manual(&manual, &body, &[&a[0]]))
}
