//! Arrays on a device.

use bytemuck::Zeroable;

use crate::client::Client;
use crate::device::Device;
use crate::dtype::{ArrayType, DType, Element};
use crate::error::{Error, Result};
use crate::ffi::{self, Args, Owned, Ref};

/// An array on a device, freed when dropped.
///
/// The output of a program is a buffer as soon as the program is launched: its type and shape are known, and its
/// elements are available when [`Buffer::wait`] returns. If the program fails, [`Buffer::wait`] and [`Buffer::to_host`]
/// return the error.
pub struct Buffer {
    // Declared before `client`, because fields are dropped in order.
    handle: Owned<ffi::Buffer>,
    client: Client,
    array_type: ArrayType,
}

impl Buffer {
    pub(crate) fn new(client: Client, handle: Owned<ffi::Buffer>) -> Result<Self> {
        let element = handle.ask(ffi::BufferElementType::new)?;
        let shape = handle.ask(ffi::BufferDimensions::new)?;
        let dims = shape.dims.get().iter().map(|&dim| usize::try_from(dim).unwrap_or(0)).collect();
        let array_type = ArrayType { dtype: DType::from_raw(element.code)?, dims };
        Ok(Buffer { handle, client, array_type })
    }

    /// Returns the element type and shape.
    pub fn array_type(&self) -> &ArrayType {
        &self.array_type
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.array_type.dtype
    }

    /// Returns the shape; empty for a scalar.
    pub fn dims(&self) -> &[usize] {
        &self.array_type.dims
    }

    /// Returns the number of elements.
    pub fn num_elements(&self) -> usize {
        self.dims().iter().product()
    }

    /// Returns the client that the buffer belongs to.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns the device that holds the buffer.
    pub fn device(&self) -> Result<Device> {
        let args = self.handle.ask(ffi::BufferDevice::new)?;
        let found = args.device.ok_or(Error::Nothing { operation: ffi::BufferDevice::NAME })?;
        let device = self.client.devices().iter().find(|device| device.handle().is(found));
        device.cloned().ok_or(Error::Foreign { operation: ffi::BufferDevice::NAME, what: "device" })
    }

    /// Waits for the elements and copies them into `destination`, in row-major order for any layout on the device.
    ///
    /// The copy goes through a vector, as in [`Buffer::to_vec`], so it needs memory for both: a hanging device may
    /// still write after the wait has timed out, and must not write into the caller's memory.
    ///
    /// # Errors
    ///
    /// [`Error::DType`] and [`Error::Size`] if `destination` does not fit; the errors of [`Buffer::to_vec`].
    pub fn to_host<T: Element>(&self, destination: &mut [T]) -> Result<()> {
        let operation = "to_host";
        self.check_dtype::<T>(operation)?;
        if destination.len() != self.num_elements() {
            let size = self.dtype().size();
            let (expected, found) = (self.num_elements() * size, destination.len() * size);
            return Err(Error::Size { operation, expected, found });
        }
        destination.copy_from_slice(&self.to_vec()?);
        Ok(())
    }

    /// Waits for the elements and copies them into a new vector, in row-major order for any layout on the device.
    ///
    /// # Errors
    ///
    /// [`Error::DType`] for another element type; [`Error::TimedOut`] after [`Client::wait_limit`]; the error of the
    /// program that computes the elements.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.to_vec_async()?.wait()
    }

    /// Starts to copy the elements into a new vector, in row-major order for any layout on the device, so that copies of
    /// several devices overlap.
    ///
    /// # Errors
    ///
    /// [`Error::DType`] for another element type; [`Error::TimedOut`] if an earlier wait for the device timed out.
    pub fn to_vec_async<T: Element>(&self) -> Result<HostCopy<T>> {
        self.check_dtype::<T>("to_vec")?;
        let zeros = vec![T::Bits::zeroed(); self.num_elements()];
        Ok(HostCopy { copy: ffi::copy_to_host(&self.handle, self.dims().len(), zeros)? })
    }

    fn check_dtype<T: Element>(&self, operation: &'static str) -> Result<()> {
        if T::DTYPE != self.dtype() {
            return Err(Error::DType { operation, expected: self.dtype(), found: T::DTYPE });
        }
        Ok(())
    }

    /// Blocks until the elements are available.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] after [`Client::wait_limit`]; the error of the program that computes the elements.
    pub fn wait(&self) -> Result<()> {
        let mut args = self.handle.ask(ffi::BufferReadyEvent::new)?;
        let event = args.event.given(self.handle.origin(), ffi::BufferReadyEvent::NAME)?;
        ffi::wait(&event, "the computation of a buffer, or the copy to it,")
    }

    /// Frees the elements now, even if the buffer is still referenced. Using the buffer afterwards is an error.
    pub fn delete(&self) -> Result<()> {
        self.handle.origin().waits().check()?;
        self.client.api().call(&mut ffi::BufferDelete::new(self.handle.get()))
    }

    /// Returns `true` if the elements have been freed.
    pub fn is_deleted(&self) -> Result<bool> {
        Ok(self.handle.ask(ffi::BufferIsDeleted::new)?.is_deleted)
    }

    pub(crate) fn handle(&self) -> Ref<'_, ffi::Buffer> {
        self.handle.get()
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({})", self.array_type)
    }
}

/// A copy of a buffer to the host that [`Buffer::to_vec_async`] has started. Dropping it waits for the copy.
#[must_use]
pub struct HostCopy<T: Element> {
    copy: ffi::HostCopy<T::Bits>,
}

impl<T: Element> HostCopy<T> {
    /// Waits for the copy and returns the elements.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] after [`Client::wait_limit`]; the error of the program that computes the elements.
    pub fn wait(self) -> Result<Vec<T>> {
        Ok(T::from_bits(self.copy.wait()?))
    }
}

impl<T: Element> std::fmt::Debug for HostCopy<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostCopy({})", T::DTYPE)
    }
}
