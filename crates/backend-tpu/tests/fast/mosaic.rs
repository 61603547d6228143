//! Compares interpreted TPU kernels with f64, block by block.

use grpo_backend_tpu::mosaic::{COEFFICIENTS, KernelSpec, STATISTICS, dlogits_kernel, statistics_kernel};
use grpo_stablehlo::mosaic::interpret;
use grpo_stablehlo::{Array, Dtype};

/// Targets and logits that cover all kinds of rows, in a shape that is not a multiple of the blocks.
struct Case {
    spec: KernelSpec,
    targets: Vec<i32>,
    logits: Vec<f32>,
}

/// The kind of a row.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Trouble {
    None,
    NoTarget,
    Huge,
    Banned,
    Collapsed,
    OnlyTarget,
    NaN,
}

const TROUBLES: [Trouble; 7] = [
    Trouble::None,
    Trouble::NoTarget,
    Trouble::Huge,
    Trouble::Banned,
    Trouble::Collapsed,
    Trouble::OnlyTarget,
    Trouble::NaN,
];

/// Deterministic noise in [-1, 1).
fn noise(i: usize) -> f32 {
    let mut x = (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    ((x >> 40) as f32 / (1 << 23) as f32) - 1.0
}

impl Case {
    fn new(
        [batch, tokens, vocab]: [usize; 3],
        [time_block, vocab_block]: [usize; 2],
        dtype: Dtype,
        scale: f32,
    ) -> Self {
        let spec = KernelSpec { time_block, vocab_block, ..KernelSpec::new(batch, tokens, vocab, dtype, scale) };
        let (mut targets, mut logits) = (vec![], vec![]);
        for row in 0..batch * tokens {
            let trouble = Self::trouble(row);
            // Every block contains the target of some row.
            let y = (row * 131 + 3) % vocab;
            targets.push(if trouble == Trouble::NoTarget { -1 } else { y as i32 });
            for j in 0..vocab {
                let z = 5.0 * noise(row * vocab + j);
                let z = match trouble {
                    Trouble::None | Trouble::NoTarget => z,
                    Trouble::Huge => z * 2e3,
                    Trouble::Banned if j != y && j % 3 == 0 => f32::NEG_INFINITY,
                    Trouble::Collapsed if j == y => 60.0,
                    Trouble::OnlyTarget if j != y => f32::NEG_INFINITY,
                    Trouble::NaN if j == (y + 1) % vocab => f32::NAN,
                    _ => z,
                };
                logits.push(if dtype == Dtype::Bf16 { half::bf16::from_f32(z).to_f32() } else { z });
            }
        }
        Self { spec, targets, logits }
    }

    fn trouble(row: usize) -> Trouble {
        TROUBLES[row % TROUBLES.len()]
    }

    fn inputs(&self) -> (Array, Array) {
        let KernelSpec { batch, tokens, vocab, dtype, .. } = self.spec;
        let targets = Array::ints(Dtype::I32, [batch, 1, tokens], self.targets.iter().map(|y| i64::from(*y)));
        let logits = Array::floats(dtype, [batch, tokens, vocab], self.logits.iter().map(|z| f64::from(*z)));
        (targets.expect("a tensor"), logits.expect("a tensor"))
    }

    /// Returns the rows with their number: (row, target, logits).
    fn rows(&self) -> impl Iterator<Item = (usize, Option<usize>, &[f32])> {
        let target = |y: &i32| usize::try_from(*y).ok();
        let rows = self.targets.iter().map(target).zip(self.logits.chunks(self.spec.vocab));
        rows.enumerate().map(|(row, (y, z))| (row, y, z))
    }

    /// Returns element (row, i) of a tensor `[B, n, T]`.
    fn at(&self, values: &[f64], n: usize, row: usize, i: usize) -> f64 {
        let tokens = self.spec.tokens;
        values[(row / tokens * n + i) * tokens + row % tokens]
    }
}

/// Returns M, and (d_j, e_j) of every entry except for the target.
fn terms(z: &[f32], y: Option<usize>, scale: f32) -> (f64, Vec<(usize, f64, f64)>) {
    let others = || z.iter().enumerate().filter(|(j, _)| Some(*j) != y).map(|(j, z)| (j, f64::from(*z)));
    let max = others().map(|(_, z)| z).fold(f64::from(f32::MIN), f64::max);
    let term = |(j, z): (usize, f64)| {
        let d = f64::from(scale) * (z - max);
        (j, d, d.exp())
    };
    (max, others().map(term).collect())
}

fn cases() -> Vec<Case> {
    let mut cases = vec![];
    for (shape, blocks) in [
        ([1, 1, 7], [128, 128]),
        ([4, 9, 130], [128, 128]),
        ([1, 135, 1000], [128, 256]),
        ([2, 20, 1000], [128, 512]),
        ([4, 3, 768], [256, 384]),
    ] {
        for dtype in [Dtype::Bf16, Dtype::F32] {
            for scale in [1.0, 0.7] {
                cases.push(Case::new(shape, blocks, dtype, scale));
            }
        }
    }
    cases
}

#[test]
fn statistics_match_f64() {
    for case in cases() {
        let (targets, logits) = case.inputs();
        let kernel = statistics_kernel(&case.spec).expect("a kernel");
        let found = interpret(&kernel, &[targets, logits]).expect("it runs").remove(0).to_floats();
        for (row, y, z) in case.rows() {
            let what = format!("{:?}, row {row}: {:?}", case.spec, Case::trouble(row));
            let [max, sum, dot, target] = std::array::from_fn(|i| case.at(&found, STATISTICS, row, i));
            assert_eq!(target, y.map_or(0.0, |y| z[y].into()), "{what}");
            if Case::trouble(row) == Trouble::NaN && z.len() > 1 {
                assert!(sum.is_nan(), "{what}: a NaN must not be hidden in {sum}");
                continue;
            }
            let (expected_max, terms) = terms(z, y, case.spec.logit_scale);
            let expected_sum: f64 = terms.iter().map(|(_, _, e)| e).sum();
            let expected_dot: f64 = terms.iter().map(|(_, d, e)| if *e == 0.0 { 0.0 } else { e * d }).sum();
            assert_eq!(max, expected_max, "{what}");
            assert!((sum - expected_sum).abs() <= 3e-6 * expected_sum, "{what}: {sum} {expected_sum}");
            assert!((dot - expected_dot).abs() <= 1e-5 * expected_dot.abs() + 1e-36, "{what}: {dot} {expected_dot}");
            assert!(Case::trouble(row) == Trouble::OnlyTarget || sum >= 1.0, "{what}: {sum}");
        }
    }
}

#[test]
fn dlogits_match_f64() {
    for case in cases() {
        let KernelSpec { batch, tokens, vocab, dtype, .. } = case.spec;
        let (targets, logits) = case.inputs();
        // Rows with a NaN are inactive, like masked ones.
        let coefficients = |row: usize, max: f64| match Case::trouble(row) {
            Trouble::NaN => [f32::NAN, 0.0, 0.0, 0.0],
            Trouble::NoTarget => [max as f32, -0.8, 0.3, 0.0],
            _ => [max as f32, -0.3 - 0.1 * noise(row), if row.is_multiple_of(2) { 0.2 } else { 0.0 }, 0.5],
        };
        let mut slopes = vec![0.0; batch * COEFFICIENTS * tokens];
        let mut expected = vec![0.0; batch * tokens * vocab];
        let mut bounds = expected.clone();
        for (row, y, z) in case.rows() {
            let (max, terms) = terms(z, y, case.spec.logit_scale);
            let slope = coefficients(row, max);
            for (i, value) in slope.into_iter().enumerate() {
                slopes[(row / tokens * COEFFICIENTS + i) * tokens + row % tokens] = value;
            }
            let [_, constant, linear, target] = slope.map(f64::from);
            if let Some(y) = y {
                expected[row * vocab + y] = target;
            }
            for (j, d, e) in terms.into_iter().filter(|(_, _, e)| *e > 0.0) {
                expected[row * vocab + j] = e * (constant + linear * d);
                bounds[row * vocab + j] = 1e-5 * e * (constant.abs() + (linear * d).abs());
            }
        }
        let slopes = Array::floats(Dtype::F32, [batch, COEFFICIENTS, tokens], slopes.into_iter().map(f64::from));
        let slopes = slopes.expect("a tensor");
        let kernel = dlogits_kernel(&case.spec).expect("a kernel");
        let found = interpret(&kernel, &[targets, slopes, logits]).expect("it runs").remove(0);
        assert_eq!(found.ty().dtype, dtype);
        for (i, (found, expected)) in found.to_floats().into_iter().zip(expected).enumerate() {
            // Half a unit in the last place of bf16; results below the range of f32 may be 0.
            let rounding = if dtype == Dtype::Bf16 { expected.abs() / 256.0 } else { 0.0 };
            let row = i / vocab;
            let what = format!("{:?}, row {row}: {:?}, column {}", case.spec, Case::trouble(row), i % vocab);
            assert!((found - expected).abs() <= bounds[i] + rounding + 1e-37, "{what}: {found} {expected}");
        }
    }
}

#[test]
fn invalid_kernel_sizes_are_refused() {
    let spec = KernelSpec::new(1, 300, 1000, Dtype::Bf16, 1.0);
    assert_eq!((spec.time_block, spec.vocab_block), (256, 1024));
    for wrong in [
        KernelSpec { time_block: 100, ..spec },
        KernelSpec { vocab_block: 200, ..spec },
        KernelSpec { vocab_block: 0, ..spec },
        KernelSpec { time_block: usize::MAX - 127, vocab_block: usize::MAX - 127, ..spec },
        KernelSpec { tokens: 0, ..spec },
        KernelSpec { vocab: usize::MAX, ..spec },
        KernelSpec { vocab: 0, ..spec },
        KernelSpec { dtype: Dtype::I32, ..spec },
        KernelSpec { logit_scale: 0.0, ..spec },
    ] {
        for kernel in [statistics_kernel(&wrong), dlogits_kernel(&wrong)] {
            let error = kernel.expect_err("a refusal").to_string();
            assert!(error.starts_with("mosaic::KernelSpec: ") && error.contains(&format!("got {wrong:?}")), "{error}");
        }
    }
}

#[test]
fn the_vmem_estimate_matches_the_kernels() {
    for dtype in [Dtype::Bf16, Dtype::F32] {
        let spec = KernelSpec::new(4, 1024, 151_643, dtype, 1.0);
        let [statistics, dlogits] = [statistics_kernel(&spec), dlogits_kernel(&spec)].map(|k| k.expect("a kernel"));
        assert_eq!(dlogits.vmem_bytes(), spec.vmem_bytes());
        assert!(statistics.vmem_bytes() <= spec.vmem_bytes());
        assert_eq!(dlogits.aliases, [(0, 2)]);
    }
}

#[test]
fn their_text_changes_only_on_purpose() {
    let spec = KernelSpec { time_block: 128, vocab_block: 128, ..KernelSpec::new(2, 130, 140, Dtype::Bf16, 0.5) };
    insta::assert_snapshot!("statistics", statistics_kernel(&spec).expect("a kernel"));
    insta::assert_snapshot!("dlogits", dlogits_kernel(&spec).expect("a kernel"));
}
