//! Reward programs, here shell scripts: answers and failures.

use crate::support::{config, failure, outcomes, refused, rewards};
use grpo_data::Item;
use grpo_rewards::{RewardInput, Rewards};
use serde_json::{Value, json};
use std::fs::read_to_string;
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Returns a reward `judge` that is a shell script, and its own folder, which is `$1`.
fn judge(script: &str, mut settings: Value) -> (TempDir, Rewards) {
    let folder = tempfile::tempdir().unwrap();
    settings["command"] = json!(["sh", "-c", script, "sh", folder.path()]);
    (folder, rewards(json!({"programs": {"judge": settings}})))
}

#[test]
fn a_program_receives_all_fields_and_answers_in_order() {
    let script = r#"for answer in 2 null '{"reward": 0.5}' '{"reward": null, "id": 3}' '{"error": "no idea"}' true false \
        '{"reward": true}' '{"reward": false}'; do read -r line; echo "$line" >> "$1/seen"; echo "$answer"; done"#;
    let (folder, rewards) = judge(script, json!({"weight": 2.0}));
    let found = outcomes(&rewards, &["a", "b", "c", "d", "e", "f", "g", "h", "i"]);
    assert_eq!(found[4], Err("it says: no idea".to_owned()));
    let found: Vec<Option<f32>> = found.into_iter().flatten().collect();
    assert_eq!(found, [Some(4.0), None, Some(1.0), None, Some(2.0), Some(0.0), Some(2.0), Some(0.0)]);
    let seen = read_to_string(folder.path().join("seen")).unwrap();
    let first: Value = serde_json::from_str(seen.lines().next().unwrap()).unwrap();
    let expected = json!({"id": 0, "prompt": "6 x 7?", "completion": "a", "answer": "42", "answers": ["42"], "columns": {}, "source": "data",
        "truncated": false, "completion_ids": [0, 0], "completion_tokens": 2, "remaining": 8});
    assert_eq!(first, expected);
}

#[test]
fn columns_and_messages_reach_the_program() {
    let (folder, rewards) = judge(r#"while read -r line; do echo "$line" > "$1/seen"; echo 1; done"#, json!({}));
    let messages = vec![json!({"role": "user", "content": "hi"})];
    let mut item = Item::new(grpo_data::Prompt::Messages { messages: messages.clone(), tools: None, documents: None });
    item.columns = std::sync::Arc::new(json!({"level": 3}).as_object().unwrap().clone());
    rewards.score(&[RewardInput { truncated: true, completion_ids: &[5, 6], ..RewardInput::new(&item, "x") }]);
    let seen: Value = serde_json::from_str(&read_to_string(folder.path().join("seen")).unwrap()).unwrap();
    assert_eq!((&seen["prompt"], &seen["columns"]), (&json!(messages), &json!({"level": 3})));
    assert_eq!((&seen["answer"], &seen["truncated"]), (&Value::Null, &json!(true)));
    assert_eq!((&seen["completion_ids"], &seen["completion_tokens"]), (&json!([5, 6]), &json!(2)));
}

#[test]
fn batches_of_parallel_workers_keep_their_order() {
    // The reward is the completion as a number; every start creates a file.
    let script = r#"touch "$1/$$"; while read -r line; do
        rest=${line#*'"completion":"'}; echo "${rest%%\"*}"; done"#;
    let (folder, rewards) = judge(script, json!({"batch_size": 3, "workers": 4}));
    let completions: Vec<String> = (0..50).map(|n| n.to_string()).collect();
    let completions: Vec<&str> = completions.iter().map(String::as_str).collect();
    for _ in 0..2 {
        let found: Vec<f32> = outcomes(&rewards, &completions).into_iter().map(|o| o.unwrap().unwrap()).collect();
        assert_eq!(found, (0..50).map(|n| n as f32).collect::<Vec<_>>());
    }
    let started = std::fs::read_dir(folder.path()).unwrap().count();
    assert!((1..=4).contains(&started), "{started} processes");
}

#[test]
fn a_missing_program_is_an_error_before_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("judge.py").display().to_string();
    let error = refused(json!({"programs": {"judge": {"command": [missing]}}}));
    assert!(error.contains("rewards.programs.judge.command") && error.contains("No such file"), "{error}");
    let error = refused(json!({"programs": {"judge": {"command": ["no-such-program"]}}}));
    assert!(error.contains("no program `no-such-program` in PATH"), "{error}");
    std::fs::write(&missing, "print(1)").unwrap();
    let error = refused(json!({"programs": {"judge": {"command": [missing]}}}));
    assert!(error.contains("not executable"), "{error}");
    let error = refused(json!({"programs": {"judge": {"command": ["no-such-judge --api-key S3CR3T-argument"]}}}));
    assert!(error.contains("no-such-judge") && !error.contains("S3CR3T"), "{error}");
    // A program with weight 0 is not checked.
    let off = config(json!({"exact": 1.0, "programs": {"judge": {"command": ["no-such-program"], "weight": 0.0}}}));
    assert!(Rewards::new(&off).is_ok());
}

/// A missing script fails only when the first completion is scored, which the probe before a run does.
#[test]
fn a_failing_program_fails_the_probe_with_its_last_stderr_lines() {
    let rewards = rewards(json!({"programs": {"judge": {"command": ["sh", "/nowhere/judge.sh"]}}}));
    let error = rewards.probe(&RewardInput::new(&Item::new("?"), "42")).unwrap_err().to_string();
    assert!(error.contains("`judge`") && error.contains("/nowhere/judge.sh"), "{error}");
}

/// Waits until the process whose id is in a file has ended.
fn assert_gone(file: &Path) {
    let id = read_to_string(file).unwrap().trim().to_owned();
    let limit = Instant::now() + Duration::from_secs(30);
    // An orphan stays a zombie until its new parent reaps it.
    let runs = || read_to_string(format!("/proc/{id}/stat")).is_ok_and(|stat| !stat.contains(") Z"));
    while runs() {
        assert!(Instant::now() < limit, "process {id} still runs");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_exited_program_is_restarted_for_the_remaining_completions() {
    // The first process dies after one answer; the second one does not.
    let script = r#"if [ -e "$1/second" ]; then while read -r line; do echo 2; done; fi
        touch "$1/second"; read -r line; echo 1; exit 3"#;
    let (_folder, rewards) = judge(script, json!({}));
    assert_eq!(outcomes(&rewards, &["a", "b", "c"]), [Ok(Some(1.0)), Ok(Some(2.0)), Ok(Some(2.0))]);
}

#[test]
fn a_program_that_always_exits_fails_with_status_and_stderr_and_is_retried() {
    let script = r#"echo x >> "$1/starts"; read -r line; echo "cannot import sympy" >&2; exit 3"#;
    let (folder, rewards) = judge(script, json!({}));
    for failed in outcomes(&rewards, &["a", "b"]) {
        let error = failed.unwrap_err();
        assert!(error.contains("exit status: 3") && error.contains("0 of 2 answers"), "{error}");
        assert!(error.contains("cannot import sympy"), "{error}");
    }
    assert_eq!(read_to_string(folder.path().join("starts")).unwrap().lines().count(), 2, "one more try");
    outcomes(&rewards, &["a"]);
    assert_eq!(read_to_string(folder.path().join("starts")).unwrap().lines().count(), 4, "the next batch");
}

#[test]
fn garbage_fails_the_rest_of_the_batch_and_never_shifts_an_answer() {
    for (line, said) in [
        ("loading the model", "got `loading the model`"),
        ("[1]", "expected a number, null"),
        ("1e999", "expected a line of JSON"),
        ("NaN", "expected a line of JSON"),
        (r#"{"score": 1}"#, "expected a number, null"),
        (r#"{"id": 7, "reward": 1}"#, "id 1, got id 7"),
        (r#"{"reward": 1, "reward": 5}"#, "the key \"reward\" is there twice"),
        ("\\377", "not UTF-8"),
        ("", "expected a line of JSON"),
    ] {
        let script = format!(r#"read -r l; echo 1; printf '{line}\n'; while read -r l; do echo 9; done"#);
        let (_folder, rewards) = judge(&script, json!({}));
        let found = outcomes(&rewards, &["a", "b", "c"]);
        assert_eq!(found[0], Ok(Some(1.0)), "{line}");
        for failed in &found[1..] {
            let error = failed.as_ref().expect_err("an answer that may belong to another completion");
            assert!(error.contains(said), "{line}: {error}");
        }
        // A new process scores the next batch.
        assert_eq!(outcomes(&rewards, &["a"]), [Ok(Some(1.0))], "{line}");
    }
}

#[test]
fn an_unexpected_line_is_detected_before_the_next_batch() {
    let script = r#"while read -r line; do echo 1; echo 5; touch "$1/said"; done"#;
    let (folder, rewards) = judge(script, json!({}));
    assert_eq!(outcomes(&rewards, &["a"]), [Ok(Some(1.0))]);
    while !folder.path().join("said").exists() {
        std::thread::sleep(Duration::from_millis(2));
    }
    // The reader thread receives the line a moment after it is written.
    std::thread::sleep(Duration::from_secs(1));
    let error = failure(&rewards);
    assert!(error.contains("lines that nobody has asked for: `5`"), "{error}");
}

#[test]
fn too_few_lines_end_in_an_exit_or_a_timeout() {
    // Reads all lines, answers one and exits, also when it is sent the rest.
    let script = r#"read -r line; echo 1; cat > /dev/null & sleep 0.05; exit 0"#;
    let (_folder, rewards) = judge(script, json!({}));
    let found = outcomes(&rewards, &["a", "b", "c", "d"]);
    assert_eq!(found[..2], [Ok(Some(1.0)), Ok(Some(1.0))], "one before the repetition, one after");
    let error = found[2].as_ref().unwrap_err();
    assert!(error.contains("exit status: 0") && error.contains("2 of 4 answers"), "{error}");
    assert!(found[3].is_err());
}

#[test]
fn a_program_and_its_children_end_when_the_reward_is_dropped() {
    let script = r#"trap '' TERM INT HUP; echo $$ > "$1/id"; sleep 1000 & echo $! > "$1/child"; read -r line; echo 1
        exec sleep 1000"#;
    let (folder, rewards) = judge(script, json!({}));
    assert_eq!(outcomes(&rewards, &["a"]), [Ok(Some(1.0))]);
    let id = read_to_string(folder.path().join("id")).unwrap();
    let process = Path::new("/proc").join(id.trim());
    assert!(process.exists() || !cfg!(target_os = "linux"));
    drop(rewards);
    assert!(!process.exists(), "it is killed, and no zombie");
    assert_gone(&folder.path().join("child"));
}

#[test]
fn large_batches_do_not_block_on_full_pipes() {
    // The program answers while it reads, and both directions are larger than a pipe.
    let note = "x".repeat(300);
    let script = format!(r#"while read -r line; do echo '{{"reward": 1, "note": "{note}"}}'; done"#);
    let (_folder, rewards) = judge(&script, json!({"batch_size": 1000}));
    let found = outcomes(&rewards, &vec![note.as_str(); 1000]);
    assert!(found.iter().all(|outcome| *outcome == Ok(Some(1.0))));
}

/// Returns the memory of this process in bytes.
#[cfg(target_os = "linux")]
fn memory() -> u64 {
    let pages = read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
#[ignore = "GRPO_TESTS=all"]
#[cfg(target_os = "linux")]
fn output_between_batches_is_bounded_and_fails_the_next_batch() {
    for flood in [
        "exec yes 1.0",
        "yes 1.0 & while read -r line; do echo 1; done",
        "exec yes ''",
        "while :; do printf %65536s x; done",
    ] {
        let (_folder, rewards) = judge(&format!("read -r line; echo 1; {flood}"), json!({"timeout": 5}));
        assert_eq!(outcomes(&rewards, &["a"]), [Ok(Some(1.0))], "{flood}");
        let before = memory();
        std::thread::sleep(Duration::from_secs(1));
        let grown = memory().saturating_sub(before);
        assert!(grown < 32 << 20, "{flood}: {grown} bytes");
        let error = failure(&rewards);
        assert!(error.contains("nobody has asked for") || error.contains("1048576 bytes"), "{flood}: {error}");
    }
}

#[test]
fn environment_references_reach_the_program_but_no_message() {
    let folder = tempfile::tempdir().unwrap();
    let path = std::env::var("PATH").unwrap();
    let script =
        r#"read -r line; echo "$KEY|$PLAIN|$1" > "$2/seen"; echo "I was given $KEY and $1" >&2; echo "$KEY $PLAIN $1""#;
    let command = json!(["sh", "-c", script, "sh", "--path=${PATH}", folder.path()]);
    let env = json!({"KEY": "<${PATH}>", "PLAIN": "S3CR3T-plain $${PATH}"});
    let rewards = rewards(json!({"programs": {"judge": {"command": command, "env": env}}}));
    let error = failure(&rewards);
    let seen = read_to_string(folder.path().join("seen")).unwrap();
    assert_eq!(seen.trim(), format!("<{path}>|S3CR3T-plain ${{PATH}}|--path={path}"));
    assert!(!error.contains(&path) && !error.contains("S3CR3T") && error.contains("(hidden)"), "{error}");
}

#[test]
fn errors_of_missing_variables_name_the_key() {
    for (program, key) in [
        (json!({"command": ["sh", "${GRPO_NO_SUCH}"]}), "rewards.programs.judge.command"),
        (json!({"command": ["sh"], "env": {"KEY": "a${GRPO_NO_SUCH}"}}), "rewards.programs.judge.env.KEY"),
    ] {
        let error = refused(json!({"programs": {"judge": program}}));
        assert!(error.contains(&format!("`{key}`")) && error.contains("no variable GRPO_NO_SUCH"), "{error}");
    }
    let error = refused(json!({"programs": {"judge": {"command": ["sh", "(hidden)"]}}}));
    assert!(error.contains("rewards.programs.judge.command") && error.contains("left out when"), "{error}");
}

/// Tests that take seconds: `cargo fast` skips modules of this name.
mod slow {
    use super::*;

    #[test]
    fn a_hanging_program_is_killed_with_its_children() {
        let script = r#"read -r line; echo 1; sleep 1000 & echo $! > "$1/child"; wait"#;
        let (folder, rewards) = judge(script, json!({"timeout": 3}));
        let began = Instant::now();
        let found = outcomes(&rewards, &["a", "b", "c"]);
        assert!(began.elapsed() < Duration::from_secs(60), "it did not wait for the sleep");
        assert_eq!(found[0], Ok(Some(1.0)));
        for late in &found[1..] {
            let error = late.as_ref().unwrap_err();
            assert!(error.contains("given 1 of 3 answers in 3 seconds"), "{error}");
        }
        assert_gone(&folder.path().join("child"));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn excess_standard_error_is_dropped_without_failures() {
        for flood in ["yes eeeeeeee", "tr '\\0' e < /dev/zero"] {
            let (_folder, rewards) = judge(&format!("{flood} >&2 & while read -r line; do echo 1; done"), json!({}));
            let before = memory();
            for _ in 0..3 {
                assert_eq!(outcomes(&rewards, &["a", "b"]), [Ok(Some(1.0)), Ok(Some(1.0))], "{flood}");
                std::thread::sleep(Duration::from_millis(300));
            }
            let grown = memory().saturating_sub(before);
            assert!(grown < 32 << 20, "{flood}: {grown} bytes");
        }
    }
}
