//! Resuming with a changed configuration.

use super::*;

/// Returns the error of resuming with a change that is refused. Nothing that the configuration names may be loaded.
fn refused(path: &Path, set: &[&str]) -> String {
    let load = |_| -> grpo_trainer::Result<Trainer> { panic!("nothing is loaded before the configuration is checked") };
    let before = metrics(path);
    let text = Run::resume_with(path, None, &assignments(set), load).err().unwrap().to_string();
    assert_eq!(metrics(path), before);
    assert!(!path.join("changes.jsonl").exists());
    text
}

#[test]
fn unsafe_changes_are_refused_by_key_with_the_reason() {
    let (folder, path) = run_path();
    stopped_after(config(), &path, "Grpo 2");
    let implementation = "grpo.implementation (from \"fused\" to \"logits\")";
    for (assignment, words) in [
        ("seed=7", ["seed (from 0 to 7)", "problems and samples"]),
        ("loss.beta=0.5", ["loss.beta (from 0.0 to 0.5)", "what is optimised"]),
        ("model.hidden_size=32", ["model.hidden_size", "another model"]),
        ("optimizer.adam_beta1=0.5", ["optimizer.adam_beta1", "moments"]),
        ("policy.router_aux_loss_coef=0.1", ["policy.router_aux_loss_coef (from 0.0 to 0.1)", "what is optimised"]),
        ("policy.quantization=nf4", ["policy.quantization (from null to \"nf4\")", "what is optimised"]),
        ("optimizer.name=adamw_8bit", ["optimizer.name (from \"adamw\" to \"adamw_8bit\")", "moments"]),
        ("grpo.num_generations=4", ["grpo.num_generations", "numbers of its steps"]),
        ("warmup.steps=9", ["warmup.steps", "numbers of its steps"]),
        ("grpo.implementation=logits", [implementation, "code"]),
    ] {
        let text = refused(&path, &[assignment, "optimizer.learning_rate=1e-5"]);
        assert!(words.iter().all(|word| text.contains(word)), "{assignment}: {text}");
        assert!(!text.contains("optimizer.learning_rate (from"), "{text}");
        assert!(text.contains("what may change is run, policy, logging"), "{text}");
    }
    // A run without a checkpoint cannot change, either.
    let new = folder.path().join("new");
    drop(Run::start(config(), Some(&new)).unwrap());
    edit(&new, "config.yaml", "implementation: fused", "implementation: logits");
    assert!(refused(&new, &[]).contains(implementation));
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
fn safe_changes_apply_on_resume_and_are_recorded() {
    let (_folder, path) = run_path();
    let mut config = config();
    config.run.save_total_limit = 0;
    config.optimizer.warmup_ratio = 0.0;
    stopped_after(config, &path, "Grpo 2");
    edit(&path, "config.yaml", "save_steps: 2\n", "save_steps: 3\n");
    let set = ["optimizer.learning_rate=1.5e-4", "optimizer.lr_scheduler_type=constant", "grpo.max_steps=6"];
    let (heard, _) = record(&mut resume(&path, &set).unwrap(), "");
    assert!(heard.contains(&"saved step-000006".to_owned()), "{heard:?}");
    let rates: Vec<_> =
        metrics(&path).iter().filter(|r| r.phase == RowKind::Grpo).filter_map(|r| r.get("learning_rate")).collect();
    assert!(rates[..2].iter().all(|rate| *rate > 3e-4) && rates[2..] == [1.5e-4; 4], "{rates:?}");

    let changes: Vec<serde_json::Value> = read_rows(&path.join("changes.jsonl")).unwrap();
    let row = |key, from: serde_json::Value, to: serde_json::Value| serde_json::json!({ "checkpoint": "step-000002", "key": key, "from": from, "to": to });
    let expected = [
        row("grpo.max_steps", 4.into(), 6.into()),
        row("optimizer.learning_rate", 7e-4.into(), 1.5e-4.into()),
        row("optimizer.lr_scheduler_type", "cosine".into(), "constant".into()),
        row("run.save_steps", 2.into(), 3.into()),
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
    let error = resume(&path, &["grpo.max_steps=1"]).err().unwrap().to_string();
    assert!(error.contains("grpo.max_steps") && error.contains("at least 2"), "{error}");
}
