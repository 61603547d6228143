//! The best checkpoint and early stopping.

use super::*;
use crate::card::{Weights, model_card};
use crate::checkpoint::CheckpointId;
use crate::checkpoint::tests::in_memory;

/// Returns a configuration that evaluates after every step by `eval/problems`, which never changes.
fn watched() -> TrainConfig {
    let mut config = config();
    config.grpo.max_steps = 8;
    config.eval.eval_steps = 1;
    config.run.save_steps = 1;
    config.run.save_total_limit = 1;
    config.run.metric_for_best_model = Some("eval/problems".into());
    config.run.early_stopping_patience = Some(3);
    config
}

fn names(run: &Run) -> Vec<String> {
    run.checkpoints.list().unwrap().iter().map(CheckpointId::to_string).collect()
}

fn summary(ending: Ending) -> Summary {
    match ending {
        Ending::Finished(summary) => *summary,
        Ending::Stopped { .. } => panic!("stopped"),
    }
}

#[test]
fn early_stopping_ends_the_run_and_keeps_the_best_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let mut run = Run::start(watched(), Some(&path)).unwrap();
    let found = summary(finish(&mut run).unwrap());
    // No evaluation improves; the first, before step 1, stays the best.
    assert_eq!((found.steps, found.stopped_early), (3, true));
    let best = found.best.unwrap();
    assert_eq!((best.step, best.value.0, best.early_stopping_patience_counter), (0, 4.0, 3));
    assert_eq!(names(&run), ["step-000000", "step-000003"]);
    drop(run);

    // The run is over, so resuming it does nothing.
    let mut again = Run::resume(&path, None, &[]).unwrap();
    let (heard, ending) = record(&mut again, "");
    assert_eq!(summary(ending).steps, 3);
    assert!(heard.iter().all(|event| !event.starts_with("Grpo ")), "{heard:?}");
    drop(again);

    // With more patience the run continues.
    let mut patient = Run::resume(&path, None, &assignments(&["run.early_stopping_patience=5"])).unwrap();
    assert_eq!(summary(finish(&mut patient).unwrap()).steps, 5);
    assert_eq!(names(&patient), ["step-000000", "step-000005"]);
}

#[test]
fn early_stopping_is_the_same_after_a_resume() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, cut) = (folder.path().join("whole"), folder.path().join("cut"));
    let expected = summary(finish(&mut Run::start(watched(), Some(&whole)).unwrap()).unwrap());
    stopped_after(watched(), &cut, "Grpo 2");
    let mut resumed = Run::resume(&cut, None, &[]).unwrap();
    assert_eq!(resumed.best().unwrap().early_stopping_patience_counter, 2);
    let found = summary(finish(&mut resumed).unwrap());
    assert_eq!((found.steps, found.best), (expected.steps, expected.best));
    let model = |path: &Path| std::fs::read(path.join("checkpoints/step-000003/model.safetensors")).unwrap();
    assert_eq!(model(&whole), model(&cut));
}

#[test]
fn the_best_weights_are_loaded_at_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = watched();
    config.run.load_best_model_at_end = true;
    let mut run = Run::start(config, Some(&folder.path().join("a"))).unwrap();
    finish(&mut run).unwrap();
    let weights = run.trainer().state().unwrap().policy;
    let saved = |step| in_memory(&run.checkpoints.read(CheckpointId::Grpo(step)).unwrap().1);
    let by_name = |mut tensors: Vec<models::NamedTensor>| {
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        tensors
    };
    assert_eq!(by_name(weights.clone()), saved(0).policy);
    assert_ne!(by_name(weights), saved(3).policy);
    assert_eq!(run.trainer().counters(), saved(3).counters);
}

#[test]
fn summary_and_card_describe_the_exported_weights() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = watched();
    config.run.load_best_model_at_end = true;
    let mut run = Run::start(config.clone(), Some(&folder.path().join("best"))).unwrap();
    let found = summary(finish(&mut run).unwrap());
    let rows: Vec<MetricsRow> = read_rows(&folder.path().join("best/metrics.jsonl")).unwrap();
    let reward = |step: u64| {
        let row = rows.iter().find(|row| row.phase == RowKind::Eval && row.step == step);
        row.and_then(|row| row.get("eval/reward")).unwrap()
    };
    assert_eq!((found.weights_of_step, found.best.as_ref().map(|best| best.step)), (Some(0), Some(0)));
    assert_eq!(found.eval_after["reward"], reward(0));
    let card = model_card(&config, &found, Weights { trained: 1, total: 1 }).unwrap();
    assert!(card.contains("The weights are those after step 0, the best by eval/"), "{card}");
    drop(run);
    // The default export has the best weights; `from` selects others, without the numbers of later steps.
    let of_export = |from: Option<&str>, to: &str| {
        let target = folder.path().join(to);
        Run::export(&folder.path().join("best"), from, &[], Some(&target)).unwrap();
        std::fs::read_to_string(target.join("README.md")).unwrap()
    };
    for (from, to, step) in [(None, "again", 0), (Some("step-000003"), "third", 3)] {
        let card = of_export(from, to);
        assert!(card.contains(&format!("trained with GRPO for {step} steps")), "{card}");
        assert!(card.contains(&format!("| reward | {:.4} | {:.4} |", reward(0), reward(step))), "{card}");
    }
    // Without `load_best_model_at_end`, the last weights are exported.
    config.run.load_best_model_at_end = false;
    let mut run = Run::start(config.clone(), Some(&folder.path().join("last"))).unwrap();
    let found = summary(finish(&mut run).unwrap());
    assert_eq!((found.weights_of_step, found.eval_after["reward"]), (None, reward(found.steps)));
    assert!(!model_card(&config, &found, Weights { trained: 1, total: 1 }).unwrap().contains("The weights are"));
}

#[test]
fn an_unknown_best_model_metric_ends_the_run_at_its_first_evaluation() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = watched();
    config.run.metric_for_best_model = Some("accuracy".into());
    let error = finish(&mut Run::start(config, Some(&folder.path().join("a"))).unwrap()).unwrap_err().to_string();
    assert!(error.contains("run.metric_for_best_model") && error.contains("eval/pass@1"), "{error}");
    for (key, change) in [
        ("run.early_stopping_patience", (|c| c.run.metric_for_best_model = None) as fn(&mut TrainConfig)),
        ("run.early_stopping_patience", |c| c.run.early_stopping_patience = Some(0)),
        ("run.early_stopping_threshold", |c| c.run.early_stopping_threshold = f64::NAN),
    ] {
        let mut config = watched();
        change(&mut config);
        assert!(config.validate().unwrap_err().to_string().contains(key), "{key}");
    }
}
