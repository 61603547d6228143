//! Moments in 8 bits: blocks of values with a scale each, and a code of one byte per value.
//!
//! The rule is `AdamW8bit` of bitsandbytes (arXiv 2110.02861): a step dequantises both moments, runs AdamW in f32, and quantises the new
//! moments again. Weights are updated with the new moments before these are quantised.
//!
//! ```text
//! scale = max |x| over the block, f32
//! code  = index of the entry of the code book that is nearest to x / scale
//! x     = entry * scale
//! ```
//!
//! The code book is `create_dynamic_map` of bitsandbytes, a decimal exponent with a linear fraction that has more bits for larger exponents:
//!
//! ```text
//! entry = 10^(e - E) (0.1 + 0.9 ((t + 0.5) / 2^e - 1)),  e = floor(log2 t)
//!
//! signed (first moments):     t = |code - 127|, E = 6; code 127 is 0
//! unsigned (second moments):  t = code + 1,     E = 7; code 0 is 0
//! ```
//!
//! Code 255 is 1 in both. Unlike the flat blocks of bitsandbytes, a block never crosses a row of a matrix ([`MomentBlocks`]), so that shards
//! of rows on a mesh hold whole blocks. Both have the same blocks if the length of rows is a multiple of 256.

use super::{OptimizerName, Rule};
use crate::error::{Error, Result};
use crate::state::{TensorSource, check_tensors};
use grpo_models::{MOMENT_BLOCK, Parameter};
use std::sync::LazyLock;

/// The prefixes of the names of 8-bit codes of first and second moments: whole numbers from 0 to 255 with the shape of the weight.
pub const MOMENT_CODES: [&str; 2] = ["exp_avg_codes.", "exp_avg_sq_codes."];

/// The prefixes of the names of the scales of 8-bit moments, one per block ([`MomentBlocks::scales`]).
pub const MOMENT_SCALES: [&str; 2] = ["exp_avg_scales.", "exp_avg_sq_scales."];

/// Tensors with fewer values have f32 moments, as in bitsandbytes.
const FEWEST_VALUES: usize = 4096;

/// The blocks of a tensor with 8-bit moments. A row is the last dimension, together with as many dimensions before it as it takes to have at
/// least [`MOMENT_BLOCK`] values. The blocks of a row have [`MOMENT_BLOCK`] values each; the last one may have fewer.
///
/// ```
/// use grpo_policy::{MomentBlocks, OptimizerName};
///
/// let optimizer = OptimizerName::AdamW8bit;
/// let blocks = MomentBlocks::of(optimizer, &[4864, 896]).unwrap();
/// assert_eq!((blocks.rows(), blocks.row(), blocks.per_row()), (4864, 896, 4));
/// assert_eq!(blocks.scales(&[4864, 896]), [4864, 4]);
/// assert!(MomentBlocks::of(optimizer, &[896]).is_none(), "fewer than 4096 values stay in f32");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MomentBlocks {
    /// The number of dimensions before the row.
    leading: usize,
    rows: usize,
    row: usize,
}

impl MomentBlocks {
    /// Returns the blocks of the moments of a tensor of this shape; `None` if they are f32.
    pub fn of(optimizer: OptimizerName, shape: &[usize]) -> Option<Self> {
        let count: usize = shape.iter().product();
        if optimizer != OptimizerName::AdamW8bit || count < FEWEST_VALUES {
            return None;
        }
        let (mut leading, mut row) = (shape.len(), 1);
        while row < MOMENT_BLOCK {
            leading -= 1;
            row *= shape[leading];
        }
        Some(Self { leading, rows: count / row, row })
    }

    /// Returns the number of dimensions before the row.
    pub fn leading(&self) -> usize {
        self.leading
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of values of a row.
    pub fn row(&self) -> usize {
        self.row
    }

    /// Returns the number of blocks of a row.
    pub fn per_row(&self) -> usize {
        self.row.div_ceil(MOMENT_BLOCK)
    }

    /// Returns the number of blocks.
    pub fn count(&self) -> usize {
        self.rows * self.per_row()
    }

    /// Returns the shape of the scales of a tensor of `shape`, which must be that of [`MomentBlocks::of`]: its dimensions before the row, then
    /// the blocks of a row.
    ///
    /// # Panics
    /// Panics if `shape` has fewer dimensions.
    pub fn scales(&self, shape: &[usize]) -> Vec<usize> {
        shape[..self.leading].iter().copied().chain([self.per_row()]).collect()
    }
}

/// The values that the codes of a moment stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeBook {
    /// For first moments: from -0.993 to 1.
    Signed,
    /// For second moments: from 0 to 1.
    Unsigned,
}

/// The entries of a code book, ascending, and the midpoints between them.
struct Table {
    entries: [f32; 256],
    midpoints: [f32; 255],
}

impl CodeBook {
    /// The code books of first and second moments.
    pub const OF_MOMENTS: [Self; 2] = [Self::Signed, Self::Unsigned];

    /// Returns the entries, ascending: code i stands for entry i times the scale of its block.
    pub fn entries(self) -> &'static [f32; 256] {
        &self.table().entries
    }

    /// Returns the 255 midpoints of neighbouring entries, ascending: the code of x is the number of midpoints below x.
    pub fn midpoints(self) -> &'static [f32; 255] {
        &self.table().midpoints
    }

    /// Returns the code of 0.
    pub fn zero(self) -> u8 {
        match self {
            Self::Signed => 127,
            Self::Unsigned => 0,
        }
    }

    fn table(self) -> &'static Table {
        static TABLES: LazyLock<[Table; 2]> = LazyLock::new(|| CodeBook::OF_MOMENTS.map(Table::new));
        &TABLES[self as usize]
    }

    /// Returns the code of the entry nearest to `x`, which is from -1 to 1.
    pub fn nearest(self, x: f32) -> u8 {
        self.table().nearest(x)
    }

    /// Quantises a block: writes its codes and returns its scale, which is not finite if a value is not.
    ///
    /// # Panics
    /// Panics if there are fewer codes than values.
    pub fn quantize(self, values: &[f32], codes: &mut [u8]) -> f32 {
        // Bit order of magnitudes is numeric order, with infinity and then NaN as the largest.
        let largest = values.iter().map(|value| value.abs().to_bits()).max().unwrap_or(0);
        let scale = f32::from_bits(largest);
        let codes = &mut codes[..values.len()];
        if scale > 0.0 && scale.is_finite() {
            let table = self.table();
            codes.iter_mut().zip(values).for_each(|(code, value)| *code = table.nearest(value / scale));
        } else {
            codes.fill(self.zero());
        }
        scale
    }

    /// Writes the values of a block.
    pub fn dequantize(self, codes: &[u8], scale: f32, values: &mut [f32]) {
        let entries = self.entries();
        values.iter_mut().zip(codes).for_each(|(value, code)| *value = entries[usize::from(*code)] * scale);
    }
}

impl Table {
    fn nearest(&self, x: f32) -> u8 {
        self.midpoints.partition_point(|midpoint| *midpoint < x) as u8
    }

    fn new(book: CodeBook) -> Self {
        let positive = |t: usize, largest: i32| {
            let exponent = t.ilog2() as i32;
            let fraction = (t as f64 + 0.5) / 2f64.powi(exponent) - 1.0;
            (10f64.powi(exponent - largest) * (0.1 + 0.9 * fraction)) as f32
        };
        let entries = std::array::from_fn(|code| match book {
            _ if code == 255 => 1.0,
            _ if code == usize::from(book.zero()) => 0.0,
            CodeBook::Unsigned => positive(code + 1, 7),
            CodeBook::Signed if code < 127 => -positive(127 - code, 6),
            CodeBook::Signed => positive(code - 127, 6),
        });
        let midpoints = std::array::from_fn(|i| (entries[i] + entries[i + 1]) / 2.0);
        Self { entries, midpoints }
    }
}

/// Returns `true` if the tensor with this name has codes of 8-bit moments, which checkpoints store as bytes.
pub fn is_moment_codes(name: &str) -> bool {
    Rule::ALL.iter().flat_map(|rule| rule.slots()).any(|slot| name.starts_with(slot.eight_bit[0]))
}

/// Returns the codes of 8-bit moments as bytes.
///
/// # Errors
/// [`Error::State`] if a value is not a whole number from 0 to 255.
pub fn moment_codes(name: &str, values: &[f32]) -> Result<Vec<u8>> {
    let code = |value: &f32| match *value as u8 {
        code if f32::from(code) == *value => Ok(code),
        _ => Err(Error::state(name, "codes of moments, whole numbers from 0 to 255", value)),
    };
    values.iter().map(code).collect()
}

/// Returns the tensors of the optimizer's state for these trained parameters, after its first step.
pub fn moment_tensors(trained: &[Parameter], optimizer: OptimizerName) -> Vec<Parameter> {
    let mut tensors = Vec::new();
    for Parameter { name, shape } in trained {
        let blocks = MomentBlocks::of(optimizer, shape);
        for slot in Rule::of(optimizer, name, shape).slots() {
            let mut push = |prefix: &str, shape| tensors.push(Parameter { name: format!("{prefix}{name}"), shape });
            match blocks {
                None => push(slot.single, shape.clone()),
                Some(blocks) => {
                    let [codes, scales] = slot.eight_bit;
                    push(codes, shape.clone());
                    push(scales, blocks.scales(shape));
                }
            }
        }
    }
    tensors
}

/// Describes the state of an optimizer, given the names of its tensors.
fn format<'a>(names: impl Iterator<Item = &'a str> + Clone) -> &'static str {
    let has = |rule: Rule| names.clone().any(|name| name.starts_with(rule.slots()[0].single));
    match () {
        () if names.clone().any(is_moment_codes) => "8-bit moments (optimizer.name: adamw_8bit)",
        () if has(Rule::Muon) && has(Rule::AdamW) => "momentum buffers and moments (optimizer.name: muon)",
        () if has(Rule::Sgd) => "momentum buffers (optimizer.name: sgd)",
        () => "float32 moments (optimizer.name: adamw)",
    }
}

/// Checks that the moments after `steps` steps of `optimizer` match the trained parameters one to one, without reading values.
///
/// # Errors
/// [`Error::State`] for the moments of another optimizer, and see [`check_tensors`]; before the first step, there must be no tensors.
pub fn check_moments(
    trained: &[Parameter],
    steps: u64,
    optimizer: OptimizerName,
    moments: &dyn TensorSource,
) -> Result<()> {
    let expected = if steps == 0 { Vec::new() } else { moment_tensors(trained, optimizer) };
    let shapes = moments.shapes();
    let found = format(shapes.iter().map(|(name, _)| *name));
    let needed = format(expected.iter().map(|tensor| &*tensor.name));
    if !shapes.is_empty() && steps > 0 && found != needed {
        return Err(Error::state("the optimizer", needed, found));
    }
    if shapes.len() != expected.len() {
        let expected = format!("{} tensors after {steps} steps", expected.len());
        return Err(Error::state("the optimizer", expected, format!("{} tensors", shapes.len())));
    }
    check_tensors(&expected, "", moments)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn code_books_ascend_and_hold_0_and_1() {
        for book in CodeBook::OF_MOMENTS {
            let entries = book.entries();
            assert!(entries.is_sorted_by(|a, b| a < b) && entries[255] == 1.0);
            assert_eq!(entries[usize::from(book.zero())], 0.0);
            for (code, entry) in entries.iter().enumerate() {
                assert_eq!(usize::from(book.nearest(*entry)), code, "{book:?}");
            }
        }
        // `bitsandbytes.functional.create_dynamic_map` 0.50.2.
        let near = |found: f32, expected: f32| assert!((found / expected - 1.0).abs() < 1e-6, "{found} {expected}");
        let signed = CodeBook::Signed.entries();
        near(signed[0], -0.992_968_8);
        near(signed[128], 5.5e-7);
        near(signed[129], 3.25e-6);
        near(signed[254], 0.992_968_8);
        let unsigned = CodeBook::Unsigned.entries();
        near(unsigned[1], 3.25e-7);
        near(unsigned[2], 7.75e-7);
        near(unsigned[3], 2.125e-6);
        near(unsigned[254], 0.996_484_4);
    }

    #[test]
    fn rows_have_at_least_one_block_and_blocks_stay_in_their_row() {
        let of = |shape: &[usize]| {
            let blocks = MomentBlocks::of(OptimizerName::AdamW8bit, shape)?;
            Some((blocks.rows(), blocks.row(), blocks.per_row(), blocks.scales(shape)))
        };
        assert_eq!(of(&[4095]), None);
        assert_eq!(of(&[4096]), Some((1, 4096, 16, vec![16])));
        assert_eq!(of(&[64, 300]), Some((64, 300, 2, vec![64, 2])));
        assert_eq!(of(&[3, 64, 300]), Some((192, 300, 2, vec![3, 64, 2])));
        // Rows of 16 values are joined: the factor B of an adapter.
        assert_eq!(of(&[1000, 16]), Some((1, 16_000, 63, vec![63])));
        assert_eq!(of(&[8192, 1, 4]), Some((1, 32_768, 128, vec![128])));
        assert_eq!(of(&[0, 300]), None);
    }

    #[test]
    fn blocks_of_zeros_and_of_values_that_are_not_finite() {
        for book in CodeBook::OF_MOMENTS {
            let (mut codes, mut values) = ([7; 4], [1.0; 4]);
            assert_eq!(book.quantize(&[0.0; 4], &mut codes), 0.0);
            book.dequantize(&codes, 0.0, &mut values);
            assert_eq!(values, [0.0; 4]);
            assert_eq!(book.quantize(&[0.0, f32::INFINITY, 1.0, 2.0], &mut codes), f32::INFINITY);
            assert!(book.quantize(&[0.0, f32::NAN, 1.0, f32::INFINITY], &mut codes).is_nan());
            // The smallest f32, whose reciprocal is infinite.
            let tiny = f32::from_bits(1);
            assert_eq!(book.quantize(&[tiny, 0.0], &mut codes), tiny);
            assert_eq!((codes[0], codes[1]), (255, book.zero()));
        }
    }

    #[test]
    fn codes_are_whole_numbers_of_a_byte() {
        assert_eq!(moment_codes("c", &[0.0, 255.0, 3.0]).unwrap(), [0, 255, 3]);
        for bad in [-1.0, 256.0, 0.5, f32::NAN, f32::INFINITY] {
            let error = moment_codes("exp_avg_codes.w", &[1.0, bad]).unwrap_err().to_string();
            assert!(error.contains("exp_avg_codes.w") && error.contains("0 to 255"), "{error}");
        }
    }

    proptest! {
        /// The nearest of all entries, and so at most half of a gap away.
        #[test]
        fn codes_are_nearest(values in prop::collection::vec(-3.0..3.0_f32, 1..40), small in 0..8_i32) {
            let values: Vec<f32> = values.iter().map(|value| value * 10f32.powi(-small)).collect();
            let mut codes = vec![0; values.len()];
            for book in CodeBook::OF_MOMENTS {
                let values: Vec<f32> = match book {
                    CodeBook::Signed => values.clone(),
                    CodeBook::Unsigned => values.iter().map(|value| value.abs()).collect(),
                };
                let scale = book.quantize(&values, &mut codes);
                for (value, code) in values.iter().zip(&codes) {
                    let distance = |entry: &f32| (entry - value / scale).abs();
                    let nearest = book.entries().iter().map(distance).fold(f32::INFINITY, f32::min);
                    prop_assert!(distance(&book.entries()[usize::from(*code)]) <= nearest + 1e-7);
                }
            }
        }
    }
}
