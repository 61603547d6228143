//! The end of a process whose device was given up.
//!
//! Threads of the plugin may still compute then. `exit` runs the destructors of the plugin's static objects, which these threads use, and the
//! process would crash.

#[cfg(all(target_os = "linux", target_env = "gnu", not(miri)))]
mod linux {
    use std::ffi::{c_int, c_void};
    use std::ptr::null_mut;
    use std::sync::Once;

    unsafe extern "C" {
        /// glibc's function: `exit` calls `function` with the exit status before functions that were registered earlier.
        fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
        fn _exit(status: c_int) -> !;
    }

    extern "C" fn end(status: c_int, _: *mut c_void) {
        // SAFETY: `_exit` has no requirements. Rust has flushed its standard output before `exit` is called.
        unsafe { _exit(status) }
    }

    /// Makes `exit` end the process, with its status, before destructors of plugins run.
    pub(in super::super) fn skip_destructors() {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(|| {
            // SAFETY: `end` is a function of this type, it lives as long as the process, and it ignores its argument. Without memory for the
            // entry nothing is registered.
            unsafe { on_exit(end, null_mut()) };
        });
    }
}

#[cfg(all(target_os = "linux", target_env = "gnu", not(miri)))]
pub(super) use linux::skip_destructors;

/// Does nothing: other systems, and Miri, have no exit function that knows the exit status.
#[cfg(not(all(target_os = "linux", target_env = "gnu", not(miri))))]
pub(super) fn skip_destructors() {}
