//! The AdamW program alone: weights split into bf16 and remainders give the same results as f32 weights, and so does the checked variant.

use crate::remainders::{bits, config, numbers, random, split_word};
use crate::support::{optimised, runtime};
use grpo_policy_pjrt::decoder::{Compute, Decoder};
use grpo_policy_pjrt::{Argument, TrainPrograms};
use grpo_stablehlo::{Dtype, Module, Save};
use half::bf16;

/// The state of an optimizer on the host: f32 weights and both moments.
#[derive(Clone, Debug, PartialEq)]
struct Masters {
    words: Vec<Vec<u32>>,
    first: Vec<Vec<u32>>,
    second: Vec<Vec<u32>>,
}

/// Runs one checked AdamW step with weights stored for dtype `dtype`; returns state and report. If the results are finite, it also asserts
/// that the unchecked program returns the same state.
fn step(dtype: Dtype, state: &Masters, gradients: &[Vec<f32>], numbers: [f32; 8]) -> (Masters, Vec<f32>) {
    let modules = TrainPrograms::new(Decoder::new(&config(), Compute::Bf16), Save::Carry).with_model_dtype(dtype);
    let (after, report) = run(&modules.optimizer_checked().unwrap(), dtype, state, gradients, numbers);
    let [_, within, finite, largest] = report[..] else { panic!("{report:?}") };
    if finite == 1.0 || within == 0.0 {
        let (unchecked, of_unchecked) = run(&modules.optimizer().unwrap(), dtype, state, gradients, numbers);
        assert!(unchecked == after, "checked and unchecked steps differ");
        assert_eq!((bits(&of_unchecked[..2]), of_unchecked[2]), (bits(&report[..2]), 1.0));
    }
    if finite == 1.0 && within == 1.0 {
        let sizes = |group: &[Vec<u32>], of: fn(f32) -> f32| {
            group.iter().flatten().map(|word| of(f32::from_bits(*word))).fold(0.0, f32::max)
        };
        let of_moments = sizes(&after.first, f32::abs).max(sizes(&after.second, f32::sqrt));
        assert_eq!(largest, sizes(&after.words, f32::abs).max(of_moments));
    }
    (after, report)
}

/// Runs one step of `module`.
fn run(
    module: &Module,
    dtype: Dtype,
    state: &Masters,
    gradients: &[Vec<f32>],
    numbers: [f32; 8],
) -> (Masters, Vec<f32>) {
    let table = Decoder::new(&config(), Compute::Bf16).trained();
    // With the optimisations that users' programs have, which affect rounding.
    let program = optimised().compile(module).unwrap();
    let floats = |words: &[u32], shape: &[usize]| {
        let values: Vec<f32> = words.iter().map(|word| f32::from_bits(*word)).collect();
        runtime().upload(&values, shape).unwrap()
    };
    let mut arguments = Vec::new();
    for (parameter, words) in table.iter().zip(&state.words) {
        match parameter.dtype(dtype) {
            Dtype::F32 => arguments.push(floats(words, &parameter.shape)),
            _ => {
                let (high, low): (Vec<bf16>, Vec<i16>) = words.iter().copied().map(split_word).unzip();
                arguments.push(runtime().upload(&high, &parameter.shape).unwrap());
                arguments.push(runtime().upload(&low, &parameter.shape).unwrap());
            }
        }
    }
    for moments in [&state.first, &state.second] {
        arguments.extend(table.iter().zip(moments).map(|(parameter, words)| floats(words, &parameter.shape)));
    }
    arguments.extend(table.iter().zip(gradients).map(|(p, sum)| runtime().upload(sum, &p.shape).unwrap()));
    arguments.push(runtime().upload(&numbers, &[8]).unwrap());
    let mut outputs = program.run(arguments.into_iter().map(Argument::from).collect()).unwrap().into_iter();
    let words = table.iter().map(|parameter| match parameter.dtype(dtype) {
        Dtype::F32 => bits(&outputs.next().unwrap().read::<f32>("a result").unwrap()),
        _ => {
            let high = outputs.next().unwrap().read::<bf16>("a result").unwrap();
            let low = outputs.next().unwrap().read::<i16>("a result").unwrap();
            let join = |(high, low): (bf16, i16)| (u32::from(high.to_bits()) << 16).wrapping_add(low as u32);
            high.into_iter().zip(low).map(join).collect()
        }
    });
    let words = words.collect();
    let rest: Vec<Vec<f32>> = outputs.map(|output| output.read("a result").unwrap()).collect();
    let [first, second, sums] = [0, 1, 2].map(|group| &rest[group * table.len()..][..table.len()]);
    assert!(sums.iter().flatten().all(|sum| *sum == 0.0));
    let words_of = |group: &[Vec<f32>]| group.iter().map(|values| bits(values)).collect();
    (Masters { words, first: words_of(first), second: words_of(second) }, rest[3 * table.len()].clone())
}

#[test]
fn split_weights_are_updated_like_f32_weights_bit_for_bit() {
    let table = Decoder::new(&config(), Compute::Bf16).trained();
    let mut random = random(1);
    let counts: Vec<usize> = table.iter().map(|p| p.shape.iter().product()).collect();
    let mut group = |size: f32| counts.iter().map(|count| numbers(&mut random, *count, size)).collect::<Vec<_>>();
    let words = group(0.05).iter().map(|values| bits(values)).collect();
    let zeros: Vec<Vec<u32>> = counts.iter().map(|count| vec![0; *count]).collect();
    let begun = Masters { words, first: zeros.clone(), second: zeros };
    let (mut narrow, mut wide) = (begun.clone(), begun.clone());
    // beta1, beta2, rate, root of the bias correction, epsilon, decay, clip, limit.
    let numbers = |count: i32| {
        let (rate, root) = (1e-5 / (1.0 - 0.9f32.powi(count)), (1.0 - 0.999f32.powi(count)).sqrt());
        [0.9, 0.999, rate, root, 1e-8, 1.0 - 1e-6, 1.0, f32::MAX]
    };
    for count in 1..=6 {
        let gradients = group(0.3);
        let (next, report) = step(Dtype::Bf16, &narrow, &gradients, numbers(count));
        let (expected, of_wide) = step(Dtype::F32, &wide, &gradients, numbers(count));
        assert_eq!((bits(&report), &report[1..3]), (bits(&of_wide), &[1.0, 1.0][..]));
        assert!(next == expected, "step {count}");
        (narrow, wide) = (next, expected);
    }
    // Steps too small for bf16 accumulate.
    let changed = |mask: u32| -> usize {
        let pairs = begun.words.iter().flatten().zip(narrow.words.iter().flatten());
        pairs.filter(|(before, after)| (**before ^ **after) & mask != 0).count()
    };
    let all: usize = counts.iter().sum();
    assert!(changed(u32::MAX) > all * 9 / 10 && changed(0xFFFF_0000) < all / 2, "{}", changed(0xFFFF_0000));

    // A rejected gradient changes nothing.
    let mut infinite = group(0.3);
    infinite[3][2] = f32::INFINITY;
    let (after, report) = step(Dtype::Bf16, &narrow, &infinite, numbers(7));
    assert!(after == narrow && report[1] == 0.0, "{report:?}");

    // Nor does a step whose weights would be infinite in bf16, although they are finite in f32.
    let (mut large, gradients) = (narrow.clone(), group(0.3));
    (large.words[2][5], large.first[2][5]) = (0x7F7F_7FFF, (-1.0_f32).to_bits());
    let mut far = numbers(7);
    (far[2], far[5]) = (1e33, 1.0);
    let (after, report) = step(Dtype::Bf16, &large, &gradients, far);
    assert!(after == large && report[1..3] == [1.0, 0.0], "{report:?}");
    let (after, report) = step(Dtype::F32, &large, &gradients, far);
    assert!(after != large && report[1..3] == [1.0, 1.0], "{report:?}");
    assert!(f32::from_bits(after.words[2][5]) > f32::from_bits(0x7F7F_8000));
}
