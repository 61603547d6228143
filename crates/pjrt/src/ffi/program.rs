//! Programs as inputs of calls, and byte strings as outputs.

use std::ffi::c_void;

use super::calls::calls;
use super::{Executable, Header, OutSlice, Owned, Ref, Slice};
use crate::error::Result;

/// `PJRT_Program`: code and its format.
#[repr(C)]
pub(crate) struct Program<'a> {
    header: Header,
    code: Slice<'a, u8>,
    format: Slice<'a, u8>,
}

impl<'a> Program<'a> {
    /// Wraps StableHLO, as text or as MLIR bytecode.
    pub(crate) fn mlir(code: &'a [u8]) -> Self {
        Program { header: Header::new(size_of::<Self>()), code: code.into(), format: "mlir".into() }
    }
}

#[repr(C)]
pub(super) struct ProgramOut {
    header: Header,
    code: *mut u8,
    code_size: usize,
    format: OutSlice<'static, u8>,
}

calls! {
    48 "PJRT_Executable_OptimizedProgram" OptimizedProgram<'a> {
        executable: Ref<'a, Executable>, program: *mut ProgramOut, =>
    }
    49 "PJRT_Executable_Serialize" Serialize<'a> {
        executable: Ref<'a, Executable>,
        => bytes: OutSlice<'a, u8>, backing: *mut c_void, delete: Option<unsafe extern "C" fn(*mut c_void)>,
    }
}

/// Returns the compiled program's code and its format.
pub(crate) fn optimized_program(executable: &Owned<Executable>) -> Result<(Vec<u8>, String)> {
    let mut program = ProgramOut {
        header: Header::new(size_of::<ProgramOut>()),
        code: std::ptr::null_mut(),
        code_size: 0,
        format: OutSlice::default(),
    };
    // Without a buffer for the code, the call returns its size.
    let mut args = OptimizedProgram::new(executable.get(), &raw mut program);
    executable.api().call(&mut args)?;
    let mut code = vec![0; program.code_size];
    program.code = code.as_mut_ptr();
    args.program = &raw mut program;
    executable.api().call(&mut args)?;
    code.truncate(program.code_size);
    Ok((code, program.format.text()))
}

/// Serializes the executable in the plugin's own format.
pub(crate) fn serialize(executable: &Owned<Executable>) -> Result<Vec<u8>> {
    let args = executable.ask(Serialize::new)?;
    let bytes = args.bytes.get().to_vec();
    if let Some(delete) = args.delete {
        // SAFETY: the plugin returned this function for this object, and the bytes have been copied.
        unsafe { delete(args.backing) };
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::super::fake::{self, FakeObject, PROGRAM};
    use super::*;

    #[test]
    fn code_and_serialized_bytes_are_copied_and_freed() {
        let (object, origin) = (FakeObject::new(true, None), fake::origin(&[]));
        let executable: Owned<Executable> = object.handle(&origin);
        assert_eq!(optimized_program(&executable).unwrap(), (PROGRAM.to_vec(), "hlo".to_owned()));
        assert_eq!(serialize(&executable).unwrap(), PROGRAM);
        assert!(!object.has_serialized(), "the plugin frees its bytes");
    }

    #[test]
    fn program_layouts_match_the_header() {
        let header = [("PJRT_Executable_OptimizedProgram", 48, 32), ("PJRT_Executable_Serialize", 49, 56)];
        assert_eq!(SIZES, header);
    }
}
