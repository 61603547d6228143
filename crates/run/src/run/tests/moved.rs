//! A run folder that is moved or deleted during the run.

use super::*;

/// Applies `act` to the folder of a run after `row`. Returns the error, with which the run must end.
fn interfere(row: &'static str, act: impl Fn(&Path)) -> (TempDir, PathBuf, String) {
    let (folder, path) = run_path();
    let mut run = Run::start(config(), Some(&path)).unwrap();
    let error = run.run(&mut after(row, || act(&path)), &AtomicBool::new(false)).unwrap_err();
    assert!(matches!(error, Error::Moved { .. }), "{row}: {error}");
    (folder, path, error.to_string())
}

#[test]
fn a_deleted_or_replaced_run_folder_is_not_written_to() {
    let (_folder, path, text) = interfere("Grpo 1", |path| std::fs::remove_dir_all(path).unwrap());
    assert!(!path.exists() && text.contains("step-000000"), "{text}");
    let (_folder, path, _) = interfere("Grpo 1", |path| {
        std::fs::rename(path, path.with_file_name("b")).unwrap();
        std::fs::create_dir(path).unwrap();
    });
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0);
    // Before any checkpoint.
    let (_folder, path, text) = interfere("Warmup 1", |path| std::fs::remove_dir_all(path).unwrap());
    assert!(!path.exists() && text.contains("no checkpoint had been saved"), "{text}");
}

#[test]
fn a_log_that_is_deleted_ends_the_run() {
    for name in ["metrics.jsonl", "completions.jsonl"] {
        let (_folder, path, _) = interfere("Grpo 1", |path| std::fs::remove_file(path.join(name)).unwrap());
        assert!(!path.join(name).exists());
    }
}

/// Tests that take seconds: `cargo fast` skips modules of this name.
mod slow {
    use super::*;

    #[test]
    fn a_moved_run_folder_ends_the_run_and_can_be_resumed() {
        // Before a row is written, and before the last checkpoint.
        for row in ["Grpo 3", "Eval 4"] {
            let elsewhere = |path: &Path| path.with_file_name("elsewhere");
            let (_folder, path, text) = interfere(row, |path| std::fs::rename(path, elsewhere(path)).unwrap());
            assert!(text.contains("checkpoints/step-000002") && text.contains("--resume"), "{text}");
            assert!(!path.exists(), "nothing is made again in its place");
            finish(&mut resume(&elsewhere(&path), &[]).unwrap()).unwrap();
            assert_undisturbed(config(), &elsewhere(&path));
        }
    }
}
