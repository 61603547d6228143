//! Checks the section `distributed` with the rest of the configuration.

use crate::{PolicyDevice, Result, TrainConfig, check};

impl TrainConfig {
    /// Checks the section `distributed` with the rest of the configuration.
    pub(super) fn validate_distributed(&self) -> Result<()> {
        self.distributed.validate()?;
        match self.distributed.num_processes {
            Some(num_processes) => self.validate_processes(num_processes),
            None => Ok(()),
        }
    }

    /// Checks the configuration of a run with this number of processes, which libtpu's environment may say: TPUs and GPUs of several
    /// processes form one mesh.
    ///
    /// # Errors
    /// [`crate::Error::Key`].
    pub fn validate_processes(&self, num_processes: usize) -> Result<()> {
        let is_of_mesh = matches!(self.policy.device, PolicyDevice::PjrtTpu | PolicyDevice::PjrtCuda);
        let expected = format!("a mesh of the devices of all {num_processes} processes, such as {{fsdp: -1}}");
        check(num_processes == 1 || !is_of_mesh || self.policy.mesh.is_some(), "policy.mesh", &expected, "null")
    }
}
