//! A fake plugin for tests: its events become ready when a test asks for it, or never; then its buffers are copied.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use super::{Api, Function, HandleArgs, Header, Origin, OutSlice, Owned, RawError};

type Callback = unsafe extern "C" fn(*mut RawError, *mut c_void);

/// An object for all handles in a test: event, client, buffer and loaded executable.
#[derive(Default)]
pub(super) struct FakeObject {
    ready: AtomicBool,
    failure: Option<&'static str>,
    /// The callback and the address of its argument.
    callback: Mutex<Option<(Callback, usize)>>,
    /// The address and size of the destination of a copy to the host that is in progress.
    destination: Mutex<Option<(usize, usize)>>,
    destroyed: AtomicUsize,
    /// The number of errors that have not been destroyed yet.
    errors: AtomicUsize,
    /// The semantics of the last copy from the host.
    semantics: AtomicUsize,
}

impl FakeObject {
    pub(super) fn new(ready: bool, failure: Option<&'static str>) -> &'static Self {
        Box::leak(Box::new(FakeObject { ready: ready.into(), failure, ..FakeObject::default() }))
    }

    pub(super) fn destroyed(&self) -> usize {
        self.destroyed.load(Ordering::SeqCst)
    }

    pub(super) fn live_errors(&self) -> usize {
        self.errors.load(Ordering::SeqCst)
    }

    pub(super) fn semantics(&self) -> usize {
        self.semantics.load(Ordering::SeqCst)
    }

    pub(super) fn has_callback(&self) -> bool {
        self.callback.lock().unwrap().is_some()
    }

    /// Completes the copy and wakes the waiting thread.
    pub(super) fn finish(&'static self) {
        if let Some((address, size)) = self.destination.lock().unwrap().take() {
            // SAFETY: the destination is valid until the event is ready.
            unsafe { std::slice::from_raw_parts_mut(address as *mut u8, size) }.fill(7);
        }
        self.ready.store(true, Ordering::SeqCst);
        if let Some((callback, argument)) = self.callback.lock().unwrap().take() {
            // SAFETY: called once, when the event is ready, as the header requires.
            unsafe { callback(self.error(), argument as *mut c_void) };
        }
    }

    fn error(&'static self) -> *mut RawError {
        if self.failure.is_none() {
            return std::ptr::null_mut();
        }
        self.errors.fetch_add(1, Ordering::SeqCst);
        // The object is its own error.
        std::ptr::from_ref(self).cast_mut().cast()
    }

    /// Returns a handle of this object with the wait limits of `origin`.
    pub(super) fn handle<H: super::Handle>(&'static self, origin: &Origin) -> Owned<H> {
        // SAFETY: the object is never freed, and the functions of `api` accept it as any kind of handle.
        unsafe { Owned::new(NonNull::from(self).cast(), origin.clone()) }
    }
}

#[repr(C)]
struct ObjectArgs<Rest> {
    header: Header,
    object: &'static FakeObject,
    rest: Rest,
}

unsafe extern "C" fn error_destroy(args: *mut c_void) -> *mut RawError {
    // SAFETY: the struct has the layout of the header.
    let args = unsafe { &*args.cast::<ObjectArgs<()>>() };
    args.object.errors.fetch_sub(1, Ordering::SeqCst);
    std::ptr::null_mut()
}

unsafe extern "C" fn error_message(args: *mut c_void) -> *mut RawError {
    // SAFETY: the struct has the layout of the header.
    let args = unsafe { &mut *args.cast::<ObjectArgs<OutSlice<'static, u8>>>() };
    let text = args.object.failure.unwrap_or_default();
    (args.rest.pointer, args.rest.len) = (text.as_ptr(), text.len());
    std::ptr::null_mut()
}

unsafe extern "C" fn error_code(args: *mut c_void) -> *mut RawError {
    // SAFETY: the struct has the layout of the header.
    unsafe { &mut *args.cast::<ObjectArgs<i32>>() }.rest = 13;
    std::ptr::null_mut()
}

unsafe extern "C" fn destroy(args: *mut c_void) -> *mut RawError {
    // SAFETY: the struct has the layout of the header.
    let handle = unsafe { &*args.cast::<HandleArgs<FakeObject>>() }.handle;
    // SAFETY: objects are never freed.
    unsafe { &*handle }.destroyed.fetch_add(1, Ordering::SeqCst);
    std::ptr::null_mut()
}

unsafe extern "C" fn event_is_ready(args: *mut c_void) -> *mut RawError {
    // SAFETY: the struct has the layout of the header.
    let args = unsafe { &mut *args.cast::<ObjectArgs<bool>>() };
    args.rest = args.object.ready.load(Ordering::SeqCst);
    std::ptr::null_mut()
}

unsafe extern "C" fn event_await(args: *mut c_void) -> *mut RawError {
    // SAFETY: the struct has the layout of the header.
    let object = unsafe { &*args.cast::<ObjectArgs<()>>() }.object;
    assert!(object.ready.load(Ordering::SeqCst), "this would wait without a limit");
    object.error()
}

unsafe extern "C" fn event_on_ready(args: *mut c_void) -> *mut RawError {
    // SAFETY: the struct has the layout of the header.
    let args = unsafe { &*args.cast::<ObjectArgs<(Callback, usize)>>() };
    *args.object.callback.lock().unwrap() = Some(args.rest);
    if args.object.ready.load(Ordering::SeqCst) {
        args.object.finish();
    }
    std::ptr::null_mut()
}

/// The object serves as client, buffer and event.
unsafe extern "C" fn from_host(args: *mut c_void) -> *mut RawError {
    #[repr(C)]
    struct Rest {
        data: [usize; 2],
        dims: [usize; 2],
        byte_strides: [usize; 2],
        semantics: i32,
        device: [usize; 3],
        done_with_host_buffer: Option<&'static FakeObject>,
        buffer: Option<&'static FakeObject>,
    }
    // SAFETY: the struct has the layout of the header.
    let args = unsafe { &mut *args.cast::<ObjectArgs<Rest>>() };
    args.object.semantics.store(args.rest.semantics as usize, Ordering::SeqCst);
    args.rest.buffer = Some(args.object);
    std::ptr::null_mut()
}

unsafe extern "C" fn to_host(args: *mut c_void) -> *mut RawError {
    // SAFETY: the struct has the layout of the header: layout, data, size, event.
    let args = unsafe { &mut *args.cast::<ObjectArgs<(usize, usize, usize, Option<&'static FakeObject>)>>() };
    let (_, data, size, event) = &mut args.rest;
    *args.object.destination.lock().unwrap() = Some((*data, *size));
    *event = Some(args.object);
    std::ptr::null_mut()
}

unsafe extern "C" fn ready_event(args: *mut c_void) -> *mut RawError {
    // SAFETY: the struct has the layout of the header.
    let args = unsafe { &mut *args.cast::<ObjectArgs<Option<&'static FakeObject>>>() };
    args.rest = Some(args.object);
    std::ptr::null_mut()
}

/// Returns the fake plugin's table, `without` some of its functions.
pub(super) fn api(without: &[usize]) -> &'static Api {
    let mut functions: Vec<Option<Function>> = vec![None; 73];
    let offered: [(usize, Function); 12] = [
        (0, error_destroy),
        (1, error_message),
        (2, error_code),
        (5, destroy),
        (6, event_is_ready),
        (8, event_await),
        (9, event_on_ready),
        (22, from_host),
        (50, destroy),
        (58, destroy),
        (70, to_host),
        (72, ready_event),
    ];
    for (slot, function) in offered {
        functions[slot] = (!without.contains(&slot)).then_some(function);
    }
    Box::leak(Box::new(Api { version: (0, 81), functions: Vec::leak(functions) }))
}

/// Returns a client of the fake plugin with a wait limit of 20 ms.
pub(super) fn origin(without: &[usize]) -> Origin {
    let origin = Origin::new(api(without));
    origin.waits().set_limit(Duration::from_millis(20));
    origin
}
