//! The dtypes of weights.

use std::fmt;

/// The dtype of a tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE 754 single precision, 4 bytes per value.
    F32,
    /// bfloat16: the upper 16 bits of an f32, 2 bytes per value.
    Bf16,
    /// IEEE 754 half precision, 2 bytes per value.
    F16,
}

impl Dtype {
    /// Every dtype.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];

    /// Returns the size of a value in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Returns torch's name, as in `torch_dtype` and `dtype` of `config.json`.
    pub fn torch_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }

    /// Returns safetensors' name.
    pub fn safetensors_name(self) -> String {
        self.of_file().to_string()
    }

    pub(crate) fn of_safetensors(dtype: safetensors::Dtype) -> Option<Self> {
        Self::ALL.into_iter().find(|own| own.of_file() == dtype)
    }

    fn of_file(self) -> safetensors::Dtype {
        match self {
            Self::F32 => safetensors::Dtype::F32,
            Self::Bf16 => safetensors::Dtype::BF16,
            Self::F16 => safetensors::Dtype::F16,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.torch_name())
    }
}
