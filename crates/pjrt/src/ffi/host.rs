//! Copies between host slices and device buffers.
//!
//! Both wait for the transfer. After a timeout, the transfer may still happen, so the plugin never accesses memory
//! borrowed from the caller after its call has returned.

use std::ffi::c_void;

use super::wait::ended;
use super::{Args, Buffer, BufferReadyEvent, Client, Device, Event, Header, OutHandle, Owned, Ref, Slice, wait};
use crate::error::{Error, Result};

/// The plugin reads the slice only during the call. It may copy the slice for that, as GPU plugins always do; XLA's CPU
/// copies it directly to the buffer.
const IMMUTABLE_ONLY_DURING_CALL: i32 = 0;

#[repr(C)]
struct FromHostArgs<'a> {
    header: Header,
    client: Ref<'a, Client>,
    data: *const u8,
    type_code: i32,
    dims: Slice<'a, i64>,
    byte_strides: Slice<'a, i64>,
    semantics: i32,
    device: Ref<'a, Device>,
    memory: *const c_void,
    device_layout: *const c_void,
    done_with_host_buffer: OutHandle<Event>,
    buffer: OutHandle<Buffer>,
}

// SAFETY: the layout is declared as in the header.
unsafe impl Args for FromHostArgs<'_> {
    const NAME: &'static str = "PJRT_Client_BufferFromHostBuffer";
    const SLOT: usize = 22;
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
            operation: FromHostArgs::NAME,
            expected: expected.unwrap_or(usize::MAX),
            found: data.len(),
        });
    }
    client.origin().waits().check()?;
    let mut args = FromHostArgs {
        header: Header::new(size_of::<FromHostArgs<'_>>()),
        client: client.get(),
        data: data.as_ptr(),
        type_code,
        dims: dims.into(),
        byte_strides: Slice::null(),
        semantics: IMMUTABLE_ONLY_DURING_CALL,
        device,
        memory: std::ptr::null(),
        device_layout: std::ptr::null(),
        done_with_host_buffer: OutHandle::default(),
        buffer: OutHandle::default(),
    };
    client.api().call(&mut args)?;
    // This event is ready: the plugin has already read the slice.
    drop(args.done_with_host_buffer.take(client.origin()));
    let buffer = args.buffer.take(client.origin()).ok_or(Error::Nothing { operation: FromHostArgs::NAME })?;
    let mut ready = BufferReadyEvent::new(buffer.get());
    client.api().call(&mut ready)?;
    if let Some(event) = ready.event.take(client.origin()) {
        wait(&event, "a copy to the device")?;
    }
    Ok(buffer)
}

/// `PJRT_Buffer_MemoryLayout` with no tiles.
#[repr(C)]
struct MemoryLayout<'a> {
    header: Header,
    tiled_header: Header,
    minor_to_major: Slice<'a, i64>,
    tile_dims: *const i64,
    tile_dim_sizes: *const usize,
    num_tiles: usize,
    /// 0: tiled, 1: strides.
    kind: i32,
}

#[repr(C)]
struct ToHostArgs<'a> {
    header: Header,
    buffer: Ref<'a, Buffer>,
    host_layout: *const MemoryLayout<'a>,
    data: *mut u8,
    size: usize,
    event: OutHandle<Event>,
}

// SAFETY: the layout is declared as in the header.
unsafe impl Args for ToHostArgs<'_> {
    const NAME: &'static str = "PJRT_Buffer_ToHostBuffer";
    const SLOT: usize = 70;
}

/// Copies a buffer into `data`, dense and row-major for any layout on the device.
///
/// `data` is owned, because it must outlive a copy whose wait has timed out.
pub(crate) fn copy_to_host<T: bytemuck::Pod>(buffer: &Owned<Buffer>, rank: usize, mut data: Vec<T>) -> Result<Vec<T>> {
    buffer.origin().waits().check()?;
    let minor_to_major: Vec<i64> = (0..rank as i64).rev().collect();
    let layout = MemoryLayout {
        header: Header::new(std::mem::offset_of!(MemoryLayout<'_>, kind) + size_of::<i32>()),
        tiled_header: Header::new(std::mem::offset_of!(MemoryLayout<'_>, kind) - size_of::<Header>()),
        minor_to_major: minor_to_major.as_slice().into(),
        tile_dims: std::ptr::null(),
        tile_dim_sizes: std::ptr::null(),
        num_tiles: 0,
        kind: 0,
    };
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut data);
    let mut args = ToHostArgs {
        header: Header::new(size_of::<ToHostArgs<'_>>()),
        buffer: buffer.get(),
        host_layout: &raw const layout,
        data: bytes.as_mut_ptr(),
        size: bytes.len(),
        event: OutHandle::default(),
    };
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
        assert_eq!((size_of::<FromHostArgs<'_>>(), size_of::<ToHostArgs<'_>>()), (120, 56));
        assert_eq!(std::mem::offset_of!(FromHostArgs<'_>, semantics), 72);
        assert_eq!((size_of::<MemoryLayout<'_>>(), std::mem::offset_of!(MemoryLayout<'_>, kind)), (80, 72));
    }
}
