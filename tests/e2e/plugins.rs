//! Which plugins are loaded: what was installed, as it was installed, and nothing that others may write.

use crate::support::{command, grpo, refuse, refused, stderr, stdout};
use pjrt::install::{Kind, cache_dir, install};
use serde_json::Value;
use std::fs::{self, File, FileTimes, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Output;

const FORCE: &str = "`grpo plugin install cpu --force`";
const FOLDER: &str = "grpo/plugins/cpu-0.0.1";
const LIBRARY: &str = "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so";

fn batch() -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    folder.join("c01_grpo_token_full.safetensors").display().to_string()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        let to = to.join(entry.file_name());
        match entry.file_type().expect("a kind").is_dir() {
            true => copy(&entry.path(), &to),
            false => drop(fs::copy(entry.path(), to).expect("a copy")),
        }
    }
}

/// A cache of its own with a copy of this machine's plugin for the CPU.
struct Cache(tempfile::TempDir);

impl Cache {
    fn new() -> Self {
        install(Kind::Cpu, |_| {}).expect("the plugin can be installed");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let cache = cache_dir().expect("this user has a cache");
        copy(&cache.join("cpu-0.0.1"), &folder.path().join(FOLDER));
        Self(folder)
    }

    fn library(&self) -> PathBuf {
        self.0.path().join(FOLDER).join(LIBRARY)
    }

    fn grpo(&self, arguments: &[&str]) -> Output {
        command(arguments).env("XDG_CACHE_HOME", self.0.path()).output().expect("the binary starts")
    }
}

fn cut(file: &Path) {
    let open = OpenOptions::new().write(true).open(file).expect("a file");
    open.set_len(open.metadata().expect("a file").len() / 2).expect("cut");
}

/// Neither the size nor the time says so.
fn overwrite(file: &Path) {
    let before = fs::metadata(file).expect("a file");
    let open = OpenOptions::new().write(true).open(file).expect("a file");
    open.write_all_at(&[0xcc; 4096], before.len() / 3).expect("written");
    open.set_times(FileTimes::new().set_modified(before.modified().expect("a time"))).expect("set");
}

#[test]
fn a_damaged_plugin_is_not_loaded_and_says_how_to_mend_it() {
    type Damage = (&'static str, fn(&Path));
    let damage: [Damage; 3] =
        [("cut", cut), ("overwritten", overwrite), ("empty", |file| drop(File::create(file).expect("a file")))];
    for (what, damage) in damage {
        let cache = Cache::new();
        let parity = ["parity", &batch(), "--backend", "pjrt:cpu"];
        if what == "overwritten" {
            let whole = cache.grpo(&parity);
            assert_eq!(whole.status.code(), Some(0), "{}{}", stdout(&whole), stderr(&whole));
        }
        damage(&cache.library());
        let text = refused(&parity, &cache.grpo(&parity));
        let file = cache.library().canonicalize().expect("a path").display().to_string();
        for words in [FORCE, "is damaged", "expected", "found", &file] {
            assert!(text.contains(words), "{what}: {words}: {text}");
        }
        let list = cache.grpo(&["plugin", "list", "--json"]);
        assert_eq!(list.status.code(), Some(0), "{}", stderr(&list));
        let list: Value = serde_json::from_str(&stdout(&list)).expect("JSON");
        assert!(list[0]["note"].as_str().is_some_and(|note| note.contains(FORCE)), "{list}");
        assert!(list[0]["api_version"].is_null(), "{list}");
        // It is fetched again, if there were a pip to fetch it with.
        let mut install = command(&["plugin", "install", "cpu"]);
        let install = install.env("XDG_CACHE_HOME", cache.0.path()).env("PATH", "/nowhere").output().expect("starts");
        assert_eq!(install.status.code(), Some(2), "{what}: {}", stdout(&install));
        assert!(stderr(&install).contains("python3") && stdout(&install).is_empty(), "{what}: {}", stderr(&install));
    }
}

#[test]
fn a_plugin_of_an_older_release_is_not_taken_on_trust() {
    let cache = Cache::new();
    fs::remove_file(cache.0.path().join(FOLDER).join("manifest.txt")).expect("a list");
    let parity = ["parity", &batch(), "--backend", "pjrt:cpu"];
    let text = refused(&parity, &cache.grpo(&parity));
    assert!(text.contains(FORCE) && text.contains("no list of its files"), "{text}");
}

#[test]
fn half_a_library_that_was_named_is_an_error_and_no_signal() {
    let cache = Cache::new();
    cut(&cache.library());
    let library = cache.library().display().to_string();
    let arguments = ["parity", &batch(), "--backend", "pjrt:cpu", "--plugin", &library];
    let text = refused(&arguments, &grpo(&arguments));
    assert!(text.contains("it is cut off") && text.contains("xla_cpu_pjrt.so"), "{text}");
    fs::write(&library, [0; 10_000]).expect("zeros");
    let text = refused(&arguments, &grpo(&arguments));
    assert!(text.contains("no shared library"), "{text}");
}

#[test]
fn what_others_may_write_is_refused_with_the_command_that_mends_it() {
    let cache = Cache::new();
    let library = cache.library();
    let mode = |place: &Path, mode| fs::set_permissions(place, Permissions::from_mode(mode)).expect("a mode");
    let (parity, named) = (["parity", &batch(), "--backend", "pjrt:cpu"], library.display().to_string());
    let folder = cache.0.path().join("grpo");
    for (place, open, closed) in [(&library, 0o777, 0o755), (&folder, 0o757, 0o755)] {
        mode(place, open);
        let mend = format!("`chmod go-w {}`", place.canonicalize().expect("a path").display());
        let installed = refused(&parity, &cache.grpo(&parity));
        assert!(installed.contains(&mend), "{installed}");
        let arguments = [&parity[..], &["--plugin", &named]].concat();
        let named = refused(&arguments, &grpo(&arguments));
        assert!(named.contains(&mend), "{named}");
        mode(place, closed);
    }
    let mended = cache.grpo(&parity);
    assert_eq!(mended.status.code(), Some(0), "{}{}", stdout(&mended), stderr(&mended));
}

#[test]
fn without_a_home_there_is_no_cache() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    // What another user could have put into the folder for temporary files.
    let planted = folder.path().join(FOLDER).join(LIBRARY);
    fs::create_dir_all(planted.parent().expect("a folder")).expect("a folder");
    fs::write(&planted, "planted").expect("a file");
    let batch = batch();
    for arguments in [&["parity", &batch, "--backend", "pjrt:cpu"][..], &["plugin", "install", "cpu"]] {
        for relative in [None, Some("cache"), Some("")] {
            let mut command = command(arguments);
            command.current_dir(folder.path()).env("TMPDIR", folder.path());
            command.envs(relative.map(|path| ("XDG_CACHE_HOME", path)));
            let text = refused(arguments, &command.output().expect("the binary starts"));
            assert!(text.contains("set HOME or XDG_CACHE_HOME"), "{text}");
        }
    }
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "nothing but what was planted");
    let text = refuse(&["train", "--set", "policy.device=pjrt:cpu", "--run-dir", &folder.path().display().to_string()]);
    assert!(text.contains("set HOME or XDG_CACHE_HOME"), "{text}");
}
