//! Disks that are full: what was saved stays good, the error names the file, and the run goes on once there is room.

use super::{files, finish};
use crate::support::{Runs, assert_same_run, names, stderr, succeed, tiny};
use crate::tiny_model::{arguments, prepare, tensors, train};
use std::path::Path;
use std::process::{Command, Stdio};

const SETTINGS: [&str; 4] = ["warmup.steps=10", "grpo.max_steps=20", "run.save_steps=5", "run.log_completions_steps=1"];

/// The binary where no file can become larger than `blocks` of 512 bytes: writes beyond that fail, as on a full disk.
fn limited(blocks: u64, arguments: &[&str]) -> Command {
    let mut command = Command::new("sh");
    // `ulimit -f` of a POSIX shell counts blocks of 512 bytes; the signal would end the process instead of the write.
    command.args([
        "-c",
        "trap '' XFSZ; ulimit -f \"$0\"; exec \"$@\"",
        &blocks.to_string(),
        env!("CARGO_BIN_EXE_grpo"),
    ]);
    command.args(arguments).env_clear().env("PATH", "/usr/bin:/bin");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
#[cfg(unix)]
fn a_run_goes_on_when_there_is_room_again() {
    let runs = Runs::new(&SETTINGS);
    runs.train("whole");
    let size = |file: &str| std::fs::metadata(runs.path("whole").join(file)).expect("a file").len();
    let model = size("checkpoints/step-000020/model.safetensors");
    let logs = size("metrics.jsonl").min(size("completions.jsonl"));
    assert!(model > logs / 2 && logs > 4096, "{model} {logs}");
    // Before the configuration is there, in the logs, in the first checkpoint, in the log's second half.
    for (name, bytes) in [("config", 512), ("logs", logs / 4), ("checkpoint", model / 2), ("late", logs * 3 / 4)] {
        let (run, text) = (runs.path(name), runs.text(name));
        let config = tiny().display().to_string();
        let mut arguments = vec!["train", "--quiet", "--config", &config, "--run-dir", &text];
        SETTINGS.iter().for_each(|setting| arguments.extend(["--set", setting]));
        let output = finish(limited(bytes / 512, &arguments).spawn().expect("sh runs"), name);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{name}: {said}");
        assert!(
            said.contains("File too large") && said.contains(&*text) && !said.contains("panicked"),
            "{name}: {said}"
        );
        assert_eq!(said.lines().count(), 1, "{name}: {said}");
        let half = |name: &String| name.starts_with(".tmp") && name != ".tmp-";
        if run.join("config.yaml").exists() {
            succeed(&["train", "--resume", &text]);
        } else {
            // Nothing that looks like a run: it can be started again in the same folder.
            runs.train(name);
        }
        assert_same_run(&runs.path("whole"), &run);
        assert!(!names(&run.join("checkpoints")).iter().any(half), "{name}");
    }
}

#[test]
#[cfg(unix)]
fn an_export_that_does_not_fit_leaves_nothing_and_can_be_repeated() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    train(&runs, "model", "a", &["grpo.max_steps=1"]);
    let (run, target) = (runs.text("a"), runs.path("exported"));
    let size = |folder: &str| std::fs::metadata(runs.path(folder).join("model.safetensors")).expect("weights").len();
    let before = names(&runs.path(""));
    // Too little for the weights, and for the tokenizer behind them.
    let tokenizer = std::fs::metadata(runs.path("model/tokenizer.json")).expect("a tokenizer").len();
    for bytes in [size("a/model") / 2, size("a/model").max(tokenizer) - 512] {
        let arguments = ["export", &run, "--to", &runs.text("exported")];
        let output = finish(limited(bytes / 512, &arguments).spawn().expect("sh runs"), "export");
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{bytes}: {said}");
        assert!(said.contains("File too large") && said.lines().count() == 1, "{bytes}: {said}");
        assert!(!target.exists() && names(&runs.path("")) == before, "{bytes}: {:?}", names(&runs.path("")));
    }
    succeed(&["export", &run, "--to", &runs.text("exported")]);
    assert_eq!(size("exported"), size("a/model"));
}

/// Adapters are saved, and the whole model is exported, so that the disk has room for all but the end of the run.
#[test]
#[cfg(unix)]
fn a_run_whose_export_does_not_fit_keeps_its_checkpoint_and_ends_later() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let settings = ["lora.r=1", "export.merge_adapters=true"];
    train(&runs, "model", "whole", &settings);
    let weights = runs.path("whole/model/model.safetensors");
    let size = |path: &Path| std::fs::metadata(path).expect("a file").len();
    let largest = files(&runs.path("whole")).into_iter().filter(|path| *path != weights).map(|path| size(&path)).max();
    let limit = size(&weights) - 512;
    assert!(largest < Some(limit), "only the exported weights do not fit: {largest:?} {limit}");

    let arguments = arguments(&runs, "model", "a", &settings);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let output = finish(limited(limit / 512, &arguments).spawn().expect("sh runs"), "the run");
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    let (run, text) = (runs.path("a"), runs.text("a"));
    assert!(said.contains("File too large") && said.contains(&*text) && !said.contains("panicked"), "{said}");
    assert!(
        said.contains("model.safetensors") && said.lines().filter(|line| !line.contains("WARN")).count() == 1,
        "{said}"
    );
    // All steps are saved, and nothing looks like a model.
    let checkpoint = |name: &str| {
        let folder = runs.path(name).join("checkpoints/step-000002");
        files(&folder)
            .into_iter()
            .filter(|path| !path.ends_with("state.json") && !path.ends_with("SHA256SUMS"))
            .map(|path| (path.file_name().expect("a name").to_owned(), std::fs::read(&path).expect("a file")))
            .collect::<Vec<_>>()
    };
    let saved = checkpoint("a");
    assert!(saved.len() >= 2 && saved == checkpoint("whole"), "the checkpoint is not that of the whole run");
    assert!(!run.join("model").exists() && !run.join("summary.json").exists(), "{:?}", names(&run));
    assert!(
        !files(&run)
            .iter()
            .any(|path| path.ends_with("model.safetensors") && !path.starts_with(run.join("checkpoints")))
    );

    succeed(&["train", "--resume", &text]);
    assert_same_run(&runs.path("whole"), &run);
    assert!(tensors(&run.join("model")) == tensors(&runs.path("whole/model")));
}

#[test]
#[cfg(target_os = "linux")]
fn results_for_a_full_device_are_an_error() {
    let golden = tiny().with_file_name("../../tests/golden/trl_grpo_default.safetensors").display().to_string();
    let output = crate::support::grpo(&["loss", &golden, "--out", "/dev/full"]);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("/dev/full") && said.contains("No space left"), "{said}");
    assert!(std::path::Path::new("/dev/full").metadata().is_ok(), "the device is still there");
}
