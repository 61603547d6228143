//! Errors of plugins, and of calls that they are given.

use std::path::PathBuf;

use crate::dtype::{ArrayType, DType};

/// The result of everything in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// The version of the API of the oldest plugin that tests run, which has every function that this crate calls.
const OLDEST_TESTED: (i32, i32) = (0, 81);

/// An error of the plugin, or of how it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file is not a plugin that this process can load.
    #[error("cannot load the PJRT plugin {path}: {reason}")]
    Load {
        /// The file that was to be loaded.
        path: PathBuf,
        /// The reason as the system's loader says it.
        reason: String,
    },
    /// The plugin speaks another major version of the API.
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
    /// libtpu needs variables in the environment, and it is too late to set them.
    #[error(
        "libtpu needs {} in the environment of a machine without a TPU (without them it waits for minutes for a metadata \
         server): set them before the process starts, or load libtpu before the process has threads", .variables.join(" ")
    )]
    Environment {
        /// The assignments that are missing, as `NAME=value`.
        variables: Vec<String>,
    },
    /// The plugin is older than this function.
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
    /// The plugin refused, or failed.
    #[error("{operation}: {message} ({code:?})")]
    Api {
        /// The function's name in the C header.
        operation: &'static str,
        /// The kind of error.
        code: Code,
        /// The message of the plugin.
        message: String,
    },
    /// The device has not done within the limit of the client what was waited for.
    #[error(
        "{what} has not ended within {seconds} seconds{}: the device hangs, or the work takes longer. Nothing more is asked of \
         it; look into the system's log and the device's own tools for the cause, and start the process again, with a \
         longer limit (`Client::with_wait_limit`) if the work needs one", launched_last(program.as_deref())
    )]
    TimedOut {
        /// What was waited for.
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
    /// An element type that this crate does not know.
    #[error("the plugin uses an element type (code {code} of PJRT_Buffer_Type) that is not supported")]
    UnknownDType {
        /// The number in the C header's `PJRT_Buffer_Type`.
        code: i32,
    },
    /// A slice's element type is not the buffer's.
    #[error("{operation}: the buffer holds {expected}, the slice {found}")]
    DType {
        /// The operation that was tried.
        operation: &'static str,
        /// The buffer's element type.
        expected: DType,
        /// The slice's element type.
        found: DType,
    },
    /// A slice's size is not that of the dimensions.
    #[error("{operation}: the dimensions need {expected} bytes, the slice has {found}")]
    Size {
        /// The operation that was tried.
        operation: &'static str,
        /// Bytes according to the dimensions; `usize::MAX` if that overflows.
        expected: usize,
        /// Bytes of the slice.
        found: usize,
    },
    /// Devices of one launch got lists of arguments of different lengths.
    #[error("execute: every device needs as many arguments as the first, {expected}, but one got {found}")]
    ArgumentCount {
        /// Arguments of the first device.
        expected: usize,
        /// The number of arguments of another device.
        found: usize,
    },
    /// An argument is of another type or shape than the program's parameter.
    #[error("execute: parameter {index} is {expected}, but the argument is {found}")]
    Argument {
        /// The position of the argument.
        index: usize,
        /// The parameter's type and shape.
        expected: ArrayType,
        /// The argument's type and shape.
        found: ArrayType,
    },
    /// An argument is donated on some devices only, which PJRT cannot express.
    #[error("execute: argument {index} must be donated on every device or on none")]
    MixedDonation {
        /// The position of the argument.
        index: usize,
    },
    /// Two objects of different clients or plugins met.
    #[error("{operation}: the {what} belongs to another client")]
    Foreign {
        /// The operation that was tried.
        operation: &'static str,
        /// The object that does not belong.
        what: &'static str,
    },
    /// There is no wheel of the plugin for this kind of machine.
    #[error("the plugin `{plugin}` is published for x86-64 Linux only, and this is {platform}")]
    Platform {
        /// The plugin that was to be installed.
        plugin: &'static str,
        /// Architecture and operating system.
        platform: String,
    },
    /// The machine's pip did not fetch a wheel.
    #[error("cannot download {requirement}: {reason}\n(command: {command})")]
    Download {
        /// The package and its version, as pip takes them.
        requirement: &'static str,
        /// What was run, to try by hand.
        command: String,
        /// What went wrong, and what to do.
        reason: String,
    },
    /// A wheel is not the one that this release was made for.
    #[error("{requirement} has the SHA-256 {found}, but {expected} is expected: check the package index that pip uses")]
    Digest {
        /// The package and its version, as pip takes them.
        requirement: &'static str,
        /// The pinned digest, hexadecimal.
        expected: &'static str,
        /// The digest of the wheel that came, hexadecimal.
        found: String,
    },
    /// There is no folder for plugins.
    #[error(
        "there is no folder for plugins: set HOME or XDG_CACHE_HOME to an absolute path, or name the plugin's file instead"
    )]
    NoCache,
    /// Somebody else could put another library in the place of this one.
    #[error("{path} is not used: {who} may write to {place}: {remedy}", path = path.display())]
    Exposed {
        /// The file that was to be used.
        path: PathBuf,
        /// The file or folder, this one or above it, that others may change.
        place: String,
        /// The users who may change it.
        who: String,
        /// The command that mends it.
        remedy: String,
    },
    /// It is not known what an installed plugin consists of.
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
    /// An installed plugin is not what was installed.
    #[error(
        "the plugin `{plugin}` is damaged: {path}: expected {expected}, found {found}: run `grpo plugin install {plugin} \
         --force`", path = path.display()
    )]
    Damaged {
        /// The kind of plugin.
        plugin: &'static str,
        /// The file that has changed.
        path: PathBuf,
        /// What it was when it was installed.
        expected: String,
        /// What the file is now.
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
    /// Whether the plugin says that it does not offer what was asked.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Error::Api { code: Code::Unimplemented, .. } | Error::MissingFunction { .. })
    }

    /// Whether a wait for the device was given up.
    pub fn is_timed_out(&self) -> bool {
        matches!(self, Error::TimedOut { .. })
    }

    /// Whether the device has no memory left for what was asked.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Error::Api { code: Code::ResourceExhausted, .. })
    }
}

fn launched_last(program: Option<&str>) -> String {
    program.map_or(String::new(), |program| format!(" (the last program that was launched is `{program}`)"))
}

/// The kind of an error, as in <https://abseil.io/docs/cpp/guides/status-codes>.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum Code {
    Cancelled,
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

impl Code {
    pub(crate) fn from_raw(raw: i32) -> Self {
        match raw {
            1 => Code::Cancelled,
            3 => Code::InvalidArgument,
            4 => Code::DeadlineExceeded,
            5 => Code::NotFound,
            6 => Code::AlreadyExists,
            7 => Code::PermissionDenied,
            8 => Code::ResourceExhausted,
            9 => Code::FailedPrecondition,
            10 => Code::Aborted,
            11 => Code::OutOfRange,
            12 => Code::Unimplemented,
            13 => Code::Internal,
            14 => Code::Unavailable,
            15 => Code::DataLoss,
            16 => Code::Unauthenticated,
            _ => Code::Unknown,
        }
    }
}
