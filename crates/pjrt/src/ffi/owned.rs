//! Handles that destroy their objects in the right order.

use std::ptr::NonNull;
use std::sync::Arc;

use super::{Api, Args, HandleArgs, Ref, Waits};
use crate::error::Result;

/// An object of the plugin that its owner destroys with the function in `SLOT`.
pub(crate) trait Handle {
    const NAME: &'static str;
    const SLOT: usize;
}

/// The origin of an object: its plugin, and the wait limits of its client. An object without a client has its own,
/// unused limits.
#[derive(Clone)]
pub(crate) struct Origin {
    api: &'static Api,
    waits: Arc<Waits>,
}

impl Origin {
    /// Creates the origin of a new client, or of an object without one.
    pub(crate) fn new(api: &'static Api) -> Self {
        Origin { api, waits: Arc::new(Waits::new()) }
    }

    pub(crate) fn waits(&self) -> &Waits {
        &self.waits
    }
}

/// A handle that is destroyed when dropped, unless a wait for its client's device has timed out: the device may still
/// use the object, and destroying it could block without a limit.
pub(crate) struct Owned<H: Handle> {
    handle: NonNull<H>,
    origin: Origin,
}

// SAFETY: the objects of the PJRT C API are thread-safe wrappers around thread-safe C++ objects, and may be used and
// destroyed on any thread.
unsafe impl<H: Handle> Send for Owned<H> {}
// SAFETY: as above.
unsafe impl<H: Handle> Sync for Owned<H> {}

impl<H: Handle> Owned<H> {
    /// # Safety
    ///
    /// `handle` must be a live object that the caller received from the plugin of `origin` and owns.
    pub(super) unsafe fn new(handle: NonNull<H>, origin: Origin) -> Self {
        Owned { handle, origin }
    }

    pub(crate) fn api(&self) -> &'static Api {
        self.origin.api
    }

    pub(crate) fn origin(&self) -> &Origin {
        &self.origin
    }

    pub(crate) fn get(&self) -> Ref<'_, H> {
        // SAFETY: the object lives until `self` is dropped.
        unsafe { Ref::new(self.handle) }
    }

    /// Makes a call whose only argument is this object, and returns the struct with its results.
    pub(crate) fn ask<'a, A: Args>(&'a self, call: impl FnOnce(Ref<'a, H>) -> A) -> Result<A> {
        self.api().outputs(call(self.get()))
    }
}

impl<H: Handle> Drop for Owned<H> {
    fn drop(&mut self) {
        if self.origin.waits.is_given_up() {
            return;
        }
        let mut args = HandleArgs::new(self.handle.as_ptr());
        if let Ok(destroy) = self.api().function(H::SLOT, H::NAME) {
            // SAFETY: the handle is owned, live, and not used afterwards; all destroy functions take this struct.
            let error = unsafe { destroy((&raw mut args).cast()) };
            // An object that cannot be destroyed is leaked; its error is freed.
            let _ = self.api().check(H::NAME, error);
        }
    }
}

/// An object that belongs to an object of type `P`, which it keeps alive.
pub(crate) struct Child<H, P: Handle> {
    handle: NonNull<H>,
    parent: Arc<Owned<P>>,
}

// SAFETY: as for `Owned`.
unsafe impl<H, P: Handle> Send for Child<H, P> {}
// SAFETY: as for `Owned`.
unsafe impl<H, P: Handle> Sync for Child<H, P> {}

impl<H, P: Handle> Clone for Child<H, P> {
    fn clone(&self) -> Self {
        Child { handle: self.handle, parent: Arc::clone(&self.parent) }
    }
}

impl<H, P: Handle> Child<H, P> {
    /// Returns the objects that `list` finds in `parent`. Because `list` is generic over the lifetime, they must come
    /// from `parent`.
    pub(crate) fn of(
        parent: &Arc<Owned<P>>,
        list: impl for<'a> Fn(Ref<'a, P>) -> Result<&'a [Ref<'a, H>]>,
    ) -> Result<Vec<Self>> {
        let found = list(parent.get())?;
        Ok(found.iter().map(|child| Child { handle: child.0, parent: Arc::clone(parent) }).collect())
    }

    pub(crate) fn get(&self) -> Ref<'_, H> {
        // SAFETY: the object lives as long as its parent.
        unsafe { Ref::new(self.handle) }
    }

    pub(crate) fn parent(&self) -> &Arc<Owned<P>> {
        &self.parent
    }
}
