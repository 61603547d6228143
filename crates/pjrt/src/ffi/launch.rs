//! Execution: the one call whose inputs and outputs are arrays of arrays.

use std::sync::Arc;

use super::calls::calls;
use super::{
    Args, Buffer, Event, Executable, ExecutableName, ExecutableNumOutputs, Header, LoadedExecutable,
    LoadedGetExecutable, OutHandle, Owned, Ref, Slice, Unused, wait,
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
pub(super) struct ExecuteOptions<'a> {
    header: Header,
    /// Callbacks of sends and receives, and their numbers.
    transfers: Unused<4>,
    launch_id: i32,
    non_donatable_inputs: Slice<'a, i64>,
    /// The context and the location of the call, tasks, the slices of a job, and callbacks of outputs.
    others: Unused<9>,
}

calls! {
    55 "PJRT_LoadedExecutable_Execute" Execute<'a> {
        loaded: Ref<'a, LoadedExecutable>, options: &'a ExecuteOptions<'a>, arguments: *const *const Ref<'a, Buffer>,
        num_devices: usize, num_args: usize, outputs: *const *mut OutHandle<Buffer>,
        complete_events: *mut OutHandle<Event>, => device: Unused<1>,
    }
}

impl Launcher {
    pub(crate) fn new(loaded: Owned<LoadedExecutable>) -> Result<(Self, Owned<Executable>)> {
        let executable =
            loaded.ask(LoadedGetExecutable::new)?.executable.given(loaded.origin(), LoadedGetExecutable::NAME)?;
        let num_outputs = executable.ask(ExecutableNumOutputs::new)?.count;
        let name = executable.ask(ExecutableName::new).ok().map(|name| name.name.text().into());
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
            transfers: Unused::default(),
            launch_id: 0,
            non_donatable_inputs: not_donated.into(),
            others: Unused::default(),
        };
        let rows: Vec<*const Ref<'_, Buffer>> = arguments.iter().map(|list| list.as_ptr()).collect();
        let mut outputs: Vec<Vec<OutHandle<Buffer>>> = arguments
            .iter()
            .map(|_| std::iter::repeat_with(OutHandle::default).take(self.num_outputs).collect())
            .collect();
        let output_rows: Vec<*mut OutHandle<Buffer>> = outputs.iter_mut().map(|list| list.as_mut_ptr()).collect();
        let mut events: Vec<OutHandle<Event>> = arguments.iter().map(|_| OutHandle::default()).collect();
        // Outputs report a failure; without outputs, events are needed.
        let complete = if self.num_outputs == 0 { events.as_mut_ptr() } else { std::ptr::null_mut() };
        let (loaded, devices) = (self.loaded.get(), arguments.len());
        let mut args = Execute::new(loaded, &options, rows.as_ptr(), devices, num_args, output_rows.as_ptr(), complete);
        api.call(&mut args)?;
        // Take ownership first, so that an early return leaks nothing.
        let events: Vec<_> = events.iter_mut().filter_map(|event| event.take(origin)).collect();
        let outputs: Vec<Vec<_>> =
            outputs.iter_mut().map(|list| list.iter_mut().map(|output| output.take(origin)).collect()).collect();
        for event in &events {
            wait(event, "a program without outputs")?;
        }
        let given = |output: Option<_>| output.ok_or(Error::Nothing { operation: Execute::NAME });
        outputs.into_iter().map(|list| list.into_iter().map(given).collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Origin;
    use super::super::fake::{self, FakeObject};
    use super::*;

    fn launcher(object: &'static FakeObject, origin: &Origin, num_outputs: usize) -> Launcher {
        Launcher { loaded: object.handle(origin), num_outputs, name: Some("step".into()) }
    }

    #[test]
    fn each_device_gets_its_arguments_and_returns_its_outputs() {
        let origin = fake::origin(&[]);
        let launcher = launcher(FakeObject::new(true, None), &origin, 3);
        let objects = [0; 2].map(|_| [0; 3].map(|_| FakeObject::new(true, None)));
        let buffers = objects.map(|list| list.map(|object| object.handle::<Buffer>(&origin)));
        let arguments = buffers.each_ref().map(|list| list.iter().map(Owned::get).collect());
        let outputs = launcher.launch(&arguments, &[1]).unwrap();
        for (found, expected) in outputs.iter().flatten().zip(objects.as_flattened()) {
            assert!(std::ptr::addr_eq(found.get().0.as_ptr(), *expected));
        }
        drop((outputs, buffers));
        assert!(objects.as_flattened().iter().all(|object| object.destroyed() == 2), "an argument and an output");
    }

    #[test]
    fn a_program_without_outputs_is_waited_for() {
        for failure in [None, Some("the link to the device is down")] {
            let (object, origin) = (FakeObject::new(true, failure), fake::origin(&[]));
            let outcome = launcher(object, &origin, 0).launch(&[vec![], vec![]], &[]);
            match failure {
                None => assert!(outcome.unwrap().iter().all(Vec::is_empty)),
                Some(failure) => assert!(outcome.err().unwrap().to_string().contains(failure)),
            }
            assert_eq!((object.destroyed(), object.live_errors()), (3, 0), "an event per device, and the executable");
        }
    }

    #[test]
    fn hanging_devices_get_no_further_launches() {
        let (object, origin) = (FakeObject::new(false, None), fake::origin(&[Execute::SLOT]));
        let launcher = launcher(object, &origin, 1);
        let launch = || launcher.launch(&[], &[]).err().unwrap();
        assert!(matches!(launch(), Error::MissingFunction { function: Execute::NAME, .. }));
        let error = wait(&object.handle(&origin), "a test").unwrap_err();
        assert!(error.to_string().contains("`step`"), "{error}");
        assert!(launch().is_timed_out());
    }

    #[test]
    fn execute_layouts_match_the_header() {
        assert_eq!(SIZES, [("PJRT_LoadedExecutable_Execute", 55, 80)]);
        assert_eq!(size_of::<ExecuteOptions<'_>>(), 144);
        assert_eq!(std::mem::offset_of!(ExecuteOptions<'_>, non_donatable_inputs), 56);
    }
}
