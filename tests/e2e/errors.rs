//! Errors say what is wrong once.

use crate::support::{command, refused, succeed, tiny};
use std::path::Path;

/// Parts of a message that are too short to be noticed when they come twice.
const SHORT: usize = 12;

/// A part of `message`, which is joined by colons, that is in it twice.
fn repeated(message: &str) -> Option<&str> {
    let parts = message.trim().split(": ").filter(|part| part.chars().count() > SHORT);
    parts.into_iter().find(|part| message.matches(part).count() > 1)
}

#[test]
fn repetitions_are_seen() {
    let twice = "error: cannot create a: No such file or directory: No such file or directory";
    assert_eq!(repeated(twice), Some("No such file or directory"));
    assert_eq!(repeated("error: cannot read a.yaml: No such file or directory"), None);
}

#[test]
fn no_error_repeats_its_cause() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let write = |name: &str, text: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("a file");
        path.display().to_string()
    };
    let batch = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/c01_grpo_token_full.safetensors");
    let cut = write("cut.safetensors", &std::fs::read(&batch).expect("a batch")[..300]);
    let batch = batch.display().to_string();
    let half = write("half.yaml", b"seed: [1");
    let unknown = write("unknown.yaml", b"sed: 1\n");
    let wrong = write("wrong.yaml", b"grpo: { max_steps: many }\n");
    let loss = write("loss.yaml", b"beta: -1\n");
    let variant = write("variant.yaml", b"variants: { a: { tilling: {} } }\n");
    let budget = write("budget.yaml", b"variants: { a: { tiling: { workspace_budget: 10 } } }\n");
    let library = write("plugin.so", b"not a library");
    let run = folder.path().join("run").display().to_string();
    let tiny = tiny().display().to_string();

    let nowhere = "/proc/nowhere/there";
    let commands: &[&[&str]] = &[
        &["train", nowhere],
        &["train", &half],
        &["train", &unknown],
        &["train", &wrong],
        &["train", "--set", "seed"],
        &["train", "--set", "loss.beta=-1"],
        &["train", "--set", "grpo.backend=gpu"],
        &["train", "--set", "model.hidden_size=30"],
        &["train", "--resume", nowhere],
        &["train", &tiny, "--run-dir", nowhere],
        &["train", &tiny, "--run-dir", &run, "--set", "policy.device=pjrt:tpu"],
        &["train", &tiny, "--run-dir", &run, "--set", "wandb={mode: offline, dir: /proc/nowhere}"],
        &["init", "--model", nowhere, "--data", nowhere],
        &["init", "--model", nowhere, "--data", &half],
        &["init", "--model", nowhere, "--data", &half, "--out", "/proc/nowhere/there/train.yaml"],
        &["data", nowhere, "--model", nowhere],
        &["data", &batch, "--model", nowhere],
        &["export", nowhere],
        &["report", nowhere],
        &["parity", nowhere],
        &["parity", &batch, "--model", nowhere],
        &["parity", &half],
        &["parity", &cut],
        &["parity", &batch, "--config", nowhere],
        &["parity", &batch, "--config", &loss],
        &["parity", &batch, "--backend", "gpu"],
        &["parity", &batch, "--backend", "pjrt:cpu"],
        &["parity", &batch, "--backend", "pjrt:cpu", "--plugin", nowhere],
        &["parity", &batch, "--backend", "pjrt:cpu", "--plugin", &library],
        &["loss", nowhere, "--out", "result"],
        &["loss", &batch, "--out", nowhere],
        &["loss", &batch, "--out", "result", "--config", &loss],
        &["aot", "--target", "v9"],
        &["aot", "--target", "v6e"],
        &["aot", &variant, "--target", "v6e"],
        &["aot", "--target", "v6e", "--plugin", &library, "--variants", "fused"],
        &["aot", &budget, "--target", "v6e", "--plugin", &library],
        &["aot", "--target", "v6e", "--plugin", &library, "--emit", nowhere],
        &["plan", "--target", "v6e", "--plugin", &library],
        &["bench", nowhere],
        &["bench", &variant],
        &["bench", "--variants", "nobody"],
        &["bench", "--assert", "nothing"],
        &["bench", "--log-dir", nowhere],
        &["bench", "--set", "variants.fused.threads=100000"],
        &["gradcheck", nowhere],
        &["gradcheck", "--set", "loss.beta=-1"],
        &["gradcheck", "--variants", "nobody"],
        &["plugin", "install", "cpu"],
    ];
    let help = succeed(&["--help"]);
    let names = help.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    let names: Vec<&str> = names.filter(|name| name.starts_with(char::is_lowercase)).collect();
    assert_eq!(names.len(), 12, "{help}");
    for name in names {
        assert!(commands.iter().any(|arguments| arguments[0] == name), "no refusal of `grpo {name}` is looked at");
    }
    for arguments in commands {
        let mut command = command(arguments);
        // A cache that nobody can make.
        let output = command.env("XDG_CACHE_HOME", "/proc/nowhere").current_dir(folder.path()).output();
        let text = refused(arguments, &output.expect("the binary starts"));
        assert_eq!(repeated(&text), None, "{arguments:?}: {text}");
    }
}
