//! Runs that diverge, and the guards against it.

use super::*;
use crate::checkpoint::tests::in_memory;

/// A learning rate at which one update overflows f32.
const TOO_FAST: f64 = 1e40;

/// Returns a configuration with a gradient at every step, independent of rewards.
fn with_gradients() -> TrainConfig {
    let mut config = config();
    config.loss.entropy_coef = 0.1;
    config
}

#[test]
fn non_finite_weights_replace_no_checkpoint_and_the_error_names_a_fix() {
    let (_folder, path) = run_path();
    let names = || {
        let entries = std::fs::read_dir(path.join("checkpoints")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect::<Vec<_>>()
    };
    let mut config = with_gradients();
    (config.run.save_steps, config.run.save_total_limit) = (1, 1);
    stopped_after(config, &path, "Grpo 2");
    let faster = format!("optimizer.learning_rate={TOO_FAST:e}");
    let text = finish(&mut resume(&path, &[&faster]).unwrap()).unwrap_err().to_string();
    assert_eq!(names(), ["step-000002"]);
    let command =
        format!("grpo train --resume {} --from step-000002 --set optimizer.learning_rate=5e39", path.display());
    assert!(text.contains("not finite at optimizer step") && text.contains(&command), "{text}");
    assert!(text.contains("optimizer.max_grad_norm") && text.contains("optimizer.skip_grad_norm"), "{text}");
    // Only finite checkpoints were left, and the suggested command finishes the run.
    let slower = assignments(&["optimizer.learning_rate=1e-4"]);
    finish(&mut Run::resume(&path, Some("step-000002"), &slower).unwrap()).unwrap();
    assert_eq!(names(), ["step-000004"]);
}

#[test]
fn a_warm_up_that_diverges_names_its_own_learning_rate() {
    let (_folder, path) = run_path();
    let mut config = config();
    config.warmup.optimizer.learning_rate = TOO_FAST;
    let error = finish(&mut Run::start(config, Some(&path)).unwrap()).unwrap_err();
    assert!(matches!(&error, Error::Diverged { last_finite: None, .. }), "{error}");
    assert!(error.to_string().contains("--set warmup.optimizer.learning_rate=5e39"), "{error}");
}

/// Returns the metric `skipped_updates` of all GRPO steps.
fn skipped(path: &Path) -> Vec<Option<f64>> {
    let rows = metrics(path).into_iter().filter(|row| row.phase == RowKind::Grpo);
    rows.map(|row| row.get("skipped_updates")).collect()
}

#[test]
fn skipped_updates_are_counted_across_checkpoints_and_limited() {
    let (_folder, path) = run_path();
    let mut config = with_gradients();
    config.optimizer.settings.skip_grad_norm = Some(1e-30);
    config.optimizer.max_consecutive_skips = 4;
    stopped_after(config, &path, "Grpo 2");
    let error = finish(&mut resume(&path, &[]).unwrap()).unwrap_err();
    let Error::Diverged { cause, .. } = &error else { panic!("{error}") };
    assert!(matches!(**cause, grpo_trainer::Error::TooManySkips { skipped: 4, .. }), "{error}");
    assert!(error.to_string().contains("--from step-000002"), "{error}");
    assert_eq!(skipped(&path), [Some(1.0); 3]);
    let read = |step| in_memory(&Checkpoints::new(path.join("checkpoints")).read(CheckpointId::Grpo(step)).unwrap().1);
    assert_eq!((read(0).policy, read(0).optimizer), (read(2).policy, read(2).optimizer));
    // Without the limit, no update is skipped and the run finishes.
    finish(&mut resume(&path, &["optimizer.skip_grad_norm=null"]).unwrap()).unwrap();
}

#[test]
fn an_inactive_skip_grad_norm_changes_nothing() {
    let (_folder, path) = run_path();
    let mut guarded = with_gradients();
    guarded.optimizer.settings.skip_grad_norm = Some(1e30);
    trained(guarded, &path);
    assert_undisturbed(with_gradients(), &path);
    assert_eq!((skipped(&path), skipped(&path.with_file_name("whole"))), (vec![Some(0.0); 4], vec![None; 4]));
}
