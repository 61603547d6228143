//! A damaged checkpoint is never used and never dropped in silence.

use crate::support::{Runs, assert_has, assert_same_run, copy, names};

const SETTINGS: [&str; 4] = ["warmup.steps=2", "grpo.max_steps=6", "run.save_steps=2", "loss.beta=0.01"];

#[test]
fn damage_names_the_file_and_the_last_good_checkpoint() {
    let runs = Runs::new(&SETTINGS);
    runs.train("a");
    copy(&runs.path("a"), &runs.path("whole"));
    let newest = runs.path("a/checkpoints/step-000006");
    let metrics = std::fs::read(runs.path("a/metrics.jsonl")).expect("metrics");
    for file in ["model.safetensors", "optimizer.safetensors", "reference.safetensors", "state.json", "SHA256SUMS"] {
        let path = newest.join(file);
        let good = std::fs::read(&path).expect("a file");
        let flipped = {
            let mut bytes = good.clone();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            bytes
        };
        let garbage = b"{\"format\": \"grpo-checkpoint/4\", \"counters\": [{{{".to_vec();
        for (kind, bytes) in [
            ("truncated", Some(good[..good.len() / 3].to_vec())),
            ("flipped", Some(flipped)),
            ("garbage", Some(garbage)),
            ("missing", None),
        ] {
            match bytes {
                Some(bytes) => std::fs::write(&path, bytes).expect("written"),
                None => std::fs::remove_file(&path).expect("removed"),
            }
            let text = runs.resume("a").refuse();
            assert!(text.contains(file) || file == "SHA256SUMS", "{file} {kind}: {text}");
            let good = ["the last good checkpoint is step-000004", "--from step-000004"];
            assert_has(&text, &[&["damaged checkpoint", "step-000006/"], &good[..]].concat());
        }
        std::fs::write(&path, good).expect("written");
    }
    assert_eq!(std::fs::read(runs.path("a/metrics.jsonl")).expect("metrics"), metrics, "nothing is lost");
    runs.resume("a").succeed();
    // The option that the error names.
    runs.write("a/checkpoints/step-000006/model.safetensors", "x");
    runs.resume("a").args(["--from", "step-000004"]).succeed();
    assert_same_run(&runs.path("whole"), &runs.path("a"));
    assert!(names(&runs.path("a/checkpoints")).contains(&"step-000006.old-1".to_owned()), "kept, under another name");
}

#[test]
fn no_good_checkpoint_and_missing_rows_are_said() {
    let runs = Runs::new(&["warmup.steps=2", "grpo.max_steps=2", "run.save_total_limit=1"]);
    runs.train("a");
    let metrics = runs.path("a/metrics.jsonl");
    let rows = std::fs::read(&metrics).expect("metrics");
    std::fs::write(&metrics, &rows[..rows.len() / 2]).expect("written");
    let text = runs.resume("a").refuse();
    assert_has(&text, &["metrics.jsonl", "rows are missing"]);
    std::fs::write(&metrics, &rows).expect("written");
    runs.write("a/checkpoints/step-000002/state.json", "{}");
    let text = runs.resume("a").refuse();
    assert!(text.contains("no other checkpoint"), "{text}");
}
