//! The C boundary: the only unsafe code of this crate.
//!
//! A plugin exports one function that returns a table of functions, all of the form `PJRT_Error* f(Args*)`. Only as
//! much of the table is read as the plugin declares. Argument structs are declared in their newest layout: a plugin
//! refuses structs smaller than its own and ignores additional fields, because fields are only ever appended.

mod calls;
mod exit;
#[cfg(test)]
mod fake;
mod host;
#[cfg(feature = "simulated")]
mod joint;
mod key_value;
mod launch;
mod library;
mod named_value;
mod owned;
mod pointer;
mod program;
mod wait;

use std::ffi::c_void;
use std::ptr::NonNull;

pub(crate) use calls::*;
pub(crate) use host::{HostArray, HostCopy, copy_from_host, copy_to_host};
#[cfg(feature = "simulated")]
pub(crate) use joint::JointLaunch;
pub(crate) use key_value::create_client;
pub(crate) use launch::Launcher;
pub(crate) use library::{open, set_variables};
pub(crate) use named_value::RawNamedValue;
pub(crate) use owned::{Child, Handle, Origin, Owned};
pub(crate) use pointer::{OutCounted, OutHandle, OutRagged, OutSlice, Ref, Slice, Unused};
pub(crate) use program::{Program, optimized_program, serialize};
pub(crate) use wait::{Waits, wait};

use crate::error::{Code, Error, Result};

/// The argument struct of one call.
///
/// # Safety
///
/// The layout must match the header's declaration for `NAME`, and `SLOT` must be the function's index in the table,
/// counted from `PJRT_Error_Destroy`.
pub(crate) unsafe trait Args {
    const NAME: &'static str;
    const SLOT: usize;
}

type Function = unsafe extern "C" fn(*mut c_void) -> *mut RawError;

/// The first fields of every argument struct.
#[repr(C)]
#[derive(Clone, Copy)]
struct Header {
    struct_size: usize,
    extension_start: *const c_void,
}

impl Header {
    const fn new(struct_size: usize) -> Self {
        Header { struct_size, extension_start: std::ptr::null() }
    }
}

#[repr(C)]
struct RawError {
    private: [u8; 0],
}

#[repr(C)]
struct HandleArgs<H> {
    header: Header,
    handle: *mut H,
}

impl<H> HandleArgs<H> {
    fn new(handle: *mut H) -> Self {
        HandleArgs { header: Header::new(size_of::<Self>()), handle }
    }
}

#[repr(C)]
struct ErrorMessageArgs {
    header: Header,
    error: *const RawError,
    message: OutSlice<'static, u8>,
}

#[repr(C)]
struct ErrorCodeArgs {
    header: Header,
    error: *const RawError,
    code: i32,
}

/// The first fields of the table that `GetPjrtApi` returns; the functions follow.
#[repr(C)]
struct RawApi {
    struct_size: usize,
    extension_start: *const c_void,
    version_header: Header,
    major: i32,
    minor: i32,
}

/// A plugin's function table. It is valid forever, because plugins are never unloaded.
pub(crate) struct Api {
    version: (i32, i32),
    functions: &'static [Option<Function>],
}

impl Api {
    /// # Safety
    ///
    /// `raw` must come from the `GetPjrtApi` of a library that is never unloaded.
    unsafe fn read(raw: NonNull<c_void>) -> Option<Self> {
        let raw = raw.cast::<RawApi>();
        // SAFETY: every version of the table starts with its size.
        let size = unsafe { raw.cast::<usize>().read() };
        let len = size.checked_sub(size_of::<RawApi>())? / size_of::<Option<Function>>();
        // SAFETY: the table is at least as large as `RawApi`.
        let version = unsafe { (raw.as_ref().major, raw.as_ref().minor) };
        // SAFETY: the functions follow the version; the plugin's `struct_size` gives their number.
        let functions = unsafe { std::slice::from_raw_parts(raw.add(1).as_ptr().cast(), len) };
        Some(Api { version, functions })
    }

    /// Returns the version of the C API that the plugin was built with.
    pub(crate) fn version(&self) -> (i32, i32) {
        self.version
    }

    fn function(&self, slot: usize, name: &'static str) -> Result<Function> {
        let function = self.functions.get(slot).copied().flatten();
        function.ok_or(Error::MissingFunction { function: name, version: self.version })
    }

    /// Calls the plugin, which writes its results to `args`.
    pub(crate) fn call<A: Args>(&self, args: &mut A) -> Result<()> {
        let function = self.function(A::SLOT, A::NAME)?;
        // SAFETY: `Args` ties the layout to the function; its pointers are live by construction (see `pointer`).
        let error = unsafe { function((&raw mut *args).cast()) };
        self.check(A::NAME, error)
    }

    /// Calls the plugin and returns the arguments with its results.
    pub(crate) fn outputs<A: Args>(&self, mut args: A) -> Result<A> {
        self.call(&mut args)?;
        Ok(args)
    }

    /// Converts the plugin's error and frees it.
    fn check(&self, operation: &'static str, error: *mut RawError) -> Result<()> {
        if error.is_null() {
            return Ok(());
        }
        let mut text = ErrorMessageArgs {
            header: Header::new(size_of::<ErrorMessageArgs>()),
            error,
            message: OutSlice::default(),
        };
        let mut number = ErrorCodeArgs { header: Header::new(size_of::<ErrorCodeArgs>()), error, code: 0 };
        let mut destroyed = HandleArgs::new(error);
        let (message, get_code, destroy) = (
            self.function(1, "PJRT_Error_Message")?,
            self.function(2, "PJRT_Error_GetCode")?,
            self.function(0, "PJRT_Error_Destroy")?,
        );
        // SAFETY: `error` is the live error that the call returned, and the structs have the layout of the header.
        // Message and Destroy return nothing; their results are not used. The text is copied before Destroy frees it.
        let message = unsafe {
            message((&raw mut text).cast());
            get_code((&raw mut number).cast());
            let message = text.message.text();
            destroy((&raw mut destroyed).cast());
            message
        };
        let code = Code::from_repr(number.code).unwrap_or(Code::Unknown);
        Err(Error::Api { operation, code, message })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn unreachable(_: *mut c_void) -> *mut RawError {
        std::process::abort()
    }

    /// Returns the table of a plugin of version `(major, minor)` that declares `count` functions.
    fn table(version: (i32, i32), functions: [Option<Function>; 3], count: usize) -> Option<Api> {
        #[repr(C)]
        struct Table {
            api: RawApi,
            functions: [Option<Function>; 3],
        }
        let api = RawApi {
            struct_size: size_of::<RawApi>() + count * size_of::<usize>(),
            extension_start: std::ptr::null(),
            version_header: Header::new(24),
            major: version.0,
            minor: version.1,
        };
        let table = Box::leak(Box::new(Table { api, functions }));
        // SAFETY: the table has the layout of a plugin's, has at least `count` functions, and is never freed.
        unsafe { Api::read(NonNull::from(table).cast()) }
    }

    /// The table of an old plugin ends before the function, or has null in its place.
    #[test]
    fn missing_functions_of_old_plugins_are_explained() {
        let api = table((0, 40), [Some(unreachable), None, Some(unreachable)], 2).unwrap();
        for slot in [1, 2, 500] {
            let error = api.function(slot, "PJRT_Client_Load").unwrap_err();
            assert!(matches!(error, Error::MissingFunction { version: (0, 40), .. }), "{error:?}");
            assert!(error.is_unsupported());
            let text = error.to_string();
            for part in ["`grpo plugin install`", "PJRT_Client_Load", "version 0.40 ", "0.81 or newer", "newer release"]
            {
                assert!(text.contains(part), "{part:?} is not in: {text}");
            }
        }
        assert!(api.function(0, "PJRT_Error_Destroy").is_ok());
    }

    /// The plugin is not called: every function of this table ends the process.
    #[test]
    fn missing_functions_fail_before_the_call() {
        let api = table((0, 1), [Some(unreachable); 3], 3).unwrap();
        let error = api.call(&mut PluginInitialize::new()).unwrap_err();
        assert!(matches!(error, Error::MissingFunction { function: PluginInitialize::NAME, .. }), "{error:?}");
        let error = api.call(&mut ClientCreate::new([].as_slice().into())).unwrap_err();
        assert!(matches!(error, Error::MissingFunction { function: ClientCreate::NAME, .. }), "{error:?}");
    }

    #[test]
    fn the_function_table_is_read_up_to_its_size() {
        for count in 0..=3 {
            let api = table((0, 81), [Some(unreachable); 3], count).unwrap();
            assert_eq!((api.version(), api.functions.len()), ((0, 81), count));
        }
        let size = 8_usize;
        // SAFETY: if a table is too small for a version, only its size is read.
        assert!(unsafe { Api::read(NonNull::from(&size).cast()) }.is_none());
    }
}
