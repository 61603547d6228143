//! Counts prefills.

use std::cell::RefCell;
use std::sync::Once;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

thread_local! {
    static ROWS: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    static PROMPTS: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Records the number of rows and of prompts of every prefill of a thread.
struct Recorder;

impl Visit for Recorder {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "prefill_rows" => ROWS.with_borrow_mut(|rows| rows.push(value)),
            "prompts" => PROMPTS.with_borrow_mut(|prompts| prompts.push(value)),
            _ => {}
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

impl Subscriber for Recorder {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.fields().field("prefill_rows").is_some()
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        event.record(&mut Recorder);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Returns the result of `of`, and the number of rows of each prefill in it.
///
/// The recorder is global: a recorder of one thread may miss an event whose call site another thread reaches first.
pub(crate) fn rows_of_prefills<T>(of: impl FnOnce() -> T) -> (T, Vec<u64>) {
    static RECORDER: Once = Once::new();
    RECORDER.call_once(|| tracing::subscriber::set_global_default(Recorder).expect("the only global subscriber"));
    ROWS.take();
    let result = of();
    (result, ROWS.take())
}

/// Returns the result of `of`, and the number of prompts of each prefill in it, without rows of padding.
pub(crate) fn prompts_of_prefills<T>(of: impl FnOnce() -> T) -> (T, Vec<u64>) {
    PROMPTS.take();
    let (result, _) = rows_of_prefills(of);
    (result, PROMPTS.take())
}
