//! Errors of this crate.

use grpo_backend_tpu::devices::TensorError;
use grpo_core::readable_bytes;
use grpo_models::MemoryTable;
use grpo_policy::DeviceFailure;

/// `Result` of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a policy or rollout on a PJRT device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A request does not fit the model, or its parts do not fit each other.
    #[error(transparent)]
    Policy(#[from] grpo_policy::Error),
    /// The configuration or weights are invalid, or a token id is outside the vocabulary.
    #[error(transparent)]
    Model(#[from] grpo_models::Error),
    /// The loss configuration is invalid or does not fit its batch; a plugin is missing or opens no device.
    #[error(transparent)]
    Loss(#[from] grpo_core::Error),
    /// A program cannot be built: a bug in this crate.
    #[error("the program `{program}` cannot be built: {source}")]
    Program {
        /// Name of the program.
        program: String,
        /// The invalid operation.
        source: grpo_stablehlo::Error,
    },
    /// The plugin failed.
    #[error("{operation}: {cause}")]
    Device {
        /// The failed operation, for example the compilation or run of a program, or the copy of a tensor.
        operation: String,
        /// The plugin's error.
        #[source]
        cause: Box<grpo_pjrt::Error>,
    },
    /// The device did not finish within the time limit.
    #[error("{operation}: {cause}")]
    TimedOut {
        /// The operation, for example the run of a program or the copy of a tensor.
        operation: String,
        /// The event, the time limit, and the program that was launched last.
        #[source]
        cause: Box<grpo_pjrt::Error>,
    },
    /// The device returned a completion of invalid length, or a completion that does not end.
    #[error(
        "sample {sample} of a rollout: expected {expected}, found {found}: the device or its compiler computes wrong results; `grpo \
         parity` compares it with this CPU, and another release of the plugin may be correct"
    )]
    Rollout {
        /// Index of the sample within its request.
        sample: usize,
        /// The valid result.
        expected: String,
        /// The device's result.
        found: String,
    },
    /// A dimension does not shard evenly over the devices of a mesh.
    #[error("{what}: {source}")]
    Split {
        /// The tensor or the dimension.
        what: String,
        /// The error of the sharding.
        source: grpo_stablehlo::Error,
    },
    /// An argument of a program is sharded in another way than the program expects: a bug in this crate.
    #[error("argument {index} of the program `{program}`: expected {expected}, found {found}")]
    Layout {
        /// Name of the program.
        program: String,
        /// Index of the argument.
        index: usize,
        /// Shape and sharding that the program expects.
        expected: String,
        /// Shape and sharding of the argument.
        found: String,
    },
    /// A tensor is read in a process whose devices do not have all of it: a bug in this crate.
    #[error("reading {what}: expected {elements} elements on the devices of this process, found {found}")]
    NotAddressable {
        /// The tensor.
        what: String,
        /// The number of elements of the tensor.
        elements: usize,
        /// The number of elements on the devices of this process.
        found: usize,
    },
    /// The devices of a run with several processes do not fit the processes.
    #[error("the devices of {device}: expected {expected}, found {found}")]
    Processes {
        /// Kind of device.
        device: String,
        /// The requirement.
        expected: String,
        /// The devices found.
        found: String,
    },
    /// Another process of the run has failed.
    #[error(transparent)]
    Store(#[from] grpo_distributed::Error),
    /// The plugin's compiler rejects a program.
    #[error(
        "the program `{program}` does not compile for {device}: {cause}; the compiler belongs to {plugin}: \
         another release of it may compile the program"
    )]
    Compile {
        /// Name of the program.
        program: String,
        /// Kind of device.
        device: String,
        /// Path of the plugin, with its versions.
        plugin: String,
        /// The compiler's error.
        #[source]
        cause: Box<grpo_pjrt::Error>,
    },
    /// The model or its training needs more memory than the device has; detected before weights are loaded.
    #[error(
        "{device} has {} of memory left, but {} are needed ({})",
        readable_bytes(*available), readable_bytes(table.total()), in_one_line(table)
    )]
    TooLarge {
        /// Kind of device.
        device: String,
        /// Memory needed by each part.
        table: Box<MemoryTable>,
        /// Free bytes on the device.
        available: u64,
    },
    /// The device has not enough memory for a program or a tensor.
    #[error("{operation}: the device has no memory left{} ({cause})", bytes(*needed, *available))]
    OutOfMemory {
        /// The failed operation, for example the compilation or run of a program, or the copy of a tensor.
        operation: String,
        /// Name of the program; `None` for the copy of a tensor.
        program: Option<String>,
        /// The bytes needed, if the plugin reports them.
        needed: Option<u64>,
        /// The free bytes on the device, if the plugin reports them.
        available: Option<u64>,
        /// The plugin's error.
        #[source]
        cause: Box<grpo_pjrt::Error>,
    },
    /// A dtype is not supported.
    #[error("{what} cannot have dtype {found}: expected {expected}")]
    Dtype {
        /// `weights` or `arithmetic`.
        what: &'static str,
        /// The supported dtypes.
        expected: &'static str,
        /// The requested dtype.
        found: grpo_stablehlo::Dtype,
    },
    /// The device failed during an update in place, and the weights are lost.
    #[error("the device failed during an update and lost the weights: continue the run from its last checkpoint")]
    Lost,
    /// Logits are not finite.
    #[error(
        "logits of sample {sample} are not finite at token {token} of its completion: the weights or the activations \
         have become NaN or infinite"
    )]
    NotFinite {
        /// Index of the sample within its request.
        sample: usize,
        /// Index of the token within the completion.
        token: usize,
    },
}

impl Error {
    /// Returns an [`Error::OutOfMemory`], an [`Error::TimedOut`], or an [`Error::Device`] of `operation`, depending on the plugin's error.
    pub(crate) fn device(operation: impl Into<String>) -> impl FnOnce(grpo_pjrt::Error) -> Self {
        let operation = operation.into();
        move |cause| match (cause.is_out_of_memory(), cause.is_timed_out()) {
            (true, _) => Self::out_of_memory(operation, [None; 2], None, cause),
            (_, true) => Self::TimedOut { operation, cause: cause.into() },
            _ => Self::Device { operation, cause: cause.into() },
        }
    }

    /// Returns an [`Error::OutOfMemory`]; if `needed` or `available` is `None`, it is parsed from the plugin's error text.
    pub(crate) fn out_of_memory(
        operation: String,
        [needed, available]: [Option<u64>; 2],
        program: Option<&str>,
        cause: grpo_pjrt::Error,
    ) -> Self {
        let [of_needed, of_available] = bytes_in(&cause.to_string());
        let (needed, available) = (needed.or(of_needed), available.or(of_available));
        Self::OutOfMemory { operation, program: program.map(str::to_owned), needed, available, cause: cause.into() }
    }
}

/// Parses the requested and the available bytes from error texts of XLA's allocators and compilers: `allocate 3.13G`,
/// `There are 1.79G free`, `Used 32.75G of 31.25G hbm`.
fn bytes_in(text: &str) -> [Option<u64>; 2] {
    let number_behind =
        |words: &str| text.match_indices(words).find_map(|(at, _)| leading_bytes(&text[at + words.len()..]));
    let used = text.split_once("Used ").map(|(_, rest)| rest);
    let needed = ["allocate ", "allocating ", "reserve "].into_iter().find_map(number_behind);
    let needed = needed.or_else(|| leading_bytes(used?));
    let limit = used.and_then(|used| used.split_once(" of ")).and_then(|(_, rest)| leading_bytes(rest));
    // Programs can use only the reservable part of free memory.
    let reservable = text.split_once(" reservable").and_then(|(before, _)| leading_bytes(before.rsplit(' ').next()?));
    [needed, reservable.or_else(|| number_behind("There are ")).or(limit)]
}

/// Parses the number of bytes at the beginning of a text: `4096`, `3.13G`, `31.25GiB`.
fn leading_bytes(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..end].trim_end_matches('.').parse().ok()?;
    let power = text[end..].chars().next().and_then(|unit| "KMGTP".find(unit)).map_or(0, |i| i as i32 + 1);
    Some((number * 1024_f64.powi(power)) as u64)
}

/// Formats the parts of a table in one line.
fn in_one_line(table: &MemoryTable) -> String {
    let text = table.to_string();
    let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    lines.collect::<Vec<_>>().join(", ")
}

fn bytes(needed: Option<u64>, available: Option<u64>) -> String {
    match (needed, available) {
        (Some(needed), Some(available)) => {
            format!(" ({} needed, {} free)", readable_bytes(needed), readable_bytes(available))
        }
        (Some(needed), None) => format!(" ({} needed)", readable_bytes(needed)),
        (None, Some(available)) => format!(" ({} free)", readable_bytes(available)),
        (None, None) => String::new(),
    }
}

impl From<TensorError> for Error {
    fn from(error: TensorError) -> Self {
        match error {
            TensorError::Split { shape, source } => {
                Self::Split { what: format!("a tensor of shape {shape:?}"), source }
            }
            TensorError::NotAddressable { what, elements, found } => Self::NotAddressable { what, elements, found },
            TensorError::Device { operation, cause, .. } => Self::device(operation)(*cause),
            other => Self::Loss(other.into()),
        }
    }
}

impl From<Error> for grpo_policy::Error {
    fn from(error: Error) -> Self {
        let failure = match &error {
            Error::TooLarge { .. } => DeviceFailure::TooLarge,
            Error::OutOfMemory { program, .. } => DeviceFailure::OutOfMemory { program: program.clone() },
            Error::TimedOut { .. } => DeviceFailure::TimedOut,
            Error::NotFinite { .. } => DeviceFailure::NotFinite,
            _ => {
                return match error {
                    Error::Policy(error) => error,
                    Error::Model(error) => error.into(),
                    Error::Loss(error) => error.into(),
                    other => Self::other(other),
                };
            }
        };
        Self::Device { failure, source: error.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needed_and_free_bytes_are_parsed_from_plugin_errors() {
        let gib = |number: f64| Some((number * f64::from(1 << 30)) as u64);
        for (text, expected) in [
            ("Out of memory allocating 281474976710656 bytes.", [Some(1 << 48), None]),
            ("Out of memory while trying to allocate 4294967296 bytes.", [Some(1 << 32), None]),
            (
                "Error allocating device buffer: Attempting to allocate 3.13G. That was not possible. There are 1.79G free.",
                [gib(3.13), gib(1.79)],
            ),
            (
                "Ran out of memory in memory space hbm. Used 32.75G of 31.25G hbm. Exceeded hbm capacity by 1.50G.",
                [gib(32.75), gib(31.25)],
            ),
            ("Out of memory while trying to allocate 4.50GiB", [gib(4.5), None]),
            (
                "Error loading program: Attempting to reserve 6.48G at the bottom of memory. That was not possible. There are 6.78G free, \
                 0B reserved, and 3.33G reservable.",
                [gib(6.48), gib(3.33)],
            ),
            ("Failed to allocate request for 2.00GiB on device; trying to allocate 2147483648 bytes", [gib(2.0), None]),
            ("There are no bytes. Used up: allocate less", [None, None]),
            ("", [None, None]),
        ] {
            assert_eq!(bytes_in(text), expected, "{text}");
        }
    }

    #[test]
    fn a_timeout_names_the_operation_the_program_and_the_limit() {
        let program = Some("rollout_decode".into());
        let cause = grpo_pjrt::Error::TimedOut { what: "a copy from the device", seconds: 3600.0, program };
        let error = Error::device("reading ids of completions from the device")(cause);
        assert!(matches!(error, Error::TimedOut { .. }), "{error:?}");
        let source = std::error::Error::source(&error).map(ToString::to_string);
        assert!(source.is_some_and(|source| source.starts_with("a copy from the device")), "the plugin's error");
        let text = grpo_policy::Error::from(error).to_string();
        for part in ["reading ids of completions", "3600 seconds", "`rollout_decode`"] {
            assert!(text.contains(part), "{part:?} is not in: {text}");
        }
    }
}
