//! Execution: the one call whose inputs and outputs are arrays of arrays.

use std::ffi::c_void;
use std::sync::Arc;

use super::{
    Args, Buffer, Event, Executable, ExecutableName, ExecutableNumOutputs, Header, LoadedExecutable,
    LoadedGetExecutable, OutHandle, Owned, Ref, Slice, wait,
};
use crate::error::{Error, Result};

/// A loaded executable and its number of outputs.
pub(crate) struct Launcher {
    loaded: Owned<LoadedExecutable>,
    num_outputs: usize,
    /// The name of the executable, if the plugin reports it.
    name: Option<Arc<str>>,
}

#[repr(C)]
struct ExecuteOptions<'a> {
    header: Header,
    send_callbacks: *const c_void,
    recv_callbacks: *const c_void,
    num_send_ops: usize,
    num_recv_ops: usize,
    launch_id: i32,
    non_donatable_inputs: Slice<'a, i64>,
    context: *const c_void,
    call_location: *const c_void,
    num_tasks: usize,
    task_ids: *const i32,
    incarnation_ids: *const i64,
    multi_slice_config: *const c_void,
    use_major_to_minor_for_callbacks: bool,
    hlo_output_callbacks: *const c_void,
    num_hlo_output_callbacks: usize,
}

#[repr(C)]
struct ExecuteArgs<'a> {
    header: Header,
    loaded: Ref<'a, LoadedExecutable>,
    options: *const ExecuteOptions<'a>,
    arguments: *const *const Ref<'a, Buffer>,
    num_devices: usize,
    num_args: usize,
    outputs: *const *mut OutHandle<Buffer>,
    complete_events: *mut OutHandle<Event>,
    device: *const c_void,
}

// SAFETY: the layout is declared as in the header.
unsafe impl Args for ExecuteArgs<'_> {
    const NAME: &'static str = "PJRT_LoadedExecutable_Execute";
    const SLOT: usize = 55;
}

impl Launcher {
    pub(crate) fn new(loaded: Owned<LoadedExecutable>) -> Result<(Self, Owned<Executable>)> {
        let api = loaded.api();
        let mut get = LoadedGetExecutable::new(loaded.get());
        api.call(&mut get)?;
        let executable = get.executable.take(loaded.origin());
        let executable = executable.ok_or(Error::Nothing { operation: LoadedGetExecutable::NAME })?;
        let mut outputs = ExecutableNumOutputs::new(executable.get());
        api.call(&mut outputs)?;
        let num_outputs = outputs.count;
        let mut name = ExecutableName::new(executable.get());
        let name = api.call(&mut name).is_ok().then(|| name.name.text().into());
        Ok((Launcher { loaded, num_outputs, name }, executable))
    }

    pub(crate) fn loaded(&self) -> &Owned<LoadedExecutable> {
        &self.loaded
    }

    /// Starts a run on every device and returns its outputs, `[devices][outputs]`, which may not be ready yet.
    ///
    /// Waits for an executable without outputs. `arguments` are `[devices][args]`. The buffers at the positions
    /// `not_donated` stay intact even if the program aliases them.
    pub(crate) fn launch(
        &self,
        arguments: &[Vec<Ref<'_, Buffer>>],
        not_donated: &[i64],
    ) -> Result<Vec<Vec<Owned<Buffer>>>> {
        let num_args = arguments.first().map_or(0, Vec::len);
        if let Some(odd) = arguments.iter().find(|list| list.len() != num_args) {
            return Err(Error::ArgumentCount { expected: num_args, found: odd.len() });
        }
        let (api, origin) = (self.loaded.api(), self.loaded.origin());
        origin.waits().check()?;
        origin.waits().launches(self.name.as_ref());
        let options = ExecuteOptions {
            header: Header::new(size_of::<ExecuteOptions<'_>>()),
            send_callbacks: std::ptr::null(),
            recv_callbacks: std::ptr::null(),
            num_send_ops: 0,
            num_recv_ops: 0,
            launch_id: 0,
            non_donatable_inputs: not_donated.into(),
            context: std::ptr::null(),
            call_location: std::ptr::null(),
            num_tasks: 0,
            task_ids: std::ptr::null(),
            incarnation_ids: std::ptr::null(),
            multi_slice_config: std::ptr::null(),
            use_major_to_minor_for_callbacks: false,
            hlo_output_callbacks: std::ptr::null(),
            num_hlo_output_callbacks: 0,
        };
        let rows: Vec<*const Ref<'_, Buffer>> = arguments.iter().map(|list| list.as_ptr()).collect();
        let mut outputs: Vec<Vec<OutHandle<Buffer>>> = arguments
            .iter()
            .map(|_| std::iter::repeat_with(OutHandle::default).take(self.num_outputs).collect())
            .collect();
        let output_rows: Vec<*mut OutHandle<Buffer>> = outputs.iter_mut().map(|list| list.as_mut_ptr()).collect();
        let mut events: Vec<OutHandle<Event>> = arguments.iter().map(|_| OutHandle::default()).collect();
        let mut args = ExecuteArgs {
            header: Header::new(size_of::<ExecuteArgs<'_>>()),
            loaded: self.loaded.get(),
            options: &raw const options,
            arguments: rows.as_ptr(),
            num_devices: arguments.len(),
            num_args,
            outputs: output_rows.as_ptr(),
            // Outputs report a failure; without outputs, events are needed.
            complete_events: if self.num_outputs == 0 { events.as_mut_ptr() } else { std::ptr::null_mut() },
            device: std::ptr::null(),
        };
        api.call(&mut args)?;
        // Take ownership first, so that an early return leaks nothing.
        let events: Vec<_> = events.iter_mut().filter_map(|event| event.take(origin)).collect();
        let outputs: Vec<Vec<_>> =
            outputs.iter_mut().map(|list| list.iter_mut().map(|output| output.take(origin)).collect()).collect();
        for event in &events {
            wait(event, "a program without outputs")?;
        }
        let given = |output: Option<_>| output.ok_or(Error::Nothing { operation: ExecuteArgs::NAME });
        outputs.into_iter().map(|list| list.into_iter().map(given).collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::{self, FakeObject};
    use super::*;

    #[test]
    fn hanging_devices_get_no_further_launches() {
        let (object, origin) = (FakeObject::new(false, None), fake::origin(&[]));
        let launcher = Launcher { loaded: object.handle(&origin), num_outputs: 1, name: Some("step".into()) };
        // The fake plugin has no function to run executables.
        let launch = || launcher.launch(&[], &[]).err().unwrap();
        assert!(matches!(launch(), Error::MissingFunction { function: ExecuteArgs::NAME, .. }));
        let error = wait(&object.handle(&origin), "a test").unwrap_err();
        assert!(error.to_string().contains("`step`"), "{error}");
        assert!(launch().is_timed_out());
    }

    #[test]
    fn execute_layouts_match_the_header() {
        assert_eq!((size_of::<ExecuteArgs<'_>>(), size_of::<ExecuteOptions<'_>>()), (80, 144));
        assert_eq!(std::mem::offset_of!(ExecuteOptions<'_>, non_donatable_inputs), 56);
    }
}
