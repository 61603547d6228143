//! Limits of templates. Templates come with models and are untrusted; parsing and rendering always end, with bounded memory and stack.
//!
//! | limit | bounds |
//! |---|---|
//! | [`MAX_TOKENS`] | the depth of the syntax tree, which minijinja parses, compiles and drops recursively: chains such as `a.a.a` or `1 + 1 + 1` are as deep as they are long |
//! | [`MAX_TAG_TOKENS`] | the time in which minijinja compiles such a chain |
//! | [`STACK`] | the stack of the thread that parses or renders, large enough for such a tree |
//! | [`fuel`] | steps and bytes: an instruction, 64 bytes of data, or 8 bytes of characters cost 1 (minijinja's fuel). 2 million steps are about a second |
//! | [`MAX_OUTPUT`] | the rendered text, and each text from a method or filter |
//! | [`MAX_DEPTH`] | nested lists and dictionaries |

use minijinja::{Error, ErrorKind};
use std::borrow::Cow;
use std::fmt::Write;

/// The size limit of a template in bytes. Current models have a few thousand.
pub(super) const MAX_LENGTH: usize = 1 << 20;
/// The limit of tokens (names, numbers, strings, operators) in a template's tags. Current models have some hundreds.
pub(super) const MAX_TOKENS: usize = 1 << 15;
/// The limit of tokens in one tag: minijinja tries to evaluate a chain of operators at every link, which takes the square of its length.
pub(super) const MAX_TAG_TOKENS: usize = 1 << 12;
/// The stack in bytes of a thread that parses or renders. The system allocates only the used part.
pub(super) const STACK: usize = 256 << 20;
/// The size limit of the output in bytes.
pub(super) const MAX_OUTPUT: usize = 32 << 20;
/// The largest number of values, brackets and commas in a text.
const MAX_PIECES: usize = 1 << 20;
/// The limit of a value's depth. JSON is parsed up to a depth of 128.
pub(super) const MAX_DEPTH: usize = 256;
/// The limit of the width and precision of a field in a format string, and of an indentation. Rust's formatting panics above 2^16 - 1, and
/// `%g` has up to 4 decimals more than its precision.
pub(super) const MAX_WIDTH: usize = 1 << 15;
/// The steps that every template may take, and additional steps per byte of its input.
const STEPS: u64 = 2_000_000;
const STEPS_PER_BYTE: u64 = 4;
/// The number of bytes that cost as much as an instruction, if they are copied, compared or hashed.
const BYTES_PER_STEP: usize = 64;
/// The number of bytes that cost as much as an instruction, if their characters are read or written one by one.
const CHARACTERS_PER_STEP: usize = 8;

/// The end of messages about limits.
pub(super) const WAY_OUT: &str = "another template can be given with data.chat_template";

/// The error of a template.
#[derive(Clone)]
pub(super) struct Fault {
    pub(super) line: Option<usize>,
    pub(super) message: String,
}

/// Returns the steps that a template may take with variables of `input` bytes as JSON.
pub(super) fn fuel(input: usize) -> u64 {
    STEPS.saturating_add(STEPS_PER_BYTE.saturating_mul(input as u64))
}

/// Returns the cost of copying, comparing or hashing `bytes` in steps.
pub(super) fn steps(bytes: usize) -> u64 {
    1 + (bytes / BYTES_PER_STEP) as u64
}

/// Returns the cost of reading or writing a text of `bytes` character by character in steps.
pub(super) fn steps_of_characters(bytes: usize) -> u64 {
    1 + (bytes / CHARACTERS_PER_STEP) as u64
}

/// Returns an error of a template with this message.
pub(super) fn invalid(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Returns the error about a text longer than [`MAX_OUTPUT`].
pub(super) fn too_long() -> Error {
    invalid(format!("a text grows to more than {} MiB or {MAX_PIECES} values; {WAY_OUT}", MAX_OUTPUT >> 20))
}

/// Returns the error about a value deeper than [`MAX_DEPTH`].
pub(super) fn too_deep() -> Error {
    invalid(format!("a value has more than {MAX_DEPTH} levels of lists and dictionaries; {WAY_OUT}"))
}

/// A text of at most [`MAX_OUTPUT`] bytes and [`MAX_PIECES`] pieces.
#[derive(Default)]
pub(super) struct Text {
    text: String,
    pieces: usize,
}

impl Text {
    pub(super) fn push(&mut self, text: &str) -> Result<(), Error> {
        self.pieces += 1;
        if text.len() > MAX_OUTPUT - self.text.len() || self.pieces > MAX_PIECES {
            return Err(too_long());
        }
        self.text.push_str(text);
        Ok(())
    }

    /// Appends the `Display` text of a value.
    pub(super) fn push_display(&mut self, value: impl std::fmt::Display) -> Result<(), Error> {
        // Writing only fails at the limit.
        write!(self, "{value}").map_err(|_| too_long())
    }

    /// The steps that making it costs.
    pub(super) fn steps(&self) -> u64 {
        steps_of_characters(self.text.len()) + self.pieces as u64
    }

    pub(super) fn as_str(&self) -> &str {
        &self.text
    }

    pub(super) fn into_string(self) -> String {
        self.text
    }
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.push(text).map_err(|_| std::fmt::Error)
    }
}
