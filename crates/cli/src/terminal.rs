//! How much room standard output has.

use console::Term;
use std::io::IsTerminal;

/// The width in columns of a terminal that does not say how wide it is.
pub(crate) const USUAL_COLUMNS: usize = 80;

/// The width in columns of the terminal that standard output is; `None` for a file or a pipe, which have no width.
pub(crate) fn columns() -> Option<usize> {
    std::io::stdout().is_terminal().then(|| of(&Term::stdout()))
}

/// The width of `terminal` in columns.
pub(crate) fn of(terminal: &Term) -> usize {
    let size = terminal.size_checked().map(|(_, columns)| usize::from(columns));
    size.filter(|columns| *columns > 0).unwrap_or(USUAL_COLUMNS)
}
