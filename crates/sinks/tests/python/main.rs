//! The files of the sinks, read by TensorBoard and by the W&B SDK.

mod readers;

use grpo_sinks::wandb::Options;
use grpo_sinks::{Sink, TensorBoard, Wandb};
use readers::{Readers, WandbServer};
use serde_json::{Value, json};

grpo_testkit::tiers!();

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn tensorboard_reads_its_files() {
    let readers = Readers::install();
    let folder = tempfile::tempdir().unwrap();
    let mut first = TensorBoard::open(folder.path(), "# a run\n\n    seed: 7").unwrap();
    for step in 1..=3 {
        first.log("train", step, &[("reward", step as f64 / 4.0), ("kl", f64::NAN)]).unwrap();
    }
    // The process was killed while it wrote the last row.
    let bytes = std::fs::read(first.path()).unwrap();
    std::fs::write(first.path(), &bytes[..bytes.len() - 5]).unwrap();
    let mut second = TensorBoard::open(folder.path(), "# a run\n\n    seed: 7").unwrap();
    second.log("train", 2, &[("reward", 0.5), ("kl", f64::NAN)]).unwrap();
    second.log("train", 3, &[("reward", 0.75), ("kl", f64::INFINITY)]).unwrap();
    second.log("eval", 0, &[("pass@1", 0.125)]).unwrap();
    second.finish(0).unwrap();

    let expected = json!({
        "scalars": {
            "train/reward": [[1, "0.25"], [2, "0.5"], [3, "0.75"]],
            "train/kl": [[1, "nan"], [2, "nan"], [3, "inf"]],
            "eval/pass@1": [[0, "0.125"]],
        },
        "texts": {"config/text_summary": "# a run\n\n    seed: 7"},
    });
    assert_eq!(readers.tensorboard(folder.path()), expected);
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn wandb_sync_uploads_a_run_and_its_resumption() {
    let readers = Readers::install();
    let dir = tempfile::tempdir().unwrap();
    let options = Options {
        dir: dir.path().to_owned(),
        id: "abcd1234".into(),
        project: "arithmetic".into(),
        entity: Some("team".into()),
        name: Some("first try".into()),
        group: Some("seeds".into()),
        tags: vec!["a".into(), "b".into()],
    };
    // The run's record spans four blocks.
    let config = json!({"seed": 7, "loss": {"beta": 0.5, "type": "grpo"}, "long": "x".repeat(100_000)});
    let Value::Object(config) = config else { unreachable!() };
    let mut first = Wandb::open(&options, &config).unwrap();
    first.log("warmup", 1, &[("loss", 2.5)]).unwrap();
    for step in 1..=300 {
        first.log("train", step, &[("reward", step as f64 / 4.0), ("kl", f64::NAN), ("x", f64::NEG_INFINITY)]).unwrap();
    }
    // The process was killed while it wrote the last row; the run resumes from an earlier step.
    let file = first.folder().join("run-abcd1234.wandb");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 5]).unwrap();
    let mut second = Wandb::open(&options, &config).unwrap();
    for step in 290..=302 {
        second.log("train", step, &[("reward", step as f64 / 4.0)]).unwrap();
    }
    second.finish(0).unwrap();

    let home = tempfile::tempdir().unwrap();
    let mut inspect = readers.command("wandb", home.path());
    let output = inspect.args(["leet", "inspect", "--json"]).arg(second.folder()).output().expect("wandb starts");
    let records = String::from_utf8(output.stdout).unwrap();
    let kinds = records.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["type"].clone());
    let row = ["summary", "history"];
    let expected = [&["header", "run", "environment", "metric"][..], &row, &row, &row, &["summary", "exit"]].concat();
    assert_eq!(kinds.collect::<Vec<_>>(), expected);

    let server = WandbServer::start();
    let mut sync = readers.command("wandb", home.path());
    sync.arg("sync").args([first.folder(), second.folder()]).envs(server.environment());
    let output = sync.output().expect("wandb starts");
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    for part in [first.folder(), second.folder()] {
        assert!(part.join("run-abcd1234.wandb.synced").exists(), "{} is not marked\n{said}", part.display());
    }

    let seen = server.seen();
    let run = &seen["abcd1234"];
    let created = &run["runs"][0];
    assert_eq!((&created["project"], &created["entity"]), (&json!("arithmetic"), &json!("team")));
    assert_eq!((&created["displayName"], &created["groupName"]), (&json!("first try"), &json!("seeds")));
    assert_eq!(created["tags"], json!(["a", "b"]));
    for (key, value) in &config {
        assert_eq!(created["config"][key]["value"], *value, "{key}");
    }
    let rows = run["history"].as_array().expect("rows");
    assert_eq!(rows.len(), 303);
    for (index, row) in rows.iter().enumerate() {
        assert_eq!(row["_step"], index);
        assert!(row["_timestamp"].is_number() && row["_runtime"].is_number(), "{row}");
    }
    assert_eq!((&rows[0]["warmup/loss"], &rows[0]["warmup/global_step"]), (&json!(2.5), &json!(1)));
    assert_eq!((&rows[299]["train/kl"], &rows[299]["train/x"]), (&json!("NaN"), &json!("-Infinity")));
    for step in [1, 299, 300, 302] {
        let row = &rows[step];
        assert_eq!((&row["train/global_step"], row["train/reward"].as_f64()), (&json!(step), Some(step as f64 / 4.0)));
    }
    assert_eq!(run["summary"]["train/reward"], 75.5);
    // The killed part failed, the resumed part succeeded.
    assert_eq!(run["exit_codes"], json!([1, 0]));
    let metadata: Value = serde_json::from_str(run["files"]["wandb-metadata.json"].as_str().unwrap()).unwrap();
    assert!(metadata["host"].is_string() && metadata["startedAt"].is_string(), "{metadata}");
    assert!(run["files"]["config.yaml"].as_str().unwrap().contains("beta: 0.5"));
}
