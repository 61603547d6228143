//! Events: operations of a device that have ended, or will.

use crate::client::Client;
use crate::error::Result;
use crate::ffi::{self, Owned};

/// Becomes ready when the work behind it is done or has failed.
pub struct Event {
    // Before the client: fields are dropped in order.
    handle: Owned<ffi::Event>,
    // What it waits for runs on the client's threads.
    _client: Client,
}

impl Event {
    pub(crate) fn new(client: Client, handle: Owned<ffi::Event>) -> Self {
        Event { handle, _client: client }
    }

    /// Whether the work is done or has failed.
    pub fn is_ready(&self) -> Result<bool> {
        let mut args = ffi::EventIsReady::new(self.handle.get());
        self.handle.api().call(&mut args)?;
        Ok(args.is_ready)
    }

    /// Blocks until the work is done; its failure is the error.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`](crate::Error::TimedOut) after [`Client::wait_limit`]; whatever went wrong in the work.
    pub fn wait(&self) -> Result<()> {
        ffi::wait(&self.handle, "the computation of a buffer")
    }
}
