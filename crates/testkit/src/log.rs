//! The log of a call.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Calls `of` and returns what this thread logs with `tracing`, one line per event, from level INFO on.
///
/// ```
/// let log = grpo_testkit::logged(|| tracing::warn!("hot"));
/// assert!(log.contains("WARN") && log.trim_end().ends_with("hot"));
/// ```
pub fn logged(of: impl FnOnce()) -> String {
    // A callsite that a thread without a subscriber reaches first is disabled until interests are computed again, which races with
    // this call. With a global subscriber, no callsite is disabled.
    static GLOBAL: Once = Once::new();
    GLOBAL.call_once(|| {
        // An error means that the process has a global subscriber.
        let _ = tracing::subscriber::set_global_default(tracing_subscriber::fmt().with_writer(io::sink).finish());
    });
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    tracing::subscriber::with_default(subscriber, of);
    String::from_utf8_lossy(&log.bytes()).into_owned()
}
