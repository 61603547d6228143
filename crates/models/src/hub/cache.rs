//! The cache in the layout of `huggingface_hub`: `blobs/ETAG`, `snapshots/COMMIT/NAME` with links to blobs, `refs/REVISION` with the
//! commit, and locks in `.locks`.

use super::repository::Repository;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The longest name of a blob in bytes. A SHA-256 has 64 digits.
const MAX_BLOB_NAME: usize = 200;
/// The suffix of a blob that is being downloaded.
const INCOMPLETE: &str = ".incomplete";
/// The time to wait for another process that downloads the same file.
const LOCK_WAIT: Duration = Duration::from_secs(5);
/// The pause between two attempts to take a lock.
const LOCK_PAUSE: Duration = Duration::from_millis(100);

/// Returns `true` if `text` is a commit hash: 40 hexadecimal digits.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Returns `true` if `text` is a valid blob name: letters, digits, `.`, `_` and `-`, not `.` or `..`, not too long, and without the suffix of
/// a partial download.
pub(super) fn is_blob_name(text: &str) -> bool {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=MAX_BLOB_NAME).contains(&text.len())
        && text.bytes().all(legal)
        && !matches!(text, "." | "..")
        && !text.ends_with(INCOMPLETE)
}

/// The folder of one repository in the cache.
pub(super) struct RepositoryCache {
    folder: PathBuf,
    locks: PathBuf,
}

impl RepositoryCache {
    pub(super) fn new(cache: &Path, repository: Repository<'_>) -> Self {
        let name = repository.cache_folder();
        Self { folder: cache.join(&name), locks: cache.join(".locks").join(name) }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the folder of a commit's files.
    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// Returns the path of the blob with an ETag.
    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    /// Returns the path of a partially downloaded blob.
    pub(super) fn incomplete(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(format!("{etag}{INCOMPLETE}"))
    }

    /// Links `name` in the snapshot of `commit` to the blob of `etag`, replacing a link to another target.
    pub(super) fn link(&self, commit: &str, name: &str, etag: &str) -> io::Result<()> {
        let link = self.snapshot(commit).join(name);
        if let Some(folder) = link.parent() {
            std::fs::create_dir_all(folder)?;
        }
        match std::fs::remove_file(&link) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        #[cfg(unix)]
        return {
            let up = "../".repeat(2 + name.matches('/').count());
            std::os::unix::fs::symlink(Path::new(&up).join("blobs").join(etag), &link)
        };
        #[cfg(not(unix))]
        return std::fs::copy(self.blob(etag), &link).map(drop);
    }

    /// Records that `revision` is at `commit`.
    pub(super) fn note(&self, revision: &str, commit: &str) -> Result<(), grpo_files::Error> {
        let path = self.folder.join("refs").join(revision);
        if let Some(folder) = path.parent() {
            grpo_files::make_folder(folder)?;
        }
        grpo_files::write_atomically(&path, commit.as_bytes())
    }

    /// Takes the lock of a blob, which `huggingface_hub` uses, too; dropping the file releases it.
    ///
    /// # Errors
    /// `WouldBlock` with the lock's path if another process holds it.
    pub(super) fn lock(&self, etag: &str) -> io::Result<File> {
        std::fs::create_dir_all(&self.locks)?;
        let path = self.locks.join(format!("{etag}.lock"));
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        if std::fs::symlink_metadata(&path).is_ok_and(|metadata| !metadata.is_file()) {
            let message = format!("{} is not a regular file", path.display());
            return Err(io::Error::new(ErrorKind::InvalidInput, message));
        }
        let file = grpo_files::without_links(&mut options).open(&path)?;
        let begin = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(std::fs::TryLockError::Error(error)) => return Err(error),
                Err(std::fs::TryLockError::WouldBlock) if begin.elapsed() < LOCK_WAIT => {
                    std::thread::sleep(LOCK_PAUSE);
                }
                Err(std::fs::TryLockError::WouldBlock) => {
                    let message = format!(
                        "another process is downloading it ({} is locked): begin again when that has ended",
                        path.display()
                    );
                    return Err(io::Error::new(ErrorKind::WouldBlock, message));
                }
            }
        }
    }
}

/// Returns `true` if `etag` is a SHA-256 or a SHA-1.
pub(super) fn is_checksum(etag: &str) -> bool {
    matches!(etag.len(), 40 | 64) && etag.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Checks the contents of `path` against its ETag, if that is a checksum: the SHA-256 of a large file, or git's SHA-1 of a small one. Some
/// mirrors send the SHA-1 of the contents alone.
pub(super) fn check_digest(path: &Path, etag: &str) -> io::Result<Result<(), String>> {
    if !is_checksum(etag) {
        return Ok(Ok(()));
    }
    let (mut file, size) = grpo_files::open_regular(path)?;
    let found = match etag.len() {
        64 => vec![("SHA-256", digest(&mut file, Sha256::new())?)],
        _ => vec![
            ("SHA-1 of git", digest(&mut file, Sha1::new_with_prefix(format!("blob {size}\0")))?),
            ("SHA-1", digest(&mut file, Sha1::new())?),
        ],
    };
    if found.iter().any(|(_, digest)| digest.eq_ignore_ascii_case(etag)) {
        return Ok(Ok(()));
    }
    Ok(Err(format!("{} {}", found[0].0, found[0].1)))
}

/// Returns the digest of a whole file in hexadecimal digits.
fn digest(file: &mut File, mut hasher: impl Digest) -> io::Result<String> {
    file.rewind()?;
    let mut chunk = vec![0; 1 << 20];
    loop {
        match file.read(&mut chunk)? {
            0 => break,
            read => hasher.update(&chunk[..read]),
        }
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_names_that_could_leave_a_folder_are_invalid() {
        let long = "a".repeat(MAX_BLOB_NAME);
        for name in ["a", "config.json-etag", "0123_-.", "..a", &long] {
            assert!(is_blob_name(name), "{name}");
        }
        let too_long = "a".repeat(MAX_BLOB_NAME + 1);
        for name in ["", ".", "..", "../a", "/a", "a/b", "a\\b", "a b", "a\0", "é", "~", "a.incomplete", &too_long] {
            assert!(!is_blob_name(name), "{name}");
        }
        let commit = "0123456789abcdefABCDEF0123456789abcdef01";
        assert!(is_commit(commit));
        for other in ["", "main", &commit[1..], &format!("{commit}0"), &commit.replace('0', "g"), "../../../victim"] {
            assert!(!is_commit(other), "{other}");
        }
    }

    #[test]
    fn contents_are_checked_against_checksum_etags() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, "hello\n").unwrap();
        let check = |etag: &str| check_digest(&path, etag).unwrap();
        // Values from `sha256sum`, `git hash-object` and `sha1sum`.
        check("5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03").unwrap();
        check("ce013625030ba8dba906f756967f9e9ca394464a").unwrap();
        check("f572d396fae9206628714fb2ce00f72e94f2258f").unwrap();
        check("an-etag-that-is-none").unwrap();
        let sha256 = check(&"0".repeat(64)).unwrap_err();
        assert!(sha256.starts_with("SHA-256 5891b5b5"), "{sha256}");
        assert!(check(&"0".repeat(40)).unwrap_err().starts_with("SHA-1 of git ce013625"));
    }
}
