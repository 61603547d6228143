//! The best checkpoint and early stopping.

use super::*;
use crate::card::{Weights, model_card};
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

#[test]
fn early_stopping_ends_the_run_and_keeps_the_best_checkpoint() {
    let (_folder, path) = run_path();
    let mut run = Run::start(watched(), Some(&path)).unwrap();
    let found = finish(&mut run).unwrap();
    // No evaluation improves; the first, before step 1, stays the best.
    assert_eq!((found.steps, found.stopped_early), (3, true));
    let best = found.best.unwrap();
    assert_eq!((best.step, best.value.0, best.early_stopping_patience_counter), (0, 4.0, 3));
    assert_eq!(names(&run), ["step-000000", "step-000003"]);
    drop(run);

    // The run is over, so resuming it does nothing.
    let (heard, ending) = record(&mut resume(&path, &[]).unwrap(), "");
    assert!(matches!(ending, Ending::Finished(summary) if summary.steps == 3));
    assert!(heard.iter().all(|event| !event.starts_with("Grpo ")), "{heard:?}");

    // With more patience the run continues.
    let mut patient = resume(&path, &["run.early_stopping_patience=5"]).unwrap();
    assert_eq!(finish(&mut patient).unwrap().steps, 5);
    assert_eq!(names(&patient), ["step-000000", "step-000005"]);
}

#[test]
fn early_stopping_is_the_same_after_a_resume() {
    let (_folder, path) = run_path();
    let whole = path.with_file_name("whole");
    let expected = finish(&mut Run::start(watched(), Some(&whole)).unwrap()).unwrap();
    stopped_after(watched(), &path, "Grpo 2");
    let mut resumed = resume(&path, &[]).unwrap();
    assert_eq!(resumed.best().unwrap().early_stopping_patience_counter, 2);
    let found = finish(&mut resumed).unwrap();
    assert_eq!((found.steps, found.best), (expected.steps, expected.best));
    let model = |path: &Path| std::fs::read(path.join("checkpoints/step-000003/model.safetensors")).unwrap();
    assert_eq!(model(&whole), model(&path));
}

#[test]
fn the_best_weights_are_loaded_at_the_end_and_described() {
    let (_folder, path) = run_path();
    let mut config = watched();
    config.run.load_best_model_at_end = true;
    let mut run = Run::start(config.clone(), Some(&path)).unwrap();
    let found = finish(&mut run).unwrap();
    let mut weights = run.trainer().state().unwrap().policy;
    weights.sort_by(|a, b| a.name.cmp(&b.name));
    let saved = |step| in_memory(&run.checkpoints.read(CheckpointId::Grpo(step)).unwrap().1);
    assert_eq!(weights, saved(0).policy);
    assert_ne!(weights, saved(3).policy);
    assert_eq!(run.trainer().counters(), saved(3).counters);

    let rows = metrics(&path);
    let reward = |step: u64| {
        let row = rows.iter().find(|row| row.phase == RowKind::Eval && row.step == step);
        row.and_then(|row| row.get("eval/reward")).unwrap()
    };
    assert_eq!((found.weights_of_step, found.best.as_ref().map(|best| best.step)), (Some(0), Some(0)));
    assert_eq!(found.eval_after["reward"], reward(0));
    let card = |summary: &Summary| model_card(&config, summary, Weights { trained: 1, total: 1 }).unwrap();
    assert!(card(&found).contains("The weights are those after step 0, the best by eval/"), "{}", card(&found));
    drop(run);
    // The default export has the best weights; `from` selects others, without the numbers of later steps.
    for (from, to, step) in [(None, "again", 0), (Some("step-000003"), "third", 3)] {
        let target = path.with_file_name(to);
        Run::export(&path, from, &[], Some(&target)).unwrap();
        let card = std::fs::read_to_string(target.join("README.md")).unwrap();
        assert!(card.contains(&format!("trained with GRPO for {step} steps")), "{card}");
        assert!(card.contains(&format!("| reward | {:.4} | {:.4} |", reward(0), reward(step))), "{card}");
    }
    // Without `load_best_model_at_end`, the last weights are exported.
    let last = Run::start(watched(), Some(&path.with_file_name("last")));
    let found = finish(&mut last.unwrap()).unwrap();
    assert_eq!((found.weights_of_step, found.eval_after["reward"]), (None, reward(found.steps)));
    assert!(!card(&found).contains("The weights are"));
}
