//! Several replicas, and results that share memory with arguments.

use crate::device::{self, Tensor, f32s, on_replicas, ty};
use stablehlo::*;

#[test]
fn collectives_over_replicas() {
    let arguments: Vec<Tensor> = (0..4).map(|r| Tensor::f32(&[r as f32 + 1.0, 10.0 * r as f32], &[2])).collect();
    let outputs = on_replicas(&arguments, |f, a| {
        let pairs = [vec![0, 1], vec![2, 3]];
        let all = [vec![0, 1, 2, 3]];
        vec![
            a.all_reduce(Reducer::Add, &all),
            a.all_reduce(Reducer::Max, &pairs),
            a.reduce_scatter(Reducer::Add, 0, &pairs),
            f.replica_id().convert(Dtype::F32),
            a.all_reduce(Reducer::Min, &[vec![3, 0], vec![1, 2]]),
        ]
    });
    for (r, outputs) in outputs.iter().enumerate() {
        let pair = r / 2 * 2;
        let value = |r: usize| [r as f32 + 1.0, 10.0 * r as f32];
        assert_eq!(f32s(&outputs[0]), [10.0, 60.0]);
        assert_eq!(f32s(&outputs[1]), value(pair + 1));
        assert_eq!(f32s(&outputs[2]), [value(pair)[r % 2] + value(pair + 1)[r % 2]]);
        assert_eq!(f32s(&outputs[3]), [r as f32]);
        assert_eq!(f32s(&outputs[4]), value(if r == 0 || r == 3 { 0 } else { 1 }));
    }
}

#[test]
fn replicas_exchange_data() {
    let arguments: Vec<Tensor> =
        (0..4).map(|r| Tensor::f32(&[0.0, 1.0, 2.0, 3.0].map(|i| 10.0 * r as f32 + i), &[2, 2])).collect();
    let outputs = on_replicas(&arguments, |_, a| {
        let pairs = [vec![1, 0], vec![2, 3]];
        vec![
            a.all_gather(0, &pairs),
            a.all_gather(1, &[vec![0, 1, 2, 3]]),
            a.all_to_all(0, 1, &pairs),
            a.all_to_all(1, 1, &pairs),
            a.collective_permute(&[(0, 1), (1, 2), (2, 0)]),
        ]
    });
    let value = |r: usize| [0.0, 1.0, 2.0, 3.0].map(|i| 10.0 * r as f32 + i);
    for (r, outputs) in outputs.iter().enumerate() {
        let group = if r < 2 { [1, 0] } else { [2, 3] };
        let [first, second] = group.map(value);
        assert_eq!((outputs[0].shape(), f32s(&outputs[0])), (&[4, 2][..], [first, second].concat()));
        let rows = |row: usize| (0..4).flat_map(move |r| value(r)[2 * row..2 * row + 2].to_vec());
        assert_eq!((outputs[1].shape(), f32s(&outputs[1])), (&[2, 8][..], rows(0).chain(rows(1)).collect()));
        let place = group.iter().position(|member| *member == r).unwrap();
        // This replica's row, or column, of each source.
        let row = [first, second].map(|v| [v[2 * place], v[2 * place + 1]]).concat();
        assert_eq!((outputs[2].shape(), f32s(&outputs[2])), (&[1, 4][..], row));
        let column = vec![first[place], second[place], first[2 + place], second[2 + place]];
        assert_eq!((outputs[3].shape(), f32s(&outputs[3])), (&[2, 2][..], column));
        let source = [Some(2), Some(0), Some(1), None][r];
        assert_eq!(f32s(&outputs[4]), source.map_or([0.0; 4], value));
    }
}

/// A result reuses the memory of a donated argument.
#[test]
fn aliases_share_memory() {
    let f = Builder::new();
    let (a, b) = (f.argument("a", ty(Dtype::F32, &[4])), f.argument("b", ty(Dtype::F32, &[4])));
    f.alias(&b, 0);
    let sum = &a + &b;
    let module = f.finish("sum", &[("sum", &sum)]).unwrap();
    let stats = device::compile(&module).executable().memory_stats().unwrap();
    assert_eq!(stats.alias, 16, "{stats:?}");
    let found =
        device::run_donating(&module, &[Tensor::f32(&[1.0; 4], &[4])], &[Tensor::f32(&[1.0, 2.0, 3.0, 4.0], &[4])]);
    assert_eq!(f32s(&found[0]), [2.0, 3.0, 4.0, 5.0]);
}
