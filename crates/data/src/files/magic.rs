//! Recognises files whose contents do not match their name: compressed, in another encoding, or not downloaded.

use crate::config::FileFormat;
use std::fs::File;
use std::io::{Read, Seek};

/// The number of bytes that identify a file's contents.
const LENGTH: usize = 128;

/// Returns the problem with a file according to its first bytes, and the fix; `None` if it may contain rows of `format`. The file is then
/// read from its start again.
pub(super) fn fault(file: &mut File, format: FileFormat) -> std::io::Result<Option<String>> {
    let mut head = Vec::with_capacity(LENGTH);
    file.take(LENGTH as u64).read_to_end(&mut head)?;
    file.rewind()?;
    Ok(what(&head, format))
}

fn what(head: &[u8], format: FileFormat) -> Option<String> {
    let expected = match format {
        FileFormat::Jsonl => "a JSON object per line in UTF-8",
        FileFormat::Parquet => "a Parquet file",
    };
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
        return Some(format!(
            "expected {expected}, got {name}, which is not decompressed here: unpack it first, as in `{command}`"
        ));
    }
    if head.starts_with(b"version https://git-lfs.github.com/spec/") {
        return Some(format!(
            "expected {expected}, got a Git LFS pointer, which stands for a file that is not downloaded yet: `git lfs pull` in its \
             repository fetches it"
        ));
    }
    let text = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head).trim_ascii_start();
    let begins = |tag: &[u8]| text.len() >= tag.len() && text[..tag.len()].eq_ignore_ascii_case(tag);
    if begins(b"<!doctype html") || begins(b"<html") {
        return Some(format!(
            "expected {expected}, got a web page: download the file itself (on the Hugging Face Hub `resolve` in the place of `blob` in \
             its address)"
        ));
    }
    if format == FileFormat::Parquet {
        return None;
    }
    if head.starts_with(b"PAR1") {
        return Some(format!("expected {expected}, got Parquet: `{{path: FILE, format: parquet}}` reads it as such"));
    }
    if head.starts_with(b"ARROW1") {
        let way = "`datasets.Dataset.from_file(FILE).to_json(NEW)` writes rows";
        return Some(format!("expected {expected}, got Arrow: {way}"));
    }
    let encoding = encoding(head)?;
    Some(format!(
        "expected {expected}, got {encoding}: `iconv -f {} -t UTF-8 FILE > NEW` writes it as UTF-8",
        encoding.split(' ').next().unwrap_or_default()
    ))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_contents_are_recognised_by_their_first_bytes() {
        let utf_16: Vec<u8> = "{\"a\"".encode_utf16().flat_map(u16::to_le_bytes).collect();
        let marked = [b"\xff\xfe", utf_16.as_slice()].concat();
        let big: Vec<u8> = "{\"a\"".encode_utf16().flat_map(u16::to_be_bytes).collect();
        for (head, part) in [
            (b"\x1f\x8b\x08\x00".as_slice(), "got gzip"),
            (b"\x28\xb5\x2f\xfd\x04", "got Zstandard"),
            (b"PK\x03\x04\x14", "got a zip archive"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "got a Git LFS pointer"),
            (b"\n<!DOCTYPE html><html>", "got a web page"),
            (b"PAR1\x15\x04", "got Parquet"),
            (b"ARROW1\x00\x00", "got Arrow"),
            (&utf_16, "`iconv -f UTF-16LE -t UTF-8"),
            (&marked, "got UTF-16LE text"),
            (&big, "got UTF-16BE text"),
            (b"\xff\xfe\x00\x00{\x00\x00\x00", "got UTF-32LE text"),
        ] {
            let found = what(head, FileFormat::Jsonl).unwrap_or_default();
            assert!(found.contains(part), "{part}: {found}");
        }
        for head in [b"{\"prompt\": 1}".as_slice(), b"\xef\xbb\xbf{\"a\"", b"", b"\n", b"<|im_start|>", b"\x80"] {
            assert_eq!(what(head, FileFormat::Jsonl), None, "{head:?}");
        }
        assert!(what(b"\x1f\x8b", FileFormat::Parquet).is_some() && what(b"PAR1", FileFormat::Parquet).is_none());
        assert!(what(b"version https://git-lfs.github.com/spec/v1", FileFormat::Parquet).is_some());
    }
}
