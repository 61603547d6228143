//! The sizes of the kernels, and their common operations on blocks of logits.
//!
//! Letters: B batch, T tokens, V vocabulary; z a logit, s the scale of the logits.

use grpo_stablehlo::mosaic::{Affine, Builder, Cost, Offset, Ref, Semantics, Space, Value, Window};
use grpo_stablehlo::{Dtype, Error, Result, TensorType};
use std::panic::Location;

/// The number of entries of a row in one operation.
pub(super) const LANES: usize = 128;
/// The number of rows in one operation: a packed tile of bf16.
pub(super) const ROWS: usize = 16;
/// The largest blocks, beyond any chip's VMEM.
const MOST_TIME: usize = 4096;
const MOST_VOCAB: usize = 32_768;
/// For smaller x, 2^x is 0 in f32; at this x, x * 0 is not NaN.
pub(super) const LOWEST: f64 = -150.0;

/// The sizes, dtype and blocks of the kernels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelSpec {
    /// The number of batches B.
    pub batch: usize,
    /// The number of tokens T of a batch.
    pub tokens: usize,
    /// The number of vocabulary entries V.
    pub vocab: usize,
    /// The dtype of the logits: bf16 or f32.
    pub dtype: Dtype,
    /// The factor s of the logits before the softmax, above 0.
    pub logit_scale: f32,
    /// The tokens of a block, a multiple of 128.
    pub time_block: usize,
    /// The vocabulary entries of a block, a multiple of 128. The code grows with this number.
    pub vocab_block: usize,
}

impl KernelSpec {
    /// Makes a specification with the blocks that gave the best compiler schedule on v6e, or smaller ones for fewer
    /// logits.
    pub fn new(batch: usize, tokens: usize, vocab: usize, dtype: Dtype, logit_scale: f32) -> Self {
        let block = |size: usize, most: usize| size.clamp(1, most).next_multiple_of(LANES);
        let (time_block, vocab_block) = (block(tokens, 256), block(vocab, 2048));
        Self { batch, tokens, vocab, dtype, logit_scale, time_block, vocab_block }
    }

    /// Returns the bytes of VMEM of the larger kernel, dlogits: blocks of logits and gradients, each double-buffered, 5
    /// numbers per row in 128 lanes, and as many along the lanes. The blocks of [`Self::new`] need 4.9 MB for bf16 and
    /// 9.1 MB for f32, which every TPU from v4 on has. The compiler allocates up to 6 % more.
    pub fn vmem_bytes(&self) -> usize {
        let block = self.vocab_block.saturating_mul(4 * self.dtype.bytes());
        let row = (5 * LANES + 2 * (8 + 8)) * 4;
        self.time_block.saturating_mul(block.saturating_add(row))
    }

    /// Returns the compiler's limit of VMEM: twice the requirement, to leave room for spills, and at least 16 MiB.
    fn vmem_limit(&self) -> usize {
        self.vmem_bytes().saturating_mul(2).max(16 << 20)
    }

    /// Returns the type of the logits, `[B, T, V]`.
    pub fn logits(&self) -> TensorType {
        TensorType::new(self.dtype, [self.batch, self.tokens, self.vocab])
    }

    /// Returns the type of `n` numbers per row, `[B, n, T]`.
    pub(super) fn rows(&self, n: usize, dtype: Dtype) -> TensorType {
        TensorType::new(dtype, [self.batch, n, self.tokens])
    }

    #[track_caller]
    fn check(&self) -> Result<()> {
        let sizes = [self.batch, self.tokens, self.vocab];
        let block = |size: usize, most: usize| size > 0 && size.is_multiple_of(LANES) && size <= most;
        let reason = if !matches!(self.dtype, Dtype::Bf16 | Dtype::F32) {
            "logits of bf16 or f32"
        } else if !self.logit_scale.is_finite() || self.logit_scale <= 0.0 {
            "a finite scale above 0"
        } else if sizes.iter().any(|size| *size == 0 || i32::try_from(*size).is_err()) {
            "sizes from 1 to 2^31 - 1"
        } else if !block(self.time_block, MOST_TIME) || !block(self.vocab_block, MOST_VOCAB) {
            "blocks of at most 4096 tokens and 32768 vocabulary entries, multiples of 128,"
        } else {
            return Ok(());
        };
        let reason = format!("{reason} expected, got {self:?}");
        Err(Error::Operation { operation: "mosaic::KernelSpec", reason, at: Location::caller() })
    }

    #[track_caller]
    pub(super) fn builder(&self, name: &str) -> Result<Builder> {
        self.check()?;
        let grid = [
            (self.batch, Semantics::Parallel),
            (self.tokens.div_ceil(self.time_block), Semantics::Parallel),
            (self.vocab.div_ceil(self.vocab_block), Semantics::Arbitrary),
        ];
        let k = Builder::new(name, &grid);
        k.vmem_limit(self.vmem_limit());
        Ok(k)
    }

    /// Returns the cost of a kernel that moves every logit `moves` times, with `flops` operations and one exponential
    /// each.
    pub(super) fn cost(&self, moves: u64, flops: u64, row_numbers: usize) -> Cost {
        let rows = self.batch as u64 * self.tokens as u64;
        let logits = rows.saturating_mul(self.vocab as u64);
        let bytes = logits.saturating_mul(moves * self.dtype.bytes() as u64);
        Cost {
            flops: logits.saturating_mul(flops),
            bytes_accessed: bytes.saturating_add(rows * 4 * row_numbers as u64),
            transcendentals: logits,
        }
    }

    pub(super) fn logits_window(&self) -> Window {
        Window::new([1, self.time_block, self.vocab_block], [0, 1, 2].map(Affine::grid))
    }

    pub(super) fn rows_window(&self, n: usize) -> Window {
        Window::new([1, n, self.time_block], [Affine::grid(0), Affine::constant(0), Affine::grid(1)])
    }

    /// Declares scratch with a number for each lane of each row of a block.
    pub(super) fn lanes(&self, k: &Builder, dtype: Dtype) -> Ref {
        k.scratch(TensorType::new(dtype, [self.time_block, LANES]), Space::Vmem)
    }

    /// Returns the factor that turns z_j - M into an exponent of 2: e_j = 2^(exponent_scale (z_j - M)).
    pub(super) fn exponent_scale(&self) -> f64 {
        f64::from(self.logit_scale) * std::f64::consts::LOG2_E
    }

    /// Loads row `i` of a block of `[B, n, T]` and repeats each number in all lanes of its row: `[time_block, 128]`.
    pub(super) fn spread(&self, block: &Ref, i: usize) -> Value {
        let row = block.load(&[0.into(), i.into(), 0.into()], &[1, 1, self.time_block]);
        row.reshape(&[1, self.time_block]).broadcast(&[LANES, self.time_block]).transpose()
    }

    /// Runs `body` for every group of [`ROWS`] rows, with the group's first row.
    pub(super) fn for_rows(&self, k: &Builder, body: impl FnOnce(&Value)) {
        k.repeat(self.time_block / ROWS, |group| body(&(group * k.scalar(ROWS as i32))));
    }
}

/// Loads the numbers of a group of rows.
pub(super) fn rows(lanes: &Ref, row: &Value) -> Value {
    lanes.load(&[row.into(), 0.into()], &[ROWS, LANES])
}

/// Returns the offsets of 128 columns of a group of rows in a block of logits.
pub(super) fn place(row: &Value, slice: usize) -> [Offset<&Value>; 3] {
    [0.into(), row.into(), (slice * LANES).into()]
}

/// Loads 128 columns of a group of rows, in f32.
pub(super) fn load(logits: &Ref, row: &Value, slice: usize) -> Value {
    logits.load(&place(row, slice), &[1, ROWS, LANES]).reshape(&[ROWS, LANES]).convert(Dtype::F32)
}
