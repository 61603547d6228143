//! Runs a program with a time limit.

use std::io::{self, PipeWriter, Read, pipe};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

/// The pause between two looks at a running program.
const PAUSE: Duration = Duration::from_millis(5);
/// The longest wait for the rest of the output of a program that has ended. A process that it started may keep the pipe open.
const REST: Duration = Duration::from_secs(1);

/// The end of a program.
#[derive(Debug)]
pub(crate) struct Ended {
    /// The exit status; `None` if the program was killed at the time limit.
    pub(crate) status: Option<ExitStatus>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs `command` without input, and kills it after `limit`.
///
/// # Errors
/// The program, or a thread that reads its output, cannot be started.
pub(crate) fn run(command: &mut Command, limit: Duration) -> io::Result<Ended> {
    let (stdout, stdout_pipe) = collect()?;
    let (stderr, stderr_pipe) = collect()?;
    let mut child = command.stdin(Stdio::null()).stdout(stdout_pipe).stderr(stderr_pipe).spawn()?;
    // The command holds the writing ends of the pipes.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let begin = Instant::now();
    let status = loop {
        match child.try_wait()? {
            Some(status) => break Some(status),
            None if begin.elapsed() >= limit => {
                child.kill()?;
                child.wait()?;
                break None;
            }
            None => thread::sleep(PAUSE),
        }
    };
    let text = |output: &Receiver<Vec<u8>>| {
        let bytes = output.recv_timeout(REST).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    Ok(Ended { status, stdout: text(&stdout), stderr: text(&stderr) })
}

/// Returns a pipe for a program's output, which a thread of its own reads to its end, so that a full pipe does not stop the program.
fn collect() -> io::Result<(Receiver<Vec<u8>>, PipeWriter)> {
    let (mut reader, writer) = pipe()?;
    let (sender, receiver) = channel();
    Builder::new().spawn(move || {
        let mut bytes = vec![];
        // A broken pipe ends the output, and nobody waits for late output.
        let _ = reader.read_to_end(&mut bytes);
        let _ = sender.send(bytes);
    })?;
    Ok((receiver, writer))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Ended {
        run(Command::new("/bin/sh").args(["-c", script]), limit).expect("a shell")
    }

    #[test]
    fn output_and_status_of_a_program_are_returned() {
        let ended = shell("echo out; echo err >&2; exit 3", Duration::from_secs(60));
        assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("out\n", "err\n"));
        assert_eq!(ended.status.and_then(|status| status.code()), Some(3));
        // More than a pipe holds.
        let many =
            shell("i=0; while [ $i -lt 9000 ]; do echo 0123456789abcdef; i=$((i+1)); done", Duration::from_secs(60));
        assert_eq!(many.stdout.len(), 9000 * 17);
    }

    #[test]
    fn a_missing_program_is_an_error() {
        let error = run(&mut Command::new("/no/such/program"), Duration::from_secs(1)).expect_err("there is none");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    /// Tests that take seconds: `cargo fast` skips modules of this name.
    mod slow {
        use super::*;

        #[test]
        fn a_program_that_does_not_end_is_killed() {
            let ended = shell("echo begun; while :; do :; done", Duration::from_millis(300));
            assert!(ended.status.is_none(), "{ended:?}");
            // A process that keeps the pipes open does not delay the end.
            let ended = shell("sleep 5 & exit 0", Duration::from_secs(60));
            assert!(ended.status.is_some_and(|status| status.success()), "{ended:?}");
        }
    }
}
