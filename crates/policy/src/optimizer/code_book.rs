//! The code books of 8-bit moments ([`super::eight_bit`]).

use std::sync::LazyLock;

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
