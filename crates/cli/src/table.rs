//! Tables in one style for all subcommands. On a terminal that is too narrow, columns are spread over several tables, or rows become lists.

use crate::terminal;
use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, LineStyle, Table, TableStyle, presets};
use console::measure_text_width;
use grpo_files::printable;
use std::ops::Range;

/// A line below the header only.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// The maximum number of blanks on each side of a cell.
const PADDING: usize = 2;

/// The minimum number of columns, without the names, in a part of a table.
const FEWEST: usize = 3;

/// The minimum width of a column of text.
const NARROWEST_TEXT: usize = 16;

/// A table: rows under a header.
#[derive(Clone, Debug)]
pub(crate) struct Sheet {
    header: Vec<String>,
    numbers: Range<usize>,
    is_named: bool,
    texts: Range<usize>,
    rows: Vec<Vec<String>>,
}

impl Sheet {
    /// Returns a table without rows; the columns `numbers` are aligned to the right.
    pub(crate) fn new<T: Into<String>>(header: impl IntoIterator<Item = T>, numbers: Range<usize>) -> Self {
        Self {
            header: header.into_iter().map(Into::into).collect(),
            numbers,
            is_named: false,
            texts: 0..0,
            rows: vec![],
        }
    }

    /// Marks the first column as the row's name, so that the other columns may be spread over several tables.
    pub(crate) fn named(mut self) -> Self {
        self.is_named = true;
        self
    }

    /// Marks the columns `texts` as running text, which may be wrapped.
    pub(crate) fn with_texts(mut self, texts: Range<usize>) -> Self {
        self.texts = texts;
        self
    }

    /// Adds a row; trailing cells may be omitted.
    pub(crate) fn row<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) {
        // Escaped before layout, because escaping changes the width of a cell.
        self.rows.push(cells.into_iter().map(|cell| printable(&cell.into()).into_owned()).collect());
    }

    /// Returns the table for standard output: fitted to a terminal's width, unlimited for a file or a pipe.
    pub(crate) fn text(&self) -> String {
        self.fitted(terminal::columns())
    }

    /// Returns the table in Markdown.
    pub(crate) fn markdown(&self) -> String {
        self.table(presets::ASCII_MARKDOWN).to_string()
    }

    /// Formats the table in `columns`. If it does not fit, texts are wrapped; then columns are spread over several tables with at least
    /// [`FEWEST`] columns after the names; then rows become lists with a line `name: value` for each cell and an empty line between rows.
    pub(crate) fn fitted(&self, columns: Option<usize>) -> String {
        let text = self.bare();
        match columns {
            Some(columns) if width(&text) > columns => {
                let table = self.broken(columns).or_else(|| self.parts(columns));
                table.unwrap_or_else(|| self.list(columns))
            }
            _ => text,
        }
    }

    /// Returns the table with wrapped texts; `None` if it has none, or too little room for them.
    fn broken(&self, columns: usize) -> Option<String> {
        let others = (0..self.header.len()).filter(|index| !self.texts.contains(index));
        let cells = |index: usize| self.rows.iter().filter_map(move |row| row.get(index)).chain([&self.header[index]]);
        let widest = |index: usize| cells(index).map(|cell| width(cell)).max().unwrap_or(0) + PADDING;
        let taken: usize = others.clone().map(widest).sum();
        let needed = taken + self.texts.len() * (NARROWEST_TEXT + PADDING);
        if self.texts.is_empty() || needed > columns {
            return None;
        }
        let mut table = self.padded();
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(u16::try_from(columns).ok()?);
        for index in others {
            table.column_mut(index)?.set_constraint(ColumnConstraint::ContentWidth);
        }
        Some(table.to_string())
    }

    /// Returns the table without outer padding.
    fn bare(&self) -> String {
        self.padded().to_string()
    }

    fn padded(&self) -> Table {
        let mut table = self.table(STYLE);
        for (index, padding) in [(0, (0, 1)), (self.header.len().saturating_sub(1), (1, 0))] {
            if let Some(column) = table.column_mut(index) {
                column.set_padding(padding);
            }
        }
        table
    }

    fn parts(&self, columns: usize) -> Option<String> {
        let (mut parts, mut begin) = (vec![], 1);
        while self.is_named && begin < self.header.len() {
            let ends = (begin + 1..=self.header.len()).rev();
            let mut fitting = ends.map(|end| (end, self.part(begin..end).bare()));
            let (end, text) = fitting.find(|(_, text)| width(text) <= columns)?;
            if end < self.header.len() && end - begin < FEWEST {
                return None;
            }
            parts.push(text);
            begin = end;
        }
        (!parts.is_empty()).then(|| parts.join("\n\n"))
    }

    /// Returns the part of the table with the names and the columns `others`.
    fn part(&self, others: Range<usize>) -> Self {
        let pick = |cells: &[String]| {
            let name = cells.iter().take(1);
            name.chain(cells.iter().take(others.end).skip(others.start)).cloned().collect()
        };
        let place = |index: usize| (index.clamp(others.start, others.end) + 1).saturating_sub(others.start);
        Self {
            header: pick(&self.header),
            numbers: place(self.numbers.start)..place(self.numbers.end),
            is_named: true,
            texts: 0..0,
            rows: self.rows.iter().map(|row| pick(row)).collect(),
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
                "" => wrapped(cell, columns, 0, 2),
                _ => wrapped(&format!("{name}: {cell}"), columns, 0, 2),
            });
            lines.collect::<Vec<_>>().join("\n")
        });
        blocks.collect::<Vec<_>>().join("\n\n")
    }
}

fn width(text: &str) -> usize {
    text.lines().map(|line| measure_text_width(line.trim_end())).max().unwrap_or(0)
}

/// Wraps `text` between words into lines of at most `columns`; longer words are not broken. The first line begins in the column `begin`, and
/// the others are indented by `indent` blanks.
pub(crate) fn wrapped(text: &str, columns: usize, begin: usize, indent: usize) -> String {
    let mut lines: Vec<String> = vec![];
    for word in text.split_whitespace() {
        let left = columns.saturating_sub(if lines.len() == 1 { begin } else { 0 });
        match lines.last_mut() {
            Some(line) if measure_text_width(line) + 1 + measure_text_width(word) <= left => {
                line.push(' ');
                line.push_str(word);
            }
            Some(_) => lines.push(format!("{:indent$}{word}", "")),
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
    fn tables_become_lists_on_narrow_terminals() {
        let text = sheet().fitted(Some(40));
        assert_eq!(
            text,
            "variant: fused\ntiles: 2048 tokens\nmemory: 110.3 MB\ntime: 12.70 ms\n\n\
             variant: reference\ntiles: -\nmemory: 1.234 GB\ntime: 120.00 ms\n\
             FAIL at 3: expected 1.000000000e0, got\n  2.000000000e0\n\nvariant: mosaic\ntiles: failed"
        );
    }

    #[test]
    fn fitted_tables_keep_all_cells_within_the_width() {
        let full = sheet().fitted(None);
        let width = width(&full);
        assert!(full.contains('─') && full.contains("FAIL at 3: expected 1.000000000e0, got 2.000000000e0"), "{full}");
        for columns in 20..=200 {
            let text = sheet().fitted(Some(columns));
            assert!(text.lines().all(|line| measure_text_width(line.trim_end()) <= columns), "{columns}:\n{text}");
            for words in ["fused", "110.3 MB", "120.00 ms", "2.000000000e0", "failed"] {
                assert!(text.contains(words), "{columns}: {words}\n{text}");
            }
            assert_eq!(text == full, columns >= width, "{columns}");
        }
        // A path is not wrapped, so that it can be copied.
        let mut long = Sheet::new(["path"], 0..0);
        long.row(["/a/path/that/is/longer/than/the/terminal"]);
        assert_eq!(long.fitted(Some(20)), "path:\n  /a/path/that/is/longer/than/the/terminal");
    }

    #[test]
    fn tables_with_named_rows_are_split_by_columns() {
        let mut sheet = Sheet::new(["variant", "min", "p50", "p90", "mean", "tokens/s", "TFLOP/s"], 1..7).named();
        sheet.row(["fused", "1.100", "1.200", "1.300", "1.250", "123456", "0.512"]);
        sheet.row(["reference", "failed"]);
        let expected = "\
variant        min     p50     p90    mean
──────────────────────────────────────────
fused        1.100   1.200   1.300   1.250
reference   failed

variant     tokens/s   TFLOP/s
──────────────────────────────
fused         123456     0.512
reference";
        let lines = |text: &str| text.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>();
        assert_eq!(lines(&sheet.fitted(Some(44))), lines(expected));
        // Two columns after the names are too few for a table.
        assert!(sheet.fitted(Some(30)).starts_with("variant: fused\nmin: 1.100\n"), "{}", sheet.fitted(Some(30)));
        for columns in 20..=100 {
            let text = sheet.fitted(Some(columns));
            assert!(width(&text) <= columns && text.contains("123456") && text.contains("0.512"), "{columns}:\n{text}");
        }
    }

    #[test]
    fn numbers_are_aligned_and_markdown_is_never_a_list() {
        let text = sheet().fitted(None);
        assert!(text.lines().any(|line| line.contains("  12.70 ms")), "{text}");
        assert!(sheet().markdown().lines().all(|line| line.starts_with('|')), "{}", sheet().markdown());
    }
}
