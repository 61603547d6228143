//! Checks that a file is a complete library for this machine, according to its ELF header.
//!
//! The system's loader maps the size that the header states. For a truncated file, that raises a signal which ends the
//! process, instead of an error.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// The sizes in bytes of the header, of a program header and of a section header.
const HEADER: usize = 64;
const PROGRAM_HEADER: u16 = 56;
const SECTION_HEADER: u16 = 64;
/// `e_type` of a shared library, and `p_type` of a loaded segment.
const SHARED: u16 = 3;
const LOAD: u32 = 1;

/// `e_machine` of this processor, if known.
const MACHINE: Option<u16> = if cfg!(target_arch = "x86_64") {
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
    let machine = u16_at(&header, 18);
    if let Some(expected) = MACHINE.filter(|expected| *expected != machine) {
        return Err(format!("it is a library for another processor: expected ELF machine {expected}, got {machine}"));
    }
    let kind = u16_at(&header, 16);
    if kind != SHARED {
        return Err(format!("it is no shared library: expected ELF type {SHARED}, got {kind}"));
    }
    let tables = [
        (u64_at(&header, 32), u16_at(&header, 54), u16_at(&header, 56), PROGRAM_HEADER),
        (u64_at(&header, 40), u16_at(&header, 58), u16_at(&header, 60), SECTION_HEADER),
    ];
    for (offset, entry, count, expected) in tables {
        // A library without section headers is valid, and has 0 here.
        if offset == 0 || count == 0 {
            continue;
        }
        if entry != expected {
            return Err(format!("its header is damaged: expected table entries of {expected} bytes, got {entry}"));
        }
        let end = offset.checked_add(u64::from(entry) * u64::from(count));
        if end.is_none_or(|end| end > size) {
            return Err(cut(end));
        }
    }
    let (offset, _, count, _) = tables[0];
    if offset == 0 || count == 0 {
        return Err("it is no shared library: it has no segment to load".into());
    }
    for index in 0..u64::from(count) {
        let segment: [u8; PROGRAM_HEADER as usize] = read_at(file, offset + index * u64::from(PROGRAM_HEADER))
            .map_err(|error| format!("its program headers cannot be read: {error}"))?;
        let end = u64_at(&segment, 8).checked_add(u64_at(&segment, 32));
        if u32_at(&segment, 0) == LOAD && end.is_none_or(|end| end > size) {
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

fn array<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    let mut array = [0; N];
    for (to, from) in array.iter_mut().zip(bytes.iter().skip(offset)) {
        *to = *from;
    }
    array
}

fn u16_at(bytes: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes(array(bytes, offset))
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(array(bytes, offset))
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(array(bytes, offset))
}

#[cfg(all(test, target_os = "linux", target_pointer_width = "64", target_endian = "little"))]
mod tests {
    use super::*;
    use std::io::Cursor;

    /// Returns a library with a header, one segment of `content` bytes and one section header after it.
    fn library(content: usize) -> Vec<u8> {
        let segments = HEADER;
        let data = segments + usize::from(PROGRAM_HEADER);
        let sections = data + content;
        let mut bytes = vec![0; sections + usize::from(SECTION_HEADER)];
        let mut put = |offset: usize, value: &[u8]| bytes[offset..offset + value.len()].copy_from_slice(value);
        put(0, b"\x7fELF\x02\x01\x01");
        put(16, &SHARED.to_le_bytes());
        put(18, &MACHINE.unwrap_or(0).to_le_bytes());
        put(32, &(segments as u64).to_le_bytes());
        put(40, &(sections as u64).to_le_bytes());
        put(54, &PROGRAM_HEADER.to_le_bytes());
        put(56, &1u16.to_le_bytes());
        put(58, &SECTION_HEADER.to_le_bytes());
        put(60, &1u16.to_le_bytes());
        put(segments, &LOAD.to_le_bytes());
        put(segments + 8, &(data as u64).to_le_bytes());
        put(segments + 32, &(content as u64).to_le_bytes());
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
        let end = HEADER + usize::from(PROGRAM_HEADER) + 200;
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
        for at in 0..HEADER + usize::from(PROGRAM_HEADER) {
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
