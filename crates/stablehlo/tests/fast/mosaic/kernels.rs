//! Kernels for the other tests, which print, run and compile them; together they use every operation.

use grpo_stablehlo::mosaic::{Affine, Builder, Cost, Kernel, Reducer, Ref, Semantics, Space, Value, Window};
use grpo_stablehlo::{Dtype, Result, TensorType};

/// Returns a window that follows the first two dimensions of the grid.
pub(crate) fn tiles(rows: usize, columns: usize) -> Window {
    Window::new([rows, columns], [Affine::grid(0), Affine::grid(1)])
}

/// The maximum of every row of an f32 `[20, 300]`, repeated in 128 columns; `masked` ignores columns beyond 300.
pub(crate) fn row_max(masked: bool) -> Result<Kernel> {
    let k = Builder::new("row_max", &[(2, Semantics::Parallel), (3, Semantics::Arbitrary)]);
    let x = k.input(TensorType::new(Dtype::F32, [20, 300]), tiles(16, 128));
    let rows = Window::new([16, 128], [Affine::grid(0), Affine::constant(0)]);
    let out = k.output(TensorType::new(Dtype::F32, [20, 128]), rows);
    let running = k.scratch(TensorType::new(Dtype::F32, [16, 128]), Space::Vmem);

    let block = k.program_id(1);
    let nothing = k.splat(f64::NEG_INFINITY, running.ty().clone());
    k.when(&block.eq(&k.scalar(0)), || running.store_all(&nothing));
    let mut z = x.load_all();
    if masked {
        let column = (&block * k.scalar(128)).broadcast(&[16, 128]) + k.iota(1, &[16, 128]);
        z = column.lt(&column.like(300)).select(&z, &nothing);
    }
    running.store_all(&running.load_all().max(&z));
    k.when(&block.eq(&k.scalar(2)), || {
        out.store_all(&running.load_all().reduce(Reducer::Max, 1).broadcast(&[16, 128]));
    });
    k.finish()
}

/// A formula of [`arithmetic`]: the operations of the kernel on (x, y, n, p), and the expected result.
type Formula = (fn(&Value, &Value, &Value, &Value) -> Value, fn(f32, f32, i32, bool) -> f32);

/// x, y: f32, n: i32, p = x < y. bf16 values are x after rounding.
pub(crate) const FORMULAS: &[Formula] = &[
    (|x, y, _, _| x + y, |x, y, _, _| x + y),
    (|x, y, _, _| x - y, |x, y, _, _| x - y),
    (|x, y, _, _| x * y, |x, y, _, _| x * y),
    (|x, y, _, _| x / y, |x, y, _, _| x / y),
    (|x, y, _, _| x.max(y), |x, y, _, _| x.max(y)),
    (|x, y, _, _| x.min(y), |x, y, _, _| x.min(y)),
    (|x, _, _, _| -x, |x, _, _, _| -x),
    (|x, _, _, _| x.exp(), |x, _, _, _| f64::from(x).exp() as f32),
    (|x, _, _, _| x.exp2(), |x, _, _, _| f64::from(x).exp2() as f32),
    (|x, _, _, _| x.abs().log(), |x, _, _, _| f64::from(x).abs().ln() as f32),
    (|x, y, _, _| x.le(y).select(x, y), |x, y, _, _| if x <= y { x } else { y }),
    (|x, y, _, _| x.gt(y).select(x, &x.like(-1.5)), |x, y, _, _| if x > y { x } else { -1.5 }),
    (|x, y, _, _| x.ge(y).select(x, &x.like(1e-20)), |x, y, _, _| if x >= y { x } else { 1e-20 }),
    (|x, y, _, _| x.eq(y).select(x, y), |x, y, _, _| if x == y { x } else { y }),
    (|_, _, n, _| (n + n.like(3)).convert(Dtype::F32), |_, _, n, _| (n + 3) as f32),
    (|_, _, n, _| (n.like(3) - n).convert(Dtype::F32), |_, _, n, _| (3 - n) as f32),
    (|_, _, n, _| (n * n).convert(Dtype::F32), |_, _, n, _| (n * n) as f32),
    (|_, _, n, _| (n.max(&n.like(50)) / n.like(7)).convert(Dtype::F32), |_, _, n, _| (n.max(50) / 7) as f32),
    (|_, _, n, _| (n.min(&n.like(50)) & n.like(6)).convert(Dtype::F32), |_, _, n, _| (n.min(50) & 6) as f32),
    (|_, _, n, _| (n | n.like(9)).convert(Dtype::F32), |_, _, n, _| (n | 9) as f32),
    (|_, _, n, p| p.select(n, &n.like(-4)).convert(Dtype::F32), |_, _, n, p| if p { n as f32 } else { -4.0 }),
    (
        |x, _, n, p| (p & n.ne(&n.like(7)) | n.ge(&n.like(100))).select(x, &-x),
        |x, _, n, p| if (p & (n != 7)) | (n >= 100) { x } else { -x },
    ),
    (|_, _, _, p| p.convert(Dtype::I32).convert(Dtype::F32), |_, _, _, p| f32::from(u8::from(p))),
    (|x, _, _, _| x.convert(Dtype::I32).convert(Dtype::F32), |x, _, _, _| x as i32 as f32),
    (|x, _, _, _| x.convert(Dtype::Bf16).convert(Dtype::F32), |x, _, _, _| half::bf16::from_f32(x).to_f32()),
];

/// Computes all K formulas on x and y, f32 `[8, 128]`, and n, i32 `[8, 128]`. Each formula fills 8 rows of the result,
/// f32 `[8 K, 128]`.
pub(crate) fn arithmetic() -> Result<Kernel> {
    let k = Builder::new("arithmetic", &[(1, Semantics::Arbitrary)]);
    let whole = |rows| Window::new([rows, 128], [Affine::grid(0), Affine::constant(0)]);
    let input = |dtype| k.input(TensorType::new(dtype, [8, 128]), whole(8));
    let (x, y, n) = (input(Dtype::F32), input(Dtype::F32), input(Dtype::I32));
    let rows = 8 * FORMULAS.len();
    let out = k.output(TensorType::new(Dtype::F32, [rows, 128]), whole(rows));
    let [x, y, n] = [&x, &y, &n].map(Ref::load_all);
    let p = x.lt(&y);
    for (i, (formula, _)) in FORMULAS.iter().enumerate() {
        out.store(&[(8 * i).into(), 0.into()], &formula(&x, &y, &n, &p));
    }
    k.finish()
}

/// Takes two i32 scalars (first, step) and x, f32 `[256, 128]`. Reads the groups `first` and `first + step` of 8 rows,
/// and adds to each entry the sum of its row's left half. The result is the second half of an f32 `[32, 128]`.
pub(crate) fn movement() -> Result<Kernel> {
    let k = Builder::new("movement", &[(2, Semantics::Arbitrary)]);
    let all = |rows| Window::new([rows, 128], [Affine::constant(0), Affine::constant(0)]);
    let scalars =
        k.scalar_input(TensorType::new(Dtype::I32, [1, 2]), Window::new([1, 2], vec![Affine::constant(0); 2]));
    let x = k.input(TensorType::new(Dtype::F32, [256, 128]), all(256));
    let second = Window::new([16, 128], [Affine { constant: 1, terms: vec![] }, Affine::constant(0)]);
    let out = k.output(TensorType::new(Dtype::F32, [32, 128]), second);
    let counter = k.scratch(TensorType::new(Dtype::I32, [1, 1]), Space::Smem);

    let at = |i: usize| scalars.load(&[0.into(), i.into()], &[]);
    k.when(&k.program_id(0).eq(&k.scalar(0)), || counter.store(&[0.into(), 0.into()], &at(0)));
    k.when(&k.program_id(0).eq(&k.scalar(1)), || {
        k.repeat(2, |i| {
            let position = counter.load(&[0.into(), 0.into()], &[]);
            counter.store(&[0.into(), 0.into()], &(&position + at(1)));
            let rows = x.load(&[(&(position * k.scalar(8))).into(), 0.into()], &[8, 128]);
            let sums = rows.transpose().slice(&[0, 0], &[64, 8]).reduce(Reducer::Add, 0);
            let sums = sums.broadcast(&[128, 8]).transpose();
            let halves = rows.reshape(&[1, 8, 128]).reshape(&[8, 128]) + sums;
            out.store(&[(&(i * k.scalar(8))).into(), 0.into()], &halves);
        });
    });
    k.cost(Cost { flops: 1_000_000, bytes_accessed: 2_000_000, transcendentals: 3_000 });
    k.vmem_limit(8 << 20);
    k.has_side_effect();
    k.finish()
}

/// x / 3 of a bf16 `[20, 300]` in place, except for columns 128 to 255, which the window skips.
pub(crate) fn in_place() -> Result<Kernel> {
    let k = Builder::new("in_place", &[(2, Semantics::Parallel), (2, Semantics::Parallel)]);
    let ty = TensorType::new(Dtype::Bf16, [20, 300]);
    let window = Window::new([16, 128], [Affine::grid(0), Affine { constant: 0, terms: vec![(1, 2)] }]);
    let x = k.input(ty.clone(), window.clone());
    let out = k.output(ty, window);
    k.alias(&out, &x);
    let x = x.load_all().convert(Dtype::F32);
    out.store_all(&(&x / x.like(3.0)).convert(Dtype::Bf16));
    k.finish()
}
