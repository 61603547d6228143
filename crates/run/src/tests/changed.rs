//! Resuming with a changed configuration.

use super::*;

fn edit(path: &Path, file: &str, from: &str, to: &str) {
    let file = path.join(file);
    let yaml = std::fs::read_to_string(&file).unwrap();
    assert!(yaml.contains(from), "{from} is not in {yaml}");
    std::fs::write(&file, yaml.replace(from, to)).unwrap();
}

/// Returns the error of resuming with a change that is refused. Nothing that the configuration names may be loaded.
fn refused(path: &Path, set: &[&str]) -> String {
    let load = |_| -> trainer::Result<Trainer> { panic!("nothing is loaded before the configuration is checked") };
    let metrics = std::fs::read(path.join("metrics.jsonl")).unwrap();
    let text = Run::resume_with(path, None, &assignments(set), load).err().unwrap().to_string();
    assert_eq!(std::fs::read(path.join("metrics.jsonl")).unwrap(), metrics);
    assert!(!path.join("changes.jsonl").exists());
    text
}

#[test]
fn unsafe_changes_are_refused_by_key_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    stopped_after(config(), &path, "Grpo 2");
    for (assignment, words) in [
        ("seed=7", ["seed (from 0 to 7)", "problems and samples"]),
        ("loss.beta=0.5", ["loss.beta (from 0.0 to 0.5)", "what is optimised"]),
        ("model.hidden_size=32", ["model.hidden_size", "another model"]),
        ("optimizer.adam_beta1=0.5", ["optimizer.adam_beta1", "moments"]),
        ("grpo.num_generations=4", ["grpo.num_generations", "numbers of its steps"]),
        ("warmup.steps=9", ["warmup.steps", "numbers of its steps"]),
    ] {
        let text = refused(&path, &[assignment, "optimizer.learning_rate=1e-5"]);
        assert!(words.iter().all(|word| text.contains(word)), "{assignment}: {text}");
        assert!(!text.contains("optimizer.learning_rate (from"), "{text}");
        assert!(text.contains("what may change is run, policy, logging"), "{text}");
    }
    // An edit of config.yaml is refused, too.
    edit(&path, "config.yaml", "seed: 0\n", "seed: 7\n");
    assert!(refused(&path, &[]).contains("seed (from 0 to 7)"));
    // If the record is edited as well, the hash in the checkpoint does not match.
    edit(&path, "config.recorded.yaml", "seed: 0\n", "seed: 7\n");
    let text = refused(&path, &[]);
    assert!(text.contains("step-000002") && text.contains("another configuration"), "{text}");
    std::fs::remove_file(path.join("config.recorded.yaml")).unwrap();
    assert!(refused(&path, &[]).contains("config.recorded.yaml"));
}

#[test]
fn a_changed_implementation_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (new, old) = (folder.path().join("new"), folder.path().join("old"));
    drop(Run::start(config(), Some(&new)).unwrap());
    stopped_after(config(), &old, "Grpo 1");
    for path in [new, old] {
        edit(&path, "config.yaml", "implementation: fused", "implementation: logits");
        let text = refused(&path, &[]);
        assert!(text.contains("grpo.implementation (from \"fused\" to \"logits\")") && text.contains("code"), "{text}");
    }
}

#[test]
fn safe_changes_apply_on_resume_and_are_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let mut config = config();
    config.run.save_total_limit = 0;
    config.optimizer.warmup_ratio = 0.0;
    stopped_after(config.clone(), &path, "Grpo 2");
    let set = ["optimizer.learning_rate=1.5e-4", "optimizer.lr_scheduler_type=constant", "grpo.max_steps=6"];
    let (heard, _) = record(&mut Run::resume(&path, None, &assignments(&set)).unwrap(), "");
    assert!(heard.contains(&"saved step-000006".to_owned()), "{heard:?}");
    let rows: Vec<MetricsRow> = read_rows(&path.join("metrics.jsonl")).unwrap();
    let rates: Vec<_> =
        rows.iter().filter(|r| r.phase == RowKind::Grpo).filter_map(|r| r.get("learning_rate")).collect();
    assert!(rates[..2].iter().all(|rate| *rate > 3e-4) && rates[2..] == [1.5e-4; 4], "{rates:?}");

    let changes = std::fs::read_to_string(path.join("changes.jsonl")).unwrap();
    let changes: Vec<serde_json::Value> = changes.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let row = |key, from: serde_json::Value, to: serde_json::Value| serde_json::json!({ "checkpoint": "step-000002", "key": key, "from": from, "to": to });
    let expected = [
        row("grpo.max_steps", 4.into(), 6.into()),
        row("optimizer.learning_rate", 7e-4.into(), 1.5e-4.into()),
        row("optimizer.lr_scheduler_type", "cosine".into(), "constant".into()),
    ];
    assert_eq!(changes, expected);

    // The changes are now the run's configuration; earlier checkpoints still match.
    for from in [None, Some("step-000002")] {
        let run = Run::resume(&path, from, &[]).unwrap();
        assert_eq!(run.trainer().config().optimizer.learning_rate, 1.5e-4);
        assert!(run.changes.is_empty());
        assert_eq!(run.dir().config(&[]).unwrap(), run.dir().recorded_config().unwrap());
    }
    // Fewer steps than are done are refused.
    let error = Run::resume(&path, None, &assignments(&["grpo.max_steps=1"])).err().unwrap().to_string();
    assert!(error.contains("grpo.max_steps") && error.contains("at least 2"), "{error}");
}

#[test]
fn edits_of_config_yaml_are_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    stopped_after(config(), &path, "Warmup 1");
    edit(&path, "config.yaml", "save_steps: 2\n", "save_steps: 3\n");
    let run = Run::resume(&path, None, &[]).unwrap();
    assert_eq!(run.changes.iter().map(Change::to_string).collect::<Vec<_>>(), ["run.save_steps (from 2 to 3)"]);
    assert_eq!(run.dir().recorded_config().unwrap().run.save_steps, 3);
    let written = std::fs::read_to_string(path.join("changes.jsonl")).unwrap();
    assert!(written.contains("warmup-000001") && written.contains("run.save_steps"), "{written}");
}
