//! Logs that do not match the checkpoint are detected before they are truncated.

use super::*;

#[test]
fn logs_that_do_not_match_the_checkpoint_are_refused_and_not_cut() {
    type Case = (&'static str, fn(&mut Vec<String>), &'static [&'static str]);
    // Rows of metrics.jsonl: three of the warm-up, eval 0, GRPO 1 and 2, eval 2, GRPO 3 and 4, eval 4.
    let cases: [Case; 7] = [
        ("metrics.jsonl", |lines| lines[6] = lines[6].replace('\n', " "), &["line 7", "does not end"]),
        ("metrics.jsonl", |lines| lines[1] = format!("{}\n", "x".repeat(lines[1].len() - 1)), &["line 2"]),
        ("metrics.jsonl", |lines| lines.swap(0, 1), &["line 1", "step 2 of the warm-up"]),
        ("metrics.jsonl", |lines| lines.swap(2, 3), &["comes after the warm-up"]),
        ("metrics.jsonl", |lines| lines[6] = lines[6].replace("\"step\":2", "\"step\":1"), &["line 7", "evaluation"]),
        (
            "metrics.jsonl",
            |lines| {
                let (before, after) = lines[5].split_once("\"num_tokens\":").unwrap();
                let other = if after.starts_with('9') { '8' } else { '9' };
                lines[5] = format!("{before}\"num_tokens\":{other}{}", &after[1..]);
            },
            &["tokens"],
        ),
        (
            "completions.jsonl",
            |lines| lines[0] = lines[0].replace("\"step\":1", "\"step\":3"),
            &["line 1", "completion of step 3"],
        ),
    ];
    let (_folder, path) = run_path();
    let mut config = config();
    (config.run.log_completions_steps, config.run.num_completions_to_print) = (1, 2);
    trained(config, &path);
    let all = |log: &str| std::fs::read_to_string(path.join(log)).unwrap();
    for (log, change, words) in cases {
        let original = all(log);
        let mut lines: Vec<String> = original.split_inclusive('\n').map(str::to_owned).collect();
        change(&mut lines);
        assert_ne!(lines.concat(), original);
        std::fs::write(path.join(log), lines.concat()).unwrap();
        let error = Run::resume(&path, Some("step-000002"), &[]).err().unwrap().to_string();
        assert_eq!(all(log), lines.concat(), "nothing is cut: {error}");
        assert!(path.join("summary.json").exists() && path.join("checkpoints/step-000004").exists(), "{error}");
        for words in [&[log, "step-000002", "--from"], words].concat() {
            assert!(error.contains(words), "{words}: {error}");
        }
        std::fs::write(path.join(log), original).unwrap();
    }

    std::fs::remove_file(path.join("metrics.jsonl")).unwrap();
    std::fs::create_dir(path.join("metrics.jsonl")).unwrap();
    let error = resume(&path, &[]).err().unwrap();
    let Error::File(grpo_files::Error::Io { path, source, .. }) = error else { panic!("{error}") };
    assert!(path.ends_with("metrics.jsonl") && source.to_string().contains("a folder"), "{source}");
}
