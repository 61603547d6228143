//! The text of a program in which every printed form appears once. XLA parses each of them in `operations.rs`; this
//! test shows changes of the printer.

use stablehlo::{
    Builder, CustomCall, DotDimensions, Dtype, GatherDimensions, Module, Order, Precision, Reducer, ScatterDimensions,
    TensorType,
};

fn every_form() -> Module {
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
    let both = f.reduce(&[(&picked, Reducer::Max), (&x, Reducer::Add)], &[1]);
    let clamped = both[0].clamp(&both[0].like(-1.0), &both[0].like(1.0));
    let looped = f.for_loop(3, &[&clamped], |turn, carried| {
        let one = sum.dynamic_slice(&[turn], &[1]);
        vec![carried[0].dynamic_update_slice(&one.exp(), &[turn])]
    });
    let padded = looped[0].pad(&f.scalar(0.0, Dtype::F32), &[1], &[2]).slice(&[1], &[5]);
    let joined = f.concatenate(&[&padded, &both[1]], 0).reduce(Reducer::Add, &[0]);
    let gather = GatherDimensions {
        collapsed_slice_dims: vec![1],
        operand_batching_dims: vec![0],
        start_indices_batching_dims: vec![0],
        start_index_map: vec![1],
        index_vector_dim: 1,
        slice_sizes: vec![1, 1],
        ..GatherDimensions::default()
    };
    let gathered = x.gather(&ids, gather, &[4]);
    let scatter = ScatterDimensions {
        inserted_window_dims: vec![1],
        input_batching_dims: vec![0],
        scatter_indices_batching_dims: vec![0],
        scatter_dims_to_operand_dims: vec![1],
        index_vector_dim: 1,
        ..ScatterDimensions::default()
    };
    let scattered = x.scatter(&ids, &gathered, scatter, Reducer::Add).transpose(&[1, 0]);
    let groups = [vec![0, 1]];
    let met = gathered.all_reduce(Reducer::Add, &groups) + &sum;
    let part = scattered.reduce_scatter(Reducer::Max, 0, &groups);
    let rank = f.replica_id().convert(Dtype::F32) + f.partition_id().convert(Dtype::F32);
    let kept = f.optimization_barrier(&[&part, &rank]);
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
    module.replicas = 2;
    module.main.arguments[0].row_major = true;
    module
}

#[test]
fn every_printed_form() {
    insta::assert_snapshot!(every_form().to_string());
}

/// Further forms: bit casts, sorts, branches and collectives.
#[test]
fn more_printed_forms() {
    let f = Builder::new();
    let x = f.argument("x", TensorType::new(Dtype::F32, [4, 6]));
    let index = f.argument("index", TensorType::scalar(Dtype::I32));
    let ids = f.iota(1, TensorType::new(Dtype::I32, [4, 6]));
    let bits = x.bitcast_convert(Dtype::U32);
    let bits = (bits.shift_left(&bits.like(13)) | bits.shift_right_logical(&bits.like(19))) ^ &bits;
    let signs = ids.shift_right_arithmetic(&ids.like(1));
    let sorted = f.sort(&[&x, &ids], 1, Order::Descending, true);
    let keys = f.sort(&[&bits], 0, Order::Ascending, false);
    let padded = sorted[0].pad_general(&f.scalar(0.0, Dtype::F32), &[0, -1], &[1, -2], &[1, 0]);
    let chosen = f.case(&index, 2, |branch| match branch {
        0 => vec![padded.slice_strided(&[0, 0], &[4, 3], &[2, 1]), sorted[1].clone()],
        _ => vec![padded.slice(&[0, 0], &[2, 3]).exp(), signs.clone()],
    });
    let groups = [vec![0, 1]];
    let gathered = chosen[0].all_gather(0, &groups).all_to_all(0, 1, &groups).collective_permute(&[(0, 1), (1, 0)]);
    let mut module = f.finish("more", &[("met", &gathered), ("ids", &chosen[1]), ("keys", &keys[0])]).unwrap();
    module.replicas = 2;
    insta::assert_snapshot!(module.to_string());
}
