//! Weights in every packed and stored form: the bits of their products, and their bytes.

use super::{all_bf16_layers, all_layers, noise, used_memory};
use crate::arch::{Isa, IsaToken};
use crate::gemm::KAxis;
use crate::layers::linear::are_bf16;
use crate::layers::product::Operand;
use crate::layers::quantized::Quantized;
use crate::layers::{Add, Layers, StoredWeight};
use std::ops::Range;

/// Returns the bytes of a large packed weight of so many bf16 values with few exponents.
fn narrow_bytes(layers: &Layers, values: usize) -> Range<usize> {
    match layers.gemm.isa().get() >= Isa::Avx512 {
        // 12 bits per value, and some escaped groups.
        true => values / 2 * 3..values / 2 * 3 + values / 32,
        false => 2 * values..2 * values + 1,
    }
}

#[test]
fn bf16_weights_take_12_or_16_bits_per_value_beyond_the_cache() {
    let dims = [1024, 4096];
    let weight: Vec<f32> = noise(dims[0] * dims[1], 5);
    for layers in all_layers() {
        assert_eq!(layers.packed_bytes(dims, false), 4 * 1024 * 4096);
        assert_eq!(layers.pack_weight(&weight, dims).unwrap().bytes(), 4 * 1024 * 4096);
    }
    for layers in all_bf16_layers() {
        let bytes = layers.pack_weight(&weight, dims).unwrap().bytes();
        assert!(narrow_bytes(&layers, 1024 * 4096).contains(&bytes), "{bytes}: {layers:?}");
        assert!((bytes..bytes * 9 / 8).contains(&layers.packed_bytes(dims, true)), "{layers:?}");
        assert_eq!(layers.packed_bytes(dims, true), layers.packed_bytes(dims, false));
    }
}

#[test]
fn large_bf16_weights_in_less_memory_give_the_same_bits() {
    // Columns beyond the last whole panel, K beyond the last whole tile, and more rows than two panels of tiles.
    // The f32 values are beyond an L2 cache of at most 4 MiB.
    let (input, output) = (1100, 1010);
    let weight: Vec<f32> = noise(input * output, 7);
    for layers in all_bf16_layers() {
        let rhs = Operand::new(&weight, output, KAxis::Rows);
        let (words, packed) =
            (layers.packed_words(&rhs, [input, output]), layers.packed(&rhs, [input, output], || false));
        assert!(packed.bytes() < words.bytes() || layers.gemm.isa().get() < Isa::Avx512, "{layers:?}");
        for n in [1, 4, 5, 31, 33, 70] {
            let (x, residual) = (noise(n * input, 8), noise(n * output, 9));
            let add = if n % 2 == 0 { Add::Nothing } else { Add::Residual(&residual) };
            let expected = layers.linear_packed(&x, &words, add, n).unwrap();
            assert_eq!(layers.linear_packed(&x, &packed, add, n).unwrap(), expected, "{n} rows, {layers:?}");
        }
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn large_f32_weights_of_bf16_values_take_less_memory_and_give_the_same_bits() {
    // More than an L2 cache of at most 4 MiB, in several tasks of the check.
    let (input, output) = (700, 1600);
    let exact: Vec<f32> =
        noise(input * output, 5).into_iter().map(|value| half::bf16::from_f32(value).to_f32()).collect();
    let mut almost = exact.clone();
    // One bit of the last value.
    almost[input * output - 1] = f32::from_bits(almost[input * output - 1].to_bits() | 1);
    let turned = |w: &[f32]| (0..input * output).map(|at| w[at % input * output + at / input]).collect::<Vec<f32>>();
    for layers in all_layers() {
        for (weight, is_exact) in [(&exact, true), (&almost, false)] {
            let turned = turned(weight);
            let stored =
                StoredWeight::new(&[turned[..600 * input].into(), turned[600 * input..].into()], input).unwrap();
            let forms = [
                layers.pack_weight(weight, [input, output]).unwrap(),
                layers.pack_transposed(&turned, [output, input]).unwrap(),
                layers.pack_stored(&stored),
            ];
            let words = layers.packed_words(&Operand::new(weight, output, KAxis::Rows), [input, output]);
            assert_eq!(words.bytes(), layers.packed_bytes([input, output], false));
            for packed in &forms {
                let bytes = packed.bytes();
                match is_exact {
                    true => assert!(narrow_bytes(&layers, words.bytes() / 4).contains(&bytes), "{bytes}: {layers:?}"),
                    false => assert_eq!(bytes, words.bytes(), "{layers:?}"),
                }
                for n in [1, 2, 3, 4, 5, 13, 40] {
                    let x = noise(n * input, 6);
                    let expected = layers.linear_packed(&x, &words, Add::Nothing, n).unwrap();
                    assert_eq!(layers.linear_packed(&x, packed, Add::Nothing, n).unwrap(), expected, "{layers:?}");
                }
            }
        }
        // A small weight stays in words.
        let small = layers.pack_weight(&exact[..64 * 32], [64, 32]).unwrap();
        assert_eq!(small.bytes(), 4 * 64 * 32);
    }
}

#[test]
fn coded_weights_give_the_same_bits_with_any_exponents() {
    // K is three pieces of f32 words and two of bf16 pairs. A group has 4 entries of K and 32 columns.
    let dims @ [i, o] = [520, 200];
    let bf16 = |value: f32| half::bf16::from_f32(value).to_f32();
    let values: Vec<f32> = noise(i * o, 7).into_iter().map(bf16).collect();
    let with = |places: &mut dyn Iterator<Item = usize>, extremes: &[f32]| {
        let mut values = values.clone();
        places.zip(extremes.iter().cycle()).for_each(|(at, extreme)| values[at] = bf16(*extreme));
        values
    };
    let every = |step: usize| (step / 3..i * o).step_by(step);
    let extremes = [1e-30, -1e30, f32::MIN_POSITIVE, -1e-8];
    // In the first group, its neighbours along both axes, on both sides of the ends of pieces, in the last whole panel and in the last group.
    let places = [[0, 0], [5, 31], [2, 32], [191, 5], [192, 5], [287, 40], [288, 40], [519, 191], [519, 199]];
    let few = with(&mut places.iter().map(|[row, column]| row * o + column), &extremes);
    // Escaped are no groups, a few, and so many that the weight is not coded.
    let weights = [
        (values.clone(), true),
        (few, true),
        (with(&mut every(1999), &extremes), true),
        (with(&mut every(2), &[0.0, -0.0, f32::MIN_POSITIVE / 4.0]), true),
        (vec![0.0; i * o], true),
        (with(&mut every(7), &extremes), false),
    ];
    for layers in all_layers().chain(all_bf16_layers()) {
        let decodes = layers.linear.codes(i);
        for (at, (weight, is_coded)) in weights.iter().enumerate() {
            let rhs = Operand::new(weight, o, KAxis::Rows);
            let words = layers.packed_words(&rhs, dims);
            let narrow = layers.packed_narrow(&rhs, dims);
            if decodes {
                assert_eq!(
                    narrow.bytes() <= layers.linear.coded_bytes(layers.linear.rhs_words(o, i)),
                    *is_coded,
                    "{layers:?}"
                );
            }
            // Rows beyond a block decode its panels again, whichever values they have.
            let many = (at == 1).then_some(300);
            for n in [1, 4, 5, 12, 13, 30].into_iter().chain(many) {
                let x = noise(n * i, 6);
                let bits = |weight| {
                    let y = layers.linear_packed(&x, weight, Add::Nothing, n).unwrap();
                    y.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                assert!(bits(&narrow) == bits(&words), "{n}: {layers:?}");
            }
        }
        // Infinities and NaN reach the sums of their columns, and no others.
        let infinite = with(&mut every(1999), &[f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
        let rhs = Operand::new(&infinite, o, KAxis::Rows);
        let [narrow, words] = [layers.packed_narrow(&rhs, dims), layers.packed_words(&rhs, dims)]
            .map(|weight| layers.linear_packed(&vec![1.0; i], &weight, Add::Nothing, 1).unwrap());
        assert!(narrow.iter().zip(&words).all(|(a, b)| a == b || a.is_nan() && b.is_nan()), "{layers:?}");
        assert!(words.iter().any(|value| !value.is_finite()) && words.iter().any(|value| value.is_finite()));
    }
}

#[test]
fn values_with_lower_bits_are_no_bf16_values() {
    let isas = || IsaToken::available();
    let zeros = vec![-0.0_f32; (1 << 18) + 5000];
    for isa in isas() {
        assert!(are_bf16(isa, &[]) && are_bf16(isa, &[f32::NAN, f32::INFINITY, -1.5]) && are_bf16(isa, &zeros));
    }
    for at in [0, 4095, 4096, (1 << 18) - 1, 1 << 18, zeros.len() - 1] {
        for bits in [1, 0x8000] {
            let mut values = zeros.clone();
            values[at] = f32::from_bits(bits);
            assert!(isas().all(|isa| !are_bf16(isa, &values)), "{at} {bits}");
        }
    }
}

#[test]
fn stored_weights_give_the_same_bits() {
    // Matrices that end at, before and after the edges of panels and pieces.
    for (seed, (n, input, outputs)) in [
        (1, 2, vec![1, 1]),
        (5, 40, vec![32, 32]),
        (13, 300, vec![70, 16, 17]),
        (30, 33, vec![200, 3, 200, 1]),
        (300, 33, vec![99, 20]),
    ]
    .into_iter()
    .enumerate()
    {
        let output: usize = outputs.iter().sum();
        let seed = seed as u64;
        // Values that are exact in bf16.
        let rows: Vec<half::bf16> = noise(output * input, 60 + seed).into_iter().map(half::bf16::from_f32).collect();
        let wide: Vec<f32> = rows.iter().map(|x| x.to_f32()).collect();
        let turned: Vec<f32> = (0..input * output).map(|at| wide[at % output * input + at / output]).collect();
        let (mut narrow_parts, mut wide_parts, mut first) = (Vec::new(), Vec::new(), 0);
        for count in &outputs {
            let part = first * input..(first + count) * input;
            narrow_parts.push(grpo_core::TensorRef::from(&rows[part.clone()]));
            wide_parts.push(grpo_core::TensorRef::from(&wide[part]));
            first += count;
        }
        let (x, dy, bias) = (noise(n * input, 1 + seed), noise(n * output, 2 + seed), noise(output, 3));
        let add = Add::Rows(&bias);
        for layers in all_layers() {
            for parts in [&narrow_parts, &wide_parts] {
                let stored = StoredWeight::new(parts, input).unwrap();
                assert_eq!(stored.dims(), [input, output]);
                let y = layers.linear(&x, &turned, add, [n, input, output]).unwrap();
                assert_eq!(layers.linear_stored(&x, &stored, add, n).unwrap(), y);
                assert_eq!(layers.linear_packed(&x, &layers.pack_stored(&stored), add, n).unwrap(), y);
                // Both have bf16 values.
                let rhs = layers.stacked(&stored, KAxis::Columns);
                let halves = layers.packed_halves(&rhs, stored.dims());
                assert_eq!(2 * halves.bytes(), layers.packed_words(&rhs, stored.dims()).bytes());
                assert_eq!(layers.linear_packed(&x, &halves, add, n).unwrap(), y);
                let plain = layers.linear_packed(&x, &halves, Add::Nothing, n).unwrap();
                for memory in used_memory(n * output) {
                    assert_eq!(layers.linear_packed_in(memory.clone(), &x, &halves, Add::Nothing, n).unwrap(), plain);
                    assert_eq!(layers.linear_packed_in(memory, &x, &halves, add, n).unwrap(), y);
                }
                let dx = layers.linear_dx(&turned, &dy, [n, input, output]).unwrap();
                assert_eq!(layers.linear_stored_dx(&stored, &dy, n).unwrap(), dx);
            }
        }
    }
    // A product without terms.
    let empty = Layers::new().pack_weight(&[], [0, 3]).unwrap();
    let y = Layers::new().linear_packed_in(vec![f32::NAN; 6], &[], &empty, Add::Nothing, 2).unwrap();
    assert_eq!(y, [0.0; 6]);
    assert!(StoredWeight::new(&[(&[1.0_f32; 3]).into()], 2).is_err());
}

/// Blocks of 4-bit values begin anywhere in a row, and a matrix may have an odd number of values.
#[test]
fn quantised_weights_give_the_bits_of_their_dequantised_values() {
    let table: [f32; 16] = std::array::from_fn(|i| i as f32 * 0.3 - 2.0);
    for (seed, (n, input, outputs)) in
        [(1, 2, vec![1, 1]), (5, 40, vec![33, 32]), (13, 301, vec![71, 16, 17]), (300, 33, vec![99, 20])]
            .into_iter()
            .enumerate()
    {
        let (seed, output) = (seed as u64, outputs.iter().sum::<usize>());
        let codes: Vec<Vec<u8>> =
            outputs.iter().map(|rows| (0..rows * input).map(|i| (i * 37 % 251) as u8).collect()).collect();
        let nibbles: Vec<Vec<u8>> = (codes.iter())
            .map(|codes| codes.chunks(2).map(|pair| (pair[0] & 15) << 4 | pair.get(1).unwrap_or(&0) & 15).collect())
            .collect();
        let scales = |count: usize| noise(count, 70 + seed);
        let row_scales: Vec<Vec<f32>> = outputs.iter().map(|rows| scales(*rows)).collect();
        let block_scales: Vec<Vec<f32>> = outputs.iter().map(|rows| scales((rows * input).div_ceil(6))).collect();
        let int8: Vec<_> = (0..outputs.len())
            .map(|i| (Quantized::Int8 { codes: &codes[i], scales: &row_scales[i] }, outputs[i]))
            .collect();
        let int4: Vec<_> = (0..outputs.len())
            .map(|i| {
                let (codes, scales) = (&nibbles[i][..], &block_scales[i][..]);
                (Quantized::Int4 { codes, scales, table: &table, block: 6 }, outputs[i])
            })
            .collect();
        let values = |of: &dyn Fn(usize, usize) -> f32| {
            let all: Vec<f32> = (0..outputs.len())
                .flat_map(|i| (0..codes[i].len()).map(move |at| of(i, at)).collect::<Vec<_>>())
                .collect();
            (0..input * output).map(|at| all[at % output * input + at / output]).collect::<Vec<f32>>()
        };
        let int8_values = values(&|i, at| f32::from(codes[i][at] as i8) * row_scales[i][at / input]);
        let int4_values = values(&|i, at| table[usize::from(codes[i][at] & 15)] * block_scales[i][at / 6]);
        let (x, dy, bias) = (noise(n * input, 1 + seed), noise(n * output, 2 + seed), noise(output, 3));
        let (add, dims) = (Add::Rows(&bias), [n, input, output]);
        for layers in all_layers().chain(all_bf16_layers()) {
            for (parts, plain) in [(&int8, &int8_values), (&int4, &int4_values)] {
                let weight = StoredWeight::quantized(parts, input).unwrap();
                assert_eq!(weight.dims(), [input, output]);
                assert!(!weight.packs_narrow());
                let y = layers.linear(&x, plain, add, dims).unwrap();
                assert_eq!(layers.linear_stored(&x, &weight, add, n).unwrap(), y, "{layers:?}");
                assert_eq!(layers.linear_packed(&x, &layers.pack_stored(&weight), add, n).unwrap(), y, "{layers:?}");
                let dx = layers.linear_dx(plain, &dy, dims).unwrap();
                assert_eq!(layers.linear_stored_dx(&weight, &dy, n).unwrap(), dx, "{layers:?}");
            }
        }
    }
}

#[test]
fn quantised_weights_of_wrong_lengths_are_errors() {
    let int4 = |block| Quantized::Int4 { codes: &[0; 3], scales: &[1.0], table: &[0.0; 16], block };
    for (matrix, rows, words) in [
        (Quantized::Int8 { codes: &[0; 5], scales: &[1.0; 2] }, 2, "6 bytes"),
        (Quantized::Int8 { codes: &[0; 6], scales: &[1.0; 3] }, 2, "2 values"),
        (int4(64), 3, "5 bytes"),
        (int4(4), 2, "2 values"),
        (int4(3), 2, "an even number of values"),
    ] {
        let error = StoredWeight::quantized(&[(matrix, rows)], 3).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    assert_eq!(StoredWeight::quantized(&[(int4(6), 2)], 3).unwrap().dims(), [3, 2]);
}

/// Tests that take seconds: `cargo fast` skips modules of this name.
mod slow {
    use super::*;

    #[test]
    fn few_rows_have_the_bits_of_many_rows() {
        // Odd and even K in one and several pieces, a partial panel, and a weight that is divided among tasks.
        for (i, o) in [(1, 1), (33, 40), (300, 45), (515, 96), (1024, 512), (1030, 577), (4, 8)] {
            let (x, residual) = (noise(13 * i, 1), noise(13 * o, 2));
            let w: Vec<f32> = noise(i * o, 3).into_iter().map(|value| half::bf16::from_f32(value).to_f32()).collect();
            for layers in all_layers().chain(all_bf16_layers()) {
                let rhs = Operand::new(&w, o, KAxis::Rows);
                let mut forms = vec![layers.packed_words(&rhs, [i, o]), layers.packed_narrow(&rhs, [i, o])];
                if layers.linear.packs_f32() {
                    forms.push(layers.packed_halves(&rhs, [i, o]));
                }
                let all = layers.linear_packed(&x, &forms[0], Add::Residual(&residual), 13).unwrap();
                let plain = layers.linear_packed(&x, &forms[0], Add::Nothing, 13).unwrap();
                for (packed, n) in forms.iter().flat_map(|packed| [1, 2, 3, 4, 5].map(|n| (packed, n))) {
                    let add = Add::Residual(&residual[..n * o]);
                    let found = layers.linear_packed(&x[..n * i], packed, add, n).unwrap();
                    assert_eq!(found, all[..n * o], "{n} x {i} x {o}: {layers:?}");
                    let found = layers.linear_packed(&x[..n * i], packed, Add::Nothing, n).unwrap();
                    assert_eq!(found, plain[..n * o], "{n} x {i} x {o}: {layers:?}");
                }
            }
        }
    }
}
