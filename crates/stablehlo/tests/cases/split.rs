//! Programs that are sharded over four devices.

use super::*;

/// A mesh of 2 x 2 devices.
pub fn mesh() -> Mesh {
    Mesh::new("mesh", [("data", 2), ("tensor", 2)]).expect("a mesh")
}

pub fn split(dimensions: &[&[&str]]) -> Sharding {
    mesh().sharding(dimensions).expect("a sharding")
}

pub fn along(axes: &[&str]) -> MeshAxes {
    mesh().along(axes).expect("axes")
}

fn manual(axes: &[&str], inputs: &[Sharding], outputs: &[Sharding]) -> Manual {
    Manual::new(&along(axes), inputs, outputs).expect("a manual computation")
}

pub fn programs() -> Vec<Case> {
    let policies = [Save::Carry, Save::Products, Save::Everything];
    let layers = policies.iter().flat_map(|save| [layers(save.clone()), manual_layers(save.clone())]);
    layers.chain([products(), one_axis(), apart_by_device()]).collect()
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
    let (rows, columns) = (split(&[&["data"], &["?"]]), split(&[&["data"], &["tensor"]]));
    let weights = [split(&[&["data"], &["tensor"]]), split(&[&["tensor"], &["data"]])];
    let layer = trace(&layer_types(), |_, a| {
        let hidden = product(&a[0], &a[1].constrain(&weights[0])).constrain(&columns).tanh();
        vec![(&a[0] + product(&hidden, &a[2].constrain(&weights[1]))).constrain(&rows)]
    });
    two_layers("split layers", 31, save, &whole, layer)
}

/// The same network with a manual computation per layer: a column-parallel product, a row-parallel product, and an
/// all-reduce.
fn manual_layers(save: Save) -> Case {
    let whole = [split(&[&["data"], &[]]), split(&[&[], &[], &["tensor"]]), split(&[&[], &["tensor"], &[]])];
    let rows = split(&[&["data"], &[]]);
    let inputs = [rows.clone(), split(&[&[], &["tensor"]]), split(&[&["tensor"], &[]])];
    let manual = manual(&["data", "tensor"], &inputs, std::slice::from_ref(&rows));
    let body = built(manual.trace(&layer_types(), |_, a| {
        let part = product(&product(&a[0], &a[1]).tanh(), &a[2]);
        vec![&a[0] + part.all_reduce(Reducer::Add, &along(&["tensor"]))]
    }));
    let layer = trace(&layer_types(), |f, a| f.manual(&manual, &body, &a.iter().collect::<Vec<_>>()));
    two_layers("manual layers", 32, save, &whole, layer)
}

/// A product whose terms are sharded over devices, and a replicated scalar.
fn products() -> Case {
    let inputs = [split(&[&["data"], &["tensor"]]), split(&[&["tensor"], &[]])];
    let manual = manual(&["data", "tensor"], &inputs, &[split(&[&["data"], &[]]), split(&[])]);
    let types = [ty(Dtype::F32, &[4, 8]), ty(Dtype::F32, &[8, 3])];
    let body = built(manual.trace(&types, |_, a| {
        let all = product(&a[0], &a[1]).all_reduce(Reducer::Add, &along(&["tensor"]));
        let loss = sum_of_squares(&all).all_reduce(Reducer::Add, &along(&["data"]));
        vec![all, loss.log()]
    }));
    let loss = trace(&types, |f, a| {
        let results = f.manual(&manual, &body, &[&a[0], &a[1]]);
        vec![&results[1] + results[0].tanh().reduce(Reducer::Add, &[0, 1])]
    });
    gradient_case("a manual product", 33, &types, &inputs, loss)
}

/// A computation that is manual along one axis; the partitioner shards the rows.
fn one_axis() -> Case {
    let (rows, columns) = (split(&[&["?"], &["?"]]), split(&[&["?"], &["tensor", "?"]]));
    let manual = manual(&["tensor"], &[rows.clone(), columns], std::slice::from_ref(&rows));
    let types = [ty(Dtype::F32, &[4, 8]), ty(Dtype::F32, &[8, 6])];
    let body = built(manual.trace(&types, |f, a| {
        let part = product(&a[0], &a[1]).tanh().constrain(&split(&[&["data"], &[]]));
        let place = f.axis_index(&along(&["tensor"])).convert(Dtype::F32);
        vec![(part + place.broadcast_in_dim(&[4, 3], &[])).all_reduce(Reducer::Add, &along(&["tensor"]))]
    }));
    let loss = trace(&types, |f, a| vec![sum_of_squares(&f.manual(&manual, &body, &[&a[0], &a[1]])[0])]);
    let whole = [split(&[&["data"], &[]]), split(&[&[], &["tensor"]])];
    gradient_case("manual along one axis", 35, &types, &whole, loss)
}

/// Devices whose loops have different trip counts.
fn apart_by_device() -> Case {
    let both = split(&[&["data", "tensor"], &[]]);
    let manual = manual(&["data", "tensor"], std::slice::from_ref(&both), std::slice::from_ref(&both));
    let body = built(manual.trace(&[ty(Dtype::F32, &[4, 3])], |f, a| {
        let place = f.axis_index(&along(&["data", "tensor"])).convert(Dtype::I32);
        let begin = f.scalar(0, Dtype::I32);
        f.while_loop(&[&begin, &a[0]], |c| c[0].lt(&place), |c| vec![&c[0] + c[0].like(1), &c[1] + &a[0]]).split_off(1)
    }));
    let arguments = [(ty(Dtype::F32, &[4, 3]), both.clone())];
    split_case("devices that go apart", 36, &arguments, &[both], |f, a| f.manual(&manual, &body, &[&a[0]]))
}
