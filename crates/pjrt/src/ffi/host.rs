//! Copies between host slices and device buffers.
//!
//! Both return when the copy has started, so that copies of several devices overlap. After a timeout, a transfer may
//! still happen, so the plugin never accesses memory borrowed from the caller after its call has returned, and owns
//! the memory of a copy to the host until the copy has ended.

use std::mem::ManuallyDrop;
use std::ops::Range;

use super::calls::calls;
use super::wait::ended;
use super::{Args, Buffer, Client, Device, Event, Header, OutHandle, Owned, Ref, Slice, Unused};
use crate::error::{Error, Result};
use crate::runs::runs;

/// The plugin reads the slice only during the call. It may copy the slice for that, as GPU plugins always do; XLA's CPU
/// copies it directly to the buffer. With `kImmutableUntilTransferCompletes`, the plugin could read the caller's slice
/// after a wait has timed out.
const IMMUTABLE_ONLY_DURING_CALL: i32 = 0;

calls! {
    22 "PJRT_Client_BufferFromHostBuffer" FromHost<'a> {
        client: Ref<'a, Client>, data: *const u8, type_code: i32, dims: Slice<'a, i64>, byte_strides: Slice<'a, i64>,
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

/// A dense, row-major array on the host.
#[derive(Clone, Copy)]
pub(crate) struct HostArray<'a> {
    pub(crate) data: &'a [u8],
    pub(crate) type_code: i32,
    /// The bytes of an element of `type_code`.
    pub(crate) element_size: usize,
    pub(crate) dims: &'a [usize],
}

impl HostArray<'_> {
    /// Checks that `data` has as many elements as `dims`, and that `part` is within `dims`.
    fn check(&self, part: &[Range<usize>]) -> Result<()> {
        let elements = self.dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
        let (expected, found) = (elements.and_then(|n| n.checked_mul(self.element_size)), self.data.len());
        if expected != Some(found) {
            return Err(Error::Size { operation: FromHost::NAME, expected: expected.unwrap_or(usize::MAX), found });
        }
        let within = |(range, dim): (&Range<usize>, &usize)| range.start <= range.end && range.end <= *dim;
        if part.len() != self.dims.len() || !part.iter().zip(self.dims).all(within) {
            return Err(Error::Part { dims: self.dims.to_vec(), part: part.to_vec() });
        }
        Ok(())
    }

    /// Returns the bytes between neighbours along each dimension.
    fn byte_strides(&self) -> Vec<i64> {
        let after = |d: usize| self.dims[d + 1..].iter().product::<usize>();
        (0..self.dims.len()).map(|d| (after(d) * self.element_size) as i64).collect()
    }

    fn bytes(&self, run: Range<usize>) -> &[u8] {
        &self.data[run.start * self.element_size..run.end * self.element_size]
    }
}

/// Starts to copy a part of `array`, a range along each dimension, to the device. When the call returns, the plugin no
/// longer reads the array; [`BufferReadyEvent`](super::BufferReadyEvent) is ready when the copy has ended.
///
/// The plugin gathers a part that is not contiguous. If it does not support strides, the part is gathered here.
pub(crate) fn copy_from_host(
    client: &Owned<Client>,
    device: Ref<'_, Device>,
    array: HostArray<'_>,
    part: &[Range<usize>],
) -> Result<Owned<Buffer>> {
    array.check(part)?;
    client.origin().waits().check()?;
    let dims: Vec<i64> = part.iter().map(|range| i64::try_from(range.len()).unwrap_or(i64::MAX)).collect();
    // The caller keeps `data` borrowed during the call. It has all elements that `dims` and `strides` reach from its
    // start: `check` has compared the part with the array.
    let start = |data: &[u8], strides: &[i64]| {
        let (pointer, semantics) = (data.as_ptr(), IMMUTABLE_ONLY_DURING_CALL);
        // Null stands for dense and row-major.
        let strides = if strides.is_empty() { Slice::default() } else { strides.into() };
        let dims = dims.as_slice().into();
        let mut args = FromHost::new(client.get(), pointer, array.type_code, dims, strides, semantics, device);
        client.api().call(&mut args)?;
        // This event is ready: the plugin has already read the slice.
        drop(args.done_with_host_buffer.take(client.origin()));
        args.buffer.given(client.origin(), FromHost::NAME)
    };
    let mut contiguous = runs(array.dims, part);
    let many = contiguous.len() > 1;
    let Some(first) = contiguous.next() else { return start(&[], &[]) };
    if !many {
        return start(array.bytes(first), &[]);
    }
    match start(&array.data[first.start * array.element_size..], &array.byte_strides()) {
        Err(refused) if refused.is_unsupported() => {
            tracing::debug!("the plugin does not copy strided arrays of this type: {refused}");
            let gathered: Vec<u8> = runs(array.dims, part).flat_map(|run| array.bytes(run)).copied().collect();
            start(&gathered, &[])
        }
        outcome => outcome,
    }
}

/// A copy to the host that has started. Dropping it waits for the copy.
pub(crate) struct HostCopy<T> {
    /// `None` after the wait, or if the plugin had finished the copy when its call returned.
    event: Option<Owned<Event>>,
    /// The destination; taken by the wait.
    data: Vec<T>,
}

/// Starts to copy a buffer into `data`, dense and row-major for any layout on the device.
///
/// `data` is owned, because it must outlive a copy whose wait has timed out.
pub(crate) fn copy_to_host<T: bytemuck::Pod>(
    buffer: &Owned<Buffer>,
    rank: usize,
    mut data: Vec<T>,
) -> Result<HostCopy<T>> {
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
    Ok(HostCopy { event: args.event.take(buffer.origin()), data })
}

impl<T> HostCopy<T> {
    /// Waits for the copy and returns its elements.
    pub(crate) fn wait(mut self) -> Result<Vec<T>> {
        self.end()
    }

    fn end(&mut self) -> Result<Vec<T>> {
        // Until the copy has ended, the device may write there: the memory is not freed.
        let data = ManuallyDrop::new(std::mem::take(&mut self.data));
        let outcome = match self.event.take() {
            Some(event) => {
                ended(&event, "a copy from the device, which waits for the program that computes what is copied,")?
            }
            None => Ok(()),
        };
        let data = ManuallyDrop::into_inner(data);
        outcome.map(|()| data)
    }
}

impl<T> Drop for HostCopy<T> {
    fn drop(&mut self) {
        // An error of a copy that nobody waits for has no receiver.
        let _ = self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::{self, FakeCopy, FakeObject};
    use super::super::{BufferReadyEvent, wait};
    use super::*;
    use std::ptr::NonNull;

    const UNIMPLEMENTED: i32 = 12;
    const INVALID_ARGUMENT: i32 = 3;

    #[test]
    fn copy_layouts_match_the_header() {
        assert_eq!(SIZES, [("PJRT_Client_BufferFromHostBuffer", 22, 120), ("PJRT_Buffer_ToHostBuffer", 70, 56)]);
        assert_eq!(std::mem::offset_of!(FromHost<'_>, semantics), 72);
        assert_eq!((size_of::<MemoryLayout<'_>>(), std::mem::offset_of!(MemoryLayout<'_>, kind)), (80, 72));
    }

    /// Copies a part of an array of bytes of shape `[4, 6]` with a fake plugin.
    fn copy(client: &Owned<Client>, part: &[Range<usize>]) -> Result<Owned<Buffer>> {
        let data: Vec<u8> = (0..24).collect();
        // SAFETY: the fake plugin does not access the device.
        let device: Ref<'_, Device> = unsafe { Ref::new(NonNull::dangling()) };
        copy_from_host(client, device, HostArray { data: &data, type_code: 1, element_size: 1, dims: &[4, 6] }, part)
    }

    fn is_ready(buffer: &Owned<Buffer>) -> Result<()> {
        let event = buffer.ask(BufferReadyEvent::new)?.event.given(buffer.origin(), BufferReadyEvent::NAME)?;
        wait(&event, "a test")
    }

    #[test]
    fn a_part_is_copied_from_its_start_with_the_strides_of_the_array() {
        let (object, origin) = (FakeObject::new(true, None), fake::origin(&[]));
        let client: Owned<Client> = object.handle(&origin);
        for (part, is_strided, bytes) in [
            ([1..3, 2..5], true, vec![8, 9, 10, 14, 15, 16]),
            ([0..4, 5..6], true, vec![5, 11, 17, 23]),
            // Contiguous parts.
            ([0..4, 0..6], false, (0..24).collect()),
            ([2..4, 0..6], false, (12..24).collect()),
            ([3..4, 1..3], false, vec![19, 20]),
            ([4..4, 3..6], false, vec![]),
        ] {
            copy(&client, &part).unwrap();
            let semantics = IMMUTABLE_ONLY_DURING_CALL;
            assert_eq!(object.copies(), [FakeCopy { semantics, is_strided, bytes: Some(bytes) }], "{part:?}");
        }
    }

    #[test]
    fn a_plugin_without_strides_gets_a_contiguous_copy_of_the_part() {
        let (object, origin) = (FakeObject::refusing_strides(UNIMPLEMENTED), fake::origin(&[]));
        let client: Owned<Client> = object.handle(&origin);
        // The refusal of one array says nothing of another one, whose dtype or rank may be supported.
        for _ in 0..2 {
            copy(&client, &[1..3, 2..5]).unwrap();
            let bytes: Vec<_> = object.copies().into_iter().map(|copy| (copy.is_strided, copy.bytes)).collect();
            assert_eq!(bytes, [(true, None), (false, Some(vec![8, 9, 10, 14, 15, 16]))]);
        }
        assert_eq!(object.live_errors(), 0);
    }

    #[test]
    fn other_errors_of_strided_copies_are_returned() {
        let (object, origin) = (FakeObject::refusing_strides(INVALID_ARGUMENT), fake::origin(&[]));
        let client: Owned<Client> = object.handle(&origin);
        let error = copy(&client, &[1..3, 2..5]).err().unwrap();
        assert!(matches!(error, Error::Api { code: crate::Code::InvalidArgument, .. }), "{error}");
        assert_eq!((object.copies().len(), object.live_errors()), (1, 0));
    }

    #[test]
    fn parts_that_exceed_the_array_do_not_reach_the_plugin() {
        let (object, origin) = (FakeObject::new(true, None), fake::origin(&[]));
        let client: Owned<Client> = object.handle(&origin);
        #[allow(clippy::reversed_empty_ranges)]
        let parts: [&[Range<usize>]; 5] =
            [&[0..5, 0..6], &[0..4, 5..7], &[3..2, 0..6], std::slice::from_ref(&(0..4)), &[0..4, 0..6, 0..1]];
        for part in parts {
            let error = copy(&client, part).err().unwrap();
            assert!(matches!(error, Error::Part { .. }), "{error}");
            assert!(error.to_string().contains("[4, 6]"), "{error}");
        }
        assert_eq!(object.copies(), []);
    }

    #[test]
    fn a_copy_to_a_hanging_device_times_out_and_borrows_nothing() {
        let (object, origin) = (FakeObject::new(false, None), fake::origin(&[]));
        let client: Owned<Client> = object.handle(&origin);
        // Both copies start before the first wait.
        let buffers = [[0..4, 0..3], [0..4, 3..6]].map(|part| copy(&client, &part).unwrap());
        let copies = object.copies();
        assert!(copies.len() == 2 && copies.iter().all(|copy| copy.semantics == 0), "kImmutableOnlyDuringCall");
        assert!(is_ready(&buffers[0]).unwrap_err().is_timed_out());
        assert!(is_ready(&buffers[1]).unwrap_err().is_timed_out());
        assert!(copy(&client, &[0..4, 0..6]).err().unwrap().is_timed_out());
        assert_eq!(object.copies(), [], "no further copy starts");
        drop((buffers, client));
        assert_eq!(object.destroyed(), 0);
    }

    #[test]
    fn memory_outlives_a_copy_that_timed_out() {
        for waits in [true, false] {
            let (object, origin) = (FakeObject::new(false, None), fake::origin(&[]));
            let buffer: Owned<Buffer> = object.handle(&origin);
            let copy = copy_to_host(&buffer, 1, vec![0.0f32; 1000]).unwrap();
            if waits {
                assert!(copy.wait().unwrap_err().is_timed_out());
            } else {
                drop(copy);
            }
            // The device writes to all of the memory; an address sanitizer detects if it was freed.
            object.finish();
            // No second copy starts.
            assert!(copy_to_host(&buffer, 1, vec![0.0f32; 1000]).err().unwrap().is_timed_out());
            drop(buffer);
            assert_eq!(object.destroyed(), 0);
        }
    }

    #[test]
    fn a_dropped_copy_waits_until_the_device_no_longer_writes() {
        let (object, origin) = (FakeObject::new(false, None), fake::origin(&[]));
        origin.waits().set_limit(std::time::Duration::MAX);
        let buffer: Owned<Buffer> = object.handle(&origin);
        std::thread::scope(|scope| {
            let dropping = scope.spawn(|| drop(copy_to_host(&buffer, 1, vec![0u8; 3]).unwrap()));
            while !object.has_callback() {
                assert!(!dropping.is_finished(), "freed while the device writes");
                std::thread::yield_now();
            }
            object.finish();
        });
        assert!(origin.waits().check().is_ok());
    }

    #[test]
    fn completed_copies_return_what_the_devices_wrote() {
        let origin = fake::origin(&[]);
        origin.waits().set_limit(std::time::Duration::MAX);
        let objects =
            [None, Some("the link to the device is down"), None].map(|failure| FakeObject::new(false, failure));
        let buffers = objects.map(|object| object.handle::<Buffer>(&origin));
        // All copies start before the first wait.
        let copies = buffers.each_ref().map(|buffer| copy_to_host(buffer, 1, vec![0u8; 3]).unwrap());
        // The last copy ends first.
        objects.iter().rev().for_each(|object| object.finish());
        let [first, failed, last] = copies.map(HostCopy::wait);
        assert_eq!((first.unwrap(), last.unwrap()), (vec![7; 3], vec![7; 3]));
        assert!(failed.unwrap_err().to_string().contains("the link to the device is down"));
    }
}
