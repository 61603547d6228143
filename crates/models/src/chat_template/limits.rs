//! Limits of templates. Templates come with models and are untrusted; parsing and rendering always end, with bounded memory and stack.
//!
//! | limit | bounds |
//! |---|---|
//! | [`MAX_TOKENS`] | the depth of the syntax tree, which minijinja parses, compiles and drops recursively: chains such as `a.a.a` or `1 + 1 + 1` are as deep as they are long |
//! | [`STACK`] | the stack of the thread that parses or renders, large enough for such a tree |
//! | [`fuel`] | steps and bytes: an instruction, or 64 bytes of data, cost 1 (minijinja's fuel) |
//! | [`MAX_OUTPUT`] | the rendered text, and each text from a method or filter |
//! | [`MAX_DEPTH`] | nested lists and dictionaries |

use super::Fault;
use minijinja::{Error, ErrorKind};
use std::fmt::Write;

/// The size limit of a template in bytes. Current models have a few thousand.
pub(super) const MAX_LENGTH: usize = 1 << 20;
/// The limit of tokens (names, numbers, strings, operators) in a template's tags. Current models have some hundreds.
pub(super) const MAX_TOKENS: usize = 1 << 15;
/// The stack in bytes of a thread that parses or renders. The system allocates only the used part.
pub(super) const STACK: usize = 256 << 20;
/// The size limit of the output in bytes.
pub(super) const MAX_OUTPUT: usize = 32 << 20;
/// The limit of a value's depth. JSON is parsed up to a depth of 128.
pub(super) const MAX_DEPTH: usize = 256;
/// The steps that every template may take, and additional steps per byte of its input.
const STEPS: u64 = 2_000_000;
const STEPS_PER_BYTE: u64 = 4;
/// The number of bytes that cost as much as an instruction.
const BYTES_PER_STEP: usize = 64;

/// The end of messages about limits.
pub(super) const WAY_OUT: &str = "another template can be given with data.chat_template";

/// Returns the steps that a template may take with variables of `input` bytes as JSON.
pub(super) fn fuel(input: usize) -> u64 {
    STEPS.saturating_add(STEPS_PER_BYTE.saturating_mul(input as u64))
}

/// Returns the cost of handling `bytes` in steps.
pub(super) fn steps(bytes: usize) -> u64 {
    1 + (bytes / BYTES_PER_STEP) as u64
}

/// Runs `work` on a thread with a stack of [`STACK`] bytes.
pub(super) fn on_own_stack<T: Send>(work: impl FnOnce() -> Result<T, Fault> + Send) -> Result<T, Fault> {
    let fault = |message: String| Fault { line: None, message };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("chat template".into()).stack_size(STACK);
        let thread = thread
            .spawn_scoped(scope, work)
            .map_err(|error| fault(format!("no thread with a stack of {} MiB can be started: {error}", STACK >> 20)))?;
        thread.join().unwrap_or_else(|_| Err(fault("the template engine failed".into())))
    })
}

/// Returns the error about a text longer than [`MAX_OUTPUT`].
pub(super) fn too_long() -> Error {
    let message = format!("a text grows to more than {} MiB; {WAY_OUT}", MAX_OUTPUT >> 20);
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Returns the error about a value deeper than [`MAX_DEPTH`].
pub(super) fn too_deep() -> Error {
    let message = format!("a value has more than {MAX_DEPTH} levels of lists and dictionaries; {WAY_OUT}");
    Error::new(ErrorKind::InvalidOperation, message)
}

/// A text of at most [`MAX_OUTPUT`] bytes.
#[derive(Default)]
pub(super) struct Text(String);

impl Text {
    pub(super) fn push(&mut self, text: &str) -> Result<(), Error> {
        if text.len() > MAX_OUTPUT - self.0.len() {
            return Err(too_long());
        }
        self.0.push_str(text);
        Ok(())
    }

    /// Appends the `Display` text of a value.
    pub(super) fn push_display(&mut self, value: impl std::fmt::Display) -> Result<(), Error> {
        // Writing only fails at the limit.
        write!(self, "{value}").map_err(|_| too_long())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn into_string(self) -> String {
        self.0
    }
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.push(text).map_err(|_| std::fmt::Error)
    }
}

/// The rendered text, which fails at [`MAX_OUTPUT`].
#[derive(Default)]
pub(super) struct Output {
    pub(super) bytes: Vec<u8>,
    pub(super) is_full: bool,
}

impl std::io::Write for Output {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if bytes.len() > MAX_OUTPUT - self.bytes.len() {
            self.is_full = true;
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
