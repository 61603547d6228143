//! A program with everything that it starts: a process group, which ends when its owner drops it or when this process is gone.
//!
//! Dropping a [`Group`] sends SIGKILL to all of it. A process that is killed itself drops nothing, so each group has a watchdog: a shell
//! that waits for the end of its standard input, whose other end only this process holds, and then kills the group. Who leaves the
//! group (`setsid`, as daemons do) is not reached.

use std::collections::BTreeSet;
use std::io;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A program that was started as the leader of a process group.
pub(super) struct Group {
    pub(super) leader: Child,
    watchdog: Option<Child>,
}

impl Group {
    /// Starts `command`, whose pipes are the caller's business.
    pub(super) fn spawn(command: &mut Command) -> io::Result<Self> {
        // A group of its own: Ctrl-C lets the step at hand end, for which rewards are needed; and what the program has
        // started is killed with it.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(command, 0);
        let mut running = running();
        let leader = command.spawn()?;
        running.insert(leader.id());
        Ok(Self { watchdog: watchdog(leader.id()), leader })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // First: it must not kill a later group of the same number.
        if let Some(watchdog) = &mut self.watchdog {
            let _ = watchdog.kill();
            let _ = watchdog.wait();
        }
        kill(self.leader.id());
        let _ = self.leader.kill();
        running().remove(&self.leader.id());
        // It has been killed: this only takes it off the list of processes.
        let _ = self.leader.wait();
    }
}

/// Kills the programs of every [`crate::Program`] of this process and what they have started. Dropping a reward does that for its own;
/// this is for a process that is about to end without dropping anything, on a second Ctrl-C.
pub fn kill_programs() {
    running().iter().copied().for_each(kill);
}

#[cfg(unix)]
fn kill(group: u32) {
    if let Some(group) = i32::try_from(group).ok().and_then(rustix::process::Pid::from_raw) {
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
}

#[cfg(not(unix))]
fn kill(_: u32) {}

/// A process that kills `group` when this one has ended, however that was.
#[cfg(unix)]
fn watchdog(group: u32) -> Option<Child> {
    let mut command = Command::new("/bin/sh");
    // `read` fails at the end of the input. Both commands are built into every shell.
    command.args(["-c", "read -r _; kill -s KILL -- \"-$1\"", "grpo-watchdog"]).arg(group.to_string());
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let started = command.spawn();
    let started = started.inspect_err(|error| {
        tracing::warn!("cannot start /bin/sh ({error}): reward programs stay if this process is killed with SIGKILL");
    });
    started.ok()
}

#[cfg(not(unix))]
fn watchdog(_: u32) -> Option<Child> {
    None
}

/// The groups that run, for [`kill_programs`].
fn running() -> MutexGuard<'static, BTreeSet<u32>> {
    static RUNNING: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}
