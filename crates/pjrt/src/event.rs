//! Events: the completion of operations on a device.

use crate::client::Client;
use crate::error::Result;
use crate::ffi::{self, Owned};

/// An event that becomes ready when an operation has completed or failed.
pub struct Event {
    // Declared before `_client`, because fields are dropped in order.
    handle: Owned<ffi::Event>,
    // The operation runs on the client's threads.
    _client: Client,
}

impl Event {
    pub(crate) fn new(client: Client, handle: Owned<ffi::Event>) -> Self {
        Event { handle, _client: client }
    }

    /// Returns `true` if the operation has completed or failed.
    pub fn is_ready(&self) -> Result<bool> {
        Ok(self.handle.ask(ffi::EventIsReady::new)?.is_ready)
    }

    /// Blocks until the operation has completed, and returns its error if it failed.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`](crate::Error::TimedOut) after [`Client::wait_limit`]; the error of the operation.
    pub fn wait(&self) -> Result<()> {
        ffi::wait(&self.handle, "the computation of a buffer")
    }
}
