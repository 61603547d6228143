//! Shows compilations in progress: a line on a terminal, or lines in a log.
//!
//! Compilers report no progress, so only the current programs and their elapsed times are known. [`Spans`] observes compilations in this
//! process; `grpo aot`, which compiles in other processes, calls [`Compiling::began`] itself.

use crate::progress::{Field, fitted};
use crate::terminal;
use console::Term;
use grpo_core::readable_bytes;
use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::field::{Field as SpanField, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

/// The longest time between two lines in a log.
const LONGEST_SILENCE: Duration = Duration::from_secs(15);
/// The size in bytes of StableHLO text below which compiling takes only a moment, such as for copies of a tensor.
const SMALL: u64 = 2000;
/// A program that started less than this ago gets no further line.
const YOUNG: Duration = Duration::from_secs(10);

/// The display of compilations in progress, on standard error. Clones share its state.
#[derive(Clone, Default)]
pub(crate) struct Compiling(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified when a program ends.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    /// `true` if nothing is shown.
    silent: bool,
    /// `true` if another line of the terminal shows the state, see [`Compiling::fields`].
    elsewhere: bool,
    /// The number of programs to compile, if known.
    total: Option<usize>,
    /// The number of started programs; `named` excludes small ones.
    began: usize,
    named: usize,
    done: usize,
    /// The programs being compiled, in starting order.
    programs: BTreeMap<usize, Program>,
    bar: Option<ProgressBar>,
    /// `true` if a thread writes lines about slow programs to the log.
    ticks: bool,
}

/// A program that is being compiled.
#[derive(Clone, Debug)]
struct Program {
    name: String,
    bytes: Option<u64>,
    /// Its number among the programs that are not small; `None` for a small one.
    place: Option<usize>,
    since: Instant,
}

/// The outcome of compiling a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The program was compiled.
    Compiled,
    /// The program was in the cache.
    FromCache,
    /// The program did not compile; the command reports the error.
    Failed,
}

impl Compiling {
    /// Stops showing anything.
    pub(crate) fn silence(&self) {
        self.lock().silent = true;
    }

    /// Writes a line before programs are compiled.
    pub(crate) fn announce(&self, line: &str) {
        if !self.lock().silent {
            say(line);
        }
    }

    /// Sets the number of programs of the whole command.
    pub(crate) fn expect(&self, total: usize) {
        self.lock().total = Some(total);
    }

    /// Sets whether another line of the terminal shows [`Compiling::fields`], which replaces the line of this display.
    pub(crate) fn is_shown_elsewhere(&self, elsewhere: bool) {
        self.lock().elsewhere = elsewhere;
    }

    /// Returns the fields for a terminal line, the most important with rank `first`; `None` if nothing is being compiled.
    pub(crate) fn fields(&self, first: u8) -> Option<Vec<Field>> {
        self.lock().fields(first)
    }

    /// Records the start of a program and returns its number.
    pub(crate) fn began(&self, name: &str, bytes: Option<u64>) -> usize {
        let mut state = self.lock();
        let is_small = bytes.is_some_and(|bytes| bytes < SMALL);
        state.began += 1;
        state.named += usize::from(!is_small);
        let place = (!is_small).then_some(state.named);
        let (number, program) = (state.began, Program { name: name.to_owned(), bytes, place, since: Instant::now() });
        if state.silent {
            return number;
        }
        if std::io::stderr().is_terminal() {
            if !state.elsewhere {
                state.bar.get_or_insert_with(|| self.bar());
            }
        } else {
            if !is_small {
                say(&began_line(&program, state.total));
            }
            if !state.ticks {
                state.ticks = true;
                let shared = Arc::clone(&self.0);
                std::thread::spawn(move || tick(&shared));
            }
        }
        state.programs.insert(number, program);
        let bar = state.bar.clone();
        drop(state);
        // Drawing the line locks the state, so it must be unlocked here.
        bar.inspect(|bar| bar.enable_steady_tick(Duration::from_millis(200)));
        number
    }

    /// Records the end of the program with this number.
    pub(crate) fn ended(&self, number: usize, how: Ended) {
        let mut state = self.lock();
        let Some(program) = state.programs.remove(&number) else { return };
        state.done += usize::from(program.place.is_some());
        let is_said = program.place.is_some() || program.since.elapsed() > LONGEST_SILENCE;
        if is_said && !std::io::stderr().is_terminal() {
            say(&ended_line(&program, how, program.since.elapsed(), state.done, state.total));
        }
        let bar = if state.programs.is_empty() { state.bar.take() } else { None };
        drop(state);
        self.0.ended.notify_all();
        // Drawing the line locks the state.
        bar.inspect(ProgressBar::finish_and_clear);
    }

    /// Creates the animated line on standard error.
    fn bar(&self) -> ProgressBar {
        let (bar, compiling) = (ProgressBar::new_spinner(), self.clone());
        let line = move |_: &ProgressState, out: &mut dyn std::fmt::Write| {
            // Leaves room for the spinner and a space. Errors of writing are ignored.
            let columns = terminal::of(&Term::stderr()).saturating_sub(2);
            let _ = out.write_str(&fitted(&compiling.fields(0).unwrap_or_default(), columns));
        };
        if let Ok(style) = ProgressStyle::with_template("{spinner} {line}") {
            bar.set_style(style.with_key("line", line));
        }
        bar
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn fields(&self, first: u8) -> Option<Vec<Field>> {
        let program = self.programs.values().next()?;
        let names: Vec<&str> = self.programs.values().map(|program| program.name.as_str()).collect();
        let elapsed = seconds(program.since.elapsed());
        let count = match self.total {
            Some(total) if names.len() > 1 => Some(format!("{} of {total} done", self.done)),
            _ => program.place.map(|number| place(number, self.total)),
        };
        let mut fields =
            vec![Field::new(first, format!("compiling {}", names.join(", "))), Field::new(first + 1, elapsed)];
        fields.extend(count.map(|count| Field::new(first + 2, count)));
        if let (Some(bytes), 1) = (program.bytes, names.len()) {
            fields.push(Field::new(first + 3, readable_bytes(bytes)));
        }
        Some(fields)
    }
}

/// Writes lines about slow programs to the log until no program is left.
fn tick(shared: &Shared) {
    let mut state = shared.state.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let wait = shared.ended.wait_timeout_while(state, LONGEST_SILENCE, |state| !state.programs.is_empty());
        let (next, waited) = wait.unwrap_or_else(PoisonError::into_inner);
        state = next;
        if !waited.timed_out() {
            state.ticks = false;
            return;
        }
        for program in state.programs.values().filter(|program| program.since.elapsed() > YOUNG) {
            say(&still_line(program, program.since.elapsed()));
        }
    }
}

/// Writes a line to the log, ignoring errors.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Returns the number of a program among all programs.
fn place(number: usize, total: Option<usize>) -> String {
    match total {
        Some(total) => format!("{number} of {total}"),
        None => format!("program {number}"),
    }
}

fn began_line(program: &Program, total: Option<usize>) -> String {
    let size = program.bytes.map(|bytes| format!("{} of StableHLO", readable_bytes(bytes)));
    let facts: Vec<String> = program.place.map(|number| place(number, total)).into_iter().chain(size).collect();
    format!("compiling {} ({})", program.name, facts.join(", "))
}

fn still_line(program: &Program, elapsed: Duration) -> String {
    format!("compiling {}: {} so far", program.name, seconds(elapsed))
}

fn ended_line(program: &Program, how: Ended, elapsed: Duration, done: usize, total: Option<usize>) -> String {
    let (name, elapsed) = (&program.name, seconds(elapsed));
    let mut line = match how {
        Ended::Compiled => format!("compiled {name} in {elapsed}"),
        Ended::FromCache => format!("{name} was compiled before"),
        Ended::Failed => format!("compiling {name} failed after {elapsed}"),
    };
    if let Some(total) = total {
        let _ = write!(line, " ({done} of {total} done)");
    }
    line
}

/// Returns a time such as `0.4 s`, `12 s` or `3 min 05 s`.
fn seconds(elapsed: Duration) -> String {
    match elapsed.as_secs() {
        0..10 => format!("{:.1} s", elapsed.as_secs_f64()),
        whole @ 10..60 => format!("{whole} s"),
        whole => format!("{} min {:02} s", whole / 60, whole % 60),
    }
}

/// A tracing layer that shows the spans of [`grpo_pjrt`].
pub(crate) struct Spans(pub(crate) Compiling);

impl Spans {
    /// Returns `true` if a span is about compiling.
    pub(crate) fn hears(metadata: &Metadata<'_>) -> bool {
        metadata.is_span()
            && matches!((metadata.target(), metadata.name()), ("pjrt", "compile") | ("backend_tpu", "tiles"))
    }
}

/// The fields of a span.
#[derive(Default)]
struct Fields {
    program: Option<String>,
    bytes: Option<u64>,
    tiles: Option<String>,
    failed: bool,
}

impl Visit for Fields {
    fn record_str(&mut self, field: &SpanField, value: &str) {
        if field.name() == "program" {
            self.program = Some(value.to_owned());
        }
    }

    fn record_u64(&mut self, field: &SpanField, value: u64) {
        if field.name() == "bytes" {
            self.bytes = Some(value);
        }
    }

    fn record_bool(&mut self, field: &SpanField, value: bool) {
        self.failed |= field.name() == "failed" && value;
    }

    fn record_debug(&mut self, field: &SpanField, value: &dyn std::fmt::Debug) {
        if field.name() == "tiles" {
            self.tiles = Some(format!("{value:?}"));
        }
    }
}

/// The tiles of the programs that are compiled within a span.
struct Tiles(String);

/// The number of a span's program, and its outcome.
struct Numbered(usize, Ended);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Spans {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let Some(tiles) = fields.tiles {
            span.extensions_mut().insert(Tiles(tiles));
            return;
        }
        let tiles =
            span.scope().skip(1).find_map(|span| span.extensions().get::<Tiles>().map(|Tiles(text)| text.clone()));
        let name = fields.program.unwrap_or_else(|| "a program".to_owned());
        let name = tiles.map_or(name.clone(), |tiles| format!("{name}, {tiles}"));
        let number = self.0.began(&name, fields.bytes);
        span.extensions_mut().insert(Numbered(number, Ended::Compiled));
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        values.record(&mut fields);
        if let Some(span) = context.span(id).filter(|_| fields.failed)
            && let Some(Numbered(_, how)) = span.extensions_mut().get_mut()
        {
            *how = Ended::Failed;
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let numbered = context.span(&id).and_then(|span| span.extensions_mut().remove::<Numbered>());
        if let Some(Numbered(number, how)) = numbered {
            self.0.ended(number, how);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::joined;

    fn program(name: &str, place: usize, bytes: Option<u64>) -> Program {
        Program { name: name.to_owned(), bytes, place: Some(place), since: Instant::now() }
    }

    #[test]
    fn log_lines_have_program_number_size_and_time() {
        let gradient = program("gradient", 3, Some(412_345));
        assert_eq!(began_line(&gradient, None), "compiling gradient (program 3, 412.3 kB of StableHLO)");
        assert_eq!(began_line(&program("step", 3, None), Some(12)), "compiling step (3 of 12)");
        assert_eq!(still_line(&gradient, Duration::from_secs(15)), "compiling gradient: 15 s so far");
        let ended = |how, seconds, total| ended_line(&gradient, how, Duration::from_secs_f64(seconds), 3, total);
        assert_eq!(ended(Ended::Compiled, 12.34, None), "compiled gradient in 12 s");
        assert_eq!(ended(Ended::Compiled, 190.4, Some(12)), "compiled gradient in 3 min 10 s (3 of 12 done)");
        assert_eq!(ended(Ended::FromCache, 0.1, Some(12)), "gradient was compiled before (3 of 12 done)");
        assert_eq!(ended(Ended::Failed, 0.44, None), "compiling gradient failed after 0.4 s");
    }

    #[test]
    fn the_terminal_line_starts_with_the_program_and_fits_every_width() {
        let mut state = State { began: 1, ..State::default() };
        assert_eq!(state.fields(0), None);
        state.programs.insert(1, program("fused, 1024 tokens", 1, Some(2_000_000)));
        let fields = state.fields(0).unwrap();
        assert_eq!(joined(&fields), "compiling fused, 1024 tokens  0.0 s  program 1  2.0 MB");
        assert_eq!(fitted(&fields, 40), "compiling fused, 1024 tokens  0.0 s");
        assert_eq!(fitted(&fields, 30), "compiling fused, 1024 tokens");
        state.programs.insert(2, program("apply", 2, None));
        (state.total, state.done) = (Some(12), 4);
        assert_eq!(joined(&state.fields(0).unwrap()), "compiling fused, 1024 tokens, apply  0.0 s  4 of 12 done");
    }

    #[test]
    fn compiler_spans_are_shown_as_programs() {
        use tracing_subscriber::filter::filter_fn;
        use tracing_subscriber::layer::SubscriberExt;

        let compiling = Compiling::default();
        let spans = Spans(compiling.clone()).with_filter(filter_fn(Spans::hears));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(spans), || {
            tracing::info_span!(target: "other", "compile", program = "no")
                .in_scope(|| assert_eq!(compiling.fields(0), None));
            tracing::info_span!(target: "backend_tpu", "tiles", tiles = %"512 tokens").in_scope(|| {
                let span = tracing::info_span!(target: "pjrt", "compile", program = Some("fused"), bytes = 3000u64, failed = tracing::field::Empty);
                let entered = span.enter();
                let line = joined(&compiling.fields(0).unwrap());
                assert_eq!(line, "compiling fused, 512 tokens  0.0 s  program 1  3.0 kB");
                span.record("failed", true);
                drop(entered);
            });
            assert_eq!(compiling.fields(0), None);
            // Small programs are not counted.
            tracing::info_span!(target: "pjrt", "compile", program = "zeros", bytes = 300u64).in_scope(|| {
                assert_eq!(joined(&compiling.fields(0).unwrap()), "compiling zeros  0.0 s  300 B");
            });
            // Programs from a cache open no span, and a silent command shows none.
            compiling.silence();
            let _span = tracing::info_span!(target: "pjrt", "compile", program = "step", bytes = 1u64).entered();
            assert_eq!(compiling.fields(0), None);
        });
    }
}
