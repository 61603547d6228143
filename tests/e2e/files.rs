//! Files that users name: which are written and where, and which are not read.

use crate::support::{Call, Runs, assert_has, batch, finish, grpo, names, refuse, succeed};
use crate::tiny_model::call;
use grpo_core::{BatchFile, PolicyOutput, Tensor};
use std::path::Path;
use std::process::Command;

const ONE: &str = "trl_grpo_default";
const OTHER: &str = "trl_dapo_default";

/// Calls `grpo loss` and returns the written bytes.
fn results(folder: &Runs, name: &str) -> Vec<u8> {
    succeed(["loss", &batch(name), "--out", &folder.text("results")]);
    let bytes = std::fs::read(folder.path("results")).expect("results");
    std::fs::remove_file(folder.path("results")).expect("removed");
    bytes
}

#[test]
fn results_that_are_written_at_once_stay_apart_and_are_the_same_bytes_every_time() {
    let folder = Runs::new(&[]);
    let expected = [ONE, OTHER].map(|name| results(&folder, name));
    assert_ne!(expected[0], expected[1]);
    // A user's file with a name that a temporary file could have.
    folder.write("r.tmp", "mine");
    for _ in 0..10 {
        let start = |(name, out)| grpo(["loss", &batch(name), "--out", &folder.text(out)]).spawn();
        for child in [(ONE, "r.a"), (OTHER, "r.b")].map(start) {
            assert_eq!(finish(child, "loss").code, Some(0));
        }
        for (out, expected) in ["r.a", "r.b"].iter().zip(&expected) {
            assert!(std::fs::read(folder.path(out)).expect("results") == *expected);
        }
    }
    assert_eq!(names(&folder.path("")), ["r.a", "r.b", "r.tmp"]);
    assert_eq!(folder.read("r.tmp"), "mine");
}

#[test]
fn standard_output_gets_the_results_and_standard_error_the_text() {
    let expected = results(&Runs::new(&[]), ONE);
    for out in ["-", "/dev/stdout"] {
        let Call(mut command) = grpo(["loss", &batch(ONE), "--out", out]);
        let output = command.output().expect("the binary starts");
        assert!(output.status.success() && output.stdout == expected, "{out}");
        assert_has(&String::from_utf8_lossy(&output.stderr), &["wrote standard output"]);
    }
    assert!(!Path::new("-").exists());
    assert_has(&succeed(["loss", "--help"]), &["`-` is standard output"]);
}

#[test]
#[cfg(unix)]
fn a_pipe_is_written_to_and_never_read() {
    use std::os::unix::fs::FileTypeExt;
    let folder = Runs::new(&[]);
    let pipe = folder.text("pipe");
    spoil(pipe.as_ref(), "a pipe");
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || std::fs::read(pipe).expect("readable")
    });
    succeed(["loss", &batch(ONE), "--out", &pipe]);
    assert!(reader.join().expect("read") == results(&folder, ONE));
    assert!(std::fs::symlink_metadata(&pipe).expect("there").file_type().is_fifo());
    for arguments in [
        &["parity", &pipe][..],
        &["loss", &pipe, "--out", &folder.text("x")],
        &["parity", &batch(ONE), "--config", &pipe],
        &["train", "--config", &pipe],
        &["bench", &pipe],
    ] {
        assert_has(&refuse(arguments), &["expected a regular file, got a pipe"]);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn what_has_no_end_is_refused() {
    for (arguments, words) in [
        (&["parity", "/dev/zero"][..], "got a device"),
        (&["loss", "/dev/zero", "--out", "/nowhere/x"], "/nowhere"),
        (&["gradcheck", "/dev/zero"], "got a device"),
    ] {
        assert_has(&refuse(arguments), &[words]);
    }
    // Longer than its header says, by a terabyte that no disk has to hold.
    let folder = Runs::new(&[]);
    let file = folder.write("long.safetensors", std::fs::read(batch(ONE)).expect("a batch"));
    std::fs::File::options().write(true).open(&file).and_then(|f| f.set_len(1 << 40)).expect("made long");
    assert_has(&refuse(["parity", &file]), &["its header describes", "got 1099511627776"]);
}

/// Replaces the file at `path` by a pipe, a device or a folder.
#[cfg(unix)]
fn spoil(path: &Path, kind: &str) {
    let _ = std::fs::remove_file(path);
    match kind {
        "a pipe" => assert!(Command::new("mkfifo").arg(path).status().expect("mkfifo runs").success()),
        "a device" => std::os::unix::fs::symlink("/dev/zero", path).expect("a link"),
        _ => std::fs::create_dir(path).expect("a folder"),
    }
}

fn remove(path: &Path) {
    let removed = if path.is_dir() { std::fs::remove_dir(path) } else { std::fs::remove_file(path) };
    removed.expect("removed");
}

/// Opening a pipe waits for a writer, and a device has no end: no file that a configuration or a model folder names may be one.
#[test]
#[ignore = "GRPO_TESTS=all"]
#[cfg(target_os = "linux")]
fn pipes_devices_and_folders_are_refused_wherever_a_file_is_read() {
    let runs = Runs::small();
    let refused_in_time = |call: Call, kind: &str, what: &str| {
        let said = finish(call.spawn(), what);
        assert!(matches!(said.code, Some(1 | 2)), "{what}, {kind}: {:?}\n{said}", said.code);
        // One message says `a device or a pipe`; a folder of data is read, and this one is empty.
        let text = said.to_string();
        let is_empty = kind == "a folder" && text.contains("there is no file in the folder");
        assert!(is_empty || (text.contains("got a ") && text.contains(kind)), "{what}: {text}");
    };
    for kind in ["a pipe", "a device", "a folder"] {
        let (path, other) = (runs.path("spoilt"), runs.text("spoilt"));
        spoil(&path, kind);
        for key in ["data.files", "data.eval_files", "data.tools_file", "data.chat_template"] {
            refused_in_time(call(&runs, "model", "a", &[&format!("{key}={other}")]), kind, key);
        }
        refused_in_time(grpo(["train", "--config", &other]), kind, "the configuration");
        remove(&path);
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
            refused_in_time(call(&runs, "model", "a", &[]), kind, file);
            remove(&path);
            before.inspect(|before| std::fs::write(&path, before).expect("written"));
        }
        assert!(!runs.path("a").exists(), "nothing was begun");
    }
}

#[test]
fn gradients_that_are_not_finite_are_counted_and_not_written() {
    let folder = Runs::new(&[]);
    let mut file = BatchFile::parse(&std::fs::read(batch("trl_grpo_kl")).expect("a batch")).expect("a batch");
    let PolicyOutput::Hidden { hidden: Tensor::F32(hidden), .. } = &mut file.policy else {
        panic!("hidden states in f32")
    };
    hidden[0] = 1e30;
    let file = folder.write("batch", file.to_bytes().expect("bytes"));
    let text = grpo(["loss", &file, "--out", &folder.text("out")]).exit(1).stdout;
    assert!(text.starts_with("loss ") && text.contains("nothing was written"), "{text}");
    let counted = |line: &str| line.starts_with("grad_lm_head: ") && line.contains("of 136 entries are not finite");
    assert!(text.lines().any(counted), "{text}");
    assert!(!folder.path("out").exists());
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
    let folder = Runs::new(&[]);
    let config = folder.write("config.yaml", TINY);
    folder.write("file", "");
    for (option, name) in [("--out", "no/x.json"), ("--plot", "no/x.svg"), ("--log-dir", "file/logs")] {
        // One line, so nothing of the work was begun.
        assert_has(&refuse(["bench", &config, option, &folder.text(name)]), &[name]);
    }
    assert_has(&refuse(["loss", "/nowhere/batch", "--out", &folder.text("no/out")]), &["no/out", "the folder"]);
}

#[test]
#[cfg(target_os = "linux")]
fn a_folder_that_takes_no_files_is_found_before_anything_is_compiled() {
    let folder = Runs::new(&[]);
    let plugin = folder.write("plugin.so", "no library");
    // It is there, and nobody can make a file in it. The plugin is not opened before that is known.
    let text = refuse(["aot", "--target", "v6e", "--plugin", &plugin, "--emit", "/proc/self/fdinfo"]);
    assert_has(&text, &["write into the folder /proc/self/fdinfo"]);
}

#[test]
#[cfg(target_os = "linux")]
fn a_benchmark_shows_its_table_when_its_file_cannot_be_written() {
    let folder = Runs::new(&[]);
    let config = folder.write("config.yaml", TINY);
    let said = grpo(["bench", &config, "--out", "/dev/full"]).exit(2);
    assert_has(&said.stderr, &["/dev/full"]);
    assert_has(&said.stdout, &["fused"]);
}
