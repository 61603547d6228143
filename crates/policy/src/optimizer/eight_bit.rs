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

use super::Rule;
use super::update_rule::Slot;
use crate::error::{Error, Result};
use crate::state::{TensorSource, check_tensors};
use grpo_models::{MOMENT_BLOCK, OptimizerName, Parameter};

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
        if !optimizer.is_eight_bit() || count < FEWEST_VALUES {
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

/// Returns the optimizer whose state has tensors with these names.
fn optimizer_of<'a>(names: impl Iterator<Item = &'a str> + Clone) -> Option<OptimizerName> {
    OptimizerName::ALL.into_iter().find(|optimizer| {
        let slots = Rule::of_optimizer(*optimizer).iter().flat_map(|rule| rule.slots());
        let has =
            |slot: &Slot, name: &str| slot.prefixes(optimizer.is_eight_bit()).any(|prefix| name.starts_with(prefix));
        optimizer.is_eight_bit() == names.clone().any(is_moment_codes)
            && slots.clone().all(|slot| names.clone().any(|name| has(slot, name)))
            && names.clone().all(|name| slots.clone().any(|slot| has(slot, name)))
    })
}

/// Describes the state of an optimizer.
fn described(optimizer: OptimizerName) -> String {
    let bits = if optimizer.is_eight_bit() { "8-bit" } else { "float32" };
    format!("{bits} moments (optimizer.name: {optimizer})")
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
    let found = optimizer_of(shapes.iter().map(|(name, _)| *name));
    if let Some(found) = found.filter(|found| steps > 0 && *found != optimizer) {
        return Err(Error::state("the optimizer", described(optimizer), described(found)));
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
    fn codes_are_whole_numbers_of_a_byte() {
        assert_eq!(moment_codes("c", &[0.0, 255.0, 3.0]).unwrap(), [0, 255, 3]);
        for bad in [-1.0, 256.0, 0.5, f32::NAN, f32::INFINITY] {
            let error = moment_codes("exp_avg_codes.w", &[1.0, bad]).unwrap_err().to_string();
            assert!(error.contains("exp_avg_codes.w") && error.contains("0 to 255"), "{error}");
        }
    }
}
