//! Threads with a stack that is large enough for every template.

use super::limits::{Fault, STACK};
use rayon::ThreadPoolBuilder;
use rayon::prelude::*;
use std::cell::Cell;

thread_local! {
    /// `true` if this thread has such a stack.
    static HAS_STACK: Cell<bool> = const { Cell::new(false) };
}

/// The smallest number of items for which another thread is started.
const PER_THREAD: usize = 32;

/// Returns `true` if the current thread has a stack that is large enough for every template.
pub(super) fn has_stack() -> bool {
    HAS_STACK.get()
}

/// Runs `work` on a thread with a stack of [`STACK`] bytes.
pub(super) fn on_own_stack<T: Send>(work: impl FnOnce() -> Result<T, Fault> + Send) -> Result<T, Fault> {
    let fault = |message: String| Fault { line: None, message };
    let failed = |_| Err(fault("the template engine failed".into()));
    if has_stack() {
        return std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or_else(failed);
    }
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("chat template".into()).stack_size(STACK);
        let thread = thread
            .spawn_scoped(scope, work)
            .map_err(|error| fault(format!("no thread with a stack of {} MiB can be started: {error}", STACK >> 20)))?;
        thread.join().unwrap_or_else(failed)
    })
}

/// Returns the results of `work` for `items`, in order, computed by at most `threads` threads. Chat templates are rendered on these threads
/// directly; elsewhere, [`crate::ChatTemplate::render`] starts a thread for every text.
///
/// ```
/// assert_eq!(grpo_models::map_on_template_threads(&[1, 2, 3], 2, |n| n * n), [1, 4, 9]);
/// ```
///
/// # Panics
/// Panics if `work` panics.
pub fn map_on_template_threads<T: Sync, R: Send>(items: &[T], threads: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads.clamp(1, items.len().div_ceil(PER_THREAD).max(1)))
        .stack_size(STACK)
        .thread_name(|_| "chat templates".into())
        .start_handler(|_| HAS_STACK.set(true));
    match pool.build() {
        Ok(pool) => pool.install(|| items.par_iter().map(&work).collect()),
        // No thread could be started.
        Err(_) => items.iter().map(work).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_the_order_of_the_items() {
        let items: Vec<usize> = (0..1000).collect();
        for threads in [0, 1, 3, 64] {
            let found = map_on_template_threads(&items, threads, |item| (has_stack(), item * 2));
            assert!(found.iter().enumerate().all(|(at, (on_stack, double))| *on_stack && *double == 2 * at));
            assert_eq!(found.len(), items.len());
        }
        assert!(map_on_template_threads(&[0_u8; 0], 2, |item| *item).is_empty() && !has_stack());
    }
}
