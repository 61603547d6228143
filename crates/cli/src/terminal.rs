//! The width of standard output.

use console::Term;
use std::io::IsTerminal;

/// The width in columns of a terminal that does not report its width.
pub(crate) const USUAL_COLUMNS: usize = 80;

/// Returns the width of standard output in columns if it is a terminal; `None` for a file or a pipe.
pub(crate) fn columns() -> Option<usize> {
    std::io::stdout().is_terminal().then(|| of(&Term::stdout()))
}

/// Returns the width of `terminal` in columns.
pub(crate) fn of(terminal: &Term) -> usize {
    let size = terminal.size_checked().map(|(_, columns)| usize::from(columns));
    size.filter(|columns| *columns > 0).unwrap_or(USUAL_COLUMNS)
}
