//! The builder's errors.

use grpo_stablehlo::mosaic::{Affine, Builder, Reducer, Ref, Semantics, Space, Value, Window};
use grpo_stablehlo::{Dtype, TensorType};
use std::cell::RefCell;

/// Returns the error of a kernel with memories `[8, 128]` of f32 and of i32 in VMEM, and `[1, 2]` of i32 in SMEM.
fn error(build: impl FnOnce(&Builder, &Ref, &Ref, &Ref)) -> String {
    let k = Builder::new("wrong", &[(4, Semantics::Parallel)]);
    let window = || Window::new([8, 128], [Affine::grid(0), Affine::constant(0)]);
    let x = k.input(TensorType::new(Dtype::F32, [32, 128]), window());
    let n = k.input(TensorType::new(Dtype::I32, [32, 128]), window());
    let out = k.output(TensorType::new(Dtype::F32, [32, 128]), window());
    let scalars = k.scratch(TensorType::new(Dtype::I32, [1, 2]), Space::Smem);
    out.store_all(&x.load_all());
    build(&k, &x, &n, &scalars);
    let error = k.finish().expect_err("an error").to_string();
    let (what, place) = error.split_once(" (built at ").expect("a place");
    assert!(place.contains("errors.rs:"), "{error}");
    what.into()
}

#[test]
fn elementwise() {
    let say = |build: fn(&Value, &Value) -> Value| {
        error(|_, x, n, _| {
            build(&x.load_all(), &n.load_all());
        })
    };
    assert_eq!(
        say(|x, n| x + n),
        "arith.add: operands of one type expected, got tensor<8x128xf32> and tensor<8x128xi32>"
    );
    assert_eq!(say(|_, n| n.exp()), "math.exp: not defined for tensor<8x128xi32>");
    assert_eq!(say(|x, _| x & x), "arith.and: not defined for tensor<8x128xf32>");
    assert_eq!(say(|x, _| x.ne(x)), "arith.cmp: Ne is not defined for tensor<8x128xf32>");
    assert_eq!(
        say(|x, n| n.select(x, x)),
        "arith.select: a predicate of the shape of tensor<8x128xf32> expected, got tensor<8x128xi32>"
    );
    assert_eq!(say(|_, n| n.convert(Dtype::Bf16)), "arith.convert: no conversion of tensor<8x128xi32> to bf16");
    assert_eq!(say(|x, _| x.like(1)), "arith.constant: Int(1) is no f32");
}

#[test]
fn shapes() {
    let say = |build: fn(&Value) -> Value| {
        error(|_, x, _, _| {
            build(&x.load_all());
        })
    };
    assert_eq!(say(|x| x.broadcast(&[16, 128])), "vector.broadcast: tensor<8x128xf32> to tensor<16x128xf32>");
    assert_eq!(say(|x| x.reshape(&[8, 127])), "vector.shape_cast: tensor<8x128xf32> to tensor<8x127xf32>");
    assert_eq!(
        say(|x| x.reduce(Reducer::Add, 2)),
        "vector.multi_reduction: dimension 2 of tensor<8x128xf32>, which should be of f32"
    );
    assert_eq!(
        say(|x| x.slice(&[4, 0], &[8, 128])),
        "vector.extract_strided_slice: [8, 128] at [4, 0] of tensor<8x128xf32>"
    );
    assert_eq!(
        say(|x| x.reshape(&[1, 8, 128]).transpose()),
        "tpu.transpose: a matrix expected, got tensor<1x8x128xf32>"
    );
}

#[test]
fn sizes_that_overflow() {
    let huge = [usize::MAX, 4];
    let size = "a size between 1 and 2^31 - 1 expected, got tensor<18446744073709551615x4x";
    assert_eq!(error(|k, _, _, _| drop(k.iota(0, &huge))), format!("tpu.iota: {size}i32>"));
    assert_eq!(error(|_, x, _, _| drop(x.load_all().reshape(&huge))), format!("vector.shape_cast: {size}f32>"));
    assert_eq!(
        error(|k, _, _, _| drop(k.scratch(TensorType::new(Dtype::F32, huge), Space::Vmem))),
        format!("scratch_operands: {size}f32>")
    );
    let sliced = error(|_, x, _, _| drop(x.load_all().slice(&[usize::MAX, 0], &[1, 1])));
    assert!(sliced.starts_with("vector.extract_strided_slice: [1, 1] at [18446744073709551615, 0]"), "{sliced}");
    let double = error(|k, _, _, _| drop(k.splat(1.0, TensorType::new(Dtype::F64, [1]))));
    assert_eq!(double, "arith.constant: elements of f32, bf16, i32 or i1 expected, got tensor<1xf64>");
}

#[test]
fn memories() {
    assert_eq!(
        error(|_, x, _, _| drop(x.load(&[8.into(), 0.into()], &[1, 128]))),
        "vector.load: 8 + 1 entries of dimension 0 of tensor<8x128xf32>"
    );
    assert_eq!(
        error(|_, x, _, _| drop(x.load(&[0.into()], &[8, 128]))),
        "vector.load: 1 offsets into tensor<8x128xf32>"
    );
    assert_eq!(
        error(|_, x, _, s| drop((x, s.load(&[0.into(), 0.into()], &[1, 1])))),
        "vector.load: SMEM holds scalars and VMEM vectors; got shape [1, 1] in Smem"
    );
    assert_eq!(
        error(|_, x, n, _| drop(x.load(&[(&n.load_all()).into(), 0.into()], &[1, 128]))),
        "vector.load: an offset should be an i32 scalar, got tensor<8x128xi32>"
    );
    assert_eq!(
        error(|_, x, n, _| x.store_all(&n.load_all())),
        "tpu.vector_store: a value of f32 expected, got tensor<8x128xi32>"
    );
    assert_eq!(
        error(|k, x, _, _| x.store_all(&k.splat(1.0, TensorType::new(Dtype::F32, [8, 64])))),
        "tpu.vector_store: a value of tensor<8x128xf32> expected, got tensor<8x64xf32>"
    );
    assert_eq!(
        error(|k, x, n, _| k.alias(n, x)),
        "output_operand_aliases: an output and an input of one type expected, got tensor<8x128xi32> and tensor<8x128xf32>"
    );
}

#[test]
fn windows_and_grids() {
    let window = |block: [usize; 2], index: Affine| {
        error(|k, _, _, _| {
            drop(k.output(TensorType::new(Dtype::F32, [32, 300]), Window::new(block, [index, Affine::constant(0)])))
        })
    };
    // Scratch was declared before, but the check of the block comes first.
    assert_eq!(
        window([8, 100], Affine::grid(0)),
        "window_params: block 100 in dimension 1 of tensor<32x300xf32> should be 300 or a multiple of 128"
    );
    assert_eq!(
        window([12, 128], Affine::grid(0)),
        "window_params: block 12 in dimension 0 of tensor<32x300xf32> should be 32 or a multiple of 8"
    );
    assert_eq!(window([8, 128], Affine::grid(1)), "window_params: dimension 1 of a grid of 1 dimensions");
    assert_eq!(window([8, 128], Affine::grid(0)), "window_params: inputs come first, then outputs, then scratch");
    assert_eq!(error(|k, _, _, _| drop(k.program_id(1))), "program_id: dimension 1 of the grid");
    let empty = Builder::new("empty", &[(0, Semantics::Parallel)]).finish().expect_err("an error").to_string();
    assert!(
        empty.starts_with("iteration_bounds: a grid of i32 sizes above 0 expected, got [(0, Parallel)]"),
        "{empty}"
    );
    let nothing = Builder::new("nothing", &[(1, Semantics::Parallel)]).finish().expect_err("an error").to_string();
    assert!(nothing.starts_with("func.return: a kernel without outputs"), "{nothing}");
}

#[test]
fn values_do_not_leave_their_block_or_kernel() {
    let kept = RefCell::new(None);
    let left = error(|k, x, _, _| {
        k.repeat(2, |i| *kept.borrow_mut() = Some(i + i));
        let offset = kept.borrow().clone().expect("a value");
        x.load(&[(&offset).into(), 0.into()], &[1, 128]);
    });
    assert_eq!(left, "vector.load: a tensor<i32> of a block that is closed");
    let other = Builder::new("other", &[(1, Semantics::Parallel)]).scalar(1);
    assert_eq!(error(|k, _, _, _| drop(k.scalar(1) + &other)), "arith.add: a tensor<i32> of another kernel");
    assert_eq!(
        error(|k, x, _, _| k.when(&x.load_all().lt(&x.load_all()), || {})),
        "scf.if: a scalar predicate expected, got tensor<8x128xi1>"
    );
}
