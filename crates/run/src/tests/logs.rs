//! Logs that do not match the checkpoint are detected before they are truncated.

use super::*;

/// Returns a finished run, which the tests resume from step 2.
fn done() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let mut config = config();
    (config.run.log_completions_steps, config.run.num_completions_to_print) = (1, 2);
    finish(&mut Run::start(config, Some(&path)).unwrap()).unwrap();
    (folder, path)
}

/// Applies `change` to a log and resumes from step 2. Returns the error; the log must stay as it is.
fn refused(log: &str, change: impl Fn(&mut Vec<String>)) -> String {
    let (_folder, path) = done();
    let all = |log: &str| std::fs::read_to_string(path.join(log)).unwrap();
    let mut lines: Vec<String> = all(log).split_inclusive('\n').map(str::to_owned).collect();
    change(&mut lines);
    assert_ne!(lines.concat(), all(log));
    std::fs::write(path.join(log), lines.concat()).unwrap();
    let before = (all("metrics.jsonl"), all("completions.jsonl"));
    let error = Run::resume(&path, Some("step-000002"), &[]).err().unwrap().to_string();
    assert!(before == (all("metrics.jsonl"), all("completions.jsonl")), "nothing is cut: {error}");
    assert!(path.join("summary.json").exists() && path.join("checkpoints/step-000004").exists(), "{error}");
    assert!(error.contains(log) && error.contains("step-000002") && error.contains("--from"), "{error}");
    error
}

// Rows of metrics.jsonl: three of the warm-up, eval 0, GRPO 1 and 2, eval 2, GRPO 3 and 4, eval 4.

#[test]
fn logs_that_do_not_end_with_a_line_are_refused() {
    let text = refused("metrics.jsonl", |lines| {
        lines[6].pop();
        lines[6].push(' ');
    });
    assert!(text.contains("line 7") && text.contains("does not end"), "{text}");
}

#[test]
fn invalid_log_rows_are_refused() {
    let text = refused("metrics.jsonl", |lines| lines[1] = format!("{}\n", "x".repeat(lines[1].len() - 1)));
    assert!(text.contains("line 2"), "{text}");
}

#[test]
fn log_rows_in_a_wrong_order_are_refused() {
    let text = refused("metrics.jsonl", |lines| lines.swap(0, 1));
    assert!(text.contains("line 1") && text.contains("step 2 of the warm-up"), "{text}");
    let text = refused("metrics.jsonl", |lines| lines.swap(2, 3));
    assert!(text.contains("comes after the warm-up"), "{text}");
    let text = refused("metrics.jsonl", |lines| lines[6] = lines[6].replace("\"step\":2", "\"step\":1"));
    assert!(text.contains("line 7") && text.contains("evaluation"), "{text}");
}

#[test]
fn log_rows_of_another_run_are_refused() {
    let text = refused("metrics.jsonl", |lines| {
        let (before, after) = lines[5].split_once("\"num_tokens\":").unwrap();
        let other = if after.starts_with('9') { '8' } else { '9' };
        lines[5] = format!("{before}\"num_tokens\":{other}{}", &after[1..]);
    });
    assert!(text.contains("tokens"), "{text}");
    let text = refused("completions.jsonl", |lines| lines[0] = lines[0].replace("\"step\":1", "\"step\":3"));
    assert!(text.contains("line 1") && text.contains("completion of step 3"), "{text}");
}

#[test]
fn logs_that_are_not_regular_files_are_refused() {
    let (_folder, path) = done();
    std::fs::remove_file(path.join("metrics.jsonl")).unwrap();
    std::fs::create_dir(path.join("metrics.jsonl")).unwrap();
    let error = Run::resume(&path, None, &[]).err().unwrap();
    let Error::File(grpo_files::Error::Io { path, source, .. }) = error else { panic!("{error}") };
    assert!(path.ends_with("metrics.jsonl") && source.to_string().contains("a folder"), "{source}");
}
