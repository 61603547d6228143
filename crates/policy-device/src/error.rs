//! The errors of this crate.

use crate::memory::KNOBS;
use models::MemoryTable;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a decoder on a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A request that does not fit the model, or whose parts do not fit each other.
    #[error(transparent)]
    Policy(#[from] policy::Error),
    /// A configuration or weights that do not fit, or a token that the model does not have.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// A loss that is not legal or does not fit its batch; a plugin that is not there, or opens no device.
    #[error(transparent)]
    Loss(#[from] grpo_core::Error),
    /// A program that cannot be built: a defect of this crate.
    #[error("the program `{program}` cannot be built: {source}")]
    Program {
        /// The program.
        program: String,
        /// The illegal operation.
        source: stablehlo::Error,
    },
    /// The plugin refused or failed.
    #[error("{operation}: {cause}")]
    Device {
        /// What was done: a program that was compiled or run, a tensor that was copied.
        operation: String,
        /// What the plugin reports.
        cause: Box<pjrt::Error>,
    },
    /// The device has not done within the limit what was waited for.
    #[error("{operation}: {cause}; `policy.wait_limit_minutes` of a run's configuration is the limit")]
    TimedOut {
        /// What was done: a program that was run, a tensor that was copied.
        operation: String,
        /// What was waited for, how long, and the program that was launched last.
        cause: Box<pjrt::Error>,
    },
    /// Completions whose ends the device does not tell as its program should.
    #[error(
        "sample {sample} of a rollout: expected {expected}, found {found}: the device or its compiler computes wrongly; `grpo \
         parity` compares it with this CPU, and another release of the plugin may compute rightly"
    )]
    Rollout {
        /// The number of the sample within its request.
        sample: usize,
        /// What a device that computes rightly says of it.
        expected: String,
        /// What the device says.
        found: String,
    },
    /// Something that does not split evenly over the devices of a mesh.
    #[error("{what}: {source}")]
    Split {
        /// What was to be split.
        what: String,
        /// Into which parts it does not split.
        source: stablehlo::Error,
    },
    /// A program that the plugin's compiler refuses.
    #[error(
        "the program `{program}` does not compile for {device}: {cause}; the compiler is that of {plugin}: \
         another release of it may compile the program"
    )]
    Compile {
        /// The name of the program.
        program: String,
        /// The kind of device.
        device: String,
        /// The file of the plugin, with its versions.
        plugin: String,
        /// What the compiler says.
        cause: Box<pjrt::Error>,
    },
    /// A model, or its training, that is larger than the memory of the device: said before anything is loaded.
    #[error(
        "{device} has {available} bytes of memory left and {needed} bytes are needed ({parts}): {KNOBS}",
        needed = table.total(), parts = in_one_line(table)
    )]
    TooLarge {
        /// The kind of device.
        device: String,
        /// The parts that need memory.
        table: Box<MemoryTable>,
        /// The bytes that are left on the device.
        available: u64,
    },
    /// The device has no memory left for a program or a tensor.
    #[error("{operation}: the device has no memory left{}: {knobs} ({cause})", bytes(*needed, *available))]
    OutOfMemory {
        /// What was done: a program that was compiled or run, a tensor that was copied.
        operation: String,
        /// The bytes that it takes, where the plugin tells.
        needed: Option<u64>,
        /// The bytes that were left on the device, where the plugin tells.
        available: Option<u64>,
        /// What takes less memory.
        knobs: &'static str,
        /// What the plugin reports.
        cause: Box<pjrt::Error>,
    },
    /// A number type that has no program.
    #[error("{what} cannot have the number type {found}: expected {expected}")]
    Dtype {
        /// Weights, or arithmetic.
        what: &'static str,
        /// The number types that it can have.
        expected: &'static str,
        /// The number type that was asked for.
        found: stablehlo::Dtype,
    },
    /// The device has failed in the middle of an update, and has taken what it was updating with it.
    #[error("the device has failed during an update and lost the weights: continue the run from its last checkpoint")]
    Lost,
    /// Logits that are no longer finite.
    #[error(
        "logits of sample {sample} are not finite at token {token} of its completion: the weights or what they compute have \
         become NaN or infinite"
    )]
    NotFinite {
        /// The number of the sample within its request.
        sample: usize,
        /// The number of the token within the completion.
        token: usize,
    },
}

impl Error {
    /// An [`Error::Device`] of `operation`, an [`Error::TimedOut`], or an [`Error::OutOfMemory`].
    pub(crate) fn device(operation: impl Into<String>) -> impl FnOnce(pjrt::Error) -> Self {
        let operation = operation.into();
        move |cause| match (cause.is_out_of_memory(), cause.is_timed_out()) {
            (true, _) => {
                Self::OutOfMemory { operation, needed: None, available: None, knobs: KNOBS, cause: cause.into() }
            }
            (_, true) => Self::TimedOut { operation, cause: cause.into() },
            _ => Self::Device { operation, cause: cause.into() },
        }
    }
}

/// The parts of a table, without line breaks.
fn in_one_line(table: &MemoryTable) -> String {
    let text = table.to_string();
    let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    lines.collect::<Vec<_>>().join(", ")
}

fn bytes(needed: Option<u64>, available: Option<u64>) -> String {
    match (needed, available) {
        (Some(needed), Some(available)) => format!(" ({needed} bytes needed, {available} bytes there)"),
        (Some(needed), None) => format!(" ({needed} bytes needed)"),
        (None, Some(available)) => format!(" ({available} bytes there)"),
        (None, None) => String::new(),
    }
}

impl From<Error> for policy::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Policy(error) => error,
            Error::Model(error) => error.into(),
            Error::Loss(error) => error.into(),
            other => Self::other(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_hangs_is_named_with_its_program_and_what_to_do() {
        let program = Some("rollout_decode".into());
        let cause = pjrt::Error::TimedOut { what: "a copy from the device", seconds: 3600.0, program };
        let error = Error::device("reading ids of completions from the device")(cause);
        assert!(matches!(error, Error::TimedOut { .. }), "{error:?}");
        let text = policy::Error::from(error).to_string();
        for part in ["reading ids of completions", "3600 seconds", "`rollout_decode`", "`policy.wait_limit_minutes`"] {
            assert!(text.contains(part), "{part:?} is not in: {text}");
        }
    }
}
