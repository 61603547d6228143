//! Reads logs of one JSON object per line that may be incomplete: the run may still be writing, it may have been killed within a line, or
//! the file may have been edited. Invalid lines are counted and reported; the others are read.

use crate::error::Result;
use grpo_files::open_regular;
use serde::de::DeserializeOwned;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// The size limit of a line in bytes.
const MAX_LINE: u64 = 64 << 20;

#[derive(Debug, Default)]
pub(crate) struct Reading {
    /// The number of valid rows.
    pub rows: u64,
    /// The number of invalid lines, apart from an incomplete last one.
    pub bad: u64,
    /// The number of the first invalid line, and its problem.
    pub first_bad: Option<(u64, String)>,
    /// The number of the last line, if it is incomplete and has no line break.
    pub torn: Option<u64>,
}

impl Reading {
    fn refuse(&mut self, line: u64, reason: String) {
        self.bad += 1;
        self.first_bad.get_or_insert((line, reason));
    }

    /// Returns the problems of the file for the reader of the page.
    pub(crate) fn notes(&self, file: &str) -> Vec<String> {
        let bad = self.first_bad.as_ref().map(|(line, reason)| match self.bad {
            1 => format!("{file}: line {line} is left out: {reason}"),
            count => format!("{file}: {count} lines are left out, the first is line {line}: {reason}"),
        });
        let torn = self.torn.map(|line| {
            format!("{file}: line {line}, the last one, is cut off and left out: the run was writing it, or was killed")
        });
        bad.into_iter().chain(torn).collect()
    }
}

/// Passes every row of a log to `take`, in order, with the length of its line in bytes. A row that `take` rejects counts as an invalid
/// line.
pub(crate) fn each_row<T: DeserializeOwned>(
    path: &Path,
    mut take: impl FnMut(T, usize) -> std::result::Result<(), String>,
) -> Result<Reading> {
    let io = |e| grpo_files::Error::io("read", path, e);
    let (file, _) = open_regular(path).map_err(io)?;
    let mut lines = BufReader::new(file);
    let (mut line, mut number, mut reading) = (Vec::new(), 0, Reading::default());
    loop {
        line.clear();
        if (&mut lines).take(MAX_LINE).read_until(b'\n', &mut line).map_err(io)? == 0 {
            return Ok(reading);
        }
        number += 1;
        let whole = line.ends_with(b"\n");
        if !whole && line.len() as u64 == MAX_LINE {
            lines.skip_until(b'\n').map_err(io)?;
            reading.refuse(number, format!("it is longer than {MAX_LINE} bytes"));
            continue;
        }
        match parse(&line).and_then(|row| take(row, line.len())) {
            Ok(()) => reading.rows += 1,
            Err(_) if !whole => reading.torn = Some(number),
            Err(reason) => reading.refuse(number, reason),
        }
    }
}

fn parse<T: DeserializeOwned>(line: &[u8]) -> std::result::Result<T, String> {
    let row = serde_json::from_slice(line).or_else(|error| match without_not_finite(line) {
        Some(line) => serde_json::from_slice(&line),
        None => Err(error),
    });
    // The line number is reported separately; only the column is kept.
    row.map_err(|e| e.to_string().replace(" at line 1 column", " at column"))
}

/// Returns the line with `null` for NaN and infinities, which some programs write although JSON does not allow them; `None` if there are
/// none.
fn without_not_finite(line: &[u8]) -> Option<Vec<u8>> {
    let (mut out, mut in_text, mut found, mut at) = (Vec::with_capacity(line.len()), false, false, 0);
    while at < line.len() {
        let rest = &line[at..];
        let word = [&b"-Infinity"[..], b"Infinity", b"NaN"].into_iter().find(|word| !in_text && rest.starts_with(word));
        if let Some(word) = word {
            out.extend_from_slice(b"null");
            at += word.len();
            found = true;
            continue;
        }
        let length = if in_text && rest[0] == b'\\' { 2.min(rest.len()) } else { 1 };
        in_text ^= rest[0] == b'"';
        out.extend_from_slice(&rest[..length]);
        at += length;
    }
    found.then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn non_finite_literals_are_replaced_outside_of_strings_only() {
        let line = br#"{"a":NaN,"NaN":"-Infinity \" NaN","b":[-Infinity,Infinity],"c":"\\"}"#;
        let clean = without_not_finite(line).unwrap();
        assert_eq!(
            String::from_utf8(clean).unwrap(),
            r#"{"a":null,"NaN":"-Infinity \" NaN","b":[null,null],"c":"\\"}"#
        );
        assert_eq!(without_not_finite(br#"{"a":"NaN"}"#), None);
    }
}
