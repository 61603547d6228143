//! Checks that a file is a complete library for this machine, according to its ELF header.
//!
//! The system's loader maps the size that the header states. For a truncated file, that raises a signal which ends the
//! process, instead of an error.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// The sizes in bytes of the header, of a program header and of a section header.
const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const SECTION_HEADER: usize = 64;
/// `e_type` of a shared library, and `p_type` of a loaded segment.
const SHARED: u64 = 3;
const LOAD: u64 = 1;

/// `e_machine` of this processor, if known.
const MACHINE: Option<u64> = if cfg!(target_arch = "x86_64") {
    Some(62)
} else if cfg!(target_arch = "aarch64") {
    Some(183)
} else {
    None
};

/// Checks the file at `path`, on systems that load 64-bit ELF files.
///
/// # Errors
///
/// Returns the defect of the file.
pub(crate) fn check(path: &Path) -> Result<(), String> {
    if !cfg!(all(target_os = "linux", target_pointer_width = "64", target_endian = "little")) {
        return Ok(());
    }
    let mut file = File::open(path).map_err(|error| error.to_string())?;
    let size = file.metadata().map_err(|error| error.to_string())?.len();
    check_library(&mut file, size)
}

fn check_library(file: &mut (impl Read + Seek), size: u64) -> Result<(), String> {
    let cut = |needed: Option<u64>| match needed {
        Some(needed) => format!("it is cut off: its header declares {needed} bytes, but the file has {size}"),
        None => "its header declares more bytes than a file can have".into(),
    };
    let header: [u8; HEADER] = match read_at(file, 0) {
        Ok(header) => header,
        Err(_) => return Err(format!("it is no shared library: it has {size} bytes, fewer than a header")),
    };
    if header[..4] != *b"\x7fELF" {
        return Err("it is no shared library: it does not begin as an ELF file does".into());
    }
    // 64-bit, little-endian.
    if header[4] != 2 || header[5] != 1 {
        return Err("it is a library for another kind of machine: not of 64 bits, little endian".into());
    }
    let machine = number(&header, 18, 2);
    if let Some(expected) = MACHINE.filter(|expected| *expected != machine) {
        return Err(format!("it is a library for another processor: expected ELF machine {expected}, got {machine}"));
    }
    let kind = number(&header, 16, 2);
    if kind != SHARED {
        return Err(format!("it is no shared library: expected ELF type {SHARED}, got {kind}"));
    }
    let tables = [
        (number(&header, 32, 8), number(&header, 54, 2), number(&header, 56, 2), PROGRAM_HEADER as u64),
        (number(&header, 40, 8), number(&header, 58, 2), number(&header, 60, 2), SECTION_HEADER as u64),
    ];
    for (offset, entry, count, expected) in tables {
        // A library without section headers is valid, and has 0 here.
        if offset == 0 || count == 0 {
            continue;
        }
        if entry != expected {
            return Err(format!("its header is damaged: expected table entries of {expected} bytes, got {entry}"));
        }
        let end = offset.checked_add(entry * count);
        if end.is_none_or(|end| end > size) {
            return Err(cut(end));
        }
    }
    let (offset, _, count, _) = tables[0];
    if offset == 0 || count == 0 {
        return Err("it is no shared library: it has no segment to load".into());
    }
    for index in 0..count {
        let segment: [u8; PROGRAM_HEADER] = read_at(file, offset + index * PROGRAM_HEADER as u64)
            .map_err(|error| format!("its program headers cannot be read: {error}"))?;
        let end = number(&segment, 8, 8).checked_add(number(&segment, 32, 8));
        if number(&segment, 0, 4) == LOAD && end.is_none_or(|end| end > size) {
            return Err(cut(end));
        }
    }
    Ok(())
}

fn read_at<const N: usize>(file: &mut (impl Read + Seek), offset: u64) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    file.seek(SeekFrom::Start(offset))?;
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Returns the little-endian number in `size` bytes at `offset`.
fn number(bytes: &[u8], offset: usize, size: usize) -> u64 {
    bytes[offset..offset + size].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(all(test, target_os = "linux", target_pointer_width = "64", target_endian = "little"))]
mod tests {
    use super::*;
    use std::io::Cursor;

    /// Returns a library with a header, one segment of `content` bytes and one section header after it.
    fn library(content: usize) -> Vec<u8> {
        let segments = HEADER;
        let data = segments + PROGRAM_HEADER;
        let sections = data + content;
        let mut bytes = vec![0; sections + SECTION_HEADER];
        bytes[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        // Offset, size and value of each field.
        for (offset, size, value) in [
            (16, 2, SHARED as usize),
            (18, 2, MACHINE.unwrap_or(0) as usize),
            (32, 8, segments),
            (40, 8, sections),
            (54, 2, PROGRAM_HEADER),
            (56, 2, 1),
            (58, 2, SECTION_HEADER),
            (60, 2, 1),
            (segments, 4, LOAD as usize),
            (segments + 8, 8, data),
            (segments + 32, 8, content),
        ] {
            bytes[offset..offset + size].copy_from_slice(&value.to_le_bytes()[..size]);
        }
        bytes
    }

    fn verdict(bytes: &[u8]) -> Result<(), String> {
        check_library(&mut Cursor::new(bytes), bytes.len() as u64)
    }

    #[test]
    fn truncated_libraries_are_refused() {
        let whole = library(200);
        verdict(&whole).expect("the library is whole");
        for len in 0..whole.len() {
            verdict(&whole[..len]).expect_err("a part of the library");
        }
        // Without section headers, the file must reach at least to the end of its segment.
        let mut stripped = whole.clone();
        stripped[40..48].fill(0);
        let end = HEADER + PROGRAM_HEADER + 200;
        verdict(&stripped[..end]).expect("the segment is whole");
        assert!(verdict(&stripped[..end - 1]).expect_err("the segment is cut").contains("cut off"));
    }

    #[test]
    fn other_files_are_refused() {
        assert!(verdict(b"not a library").is_err());
        assert!(verdict(&[0; 4096]).expect_err("zeros").contains("no shared library"));
        let whole = library(64);
        for (at, value) in [(4, 1), (5, 2), (16, 2), (18, 3), (33, 0xff), (38, 0xff), (39, 0xff), (47, 0xff), (54, 1)] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            verdict(&bytes).expect_err("a damaged header");
        }
        // With any byte of the header or program header changed, the check must return without a panic.
        for at in 0..HEADER + PROGRAM_HEADER {
            for value in [0, 0x7f, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] = value;
                let _ = verdict(&bytes);
            }
        }
    }

    #[test]
    fn the_running_executable_passes_the_check() {
        // Position-independent executables have the ELF type of shared libraries.
        check(&std::env::current_exe().expect("a path")).expect("a whole ELF file");
    }
}
