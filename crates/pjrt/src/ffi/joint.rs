//! Launches of several simulated processes, joined to one launch on all of their devices.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::launch::Execute;
use super::{Args, Buffer, Owned, Ref};
use crate::error::{Code, Error, Result};

/// The arguments of each device of a process.
type Lists = Vec<Vec<Ref<'static, Buffer>>>;
/// The outputs of each device of a process.
type Outputs = Vec<Vec<Owned<Buffer>>>;

/// A place where the processes of a simulation meet to launch an executable.
pub(crate) struct JointLaunch {
    processes: Mutex<Vec<Process>>,
    changed: Condvar,
}

/// The part of a process in the next launch.
#[derive(Default)]
struct Process {
    arguments: Option<Arguments>,
    /// The outputs, or the error of the launch.
    outputs: Option<std::result::Result<Outputs, String>>,
    has_ended: bool,
}

struct Arguments(Lists);

// SAFETY: PJRT objects may be used on any thread, see `Owned`.
unsafe impl Send for Arguments {}

impl JointLaunch {
    pub(crate) fn new(processes: usize) -> Self {
        let processes = std::iter::repeat_with(Process::default).take(processes).collect();
        JointLaunch { processes: Mutex::new(processes), changed: Condvar::new() }
    }

    /// Waits until all processes have called it, up to `limit`, and returns the outputs of `process`. The last process calls `launch` with
    /// the arguments of all devices. `owners` are the processes of the executable's devices, and `arguments` the lists of the own ones.
    pub(crate) fn launch(
        &self,
        process: usize,
        owners: &[usize],
        arguments: &[Vec<Ref<'_, Buffer>>],
        limit: Duration,
        launch: impl FnOnce(&[Vec<Ref<'_, Buffer>>]) -> Result<Outputs>,
    ) -> Result<Outputs> {
        let mut processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: this call returns when the launch is over, or after it has taken the arguments back, so the buffers live as long as
        // another process may use them.
        let take_list = |list: &Vec<Ref<'_, Buffer>>| list.iter().map(|buffer| unsafe { Ref::new(buffer.0) }).collect();
        processes[process].arguments = Some(Arguments(arguments.iter().map(take_list).collect()));
        if processes.iter().all(|process| process.arguments.is_some()) {
            join(&mut processes, owners, launch);
            self.changed.notify_all();
        }
        let is_waiting = |processes: &mut Vec<Process>| {
            processes[process].outputs.is_none() && !processes.iter().any(|process| process.has_ended)
        };
        let waited = self.changed.wait_timeout_while(processes, limit, is_waiting);
        let (mut processes, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let failed = |code, message| Err(Error::Api { operation: Execute::NAME, code, message });
        match std::mem::take(&mut processes[process]).outputs {
            Some(Ok(outputs)) => Ok(outputs),
            Some(Err(message)) => failed(Code::Unknown, message),
            None if processes.iter().any(|process| process.has_ended) => {
                failed(Code::Unavailable, "another process has ended".to_owned())
            }
            None => {
                let what = "the launch of the other processes";
                Err(Error::TimedOut { what, seconds: limit.as_secs_f64(), program: None })
            }
        }
    }

    /// Fails the launches of the other processes from now on.
    pub(crate) fn end(&self, process: usize) {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner)[process].has_ended = true;
        self.changed.notify_all();
    }
}

/// Launches with the arguments of all processes, and gives each its outputs.
fn join(processes: &mut [Process], owners: &[usize], launch: impl FnOnce(&[Vec<Ref<'_, Buffer>>]) -> Result<Outputs>) {
    let take = |process: &mut Process| process.arguments.take().map_or(vec![], |Arguments(lists)| lists).into_iter();
    let mut lists: Vec<_> = processes.iter_mut().map(take).collect();
    let joined: Option<Lists> = owners.iter().map(|owner| lists[*owner].next()).collect();
    let outputs = match joined.filter(|_| lists.iter_mut().all(|left| left.next().is_none())) {
        Some(lists) => launch(&lists).map_err(|error| error.to_string()),
        None => Err("a process has another number of devices than lists of arguments".to_owned()),
    };
    match outputs {
        Ok(outputs) => {
            processes.iter_mut().for_each(|process| process.outputs = Some(Ok(vec![])));
            for (owner, device_outputs) in owners.iter().zip(outputs) {
                if let Some(Ok(process_outputs)) = &mut processes[*owner].outputs {
                    process_outputs.push(device_outputs);
                }
            }
        }
        Err(error) => processes.iter_mut().for_each(|process| process.outputs = Some(Err(error.clone()))),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::{self, FakeObject};
    use super::*;
    use std::thread;

    /// Returns what each of two processes gets for a launch on devices with these owners, if the plugin's outputs are the buffers `objects`.
    fn launch(owners: &[usize], limits: [u64; 2], objects: &[&'static FakeObject]) -> Vec<Result<Outputs>> {
        let (joint, origin) = (JointLaunch::new(2), fake::origin(&[]));
        let outputs = |arguments: &[Vec<Ref<'_, Buffer>>]| {
            assert!(
                arguments.iter().enumerate().all(|(device, list)| list.len() == 1 + device),
                "in the order of devices"
            );
            Ok(objects.iter().map(|object| vec![object.handle(&origin)]).collect())
        };
        let launch_process = |process: usize| {
            let own = owners.iter().enumerate().filter(|(_, owner)| **owner == process);
            let buffer: Owned<Buffer> = FakeObject::new(true, None).handle(&origin);
            let lists: Vec<_> = own.map(|(device, _)| vec![buffer.get(); 1 + device]).collect();
            joint.launch(process, owners, &lists, Duration::from_millis(limits[process]), outputs)
        };
        thread::scope(|scope| {
            let threads =
                [0, 1].map(|process| (limits[process] > 0).then(|| scope.spawn(move || launch_process(process))));
            threads.into_iter().flatten().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn a_joint_launch_has_the_arguments_of_all_devices_and_returns_the_own_outputs() {
        let objects = [0; 4].map(|_| FakeObject::new(true, None));
        let found = launch(&[1, 0, 0, 1], [60_000; 2], &objects);
        let found: Vec<Outputs> = found.into_iter().map(|outputs| outputs.unwrap()).collect();
        for (outputs, expected) in found.iter().zip([[1, 2], [0, 3]]) {
            assert_eq!(outputs.len(), 2);
            for (device_outputs, index) in outputs.iter().zip(expected) {
                assert!(std::ptr::addr_eq(device_outputs[0].get().0.as_ptr(), objects[index]));
            }
        }
    }

    #[test]
    fn a_process_that_is_missing_or_has_ended_is_an_error() {
        let alone = launch(&[0, 1], [1, 0], &[]).remove(0).err().unwrap();
        assert!(alone.is_timed_out() && alone.to_string().contains("the launch of the other processes"), "{alone}");
        let joint = JointLaunch::new(2);
        joint.end(1);
        let ended = joint.launch(0, &[0, 1], &[vec![]], Duration::from_secs(60), |_| Ok(vec![])).err().unwrap();
        assert!(ended.to_string().contains("another process has ended"), "{ended}");
    }
}
