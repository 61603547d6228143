//! The list of an installation's files, which are compared with it before they are loaded.
//!
//! [`NAME`] has a line `SHA256 BYTES PATH` for every file. It is made from the contents of wheels whose own SHA-256
//! this crate pins. Because hashing hundreds of megabytes takes time, [`RECORD`] stores the size, times, inode and
//! device of files that passed the check; later checks compare only these.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::digest::{Copied, sha256};

/// The file with the list of unpacked files.
pub(super) const NAME: &str = "manifest.txt";
/// The file with the record of passed checks.
pub(super) const RECORD: &str = "verified.txt";
const HEADER: &str = "grpo-plugin-manifest/1";
/// A file that changed this recently before hashing may change again without a new time stamp.
const SETTLED: Duration = Duration::from_secs(2);

/// How a check was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Checked {
    /// All files were read and hashed.
    Hashed,
    /// The files match the record of an earlier check.
    Recorded,
}

/// The reason why an installation must not be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// There is no list: an older release installed the plugin.
    Unlisted,
    /// A file differs from the installed version.
    Changed { path: PathBuf, expected: String, found: String },
}

/// Writes the list of the `files` below `directory`.
pub(super) fn write(directory: &Path, files: &[(&'static str, Copied)]) -> io::Result<()> {
    let lines: String = files.iter().map(|(path, file)| format!("{} {} {path}\n", file.sha256, file.bytes)).collect();
    replace(directory, NAME, &format!("{HEADER}\n{lines}"))
}

struct Listed<'a> {
    sha256: &'a str,
    bytes: u64,
    path: &'a str,
}

fn parse(text: &str) -> Option<Vec<Listed<'_>>> {
    let mut lines = text.lines();
    if lines.next()? != HEADER {
        return None;
    }
    lines
        .map(|line| {
            let mut fields = line.splitn(3, ' ');
            let (sha256, bytes, path) = (fields.next()?, fields.next()?.parse().ok()?, fields.next()?);
            Some(Listed { sha256, bytes, path })
        })
        .collect()
}

/// Compares `members`, files below `directory`, with the list. `now` is the current time.
pub(super) fn check(directory: &Path, members: &[&str], now: SystemTime) -> Result<Checked, Fault> {
    let list = directory.join(NAME);
    let text = match fs::read_to_string(&list) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Fault::Unlisted),
        Err(error) => return Err(changed(&list, "a list of files", &error.to_string())),
    };
    let entries = parse(&text).ok_or_else(|| changed(&list, "a list of files", "something else"))?;
    for member in members {
        if !entries.iter().any(|entry| entry.path == *member) {
            return Err(changed(&list, &format!("a line for {member}"), "none"));
        }
    }
    let before = stamps(directory, &entries)?;
    if before.is_some() && fs::read_to_string(directory.join(RECORD)).ok() == before.as_ref().map(|b| b.text.clone()) {
        return Ok(Checked::Recorded);
    }
    for entry in &entries {
        let path = directory.join(entry.path);
        let found = sha256(&path).map_err(|error| changed(&path, "a file", &error.to_string()))?;
        if found != entry.sha256 {
            return Err(changed(&path, &format!("SHA-256 {}", entry.sha256), &found));
        }
    }
    if let Some(stamps) = before.filter(|stamps| stamps.newest.checked_add(SETTLED).is_some_and(|at| at <= now)) {
        // If the record cannot be written, the next check hashes the files again.
        let _ = replace(directory, RECORD, &stamps.text);
    }
    Ok(Checked::Hashed)
}

/// The time stamps of files that passed the check.
struct Stamps {
    text: String,
    /// The latest change of any of the files.
    newest: SystemTime,
}

/// Compares sizes and returns the stamps; `None` if the system does not report enough to recognise a file.
fn stamps(directory: &Path, entries: &[Listed<'_>]) -> Result<Option<Stamps>, Fault> {
    let mut stamps = Some(Stamps { text: String::new(), newest: SystemTime::UNIX_EPOCH });
    for entry in entries {
        let path = directory.join(entry.path);
        let found = fs::metadata(&path).map_err(|error| changed(&path, "a file", &error.to_string()))?;
        if !found.is_file() || found.len() != entry.bytes {
            let is = if found.is_file() { format!("{} bytes", found.len()) } else { "no regular file".into() };
            return Err(changed(&path, &format!("{} bytes", entry.bytes), &is));
        }
        stamps = stamps.zip(identity(&found)).map(|(mut stamps, (identity, at))| {
            stamps.text.push_str(&format!("{} {identity} {}\n", entry.sha256, entry.path));
            stamps.newest = stamps.newest.max(at);
            stamps
        });
    }
    Ok(stamps)
}

/// Returns properties that change whenever a file is written to, and the time of its last change.
#[cfg(unix)]
fn identity(file: &fs::Metadata) -> Option<(String, SystemTime)> {
    use std::os::unix::fs::MetadataExt;
    let seconds = u64::try_from(file.ctime()).ok()?;
    let nanoseconds = u32::try_from(file.ctime_nsec()).ok()?;
    let at = SystemTime::UNIX_EPOCH.checked_add(Duration::new(seconds, nanoseconds))?;
    // The time of the last change (ctime) cannot be set, but the time of the last write (mtime) can.
    let text = format!(
        "{} {}.{:09} {}.{:09} {} {}",
        file.len(),
        file.mtime(),
        file.mtime_nsec(),
        file.ctime(),
        file.ctime_nsec(),
        file.ino(),
        file.dev(),
    );
    Some((text, at))
}

#[cfg(not(unix))]
fn identity(_file: &fs::Metadata) -> Option<(String, SystemTime)> {
    None
}

/// Replaces a file, readable for others under any umask. A reader sees the complete old or new text.
fn replace(directory: &Path, name: &str, text: &str) -> io::Result<()> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644));
    let mut file = builder.tempfile_in(directory)?;
    file.write_all(text.as_bytes())?;
    file.persist(directory.join(name))?;
    Ok(())
}

fn changed(path: &Path, expected: &str, found: &str) -> Fault {
    Fault::Changed { path: path.to_path_buf(), expected: expected.into(), found: found.into() }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::install::digest::copy;
    use std::fs::{File, FileTimes, OpenOptions};
    use std::os::unix::fs::{FileExt, PermissionsExt};

    const MEMBERS: [&str; 2] = ["lib/plugin.so", "bin/tool"];

    fn installed() -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let files = MEMBERS.map(|member| {
            let path = folder.path().join(member);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            (
                member,
                copy(&mut member.repeat(1000).as_bytes(), &mut File::create(path).expect("a file")).expect("copied"),
            )
        });
        write(folder.path(), &files).expect("a list");
        folder
    }

    /// A check one hour from now, when recent time stamps have settled.
    fn later(folder: &Path) -> Result<Checked, Fault> {
        check(folder, &MEMBERS, SystemTime::now() + Duration::from_secs(3600))
    }

    #[test]
    fn checked_files_are_not_hashed_again() {
        let folder = installed();
        let path = folder.path();
        // The files have just been written, so their times do not prove that they are unchanged.
        assert_eq!(check(path, &MEMBERS, SystemTime::now()), Ok(Checked::Hashed));
        assert!(!path.join(RECORD).exists());
        assert_eq!(later(path), Ok(Checked::Hashed));
        assert_eq!(later(path), Ok(Checked::Recorded));
        assert_eq!(check(path, &MEMBERS, SystemTime::now()), Ok(Checked::Recorded));
        // A new file with the same content is hashed again.
        let library = path.join(MEMBERS[0]);
        fs::copy(&library, path.join("copy")).expect("a copy");
        fs::rename(path.join("copy"), &library).expect("renamed");
        assert_eq!(later(path), Ok(Checked::Hashed));
        assert_eq!(later(path), Ok(Checked::Recorded));
        // A damaged record is ignored.
        fs::write(path.join(RECORD), "").expect("a file");
        assert_eq!(later(path), Ok(Checked::Hashed));
    }

    #[test]
    fn every_kind_of_damage_is_found_with_and_without_a_record() {
        type Damage = (&'static str, fn(&Path));
        let damage: [Damage; 5] = [
            ("one byte, with the old time", |file| {
                let before = fs::metadata(file).expect("a file");
                let open = OpenOptions::new().write(true).open(file).expect("a file");
                open.write_all_at(b"X", 700).expect("written");
                open.set_times(FileTimes::new().set_modified(before.modified().expect("a time"))).expect("set");
            }),
            ("half of it", |file| {
                OpenOptions::new().write(true).open(file).expect("a file").set_len(100).expect("cut");
            }),
            ("one byte more", |file| {
                let bytes = [fs::read(file).expect("a file"), vec![0]].concat();
                fs::write(file, bytes).expect("written");
            }),
            ("nothing", |file| fs::remove_file(file).expect("removed")),
            ("a folder", |file| {
                fs::remove_file(file).expect("removed");
                fs::create_dir(file).expect("a folder");
            }),
        ];
        for member in MEMBERS {
            for (what, damage) in damage {
                for is_recorded in [false, true] {
                    let folder = installed();
                    let path = folder.path();
                    if is_recorded {
                        assert_eq!((later(path), later(path)), (Ok(Checked::Hashed), Ok(Checked::Recorded)));
                    }
                    damage(&path.join(member));
                    match later(path) {
                        Err(Fault::Changed { path: file, .. }) => assert_eq!(file, path.join(member), "{what}"),
                        other => panic!("{member} became {what}: {other:?}"),
                    }
                }
            }
        }
    }

    #[test]
    fn missing_and_damaged_lists_are_found() {
        let folder = installed();
        let list = folder.path().join(NAME);
        let text = fs::read_to_string(&list).expect("a list");
        for damaged in ["", "something else\n", &text[..text.len() - 20], &text.replace("bin/tool", "bin/other")] {
            fs::write(&list, damaged).expect("a file");
            assert!(matches!(later(folder.path()), Err(Fault::Changed { .. })), "{damaged}");
        }
        fs::remove_file(&list).expect("removed");
        assert_eq!(later(folder.path()), Err(Fault::Unlisted));
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_checked_every_time() {
        let folder = installed();
        // Not even root can replace a folder by a file.
        fs::create_dir(folder.path().join(RECORD)).expect("a folder");
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o555)).expect("a mode");
        assert_eq!((later(folder.path()), later(folder.path())), (Ok(Checked::Hashed), Ok(Checked::Hashed)));
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
    }
}
