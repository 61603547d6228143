//! Refusals of plugins that differ from the installed version, or that others may write to.

use crate::support::{Call, Runs, assert_has, batch, copy, grpo};
use grpo_pjrt::install::{Kind, cache_dir, install};
use std::fs::{self, FileTimes, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

const FORCE: &str = "`grpo plugin install cpu --force`";
const FOLDER: &str = "grpo/plugins/cpu-0.0.1";
const LIBRARY: &str = "grpo/plugins/cpu-0.0.1/xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so";

/// Returns a cache with a copy of this machine's plugin for the CPU.
fn cache() -> Runs {
    install(Kind::Cpu, |_| {}).expect("the plugin can be installed");
    let folder = Runs::new(&[]);
    copy(&cache_dir().expect("this user has a cache").join("cpu-0.0.1"), &folder.path(FOLDER));
    folder
}

/// Calls `grpo` with the cache.
fn installed(cache: &Runs, arguments: &[&str]) -> Call {
    grpo(arguments).env("XDG_CACHE_HOME", cache.path(""))
}

/// Calls `grpo parity` with the plugin of the cache.
fn parity(cache: &Runs) -> Call {
    installed(cache, &["parity", &batch("c01_grpo_token_full"), "--backend", "pjrt:cpu"])
}

/// Calls `grpo parity` with a named plugin.
fn parity_named(library: &str) -> Call {
    grpo(["parity", &batch("c01_grpo_token_full"), "--backend", "pjrt:cpu", "--plugin", library])
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn plugins_that_differ_from_the_installed_version_are_not_loaded() {
    let cache = cache();
    parity(&cache).succeed();
    // Neither the size nor the time of the last write shows the change.
    let library = cache.path(LIBRARY);
    let file = OpenOptions::new().write(true).open(&library).expect("a file");
    let before = file.metadata().expect("a file");
    file.write_all_at(&[0xcc; 4096], before.len() / 3).expect("written");
    file.set_times(FileTimes::new().set_modified(before.modified().expect("a time"))).expect("set");
    let path = library.canonicalize().expect("a path").display().to_string();
    assert_has(&parity(&cache).refuse(), &[FORCE, "is damaged", "expected", "found", &path]);
    let list = installed(&cache, &["plugin", "list", "--json"]).exit(0).json();
    assert!(list[0]["note"].as_str().is_some_and(|note| note.contains(FORCE)), "{list}");
    assert!(list[0]["api_version"].is_null(), "{list}");
    // The plugin would be downloaded again, if there were a pip.
    let install = installed(&cache, &["plugin", "install", "cpu"]).env("PATH", "/nowhere").exit(2);
    assert!(install.stderr.contains("python3") && install.stdout.is_empty(), "{install}");

    // An installation of an older release.
    fs::remove_file(cache.path(FOLDER).join("manifest.txt")).expect("a list");
    assert_has(&parity(&cache).refuse(), &[FORCE, "no list of its files"]);

    // Half a library is an error and not a signal.
    file.set_len(before.len() / 2).expect("cut");
    assert_has(&parity_named(&cache.text(LIBRARY)).refuse(), &["it is cut off", "xla_cpu_pjrt.so"]);
    fs::write(&library, [0; 10_000]).expect("zeros");
    assert_has(&parity_named(&cache.text(LIBRARY)).refuse(), &["no shared library"]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn plugins_that_others_may_write_to_are_refused_with_the_command_to_run() {
    let cache = cache();
    let mode = |place: &Path, mode| fs::set_permissions(place, Permissions::from_mode(mode)).expect("a mode");
    for (place, open, closed) in [(cache.path(LIBRARY), 0o777, 0o755), (cache.path("grpo"), 0o757, 0o755)] {
        mode(&place, open);
        let remedy = format!("`chmod go-w {}`", place.canonicalize().expect("a path").display());
        for call in [parity(&cache), parity_named(&cache.text(LIBRARY))] {
            assert_has(&call.refuse(), &[&remedy]);
        }
        mode(&place, closed);
    }
    parity(&cache).succeed();
}

#[test]
fn without_a_home_there_is_no_cache() {
    let folder = Runs::new(&[]);
    // A file that another user could have put into the folder for temporary files.
    fs::create_dir_all(folder.path(LIBRARY).parent().expect("a folder")).expect("a folder");
    folder.write(LIBRARY, "planted");
    let words = ["set HOME or XDG_CACHE_HOME"];
    for arguments in
        [&["parity", &batch("c01_grpo_token_full"), "--backend", "pjrt:cpu"][..], &["plugin", "install", "cpu"]]
    {
        for relative in [None, Some("cache"), Some("")] {
            let call = grpo(arguments).at(&folder.path("")).env("TMPDIR", folder.path(""));
            let call = if let Some(path) = relative { call.env("XDG_CACHE_HOME", path) } else { call };
            assert_has(&call.refuse(), &words);
        }
    }
    assert_eq!(fs::read_dir(folder.path("")).expect("a folder").count(), 1, "nothing but what was planted");
    let train = grpo(["train", "--run-dir", &folder.text("")]).set(["policy.device=pjrt:cpu"]);
    assert_has(&train.refuse(), &words);
}

/// A virtual environment has both, and need not be activated.
#[test]
fn plugins_are_downloaded_with_the_python_next_to_the_program() {
    let folder = Runs::new(&[]);
    fs::create_dir(folder.path("bin")).expect("a folder");
    let program = folder.path("bin/grpo");
    let binary = env!("CARGO_BIN_EXE_grpo");
    fs::hard_link(binary, &program).or_else(|_| fs::copy(binary, &program).map(drop)).expect("a program");
    let install = || {
        let mut command = Command::new(&program);
        command.env_clear().args(["plugin", "install", "cpu"]).stdin(Stdio::null());
        Call(command).env("XDG_CACHE_HOME", folder.path("cache")).env("PATH", "/nowhere").exit(2).stderr
    };
    assert_has(&install(), &["there is no `python3` on PATH"]);

    let python = folder.write("bin/python3", "#!/bin/sh\necho \"$0: No module named pip\" >&2\nexit 1\n");
    fs::set_permissions(&python, Permissions::from_mode(0o755)).expect("a mode");
    let python = Path::new(&python).canonicalize().expect("a path").display().to_string();
    let words =
        [format!("{python} has no pip"), format!("`{python} -m ensurepip`"), format!("{python} -m pip download")];
    assert_has(&install(), &words.each_ref().map(String::as_str));
}
