//! Errors of plugins, and of invalid calls.

use std::ops::Range;
use std::path::PathBuf;

use crate::dtype::{ArrayType, DType};

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// The API version of the oldest plugin in the tests; it has every function that this crate calls.
const OLDEST_TESTED: (i32, i32) = (0, 81);

/// An error of the plugin, or of an invalid call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file is not a plugin that this process can load.
    #[error("cannot load the PJRT plugin {path}: {reason}")]
    Load {
        /// The file of the plugin.
        path: PathBuf,
        /// The reason, from the system's loader.
        reason: String,
    },
    /// The plugin has another major version of the API.
    #[error(
        "the PJRT plugin {path} has version {}.{} of the API, but major version 0 is expected: use another release of the \
         plugin, or the one that `grpo plugin install` installs", version.0, version.1, path = path.display()
    )]
    Version {
        /// The file of the plugin.
        path: PathBuf,
        /// The plugin's (major, minor) version.
        version: (i32, i32),
    },
    /// libtpu needs environment variables, and it is too late to set them.
    #[error(
        "libtpu needs {} in the environment of a machine without a TPU (without them it waits for minutes for a metadata \
         server): set them before the process starts, or load libtpu before the process has threads", .variables.join(" ")
    )]
    Environment {
        /// The missing assignments, as `NAME=value`.
        variables: Vec<String>,
    },
    /// The plugin is too old for this function.
    #[error(
        "the plugin has version {}.{} of the PJRT API, without the function {function}, but {}.{} or newer is expected: use a \
         newer release of the plugin, or the one that `grpo plugin install` installs",
        version.0, version.1, OLDEST_TESTED.0, OLDEST_TESTED.1
    )]
    MissingFunction {
        /// The function's name in the C header.
        function: &'static str,
        /// The plugin's (major, minor) version.
        version: (i32, i32),
    },
    /// The plugin refused a call, or failed.
    #[error("{operation}: {message} ({code:?})")]
    Api {
        /// The function's name in the C header.
        operation: &'static str,
        /// The kind of error.
        code: Code,
        /// The message of the plugin.
        message: String,
    },
    /// A device did not complete an operation within the client's limit.
    #[error(
        "{what} has not ended within {seconds} seconds{}: the device hangs, or the work takes longer. It gets no \
         further calls; look for the cause in the system's log and the device's own tools, and restart the process, with a \
         longer limit (`Client::with_wait_limit`) if the work needs one", launched_last(program.as_deref())
    )]
    TimedOut {
        /// The operation that was waited for.
        what: &'static str,
        /// The limit of the wait, in seconds.
        seconds: f64,
        /// The program that was launched last, if there was one.
        program: Option<String>,
    },
    /// The plugin reported success but returned nothing.
    #[error("{operation} succeeded but returned nothing: the plugin is broken")]
    Nothing {
        /// The function's name in the C header.
        operation: &'static str,
    },
    /// An element type that this crate does not support.
    #[error("the plugin uses an element type (code {code} of PJRT_Buffer_Type) that is not supported")]
    UnknownDType {
        /// The number in the C header's `PJRT_Buffer_Type`.
        code: i32,
    },
    /// The element type of a slice differs from the buffer's.
    #[error("{operation}: the buffer holds {expected}, the slice {found}")]
    DType {
        /// The operation.
        operation: &'static str,
        /// The buffer's element type.
        expected: DType,
        /// The slice's element type.
        found: DType,
    },
    /// The size of a slice does not match the dimensions.
    #[error("{operation}: the dimensions need {expected} bytes, the slice has {found}")]
    Size {
        /// The operation.
        operation: &'static str,
        /// The bytes of the dimensions; `usize::MAX` on overflow.
        expected: usize,
        /// The bytes of the slice.
        found: usize,
    },
    /// A part of an array on the host exceeds the array.
    #[error("buffer_from_host: the ranges {part:?} are not within the dimensions {dims:?}")]
    Part {
        /// The dimensions of the array.
        dims: Vec<usize>,
        /// The range along each dimension.
        part: Vec<Range<usize>>,
    },
    /// The argument lists of a launch differ in length between devices.
    #[error("execute: every device needs as many arguments as the first, {expected}, but one got {found}")]
    ArgumentCount {
        /// The number of arguments of the first device.
        expected: usize,
        /// The number of arguments of another device.
        found: usize,
    },
    /// The type or shape of an argument differs from the program's parameter.
    #[error("execute: parameter {index} is {expected}, but the argument is {found}")]
    Argument {
        /// The position of the argument.
        index: usize,
        /// The parameter's type and shape.
        expected: ArrayType,
        /// The argument's type and shape.
        found: ArrayType,
    },
    /// An argument is donated on some devices only, which PJRT does not support.
    #[error("execute: argument {index} must be donated on every device or on none")]
    MixedDonation {
        /// The position of the argument.
        index: usize,
    },
    /// Two objects of different clients or plugins in one call.
    #[error("{operation}: the {what} belongs to another client or process")]
    Foreign {
        /// The operation.
        operation: &'static str,
        /// The kind of the object that belongs to another client.
        what: &'static str,
    },
    /// No wheel of the plugin is published for this platform.
    #[error("the plugin `{plugin}` is published for x86-64 Linux only, and this is {platform}")]
    Platform {
        /// The plugin.
        plugin: &'static str,
        /// The architecture and operating system.
        platform: String,
    },
    /// The machine's pip could not fetch a wheel.
    #[error("cannot download {requirement}: {reason}\n(command: {command})")]
    Download {
        /// The package and version, in pip's syntax.
        requirement: &'static str,
        /// The command, to try by hand.
        command: String,
        /// The reason, and what to do.
        reason: String,
    },
    /// A wheel differs from the one that this release pins.
    #[error("{requirement} has the SHA-256 {found}, but {expected} is expected: check the package index that pip uses")]
    Digest {
        /// The package and version, in pip's syntax.
        requirement: &'static str,
        /// The pinned digest, hexadecimal.
        expected: &'static str,
        /// The digest of the downloaded wheel, hexadecimal.
        found: String,
    },
    /// No folder for plugins can be determined.
    #[error(
        "there is no folder for plugins: set HOME or XDG_CACHE_HOME to an absolute path, or name the plugin's file instead"
    )]
    NoCache,
    /// Another user could replace this library.
    #[error("{path} is not used: {who} may write to {place}: {remedy}", path = path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// The file, or the folder above it, that others may change.
        place: String,
        /// The user or group that may change it.
        who: String,
        /// The command that fixes the permissions.
        remedy: String,
    },
    /// An installed plugin has no list of its files.
    #[error(
        "the plugin `{plugin}` in {path} has no list of its files, because an older release has installed it: run \
         `grpo plugin install {plugin} --force`", path = path.display()
    )]
    Unverified {
        /// The kind of plugin.
        plugin: &'static str,
        /// The folder of the plugin.
        path: PathBuf,
    },
    /// A file of an installed plugin differs from the installed version.
    #[error(
        "the plugin `{plugin}` is damaged: {path}: expected {expected}, found {found}: run `grpo plugin install {plugin} \
         --force`", path = path.display()
    )]
    Damaged {
        /// The kind of plugin.
        plugin: &'static str,
        /// The changed file.
        path: PathBuf,
        /// The expected size or digest.
        expected: String,
        /// The found size or digest.
        found: String,
    },
    /// A file or directory of an installation could not be read or written.
    #[error("cannot read or write {path}: {reason}", path = path.display())]
    Install {
        /// The file or directory.
        path: PathBuf,
        /// The error that the system reported.
        reason: std::io::Error,
    },
    /// An entry of a cache could not be written.
    #[error("cannot write the entry {path} of the cache: {reason}", path = path.display())]
    Cache {
        /// The file or directory.
        path: PathBuf,
        /// The error that the system reported.
        reason: std::io::Error,
    },
}

impl Error {
    /// Returns `true` if the plugin does not support the call.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Error::Api { code: Code::Unimplemented, .. } | Error::MissingFunction { .. })
    }

    /// Returns `true` if a wait for the device timed out.
    pub fn is_timed_out(&self) -> bool {
        matches!(self, Error::TimedOut { .. })
    }

    /// Returns `true` if the device ran out of memory.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Error::Api { code: Code::ResourceExhausted, .. } => true,
            // XLA's CPU reports a failed allocation of a program on several devices with this code.
            Error::Api { code: Code::Internal, message, .. } => message.contains("Out of memory allocating"),
            _ => false,
        }
    }
}

fn launched_last(program: Option<&str>) -> String {
    program.map_or(String::new(), |program| format!(" (the last program that was launched is `{program}`)"))
}

/// The kind of an error, as in <https://abseil.io/docs/cpp/guides/status-codes>.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::FromRepr)]
#[non_exhaustive]
#[allow(missing_docs)]
#[repr(i32)]
pub enum Code {
    Cancelled = 1,
    Unknown,
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Aborted,
    OutOfRange,
    Unimplemented,
    Internal,
    Unavailable,
    DataLoss,
    Unauthenticated,
}
