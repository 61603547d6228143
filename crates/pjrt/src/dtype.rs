//! Element types.

use std::fmt;

use crate::error::{Error, Result};
use strum::{Display, IntoStaticStr, VariantArray};

/// The element type of a buffer, in the order of the C header's `PJRT_Buffer_Type`, starting from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Display, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum DType {
    /// A boolean; `bool` in Rust, one byte.
    #[strum(serialize = "i1")]
    Pred,
    /// Signed integers of 8 bits, `i8`.
    I8,
    /// Signed integers of 16 bits, `i16`.
    I16,
    /// Signed integers of 32 bits, `i32`.
    I32,
    /// Signed integers of 64 bits, `i64`.
    I64,
    /// Unsigned integers of 8 bits, `u8`.
    #[strum(serialize = "ui8")]
    U8,
    /// Unsigned integers of 16 bits, `u16`.
    #[strum(serialize = "ui16")]
    U16,
    /// Unsigned integers of 32 bits, `u32`.
    #[strum(serialize = "ui32")]
    U32,
    /// Unsigned integers of 64 bits, `u64`.
    #[strum(serialize = "ui64")]
    U64,
    /// IEEE binary16, `half::f16`.
    F16,
    /// IEEE binary32, `f32`.
    F32,
    /// IEEE binary64, `f64`.
    F64,
    /// bfloat16, `half::bf16`.
    Bf16,
}

impl DType {
    pub(crate) fn from_raw(code: i32) -> Result<Self> {
        let index = usize::try_from(code).ok().and_then(|code| code.checked_sub(1));
        index.and_then(|index| Self::VARIANTS.get(index)).copied().ok_or(Error::UnknownDType { code })
    }

    pub(crate) fn to_raw(self) -> i32 {
        self as i32 + 1
    }

    /// Returns the bytes of an element on the host.
    pub fn size(self) -> usize {
        match self {
            DType::Pred | DType::I8 | DType::U8 => 1,
            DType::I16 | DType::U16 | DType::F16 | DType::Bf16 => 2,
            DType::I32 | DType::U32 | DType::F32 => 4,
            DType::I64 | DType::U64 | DType::F64 => 8,
        }
    }

    /// Returns the name in StableHLO: `f32`, `bf16`, `i64`, `ui32`, `i1`.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The element type and shape of an array.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ArrayType {
    /// The type of the elements.
    pub dtype: DType,
    /// The shape; empty for a scalar.
    pub dims: Vec<usize>,
}

impl fmt::Display for ArrayType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.dims)
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type whose slices can be copied to and from a device.
pub trait Element: sealed::Sealed + bytemuck::NoUninit + bytemuck::Zeroable {
    /// The element type on a device.
    const DTYPE: DType;

    /// The type that a plugin writes for an element; for `bool` it is `u8`, because a plugin's byte need not be a valid
    /// `bool`.
    #[doc(hidden)]
    type Bits: bytemuck::Pod;

    /// Converts elements that a plugin has written.
    #[doc(hidden)]
    fn from_bits(bits: Vec<Self::Bits>) -> Vec<Self>;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $type {}

        impl Element for $type {
            const DTYPE: DType = DType::$dtype;

            type Bits = Self;

            fn from_bits(bits: Vec<Self>) -> Vec<Self> {
                bits
            }
        }
    )*};
}

elements! {
    i8 => I8, i16 => I16, i32 => I32, i64 => I64, u8 => U8, u16 => U16, u32 => U32, u64 => U64,
    half::f16 => F16, half::bf16 => Bf16, f32 => F32, f64 => F64,
}

impl sealed::Sealed for bool {}

impl Element for bool {
    const DTYPE: DType = DType::Pred;

    type Bits = u8;

    fn from_bits(bits: Vec<u8>) -> Vec<bool> {
        bits.into_iter().map(|byte| byte != 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dtype_codes_match_the_header() {
        for dtype in DType::VARIANTS {
            assert_eq!(DType::from_raw(dtype.to_raw()).unwrap(), *dtype);
        }
        assert_eq!((DType::Pred.to_raw(), DType::F32.to_raw(), DType::Bf16.to_raw()), (1, 11, 13));
        for code in [-1, 0, 14, i32::MAX] {
            assert!(matches!(DType::from_raw(code), Err(Error::UnknownDType { .. })));
        }
    }
}
