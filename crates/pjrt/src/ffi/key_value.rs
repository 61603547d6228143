//! The callbacks by which a plugin reaches a [`KeyValueStore`].

use std::any::Any;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::{Api, Args, Client, ClientCreate, Header, Origin, Owned, RawError};
use crate::error::{self, Code};
use crate::key_value::{KeyValueError, KeyValueStore};
use crate::value::{self, NamedValue};

/// A callback and the argument that it gets; null if there is none.
#[repr(C)]
pub(crate) struct Callback<A> {
    function: Option<unsafe extern "C" fn(*mut A) -> *mut RawError>,
    user_arg: *const c_void,
}

impl<A> Default for Callback<A> {
    fn default() -> Self {
        Callback { function: None, user_arg: std::ptr::null() }
    }
}

/// Makes an error of the plugin.
pub(super) type CallbackError = unsafe extern "C" fn(code: i32, message: *const u8, size: usize) -> *mut RawError;
type Delete = unsafe extern "C" fn(value: *mut u8);

/// `PJRT_KeyValueGetCallback_Args`.
#[repr(C)]
pub(crate) struct GetArgs {
    header: Header,
    key: *const u8,
    key_size: usize,
    timeout_in_ms: i32,
    callback_error: *const CallbackError,
    user_arg: *const c_void,
    value: *mut u8,
    value_size: usize,
    delete: Option<Delete>,
}

/// `PJRT_KeyValueTryGetCallback_Args`.
#[repr(C)]
pub(crate) struct TryGetArgs {
    header: Header,
    key: *const u8,
    key_size: usize,
    callback_error: *const CallbackError,
    user_arg: *const c_void,
    value: *mut u8,
    value_size: usize,
    delete: Option<Delete>,
}

/// `PJRT_KeyValuePutCallback_Args`.
#[repr(C)]
pub(crate) struct PutArgs {
    header: Header,
    key: *const u8,
    key_size: usize,
    value: *const u8,
    value_size: usize,
    callback_error: *const CallbackError,
    user_arg: *const c_void,
}

/// Opens the devices of a plugin, which reaches the other processes through `store`.
pub(crate) fn create_client(
    api: &'static Api,
    options: &[(&str, NamedValue)],
    store: Option<Arc<dyn KeyValueStore>>,
) -> error::Result<Owned<Client>> {
    let options = value::write(options);
    let mut create = ClientCreate::new(options.as_slice().into());
    if let Some(store) = store {
        // Threads of the plugin may call the store as long as the process runs.
        let user_arg = std::ptr::from_ref(Box::leak(Box::new(store))).cast();
        create.get = Callback { function: Some(get), user_arg };
        create.put = Callback { function: Some(put), user_arg };
        create.try_get = Callback { function: Some(try_get), user_arg };
    }
    api.call(&mut create)?;
    create.client.given(&Origin::new(api), ClientCreate::NAME)
}

/// # Safety
///
/// `args` must be the arguments of a callback whose `user_arg` is from [`create_client`].
unsafe extern "C" fn get(args: *mut GetArgs) -> *mut RawError {
    // SAFETY: the plugin passes a live struct in the layout of the header, and uses it in this thread only.
    let args = unsafe { &mut *args };
    let timeout = Duration::from_millis(u64::try_from(args.timeout_in_ms).unwrap_or(0));
    // SAFETY: key and `user_arg` are as the callee requires.
    let value = unsafe { with_store(args.user_arg, (args.key, args.key_size), |store, key| store.get(key, timeout)) };
    match value {
        Ok(value) => {
            (args.value, args.value_size, args.delete) = give(&value);
            std::ptr::null_mut()
        }
        // SAFETY: the plugin passes its live function.
        Err(error) => unsafe { failed(args.callback_error, &error) },
    }
}

/// # Safety
///
/// As for [`get`].
unsafe extern "C" fn try_get(args: *mut TryGetArgs) -> *mut RawError {
    // SAFETY: as in `get`.
    let args = unsafe { &mut *args };
    // SAFETY: as in `get`.
    let value = unsafe {
        with_store(args.user_arg, (args.key, args.key_size), |store, key| {
            let missing = || KeyValueError::new(Code::NotFound, format!("there is no value for the key `{key}`"));
            store.try_get(key)?.ok_or_else(missing)
        })
    };
    match value {
        Ok(value) => {
            (args.value, args.value_size, args.delete) = give(&value);
            std::ptr::null_mut()
        }
        // SAFETY: as in `get`.
        Err(error) => unsafe { failed(args.callback_error, &error) },
    }
}

/// # Safety
///
/// As for [`get`].
unsafe extern "C" fn put(args: *mut PutArgs) -> *mut RawError {
    // SAFETY: as in `get`.
    let args = unsafe { &*args };
    // SAFETY: the value has `value_size` bytes during the call; the rest is as in `get`.
    let done = unsafe {
        let value = bytes(args.value, args.value_size);
        with_store(args.user_arg, (args.key, args.key_size), |store, key| store.put(key, value))
    };
    match done {
        Ok(()) => std::ptr::null_mut(),
        // SAFETY: as in `get`.
        Err(error) => unsafe { failed(args.callback_error, &error) },
    }
}

/// # Safety
///
/// `pointer` must be null, or have `size` bytes for `'a`.
unsafe fn bytes<'a>(pointer: *const u8, size: usize) -> &'a [u8] {
    if pointer.is_null() || size == 0 {
        return &[];
    }
    // SAFETY: the caller guarantees it.
    unsafe { std::slice::from_raw_parts(pointer, size) }
}

/// Calls the store with a key. A panic becomes an error, because it must not unwind into the plugin.
///
/// # Safety
///
/// `user_arg` must be from [`create_client`], and the key must have this size.
unsafe fn with_store<T>(
    user_arg: *const c_void,
    (key, size): (*const u8, usize),
    call: impl FnOnce(&dyn KeyValueStore, &str) -> Result<T, KeyValueError>,
) -> Result<T, KeyValueError> {
    // SAFETY: `create_client` leaked the store, and the key lives during the callback.
    let (store, key) = unsafe { (&*user_arg.cast::<Arc<dyn KeyValueStore>>(), bytes(key, size)) };
    let invalid = |error| KeyValueError::new(Code::InvalidArgument, format!("a key is not UTF-8: {error}"));
    let key = std::str::from_utf8(key).map_err(invalid)?;
    let panicked =
        |_: Box<dyn Any + Send>| KeyValueError::new(Code::Internal, format!("the store panicked at `{key}`"));
    catch_unwind(AssertUnwindSafe(|| call(&**store, key))).unwrap_or_else(|panic| Err(panicked(panic)))
}

/// Makes an error of the plugin, which owns it.
///
/// # Safety
///
/// `callback_error` must point to the function that the plugin passed.
unsafe fn failed(callback_error: *const CallbackError, error: &KeyValueError) -> *mut RawError {
    // SAFETY: the plugin passes the address of a function, which copies the message.
    unsafe { (*callback_error)(error.code as i32, error.message.as_ptr(), error.message.len()) }
}

/// The bytes in front of a value that hold its size, because [`delete`] gets no size.
const PREFIX: usize = size_of::<usize>();

/// Copies a value for the plugin, which frees it with the returned function.
fn give(value: &[u8]) -> (*mut u8, usize, Option<Delete>) {
    let whole: Box<[u8]> = [&value.len().to_ne_bytes(), value].concat().into();
    // SAFETY: the allocation has at least `PREFIX` bytes.
    (unsafe { Box::into_raw(whole).cast::<u8>().add(PREFIX) }, value.len(), Some(delete))
}

/// # Safety
///
/// `value` must be from [`give`], and is freed.
unsafe extern "C" fn delete(value: *mut u8) {
    // SAFETY: `give` put the size in front of the value, and made the allocation from a boxed slice of both.
    unsafe {
        let begin = value.sub(PREFIX);
        let size = begin.cast::<usize>().read_unaligned();
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(begin, PREFIX + size)));
    }
}

/// The callbacks' arguments as the fake plugin makes them.
#[cfg(test)]
mod plugin_side {
    use super::*;

    macro_rules! reader {
        ($name:ident, $($field:ident: $type:ty)?) => {
            impl $name {
                pub(in super::super) fn new(
                    key: &[u8],
                    $($field: $type,)?
                    callback_error: &CallbackError,
                    user_arg: *const c_void,
                ) -> Self {
                    $name {
                        header: Header::new(size_of::<Self>()),
                        key: key.as_ptr(),
                        key_size: key.len(),
                        $($field,)?
                        callback_error,
                        user_arg,
                        value: std::ptr::null_mut(),
                        value_size: 0,
                        delete: None,
                    }
                }

                /// Copies the value and frees it.
                ///
                /// # Safety
                ///
                /// The callback must have succeeded, and the value is taken once.
                pub(in super::super) unsafe fn take(&self) -> Vec<u8> {
                    // SAFETY: the caller guarantees it.
                    unsafe {
                        let copy = bytes(self.value, self.value_size).to_vec();
                        self.delete.expect("a value has a deleter")(self.value);
                        copy
                    }
                }
            }
        };
    }

    reader!(GetArgs, timeout_in_ms: i32);
    reader!(TryGetArgs,);

    impl PutArgs {
        pub(in super::super) fn new(
            key: &[u8],
            value: &[u8],
            callback_error: &CallbackError,
            user_arg: *const c_void,
        ) -> Self {
            PutArgs {
                header: Header::new(size_of::<Self>()),
                key: key.as_ptr(),
                key_size: key.len(),
                value: value.as_ptr(),
                value_size: value.len(),
                callback_error,
                user_arg,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake;
    use super::*;
    use std::collections::HashMap;
    use std::sync::{Condvar, Mutex};

    #[derive(Default)]
    struct Local(Mutex<HashMap<String, Vec<u8>>>, Condvar);

    impl KeyValueStore for Local {
        fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, KeyValueError> {
            let missing = |values: &mut HashMap<_, _>| !values.contains_key(key);
            let (values, _) = self.1.wait_timeout_while(self.0.lock().unwrap(), timeout, missing).unwrap();
            let late = || KeyValueError::new(Code::DeadlineExceeded, format!("{key} is late"));
            values.get(key).cloned().ok_or_else(late)
        }
        fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>, KeyValueError> {
            assert_ne!(key, "panic");
            Ok(self.0.lock().unwrap().get(key).cloned())
        }
        fn put(&self, key: &str, value: &[u8]) -> Result<(), KeyValueError> {
            if key == "read-only" {
                return Err(KeyValueError::new(Code::PermissionDenied, "this key cannot be set"));
            }
            self.0.lock().unwrap().insert(key.to_owned(), value.to_vec());
            self.1.notify_all();
            Ok(())
        }
    }

    #[test]
    fn callback_layouts_match_the_header() {
        use std::mem::offset_of;
        assert_eq!((size_of::<GetArgs>(), size_of::<TryGetArgs>(), size_of::<PutArgs>()), (80, 72, 64));
        assert_eq!((offset_of!(GetArgs, timeout_in_ms), offset_of!(GetArgs, callback_error)), (32, 40));
        assert_eq!((offset_of!(GetArgs, value), offset_of!(GetArgs, delete)), (56, 72));
        assert_eq!((offset_of!(TryGetArgs, callback_error), offset_of!(TryGetArgs, value)), (32, 48));
        assert_eq!((offset_of!(PutArgs, value), offset_of!(PutArgs, user_arg)), (32, 56));
    }

    #[test]
    fn a_plugin_exchanges_values_from_several_threads() {
        let store = Arc::new(Local::default());
        drop(create_client(fake::api(&[]), &[], Some(store.clone())).unwrap());
        // The fake plugin has read all values that its threads wrote, and freed them; these are left.
        let mut keys: Vec<String> = store.0.lock().unwrap().keys().cloned().collect();
        keys.sort();
        assert_eq!(keys, ["empty", "node 0", "node 1", "node 2", "node 3"]);
    }

    #[test]
    fn errors_and_timeouts_reach_the_plugin_with_code_and_text() {
        let errors =
            fake::key_value_errors(|api| drop(create_client(api, &[], Some(Arc::new(Local::default()))).unwrap()));
        let expected = [
            (Code::DeadlineExceeded, "absent is late"),
            (Code::DeadlineExceeded, "absent is late"),
            (Code::NotFound, "there is no value for the key `absent`"),
            (Code::Internal, "the store panicked at `panic`"),
            (Code::PermissionDenied, "this key cannot be set"),
            (Code::InvalidArgument, "a key is not UTF-8: invalid utf-8 sequence of 1 bytes from index 0"),
        ];
        assert_eq!(errors, expected.map(|(code, text)| (code as i32, text.to_owned())));
    }

    #[test]
    fn a_client_without_a_store_has_no_callbacks() {
        drop(create_client(fake::api(&[]), &[], None).unwrap());
    }

    #[test]
    fn given_values_are_freed_by_their_function() {
        for size in [0, 1, 1000] {
            let value = vec![7; size];
            let (pointer, found, delete) = give(&value);
            // SAFETY: `give` returned a value of this size, which is freed once.
            unsafe {
                assert_eq!(bytes(pointer, found), value);
                delete.unwrap()(pointer);
            }
        }
    }
}
