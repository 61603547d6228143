//! A connection between two processes, and the failures that it reports.

use crate::error::{Error, Result};
use crate::message::{self, MAX_FRAME, Verb};
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind};
use std::net::{Shutdown, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A failed process, as sent to the others.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub(crate) process: usize,
    pub(crate) address: String,
    pub(crate) reason: String,
}

impl From<Failure> for Error {
    fn from(Failure { process, address, reason }: Failure) -> Self {
        Self::Peer { process, address, reason }
    }
}

/// A connection. Messages of several threads do not mix.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) stream: TcpStream,
    writer: Mutex<TcpStream>,
}

impl Link {
    pub(crate) fn new(stream: TcpStream, timeout: Duration) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        Ok(Self { writer: Mutex::new(stream.try_clone()?), stream })
    }

    pub(crate) fn send(&self, verb: Verb, id: u64, key: &str, value: &[u8]) -> io::Result<()> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        message::write(&mut *writer, verb, id, key, value)
    }

    pub(crate) fn receive(&self) -> io::Result<message::Message> {
        message::read(&mut &self.stream, MAX_FRAME)
    }

    /// Sends the failure of a process, and nothing after it.
    pub(crate) fn send_failure(&self, failure: &Failure) {
        let value = serde_json::to_vec(failure).unwrap_or_default();
        // A peer that is gone needs no message.
        let _ = self.send(Verb::Failure, 0, "", &value);
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    pub(crate) fn close(&self) {
        // The connection may be closed already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Completes a sentence about the process at the other end of a broken connection.
pub(crate) fn reason(error: &io::Error, timeout: Duration) -> String {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            format!(
                "has sent nothing for {} seconds: it hangs, or its machine or network is lost",
                timeout.as_secs_f64()
            )
        }
        ErrorKind::InvalidData => format!("breaks the protocol: {error}"),
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            "has closed its connection: it has ended; its own output has the cause".to_owned()
        }
        _ => format!("is lost: {error}"),
    }
}

/// Returns an error of a process as its peers report it.
pub(crate) fn failure_of(error: &Error, process: usize, address: &str) -> Failure {
    match error.clone() {
        Error::Peer { process, address, reason } => Failure { process, address, reason },
        error => Failure { process, address: address.to_owned(), reason: format!("has failed: {error}") },
    }
}

/// Reads a failure that another process has sent.
pub(crate) fn parse_failure(value: &[u8]) -> Result<Error, String> {
    let failure: Failure = serde_json::from_slice(value).map_err(|error| format!("breaks the protocol: {error}"))?;
    Ok(failure.into())
}
