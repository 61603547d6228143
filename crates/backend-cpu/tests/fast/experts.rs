//! Mixtures of experts against sums over the experts of each token in f64. Gradients are compared with torch in policy-cpu.

use backend_cpu::layers::{Activation, ExpertMatrix, ExpertWeights, Layers};

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
    ExpertWeights { matrices, biases: None, dims }
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
