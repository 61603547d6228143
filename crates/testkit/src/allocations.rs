//! A global allocator that counts, for tests of memory.
//!
//! ```standalone_crate
//! use grpo_testkit::allocations::{Counting, measured};
//!
//! #[global_allocator]
//! static ALLOCATOR: Counting = Counting;
//!
//! let (_, allocated) = measured(|| vec![0_u8; 1000]);
//! assert_eq!((allocated.peak, allocated.largest), (1000, 1000));
//! ```
//!
//! The counters are per process, so a test binary with this allocator has a single test.
#![allow(unsafe_code)] // a global allocator cannot be written without

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static LARGEST: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator with counters.
#[derive(Clone, Copy, Debug)]
pub struct Counting;

// SAFETY: every call is forwarded to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), SeqCst) + layout.size();
        PEAK.fetch_max(live, SeqCst);
        LARGEST.fetch_max(layout.size(), SeqCst);
        // SAFETY: the caller guarantees a valid `layout`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), SeqCst);
        // SAFETY: the caller guarantees that `pointer` came from `alloc` with `layout`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// The allocations of a call, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Allocated {
    /// The most that was allocated at a time, in addition to earlier allocations.
    pub peak: usize,
    /// The largest single allocation.
    pub largest: usize,
}

/// Returns the result of `f` and its allocations.
pub fn measured<T>(f: impl FnOnce() -> T) -> (T, Allocated) {
    let start = LIVE.load(SeqCst);
    PEAK.store(start, SeqCst);
    LARGEST.store(0, SeqCst);
    let out = f();
    (out, Allocated { peak: PEAK.load(SeqCst) - start, largest: LARGEST.load(SeqCst) })
}
