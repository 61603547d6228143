//! Logs on standard error, with control characters escaped.

use crate::compiling::{Compiling, Spans};
use console::style;
use grpo_files::printable;
use std::fmt::Result;
use std::io::IsTerminal;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::{LevelFilter, filter_fn};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// Crates whose logs may contain keys and passwords; they are always off.
const SILENT: [&str; 3] = ["ureq=off", "ureq_proto=off", "rustls=off"];

/// Starts logging at the levels of `GRPO_LOG`, by default warnings, and the display of compilations.
pub(crate) fn init(compiling: Compiling) {
    let filter = EnvFilter::try_from_env("GRPO_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    let silent = SILENT.iter().filter_map(|directive| directive.parse().ok());
    let filter = silent.fold(filter, EnvFilter::add_directive);
    // No colours in files and pipes, or with NO_COLOR (https://no-color.org).
    let terminal = std::io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|name| name != "dumb");
    let colours = terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let logs = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).event_format(Lines { colours, terminal });
    // Without the hint, the level of all logs would be TRACE, and dependencies would format messages that nobody reads.
    let about_compiling = filter_fn(Spans::hears).with_max_level_hint(LevelFilter::INFO);
    let spans = Spans(compiling).with_filter(about_compiling);
    tracing_subscriber::registry().with(logs.with_filter(filter)).with(spans).init();
}

/// The log format `LEVEL target: message field=value`.
struct Lines {
    colours: bool,
    terminal: bool,
}

/// Moves to the start of a terminal's line and erases it.
const ERASE: &str = "\r\u{1b}[K";

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> Result {
        let mut text = String::new();
        context.format_fields(Writer::new(&mut text), event)?;
        let (level, target) = (*event.metadata().level(), event.metadata().target());
        let name = style(format!("{level:>5}")).force_styling(self.colours);
        let name = match level {
            Level::ERROR => name.red(),
            Level::WARN => name.yellow(),
            Level::INFO => name.green(),
            _ => name.blue(),
        };
        // A progress bar may be on the line; it is redrawn below.
        let erase = if self.terminal { ERASE } else { "" };
        writeln!(writer, "{erase}{name} {target}: {}", printable(&text))
    }
}
