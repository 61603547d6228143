//! Prints the values of constants.

use crate::graph::{Literal, Number};
use crate::types::{Dtype, TensorType};
use half::{bf16, f16};
use std::fmt::{self, Display, Formatter, Write};

pub(super) struct LiteralOf<'a>(pub(super) &'a Literal, pub(super) &'a TensorType);

impl Display for LiteralOf<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.0 {
            Literal::Splat(number) => f.write_str(&element(*number, self.1.dtype)),
            Literal::Dense(numbers) => nested(f, numbers, &self.1.shape, self.1.dtype),
        }
    }
}

fn nested(f: &mut Formatter<'_>, numbers: &[Number], shape: &[usize], dtype: Dtype) -> fmt::Result {
    let Some((size, inner)) = shape.split_first() else {
        return numbers.iter().try_for_each(|n| f.write_str(&element(*n, dtype)));
    };
    if numbers.is_empty() {
        return Ok(());
    }
    f.write_char('[')?;
    for (i, part) in numbers.chunks(numbers.len() / size).enumerate() {
        f.write_str(if i == 0 { "" } else { ", " })?;
        nested(f, part, inner, dtype)?;
    }
    f.write_char(']')
}

/// Prints a number so that it parses back to the same bits of `dtype`.
fn element(number: Number, dtype: Dtype) -> String {
    match number {
        Number::Bool(value) => value.to_string(),
        Number::Int(value) => value.to_string(),
        Number::Float(value) => {
            let (rounded, hex) = match dtype {
                Dtype::F16 => (f16::from_f64(value).to_f64(), format!("0x{:04X}", f16::from_f64(value).to_bits())),
                Dtype::Bf16 => (bf16::from_f64(value).to_f64(), format!("0x{:04X}", bf16::from_f64(value).to_bits())),
                Dtype::F64 => (value, format!("0x{:016X}", value.to_bits())),
                _ => (f64::from(value as f32), format!("0x{:08X}", (value as f32).to_bits())),
            };
            if !rounded.is_finite() {
                return hex;
            }
            // The shortest digits that parse back to the value; MLIR requires a point in the mantissa.
            let digits = match dtype {
                Dtype::F64 => format!("{rounded:e}"),
                _ => format!("{:e}", rounded as f32),
            };
            match digits.split_once('e') {
                Some((mantissa, exponent)) if mantissa.contains('.') => format!("{mantissa}e{exponent}"),
                Some((mantissa, exponent)) => format!("{mantissa}.0e{exponent}"),
                None => digits,
            }
        }
    }
}
