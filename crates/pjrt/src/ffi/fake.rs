//! A fake plugin for tests: its events become ready when a test asks for it, or never; then its buffers are copied.

use std::cell::RefCell;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize, Ordering};
use std::time::Duration;

use super::key_value::{CallbackError, GetArgs, PutArgs, TryGetArgs};
use super::{Api, Function, HandleArgs, Header, Origin, OutSlice, Owned, RawError};

type Callback = unsafe extern "C" fn(*mut RawError, *mut c_void);

/// An object for all handles in a test: event, client, buffer and loaded executable.
#[derive(Default)]
pub(super) struct FakeObject {
    ready: AtomicBool,
    failure: Option<&'static str>,
    /// The callback and its argument.
    callback: Mutex<Option<(Callback, AtomicPtr<c_void>)>>,
    /// The destination of a copy to the host that is in progress, and its size.
    destination: Mutex<Option<(AtomicPtr<u8>, usize)>>,
    /// The bytes of the serialized executable, until the caller frees them.
    serialized: Mutex<Option<Vec<u8>>>,
    destroyed: AtomicUsize,
    /// The number of errors that have not been destroyed yet.
    errors: AtomicUsize,
    /// The code of the last error.
    code: AtomicI32,
    /// The code with which copies of strided arrays from the host are refused, if they are.
    refuses_strides: Option<i32>,
    /// The copies from the host that were requested.
    copies: Mutex<Vec<FakeCopy>>,
}

/// A copy from the host.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct FakeCopy {
    pub(super) semantics: i32,
    pub(super) is_strided: bool,
    /// `None` if the copy was refused.
    pub(super) bytes: Option<Vec<u8>>,
}

/// `absl::StatusCode` of most errors.
const INTERNAL: i32 = 13;

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

    /// Creates an object that refuses copies of strided arrays from the host with `code`.
    pub(super) fn refusing_strides(code: i32) -> &'static Self {
        Box::leak(Box::new(FakeObject { ready: true.into(), refuses_strides: Some(code), ..FakeObject::default() }))
    }

    /// Returns the copies from the host that were requested since the last call.
    pub(super) fn copies(&self) -> Vec<FakeCopy> {
        std::mem::take(&mut self.copies.lock().unwrap())
    }

    pub(super) fn has_callback(&self) -> bool {
        self.callback.lock().unwrap().is_some()
    }

    pub(super) fn has_serialized(&self) -> bool {
        self.serialized.lock().unwrap().is_some()
    }

    /// Completes the copy and wakes the waiting thread.
    pub(super) fn finish(&'static self) {
        if let Some((destination, size)) = self.destination.lock().unwrap().take() {
            // SAFETY: the destination is valid until the event is ready.
            unsafe { std::slice::from_raw_parts_mut(destination.into_inner(), size) }.fill(7);
        }
        self.ready.store(true, Ordering::SeqCst);
        if let Some((callback, argument)) = self.callback.lock().unwrap().take() {
            // SAFETY: called once, when the event is ready, as the header requires.
            unsafe { callback(self.error(), argument.into_inner()) };
        }
    }

    fn error(&'static self) -> *mut RawError {
        if self.failure.is_none() { std::ptr::null_mut() } else { self.error_of(INTERNAL) }
    }

    fn error_of(&'static self, code: i32) -> *mut RawError {
        self.code.store(code, Ordering::SeqCst);
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
    let args = unsafe { &mut *args.cast::<ObjectArgs<i32>>() };
    args.rest = args.object.code.load(Ordering::SeqCst);
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
    #[repr(C)]
    struct Rest {
        callback: Callback,
        argument: *mut c_void,
    }
    // SAFETY: the struct has the layout of the header.
    let args = unsafe { &*args.cast::<ObjectArgs<Rest>>() };
    *args.object.callback.lock().unwrap() = Some((args.rest.callback, AtomicPtr::new(args.rest.argument)));
    if args.object.ready.load(Ordering::SeqCst) {
        args.object.finish();
    }
    std::ptr::null_mut()
}

/// The object serves as client, buffer and event. Elements have one byte.
unsafe extern "C" fn from_host(args: *mut c_void) -> *mut RawError {
    #[repr(C)]
    struct Rest {
        data: *const u8,
        type_code: usize,
        dims: OutSlice<'static, i64>,
        byte_strides: OutSlice<'static, i64>,
        semantics: i32,
        device: [usize; 3],
        done_with_host_buffer: Option<&'static FakeObject>,
        buffer: Option<&'static FakeObject>,
    }
    // SAFETY: the struct has the layout of the header.
    let args = unsafe { &mut *args.cast::<ObjectArgs<Rest>>() };
    let (object, rest) = (args.object, &mut args.rest);
    let (is_strided, dims) = (!rest.byte_strides.pointer.is_null(), rest.dims.get());
    let refusal = object.refuses_strides.filter(|_| is_strided);
    let dense = |d: usize| dims[d + 1..].iter().product::<i64>();
    let strides: Vec<i64> = match is_strided {
        true => rest.byte_strides.get().to_vec(),
        false => (0..dims.len()).map(dense).collect(),
    };
    let bytes = refusal.is_none().then(|| {
        let mut offsets = vec![0];
        for (dim, stride) in dims.iter().zip(&strides) {
            offsets = offsets.iter().flat_map(|offset| (0..*dim).map(move |i| offset + i * stride)).collect();
        }
        // SAFETY: the caller's array has all elements that `dims` and `byte_strides` reach.
        offsets.iter().map(|offset| unsafe { *rest.data.offset(*offset as isize) }).collect()
    });
    object.copies.lock().unwrap().push(FakeCopy { semantics: rest.semantics, is_strided, bytes });
    if let Some(code) = refusal {
        return object.error_of(code);
    }
    rest.buffer = Some(object);
    std::ptr::null_mut()
}

unsafe extern "C" fn to_host(args: *mut c_void) -> *mut RawError {
    #[repr(C)]
    struct Rest {
        layout: *const c_void,
        data: *mut u8,
        size: usize,
        event: Option<&'static FakeObject>,
    }
    // SAFETY: the struct has the layout of the header.
    let args = unsafe { &mut *args.cast::<ObjectArgs<Rest>>() };
    *args.object.destination.lock().unwrap() = Some((AtomicPtr::new(args.rest.data), args.rest.size));
    args.rest.event = Some(args.object);
    std::ptr::null_mut()
}

/// Runs a program whose outputs are its arguments. Without arguments it has no outputs, and the executable is its event.
unsafe extern "C" fn execute(args: *mut c_void) -> *mut RawError {
    #[repr(C)]
    struct Rest {
        options: *const c_void,
        arguments: *const *const &'static FakeObject,
        num_devices: usize,
        num_args: usize,
        outputs: *const *mut Option<&'static FakeObject>,
        complete_events: *mut Option<&'static FakeObject>,
    }
    // SAFETY: the struct has the layout of the header.
    let args = unsafe { &*args.cast::<ObjectArgs<Rest>>() };
    let Rest { arguments, num_devices, num_args, outputs, complete_events, .. } = args.rest;
    for device in 0..num_devices {
        for index in 0..num_args {
            // SAFETY: the lists have an entry per device, which are lists of `num_args` arguments and as many outputs.
            unsafe { (*outputs.add(device)).add(index).write(Some(*(*arguments.add(device)).add(index))) };
        }
        if !complete_events.is_null() {
            // SAFETY: the list has an entry per device.
            unsafe { complete_events.add(device).write(Some(args.object)) };
        }
    }
    std::ptr::null_mut()
}

/// The code of the optimized program, and the bytes of the serialized executable.
pub(super) const PROGRAM: &[u8] = b"HloModule fake";

unsafe extern "C" fn optimized_program(args: *mut c_void) -> *mut RawError {
    #[repr(C)]
    struct Program {
        header: Header,
        code: *mut u8,
        code_size: usize,
        format: OutSlice<'static, u8>,
    }
    // SAFETY: the struct has the layout of the header.
    let args = unsafe { &*args.cast::<ObjectArgs<*mut Program>>() };
    // SAFETY: the caller's struct lives during the call.
    let program = unsafe { &mut *args.rest };
    if !program.code.is_null() {
        // SAFETY: the caller's buffer has `code_size` bytes.
        unsafe { std::slice::from_raw_parts_mut(program.code, program.code_size) }.copy_from_slice(PROGRAM);
    }
    program.code_size = PROGRAM.len();
    (program.format.pointer, program.format.len) = ("hlo".as_ptr(), 3);
    std::ptr::null_mut()
}

unsafe extern "C" fn serialize(args: *mut c_void) -> *mut RawError {
    #[repr(C)]
    struct Rest {
        bytes: OutSlice<'static, u8>,
        backing: &'static FakeObject,
        delete: unsafe extern "C" fn(*const FakeObject),
    }
    unsafe extern "C" fn delete(backing: *const FakeObject) {
        // SAFETY: objects are never freed.
        drop(unsafe { &*backing }.serialized.lock().unwrap().take());
    }
    // SAFETY: the struct has the layout of the header.
    let args = unsafe { &mut *args.cast::<ObjectArgs<MaybeUninit<Rest>>>() };
    let mut serialized = args.object.serialized.lock().unwrap();
    let bytes = serialized.insert(PROGRAM.to_vec());
    let bytes = OutSlice { pointer: bytes.as_ptr(), len: bytes.len(), borrow: PhantomData };
    args.rest.write(Rest { bytes, backing: args.object, delete });
    std::ptr::null_mut()
}

unsafe extern "C" fn ready_event(args: *mut c_void) -> *mut RawError {
    // SAFETY: the struct has the layout of the header.
    let args = unsafe { &mut *args.cast::<ObjectArgs<Option<&'static FakeObject>>>() };
    args.rest = Some(args.object);
    std::ptr::null_mut()
}

#[repr(C)]
struct KeyValueCallback<A> {
    function: Option<unsafe extern "C" fn(*mut A) -> *mut RawError>,
    argument: AtomicPtr<c_void>,
}

/// The arguments of `PJRT_Client_Create`.
#[repr(C)]
struct CreateArgs {
    header: Header,
    options: [usize; 2],
    get: KeyValueCallback<GetArgs>,
    put: KeyValueCallback<PutArgs>,
    client: Option<&'static FakeObject>,
    try_get: KeyValueCallback<TryGetArgs>,
}

thread_local! {
    /// The errors that callbacks returned in this thread.
    static KEY_VALUE_ERRORS: RefCell<Vec<(i32, String)>> = const { RefCell::new(Vec::new()) };
}

/// Returns the errors of key-value callbacks that clients get which `create` creates.
pub(super) fn key_value_errors(create: impl FnOnce(&'static Api)) -> Vec<(i32, String)> {
    KEY_VALUE_ERRORS.take();
    create(api(&[]));
    KEY_VALUE_ERRORS.take()
}

unsafe extern "C" fn callback_error(code: i32, message: *const u8, size: usize) -> *mut RawError {
    // SAFETY: the callback passes a text of this size.
    let message = unsafe { std::slice::from_raw_parts(message, size) };
    KEY_VALUE_ERRORS.with_borrow_mut(|errors| errors.push((code, String::from_utf8_lossy(message).into_owned())));
    // Any address but null: the fake plugin does not read its error again.
    NonNull::<RawError>::dangling().as_ptr()
}

/// Calls the key-value callbacks from several threads, as plugins do. Each thread waits for the values of all threads.
unsafe extern "C" fn client_create(args: *mut c_void) -> *mut RawError {
    // SAFETY: the struct has the layout of the header.
    let args = unsafe { &mut *args.cast::<CreateArgs>() };
    args.client = Some(FakeObject::new(true, None));
    let functions = (args.get.function, args.put.function, args.try_get.function);
    let (Some(get), Some(put), Some(try_get)) = functions else {
        assert!(matches!(functions, (None, None, None)), "all callbacks or none");
        return std::ptr::null_mut();
    };
    let [get_arg, put_arg, try_get_arg] = [&args.get.argument, &args.put.argument, &args.try_get.argument];
    let error: CallbackError = callback_error;
    let put = |key: &[u8], value: &[u8]| {
        let mut args = PutArgs::new(key, value, &error, put_arg.load(Ordering::Relaxed));
        // SAFETY: the arguments have the layout of the header, and live during the call.
        unsafe { put(&raw mut args) }.is_null()
    };
    let get = |key: &[u8], timeout: i32| {
        let mut args = GetArgs::new(key, timeout, &error, get_arg.load(Ordering::Relaxed));
        // SAFETY: as for `put`; a value is read before it is freed.
        unsafe { get(&raw mut args).is_null().then(|| args.take()) }
    };
    let try_get = |key: &[u8]| {
        let mut args = TryGetArgs::new(key, &error, try_get_arg.load(Ordering::Relaxed));
        // SAFETY: as for `get`.
        unsafe { try_get(&raw mut args).is_null().then(|| args.take()) }
    };
    let value = |node: u8| vec![node; 10_000 * usize::from(node)];
    std::thread::scope(|scope| {
        for node in 0..4 {
            scope.spawn(move || {
                let key = |node: u8| format!("node {node}").into_bytes();
                assert!(put(&key(node), &value(node)));
                assert!((0..4).all(|other| get(&key(other), 60_000) == Some(value(other))));
                assert_eq!(try_get(&key(node)), Some(value(node)));
            });
        }
    });
    assert!(put(b"empty", b""));
    assert_eq!((get(b"empty", 0), try_get(b"empty")), (Some(vec![]), Some(vec![])));
    // Their errors are compared by the test.
    assert_eq!(
        [get(b"absent", 20), get(b"absent", -1), try_get(b"absent"), try_get(b"panic")],
        [None, None, None, None]
    );
    assert!(!put(b"read-only", b"value") && !put(b"\xff", b"value"));
    std::ptr::null_mut()
}

/// Returns the fake plugin's table, `without` some of its functions.
pub(super) fn api(without: &[usize]) -> &'static Api {
    let mut functions: Vec<Option<Function>> = vec![None; 73];
    let offered: [(usize, Function); 17] = [
        (0, error_destroy),
        (1, error_message),
        (2, error_code),
        (5, destroy),
        (6, event_is_ready),
        (8, event_await),
        (9, event_on_ready),
        (10, client_create),
        (11, destroy),
        (22, from_host),
        (48, optimized_program),
        (49, serialize),
        (50, destroy),
        (55, execute),
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
