//! SHA-256 digests of files and of copied data.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use sha2::{Digest, Sha256};

/// The length and digest of copied bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Copied {
    /// The SHA-256 of the bytes, hexadecimal.
    pub(super) sha256: String,
    pub(super) bytes: u64,
}

/// Copies all bytes from `from` to `to`.
pub(super) fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<Copied> {
    let mut hasher = Sha256::new();
    let mut chunk = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        match from.read(&mut chunk) {
            Ok(0) => break,
            Ok(len) => {
                hasher.update(&chunk[..len]);
                to.write_all(&chunk[..len])?;
                bytes += len as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let sha256 = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(Copied { sha256, bytes })
}

/// Returns the SHA-256 of the file at `path`, hexadecimal.
pub(super) fn sha256(path: &Path) -> io::Result<String> {
    Ok(copy(&mut File::open(path)?, &mut io::sink())?.sha256)
}
