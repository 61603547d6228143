//! Waits for events of a device, with a limit.
//!
//! `PJRT_Event_Await` has none, so a device that hangs would hang its process. A wait registers a callback instead and
//! sleeps until the callback comes or the limit is over. Where a wait was given up, the device may go on at any time: what
//! it still uses is never freed, and nothing more is asked of it.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::{Api, Args, Event, EventAwait, EventIsReady, Header, Owned, RawError, Ref};
use crate::error::{Error, Result};

/// What the waits of a client have in common. The handles of the client share it.
pub(crate) struct Waits {
    /// Nanoseconds that a wait takes at most.
    limit: AtomicU64,
    /// The first wait that was given up.
    given_up: OnceLock<GivenUp>,
    /// The program that was launched last.
    launched: Mutex<Option<Arc<str>>>,
    /// The plugin has refused a callback: it is not asked for one again.
    without_callbacks: AtomicBool,
}

struct GivenUp {
    what: &'static str,
    limit: Duration,
    program: Option<Arc<str>>,
}

impl GivenUp {
    fn error(&self) -> Error {
        let program = self.program.as_deref().map(str::to_owned);
        Error::TimedOut { what: self.what, seconds: self.limit.as_secs_f64(), program }
    }
}

impl Waits {
    /// A step of a large model on XLA's CPU takes minutes.
    pub(crate) const DEFAULT_LIMIT: Duration = Duration::from_secs(60 * 60);

    pub(crate) fn new() -> Self {
        let waits = Waits {
            limit: AtomicU64::new(0),
            given_up: OnceLock::new(),
            launched: Mutex::new(None),
            without_callbacks: AtomicBool::new(false),
        };
        waits.set_limit(Self::DEFAULT_LIMIT);
        waits
    }

    pub(crate) fn limit(&self) -> Duration {
        Duration::from_nanos(self.limit.load(Ordering::Relaxed))
    }

    pub(crate) fn set_limit(&self, limit: Duration) {
        // The largest number of nanoseconds is 584 years.
        self.limit.store(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Remembers the program that is launched, for the error of a wait that is given up.
    pub(super) fn launches(&self, program: Option<&Arc<str>>) {
        *self.launched.lock().unwrap_or_else(PoisonError::into_inner) = program.cloned();
    }

    /// Whether a wait was given up, so that the device may still use any object of the client, and may block whoever
    /// destroys one.
    pub(super) fn is_given_up(&self) -> bool {
        self.given_up.get().is_some()
    }

    /// The error of the wait that was given up, if there was one: calls that may block are not made any more.
    pub(crate) fn check(&self) -> Result<()> {
        self.given_up.get().map_or(Ok(()), |first| Err(first.error()))
    }

    fn give_up(&self, what: &'static str, limit: Duration) -> Error {
        let program = self.launched.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.given_up.get_or_init(|| GivenUp { what, limit, program }).error()
    }
}

#[repr(C)]
struct OnReadyArgs<'a> {
    header: Header,
    event: Ref<'a, Event>,
    callback: unsafe extern "C" fn(*mut RawError, *mut c_void),
    user_arg: *mut c_void,
}

// SAFETY: as the header declares it.
unsafe impl Args for OnReadyArgs<'_> {
    const NAME: &'static str = "PJRT_Event_OnReady";
    const SLOT: usize = 9;
}

/// What the callback of an event leaves for the thread that waits.
struct Signal {
    api: &'static Api,
    outcome: Mutex<Option<Result<()>>>,
    arrived: Condvar,
}

/// Wakes the thread that waits. It holds a share of the signal, so it may come after the wait was given up.
unsafe extern "C" fn arrive(error: *mut RawError, signal: *mut c_void) {
    // SAFETY: the pointer is from `Arc::into_raw` in `on_ready`, which gave this share to the one call of the callback.
    let signal = unsafe { Arc::from_raw(signal.cast_const().cast::<Signal>()) };
    // The error is the callback's to destroy.
    let outcome = signal.api.check(OnReadyArgs::NAME, error);
    *signal.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
    signal.arrived.notify_all();
}

/// Waits until `event` is ready; its error is the error. `what` is what the event is the end of.
pub(crate) fn wait(event: &Owned<Event>, what: &'static str) -> Result<()> {
    ended(event, what)?
}

/// Like [`wait`], but tells an event that has ended, with its outcome, from one of which that is not known.
pub(super) fn ended(event: &Owned<Event>, what: &'static str) -> Result<Result<()>> {
    let refused = &event.origin().waits().without_callbacks;
    if refused.load(Ordering::Relaxed) {
        return poll(event, what);
    }
    match on_ready(event, what) {
        Err(error) if error.is_unsupported() => {
            refused.store(true, Ordering::Relaxed);
            poll(event, what)
        }
        outcome => outcome,
    }
}

fn on_ready(event: &Owned<Event>, what: &'static str) -> Result<Result<()>> {
    let (api, waits, start) = (event.api(), event.origin().waits(), Instant::now());
    api.function(OnReadyArgs::SLOT, OnReadyArgs::NAME)?;
    let signal = Arc::new(Signal { api, outcome: Mutex::new(None), arrived: Condvar::new() });
    // A plugin that refuses the call may have kept the callback all the same: the share is not taken back then.
    let mut args = OnReadyArgs {
        header: Header::new(size_of::<OnReadyArgs<'_>>()),
        event: event.get(),
        callback: arrive,
        user_arg: Arc::into_raw(Arc::clone(&signal)).cast_mut().cast(),
    };
    api.call(&mut args)?;
    let limit = waits.limit();
    let mut outcome = signal.outcome.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        if let Some(outcome) = outcome.take() {
            return Ok(outcome);
        }
        let left = limit.saturating_sub(start.elapsed());
        if left.is_zero() || waits.is_given_up() {
            return Err(waits.give_up(what, limit));
        }
        outcome = signal.arrived.wait_timeout(outcome, left).unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// For plugins without callbacks: asks again and again, after pauses that grow with the time that the wait has taken.
fn poll(event: &Owned<Event>, what: &'static str) -> Result<Result<()>> {
    const SHORTEST: Duration = Duration::from_micros(20);
    const LONGEST: Duration = Duration::from_millis(20);
    let (api, waits, start) = (event.api(), event.origin().waits(), Instant::now());
    let limit = waits.limit();
    loop {
        let mut args = EventIsReady::new(event.get());
        api.call(&mut args)?;
        if args.is_ready {
            // Does not block any more, and has the error.
            return Ok(api.call(&mut EventAwait::new(event.get())));
        }
        let left = limit.saturating_sub(start.elapsed());
        if left.is_zero() || waits.is_given_up() {
            return Err(waits.give_up(what, limit));
        }
        std::thread::sleep((start.elapsed() / 16).clamp(SHORTEST, LONGEST).min(left));
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::{self, FakeObject};
    use super::super::{Buffer, Client, Device, copy_from_host, copy_to_host};
    use super::*;
    use std::ptr::NonNull;

    /// The plugin with callbacks, and one without.
    const TABLES: [&[usize]; 2] = [&[], &[OnReadyArgs::SLOT]];
    const WHAT: &str = "a test";

    #[test]
    fn the_layout_is_that_of_the_header() {
        assert_eq!((size_of::<OnReadyArgs<'_>>(), std::mem::offset_of!(OnReadyArgs<'_>, user_arg)), (40, 32));
    }

    #[test]
    fn an_event_that_is_never_ready_is_given_up() {
        for without in TABLES {
            let (object, origin) = (FakeObject::new(false, None), fake::origin(without));
            origin.waits().launches(Some(&"rollout_decode".into()));
            let event: Owned<Event> = object.handle(&origin);
            let error = wait(&event, WHAT).unwrap_err();
            let text = error.to_string();
            for part in ["a test has not ended within 0.02 seconds", "`rollout_decode`", "`Client::with_wait_limit`"] {
                assert!(text.contains(part), "{text}");
            }
            assert!(error.is_timed_out() && !error.is_unsupported() && !error.is_out_of_memory());
            // Whatever waits next says the same at once, however long its limit.
            origin.waits().set_limit(Duration::MAX);
            assert!(matches!(wait(&event, "another"), Err(Error::TimedOut { what: WHAT, seconds: 0.02, .. })));
            assert!(origin.waits().check().is_err());
            drop(event);
            assert_eq!(object.destroyed(), 0, "the device may still use it");
        }
    }

    #[test]
    fn a_callback_that_comes_late_does_no_harm() {
        for failure in [None, Some("too late")] {
            let (object, origin) = (FakeObject::new(false, failure), fake::origin(&[]));
            let event: Owned<Event> = object.handle(&origin);
            assert!(wait(&event, WHAT).unwrap_err().is_timed_out());
            drop((event, origin));
            assert!(object.has_callback());
            std::thread::spawn(|| object.finish()).join().unwrap();
            assert!(!object.has_callback());
            assert_eq!(object.live_errors(), 0, "the callback destroys its error");
        }
    }

    #[test]
    fn a_ready_event_is_waited_for_and_destroyed() {
        for without in TABLES {
            let (object, origin) = (FakeObject::new(true, None), fake::origin(without));
            // Even without any time.
            origin.waits().set_limit(Duration::ZERO);
            let event: Owned<Event> = object.handle(&origin);
            wait(&event, WHAT).unwrap();
            wait(&event, WHAT).unwrap();
            drop(event);
            assert_eq!(object.destroyed(), 1);
        }
    }

    #[test]
    fn the_error_of_an_event_is_the_error_of_the_wait() {
        for without in TABLES {
            let (object, origin) =
                (FakeObject::new(true, Some("the link to the device is down")), fake::origin(without));
            let event: Owned<Event> = object.handle(&origin);
            let error = wait(&event, WHAT).unwrap_err();
            assert!(matches!(&error, Error::Api { code: crate::Code::Internal, .. }), "{error}");
            assert!(error.to_string().contains("the link to the device is down"), "{error}");
            assert!(origin.waits().check().is_ok(), "a failure is no hang");
            drop(event);
            assert_eq!((object.destroyed(), object.live_errors()), (1, 0));
        }
    }

    #[test]
    fn an_event_that_becomes_ready_ends_the_wait() {
        for (without, failure) in TABLES.into_iter().flat_map(|table| [(table, None), (table, Some("a failure"))]) {
            let (object, origin) = (FakeObject::new(false, failure), fake::origin(without));
            origin.waits().set_limit(Duration::MAX);
            let event: Owned<Event> = object.handle(&origin);
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| wait(&event, WHAT));
                if without.is_empty() {
                    while !object.has_callback() {
                        std::thread::yield_now();
                    }
                }
                object.finish();
                assert_eq!(waiting.join().unwrap().is_ok(), failure.is_none());
            });
            drop(event);
            assert_eq!((object.destroyed(), object.live_errors()), (1, 0));
        }
    }

    #[test]
    fn a_plugin_with_neither_function_is_an_error() {
        let (object, origin) = (FakeObject::new(false, None), fake::origin(&[6, 9]));
        let event: Owned<Event> = object.handle(&origin);
        let error = wait(&event, WHAT).unwrap_err();
        assert!(matches!(error, Error::MissingFunction { function: "PJRT_Event_IsReady", .. }), "{error}");
    }

    #[test]
    fn memory_outlives_a_copy_that_was_given_up() {
        let (object, origin) = (FakeObject::new(false, None), fake::origin(&[]));
        let buffer: Owned<Buffer> = object.handle(&origin);
        assert!(copy_to_host(&buffer, 1, vec![0.0f32; 1000]).unwrap_err().is_timed_out());
        // Writes all of it: an address sanitizer says whether it is still there.
        object.finish();
        // No second copy begins.
        assert!(copy_to_host(&buffer, 1, vec![0.0f32; 1000]).unwrap_err().is_timed_out());
        drop(buffer);
        assert_eq!(object.destroyed(), 0);
    }

    #[test]
    fn a_copy_that_ends_has_what_the_device_wrote() {
        let (object, origin) = (FakeObject::new(false, None), fake::origin(&[]));
        origin.waits().set_limit(Duration::MAX);
        let buffer: Owned<Buffer> = object.handle(&origin);
        let copied = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| copy_to_host(&buffer, 1, vec![0u8; 3]));
            while !object.has_callback() {
                std::thread::yield_now();
            }
            object.finish();
            waiting.join().unwrap()
        });
        assert_eq!(copied.unwrap(), [7; 3]);
    }

    #[test]
    fn a_copy_to_a_device_that_hangs_is_given_up_and_borrows_nothing() {
        let (object, origin) = (FakeObject::new(false, None), fake::origin(&[]));
        let client: Owned<Client> = object.handle(&origin);
        // SAFETY: the fake plugin does not look at the device.
        let device: Ref<'_, Device> = unsafe { Ref::new(NonNull::dangling()) };
        let copy = || copy_from_host(&client, device, &[1, 2], (1, 1), &[2]).err().unwrap();
        assert!(copy().is_timed_out());
        assert_eq!(object.semantics(), 0, "PJRT_HostBufferSemantics_kImmutableOnlyDuringCall");
        assert!(copy().is_timed_out());
        drop(client);
        assert_eq!(object.destroyed(), 0);
    }
}
