//! Several processes simulated in one, to test programs for the devices of several processes on a plugin without communication between
//! processes.

use std::sync::Arc;

use crate::client::Client;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::ffi::{Args, Buffer, JointLaunch, Launcher, LoadedAddressableDevices, Owned, Ref};

/// A process of a simulation.
pub(crate) struct Process {
    index: usize,
    /// The processes of the client's devices.
    owners: Vec<usize>,
    joint: Arc<JointLaunch>,
}

impl Client {
    /// Returns one client for each of several simulated processes; `owners` are the processes of [`Client::devices`], from 0.
    ///
    /// As in real processes, [`Client::addressable_devices`] are the devices of the process, descriptions have the index of the device's
    /// process, and an executable on the devices of all processes takes and returns the buffers of the own devices. It is launched when all
    /// processes have called [`LoadedExecutable::execute`](crate::LoadedExecutable::execute), so each process needs a thread.
    pub fn simulated_processes(&self, owners: &[usize]) -> Vec<Client> {
        let processes = owners.iter().max().map_or(0, |last| last + 1);
        let joint = Arc::new(JointLaunch::new(processes));
        let devices = self.devices().iter().zip(owners);
        let devices: Vec<Device> = devices.map(|(device, owner)| device.clone().of_process(*owner as i32)).collect();
        let process_client = |index: usize| {
            let own = devices.iter().zip(owners).filter(|(_, owner)| **owner == index);
            let own = own.map(|(device, _)| device.clone()).collect();
            self.of_process(
                [devices.clone(), own],
                Process { index, owners: owners.to_vec(), joint: Arc::clone(&joint) },
            )
        };
        (0..processes).map(process_client).collect()
    }
}

impl Process {
    /// Launches an executable of `client`: at once if it runs on own devices only, otherwise together with the other processes.
    pub(crate) fn launch(
        &self,
        client: &Client,
        launcher: &Launcher,
        arguments: &[Vec<Ref<'_, Buffer>>],
        not_donated: &[i64],
    ) -> Result<Vec<Vec<Owned<Buffer>>>> {
        let devices = launcher.loaded().ask(LoadedAddressableDevices::new)?;
        let known = client.devices();
        let owner_of = |&device| known.iter().position(|each| each.handle().is(device)).map(|at| self.owners[at]);
        let owners: Option<Vec<usize>> = devices.devices.get().iter().map(owner_of).collect();
        let owners = owners.ok_or(Error::Nothing { operation: LoadedAddressableDevices::NAME })?;
        let launch = |arguments: &[Vec<Ref<'_, Buffer>>]| {
            let _in_order = (owners.len() > 1).then(|| client.launch_in_order());
            launcher.launch(arguments, not_donated)
        };
        match owners.iter().all(|owner| *owner == self.index) {
            true => launch(arguments),
            false => self.joint.launch(self.index, &owners, arguments, client.wait_limit(), launch),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.joint.end(self.index);
    }
}
