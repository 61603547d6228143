//! Errors of the loss library; their messages say how to fix the cause.

use crate::bytes::readable_bytes;
use crate::memory_report::MemoryReport;

/// Result of this crate and of the backends.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of the loss library. Backends use it too, so that callers handle one type.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A configuration key that does not exist.
    #[error("unknown key `{path}`{}: {known}", nearest.as_ref().map_or("; known keys".into(), |n| format!(", did you mean `{n}`? Known keys")))]
    UnknownKey {
        /// Dotted path of the key as given.
        path: String,
        /// The most similar known key, if any is similar.
        nearest: Option<String>,
        /// All known keys of that section.
        known: String,
    },
    /// A key of the configuration whose value, or combination with other keys, is illegal.
    #[error("invalid loss configuration: {message}")]
    Key {
        /// The key.
        key: String,
        /// The legal values, the value found, and the fix.
        message: String,
    },
    /// A configuration, or its combination with a batch or a plan, that is illegal.
    #[error("invalid loss configuration: {0}")]
    Config(String),
    /// A buffer or count that does not fit the other arguments.
    #[error("{operation}: {what}: expected {expected}, got {found}")]
    Shape {
        /// The operation that refused it.
        operation: &'static str,
        /// The argument.
        what: String,
        /// The expected shape or length.
        expected: String,
        /// The given shape or length.
        found: String,
    },
    /// An illegal value at some position.
    #[error("{what} at {position}: {reason}")]
    Value {
        /// The tensor or list.
        what: String,
        /// The position, in the caller's terms.
        position: String,
        /// The reason.
        reason: String,
    },
    /// A batch without advantages: its loss and gradients would be 0.
    #[error(
        "loss call: the batch has no advantages: set them with TokenBatch::with_advantages, to 0 if the loss is to have no \
         policy term"
    )]
    NoAdvantages,
    /// A batch without weights that is split into micro-batches: each part would be averaged as a whole step.
    #[error(
        "micro-batch: the batch has no weights of its optimizer step, so the losses of its parts would not add up to the loss of the \
         step: split the result of LossConfig::prepare_step, or use TokenBatch::select_independent for scores and for steps of their own"
    )]
    NoWeights,
    /// An invalid batch file.
    #[error("not a grpo-batch/1 file: {0}")]
    Format(String),
    /// A combination that a backend does not offer. There is no silent fallback.
    #[error("backend `{backend}` does not support {what}: {instead}")]
    Unsupported {
        /// The backend's name.
        backend: String,
        /// The combination.
        what: String,
        /// The alternative for the caller.
        instead: String,
    },
    /// A workspace budget that is too small for the smallest tiles.
    #[error("workspace budget of {} is too small for {what}: it needs at least {}", readable(*budget), readable(*minimum))]
    Budget {
        /// The planned computation.
        what: String,
        /// Bytes allowed.
        budget: usize,
        /// Bytes that the smallest tiling needs.
        minimum: usize,
    },
    /// A plan that needs more memory than the limit.
    #[error(
        "plan: {what} needs {} (inputs {}, outputs {}, workspace {}), and {} {}: plan for fewer tokens, or use \
         another implementation",
        readable(memory.total()), readable(memory.inputs), readable(memory.outputs), readable(memory.workspace),
        if *is_of_machine { "the memory of this machine is" } else { "memory_limit is" }, readable(*limit)
    )]
    Memory {
        /// The planned computation.
        what: String,
        /// Memory of one call.
        memory: MemoryReport,
        /// The limit in bytes.
        limit: usize,
        /// `true` if the limit is the machine's memory and not [`Tiling::memory_limit`](crate::Tiling::memory_limit).
        is_of_machine: bool,
    },
    /// A failure inside a backend (a device, a compiler, a plugin).
    #[error("backend `{backend}`: {message}")]
    Backend {
        /// The backend's name.
        backend: String,
        /// The backend's own message.
        message: String,
    },
}

/// Formats a size in memory with [`readable_bytes`].
fn readable(bytes: usize) -> String {
    readable_bytes(bytes as u64)
}

impl Error {
    /// Creates an [`Error::Key`].
    pub(crate) fn of_key(key: &str, message: impl Into<String>) -> Self {
        Self::Key { key: key.to_owned(), message: message.into() }
    }

    /// Returns the key of the configuration that causes the error, if it is one of a key.
    pub fn key(&self) -> Option<&str> {
        match self {
            Self::Key { key, .. } | Self::UnknownKey { path: key, .. } => Some(key),
            _ => None,
        }
    }

    /// Creates an [`Error::Shape`] from printable values.
    pub fn shape(
        operation: &'static str,
        what: impl Into<String>,
        expected: impl ToString,
        found: impl ToString,
    ) -> Self {
        Self::Shape { operation, what: what.into(), expected: expected.to_string(), found: found.to_string() }
    }

    /// Creates an [`Error::Value`] from printable values.
    pub fn value(what: impl Into<String>, position: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Value { what: what.into(), position: position.into(), reason: reason.into() }
    }
}
