//! Files that users name: what is written, where, and what is not read.

use crate::support::{Runs, command, grpo, names, refuse, stderr, stdout, succeed};
use crate::tiny_model::{arguments, prepare};
use grpo_core::BatchFile;
use grpo_core::{PolicyOutput, Tensor};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A golden batch of this repository.
fn batch(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
    path.with_extension("safetensors").display().to_string()
}

fn folder() -> (tempfile::TempDir, impl Fn(&str) -> String) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().to_owned();
    (folder, move |name: &str| path.join(name).display().to_string())
}

const ONE: &str = "trl_grpo_default";
const OTHER: &str = "trl_dapo_default";

#[test]
fn results_that_are_written_at_once_stay_apart_and_are_the_same_bytes_every_time() {
    let (folder, path) = folder();
    let expected = [ONE, OTHER].map(|name| {
        succeed(&["loss", &batch(name), "--out", &path(name)]);
        let bytes = std::fs::read(path(name)).expect("results");
        std::fs::remove_file(path(name)).expect("removed");
        bytes
    });
    assert_ne!(expected[0], expected[1]);
    // What a user has under a name that a temporary file could have.
    std::fs::write(path("r.tmp"), "mine").expect("written");
    for _ in 0..10 {
        let start = |(name, out): (&str, &str)| -> Child {
            command(&["loss", &batch(name), "--out", &path(out)])
                .stdout(Stdio::null())
                .spawn()
                .expect("the binary starts")
        };
        let children = [(ONE, "r.a"), (OTHER, "r.b")].map(start);
        for mut child in children {
            assert_eq!(child.wait().expect("ended").code(), Some(0));
        }
        assert!(std::fs::read(path("r.a")).expect("results") == expected[0]);
        assert!(std::fs::read(path("r.b")).expect("results") == expected[1]);
    }
    assert_eq!(names(folder.path()), ["r.a", "r.b", "r.tmp"]);
    assert_eq!(std::fs::read(path("r.tmp")).expect("the user's file"), b"mine");
}

#[test]
fn standard_output_gets_the_results_and_standard_error_the_text() {
    let (_folder, path) = folder();
    succeed(&["loss", &batch(ONE), "--out", &path("file")]);
    let expected = std::fs::read(path("file")).expect("results");
    for out in ["-", "/dev/stdout"] {
        let output = grpo(&["loss", &batch(ONE), "--out", out]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert!(output.stdout == expected, "{out}");
        assert!(stderr(&output).contains("wrote standard output"), "{}", stderr(&output));
    }
    assert!(!Path::new("-").exists());
    assert!(succeed(&["loss", "--help"]).contains("`-` is standard output"));
}

#[test]
#[cfg(unix)]
fn a_pipe_is_written_to_and_never_read() {
    use std::os::unix::fs::FileTypeExt;
    let (_folder, path) = folder();
    let pipe = path("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs");
    assert!(made.success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || std::fs::read(pipe).expect("readable")
    });
    succeed(&["loss", &batch(ONE), "--out", &pipe]);
    let through = reader.join().expect("read");
    succeed(&["loss", &batch(ONE), "--out", &path("file")]);
    assert!(through == std::fs::read(path("file")).expect("results"));
    assert!(std::fs::symlink_metadata(&pipe).expect("there").file_type().is_fifo());
    for arguments in [
        &["parity", &pipe][..],
        &["loss", &pipe, "--out", &path("x")],
        &["parity", &batch(ONE), "--config", &pipe],
        &["train", "--config", &pipe],
        &["bench", &pipe],
    ] {
        let text = refuse(arguments);
        assert!(text.contains("expected a regular file, got a pipe"), "{text}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn what_has_no_end_is_refused() {
    for arguments in [
        &["parity", "/dev/zero"][..],
        &["loss", "/dev/zero", "--out", "/nowhere/x"],
        &["train", "--config", "/dev/zero"],
        &["gradcheck", "/dev/zero"],
    ] {
        let text = refuse(arguments);
        assert!(text.contains("got a device") || text.contains("/nowhere"), "{arguments:?}: {text}");
    }
    // Longer than its header says, by a terabyte that no disk has to hold.
    let (_folder, path) = folder();
    let file = path("long.safetensors");
    std::fs::copy(batch(ONE), &file).expect("copied");
    std::fs::File::options().write(true).open(&file).and_then(|f| f.set_len(1 << 40)).expect("made long");
    let text = refuse(&["parity", &file]);
    assert!(text.contains("its header describes") && text.contains("got 1099511627776"), "{text}");
}

/// Makes what is no regular file in the place of `path`.
#[cfg(target_os = "linux")]
fn spoil(path: &Path, kind: &str) {
    let _ = std::fs::remove_file(path);
    match kind {
        "a pipe" => assert!(Command::new("mkfifo").arg(path).status().expect("mkfifo runs").success()),
        "a device" => std::os::unix::fs::symlink("/dev/zero", path).expect("a link"),
        _ => std::fs::create_dir(path).expect("a folder"),
    }
}

/// Opening a pipe waits for a writer, and a device has no end: nothing that a configuration or a model folder names may be one.
#[test]
#[cfg(target_os = "linux")]
fn pipes_devices_and_folders_are_refused_wherever_a_file_is_read() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let refused_in_time = |arguments: &[String], kind: &str, what: &str| {
        let binary = command(&[]).get_program().to_owned();
        let output = Command::new("timeout").args(["--kill-after=1", "60"]).arg(binary).args(arguments).output();
        let output = output.expect("timeout runs");
        let text = format!("{}{}", stdout(&output), stderr(&output));
        assert!(matches!(output.status.code(), Some(1 | 2)), "{what}, {kind}: {:?}\n{text}", output.status);
        // One message says `a device or a pipe`, and one how a folder is named.
        assert!(text.contains("got a ") && text.contains(kind), "{what}, {kind}: {text}");
    };
    for kind in ["a pipe", "a device", "a folder"] {
        let other = runs.path("spoilt");
        let _ = std::fs::remove_dir(&other);
        spoil(&other, kind);
        let other = other.display().to_string();
        for key in ["data.files", "data.eval_files", "data.tools_file", "data.chat_template"] {
            let setting = format!("{key}={other}");
            refused_in_time(&arguments(&runs, "model", "a", &[&setting]), kind, key);
        }
        refused_in_time(&["train".into(), "--config".into(), other.clone()], kind, "the configuration");
        for file in [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "chat_template.jinja",
            "model.safetensors",
        ] {
            let path = runs.path("model").join(file);
            let before = std::fs::read(&path).ok();
            spoil(&path, kind);
            refused_in_time(&arguments(&runs, "model", "a", &[]), kind, file);
            if kind == "a folder" {
                std::fs::remove_dir(&path).expect("removed")
            } else {
                std::fs::remove_file(&path).expect("removed")
            }
            if let Some(before) = before {
                std::fs::write(&path, before).expect("written");
            }
        }
        assert!(!runs.path("a").exists(), "nothing was begun");
        let path = runs.path("spoilt");
        if kind != "a folder" {
            std::fs::remove_file(path).expect("removed");
        }
    }
}

/// A batch with a KL term and the entry `index` of its hidden states set to `value`.
fn with_hidden(path: String, index: usize, value: f32) -> String {
    let mut file = BatchFile::parse(&std::fs::read(batch("trl_grpo_kl")).expect("a batch")).expect("a batch");
    let PolicyOutput::Hidden { hidden: Tensor::F32(hidden), .. } = &mut file.policy else {
        panic!("hidden states in f32")
    };
    hidden[index] = value;
    std::fs::write(&path, file.to_bytes().expect("bytes")).expect("written");
    path
}

#[test]
fn gradients_that_are_not_finite_are_counted_and_not_written() {
    let (_folder, path) = folder();
    let file = with_hidden(path("batch"), 0, 1e30);
    let output = grpo(&["loss", &file, "--out", &path("out")]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{text}{}", stderr(&output));
    assert!(text.starts_with("loss ") && text.contains("nothing was written"), "{text}");
    assert!(
        text.lines().any(|line| line.starts_with("grad_lm_head: ") && line.contains("of 136 entries are not finite")),
        "{text}"
    );
    assert!(!PathBuf::from(path("out")).exists());
}

const TINY: &str = "
name: tiny
shape: { batch: 2, tokens: 12, hidden: 16, vocab: 50 }
dtype: f32
rounds: { warmup: 1, steps: 3 }
variants:
  fused: { threads: 1 }
";

#[test]
fn outputs_that_cannot_be_written_are_found_before_the_work() {
    let (_folder, path) = folder();
    let config = path("config.yaml");
    std::fs::write(&config, TINY).expect("written");
    std::fs::write(path("file"), "").expect("written");
    for (option, name) in [("--out", "no/x.json"), ("--plot", "no/x.svg"), ("--log-dir", "file/logs")] {
        // One line, so nothing of the work was begun.
        let text = refuse(&["bench", &config, option, &path(name)]);
        assert!(text.contains(name), "{option}: {text}");
    }
    let text = refuse(&["loss", "/nowhere/batch", "--out", &path("no/out")]);
    assert!(text.contains("no/out") && text.contains("the folder"), "{text}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_folder_that_takes_no_files_is_found_before_anything_is_compiled() {
    let (_folder, path) = folder();
    std::fs::write(path("plugin.so"), "no library").expect("written");
    // It is there, and nobody can make a file in it. The plugin is not opened before that is known.
    let text = refuse(&["aot", "--target", "v6e", "--plugin", &path("plugin.so"), "--emit", "/proc/self/fdinfo"]);
    assert!(text.contains("write into the folder /proc/self/fdinfo"), "{text}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_benchmark_shows_its_table_when_its_file_cannot_be_written() {
    let (_folder, path) = folder();
    let config = path("config.yaml");
    std::fs::write(&config, TINY).expect("written");
    let output = grpo(&["bench", &config, "--out", "/dev/full"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("/dev/full"), "{}", stderr(&output));
    assert!(stdout(&output).contains("fused"), "{}", stdout(&output));
}
