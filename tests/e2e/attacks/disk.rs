//! Disks that are full: what was saved stays good, the error names the file, and the run goes on once there is room.

use crate::support::{Call, Runs, Said, assert_has, assert_same_run, batch, files, finish, grpo, names, succeed};
use crate::tiny_model::{call, tensors, train};
use std::path::Path;

const SETTINGS: [&str; 4] = ["warmup.steps=10", "grpo.max_steps=20", "run.save_steps=5", "run.log_completions_steps=1"];

/// Runs a call that must fail because no file can become larger than `bytes`, as on a full disk.
fn without_room(bytes: u64, call: Call) -> Said {
    // The shell counts blocks of 512 bytes.
    let said = finish(call.limited(&format!("-f {}", bytes / 512)).spawn(), "without room");
    assert_eq!(said.code, Some(2), "{said}");
    assert_has(&said.stderr, &["File too large"]);
    assert_eq!(said.stderr.lines().filter(|line| !line.contains("WARN")).count(), 1, "{said}");
    said
}

#[test]
#[ignore = "GRPO_TESTS=all"]
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
        let said = without_room(bytes, runs.tiny(name).args(["--quiet"]));
        assert_has(&said.stderr, &[&text]);
        let half = |name: &String| name.starts_with(".tmp") && name != ".tmp-";
        if run.join("config.yaml").exists() {
            runs.resume(name).succeed();
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
    let runs = Runs::small();
    train(&runs, "model", "a", &["grpo.max_steps=1"]);
    let (run, target) = (runs.text("a"), runs.path("exported"));
    let size = |folder: &str| std::fs::metadata(runs.path(folder).join("model.safetensors")).expect("weights").len();
    let before = names(&runs.path(""));
    // Too little for the weights, and for the tokenizer behind them.
    let tokenizer = std::fs::metadata(runs.path("model/tokenizer.json")).expect("a tokenizer").len();
    for bytes in [size("a/model") / 2, size("a/model").max(tokenizer) - 512] {
        without_room(bytes, grpo(["export", &run, "--to", &runs.text("exported")]));
        assert!(!target.exists() && names(&runs.path("")) == before, "{bytes}: {:?}", names(&runs.path("")));
    }
    succeed(&["export", &run, "--to", &runs.text("exported")]);
    assert_eq!(size("exported"), size("a/model"));
}

/// Adapters are saved, and the whole model is exported, so that the disk has room for all but the end of the run.
#[test]
#[cfg(unix)]
fn a_run_whose_export_does_not_fit_keeps_its_checkpoint_and_ends_later() {
    let runs = Runs::small();
    let settings = ["lora.r=1", "export.merge_adapters=true"];
    train(&runs, "model", "whole", &settings);
    let weights = runs.path("whole/model/model.safetensors");
    let size = |path: &Path| std::fs::metadata(path).expect("a file").len();
    let largest = files(&runs.path("whole")).into_iter().filter(|path| *path != weights).map(|path| size(&path)).max();
    let limit = size(&weights) - 512;
    assert!(largest < Some(limit), "only the exported weights do not fit: {largest:?} {limit}");

    let said = without_room(limit, call(&runs, "model", "a", &settings));
    let (run, text) = (runs.path("a"), runs.text("a"));
    assert_has(&said.stderr, &[&text, "model.safetensors"]);
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

    runs.resume("a").succeed();
    assert_same_run(&runs.path("whole"), &run);
    assert!(tensors(&run.join("model")) == tensors(&runs.path("whole/model")));
}

#[test]
#[cfg(target_os = "linux")]
fn results_for_a_full_device_are_an_error() {
    let said = grpo(["loss", &batch("trl_grpo_default"), "--out", "/dev/full"]).exit(2).stderr;
    assert_has(&said, &["/dev/full", "No space left"]);
    assert!(Path::new("/dev/full").metadata().is_ok(), "the device is still there");
}
