//! Installs pinned plugins from the package index of the machine's own `pip`, which respects mirrors and proxies.
//!
//! A wheel is a zip file, from which nothing is executed. After a check of its SHA-256, the required files are unpacked
//! into [`cache_dir`] with a list of their own SHA-256. [`find`] returns a library only if the files match the list.
//! Several processes may install at the same time.

mod digest;
mod manifest;
mod package;
mod wheel;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use crate::access;
use crate::error::{Error, Result};
use manifest::Fault;
pub use package::Kind;
use wheel::Wheel;
pub use wheel::python;

/// An installed plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    /// The library, for [`Plugin::load`](crate::Plugin::load).
    pub path: PathBuf,
    /// The version of the plugin.
    pub version: &'static str,
    /// The SHA-256 of the wheel, hexadecimal.
    pub sha256: &'static str,
    /// `true` if this call has downloaded the plugin.
    pub fresh: bool,
    /// If this call replaced an existing installation: the reason why that was not used.
    pub replaced: Option<String>,
}

/// A step of [`install`], with the package and version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Download a wheel, which takes minutes on a slow connection.
    Download(&'static str),
    /// Compare the SHA-256 of the wheel with the pinned one.
    Verify(&'static str),
    /// Unpack the required files of the wheel.
    Unpack(&'static str),
}

/// Returns the folder for plugins: `grpo/plugins` in `$XDG_CACHE_HOME`, or else in `~/.cache`. Relative paths in these
/// variables are ignored.
///
/// # Errors
///
/// [`Error::NoCache`] if the environment has neither.
pub fn cache_dir() -> Result<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")));
    Ok(cache.ok_or(Error::NoCache)?.join("grpo").join("plugins"))
}

/// Returns the library of `kind`; `None` if it is not installed.
///
/// # Errors
///
/// [`Error::NoCache`]; [`Error::Exposed`] if others may write to it; [`Error::Unverified`] and [`Error::Damaged`] if
/// the files cannot be verified.
pub fn find(kind: Kind) -> Result<Option<PathBuf>> {
    PluginFolder::of(kind)?.find()
}

/// Returns the command with which pip prints the versions of the wheel of `kind` in its index. It downloads no wheel, and fails if
/// [`install`] could not download one.
pub fn index_command(kind: Kind) -> Command {
    kind.wheels()[0].versions()
}

/// Installs `kind`, unless it is installed and intact. Calls `progress` before every step.
///
/// # Errors
///
/// [`Error::Platform`] on other systems than x86-64 Linux; [`Error::Download`] without Python and pip, or if pip fails;
/// [`Error::Digest`] if the wheel differs from the pinned one; [`Error::Install`] if the cache cannot be written;
/// [`Error::NoCache`] if there is no cache; [`Error::Exposed`] if others may write to it.
pub fn install(kind: Kind, progress: impl FnMut(Step)) -> Result<Installed> {
    install_into(kind, false, progress)
}

/// Installs `kind` and replaces an existing installation.
///
/// # Errors
///
/// The errors of [`install`].
pub fn reinstall(kind: Kind, progress: impl FnMut(Step)) -> Result<Installed> {
    install_into(kind, true, progress)
}

fn install_into(kind: Kind, force: bool, mut progress: impl FnMut(Step)) -> Result<Installed> {
    let place = PluginFolder::of(kind)?;
    let (path, found) = place.install(force, &mut Wheel::download, &mut progress)?;
    let (fresh, replaced) = match found {
        Before::Whole => (false, None),
        Before::Nothing => (true, None),
        Before::Replaced(reason) => (true, Some(reason)),
    };
    Ok(Installed { path, version: kind.version(), sha256: kind.wheels()[0].sha256, fresh, replaced })
}

/// The folder of a plugin, installed or not.
struct PluginFolder<'a> {
    name: &'static str,
    directory: PathBuf,
    wheels: &'a [Wheel],
}

/// The state of a folder before an installation.
#[derive(Debug, PartialEq, Eq)]
enum Before {
    Nothing,
    /// The installation is intact, and nothing is done.
    Whole,
    /// The installation was not used, for this reason, and is replaced.
    Replaced(String),
}

const UNPACKED: &str = "unpacked";
const OLD: &str = "old";

impl PluginFolder<'static> {
    fn of(kind: Kind) -> Result<Self> {
        let directory = cache_dir()?.join(format!("{}-{}", kind.name(), kind.version()));
        Ok(PluginFolder { name: kind.name(), directory, wheels: kind.wheels() })
    }
}

impl PluginFolder<'_> {
    fn members(&self) -> Vec<&'static str> {
        self.wheels.iter().flat_map(|wheel| wheel.members).copied().collect()
    }

    fn find(&self) -> Result<Option<PathBuf>> {
        let members = self.members();
        let library = self.directory.join(members[0]);
        if fs::symlink_metadata(&library).is_err() && !self.directory.join(manifest::NAME).exists() {
            return Ok(None);
        }
        let directory = canonical(&self.directory)?;
        // The check of the list reports missing files.
        for name in members.iter().copied().chain([manifest::NAME, manifest::RECORD]) {
            if let Ok(file) = directory.join(name).canonicalize() {
                access::check(&file)?;
            }
        }
        match manifest::check(&directory, &members, SystemTime::now()) {
            Ok(_) => Ok(Some(library)),
            Err(Fault::Unlisted) => Err(Error::Unverified { plugin: self.name, path: directory }),
            Err(Fault::Changed { path, expected, found }) => {
                Err(Error::Damaged { plugin: self.name, path, expected, found })
            }
        }
    }

    /// Installs the plugin. `fetch` downloads a wheel into a new directory and returns its path.
    fn install(
        &self,
        force: bool,
        fetch: &mut impl FnMut(&Wheel, &Path) -> Result<PathBuf>,
        progress: &mut impl FnMut(Step),
    ) -> Result<(PathBuf, Before)> {
        let library = self.directory.join(self.members()[0]);
        if !force && self.before(force)? == Before::Whole {
            return Ok((library, Before::Whole));
        }
        if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
            let platform = format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS);
            return Err(Error::Platform { plugin: self.name, platform });
        }
        let cache = self.directory.parent().unwrap_or(&self.directory);
        make_directory(cache)?;
        access::check(&canonical(cache)?)?;
        // Concurrent installations wait here. The system releases the lock when the process ends, in any way.
        let lock = self.directory.with_added_extension("lock");
        let file = File::create(&lock).and_then(|file| file.lock().map(|()| file));
        let _held = file.map_err(failed(&lock))?;
        let before = self.before(force)?;
        if before == Before::Whole {
            return Ok((library, before));
        }
        // A killed process may have left this folder; nobody else uses it under the lock.
        let scratch = self.directory.with_added_extension("tmp");
        let _ = fs::remove_dir_all(&scratch);
        make_directory(&scratch)?;
        let result = self.unpack_all(&scratch, fetch, progress).and_then(|unpacked| {
            if fs::symlink_metadata(&self.directory).is_ok() {
                fs::rename(&self.directory, scratch.join(OLD)).map_err(failed(&self.directory))?;
            }
            publish(&unpacked, &self.directory, &mut sync).map_err(failed(&self.directory))
        });
        let _ = fs::remove_dir_all(&scratch);
        result?;
        Ok((library, before))
    }

    /// Determines the state of the installation. Returns an error if others may write to it.
    fn before(&self, force: bool) -> Result<Before> {
        match self.find() {
            Ok(None) => Ok(Before::Nothing),
            Ok(Some(_)) if force => Ok(Before::Replaced("a new copy was asked for".into())),
            Ok(Some(_)) => Ok(Before::Whole),
            Err(Error::Damaged { path, expected, found, .. }) => {
                Ok(Before::Replaced(format!("{}: expected {expected}, found {found}", path.display())))
            }
            Err(Error::Unverified { path, .. }) => {
                Ok(Before::Replaced(format!("{} has no list of its files", path.display())))
            }
            // With `force`, the old copy need not be usable; the safety of its folder is checked separately.
            Err(Error::Exposed { path, who, .. }) if force => {
                Ok(Before::Replaced(format!("{who} may write to {}", path.display())))
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the new directory of the plugin.
    fn unpack_all(
        &self,
        scratch: &Path,
        fetch: &mut impl FnMut(&Wheel, &Path) -> Result<PathBuf>,
        progress: &mut impl FnMut(Step),
    ) -> Result<PathBuf> {
        let unpacked = scratch.join(UNPACKED);
        let mut files = vec![];
        for (index, wheel) in self.wheels.iter().enumerate() {
            progress(Step::Download(wheel.requirement));
            let file = fetch(wheel, &scratch.join(index.to_string()))?;
            progress(Step::Verify(wheel.requirement));
            wheel.verify(&file)?;
            progress(Step::Unpack(wheel.requirement));
            files.extend(wheel.unpack(&file, &unpacked).map_err(failed(&unpacked))?);
            let _ = fs::remove_file(&file);
        }
        manifest::write(&unpacked, &files).map_err(failed(&unpacked))?;
        Ok(unpacked)
    }
}

/// Renames `from` to `to` after all contents are on disk, so that a crash leaves all or nothing. Calls `sync` for every
/// file and directory below `from`, contents first, then, after renaming, for the parent directory of `to`.
fn publish(from: &Path, to: &Path, sync: &mut impl FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
    fn sync_all(place: &Path, sync: &mut impl FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
        if fs::symlink_metadata(place)?.is_dir() {
            for entry in fs::read_dir(place)? {
                sync_all(&entry?.path(), sync)?;
            }
        }
        sync(place)
    }
    sync_all(from, sync)?;
    fs::rename(from, to)?;
    sync(to.parent().unwrap_or(to))
}

fn sync(place: &Path) -> io::Result<()> {
    File::open(place)?.sync_all()
}

fn make_directory(path: &Path) -> Result<()> {
    access::create_folder(path).map_err(failed(path))
}

fn canonical(path: &Path) -> Result<PathBuf> {
    path.canonicalize().map_err(failed(path))
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_path_buf();
    move |reason| Error::Install { path, reason }
}

#[cfg(all(test, target_os = "linux", target_arch = "x86_64"))]
mod tests;
