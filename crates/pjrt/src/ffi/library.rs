//! Opening a plugin's shared library.

use std::ffi::c_void;
use std::path::Path;
use std::ptr::NonNull;

use super::Api;
use crate::error::{Error, Result};

/// Loads the library at `path` for the rest of the process and reads its function table.
pub(crate) fn open(path: &Path) -> Result<Api> {
    let failed = |reason: String| Error::Load { path: path.to_path_buf(), reason };
    // SAFETY: loading runs the library's initialisers; the caller guarantees that the file is a plugin, which cannot be
    // checked.
    let library = unsafe { libloading::Library::new(path) }.map_err(|error| failed(error.to_string()))?;
    // SAFETY: the PJRT C API defines the exported function's type.
    let entry = unsafe { library.get::<unsafe extern "C" fn() -> *mut c_void>(b"GetPjrtApi") }
        .map_err(|_| failed("it does not export `GetPjrtApi`, so it is not a PJRT plugin".into()))?;
    // SAFETY: as above; the function has no preconditions.
    let table = NonNull::new(unsafe { entry() }).ok_or_else(|| failed("`GetPjrtApi` returned no table".into()))?;
    // Plugins start threads that outlive every handle, so their code must never be unmapped.
    std::mem::forget(library);
    // SAFETY: the table comes from `GetPjrtApi`, and the library stays.
    unsafe { Api::read(table) }.ok_or_else(|| failed("its function table is too small to be one".into()))
}

/// Sets environment variables that are unset, if the process has a single thread. Returns `false` if it has several.
pub(crate) fn set_variables(variables: &[(&str, &str)]) -> bool {
    let threads = std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
    if threads != 1 {
        return false;
    }
    for (name, value) in variables.iter().filter(|(name, _)| std::env::var_os(name).is_none()) {
        // SAFETY: no other thread can read the environment at the same time.
        unsafe { std::env::set_var(name, value) };
    }
    true
}

#[cfg(test)]
mod tests {
    #[test]
    #[cfg_attr(miri, ignore = "Miri's threads are not threads of the system")]
    fn the_environment_is_not_changed_with_several_threads() {
        // A new thread ensures that the process has at least two.
        let set = std::thread::spawn(|| super::set_variables(&[("PJRT_NEVER_SET", "1")])).join().unwrap();
        assert!(!set && std::env::var_os("PJRT_NEVER_SET").is_none());
    }
}
