//! A safe binding to the [PJRT C API](https://openxla.org/xla/pjrt): load a plugin, compile StableHLO, run it.
#![deny(unsafe_code)]

mod buffer;
mod client;
mod compile_cache;
mod compile_options;
mod device;
mod dtype;
mod error;
mod event;
mod executable;
#[allow(unsafe_code)]
mod ffi;
#[cfg(feature = "install")]
pub mod install;
mod plugin;
mod topology;
mod value;

pub use buffer::Buffer;
pub use client::Client;
pub use compile_cache::{CacheOutcome, CompileCache};
pub use compile_options::{CompileOptions, OptionValue};
pub use device::{Device, DeviceDescription, DeviceMemoryStats};
pub use dtype::{DType, Element};
pub use error::{Code, Error, Result};
pub use event::Event;
pub use executable::{Argument, CompiledMemoryStats, Executable, LoadedExecutable, OptimizedProgram};
pub use plugin::{Plugin, TPU_ENVIRONMENT};
pub use topology::Topology;
pub use value::{Attributes, NamedValue};
