//! The built-in reward functions.

mod choice;
mod completion;
mod format;
mod json;
mod length;
mod text;
mod value;

pub use choice::Choice;
pub use completion::{Correct, Partial, SoftOverlongPunishment, Terminated};
pub use format::{TagCount, ThinkFormat};
pub use json::{Json, JsonConfig};
pub use length::{Length, LengthConfig, LengthMode};
pub use text::{Exact, Normalized, Regex, RegexConfig, normalize_text};
pub use value::{MathEquivalence, Numeric, numbers_equal};
