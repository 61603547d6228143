//! Pointers that cross the C boundary, with types that prevent misuse in safe code.
//!
//! All types have the layout that the C header declares. Lifetimes express how long the plugin keeps the pointee.
//! Fields are private to [`super`], so only a live handle, a Rust slice or the plugin can set them.

use std::marker::PhantomData;
use std::ptr::NonNull;

use super::{Handle, Origin, Owned};
use crate::error::{Error, Result};

/// `PJRT_Thing*`, borrowed from an owner that lives for `'a`.
#[repr(transparent)]
pub(crate) struct Ref<'a, H>(pub(super) NonNull<H>, PhantomData<&'a H>);

impl<H> Ref<'_, H> {
    /// # Safety
    ///
    /// The pointee must live for `'a`.
    pub(super) unsafe fn new(pointer: NonNull<H>) -> Self {
        Ref(pointer, PhantomData)
    }

    /// Returns `true` if both refer to the same object.
    pub(crate) fn is(self, other: Ref<'_, H>) -> bool {
        self.0 == other.0
    }
}

impl<H> Clone for Ref<'_, H> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<H> Copy for Ref<'_, H> {}

/// `const T*` and `size_t`: an array that the plugin reads during the call.
#[repr(C)]
pub(crate) struct Slice<'a, T> {
    pointer: *const T,
    len: usize,
    borrow: PhantomData<&'a [T]>,
}

impl<'a, T> Slice<'a, T> {
    pub(super) fn get(&self) -> &'a [T] {
        OutSlice { pointer: self.pointer, len: self.len, borrow: self.borrow }.get()
    }
}

impl<'a, T> From<&'a [T]> for Slice<'a, T> {
    fn from(slice: &'a [T]) -> Self {
        Slice { pointer: slice.as_ptr(), len: slice.len(), borrow: PhantomData }
    }
}

/// Null: the plugin reads nothing.
impl<T> Default for Slice<'_, T> {
    fn default() -> Self {
        Slice { pointer: std::ptr::null(), len: 0, borrow: PhantomData }
    }
}

impl<'a> From<&'a str> for Slice<'a, u8> {
    fn from(text: &'a str) -> Self {
        text.as_bytes().into()
    }
}

/// `const T*` and `size_t`, written by the plugin. The array lives as long as the object `'a` that was queried.
#[repr(C)]
pub(crate) struct OutSlice<'a, T> {
    pub(super) pointer: *const T,
    pub(super) len: usize,
    pub(super) borrow: PhantomData<&'a [T]>,
}

impl<T> Default for OutSlice<'_, T> {
    fn default() -> Self {
        OutSlice { pointer: std::ptr::null(), len: 0, borrow: PhantomData }
    }
}

impl<'a, T> OutSlice<'a, T> {
    pub(crate) fn get(&self) -> &'a [T] {
        if self.pointer.is_null() || self.len == 0 {
            return &[];
        }
        // SAFETY: only the plugin writes these fields, and the header guarantees `len` elements for `'a`.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }
}

impl OutSlice<'_, u8> {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(self.get()).into_owned()
    }
}

/// `size_t` and `const T*`: the field order of two calls.
#[repr(C)]
pub(crate) struct OutCounted<'a, T> {
    len: usize,
    pointer: *const T,
    borrow: PhantomData<&'a [T]>,
}

impl<T> Default for OutCounted<'_, T> {
    fn default() -> Self {
        OutCounted { len: 0, pointer: std::ptr::null(), borrow: PhantomData }
    }
}

impl<'a, T> OutCounted<'a, T> {
    pub(crate) fn get(&self) -> &'a [T] {
        OutSlice { pointer: self.pointer, len: self.len, borrow: self.borrow }.get()
    }
}

/// The list of lists of output dimensions.
#[repr(C)]
#[derive(Default)]
pub(crate) struct OutRagged<'a> {
    lens: usize,
    values: *const i64,
    sizes: *const usize,
    borrow: PhantomData<&'a [i64]>,
}

impl<'a> OutRagged<'a> {
    pub(crate) fn get(&self) -> Vec<&'a [i64]> {
        let sizes = OutSlice { pointer: self.sizes, len: self.lens, borrow: PhantomData }.get();
        let values = OutSlice { pointer: self.values, len: sizes.iter().sum(), borrow: PhantomData };
        let mut rest: &'a [i64] = values.get();
        let mut rows = Vec::with_capacity(sizes.len());
        for &size in sizes {
            let (row, tail) = rest.split_at(size.min(rest.len()));
            rows.push(row);
            rest = tail;
        }
        rows
    }
}

/// `PJRT_Thing*` that the plugin transfers to the caller, who must destroy it.
#[repr(transparent)]
pub(crate) struct OutHandle<H>(Option<NonNull<H>>);

impl<H> Default for OutHandle<H> {
    fn default() -> Self {
        OutHandle(None)
    }
}

impl<H: Handle> OutHandle<H> {
    /// Takes ownership of the handle; `None` if the plugin returned none, or it was already taken.
    pub(crate) fn take(&mut self, origin: &Origin) -> Option<Owned<H>> {
        // SAFETY: only the called plugin sets the field, and it transfers ownership of the object.
        self.0.take().map(|handle| unsafe { Owned::new(handle, origin.clone()) })
    }

    /// Like [`OutHandle::take`], but the call `operation` must have returned a handle.
    pub(crate) fn given(&mut self, origin: &Origin, operation: &'static str) -> Result<Owned<H>> {
        self.take(origin).ok_or(Error::Nothing { operation })
    }
}

/// Fields that are always zero.
#[repr(transparent)]
pub(crate) struct Unused<const WORDS: usize>([usize; WORDS]);

impl<const WORDS: usize> Default for Unused<WORDS> {
    fn default() -> Self {
        Unused([0; WORDS])
    }
}
