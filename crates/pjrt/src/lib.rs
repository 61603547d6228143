//! A safe binding to the [PJRT C API](https://openxla.org/xla/pjrt): load a plugin, compile StableHLO, run it.
//!
//! Use it to run StableHLO or HLO programs on a CPU, GPU or TPU from Rust, or to compile them for devices that are not here.
//! A *plugin* is a shared library that knows a kind of device. It opens them as a [`Client`], or describes devices that
//! are not there as a [`Topology`]. Either compiles a program; a client's runs it on [`Buffer`]s.
//!
//! ```no_run
//! use pjrt::{CompileOptions, Plugin};
//!
//! # fn main() -> pjrt::Result<()> {
//! let client = Plugin::load("xla_cpu_pjrt.so")?.client(&[("cpu_device_count", 4.into())])?;
//! let program = "
//!     func.func @main(%a: tensor<2x2xf32>) -> tensor<2x2xf32> {
//!       %0 = stablehlo.dot %a, %a : (tensor<2x2xf32>, tensor<2x2xf32>) -> tensor<2x2xf32>
//!       return %0 : tensor<2x2xf32>
//!     }";
//! let executable = client.compile(program, &CompileOptions::default())?;
//! let device = &client.addressable_devices()[0];
//! let a = client.buffer_from_host(&[1.0f32, 1.0, 0.0, 1.0], &[2, 2], device)?;
//! let outputs = executable.execute(&[&[&a]])?; // [devices][outputs]
//! assert_eq!(outputs[0][0].to_vec::<f32>()?, [1.0, 2.0, 0.0, 1.0]);
//! # Ok(())
//! # }
//! ```
//!
//! # Versions
//!
//! Argument structs have the layout of C API 0.115; plugins from 0.81 (`xla-cpu-pjrt` 0.0.1) to 0.116 (`libtpu` 0.0.51) are
//! tested. A function that a plugin lacks is an [`Error::MissingFunction`].
//!
//! # Threads and lifetimes
//!
//! Everything is `Send` and `Sync`. A buffer or executable keeps its client open; plugins are never unloaded. `execute`
//! returns after the launch, and what goes wrong later is the error of [`Buffer::wait`] or [`Buffer::to_host`]. A plugin
//! that aborts on a broken invariant takes the process with it; that cannot be caught.
//!
//! # Devices that hang
//!
//! Every wait for a device has a limit, [`Client::wait_limit`], beyond which it is an [`Error::TimedOut`]. The client asks
//! nothing more of its devices then, and what they may still use stays where it is until the process ends. A call into a
//! plugin itself has no limit, because the API has none.
//!
//! # What plugins want from their environment
//!
//! * **libtpu** on a machine without a TPU: [`TPU_ENVIRONMENT`], which [`Plugin::load`] sets while it safely can.
//! * **CUDA**, to compile without a GPU: `ptxas`, `nvlink` and libdevice, beside it as in the wheels (so does
//!   `pjrt::install`), or where the compile option `xla_gpu_cuda_data_dir` says.
//! * **Logs** go to stderr. `TF_CPP_MIN_LOG_LEVEL=3` in the environment quiets the CPU and CUDA plugins but for a line or two
//!   at loading; libtpu listens to `TPU_MIN_LOG_LEVEL` and `TPU_STDERR_LOG_LEVEL`.
//!
//! # Progress
//!
//! Compilers may take minutes and do not say how far they are. While one works, the span `compile` of [`tracing`] (target `pjrt`, level
//! `info`) is open, with the fields `program`, `bytes` and, where the compiler refuses, `failed`.
//!
//! # Where plugins differ
//!
//! * Cost analysis: libtpu has `flops`, `bytes accessed`, `optimal_seconds`; the CPU has no seconds; CUDA has none (ahead of
//!   time: [`Error::is_unsupported`]).
//! * The CPU has no topologies and no device memory statistics.
//! * Serialized executables load on the same platform and version only: see [`CompileCache`].
//!
//! # Which files are loaded
//!
//! A library runs with every right of its process, so [`Plugin::load`] refuses one that another user may write to, or one
//! that is cut off. What `pjrt::install` has installed is compared with its SHA-256 before its path is handed out.
//!
//! With the feature `install`, the module `install` fetches pinned plugins.
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
mod event;
mod executable;
#[allow(unsafe_code)]
mod ffi;
mod hlo;
#[cfg(feature = "install")]
pub mod install;
mod plugin;
mod topology;
mod value;

pub use buffer::Buffer;
pub use cache::{Cache, Key};
pub use client::Client;
pub use compile_cache::{CacheOutcome, CompileCache};
pub use compile_options::{CompileOptions, OptimizationLevel, OptionValue};
pub use device::{Device, DeviceDescription, DeviceMemoryStats};
pub use dtype::{ArrayType, DType, Element};
pub use error::{Code, Error, Result};
pub use event::Event;
pub use executable::{Argument, CompiledMemoryStats, Executable, LoadedExecutable, OptimizedProgram};
pub use hlo::Collective;
pub use plugin::{Plugin, TPU_ENVIRONMENT};
pub use topology::Topology;
pub use value::{Attributes, NamedValue};
