//! Recognises files whose contents do not match their name: compressed, in another encoding, or not downloaded.

use crate::config::FileFormat;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

/// The number of bytes that identify a file's contents.
const LENGTH: usize = 1 << 10;

/// Returns the problem with a file according to its first bytes, and the fix; `None` if it may contain rows of `format`. The file is then
/// read from its start again.
pub(super) fn fault(path: &Path, file: &mut File, format: FileFormat) -> std::io::Result<Option<String>> {
    let mut head = Vec::with_capacity(LENGTH);
    file.take(LENGTH as u64).read_to_end(&mut head)?;
    file.rewind()?;
    let expected = match format {
        FileFormat::Jsonl => "a JSON object per line in UTF-8",
        FileFormat::Json => "JSON in UTF-8",
        FileFormat::Parquet => "a Parquet file",
    };
    let extension = path.extension().and_then(OsStr::to_str).unwrap_or_default().to_ascii_lowercase();
    Ok(other_contents(&head, format, &extension).map(|found| format!("expected {expected}, got {found}")))
}

/// Returns the contents with a fix; `None` if they may be rows of `format`.
fn other_contents(head: &[u8], format: FileFormat, extension: &str) -> Option<String> {
    let archives: [(&[u8], &str, &str); 7] = [
        (b"\x1f\x8b", "gzip", "gunzip -k FILE"),
        (b"\x28\xb5\x2f\xfd", "Zstandard", "zstd -d FILE"),
        (b"BZh", "bzip2", "bunzip2 -k FILE"),
        (b"\xfd7zXZ\x00", "xz", "xz -dk FILE"),
        (b"\x04\x22\x4d\x18", "LZ4", "lz4 -d FILE"),
        (b"PK\x03\x04", "a zip archive", "unzip FILE"),
        (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", "7z x FILE"),
    ];
    if let Some((_, name, command)) = archives.iter().find(|(magic, ..)| head.starts_with(magic)) {
        return Some(format!("{name}, which is not decompressed here: unpack it first, as in `{command}`"));
    }
    if head.starts_with(b"version https://git-lfs.github.com/spec/") {
        let fix = "`git lfs pull` in its repository fetches it";
        return Some(format!("a Git LFS pointer, which stands for a file that is not downloaded yet: {fix}"));
    }
    let text = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head).trim_ascii_start();
    let begins = |tag: &[u8]| text.len() >= tag.len() && text[..tag.len()].eq_ignore_ascii_case(tag);
    if begins(b"<!doctype html") || begins(b"<html") {
        let fix = "on the Hugging Face Hub `resolve` in the place of `blob` in its address";
        return Some(format!("a web page: download the file itself ({fix})"));
    }
    if format == FileFormat::Parquet {
        return None;
    }
    if head.starts_with(b"PAR1") {
        return Some("Parquet: `{path: FILE, format: parquet}` reads it as such".into());
    }
    if head.starts_with(b"ARROW1") {
        let fix = "`pandas.read_feather(FILE).to_json(NEW, orient='records', lines=True)` writes rows";
        return Some(format!("Arrow (Feather): {fix}"));
    }
    // The length of a stream's first message.
    if head.starts_with(b"\xff\xff\xff\xff") {
        return Some(
            "Arrow, as `datasets` saves it: `datasets.Dataset.from_file(FILE).to_json(NEW)` writes rows".into(),
        );
    }
    if let Some(encoding) = encoding(head) {
        let name = encoding.split(' ').next().unwrap_or_default();
        return Some(format!("{encoding}: `iconv -f {name} -t UTF-8 FILE > NEW` writes it as UTF-8"));
    }
    if text.starts_with(b"[") && format == FileFormat::Jsonl {
        return Some("a JSON list: `{path: FILE, format: json}` reads a list of rows".into());
    }
    let (name, arguments) = table(text, extension)?;
    Some(format!("{name}: `pandas.read_csv(FILE{arguments}).to_json(NEW, orient='records', lines=True)` writes rows"))
}

/// Returns the name of a table's format, and the arguments of pandas after the file. A table has its extension, or begins with a line of
/// several column names.
fn table(text: &[u8], extension: &str) -> Option<(&'static str, &'static str)> {
    const LONGEST_NAME: usize = 64;
    let line = text.split(|byte| *byte == b'\n').next()?;
    let line = String::from_utf8_lossy(line);
    let is_name = |cell: &str| {
        let name = cell.trim().trim_matches('"');
        let is_known = |c: char| c.is_alphanumeric() || "_-. ".contains(c);
        name.len() <= LONGEST_NAME
            && name.starts_with(|c: char| c.is_alphabetic() || c == '_')
            && name.chars().all(is_known)
    };
    let is_object = line.starts_with('{');
    [('\t', "tsv", "TSV", ", sep='\\t'"), (',', "csv", "CSV", ""), (';', "", "CSV with semicolons", ", sep=';'")]
        .into_iter()
        .find(|(mark, format_extension, ..)| {
            let has_names = line.contains(*mark) && line.split(*mark).all(is_name);
            !is_object && (has_names || extension == *format_extension && !extension.is_empty())
        })
        .map(|(_, _, name, arguments)| (name, arguments))
}

/// Returns the encoding of a text with two or four bytes per character, from its byte order mark or from the zeros around its first
/// character, which is ASCII in JSON.
fn encoding(head: &[u8]) -> Option<&'static str> {
    match head {
        [0xff, 0xfe, 0, 0, ..] | [1..0x80, 0, 0, 0, ..] => Some("UTF-32LE text"),
        [0, 0, 0xfe, 0xff, ..] | [0, 0, 0, 1..0x80, ..] => Some("UTF-32BE text"),
        [0xff, 0xfe, ..] | [1..0x80, 0, ..] => Some("UTF-16LE text"),
        [0xfe, 0xff, ..] | [0, 1..0x80, ..] => Some("UTF-16BE text"),
        _ => None,
    }
}
