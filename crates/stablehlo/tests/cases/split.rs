//! Programs that are sharded over four devices.

use super::*;

/// A mesh of 2 x 2 devices.
pub fn mesh() -> Mesh {
    Mesh::new("mesh", [("data", 2), ("tensor", 2)]).expect("a mesh")
}

pub fn split(dimensions: &[&[&str]]) -> Sharding {
    mesh().sharding(dimensions).expect("a sharding")
}

fn along(axes: &[&str]) -> MeshAxes {
    mesh().along(axes).expect("axes")
}

fn manual(axes: &[&str], inputs: &[Sharding], outputs: &[Sharding]) -> Manual {
    Manual::new(&along(axes), inputs, outputs).expect("a manual computation")
}

pub fn programs() -> Vec<Case> {
    let policies = [Save::Carry, Save::Products, Save::Everything];
    let layers = policies.iter().flat_map(|save| [layers(save.clone()), manual_layers(save.clone())]);
    layers.chain([products(), meetings(), one_axis(), sorted_by_device()]).collect()
}

/// Builds a case whose arguments and results are sharded.
fn split_case(
    name: &str,
    arguments: &[(Array, Sharding)],
    results: &[Sharding],
    build: impl FnOnce(&Builder, &[Value]) -> Vec<Value>,
) -> Case {
    let arrays: Vec<Array> = arguments.iter().map(|(array, _)| array.clone()).collect();
    let case = case(name, &arrays, |f, a| {
        a.iter().zip(arguments).for_each(|(value, (_, sharding))| f.shard(value, sharding));
        results.iter().enumerate().for_each(|(i, sharding)| f.shard_result(i, sharding));
        build(f, a)
    });
    Case { slack: 1e-5, ..case }
}

fn product(a: &Value, b: &Value) -> Value {
    a.dot_general(b, DotDimensions::contract(1, 0), Dtype::F32, Precision::Highest)
}

/// Returns the gradients of the first result of `loss` with respect to all arguments.
fn gradients(f: &Builder, loss: &Traced, arguments: &[Value]) -> Vec<Value> {
    let all: Vec<usize> = (0..arguments.len()).collect();
    let (results, gradients) = f.value_and_grad(loss, &arguments.iter().collect::<Vec<_>>(), &all).expect("gradients");
    results.into_iter().chain(gradients).collect()
}

fn numbers(random: &mut Random, shape: &[usize]) -> Array {
    let count = shape.iter().product();
    Array::floats(Dtype::F32, shape, (0..count).map(|_| random.float() / 4.0)).expect("numbers")
}

/// A feed-forward network of two layers: rows [8, 4], weights [2, 4, 6] and [2, 6, 4]. Every activation and weight has
/// a sharding as in decoders: rows over `data`, columns over `tensor`.
fn layers(save: Save) -> Case {
    let mut random = Random(31);
    let types = [ty(Dtype::F32, &[8, 4]), ty(Dtype::F32, &[2, 4, 6]), ty(Dtype::F32, &[2, 6, 4])];
    let whole =
        [split(&[&["data"], &[]]), split(&[&[], &["data"], &["tensor"]]), split(&[&[], &["tensor"], &["data"]])];
    let (rows, columns) = (split(&[&["data"], &["?"]]), split(&[&["data"], &["tensor"]]));
    let weights = [split(&[&["data"], &["tensor"]]), split(&[&["tensor"], &["data"]])];
    let slices = [types[0].clone(), ty(Dtype::F32, &[4, 6]), ty(Dtype::F32, &[6, 4])];
    let layer = built(trace(&slices, |_, a| {
        let hidden = product(&a[0], &a[1].constrain(&weights[0])).constrain(&columns).tanh();
        vec![(&a[0] + product(&hidden, &a[2].constrain(&weights[1]))).constrain(&rows)]
    }));
    let loss = built(trace(&types, |f, a| {
        let out = f.scan(2, &layer, &[&a[0]], &[&a[1], &a[2]], &[], save.clone()).carry.remove(0);
        vec![(&out * &out).reduce(Reducer::Add, &[0, 1])]
    }));
    let arguments: Vec<_> =
        types.iter().zip(&whole).map(|(ty, s)| (numbers(&mut random, &ty.shape), s.clone())).collect();
    let results = [&[split(&[])][..], &whole].concat();
    split_case(&format!("split layers, {save:?}"), &arguments, &results, |f, a| gradients(f, &loss, a))
}

/// The same network with a manual computation per layer: a column-parallel product, a row-parallel product, and an
/// all-reduce.
fn manual_layers(save: Save) -> Case {
    let mut random = Random(32);
    let types = [ty(Dtype::F32, &[8, 4]), ty(Dtype::F32, &[2, 4, 6]), ty(Dtype::F32, &[2, 6, 4])];
    let whole = [split(&[&["data"], &[]]), split(&[&[], &[], &["tensor"]]), split(&[&[], &["tensor"], &[]])];
    let rows = split(&[&["data"], &[]]);
    let inputs = [rows.clone(), split(&[&[], &["tensor"]]), split(&[&["tensor"], &[]])];
    let manual = manual(&["data", "tensor"], &inputs, std::slice::from_ref(&rows));
    let slices = [types[0].clone(), ty(Dtype::F32, &[4, 6]), ty(Dtype::F32, &[6, 4])];
    let body = built(manual.trace(&slices, |_, a| {
        let part = product(&product(&a[0], &a[1]).tanh(), &a[2]);
        vec![&a[0] + part.all_reduce(Reducer::Add, &along(&["tensor"]))]
    }));
    let layer = trace(&slices, |f, a| f.manual(&manual, &body, &a.iter().collect::<Vec<_>>())).expect("a layer");
    let loss = built(trace(&types, |f, a| {
        let out = f.scan(2, &layer, &[&a[0]], &[&a[1], &a[2]], &[], save.clone()).carry.remove(0);
        vec![(&out * &out).reduce(Reducer::Add, &[0, 1])]
    }));
    let arguments: Vec<_> =
        types.iter().zip(&whole).map(|(ty, s)| (numbers(&mut random, &ty.shape), s.clone())).collect();
    let results = [&[split(&[])][..], &whole].concat();
    split_case(&format!("manual layers, {save:?}"), &arguments, &results, |f, a| gradients(f, &loss, a))
}

/// A product whose terms are sharded over devices, and a replicated scalar.
fn products() -> Case {
    let mut random = Random(33);
    let inputs = [split(&[&["data"], &["tensor"]]), split(&[&["tensor"], &[]])];
    let manual = manual(&["data", "tensor"], &inputs, &[split(&[&["data"], &[]]), split(&[])]);
    let types = [ty(Dtype::F32, &[4, 8]), ty(Dtype::F32, &[8, 3])];
    let body = built(manual.trace(&types, |_, a| {
        let all = product(&a[0], &a[1]).all_reduce(Reducer::Add, &along(&["tensor"]));
        let loss = (&all * &all).reduce(Reducer::Add, &[0, 1]).all_reduce(Reducer::Add, &along(&["data"]));
        vec![all, loss.log()]
    }));
    let loss = built(trace(&types, |f, a| {
        let results = f.manual(&manual, &body, &[&a[0], &a[1]]);
        vec![&results[1] + results[0].tanh().reduce(Reducer::Add, &[0, 1])]
    }));
    let arguments: Vec<_> =
        types.iter().zip(&inputs).map(|(ty, s)| (numbers(&mut random, &ty.shape), s.clone())).collect();
    let results = [&[split(&[])][..], &inputs].concat();
    split_case("a manual product", &arguments, &results, |f, a| gradients(f, &loss, a))
}

/// Every collective along mesh axes, and its derivative.
fn meetings() -> Case {
    let mut random = Random(34);
    let both = split(&[&["data"], &["tensor"]]);
    let outputs = [
        split(&[&["data"], &[]]),
        split(&[&["data", "tensor"], &[]]),
        split(&[&["data"], &["tensor"]]),
        both.clone(),
        both.clone(),
        split(&[&["tensor"], &["data"]]),
    ];
    let manual = manual(&["data", "tensor"], std::slice::from_ref(&both), &outputs);
    let types = [ty(Dtype::F32, &[8, 4])];
    let body = built(manual.trace(&types, |f, a| {
        let (data, tensor) = (along(&["data"]), along(&["tensor"]));
        let number = |axes: &MeshAxes| f.axis_index(axes).convert(Dtype::F32).broadcast_in_dim(&[4, 2], &[]);
        let here = (&a[0] * (number(&data) + number(&tensor) + a[0].like(0.5))).tanh();
        vec![
            here.all_gather(1, &tensor),
            here.all_to_all(0, 1, &tensor),
            here.all_gather(0, &data).reduce_scatter(Reducer::Add, 0, &data),
            here.collective_permute_along(&along(&["data", "tensor"]), &[(0, 3), (3, 1), (1, 0)]),
            here.all_reduce(Reducer::Add, &along(&["data", "tensor"])),
            here.collective_permute_along(&along(&["data", "tensor"]), &[(1, 2), (2, 1), (0, 0), (3, 3)]),
        ]
    }));
    let loss = built(trace(&types, |f, a| {
        let results = f.manual(&manual, &body, &[&a[0]]);
        let weigh = |(i, v): (usize, Value)| {
            let ty = v.ty().clone();
            let [row, column] = [0, 1].map(|d| f.iota(d, ty.clone()));
            (v * (row * f.splat(0.1 * (i as f64 + 1.0), ty.clone()) + column)).reduce(Reducer::Add, &[0, 1])
        };
        vec![results.into_iter().enumerate().map(weigh).reduce(|a, b| a + b).expect("results")]
    }));
    let arguments = [(numbers(&mut random, &[8, 4]), both.clone())];
    split_case("devices that meet", &arguments, &[split(&[]), both], |f, a| gradients(f, &loss, a))
}

/// A computation that is manual along one axis; the partitioner shards the rows.
fn one_axis() -> Case {
    let mut random = Random(35);
    let (rows, columns) = (split(&[&["?"], &["?"]]), split(&[&["?"], &["tensor", "?"]]));
    let manual = manual(&["tensor"], &[rows.clone(), columns], std::slice::from_ref(&rows));
    let types = [ty(Dtype::F32, &[4, 8]), ty(Dtype::F32, &[8, 6])];
    let body = built(manual.trace(&types, |f, a| {
        let part = product(&a[0], &a[1]).tanh().constrain(&split(&[&["data"], &[]]));
        let place = f.axis_index(&along(&["tensor"])).convert(Dtype::F32);
        vec![(part + place.broadcast_in_dim(&[4, 3], &[])).all_gather(1, &along(&["tensor"]))]
    }));
    let loss = built(trace(&types, |f, a| {
        let out = f.manual(&manual, &body, &[&a[0], &a[1]]).remove(0);
        vec![(&out * &out).reduce(Reducer::Add, &[0, 1])]
    }));
    let whole = [split(&[&["data"], &[]]), split(&[&[], &["tensor"]])];
    let arguments: Vec<_> =
        types.iter().zip(&whole).map(|(ty, s)| (numbers(&mut random, &ty.shape), s.clone())).collect();
    let results = [&[split(&[])][..], &whole].concat();
    split_case("manual along one axis", &arguments, &results, |f, a| gradients(f, &loss, a))
}

/// Devices whose loops have different trip counts, and that take different branches.
fn sorted_by_device() -> Case {
    let mut random = Random(36);
    let both = split(&[&["data", "tensor"], &[]]);
    let manual = manual(&["data", "tensor"], std::slice::from_ref(&both), std::slice::from_ref(&both));
    let body = built(manual.trace(&[ty(Dtype::F32, &[4, 3])], |f, a| {
        let place = f.axis_index(&along(&["data", "tensor"])).convert(Dtype::I32);
        let begin = f.scalar(0, Dtype::I32);
        let turned = f.while_loop(&[&begin, &a[0]], |c| c[0].lt(&place), |c| vec![&c[0] + c[0].like(1), &c[1] + &a[0]]);
        f.case(&place, 3, |branch| vec![if branch == 1 { turned[1].exp() } else { -&turned[1] }])
    }));
    let arguments = [(numbers(&mut random, &[4, 3]), both.clone())];
    split_case("devices that go apart", &arguments, &[both], |f, a| f.manual(&manual, &body, &[&a[0]]))
}
