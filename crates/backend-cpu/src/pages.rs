//! Memory from the system: buffers that begin at a cache line; large ones on large pages, several gigabytes per second of bandwidth
//! on systems that give them on request; and freed memory that is kept.
#![allow(unsafe_code)]

use bytemuck::{Pod, Zeroable, cast_slice, cast_slice_mut, zeroed_vec};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// Below this a buffer holds no large page worth asking for.
#[cfg(target_os = "linux")]
const LEAST: usize = 4 << 20;

/// A cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([u32; 16]);

// SAFETY: zeros are 16 numbers.
unsafe impl Zeroable for Line {}
// SAFETY: 64 bytes at a multiple of 64, all of them numbers.
unsafe impl Pod for Line {}

/// Elements of 64 bytes at most from the beginning of a cache line on. A register of 64 bytes is filled from one line, not from two.
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

/// `len` zeros, on large pages where the system has them.
pub(crate) fn zeros<T: Pod>(len: usize) -> Aligned<T> {
    let lines = zeroed_vec(len.div_ceil(size_of::<Line>() / size_of::<T>()));
    let mut buffer = Aligned { lines, len, of: PhantomData };
    advise_huge_pages(&mut buffer);
    buffer
}

/// Asks the system to back `buffer` with large pages as it is first written, which makes memory traffic faster: worth
/// doing for gradients of a large head, right after they were allocated. Changes no value; does nothing for small buffers
/// and where the system knows no such request (it is made on Linux).
pub fn advise_huge_pages<T>(buffer: &mut [T]) {
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 4096;
        let (start, bytes) = (buffer.as_mut_ptr().addr(), size_of_val(buffer));
        let skip = start.next_multiple_of(PAGE) - start;
        if bytes < LEAST {
            return;
        }
        // SAFETY: the range lies within the buffer; the advice changes how it is backed, never what it holds. Refusal, for
        // want of support, leaves it as it was.
        unsafe {
            libc::madvise(buffer.as_mut_ptr().cast::<u8>().add(skip).cast(), bytes - skip, libc::MADV_HUGEPAGE);
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = buffer;
}

/// Keeps memory that was freed for what is allocated next. A training step frees what the one before it has freed: without this the C
/// library gives large buffers back to the system each time, and every page comes back zeroed, one fault at a time. It is the
/// program that chooses this, once, at its beginning; it works on Linux with glibc.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        const MOST: libc::c_int = 1 << 30;
        // SAFETY: both calls set a number of the allocator, which any thread may do at any time; refusal leaves it as it was.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, MOST);
            libc::mallopt(libc::M_TRIM_THRESHOLD, MOST);
        }
    }
}
