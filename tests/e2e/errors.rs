//! Errors say what is wrong once.

use crate::support::{Runs, batch, grpo, succeed, tiny};

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
    let folder = Runs::new(&[]);
    let batch = batch("c01_grpo_token_full");
    let cut = folder.write("cut.safetensors", &std::fs::read(&batch).expect("a batch")[..300]);
    let half = folder.write("half.yaml", "seed: [1");
    let unknown = folder.write("unknown.yaml", "sed: 1\n");
    let wrong = folder.write("wrong.yaml", "grpo: { max_steps: many }\n");
    let loss = folder.write("loss.yaml", "beta: -1\n");
    let variant = folder.write("variant.yaml", "variants: { a: { tilling: {} } }\n");
    let budget = folder.write("budget.yaml", "variants: { a: { tiling: { workspace_budget: 10 } } }\n");
    let library = folder.write("plugin.so", "not a library");
    let (run, tiny) = (folder.text("run"), tiny());

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
        &["doctor", "--time-limit", "0"],
        &["plugin", "install", "cpu"],
    ];
    let help = succeed(&["--help"]);
    let names = help.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    let names: Vec<&str> = names.filter(|name| name.starts_with(char::is_lowercase)).collect();
    assert_eq!(names.len(), 13, "{help}");
    for name in names {
        assert!(commands.iter().any(|arguments| arguments[0] == name), "no refusal of `grpo {name}` is looked at");
    }
    for arguments in commands {
        // A cache that nobody can make.
        let text = grpo(*arguments).env("XDG_CACHE_HOME", "/proc/nowhere").at(&folder.path("")).refuse();
        assert_eq!(repeated(&text), None, "{arguments:?}: {text}");
    }
}
