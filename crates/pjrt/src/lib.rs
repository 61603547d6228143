#![doc = include_str!("../README.md")]
//! # Versions
//!
//! Argument structs have the layout of C API 0.115; plugins from 0.81 (`xla-cpu-pjrt` 0.0.1) to 0.116 (`libtpu` 0.0.51) are
//! tested. A function that a plugin lacks is an [`Error::MissingFunction`].
//!
//! # Threads and lifetimes
//!
//! All types are `Send` and `Sync`. A buffer or executable keeps its client open; plugins are never unloaded. `execute`
//! returns after the launch; later failures are errors of [`Buffer::wait`] or [`Buffer::to_host`]. If a plugin aborts
//! because of a broken invariant, the process ends.
//!
//! # Devices that hang
//!
//! Every wait for a device has a limit, [`Client::wait_limit`], after which it returns [`Error::TimedOut`]. The client
//! then sends nothing more to its devices, and memory that they may still use is not freed until the process ends. A
//! call inside of a plugin has no limit, because the API offers none.
//!
//! # Requirements of plugins
//!
//! * **libtpu** on a machine without a TPU needs [`TPU_ENVIRONMENT`], which [`Plugin::load`] sets while that is safe.
//! * **CUDA**, to compile without a GPU, needs `ptxas`, `nvlink` and libdevice: next to the plugin as in the wheels
//!   (`grpo_pjrt::install` keeps that layout), or in the folder of the compile option `xla_gpu_cuda_data_dir`.
//! * **Logs** go to stderr. `TF_CPP_MIN_LOG_LEVEL=3` in the environment silences the CPU and CUDA plugins except for a
//!   line or two at loading; [`Plugin::load`] sets it to 1 (warnings) while that is safe, and a program with threads calls [`quiet_logs`] before it starts them. libtpu reads `TPU_MIN_LOG_LEVEL` and `TPU_STDERR_LOG_LEVEL`.
//!
//! # Progress
//!
//! Compilation may take minutes and reports no progress. During compilation the span `compile` of [`tracing`] (target `pjrt`, level
//! `info`) is open, with the fields `program`, `bytes` and, after an error, `failed`.
//!
//! # Differences between plugins
//!
//! * Cost analysis: libtpu reports `flops`, `bytes accessed` and `optimal_seconds`; the CPU plugin no seconds; CUDA
//!   nothing (ahead of time: [`Error::is_unsupported`]).
//! * The CPU plugin has no topologies and no memory statistics.
//! * Serialized executables load on the same platform and version only: see [`CompileCache`].
//!
//! # Security
//!
//! A library runs with all rights of its process, so [`Plugin::load`] refuses libraries that another user may write to,
//! or that are truncated. Libraries from `grpo_pjrt::install` are compared with their SHA-256 before their path is returned.
#![deny(unsafe_code)]

mod access;
mod buffer;
mod cache;
mod client;
mod compile_cache;
mod compile_options;
mod compiling;
mod device;
mod dtype;
mod elf;
mod error;
mod executable;
#[allow(unsafe_code)]
mod ffi;
pub mod hlo;
#[cfg(feature = "install")]
pub mod install;
mod key_value;
mod plugin;
mod runs;
#[cfg(feature = "simulated")]
mod simulated;
mod topology;
mod value;

pub use buffer::{Buffer, HostCopy};
pub use cache::{Cache, Key};
pub use client::Client;
pub use compile_cache::{CacheOutcome, CompileCache};
pub use compile_options::{CompileOptions, OptimizationLevel, OptionValue};
pub use device::{Device, DeviceDescription, DeviceMemoryStats};
pub use dtype::{ArrayType, DType, Element};
pub use error::{Code, Error, Result};
pub use executable::{Argument, CompiledMemoryStats, Executable, LoadedExecutable, OptimizedProgram};
pub use hlo::Collective;
pub use key_value::{KeyValueError, KeyValueStore};
pub use plugin::{Plugin, TPU_ENVIRONMENT, has_tpu, quiet_logs};
pub use runs::runs;
pub use topology::Topology;
pub use value::{Attributes, NamedValue};
