//! Memory from the system: buffers that start at a cache line; huge pages for large buffers, which give several GB/s
//! more bandwidth on systems that grant them on request; and an allocator setting that keeps freed memory.
#![allow(unsafe_code)]

use bytemuck::{Pod, Zeroable, cast_slice, cast_slice_mut, zeroed_vec};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// The minimum bytes of a buffer for which huge pages are requested.
#[cfg(target_os = "linux")]
const LEAST: usize = 4 << 20;

/// A cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([u32; 16]);

// SAFETY: all-zero bytes are valid.
unsafe impl Zeroable for Line {}
// SAFETY: 64 bytes of integers without padding.
unsafe impl Pod for Line {}

/// A slice that starts at a cache line, of elements of at most 64 bytes. A 64-byte register is loaded from one cache
/// line.
#[derive(Clone, Debug)]
pub(crate) struct Aligned<T> {
    lines: Vec<Line>,
    len: usize,
    of: PhantomData<T>,
}

impl<T> Default for Aligned<T> {
    fn default() -> Self {
        Self { lines: Vec::new(), len: 0, of: PhantomData }
    }
}

impl<T: Pod> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &cast_slice(&self.lines)[..self.len]
    }
}

impl<T: Pod> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut cast_slice_mut(&mut self.lines)[..self.len]
    }
}

/// Allocates `len` zeros, on huge pages if the system grants them.
pub(crate) fn zeros<T: Pod>(len: usize) -> Aligned<T> {
    let lines = zeroed_vec(len.div_ceil(size_of::<Line>() / size_of::<T>()));
    let mut buffer = Aligned { lines, len, of: PhantomData };
    advise_huge_pages(&mut buffer);
    buffer
}

/// Allocates `len` zeros for the output of a product or a cache, on huge pages if the system grants them.
pub(crate) fn output(len: usize) -> Vec<f32> {
    let mut buffer = vec![0.0; len];
    advise_huge_pages(&mut buffer);
    buffer
}

/// Requests huge pages from the system for `buffer`, which makes memory traffic faster. Use it for a large head, right
/// after allocation, before the first write; plans request them for gradients. It changes no values, and does nothing
/// for small buffers and on systems other than Linux.
pub fn advise_huge_pages<T>(buffer: &mut [T]) {
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 4096;
        let (start, bytes) = (buffer.as_mut_ptr().addr(), size_of_val(buffer));
        let skip = start.next_multiple_of(PAGE) - start;
        if bytes < LEAST {
            return;
        }
        // SAFETY: the range is within the buffer; the advice changes its pages, but not its contents. If the system
        // refuses, nothing changes.
        unsafe {
            libc::madvise(buffer.as_mut_ptr().cast::<u8>().add(skip).cast(), bytes - skip, libc::MADV_HUGEPAGE);
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = buffer;
}

/// Keeps freed memory for later allocations. A training step frees the same buffers in each iteration; by default, the
/// C library returns large buffers to the system, and later allocations fault in zeroed pages. A program should call
/// this once, at its start. It has an effect on Linux with glibc.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        const MOST: libc::c_int = 1 << 30;
        // SAFETY: both calls set a parameter of the allocator, which is allowed on any thread at any time; if refused, nothing changes.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, MOST);
            libc::mallopt(libc::M_TRIM_THRESHOLD, MOST);
        }
    }
}
