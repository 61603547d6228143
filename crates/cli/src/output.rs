//! Outcomes of subcommands, and standard output.

use grpo_files::printable;
use serde::Serialize;
use std::io::{ErrorKind, Write};
use std::path::Path;

/// The outcome of a command that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The command did its work.
    Done,
    /// The command worked, but a check failed.
    CheckFailed,
    /// The command was stopped by a signal; its progress is saved and can be continued.
    Stopped,
}

/// Writes `text` to standard output with control characters escaped. A closed pipe (`| head`) is not an error.
///
/// # Errors
/// Other errors of writing to standard output.
pub(crate) fn emit(text: &str) -> anyhow::Result<()> {
    emit_document(&printable(text))
}

/// Writes a document for programs (JSON, YAML, HTML) to standard output unchanged; otherwise like [`emit`].
///
/// # Errors
/// The errors of [`emit`].
pub(crate) fn emit_document(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(anyhow::Error::from(error).context("cannot write to standard output"))
        }
        _ => Ok(()),
    }
}

/// Writes a document as JSON to standard output; see [`emit_document`].
///
/// # Errors
/// The errors of [`emit`].
pub(crate) fn emit_json(document: &impl Serialize) -> anyhow::Result<()> {
    emit_document(&format!("{}\n", serde_json::to_string_pretty(document)?))
}

/// Returns `true` for the paths that mean standard output.
pub(crate) fn is_stdout(path: &Path) -> bool {
    ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"].iter().any(|name| path.as_os_str() == *name)
}
