//! Compares interpreted kernels with plain Rust.

use super::kernels::*;
use crate::interpret::cases::i32s;
use grpo_stablehlo::mosaic::{Affine, Builder, Kernel, Semantics, Space, Window, interpret};
use grpo_stablehlo::{Array, Dtype, Result, TensorType};

fn floats(shape: [usize; 2], f: impl Fn(usize) -> f32) -> Array {
    Array::floats(Dtype::F32, shape, (0..shape[0] * shape[1]).map(|i| f(i).into())).expect("a tensor")
}

/// Returns the first result, which is rounded to f32.
fn run(kernel: &Result<Kernel>, inputs: &[Array]) -> Result<Vec<f32>> {
    let found = interpret(kernel.as_ref().expect("a kernel"), inputs)?.remove(0).to_floats();
    assert!(found.iter().all(|x| x.is_nan() || f64::from(*x as f32) == *x));
    Ok(found.into_iter().map(|x| x as f32).collect())
}

#[test]
fn scratch_accumulates_over_blocks_and_a_mask_hides_the_edge() {
    let z = |i: usize| ((i * 7919) % 1009) as f32 - 2000.0;
    let found = run(&row_max(true), &[floats([20, 300], z)]).expect("it runs");
    for (row, found) in found.chunks(128).enumerate() {
        let expected = (row * 300..(row + 1) * 300).map(z).fold(f32::NEG_INFINITY, f32::max);
        assert_eq!(found, [expected; 128], "row {row}");
    }
}

#[test]
fn a_forgotten_mask_shows_as_nan() {
    let found = run(&row_max(false), &[floats([20, 300], |i| i as f32)]).expect("it runs");
    assert!(found.iter().all(|x| x.is_nan()));
}

#[test]
fn elementwise_operations_match_rust() {
    let x = |i: usize| (i as f32 - 500.0) * 0.0173;
    let y = |i: usize| if i.is_multiple_of(5) { x(i) } else { 3.0 - (i % 17) as f32 * 0.4 };
    let n = |i: usize| (i as i32 - 300) % 131;
    let ints = i32s(&[8, 128], &(0..1024).map(|i| n(i).into()).collect::<Vec<_>>());
    let found = run(&arithmetic(), &[floats([8, 128], x), floats([8, 128], y), ints]).expect("it runs");
    assert_eq!(found.len(), 1024 * FORMULAS.len());
    for (i, (found, (_, expected))) in found.chunks(1024).zip(FORMULAS).enumerate() {
        for (j, found) in found.iter().enumerate() {
            let expected = expected(x(j), y(j), n(j), x(j) < y(j));
            assert!(found == &expected || found.is_nan() && expected.is_nan(), "{i}, {j}: {found} {expected}");
        }
    }
}

#[test]
fn loops_scalars_and_moves() {
    let x = |i: usize| (i % 1013) as f32;
    let scalars = i32s(&[1, 2], &[3, 5]);
    let found = run(&movement(), &[scalars.clone(), floats([256, 128], x)]).expect("it runs");
    assert!(found[..16 * 128].iter().all(|x| x.is_nan()), "the first block is never written");
    for (row, found) in found[16 * 128..].chunks(128).enumerate() {
        let from = (3 + row / 8 * 5) * 8 + row % 8;
        let sum: f32 = (0..64).map(|j| x(from * 128 + j)).sum();
        let expected: Vec<f32> = (0..128).map(|j| x(from * 128 + j) + sum).collect();
        assert_eq!(found, expected, "row {row}");
    }
    let beyond = i32s(&[1, 2], &[30, 5]);
    let error = run(&movement(), &[beyond, floats([256, 128], x)]).expect_err("row 280 of 256");
    assert!(error.to_string().contains("8 entries at Some(280) of tensor<256x128xf32>"), "{error}");
}

#[test]
fn aliased_outputs_start_as_their_input_and_bf16_is_rounded() {
    let x = |i: usize| half::bf16::from_f32(i as f32 * 0.37).to_f32();
    let input = Array::floats(Dtype::Bf16, [20, 300], (0..6000).map(|i| x(i).into())).expect("a tensor");
    let found = run(&in_place(), &[input]).expect("it runs");
    for (i, found) in found.into_iter().enumerate() {
        // The window visits column blocks 0 and 2, not 1.
        let expected = if (i % 300) / 128 == 1 { x(i) } else { half::bf16::from_f32(x(i) / 3.0).to_f32() };
        assert_eq!(found, expected, "{i}");
    }
}

/// A kernel on a grid of 2 x 2 that reads scratch of other points, or overwrites block `index`.
fn careless(semantics: Semantics, index: Affine) -> Result<Kernel> {
    let k = Builder::new("careless", &[(2, semantics), (2, Semantics::Arbitrary)]);
    let out = k.output(TensorType::new(Dtype::F32, [16, 128]), Window::new([8, 128], [index, Affine::constant(0)]));
    let scratch = k.scratch(TensorType::new(Dtype::F32, [8, 128]), Space::Vmem);
    let first = k.program_id(0).eq(&k.scalar(0)) & k.program_id(1).eq(&k.scalar(0));
    k.when(&first, || scratch.store_all(&k.splat(1.0, scratch.ty().clone())));
    out.store_all(&scratch.load_all());
    k.finish()
}

#[test]
fn undefined_behaviour_is_refused_or_poisoned() {
    let ordered = run(&careless(Semantics::Arbitrary, Affine::grid(0)), &[]).expect("it runs");
    assert_eq!(ordered, [1.0; 2048]);
    let parallel = run(&careless(Semantics::Parallel, Affine::grid(0)), &[]).expect("it runs");
    assert!(parallel[..1024].iter().all(|x| *x == 1.0) && parallel[1024..].iter().all(|x| x.is_nan()));
    let again = run(&careless(Semantics::Arbitrary, Affine::grid(1)), &[]).expect_err("blocks 0, 1, 0, 1");
    assert!(again.to_string().contains("block [0, 0] of output 0 is visited again"), "{again}");
}

#[test]
fn inputs_of_other_types_are_refused() {
    let error = run(&row_max(true), &[floats([20, 301], |_| 0.0)]).expect_err("301 columns");
    assert!(error.to_string().contains("(tensor<20x300xf32>) expected, got (tensor<20x301xf32>)"), "{error}");
}
