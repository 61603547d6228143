//! Reusable per-thread buffers for packed operands and scores.
//!
//! Reuse saves the page faults and zeroing of fresh memory in every call.

use crate::pages::{Aligned, zeros};
use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

thread_local! {
    static FREE: RefCell<Vec<Aligned<u32>>> = const { RefCell::new(Vec::new()) };
}

/// A buffer of `len` words of unspecified content, which returns to its thread's free list when dropped.
pub(super) struct Scratch {
    words: Aligned<u32>,
    len: usize,
}

impl Scratch {
    /// Takes the largest free buffer of this thread, and grows it if it is too short. A thread that waits for others
    /// may start another task, which then needs more buffers.
    pub(super) fn words(len: usize) -> Self {
        let mut words = FREE.with_borrow_mut(|free| {
            let largest = (0..free.len()).max_by_key(|i| free[*i].len());
            largest.map(|i| free.swap_remove(i)).unwrap_or_default()
        });
        if words.len() < len {
            words = zeros(len);
        }
        Self { words, len }
    }

    /// Returns the words as f32.
    pub(super) fn floats(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(&mut self.words[..self.len])
    }
}

impl Deref for Scratch {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.words[..self.len]
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [u32] {
        &mut self.words[..self.len]
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let words = std::mem::take(&mut self.words);
        // At the end of a thread, the free list may be dropped before this buffer.
        let _ = FREE.try_with(|free| free.borrow_mut().push(words));
    }
}
