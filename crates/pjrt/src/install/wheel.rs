//! A wheel: download, check, unpacking.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::digest::{Copied, copy, sha256};
use super::make_directory;
use crate::access;
use crate::error::{Error, Result};

/// Returns the interpreter with which [`install`](super::install) runs pip: the `python3` in the folder of this program, as in a virtual
/// environment with both, or else the one on `PATH`.
pub fn python() -> PathBuf {
    let candidate = std::env::current_exe().ok().map(|program| program.with_file_name("python3"));
    candidate.filter(|python| python.is_file()).unwrap_or_else(|| "python3".into())
}

#[derive(Debug)]
pub(super) struct Wheel {
    pub(super) requirement: &'static str,
    /// The arguments that make pip select this wheel, with any Python version.
    pub(super) tags: &'static [&'static str],
    pub(super) sha256: &'static str,
    pub(super) members: &'static [&'static str],
}

impl Wheel {
    /// Returns the command that runs an action of pip for this wheel.
    fn pip(&self, action: &[&str]) -> Command {
        let mut command = Command::new(python());
        command.args(["-m", "pip"]).args(action).arg("--disable-pip-version-check");
        command.args(["--only-binary=:all:", "--python-version", "3.11"]).args(self.tags);
        command
    }

    /// Returns the command that prints the versions of this wheel's package in pip's index.
    pub(super) fn versions(&self) -> Command {
        let (package, _) = self.requirement.split_once("==").unwrap_or((self.requirement, ""));
        let mut command = self.pip(&["index", "versions", "--no-input", "--retries=0"]);
        command.arg(package);
        command
    }

    /// Downloads the wheel into the new directory `into` and returns its path.
    pub(super) fn download(&self, into: &Path) -> Result<PathBuf> {
        make_directory(into)?;
        let mut command = self.pip(&["download", "--quiet", "--no-deps", "--no-cache-dir"]);
        command.arg("--dest").arg(into).arg(self.requirement);
        let failed = |reason: String| Error::Download {
            requirement: self.requirement,
            command: format!("{command:?}").replace('"', ""),
            reason,
        };
        let program = python();
        let python = program.display();
        let output = Command::new(command.get_program()).args(command.get_args()).output().map_err(|error| {
            failed(match error.kind() {
                io::ErrorKind::NotFound => "there is no `python3` on PATH: install Python 3 with pip".into(),
                _ => format!("{python} does not start: {error}"),
            })
        })?;
        if !output.status.success() {
            let log = String::from_utf8_lossy(&output.stderr);
            return Err(failed(if log.contains("No module named pip") {
                format!(
                    "{python} has no pip: install it, for example with `{python} -m ensurepip` or as the package `python3-pip`"
                )
            } else {
                format!("pip failed; check the network, or pip's index and proxy. It said:\n{}", log.trim_end())
            }));
        }
        let files = fs::read_dir(into).map_err(|reason| Error::Install { path: into.to_path_buf(), reason })?;
        let wheel = files
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.extension().is_some_and(|extension| extension == "whl"));
        wheel.ok_or_else(|| failed("pip succeeded, but there is no wheel".into()))
    }

    pub(super) fn verify(&self, file: &Path) -> Result<()> {
        let found = sha256(file).map_err(|reason| Error::Install { path: file.to_path_buf(), reason })?;
        if found != self.sha256 {
            return Err(Error::Digest { requirement: self.requirement, expected: self.sha256, found });
        }
        Ok(())
    }

    /// Writes the members below `into`. Returns the digests of the wheel's contents, computed before writing.
    pub(super) fn unpack(&self, file: &Path, into: &Path) -> io::Result<Vec<(&'static str, Copied)>> {
        let mut archive = zip::ZipArchive::new(File::open(file)?)?;
        let mut unpacked = vec![];
        for member in self.members {
            let path = into.join(member);
            access::create_folder(path.parent().unwrap_or(into))?;
            let copied = copy(&mut archive.by_name(member)?, &mut File::create(&path)?)?;
            #[cfg(unix)]
            fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
            unpacked.push((*member, copied));
        }
        Ok(unpacked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wheel() -> Wheel {
        Wheel { requirement: "no-such-package-of-grpo==0", tags: &[], sha256: "00", members: &["a.so"] }
    }

    #[test]
    fn another_wheel_than_the_pinned_one_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a.whl");
        fs::write(&file, b"abc").unwrap();
        let error = wheel().verify(&file).unwrap_err().to_string();
        // The digest of "abc", the first example in the standard.
        assert!(error.contains("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"), "{error}");
    }

    #[test]
    fn a_damaged_wheel_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a.whl");
        fs::write(&file, b"not a zip file").unwrap();
        assert!(wheel().unpack(&file, directory.path()).is_err());
    }
}
