//! Pinned plugins from the package index that the machine's own `pip` uses, so that mirrors and proxies work.
//!
//! A wheel is a zip file. Nothing of it is executed: its SHA-256 is checked, and the files that are needed are unpacked
//! into [`cache_dir`]. Any number of processes may install at the same time.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// A plugin that can be installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// XLA for the CPU: `xla-cpu-pjrt`.
    Cpu,
    /// The TPU's runtime and compiler, which needs no TPU to compile: `libtpu`.
    Tpu,
    /// XLA for NVIDIA GPUs with what it needs to compile without one: `jax-cuda13-pjrt`, `ptxas`, `nvlink`, libdevice.
    Cuda,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 3] = [Kind::Cpu, Kind::Tpu, Kind::Cuda];

    /// `cpu`, `tpu` or `cuda`.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Cpu => "cpu",
            Kind::Tpu => "tpu",
            Kind::Cuda => "cuda",
        }
    }

    /// The release that [`install`] fetches.
    pub fn version(self) -> &'static str {
        let (_, version) = self.wheels()[0].requirement.split_once("==").unwrap_or_default();
        version
    }

    /// The first wheel is the plugin's own, and its first member the library.
    fn wheels(self) -> &'static [Wheel] {
        match self {
            Kind::Cpu => &[Wheel {
                requirement: "xla-cpu-pjrt==0.0.1",
                tags: &["--platform", "manylinux_2_27_x86_64"],
                sha256: "55837b6b7b47daa717f2d9a5a03563ea0ceaa338d06a81a1e2d3f060d960decc",
                members: &["xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so"],
            }],
            Kind::Tpu => &[Wheel {
                requirement: "libtpu==0.0.51",
                tags: &["--platform", "manylinux_2_31_x86_64", "--implementation", "cp", "--abi", "cp311"],
                sha256: "ba67ddbfdbac61c8da1fafc26cd51b93e9fe4d298016e2882eb986b1718cba34",
                members: &["libtpu/libtpu.so"],
            }],
            // Unpacked in the wheels' own layout, in which the plugin finds the tools by itself.
            Kind::Cuda => &[
                Wheel {
                    requirement: "jax-cuda13-pjrt==0.10.2",
                    tags: &["--platform", "manylinux_2_27_x86_64"],
                    sha256: "a97e9cabe0e21d8dbcc70bd909ca1c34cd546d3ce2d94b4cd907a8d4f6179f6a",
                    members: &["jax_plugins/xla_cuda13/xla_cuda_plugin.so"],
                },
                Wheel {
                    requirement: "nvidia-cuda-nvcc==13.5.37",
                    tags: &["--platform", "manylinux2014_x86_64"],
                    sha256: "f5c4f7ead5d964fb4af42bbf1e6d3ec3c1e6e9d83b53749f691d387e7fcaa3a7",
                    members: &["nvidia/cu13/bin/ptxas", "nvidia/cu13/bin/nvlink"],
                },
                Wheel {
                    requirement: "nvidia-nvvm==13.5.37",
                    tags: &["--platform", "manylinux2010_x86_64"],
                    sha256: "c41bfa362e407405163f103c2229f0765f8cc2ed7d148b754dc77f228bf7e070",
                    members: &["nvidia/cu13/nvvm/libdevice/libdevice.10.bc"],
                },
            ],
        }
    }

    fn directory(self) -> PathBuf {
        cache_dir().join(format!("{}-{}", self.name(), self.version()))
    }
}

struct Wheel {
    requirement: &'static str,
    /// What tells pip to take this wheel, whatever Python it runs on.
    tags: &'static [&'static str],
    sha256: &'static str,
    members: &'static [&'static str],
}

/// An installed plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    /// The library, for [`Plugin::load`](crate::Plugin::load).
    pub path: PathBuf,
    /// Its release.
    pub version: &'static str,
    /// The SHA-256 of the wheel that it comes from, hexadecimal.
    pub sha256: &'static str,
    /// Whether it was fetched just now.
    pub fresh: bool,
}

/// What [`install`] is about to do, with the package and version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Fetch a wheel: minutes, on a slow line.
    Download(&'static str),
    /// Check its SHA-256.
    Verify(&'static str),
    /// Take the files that are needed out of it.
    Unpack(&'static str),
}

/// Where plugins are installed: `grpo/plugins` in `$XDG_CACHE_HOME`, or else in `~/.cache`.
pub fn cache_dir() -> PathBuf {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")));
    cache.unwrap_or_else(std::env::temp_dir).join("grpo").join("plugins")
}

/// The library of `kind`, if it is installed.
pub fn find(kind: Kind) -> Option<PathBuf> {
    let path = kind.directory().join(kind.wheels()[0].members[0]);
    path.is_file().then_some(path)
}

/// Fetches `kind` unless it is installed. `progress` hears of every step before it is taken.
///
/// # Errors
///
/// [`Error::Platform`] away from x86-64 Linux, [`Error::Download`] if there is no Python with pip or pip fails,
/// [`Error::Digest`] if the wheel is another than expected, [`Error::Install`] if the cache cannot be written.
pub fn install(kind: Kind, mut progress: impl FnMut(Step)) -> Result<Installed> {
    let installed = |path, fresh| {
        let sha256 = kind.wheels()[0].sha256;
        Installed { path, version: kind.version(), sha256, fresh }
    };
    if let Some(path) = find(kind) {
        return Ok(installed(path, false));
    }
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        let platform = format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS);
        return Err(Error::Platform { plugin: kind.name(), platform });
    }
    let directory = kind.directory();
    make_directory(&cache_dir())?;
    // Others wait here rather than fetch the same; the system releases the lock however this process ends.
    let lock = directory.with_added_extension("lock");
    let file = File::create(&lock).and_then(|file| file.lock().map(|()| file));
    let _held = file.map_err(|source| Error::Install { path: lock, source })?;
    if let Some(path) = find(kind) {
        return Ok(installed(path, false));
    }
    // Left over if a process was killed here; nobody else uses it under the lock.
    let scratch = directory.with_added_extension("tmp");
    let _ = fs::remove_dir_all(&scratch);
    make_directory(&scratch)?;
    let result = fetch_all(kind, &scratch, &mut progress).and_then(|()| {
        let _ = fs::remove_dir_all(&directory);
        let unpacked = scratch.join(UNPACKED);
        fs::rename(&unpacked, &directory).map_err(|source| Error::Install { path: directory.clone(), source })
    });
    let _ = fs::remove_dir_all(&scratch);
    result?;
    Ok(installed(directory.join(kind.wheels()[0].members[0]), true))
}

const UNPACKED: &str = "unpacked";

fn fetch_all(kind: Kind, scratch: &Path, progress: &mut impl FnMut(Step)) -> Result<()> {
    for (index, wheel) in kind.wheels().iter().enumerate() {
        progress(Step::Download(wheel.requirement));
        let file = wheel.download(&scratch.join(index.to_string()))?;
        progress(Step::Verify(wheel.requirement));
        wheel.verify(&file)?;
        progress(Step::Unpack(wheel.requirement));
        let unpacked = scratch.join(UNPACKED);
        wheel.unpack(&file, &unpacked).map_err(|source| Error::Install { path: unpacked, source })?;
        let _ = fs::remove_file(&file);
    }
    Ok(())
}

impl Wheel {
    /// Fetches the wheel into the new directory `into` and returns its path.
    fn download(&self, into: &Path) -> Result<PathBuf> {
        make_directory(into)?;
        let mut command = Command::new("python3");
        command.args([
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-cache-dir",
        ]);
        command.args(["--only-binary=:all:", "--python-version", "3.11"]).args(self.tags).arg("--dest").arg(into);
        command.arg(self.requirement);
        let failed = |reason: String| Error::Download {
            requirement: self.requirement,
            command: format!("{command:?}").replace('"', ""),
            reason,
        };
        let output = Command::new(command.get_program()).args(command.get_args()).output().map_err(|error| {
            failed(match error.kind() {
                io::ErrorKind::NotFound => "there is no `python3` on PATH: install Python 3 with pip".into(),
                _ => format!("python3 does not start: {error}"),
            })
        })?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(failed(if said.contains("No module named pip") {
                "python3 has no pip: install it, for example as the package `python3-pip`".into()
            } else {
                format!("pip failed; check the network, or pip's index and proxy. It said:\n{}", said.trim_end())
            }));
        }
        let files = fs::read_dir(into).map_err(|source| Error::Install { path: into.to_path_buf(), source })?;
        let wheel = files
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.extension().is_some_and(|extension| extension == "whl"));
        wheel.ok_or_else(|| failed("pip succeeded, but there is no wheel".into()))
    }

    fn verify(&self, file: &Path) -> Result<()> {
        let found = sha256(file).map_err(|source| Error::Install { path: file.to_path_buf(), source })?;
        if found != self.sha256 {
            return Err(Error::Digest { requirement: self.requirement, expected: self.sha256, found });
        }
        Ok(())
    }

    fn unpack(&self, file: &Path, into: &Path) -> io::Result<()> {
        let mut archive = zip::ZipArchive::new(File::open(file)?)?;
        for member in self.members {
            let path = into.join(member);
            fs::create_dir_all(path.parent().unwrap_or(into))?;
            io::copy(&mut archive.by_name(member)?, &mut File::create(&path)?)?;
            #[cfg(unix)]
            fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        }
        Ok(())
    }
}

fn make_directory(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(|source| Error::Install { path: path.to_path_buf(), source })
}

fn sha256(file: &Path) -> io::Result<String> {
    let mut hasher = Sha256::new();
    let mut file = File::open(file)?;
    let mut chunk = vec![0; 1 << 20];
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()),
            len => hasher.update(&chunk[..len]),
        }
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
        // The digest of "abc" is the first example of the standard.
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
