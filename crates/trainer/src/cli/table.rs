//! Tables, in one style for all subcommands. On a terminal that is too narrow for one, its rows become lists.

use super::terminal;
use comfy_table::{CellAlignment, LineStyle, Table, TableStyle, presets};
use console::measure_text_width;
use std::ops::Range;

/// A line below the header and nothing else.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// Rows under a header.
#[derive(Clone, Debug)]
pub(crate) struct Sheet {
    header: Vec<String>,
    numbers: Range<usize>,
    rows: Vec<Vec<String>>,
}

impl Sheet {
    /// Without rows; the columns `numbers` are aligned to the right.
    pub(crate) fn new<T: Into<String>>(header: impl IntoIterator<Item = T>, numbers: Range<usize>) -> Self {
        Self { header: header.into_iter().map(Into::into).collect(), numbers, rows: vec![] }
    }

    /// Adds a row, whose last cells may be left out.
    pub(crate) fn row<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// For standard output: as wide as it is if that is a file or a pipe, and otherwise as its terminal allows.
    pub(crate) fn text(&self) -> String {
        self.fitted(terminal::columns())
    }

    /// In Markdown.
    pub(crate) fn markdown(&self) -> String {
        self.table(presets::ASCII_MARKDOWN).to_string()
    }

    /// A table if `columns` are enough for one, and else a list: a line `name: value` for each cell, and an empty line
    /// between rows.
    fn fitted(&self, columns: Option<usize>) -> String {
        let mut table = self.table(STYLE);
        // Nothing stands beside the table from which it had to be kept apart.
        for (index, padding) in [(0, (0, 1)), (self.header.len().saturating_sub(1), (1, 0))] {
            if let Some(column) = table.column_mut(index) {
                column.set_padding(padding);
            }
        }
        let text = table.to_string();
        let width = text.lines().map(|line| measure_text_width(line.trim_end())).max().unwrap_or(0);
        match columns {
            Some(columns) if width > columns => self.list(columns),
            _ => text,
        }
    }

    fn table(&self, style: TableStyle) -> Table {
        let mut table = Table::new();
        table.load_style(style);
        table.set_header(&self.header);
        for row in &self.rows {
            table.add_row(row);
        }
        for index in self.numbers.clone() {
            if let Some(column) = table.column_mut(index) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table
    }

    fn list(&self, columns: usize) -> String {
        let blocks = self.rows.iter().map(|row| {
            let cells = self.header.iter().zip(row).filter(|(_, cell)| !cell.is_empty());
            let lines = cells.map(|(name, cell)| match name.as_str() {
                "" => wrapped(cell, columns),
                _ => wrapped(&format!("{name}: {cell}"), columns),
            });
            lines.collect::<Vec<_>>().join("\n")
        });
        blocks.collect::<Vec<_>>().join("\n\n")
    }
}

/// `text` on lines of at most `columns`, broken between words; a word that is longer stays whole. Lines after the first are
/// indented.
fn wrapped(text: &str, columns: usize) -> String {
    let mut lines: Vec<String> = vec![];
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if measure_text_width(line) + 1 + measure_text_width(word) <= columns => {
                line.push(' ');
                line.push_str(word);
            }
            Some(_) => lines.push(format!("  {word}")),
            None => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sheet() -> Sheet {
        let mut sheet = Sheet::new(["variant", "tiles", "memory", "time", ""], 2..4);
        sheet.row(["fused", "2048 tokens", "110.3 MB", "12.70 ms", ""]);
        sheet.row(["reference", "-", "1.234 GB", "120.00 ms", "FAIL at 3: expected 1.000000000e0, got 2.000000000e0"]);
        sheet.row(["mosaic", "failed"]);
        sheet
    }

    #[test]
    fn a_narrow_terminal_gets_lists() {
        let text = sheet().fitted(Some(40));
        assert_eq!(
            text,
            "variant: fused\ntiles: 2048 tokens\nmemory: 110.3 MB\ntime: 12.70 ms\n\n\
             variant: reference\ntiles: -\nmemory: 1.234 GB\ntime: 120.00 ms\n\
             FAIL at 3: expected 1.000000000e0, got\n  2.000000000e0\n\nvariant: mosaic\ntiles: failed"
        );
    }

    #[test]
    fn no_line_is_wider_than_the_terminal_and_nothing_is_lost() {
        let full = sheet().fitted(None);
        let width = full.lines().map(|line| measure_text_width(line.trim_end())).max().expect("lines");
        assert!(full.contains('─') && full.contains("FAIL at 3: expected 1.000000000e0, got 2.000000000e0"), "{full}");
        for columns in 20..=200 {
            let text = sheet().fitted(Some(columns));
            assert!(text.lines().all(|line| measure_text_width(line.trim_end()) <= columns), "{columns}:\n{text}");
            for words in ["fused", "110.3 MB", "120.00 ms", "2.000000000e0", "failed"] {
                assert!(text.contains(words), "{columns}: {words}\n{text}");
            }
            assert_eq!(text == full, columns >= width, "{columns}");
        }
        // A path is not broken: it could not be copied.
        let mut long = Sheet::new(["path"], 0..0);
        long.row(["/a/path/that/is/longer/than/the/terminal"]);
        assert_eq!(long.fitted(Some(20)), "path:\n  /a/path/that/is/longer/than/the/terminal");
    }

    #[test]
    fn numbers_are_aligned_and_markdown_is_never_a_list() {
        let text = sheet().fitted(None);
        assert!(text.lines().any(|line| line.contains("  12.70 ms")), "{text}");
        assert!(sheet().markdown().lines().all(|line| line.starts_with('|')), "{}", sheet().markdown());
    }
}
