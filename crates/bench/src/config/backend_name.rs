//! Names of backends in configurations.

use crate::error::{Error, Result};
use grpo_backend_tpu::plugins::Kind;

/// A backend of benchmarks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendName {
    /// The CPU backend, `backend-cpu`.
    Cpu,
    /// Devices of a PJRT plugin.
    Pjrt(Kind),
}

impl BackendName {
    /// Parses `cpu`, `pjrt:cpu`, `pjrt:tpu`, `pjrt:cuda`.
    ///
    /// # Errors
    /// [`Error::Config`] for another name; `key` is the key that holds it.
    pub fn parse(key: &str, name: &str) -> Result<Self> {
        let kind = || Kind::ALL.into_iter().find(|kind| name.strip_prefix("pjrt:") == Some(kind.name()));
        match name {
            "cpu" => Ok(Self::Cpu),
            _ => kind().map(Self::Pjrt).ok_or_else(|| Error::Config {
                key: key.into(),
                expected: "a backend that benchmarks run on (cpu, pjrt:cpu, pjrt:tpu, pjrt:cuda)".into(),
                found: format!("`{name}`"),
            }),
        }
    }

    /// Returns `true` if only one process at a time can use the devices and their memory.
    pub fn is_exclusive(self) -> bool {
        matches!(self, Self::Pjrt(Kind::Tpu | Kind::Cuda))
    }
}

impl std::fmt::Display for BackendName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Pjrt(kind) => write!(f, "pjrt:{}", kind.name()),
        }
    }
}
