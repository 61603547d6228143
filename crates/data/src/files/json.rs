//! Converts JSON files with a list of rows to JSON lines.

use crate::error::{Error, Result};
use serde::de::IgnoredAny;
use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

/// Returns the rows of a JSON list as one JSON object per line, or `None` if the file does not begin with a list. The rows are kept in
/// memory. `file` is left at its beginning.
pub(super) fn as_json_lines(path: &Path, file: &mut File) -> Result<Option<Vec<u8>>> {
    let io = |error| grpo_files::Error::io("read", path, error);
    file.rewind().map_err(io)?;
    let mut head = [0; 1 << 10];
    let mut length = 0;
    while length < head.len() {
        match file.read(&mut head[length..]).map_err(io)? {
            0 => break,
            read => length += read,
        }
    }
    file.rewind().map_err(io)?;
    if content(&head[..length]).first() != Some(&b'[') {
        return Ok(None);
    }
    let mut bytes = vec![];
    file.read_to_end(&mut bytes).map_err(io)?;
    file.rewind().map_err(io)?;
    let text = content(&bytes);
    let row = |line: u64, reason: String| Error::Row { path: path.to_owned(), line, reason };
    let (mut rest, mut lines, mut count) = (text[1..].trim_ascii_start(), Vec::with_capacity(text.len()), 0);
    if let Some(end) = rest.strip_prefix(b"]") {
        rest = end;
    } else {
        loop {
            count += 1;
            let mut values = serde_json::Deserializer::from_slice(rest).into_iter::<IgnoredAny>();
            match values.next() {
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(row(count, format!("expected a JSON object in the list: {error}"))),
                None => return Err(row(count, "expected a JSON object in the list, which is not closed".into())),
            }
            let (value, behind) = rest.split_at(values.byte_offset());
            // Line breaks can only be between the tokens of a value.
            lines.extend(value.iter().map(|byte| if matches!(byte, b'\n' | b'\r') { b' ' } else { *byte }));
            lines.push(b'\n');
            let behind = behind.trim_ascii_start();
            match behind.first() {
                Some(b',') => rest = &behind[1..],
                Some(b']') => {
                    rest = &behind[1..];
                    break;
                }
                _ => return Err(row(count, "expected `,` or `]` behind the JSON object in the list".into())),
            }
        }
    }
    match rest.trim_ascii().is_empty() {
        true => Ok(Some(lines)),
        false => Err(row(count, "expected the end of the file behind the list".into())),
    }
}

/// Returns the text without a byte order mark and white space at its beginning.
fn content(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes).trim_ascii_start()
}
