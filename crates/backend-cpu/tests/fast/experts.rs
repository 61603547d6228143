//! Mixtures of experts against sums over the experts of each token in f64. Gradients are compared with torch in policy-cpu.

use grpo_backend_cpu::layers::{Activation, ExpertAdapter, ExpertMatrix, ExpertWeights, Layers};

const TOKENS: usize = 7;
const EXPERTS: usize = 5;
const TOP: usize = 2;
const HIDDEN: usize = 6;
const WIDTH: usize = 4;

/// Returns numbers between -1 and 1.
fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 + seed * 104_729) % 1013) as f32 / 506.5 - 1.0).collect()
}

fn weights(values: &[f32], dims: [usize; 2]) -> ExpertWeights<'_> {
    let matrices = values.chunks_exact(dims[0] * dims[1]).map(ExpertMatrix::Plain).collect();
    ExpertWeights { matrices, biases: None, adapter: None, dims }
}

/// Returns the product of a row `[I]` and a matrix `[I, O]`.
fn product(row: &[f64], matrix: &[f32], output: usize) -> Vec<f64> {
    (0..output).map(|o| row.iter().enumerate().map(|(i, x)| x * f64::from(matrix[i * output + o])).sum()).collect()
}

#[test]
fn outputs_are_weighted_sums_over_the_experts_of_each_token() {
    let (x, logits) = (numbers(TOKENS * HIDDEN, 1), numbers(TOKENS * EXPERTS, 2));
    let gate_up = numbers(EXPERTS * HIDDEN * 2 * WIDTH, 3);
    let down = numbers(EXPERTS * WIDTH * HIDDEN, 4);
    let layers = Layers::new();
    for normalised in [true, false] {
        let routing = layers.route(&logits, EXPERTS, TOP, normalised).unwrap();
        let [of_gate_up, of_down] = [weights(&gate_up, [HIDDEN, 2 * WIDTH]), weights(&down, [WIDTH, HIDDEN])];
        let (y, _) = layers.experts(&x, &routing, &of_gate_up, &of_down, Activation::Silu).unwrap();
        assert_eq!(y.len(), TOKENS * HIDDEN);
        for token in 0..TOKENS {
            let logits: Vec<f64> = logits[token * EXPERTS..][..EXPERTS].iter().map(|z| f64::from(*z)).collect();
            let mut order: Vec<usize> = (0..EXPERTS).collect();
            order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
            let all = if normalised { &order[..TOP] } else { &order[..] };
            let sum: f64 = all.iter().map(|expert| logits[*expert].exp()).sum();
            let row: Vec<f64> = x[token * HIDDEN..][..HIDDEN].iter().map(|x| f64::from(*x)).collect();
            let mut expected = vec![0.0; HIDDEN];
            for expert in &order[..TOP] {
                let both = product(&row, &gate_up[expert * HIDDEN * 2 * WIDTH..], 2 * WIDTH);
                let mixed: Vec<f64> =
                    (0..WIDTH).map(|i| both[i] / (1.0 + (-both[i]).exp()) * both[WIDTH + i]).collect();
                let out = product(&mixed, &down[expert * WIDTH * HIDDEN..], HIDDEN);
                expected.iter_mut().zip(out).for_each(|(y, out)| *y += logits[*expert].exp() / sum * out);
            }
            for (found, expected) in y[token * HIDDEN..].iter().zip(expected) {
                assert!((f64::from(*found) - expected).abs() < 1e-5, "token {token}: {found} {expected}");
            }
        }
    }
}

#[test]
fn matrices_that_do_not_fit_are_errors() {
    let (layers, x) = (Layers::new(), numbers(TOKENS * HIDDEN, 1));
    let routing = layers.route(&numbers(TOKENS * EXPERTS, 2), EXPERTS, TOP, true).unwrap();
    let numbers = numbers(EXPERTS * 8 * 8, 3);
    let of = |[input, output]: [usize; 2]| weights(&numbers[..EXPERTS * input * output], [input, output]);
    for (gate_up, down) in [
        ([HIDDEN, 8], [4, HIDDEN + 1]),
        ([HIDDEN, 8], [3, HIDDEN]),
        ([HIDDEN, 7], [4, HIDDEN]),
        ([HIDDEN - 1, 8], [4, HIDDEN - 1]),
    ] {
        let error = layers.experts(&x, &routing, &of(gate_up), &of(down), Activation::Silu).unwrap_err();
        assert!(matches!(error, grpo_core::Error::Shape { .. }), "{gate_up:?} {down:?}: {error}");
    }
    let few = ExpertWeights { matrices: of([HIDDEN, 8]).matrices.drain(..2).collect(), ..of([HIDDEN, 8]) };
    assert!(layers.experts(&x, &routing, &few, &of([4, HIDDEN]), Activation::Silu).is_err());
    let short = ExpertWeights { dims: [HIDDEN, 6], ..of([HIDDEN, 8]) };
    assert!(layers.experts(&x, &routing, &short, &of([3, HIDDEN]), Activation::Silu).is_err());
}

/// Adds `scale` A^T B^T of every expert to its matrix `[in, out]`.
fn merged(values: &[f32], adapter: &ExpertAdapter<'_>, [input, output]: [usize; 2]) -> Vec<f32> {
    let rank = adapter.rank;
    let delta = |expert: usize, i: usize, o: usize| {
        let product =
            |j: usize| adapter.a[(expert * rank + j) * input + i] * adapter.b[(expert * output + o) * rank + j];
        adapter.scale * (0..rank).map(product).sum::<f32>()
    };
    let entry = |(at, value): (usize, &f32)| value + delta(at / (input * output), at / output % input, at % output);
    values.iter().enumerate().map(entry).collect()
}

/// Returns the gradients of A and B from those of the merged matrices.
fn adapter_grad(dmerged: &[f32], adapter: &ExpertAdapter<'_>, [input, output]: [usize; 2]) -> [Vec<f32>; 2] {
    let rank = adapter.rank;
    let (mut da, mut db) = (vec![0.0; adapter.a.len()], vec![0.0; adapter.b.len()]);
    for (at, dw) in dmerged.iter().enumerate() {
        let (expert, i, o) = (at / (input * output), at / output % input, at % output);
        for j in 0..rank {
            let (of_a, of_b) = ((expert * rank + j) * input + i, (expert * output + o) * rank + j);
            da[of_a] += adapter.scale * adapter.b[of_b] * dw;
            db[of_b] += adapter.scale * adapter.a[of_a] * dw;
        }
    }
    [da, db]
}

#[track_caller]
fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-5 * expected.abs().max(1.0), "{what}: {found} {expected}");
    }
}

#[test]
fn adapters_of_experts_equal_merged_matrices() {
    const RANK: usize = 3;
    let ([gate_up_dims, down_dims], layers) = ([[HIDDEN, 2 * WIDTH], [WIDTH, HIDDEN]], Layers::new());
    let size = |[input, output]: [usize; 2]| EXPERTS * input * output;
    let (x, dy) = (numbers(TOKENS * HIDDEN, 1), numbers(TOKENS * HIDDEN, 5));
    // One expert gets no token.
    let mut logits = numbers(TOKENS * EXPERTS, 2);
    logits.chunks_exact_mut(EXPERTS).for_each(|logits| logits[2] = -9.0);
    let routing = layers.route(&logits, EXPERTS, TOP, true).unwrap();
    assert_eq!(routing.loads()[2], 0);
    let values = [numbers(size(gate_up_dims), 3), numbers(size(down_dims), 4)];
    let a = [numbers(EXPERTS * RANK * HIDDEN, 6), numbers(EXPERTS * RANK * WIDTH, 7)];
    let b = [numbers(EXPERTS * RANK * 2 * WIDTH, 8), numbers(EXPERTS * RANK * HIDDEN, 9)];
    let adapter = |i: usize| ExpertAdapter { a: &a[i], b: &b[i], rank: RANK, scale: 0.5 };
    for [of_gate_up, of_down] in [[true, true], [true, false], [false, true]] {
        let matrices = |i: usize, is_adapted: bool, dims| ExpertWeights {
            adapter: is_adapted.then(|| adapter(i)),
            ..weights(&values[i], dims)
        };
        let [gate_up, down] = [matrices(0, of_gate_up, gate_up_dims), matrices(1, of_down, down_dims)];
        let (y, gates) = layers.experts(&x, &routing, &gate_up, &down, Activation::Silu).unwrap();
        let grad = layers.experts_grad(&x, &routing, &gate_up, &down, Activation::Silu, &gates, &dy, false).unwrap();
        let whole = |i: usize, is_adapted: bool, dims| {
            if is_adapted { merged(&values[i], &adapter(i), dims) } else { values[i].clone() }
        };
        let [of_merged, down_of_merged] = [whole(0, of_gate_up, gate_up_dims), whole(1, of_down, down_dims)];
        let [gate_up, down] = [weights(&of_merged, gate_up_dims), weights(&down_of_merged, down_dims)];
        let (expected, gates) = layers.experts(&x, &routing, &gate_up, &down, Activation::Silu).unwrap();
        assert_close("y", &y, &expected);
        let expected = layers.experts_grad(&x, &routing, &gate_up, &down, Activation::Silu, &gates, &dy, true).unwrap();
        assert_close("dx", &grad.dx, &expected.dx);
        assert_close("dweights", &grad.dweights, &expected.dweights);
        assert!(grad.dgate_up.is_empty() && grad.ddown.is_empty());
        for (is_adapted, found, dmerged, i, dims) in [
            (of_gate_up, &grad.dgate_up_adapter, &expected.dgate_up, 0, gate_up_dims),
            (of_down, &grad.ddown_adapter, &expected.ddown, 1, down_dims),
        ] {
            if is_adapted {
                let [da, db] = adapter_grad(dmerged, &adapter(i), dims);
                assert_close("dA", &found.da, &da);
                assert_close("dB", &found.db, &db);
            } else {
                assert!(found.da.is_empty() && found.db.is_empty());
            }
        }
    }
    let short =
        ExpertWeights { adapter: Some(ExpertAdapter { rank: 2, ..adapter(0) }), ..weights(&values[0], gate_up_dims) };
    let error = layers.experts(&x, &routing, &short, &weights(&values[1], down_dims), Activation::Silu).unwrap_err();
    assert!(error.to_string().contains("A of adapters"), "{error}");
}
