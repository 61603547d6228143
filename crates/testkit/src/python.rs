//! Python packages that tests run, from the package index that the machine's own `pip` uses.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{self, Command};

/// The packages that the tests import, and the dependencies of [`WITHOUT_REQUIREMENTS`]. pip resolves all of them at once.
const REQUIREMENTS: [&str; 9] = [
    "wandb==0.31.0",
    "tensorboard==2.21.0",
    "math-verify==0.9.0",
    "reasoning-gym==0.1.25",
    "transformers==5.23.0",
    "psutil==7.2.2",
    "sympy==1.14.0",
    "networkx==3.6.1",
    "jinja2==3.1.6",
];
/// torch, and packages that would install CUDA or other large packages with it: they are installed without their requirements. TRL's
/// reward functions need none of `datasets`, `pandas` and `pyarrow`. The last package is of Linux alone.
const WITHOUT_REQUIREMENTS: [&str; 5] =
    ["torch==2.13.0", "peft==0.21.2", "accelerate==1.15.0", "trl==1.16.0", "nvidia-cuda-runtime==13.0.96"];
/// Prints the packages of its arguments that are not there.
const LACKING: &str = "
import sys
from importlib.metadata import PackageNotFoundError, version

def is_there(name):
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False

print(*(name for name in sys.argv[1:] if not is_there(name)), end='')
";
/// Libraries of CUDA that torch's wheel for Linux is linked with and that nothing calls on a CPU.
const CUDA: [&str; 12] = [
    "libcublas.so.13",
    "libcublasLt.so.13",
    "libcudnn.so.9",
    "libcufft.so.12",
    "libcufile.so.0",
    "libcupti.so.13",
    "libcurand.so.10",
    "libcusparse.so.12",
    "libcusparseLt.so.0",
    "libnccl.so.2",
    "libnvrtc.so.13",
    "libnvshmem_host.so.3",
];

/// The one Python of all tests: TensorBoard, the W&B SDK, math_verify, reasoning-gym, torch, transformers, peft and TRL for this CPU.
///
/// It is `python3` with a folder of packages in the user's cache, where PJRT plugins are, too, or, where there is such a variable, the
/// interpreter `GRPO_TEST_PYTHON`, which has all of these itself.
#[derive(Clone, Debug)]
pub struct Python {
    program: OsString,
    /// The folder with the packages; without one the interpreter has them.
    folder: Option<PathBuf>,
}

impl Python {
    /// The packages are fetched by the first process that asks. Any number of processes may ask at the same time.
    ///
    /// torch's wheel for Linux is made for GPUs; what it would fetch for them, five times its own size, is left out.
    ///
    /// # Panics
    /// Without python3, pip, a package index or room on the disk, or where `GRPO_TEST_PYTHON` lacks a package: tests cannot do without.
    pub fn install() -> Self {
        let alone = if cfg!(target_os = "linux") { &WITHOUT_REQUIREMENTS[..] } else { &WITHOUT_REQUIREMENTS[..4] };
        if let Some(program) = variable("GRPO_TEST_PYTHON") {
            // Whose torch is whole has what it was linked with.
            let names = [&REQUIREMENTS, &WITHOUT_REQUIREMENTS[..4]].concat();
            let names = names.iter().filter_map(|requirement| requirement.split("==").next());
            let lacking = run(Command::new(&program).args(["-c", LACKING]).args(names));
            assert!(lacking.is_empty(), "GRPO_TEST_PYTHON, {}, lacks {}", program.display(), lacking.trim_end());
            return Self { program, folder: None };
        }
        let cache = variable("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| variable("HOME").map(|home| Path::new(&home).join(".cache")));
        let cache = cache.unwrap_or_else(std::env::temp_dir).join("grpo");
        // What is compiled in a package fits one version of Python.
        let version = run(Command::new("python3").args(["-c", "import sys; print('%d.%d' % sys.version_info[:2])"]));
        let requirements = [&REQUIREMENTS, alone].concat().join("\n") + "\n";
        let folder = cache.join(format!("python-{}-{:016x}", version.trim(), fnv1a(requirements.as_bytes())));
        once(&folder, |folder| {
            pip(folder, &REQUIREMENTS);
            pip(folder, &[&["--no-deps"], alone].concat());
            if cfg!(target_os = "linux") {
                stand_in_for_cuda(folder);
            }
            fs::write(folder.join("requirements.txt"), &requirements).expect("the packages can be written");
        });
        Self { program: "python3".into(), folder: Some(folder) }
    }

    /// The interpreter, which finds the packages with [`Python::python_path`].
    pub fn program(&self) -> &OsStr {
        &self.program
    }

    /// The folder with the packages, for `PYTHONPATH`; `None` where the interpreter has them itself.
    pub fn python_path(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The interpreter, with the packages.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.envs(self.python_path().map(|folder| ("PYTHONPATH", folder)));
        command
    }

    /// The folder with the programs of the packages, `wandb` among them, for `PATH`.
    ///
    /// # Panics
    /// Where the interpreter does not say where its programs are.
    pub fn scripts(&self) -> PathBuf {
        match &self.folder {
            Some(folder) => folder.join("bin"),
            None => {
                let place = "import sysconfig; print(sysconfig.get_path('scripts'))";
                run(Command::new(&self.program).args(["-c", place])).trim_end().into()
            }
        }
    }
}

/// A variable of the environment that is not empty.
fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// The hash FNV-1a of 64 bits, by which a list of requirements has a folder with a short name.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

fn pip(folder: &Path, arguments: &[&str]) {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-warn-conflicts"]);
    run(pip.arg("--target").arg(folder).args(arguments));
}

/// Puts an empty library in the place of each of [`CUDA`], where torch looks for them, and has Python look for a library's functions
/// when they are called: those of CUDA never are.
fn stand_in_for_cuda(folder: &Path) {
    let libraries = folder.join("nvidia/cu13/lib");
    for name in CUDA {
        let mut linker = Command::new("cc");
        linker.args(["-shared", "-nostdlib", "-x", "c", "/dev/null", "-o"]).arg(libraries.join(name));
        run(linker.arg(format!("-Wl,-soname,{name}")));
    }
    // Python runs it when it starts.
    let script = "import os\nimport sys\n\nsys.setdlopenflags(os.RTLD_LAZY)\n";
    fs::write(folder.join("sitecustomize.py"), script).expect("the packages can be written");
}

/// Standard output of a program that must succeed.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("these tests need it: {command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the packages of these tests need it: {command:?}\n{said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Leaves at `folder` what `make` puts into the folder that it is given, unless there is such a folder. One process makes it while
/// others wait; what a process leaves that is killed meanwhile is removed by the next one.
fn once(folder: &Path, make: impl FnOnce(&Path)) {
    let (Some(cache), Some(name)) = (folder.parent(), folder.file_name().and_then(|name| name.to_str())) else {
        panic!("{} is not a folder in a cache", folder.display());
    };
    fs::create_dir_all(cache).expect("the cache can be made");
    let lock = File::create(folder.with_added_extension("lock")).expect("a lock file");
    lock.lock().expect("a lock");
    if folder.exists() {
        return;
    }
    // A pip whose test was killed may still write, and does so where nobody looks: every process has a name of its own.
    let part = format!("{name}.part-");
    for entry in fs::read_dir(cache).expect("the cache can be read").flatten() {
        if entry.file_name().to_string_lossy().starts_with(&part) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    let scratch = cache.join(format!("{part}{}", process::id()));
    fs::create_dir(&scratch).expect("a new folder");
    make(&scratch);
    fs::rename(&scratch, folder).expect("the packages can be put into place");
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn write_package(scratch: &Path) {
        fs::write(scratch.join("package.py"), "whole").unwrap();
    }

    fn read_package(folder: &Path) -> String {
        fs::read_to_string(folder.join("package.py")).unwrap()
    }

    #[test]
    fn a_folder_that_a_killed_process_began_is_made_again() {
        let cache = tempfile::tempdir().unwrap();
        let folder = cache.path().join("env-1.0");
        fs::create_dir(cache.path().join("env-1.0.part-1")).unwrap();
        fs::write(cache.path().join("env-1.0.part-1/package.py"), "ha").unwrap();
        fs::write(cache.path().join("env-1.0.lock"), "").unwrap();
        let failed = catch_unwind(AssertUnwindSafe(|| once(&folder, |_| panic!("no network"))));
        assert!(failed.is_err() && !folder.exists(), "a failure leaves nothing under the name");
        once(&folder, write_package);
        assert_eq!(read_package(&folder), "whole");
        let names = fs::read_dir(cache.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.collect();
        names.sort();
        assert_eq!(names, ["env-1.0", "env-1.0.lock"], "nothing is left of those that failed");
    }

    #[test]
    fn those_who_ask_at_the_same_time_wait_for_the_first() {
        let cache = tempfile::tempdir().unwrap();
        let (folder, made) = (cache.path().join("new/env"), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    once(&folder, |scratch| {
                        made.fetch_add(1, Ordering::Relaxed);
                        std::thread::yield_now();
                        write_package(scratch);
                    });
                    assert_eq!(read_package(&folder), "whole");
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
    }
}
