//! Waits for events of a device, with a limit.
//!
//! `PJRT_Event_Await` has no limit, so a hanging device would hang the process. Instead, a wait registers a callback
//! and sleeps until the callback or the limit. After a timeout, the device may still continue: objects that it may use
//! are never freed, and it gets no further calls.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::calls::calls;
use super::exit::skip_destructors;
use super::{Api, Args, Event, EventAwait, EventIsReady, Owned, RawError, Ref};
use crate::error::{Error, Result};

/// The shared state of a client's waits.
pub(crate) struct Waits {
    /// The limit of a wait, in nanoseconds.
    limit: AtomicU64,
    /// The first wait that timed out.
    given_up: OnceLock<GivenUp>,
    /// The last program that was launched.
    launched: Mutex<Option<Arc<str>>>,
    /// `true` if the plugin has refused a callback; no further ones are requested.
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
        // u64::MAX nanoseconds are 584 years.
        self.limit.store(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Records the launched program for the error of a wait that times out.
    pub(super) fn launches(&self, program: Option<&Arc<str>>) {
        *self.launched.lock().unwrap_or_else(PoisonError::into_inner) = program.cloned();
    }

    /// Returns `true` if a wait has timed out. The device may then still use any object of the client, and destroying
    /// one could block.
    pub(super) fn is_given_up(&self) -> bool {
        self.given_up.get().is_some()
    }

    /// Returns the error of the wait that timed out, if any. Calls that may block are then not made.
    pub(crate) fn check(&self) -> Result<()> {
        self.given_up.get().map_or(Ok(()), |first| Err(first.error()))
    }

    fn give_up(&self, what: &'static str, limit: Duration) -> Error {
        let program = self.launched.lock().unwrap_or_else(PoisonError::into_inner).clone();
        skip_destructors();
        self.given_up.get_or_init(|| GivenUp { what, limit, program }).error()
    }
}

calls! {
    9 "PJRT_Event_OnReady" OnReady<'a> {
        event: Ref<'a, Event>, callback: unsafe extern "C" fn(*mut RawError, *mut c_void), user_arg: *mut c_void, =>
    }
}

/// The state that an event's callback shares with the waiting thread.
struct Signal {
    api: &'static Api,
    outcome: Mutex<Option<Result<()>>>,
    arrived: Condvar,
}

/// Wakes the waiting thread. The callback owns a reference to the signal, so it may run after the wait has timed out.
unsafe extern "C" fn arrive(error: *mut RawError, signal: *mut c_void) {
    // SAFETY: the pointer is from `Arc::into_raw` in `on_ready`, and the callback is called once.
    let signal = unsafe { Arc::from_raw(signal.cast_const().cast::<Signal>()) };
    // The callback owns the error.
    let outcome = signal.api.check(OnReady::NAME, error);
    *signal.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
    signal.arrived.notify_all();
}

/// Waits until `event` is ready, and returns its error if it has one. `what` names the operation, for messages.
pub(crate) fn wait(event: &Owned<Event>, what: &'static str) -> Result<()> {
    ended(event, what)?
}

/// Like [`wait`], but distinguishes the outcome of a completed event (inner result) from a wait that failed (outer
/// result).
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
    api.function(OnReady::SLOT, OnReady::NAME)?;
    let signal = Arc::new(Signal { api, outcome: Mutex::new(None), arrived: Condvar::new() });
    // A plugin that refuses the call may still have stored the callback, so this reference is then leaked.
    let user_arg = Arc::into_raw(Arc::clone(&signal)).cast_mut().cast();
    api.call(&mut OnReady::new(event.get(), arrive, user_arg))?;
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

/// Polls, for plugins without callbacks. Pauses grow with the time that the wait has taken.
fn poll(event: &Owned<Event>, what: &'static str) -> Result<Result<()>> {
    const SHORTEST: Duration = Duration::from_micros(20);
    const LONGEST: Duration = Duration::from_millis(20);
    let (api, waits, start) = (event.api(), event.origin().waits(), Instant::now());
    let limit = waits.limit();
    loop {
        if event.ask(EventIsReady::new)?.is_ready {
            // This call no longer blocks, and returns the event's error.
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
    use super::*;

    /// A plugin with callbacks, and one without.
    const TABLES: [&[usize]; 2] = [&[], &[OnReady::SLOT]];
    const WHAT: &str = "a test";

    #[test]
    fn event_layouts_match_the_header() {
        assert_eq!(SIZES, [("PJRT_Event_OnReady", 9, 40)]);
        assert_eq!(std::mem::offset_of!(OnReady<'_>, user_arg), 32);
    }

    #[test]
    fn a_wait_for_an_event_that_is_never_ready_times_out() {
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
            // Further waits return the same error at once, for any limit.
            origin.waits().set_limit(Duration::MAX);
            assert!(matches!(wait(&event, "another"), Err(Error::TimedOut { what: WHAT, seconds: 0.02, .. })));
            assert!(origin.waits().check().is_err());
            drop(event);
            assert_eq!(object.destroyed(), 0, "the device may still use it");
        }
    }

    #[test]
    fn a_late_callback_is_harmless() {
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
            // Even with a limit of zero.
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
    fn a_plugin_without_callbacks_and_polling_is_an_error() {
        let (object, origin) = (FakeObject::new(false, None), fake::origin(&[6, 9]));
        let event: Owned<Event> = object.handle(&origin);
        let error = wait(&event, WHAT).unwrap_err();
        assert!(matches!(error, Error::MissingFunction { function: "PJRT_Event_IsReady", .. }), "{error}");
    }
}
