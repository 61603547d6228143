//! Copies between host slices and device buffers.
//!
//! Both wait for the transfer. After a timeout, the transfer may still happen, so the plugin never accesses memory
//! borrowed from the caller after its call has returned.

use super::calls::calls;
use super::wait::ended;
use super::{
    Args, Buffer, BufferReadyEvent, Client, Device, Event, Header, OutHandle, Owned, Ref, Slice, Unused, wait,
};
use crate::error::{Error, Result};

/// The plugin reads the slice only during the call. It may copy the slice for that, as GPU plugins always do; XLA's CPU
/// copies it directly to the buffer.
const IMMUTABLE_ONLY_DURING_CALL: i32 = 0;

calls! {
    22 "PJRT_Client_BufferFromHostBuffer" FromHost<'a> {
        client: Ref<'a, Client>, data: *const u8, type_code: i32, dims: Slice<'a, i64>, byte_strides: Unused<2>,
        semantics: i32, device: Ref<'a, Device>,
        => memory: Unused<1>, device_layout: Unused<1>, done_with_host_buffer: OutHandle<Event>,
        buffer: OutHandle<Buffer>,
    }
    70 "PJRT_Buffer_ToHostBuffer" ToHost<'a> {
        buffer: Ref<'a, Buffer>, host_layout: &'a MemoryLayout<'a>, data: *mut u8, size: usize, => event: OutHandle<Event>,
    }
}

/// `PJRT_Buffer_MemoryLayout` with no tiles.
#[repr(C)]
pub(super) struct MemoryLayout<'a> {
    header: Header,
    tiled_header: Header,
    minor_to_major: Slice<'a, i64>,
    tiles: Unused<3>,
    /// 0: tiled, 1: strides.
    kind: i32,
}

/// Copies `data`, dense and row-major, to the device, and waits for the transfer, so that the plugin's internal copies
/// do not accumulate. `element_size` is the size of `type_code`.
pub(crate) fn copy_from_host(
    client: &Owned<Client>,
    device: Ref<'_, Device>,
    data: &[u8],
    (type_code, element_size): (i32, usize),
    dims: &[i64],
) -> Result<Owned<Buffer>> {
    let elements = dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim.try_into().ok()?));
    let expected = elements.and_then(|elements| elements.checked_mul(element_size));
    if expected != Some(data.len()) {
        return Err(Error::Size {
            operation: FromHost::NAME,
            expected: expected.unwrap_or(usize::MAX),
            found: data.len(),
        });
    }
    client.origin().waits().check()?;
    let (strides, semantics) = (Unused::default(), IMMUTABLE_ONLY_DURING_CALL);
    let mut args = FromHost::new(client.get(), data.as_ptr(), type_code, dims.into(), strides, semantics, device);
    client.api().call(&mut args)?;
    // This event is ready: the plugin has already read the slice.
    drop(args.done_with_host_buffer.take(client.origin()));
    let buffer = args.buffer.given(client.origin(), FromHost::NAME)?;
    let mut ready = buffer.ask(BufferReadyEvent::new)?;
    if let Some(event) = ready.event.take(client.origin()) {
        wait(&event, "a copy to the device")?;
    }
    Ok(buffer)
}

/// Copies a buffer into `data`, dense and row-major for any layout on the device.
///
/// `data` is owned, because it must outlive a copy whose wait has timed out.
pub(crate) fn copy_to_host<T: bytemuck::Pod>(buffer: &Owned<Buffer>, rank: usize, mut data: Vec<T>) -> Result<Vec<T>> {
    buffer.origin().waits().check()?;
    let minor_to_major: Vec<i64> = (0..rank as i64).rev().collect();
    let size = std::mem::offset_of!(MemoryLayout<'_>, kind);
    let layout = MemoryLayout {
        header: Header::new(size + size_of::<i32>()),
        tiled_header: Header::new(size - size_of::<Header>()),
        minor_to_major: minor_to_major.as_slice().into(),
        tiles: Unused::default(),
        kind: 0,
    };
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut data);
    let mut args = ToHost::new(buffer.get(), &layout, bytes.as_mut_ptr(), bytes.len());
    buffer.api().call(&mut args)?;
    let Some(event) = args.event.take(buffer.origin()) else { return Ok(data) };
    match ended(&event, "a copy from the device, which waits for the program that computes what is copied,") {
        Ok(outcome) => outcome.map(|()| data),
        Err(unknown) => {
            // The device may still write there, so the memory is never freed.
            std::mem::forget(data);
            Err(unknown)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_layouts_match_the_header() {
        assert_eq!(SIZES, [("PJRT_Client_BufferFromHostBuffer", 22, 120), ("PJRT_Buffer_ToHostBuffer", 70, 56)]);
        assert_eq!(std::mem::offset_of!(FromHost<'_>, semantics), 72);
        assert_eq!((size_of::<MemoryLayout<'_>>(), std::mem::offset_of!(MemoryLayout<'_>, kind)), (80, 72));
    }
}
