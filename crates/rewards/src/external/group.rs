//! A process group: a program and all processes that it starts. It is killed when its owner drops it or this process ends.
//!
//! Dropping a [`Group`] sends SIGKILL to the whole group. If this process is killed, it drops nothing, so each group has a watchdog: a
//! shell that waits for the end of its standard input, whose other end only this process holds, and then kills the group. Processes that
//! leave the group (`setsid`, as daemons do) are not killed.

use std::collections::BTreeSet;
use std::io;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard};

/// A program that was started as the leader of a process group.
pub(super) struct Group {
    pub(super) leader: Child,
    watchdog: Option<Child>,
}

impl Group {
    /// Starts `command`; the caller sets its pipes.
    pub(super) fn spawn(command: &mut Command) -> io::Result<Self> {
        // With its own group, the program survives Ctrl-C, because the current step still needs rewards, and the processes that it starts
        // are killed with it.
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
        // The watchdog ends first, so that it cannot kill a later group with the same id.
        if let Some(watchdog) = &mut self.watchdog {
            let _ = watchdog.kill();
            let _ = watchdog.wait();
        }
        kill(self.leader.id());
        let _ = self.leader.kill();
        running().remove(&self.leader.id());
        // The process was killed; this only reaps it.
        let _ = self.leader.wait();
    }
}

/// Kills the programs of every [`crate::Program`] in this process, and the processes that they started. Dropping a reward kills only its
/// own. Use this before a process exits without dropping values, as after a second Ctrl-C.
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

/// Starts a process that kills `group` when this process ends in any way.
#[cfg(unix)]
fn watchdog(group: u32) -> Option<Child> {
    let mut command = Command::new("/bin/sh");
    // `read` fails at the end of the input. Both commands are shell builtins.
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

fn running() -> MutexGuard<'static, BTreeSet<u32>> {
    static RUNNING: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
    super::lock(&RUNNING)
}
