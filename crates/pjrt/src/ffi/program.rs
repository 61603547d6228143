//! Programs as inputs of calls, and byte strings as outputs.

use std::ffi::c_void;

use super::{Api, Args, Executable, Header, OutSlice, Owned, Ref, Slice};
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
struct ProgramOut {
    header: Header,
    code: *mut u8,
    code_size: usize,
    format: OutSlice<'static, u8>,
}

#[repr(C)]
struct OptimizedProgramArgs<'a> {
    header: Header,
    executable: Ref<'a, Executable>,
    program: *mut ProgramOut,
}

// SAFETY: the layout is declared as in the header.
unsafe impl Args for OptimizedProgramArgs<'_> {
    const NAME: &'static str = "PJRT_Executable_OptimizedProgram";
    const SLOT: usize = 48;
}

/// Returns the compiled program's code and its format.
pub(crate) fn optimized_program(api: &'static Api, executable: Ref<'_, Executable>) -> Result<(Vec<u8>, String)> {
    let mut program = ProgramOut {
        header: Header::new(size_of::<ProgramOut>()),
        code: std::ptr::null_mut(),
        code_size: 0,
        format: OutSlice::default(),
    };
    let mut args = OptimizedProgramArgs {
        header: Header::new(size_of::<OptimizedProgramArgs<'_>>()),
        executable,
        program: &raw mut program,
    };
    // Without a buffer for the code, the call returns its size.
    api.call(&mut args)?;
    let mut code = vec![0; program.code_size];
    program.code = code.as_mut_ptr();
    args.program = &raw mut program;
    api.call(&mut args)?;
    code.truncate(program.code_size);
    Ok((code, program.format.text()))
}

#[repr(C)]
struct SerializeArgs<'a> {
    header: Header,
    executable: Ref<'a, Executable>,
    bytes: OutSlice<'a, u8>,
    backing: *mut c_void,
    delete: Option<unsafe extern "C" fn(*mut c_void)>,
}

// SAFETY: the layout is declared as in the header.
unsafe impl Args for SerializeArgs<'_> {
    const NAME: &'static str = "PJRT_Executable_Serialize";
    const SLOT: usize = 49;
}

/// Serializes the executable in the plugin's own format.
pub(crate) fn serialize(executable: &Owned<Executable>) -> Result<Vec<u8>> {
    let mut args = SerializeArgs {
        header: Header::new(size_of::<SerializeArgs<'_>>()),
        executable: executable.get(),
        bytes: OutSlice::default(),
        backing: std::ptr::null_mut(),
        delete: None,
    };
    executable.api().call(&mut args)?;
    let bytes = args.bytes.get().to_vec();
    if let Some(delete) = args.delete {
        // SAFETY: the plugin returned this function for this object, and the bytes have been copied.
        unsafe { delete(args.backing) };
    }
    Ok(bytes)
}
