//! The errors of this crate.

use crate::memory::KNOBS;
use grpo_core::readable_bytes;
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
        "{device} has {} of memory left and {} are needed ({}): {KNOBS}",
        readable_bytes(*available), readable_bytes(table.total()), in_one_line(table)
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
            (true, _) => Self::out_of_memory(operation, [None; 2], KNOBS, cause),
            (_, true) => Self::TimedOut { operation, cause: cause.into() },
            _ => Self::Device { operation, cause: cause.into() },
        }
    }

    /// [`Error::OutOfMemory`] with the bytes that are needed and those that are there; of those not known, what the plugin says.
    pub(crate) fn out_of_memory(
        operation: String,
        [needed, available]: [Option<u64>; 2],
        knobs: &'static str,
        cause: pjrt::Error,
    ) -> Self {
        let [of_needed, of_available] = bytes_in(&cause.to_string());
        let (needed, available) = (needed.or(of_needed), available.or(of_available));
        Self::OutOfMemory { operation, needed, available, knobs, cause: cause.into() }
    }
}

/// The bytes that were asked for, and those that were there, as XLA's allocators and compilers say them: `allocate 3.13G`, `There are
/// 1.79G free`, `Used 32.75G of 31.25G hbm`.
fn bytes_in(text: &str) -> [Option<u64>; 2] {
    let number_behind =
        |words: &str| text.match_indices(words).find_map(|(at, _)| leading_bytes(&text[at + words.len()..]));
    let used = text.split_once("Used ").map(|(_, rest)| rest);
    let needed = ["allocate ", "allocating ", "reserve "].into_iter().find_map(number_behind);
    let needed = needed.or_else(|| leading_bytes(used?));
    let limit = used.and_then(|used| used.split_once(" of ")).and_then(|(_, rest)| leading_bytes(rest));
    // Of what is free, a program gets what lies at one end.
    let reservable = text.split_once(" reservable").and_then(|(before, _)| leading_bytes(before.rsplit(' ').next()?));
    [needed, reservable.or_else(|| number_behind("There are ")).or(limit)]
}

/// The number of bytes at the beginning of a text: `4096`, `3.13G`, `31.25GiB`.
fn leading_bytes(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..end].trim_end_matches('.').parse().ok()?;
    let power = text[end..].chars().next().and_then(|unit| "KMGTP".find(unit)).map_or(0, |i| i as i32 + 1);
    Some((number * 1024_f64.powi(power)) as u64)
}

/// The parts of a table, without line breaks.
fn in_one_line(table: &MemoryTable) -> String {
    let text = table.to_string();
    let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    lines.collect::<Vec<_>>().join(", ")
}

fn bytes(needed: Option<u64>, available: Option<u64>) -> String {
    match (needed, available) {
        (Some(needed), Some(available)) => {
            format!(" ({} needed, {} there)", readable_bytes(needed), readable_bytes(available))
        }
        (Some(needed), None) => format!(" ({} needed)", readable_bytes(needed)),
        (None, Some(available)) => format!(" ({} there)", readable_bytes(available)),
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
    fn bytes_are_read_from_what_plugins_say() {
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
