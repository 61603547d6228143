//! The built-in reward functions.

mod completion;
mod format;
mod json;
mod length;
mod text;
mod value;

pub use completion::{Correct, Environment, Partial, SoftOverlongPunishment, Terminated};
pub use format::{TagCount, ThinkFormat};
pub use json::{Json, JsonConfig};
pub use length::{Length, LengthConfig, LengthMode};
pub use text::{Exact, Normalized, Regex, RegexConfig, normalize_text};
pub use value::{Choice, MathEquivalence, Numeric, numbers_equal};
