//! What can go wrong between a caller and the loss, in words that say what to do.

use crate::bytes::readable_bytes;
use crate::memory_report::MemoryReport;

/// Result of this crate and of the backends.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of the loss library. Backends use it too, so that a caller handles one type.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A configuration key that does not exist.
    #[error("unknown key `{path}`{}; known here: {known}", nearest.as_ref().map(|n| format!(", did you mean `{n}`?")).unwrap_or_default())]
    UnknownKey {
        /// Dotted path of the key as given.
        path: String,
        /// The most similar known key, if one is similar at all.
        nearest: Option<String>,
        /// All keys known at that place.
        known: String,
    },
    /// A configuration whose values are not legal, alone or together.
    #[error("invalid loss configuration: {0}")]
    Config(String),
    /// A buffer or a count that does not fit the others.
    #[error("{operation}: {what}: expected {expected}, got {found}")]
    Shape {
        /// The operation that refused.
        operation: &'static str,
        /// The argument.
        what: String,
        /// What would have fit, as a shape or length.
        expected: String,
        /// What came.
        found: String,
    },
    /// A value that is not legal where it stands.
    #[error("{what} at {position}: {reason}")]
    Value {
        /// The tensor or list.
        what: String,
        /// Where in it, in the caller's terms.
        position: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A batch whose advantages were never set: its loss would be 0, and so would its gradients.
    #[error(
        "loss call: the batch has no advantages: set them with TokenBatch::with_advantages, to 0 if the loss is to have no \
         policy term"
    )]
    NoAdvantages,
    /// A file that is not what it should be.
    #[error("not a grpo-batch/1 file: {0}")]
    Format(String),
    /// A combination that a backend does not offer. There is never a silent fallback.
    #[error("backend `{backend}` does not support {what}: {instead}")]
    Unsupported {
        /// The backend's name.
        backend: String,
        /// The combination.
        what: String,
        /// What the caller can do.
        instead: String,
    },
    /// The workspace budget cannot hold even the smallest tiles.
    #[error("workspace budget of {} is too small for {what}: it needs at least {}", readable(*budget), readable(*minimum))]
    Budget {
        /// What was planned.
        what: String,
        /// Bytes allowed.
        budget: usize,
        /// Bytes that the smallest tiling needs.
        minimum: usize,
    },
    /// A plan that needs more memory than there may be.
    #[error(
        "plan: {what} needs {} (inputs {}, outputs {}, workspace {}), and {} {}: plan for fewer tokens, or use \
         another implementation",
        readable(memory.total()), readable(memory.inputs), readable(memory.outputs), readable(memory.workspace),
        if *is_of_machine { "the memory of this machine is" } else { "memory_limit is" }, readable(*limit)
    )]
    Memory {
        /// What was planned.
        what: String,
        /// What a call of it needs.
        memory: MemoryReport,
        /// Bytes that there may be.
        limit: usize,
        /// Whether they are the machine's, and not [`Tiling::memory_limit`](crate::Tiling::memory_limit).
        is_of_machine: bool,
    },
    /// A failure inside a backend (a device, a compiler, a plugin).
    #[error("backend `{backend}`: {message}")]
    Backend {
        /// The backend's name.
        backend: String,
        /// Its own words.
        message: String,
    },
}

/// [`readable_bytes`] of a size in memory.
fn readable(bytes: usize) -> String {
    readable_bytes(bytes as u64)
}

impl Error {
    /// A [`Error::Shape`] from anything that prints.
    pub fn shape(
        operation: &'static str,
        what: impl Into<String>,
        expected: impl ToString,
        found: impl ToString,
    ) -> Self {
        Self::Shape { operation, what: what.into(), expected: expected.to_string(), found: found.to_string() }
    }

    /// A [`Error::Value`] from anything that prints.
    pub fn value(what: impl Into<String>, position: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Value { what: what.into(), position: position.into(), reason: reason.into() }
    }
}
