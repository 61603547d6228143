//! An optional profile of a step's time.
//!
//! Nothing is measured outside of [`measured`]; inside, every packing and every product reads a clock twice, which
//! costs less than 1 % of a step of realistic size.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Instant;
use strum::IntoStaticStr;

/// The kinds of work of the kernels of `fused`, and of `logits` with hidden states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Work {
    /// Products of packed operands.
    Products,
    /// Packing operands: reading the head, hidden states and dL/dlogits.
    Packing,
    /// Row statistics of logits.
    Statistics,
    /// dL/dlogits from logits.
    Gradients,
}

impl Work {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Products, Self::Packing, Self::Statistics, Self::Gradients];

    /// Returns `products`, `packing`, `statistics` or `gradients`.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

static ON: AtomicBool = AtomicBool::new(false);
static NANOS: [AtomicU64; Work::ALL.len()] = [const { AtomicU64::new(0) }; Work::ALL.len()];

/// Runs `f`; returns its result and the seconds of each kind of work, summed over all threads.
///
/// Concurrent kernels elsewhere in the process are counted, too; concurrent calls wait for one another.
///
/// ```
/// use grpo_backend_cpu::profile::{Work, measured};
///
/// let (four, seconds) = measured(|| 2 + 2);
/// assert_eq!((four, seconds(Work::Products)), (4, 0.0));
/// ```
pub fn measured<T>(f: impl FnOnce() -> T) -> (T, impl Fn(Work) -> f64) {
    /// Stops the measurement, even if `f` panics.
    struct Running;
    impl Drop for Running {
        fn drop(&mut self) {
            ON.store(false, Relaxed);
        }
    }
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    NANOS.iter().for_each(|nanos| nanos.store(0, Relaxed));
    ON.store(true, Relaxed);
    let running = Running;
    let result = f();
    drop(running);
    let seconds = Work::ALL.map(|work| NANOS[work as usize].load(Relaxed) as f64 * 1e-9);
    (result, move |work| seconds[work as usize])
}

/// Measures the time until it is dropped, if a profile is active.
#[must_use]
pub(crate) struct Clock(Option<(Work, Instant)>);

impl Clock {
    #[inline(always)]
    pub(crate) fn start(work: Work) -> Self {
        Self(ON.load(Relaxed).then(|| (work, Instant::now())))
    }
}

impl Drop for Clock {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some((work, began)) = self.0 {
            NANOS[work as usize].fetch_add(began.elapsed().as_nanos() as u64, Relaxed);
        }
    }
}

/// Runs `f` and measures its time, if a profile is active.
#[inline(always)]
pub(crate) fn timed<T>(work: Work, f: impl FnOnce() -> T) -> T {
    let _clock = Clock::start(work);
    f()
}
