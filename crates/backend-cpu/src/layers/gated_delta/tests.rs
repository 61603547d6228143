//! Compares the chunks with the recurrence in f64, and gradients with central differences of it.

use super::*;
use crate::layers::tests::{all_layers, assert_close, differences, noise, wide};

const HEADS: DeltaHeads = DeltaHeads { key: 2, value: 4, key_width: 3, value_width: 2, taps: 4 };
/// One value head per key head, which is wider than a key, and a convolution over three rows.
const SINGLE: DeltaHeads = DeltaHeads { key: 3, value: 3, key_width: 2, value_width: 5, taps: 3 };

fn spans(of: &[(Range<usize>, Range<usize>)]) -> Vec<Span> {
    of.iter().map(|(rows, prefix)| Span { rows: rows.clone(), prefix: prefix.clone() }).collect()
}

/// Two prompts, one with three completions, one of them empty; a prompt of a row, whose completion reads rows before it.
fn short() -> (usize, Vec<Span>) {
    (
        15,
        spans(&[
            (0..5, 0..0),
            (5..8, 0..5),
            (8..8, 0..5),
            (8..10, 0..5),
            (10..13, 0..0),
            (13..14, 0..0),
            (14..15, 13..14),
        ]),
    )
}

/// Lengths below, at and above a chunk, and a completion of two chunks.
fn long() -> (usize, Vec<Span>) {
    (63 + 64 + 65 + 70, spans(&[(0..63, 0..0), (63..127, 0..0), (127..192, 0..0), (192..262, 127..192)]))
}

#[derive(Clone)]
struct Values {
    conv: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
}

impl Values {
    fn new(heads: DeltaHeads) -> Self {
        Self {
            conv: noise(heads.channels() * heads.taps, 11),
            a_log: noise(heads.value, 12),
            dt_bias: noise(heads.value, 13),
            norm: noise(heads.value_width, 14),
        }
    }

    fn weights(&self) -> DeltaWeights<'_> {
        let Self { conv, a_log, dt_bias, norm } = self;
        DeltaWeights { conv, a_log, dt_bias, norm, eps: 1e-6 }
    }
}

/// Computes the output in f64, row by row. `values` are x, then the convolution, a_log, dt_bias and the norm.
fn plain(values: &[f64], heads: DeltaHeads, n: usize, spans: &[Span]) -> Vec<f64> {
    let mut rest = values;
    let mut take = |count: usize| {
        let part;
        (part, rest) = rest.split_at(count);
        part
    };
    let x = take(n * heads.row());
    let (conv, a_log) = (take(heads.channels() * heads.taps), take(heads.value));
    let (dt_bias, norm) = (take(heads.value), take(heads.value_width));
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let (dk, dv, channels) = (heads.key_width, heads.value_width, heads.channels());
    let mut y = vec![0.0; n * heads.values()];
    for span in spans {
        let mut states = vec![vec![0.0; dk * dv]; heads.value];
        let rows: Vec<usize> = span.prefix.clone().chain(span.rows.clone()).collect();
        for (t, row) in rows.iter().enumerate() {
            let at = |row: usize| &x[row * heads.row()..(row + 1) * heads.row()];
            let mixed: Vec<f64> = (0..channels)
                .map(|channel| {
                    let tap = |tap: usize| {
                        let back = heads.taps - 1 - tap;
                        if back > t { 0.0 } else { conv[channel * heads.taps + tap] * at(rows[t - back])[channel] }
                    };
                    let sum: f64 = (0..heads.taps).map(tap).sum();
                    sum * sigmoid(sum)
                })
                .collect();
            for head in 0..heads.value {
                let k = head / (heads.value / heads.key);
                let normed = |first: usize| {
                    let vector = &mixed[first + k * dk..first + (k + 1) * dk];
                    let norm = (vector.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                    vector.iter().map(|x| x / norm).collect::<Vec<f64>>()
                };
                let (query, key) = (normed(0), normed(heads.key * dk));
                let value = &mixed[2 * heads.key * dk + head * dv..][..dv];
                let gates = &at(*row)[channels + head * dv..][..dv];
                let strength = sigmoid(at(*row)[channels + heads.values() + head]);
                let input = at(*row)[channels + heads.values() + heads.value + head] + dt_bias[head];
                let decay = (-a_log[head].exp() * input.exp().ln_1p()).exp();
                let state = &mut states[head];
                state.iter_mut().for_each(|s| *s *= decay);
                for j in 0..dv {
                    let read: f64 = (0..dk).map(|i| state[i * dv + j] * key[i]).sum();
                    (0..dk).for_each(|i| state[i * dv + j] += key[i] * strength * (value[j] - read));
                }
                let out: Vec<f64> = (0..dv)
                    .map(|j| (0..dk).map(|i| state[i * dv + j] * query[i]).sum::<f64>() / (dk as f64).sqrt())
                    .collect();
                let rms = (out.iter().map(|o| o * o).sum::<f64>() / dv as f64 + 1e-6).sqrt();
                let to = &mut y[row * heads.values() + head * dv..][..dv];
                for j in 0..dv {
                    to[j] = norm[j] * out[j] / rms * gates[j] * sigmoid(gates[j]);
                }
            }
        }
    }
    y
}

/// The largest difference of f32 values; outputs are divided by their rms, which may be small.
const TOLERANCE: f64 = 3e-5;

#[test]
fn chunks_match_the_recurrence_in_packed_sequences() {
    for (heads, (n, spans)) in [(HEADS, short()), (SINGLE, short()), (HEADS, long()), (SINGLE, long())] {
        let (x, values) = (noise(n * heads.row(), 1), Values::new(heads));
        let Values { conv, a_log, dt_bias, norm } = &values;
        let all = [&x, conv, a_log, dt_bias, norm].map(|part| wide(part)).concat();
        let expected = plain(&all, heads, n, &spans);
        for layers in all_layers() {
            let found = layers.gated_delta_net(&x, heads, values.weights(), &spans).unwrap();
            assert_close(&found, &expected, TOLERANCE);
        }
    }
}

#[test]
fn gradients_match_differences_of_the_recurrence() {
    let longer = (80, spans(&[(0..66, 0..0), (66..80, 0..66)]));
    for (heads, (n, spans)) in [(HEADS, short()), (SINGLE, short()), (HEADS, longer)] {
        let (x, values, dy) = (noise(n * heads.row(), 1), Values::new(heads), noise(n * heads.values(), 2));
        let Values { conv, a_log, dt_bias, norm } = &values;
        let all = [&x[..], conv, a_log, dt_bias, norm].concat();
        let expected = differences(&all, &dy, |all| plain(all, heads, n, &spans));
        for layers in all_layers() {
            let found = layers.gated_delta_net_grad(&x, heads, values.weights(), &spans, &dy).unwrap();
            let mut rest = &expected[..];
            for part in [&found.dx, &found.dconv, &found.da_log, &found.ddt_bias, &found.dnorm] {
                let expected_part;
                (expected_part, rest) = rest.split_at(part.len());
                assert_close(part, expected_part, 1e-3);
            }
            assert!(rest.is_empty());
        }
    }
}

#[test]
fn continued_sequences_match_whole_ones() {
    for heads in [HEADS, SINGLE] {
        let (row, values) = (heads.row(), Values::new(heads));
        // Prompts of two rows and of more than a chunk, then steps of one row, of none, and of more than a chunk.
        let prompts = spans(&[(0..2, 0..0), (2..72, 0..0)]);
        let steps = [[1, 1], [1, 1], [0, 1], [3, 70], [67, 1]];
        for layers in all_layers() {
            let mut parts = [noise(2 * row, 3), noise(70 * row, 4)];
            let (y, mut states) =
                layers.gated_delta_net_states(&parts.concat(), heads, values.weights(), &prompts).unwrap();
            let mut found = [y[..2 * heads.values()].to_vec(), y[2 * heads.values()..].to_vec()];
            for (number, lengths) in steps.into_iter().enumerate() {
                let new = [0, 1].map(|i| noise(lengths[i] * row, 20 + 2 * number as u64 + i as u64));
                let mut step_states: Vec<&mut DeltaState> = states.iter_mut().collect();
                let y = layers
                    .gated_delta_net_continued(&new.concat(), heads, values.weights(), &lengths, &mut step_states)
                    .unwrap();
                let (first, second) = y.split_at(lengths[0] * heads.values());
                found[0].extend_from_slice(first);
                found[1].extend_from_slice(second);
                (0..2).for_each(|i| parts[i].extend_from_slice(&new[i]));
            }
            for (x, found) in parts.iter().zip(&found) {
                let n = x.len() / row;
                let Values { conv, a_log, dt_bias, norm } = &values;
                let all = [x, conv, a_log, dt_bias, norm].map(|part| wide(part)).concat();
                assert_close(found, &plain(&all, heads, n, &spans(&[(0..n, 0..0)])), TOLERANCE);
            }
        }
    }
}

#[test]
fn empty_spans_have_no_output_and_the_first_state() {
    let (layers, values) = (Layers::new(), Values::new(HEADS));
    let (y, states) =
        layers.gated_delta_net_states(&[], HEADS, values.weights(), &spans(&[(0..0, 0..0), (0..0, 0..0)])).unwrap();
    assert_eq!((y.len(), states), (0, vec![DeltaState::new(HEADS); 2]));
}

#[test]
fn errors_name_the_argument() {
    let (layers, values) = (Layers::new(), Values::new(HEADS));
    let of = |x: &[f32], heads: DeltaHeads, spans: &[Span]| {
        layers.gated_delta_net(x, heads, values.weights(), spans).unwrap_err().to_string()
    };
    let x = noise(3 * HEADS.row(), 1);
    let text = of(&x, HEADS, &spans(&[(0..2, 0..0), (2..3, 0..1)]));
    assert!(text.contains("spans") && text.contains("prefix"), "{text}");
    let text = of(&x, HEADS, &spans(&[(0..1, 0..0), (1..2, 0..1), (2..3, 1..2)]));
    assert!(text.contains("an earlier span without a prefix"), "{text}");
    let text = of(&x, HEADS, &spans(&[(0..2, 0..0)]));
    assert!(text.contains('x') && text.contains("[2, 36]"), "{text}");
    let text = of(&x, DeltaHeads { value: 3, ..HEADS }, &spans(&[(0..3, 0..0)]));
    assert!(text.contains("heads") && text.contains("multiple"), "{text}");
    let text = of(&x, DeltaHeads { taps: 3, ..HEADS }, &spans(&[(0..3, 0..0)]));
    assert!(text.contains("conv"), "{text}");
    let mut short = DeltaState::new(DeltaHeads { taps: 2, ..HEADS });
    let text =
        layers.gated_delta_net_continued(&x, HEADS, values.weights(), &[3], &mut [&mut short]).unwrap_err().to_string();
    assert!(text.contains("window"), "{text}");
}
