//! Threads with a stack that is large enough for every template.

use super::limits::STACK;
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    /// `true` if this thread has such a stack.
    static HAS_STACK: Cell<bool> = const { Cell::new(false) };
}

/// The number of items that a thread takes at a time.
const PIECE: usize = 32;

/// Returns `true` if the current thread has a stack that is large enough for every template.
pub(super) fn has_stack() -> bool {
    HAS_STACK.get()
}

/// Returns the results of `work` for `items`, in order, computed by at most `threads` threads. Chat templates are rendered on these threads
/// directly; elsewhere, [`crate::ChatTemplate::render`] starts a thread for every text.
///
/// ```
/// assert_eq!(models::map_on_template_threads(&[1, 2, 3], 2, |n| n * n), [1, 4, 9]);
/// ```
///
/// # Panics
/// Panics if `work` panics.
pub fn map_on_template_threads<T: Sync, R: Send>(items: &[T], threads: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let pieces = || {
        let mut done = vec![];
        loop {
            let start = next.fetch_add(PIECE, Ordering::Relaxed);
            let Some(piece) = items.get(start..(start + PIECE).min(items.len())).filter(|piece| !piece.is_empty())
            else {
                return done;
            };
            done.push((start, piece.iter().map(&work).collect::<Vec<R>>()));
        }
    };
    let on_own_stack = || {
        HAS_STACK.set(true);
        pieces()
    };
    let count = threads.clamp(1, items.len().div_ceil(PIECE).max(1));
    let mut done = std::thread::scope(|scope| {
        let begin = |_| {
            let thread = std::thread::Builder::new().name("chat templates".into()).stack_size(STACK);
            thread.spawn_scoped(scope, on_own_stack).ok()
        };
        let begun: Vec<_> = (0..count).map(begin).collect();
        let joined = begun.into_iter().flatten().map(|thread| thread.join());
        joined.flat_map(|done| done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect::<Vec<_>>()
    });
    // The remaining items, if no thread could be started.
    done.extend(pieces());
    done.sort_by_key(|(start, _)| *start);
    done.into_iter().flat_map(|(_, results)| results).collect()
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
