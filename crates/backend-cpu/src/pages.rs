//! Memory from the system: large buffers on large pages, several gigabytes per second of bandwidth on systems that give them on
//! request; and freed memory that is kept.
#![allow(unsafe_code)]

use bytemuck::Zeroable;

/// Below this a buffer holds no large page worth asking for.
#[cfg(target_os = "linux")]
const LEAST: usize = 4 << 20;

/// `len` zeros, on large pages where the system has them.
pub(crate) fn zeros<T: Zeroable + Clone>(len: usize) -> Vec<T> {
    let mut buffer = vec![T::zeroed(); len];
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
