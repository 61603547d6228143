//! Reward programs, here shell scripts: answers and failures.

use crate::support::{config, refused, rewards, score};
use data::Item;
use rewards::{RewardInput, Rewards};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// Returns a reward `judge` that is a shell script; `$1` is its own folder.
fn judge(script: &str, folder: &Path, settings: Value) -> Rewards {
    let mut program = json!({"command": ["sh", "-c", script, "sh", folder.display().to_string()]});
    program.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
    rewards(json!({"programs": {"judge": program}}))
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn item() -> Item {
    Item::new("6 x 7?").with_answer("42")
}

/// Returns the total of each completion, or the message of its failure.
fn outcomes(rewards: &Rewards, completions: &[&str]) -> Vec<Result<Option<f32>, String>> {
    let outcome = |reward: rewards::Reward| match reward.failures.first() {
        None => Ok(reward.total),
        Some((index, failure)) => {
            assert_eq!((*index, reward.total), (0, None));
            Err(failure.to_string())
        }
    };
    score(rewards, &item(), completions).into_iter().map(outcome).collect()
}

#[test]
fn a_program_receives_all_fields_and_answers_in_order() {
    let folder = folder();
    let script = r#"while read -r line; do echo "$line" >> "$1/seen"; case "$line" in
        *'"completion":"null"'*) echo null;; *'"completion":"object"'*) echo '{"reward": 0.5}';;
        *'"completion":"error"'*) echo '{"error": "no idea"}';; *'"completion":"none"'*) echo '{"reward": null, "id": 3}';;
        *) echo 2;; esac; done"#;
    let rewards = judge(script, folder.path(), json!({"weight": 2.0}));
    let found = outcomes(&rewards, &["a", "null", "object", "none", "error", "b"]);
    let error = "it says: no idea".to_owned();
    assert_eq!(found, [Ok(Some(4.0)), Ok(None), Ok(Some(1.0)), Ok(None), Err(error), Ok(Some(4.0))]);
    let seen = std::fs::read_to_string(folder.path().join("seen")).unwrap();
    let first: Value = serde_json::from_str(seen.lines().next().unwrap()).unwrap();
    let expected = json!({"id": 0, "prompt": "6 x 7?", "completion": "a", "answer": "42", "answers": ["42"], "columns": {}, "source": "data",
        "truncated": false, "completion_ids": [0, 0], "completion_tokens": 2, "remaining": 5});
    assert_eq!(first, expected);
}

#[test]
fn rewards_true_and_false_are_1_and_0() {
    let folder = folder();
    let script = r#"while read -r line; do case "$line" in
        *'"completion":"a"'*) echo '{"reward": true}';; *'"completion":"b"'*) echo '{"reward": false}';;
        *'"completion":"c"'*) echo true;; *) echo false;; esac; done"#;
    let found = outcomes(&judge(script, folder.path(), json!({"weight": 2.0})), &["a", "b", "c", "d"]);
    assert_eq!(found, [Ok(Some(2.0)), Ok(Some(0.0)), Ok(Some(2.0)), Ok(Some(0.0))]);
}

#[test]
fn columns_and_messages_reach_the_program() {
    let folder = folder();
    let rewards = judge(r#"while read -r line; do echo "$line" > "$1/seen"; echo 1; done"#, folder.path(), json!({}));
    let messages = vec![json!({"role": "user", "content": "hi"})];
    let mut item = Item::new(data::Prompt::Messages { messages: messages.clone(), tools: None, documents: None });
    item.columns = std::sync::Arc::new(json!({"level": 3}).as_object().unwrap().clone());
    rewards.score(&[RewardInput {
        item: &item,
        completion: "x",
        truncated: true,
        completion_ids: &[5, 6],
        opens_think: false,
    }]);
    let seen: Value = serde_json::from_str(&std::fs::read_to_string(folder.path().join("seen")).unwrap()).unwrap();
    assert_eq!((&seen["prompt"], &seen["columns"]), (&json!(messages), &json!({"level": 3})));
    assert_eq!((&seen["answer"], &seen["truncated"]), (&Value::Null, &json!(true)));
    assert_eq!((&seen["completion_ids"], &seen["completion_tokens"]), (&json!([5, 6]), &json!(2)));
}

#[test]
fn batches_of_parallel_workers_keep_their_order() {
    let folder = folder();
    // The reward is the completion as a number; every start creates a file.
    let script = r#"touch "$1/$$"; while read -r line; do
        rest=${line#*'"completion":"'}; echo "${rest%%\"*}"; done"#;
    let rewards = judge(script, folder.path(), json!({"batch_size": 3, "workers": 4}));
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
    let folder = folder();
    let missing = folder.path().join("judge.py").display().to_string();
    let error = refused(json!({"programs": {"judge": {"command": [missing]}}}));
    assert!(error.contains("rewards.programs.judge.command") && error.contains("No such file"), "{error}");
    let error = refused(json!({"programs": {"judge": {"command": ["no-such-program"]}}}));
    assert!(error.contains("no program `no-such-program` in PATH"), "{error}");
    std::fs::write(&missing, "print(1)").unwrap();
    let error = refused(json!({"programs": {"judge": {"command": [missing]}}}));
    assert!(error.contains("not executable"), "{error}");
    // A program with weight 0 is not checked.
    let off = config(json!({"exact": 1.0, "programs": {"judge": {"command": ["no-such-program"], "weight": 0.0}}}));
    assert!(Rewards::new(&off).is_ok());
}

/// A missing script fails only when the first completion is scored, which the probe before a run does.
#[test]
fn a_failing_program_fails_the_probe_with_its_last_stderr_lines() {
    let rewards = rewards(json!({"programs": {"judge": {"command": ["sh", "/nowhere/judge.sh"]}}}));
    let item = item();
    let input =
        RewardInput { item: &item, completion: "42", truncated: false, completion_ids: &[0; 3], opens_think: false };
    let error = rewards.probe(&input).unwrap_err().to_string();
    assert!(error.contains("`judge`") && error.contains("/nowhere/judge.sh"), "{error}");
}

#[test]
fn a_hanging_program_is_killed_with_its_children() {
    let folder = folder();
    let script = r#"read -r line; echo 1; sleep 1000 & echo $! > "$1/child"; wait"#;
    let rewards = judge(script, folder.path(), json!({"timeout": 0.5}));
    let began = Instant::now();
    let found = outcomes(&rewards, &["a", "b", "c"]);
    assert!(began.elapsed() < Duration::from_secs(60), "it did not wait for the sleep");
    assert_eq!(found[0], Ok(Some(1.0)));
    for late in &found[1..] {
        let error = late.as_ref().unwrap_err();
        assert!(error.contains("answered 1 of 3 completions in 0.5 seconds"), "{error}");
    }
    assert_gone(&folder.path().join("child"));
}

/// Waits until the process whose id is in a file has ended.
fn assert_gone(file: &Path) {
    let id = std::fs::read_to_string(file).unwrap().trim().to_owned();
    let limit = Instant::now() + Duration::from_secs(30);
    // An orphan stays a zombie until its new parent reaps it.
    let runs = || std::fs::read_to_string(format!("/proc/{id}/stat")).is_ok_and(|stat| !stat.contains(") Z"));
    while runs() {
        assert!(Instant::now() < limit, "process {id} still runs");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_exited_program_is_restarted_for_the_remaining_completions() {
    let folder = folder();
    // The first process dies after one answer; the second one does not.
    let script = r#"if [ -e "$1/second" ]; then while read -r line; do echo 2; done; fi
        touch "$1/second"; read -r line; echo 1; exit 3"#;
    let rewards = judge(script, folder.path(), json!({}));
    assert_eq!(outcomes(&rewards, &["a", "b", "c"]), [Ok(Some(1.0)), Ok(Some(2.0)), Ok(Some(2.0))]);
}

#[test]
fn a_program_that_always_exits_fails_with_status_and_stderr_and_is_retried() {
    let folder = folder();
    let script = r#"echo x >> "$1/starts"; read -r line; echo "cannot import sympy" >&2; exit 3"#;
    let rewards = judge(script, folder.path(), json!({}));
    for failed in outcomes(&rewards, &["a", "b"]) {
        let error = failed.unwrap_err();
        assert!(error.contains("exit status: 3") && error.contains("0 of 2 answers"), "{error}");
        assert!(error.contains("cannot import sympy"), "{error}");
    }
    assert_eq!(std::fs::read_to_string(folder.path().join("starts")).unwrap().lines().count(), 2, "one more try");
    outcomes(&rewards, &["a"]);
    assert_eq!(std::fs::read_to_string(folder.path().join("starts")).unwrap().lines().count(), 4, "the next batch");
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
        let folder = folder();
        let script = format!(r#"read -r l; echo 1; printf '{line}\n'; while read -r l; do echo 9; done"#);
        let rewards = judge(&script, folder.path(), json!({}));
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
    let folder = folder();
    let script = r#"while read -r line; do echo 1; echo 5; touch "$1/said"; done"#;
    let rewards = judge(script, folder.path(), json!({}));
    assert_eq!(outcomes(&rewards, &["a"]), [Ok(Some(1.0))]);
    while !folder.path().join("said").exists() {
        std::thread::sleep(Duration::from_millis(2));
    }
    // The reader thread receives the line a moment after it is written.
    std::thread::sleep(Duration::from_millis(300));
    let error = outcomes(&rewards, &["b"])[0].clone().unwrap_err();
    assert!(error.contains("lines that nobody has asked for: `5`"), "{error}");
}

#[test]
fn too_few_lines_end_in_an_exit_or_a_timeout() {
    let folder = folder();
    // Reads all lines, answers one and exits, also when it is sent the rest.
    let script = r#"read -r line; echo 1; cat > /dev/null & sleep 0.05; exit 0"#;
    let rewards = judge(script, folder.path(), json!({}));
    let found = outcomes(&rewards, &["a", "b", "c", "d"]);
    assert_eq!(found[..2], [Ok(Some(1.0)), Ok(Some(1.0))], "one before the repetition, one after");
    let error = found[2].as_ref().unwrap_err();
    assert!(error.contains("exit status: 0") && error.contains("2 of 4 answers"), "{error}");
    assert!(found[3].is_err());
}

#[test]
fn programs_end_when_the_reward_is_dropped() {
    let folder = folder();
    let script = r#"echo $$ > "$1/id"; trap '' TERM INT; while true; do read -r line && echo 1 || sleep 1; done"#;
    let rewards = judge(script, folder.path(), json!({}));
    assert_eq!(outcomes(&rewards, &["a"]), [Ok(Some(1.0))]);
    let id = std::fs::read_to_string(folder.path().join("id")).unwrap();
    assert!(Path::new(&format!("/proc/{}", id.trim())).exists() || !cfg!(target_os = "linux"));
    drop(rewards);
    assert!(!Path::new(&format!("/proc/{}", id.trim())).exists(), "it is killed, and no zombie");
}

#[test]
fn large_batches_do_not_block_on_full_pipes() {
    let folder = folder();
    // The program answers while it reads, and both directions are larger than a pipe.
    let note = "x".repeat(300);
    let script = format!(r#"while read -r line; do echo '{{"reward": 1, "note": "{note}"}}'; done"#);
    let rewards = judge(&script, folder.path(), json!({"batch_size": 1000}));
    let found = outcomes(&rewards, &vec![note.as_str(); 1000]);
    assert!(found.iter().all(|outcome| *outcome == Ok(Some(1.0))));
}

/// Returns the memory of this process in bytes.
#[cfg(target_os = "linux")]
fn memory() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
#[cfg(target_os = "linux")]
fn output_between_batches_is_bounded_and_fails_the_next_batch() {
    for flood in [
        "exec yes 1.0",
        "yes 1.0 & while read -r line; do echo 1; done",
        "exec yes ''",
        "while :; do printf %65536s x; done",
    ] {
        let folder = folder();
        let rewards = judge(&format!("read -r line; echo 1; {flood}"), folder.path(), json!({"timeout": 5}));
        assert_eq!(outcomes(&rewards, &["a"]), [Ok(Some(1.0))], "{flood}");
        let before = memory();
        std::thread::sleep(Duration::from_secs(1));
        let grown = memory().saturating_sub(before);
        assert!(grown < 32 << 20, "{flood}: {grown} bytes");
        let error = outcomes(&rewards, &["b"])[0].clone().unwrap_err();
        assert!(error.contains("nobody has asked for") || error.contains("1048576 bytes"), "{flood}: {error}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn excess_standard_error_is_dropped_without_failures() {
    for flood in ["yes eeeeeeee", "tr '\\0' e < /dev/zero"] {
        let folder = folder();
        let rewards = judge(&format!("{flood} >&2 & while read -r line; do echo 1; done"), folder.path(), json!({}));
        let before = memory();
        for _ in 0..3 {
            assert_eq!(outcomes(&rewards, &["a", "b"]), [Ok(Some(1.0)), Ok(Some(1.0))], "{flood}");
            std::thread::sleep(Duration::from_millis(300));
        }
        let grown = memory().saturating_sub(before);
        assert!(grown < 32 << 20, "{flood}: {grown} bytes");
    }
}

#[test]
fn environment_references_reach_the_program_but_no_message() {
    let folder = folder();
    let path = std::env::var("PATH").unwrap();
    let script =
        r#"read -r line; echo "$KEY|$PLAIN|$1" > "$2/seen"; echo "I was given $KEY and $1" >&2; echo "$KEY $PLAIN $1""#;
    let command = json!(["sh", "-c", script, "sh", "--path=${PATH}", folder.path().display().to_string()]);
    let env = json!({"KEY": "<${PATH}>", "PLAIN": "S3CR3T-plain $${PATH}"});
    let rewards = rewards(json!({"programs": {"judge": {"command": command, "env": env}}}));
    let error = outcomes(&rewards, &["a"])[0].clone().unwrap_err();
    let seen = std::fs::read_to_string(folder.path().join("seen")).unwrap();
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

#[test]
fn the_error_of_a_missing_program_hides_its_arguments() {
    let error = refused(json!({"programs": {"judge": {"command": ["no-such-judge --api-key S3CR3T-argument"]}}}));
    assert!(error.contains("no-such-judge") && !error.contains("S3CR3T"), "{error}");
}

#[test]
#[cfg(target_os = "linux")]
fn children_of_a_program_end_when_the_reward_is_dropped() {
    let folder = folder();
    let script = r#"trap '' TERM INT HUP; sleep 1000 & echo $! > "$1/child"; read -r line; echo 1; exec sleep 1000"#;
    let rewards = judge(script, folder.path(), json!({}));
    assert_eq!(outcomes(&rewards, &["a"]), [Ok(Some(1.0))]);
    drop(rewards);
    assert_gone(&folder.path().join("child"));
}
