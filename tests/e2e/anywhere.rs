//! Runs that resume in another folder, another time zone and on another day, and data files named by patterns.

use crate::support::{Runs, command, refuse, rows, stderr, stdout, succeed};
use crate::tiny_model::{arguments, prepare, train};
use serde_json::Value;
use std::path::Path;
use std::process::Output;

/// Returns the output of the binary in the folder `folder`.
fn in_folder(folder: &Path, arguments: &[&str]) -> Output {
    let output = command(arguments).current_dir(folder).output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(0), "{arguments:?}\n{}{}", stdout(&output), stderr(&output));
    output
}

#[test]
fn a_run_with_relative_paths_goes_on_from_any_folder() {
    let (runs, elsewhere) = (Runs::new(&[]), tempfile::tempdir().expect("a folder"));
    prepare(&runs);
    let home = runs.path("");
    // A program next to the rows is the reward, and the adapter's base model is read again on resume.
    std::fs::write(home.join("judge.sh"), "while read -r line; do echo 0.5; done\n").expect("written");
    let settings = [
        "rewards.programs={judge: {command: [/bin/sh, judge.sh]}}",
        "lora={r: 2}",
        "model=model",
        "data.files=rows.jsonl",
    ];
    let all = arguments(&runs, "model", "run", &settings);
    let mut all: Vec<&str> = all.iter().map(String::as_str).collect();
    let at = all.iter().position(|argument| *argument == "--run-dir").expect("a folder of the run");
    all[at + 1] = "run";
    in_folder(&home, &all);
    let (run, more) = (runs.text("run"), ["--set", "grpo.max_steps=3"]);
    in_folder(elsewhere.path(), &[&["train", "--resume", &run][..], &more].concat());
    in_folder(elsewhere.path(), &["export", &run, "--to", "exported"]);
    assert!(elsewhere.path().join("exported/adapter_config.json").is_file(), "paths of the command go from here");
    let relative = format!("../{}/run", home.file_name().unwrap_or_default().to_string_lossy());
    let beside = home.parent().expect("a parent").join("beside-a-run");
    std::fs::create_dir_all(&beside).expect("made");
    in_folder(&beside, &["train", "--resume", &relative, "--set", "grpo.max_steps=4"]);
    std::fs::remove_dir(&beside).expect("nothing was written there");
    // The run resumes from its own folder, and after the whole folder was moved.
    in_folder(&home, &["train", "--resume", "run", "--set", "grpo.max_steps=5"]);
    let moved = elsewhere.path().join("moved");
    std::fs::rename(&home, &moved).expect("moved");
    let output = in_folder(&moved, &["train", "--resume", "run", "--set", "grpo.max_steps=6"]);
    assert!(stderr(&output).contains("relative paths of the run go from here"), "{}", stderr(&output));
    in_folder(elsewhere.path(), &["train", "--resume", "moved/run", "--set", "grpo.max_steps=7"]);
    std::fs::rename(&moved, &home).expect("moved back");
}

#[test]
fn a_checkpoint_in_the_place_of_a_run_names_the_run_and_from() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    train(&runs, "model", "run", &[]);
    let run = runs.text("run");
    for part in ["checkpoints/step-000001", "checkpoints/step-000001/", "checkpoints/step-000001/state.json"] {
        let error = refuse(&["train", "--resume", &format!("{run}/{part}")]);
        let command = format!("name the run, as in `{run} --from step-000001`");
        assert!(error.contains(&command), "{error}");
    }
    for part in ["checkpoints", "model", "metrics.jsonl"] {
        let error = refuse(&["export", &format!("{run}/{part}")]);
        assert!(error.contains(&format!("name the run, as in `{run}`")), "{error}");
    }
    succeed(&["train", "--resume", &run, "--from", "step-000001"]);
}

#[test]
fn the_date_of_a_template_is_local_and_that_of_the_start() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let source = "{% for m in messages %}{{ m.content }}{% endfor %} on {{ strftime_now('%d %b %Y %H') }}: ";
    std::fs::write(runs.path("model/chat_template.jinja"), source).expect("written");
    let dates = |zone: &str| {
        let arguments = ["data", &runs.text("rows.jsonl"), "--model", &runs.text("model"), "--show", "1"];
        let output = command(&arguments).env("TZ", zone).output().expect("the binary starts");
        let text = stdout(&output);
        let (_, date) = text.split_once(" on ").expect("a date");
        date.split(": ").next().expect("a date").to_owned()
    };
    // These time zones never have the same hour.
    let (west, east) = (dates("America/Los_Angeles"), dates("Asia/Tokyo"));
    assert_ne!(west, east);
    let expected = |zone: &str| jiff::Zoned::now().in_tz(zone).expect("a time zone").strftime("%d %b %Y").to_string();
    assert!(west.starts_with(&expected("America/Los_Angeles")) && east.starts_with(&expected("Asia/Tokyo")));

    // A resumed run keeps the date of its start, in any time zone.
    let arguments = arguments(&runs, "model", "run", &[]);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let output = command(&arguments).env("TZ", "Asia/Tokyo").output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let config = std::fs::read_to_string(runs.path("run/config.yaml")).expect("a configuration");
    let date =
        config.lines().find_map(|line| line.trim().strip_prefix("template_date: ")).expect("the date").to_owned();
    assert!(
        date.trim_matches(['\'', '"'])
            .starts_with(&jiff::Zoned::now().in_tz("Asia/Tokyo").expect("a zone").strftime("%Y-%m-%d").to_string())
    );
    let resume = ["train", "--resume", &runs.text("run"), "--set", "grpo.max_steps=3"];
    let output = command(&resume).env("TZ", "America/Los_Angeles").output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let config = std::fs::read_to_string(runs.path("run/config.yaml")).expect("a configuration");
    assert!(config.contains(&format!("template_date: {date}")), "{config}");
    // A configured date.
    let set =
        ["data", &runs.text("rows.jsonl"), "--model", &runs.text("model"), "--set", "data.template_date=2024-07-26"];
    assert!(succeed(&set).contains(" on 26 Jul 2024 00: "));
    let error = refuse(&[&set[..5], &["data.template_date=July"]].concat());
    assert!(error.contains("data.template_date") && error.contains("2026-11-25"), "{error}");
}

#[test]
fn data_files_are_named_by_patterns_and_from_the_home_folder() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let home = runs.path("home");
    std::fs::create_dir_all(&home).expect("made");
    for name in ["part-1.jsonl", "part-2.jsonl"] {
        std::fs::copy(runs.path("rows.jsonl"), home.join(name)).expect("copied");
    }
    let mut all = arguments(&runs, "model", "run", &["data.files=~/part-*.jsonl"]);
    all.extend(["--set".into(), "grpo.max_steps=1".into()]);
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let output = command(&all).env("HOME", &home).output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let config = std::fs::read_to_string(runs.path("run/config.yaml")).expect("a configuration");
    assert!(config.contains("home/part-1.jsonl") && config.contains("home/part-2.jsonl"), "{config}");
    // The run keeps its files, even if the home folder changes.
    std::fs::copy(runs.path("rows.jsonl"), home.join("part-3.jsonl")).expect("copied");
    succeed(&["train", "--resume", &runs.text("run"), "--set", "grpo.max_steps=2"]);
}

#[test]
fn resumed_runs_use_the_row_index_instead_of_reading_all_rows() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    train(&runs, "model", "run", &["run.allow_changed_data=true"]);
    let (index, run) = (runs.path("run/rows.json"), runs.text("run"));
    let steps = |count: usize| {
        let output = command(&["train", "--resume", &run, "--set", &format!("grpo.max_steps={count}")]);
        let output = { output }.output().expect("the binary starts");
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    };
    let written = || std::fs::read_to_string(&index).expect("an index");
    let first = written();
    // An edited index is used while its key matches, which shows that the rows are not read again.
    let text = |json: &serde_json::Value| json.to_string();
    let mut edited: serde_json::Value = serde_json::from_str(&first).expect("JSON");
    let places = edited["index"]["training"][0].as_array_mut().expect("places");
    places.truncate(20);
    let edited = text(&edited);
    std::fs::write(&index, &edited).expect("written");
    steps(3);
    assert_eq!(written(), edited, "it is used, and not made anew");
    // A damaged index, or an index of other rows, is not used.
    std::fs::write(&index, "{").expect("written");
    steps(4);
    assert_eq!(written(), first);
    let rows = std::fs::read_to_string(runs.path("rows.jsonl")).expect("rows");
    std::fs::write(runs.path("rows.jsonl"), rows.replacen("What", "what", 1)).expect("written");
    std::fs::write(&index, &edited).expect("written");
    steps(5);
    assert!(written() != edited && written() != first);
    std::fs::remove_file(&index).expect("removed");
    steps(6);
    assert!(index.is_file());
}

#[test]
fn stop_texts_stop_tokens_and_eval_max_completion_length_end_completions() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let lengths = |run: &str| -> Vec<(f64, f64)> {
        let rows = rows(&runs.path(run).join("metrics.jsonl"));
        let number = |row: &Value, name: &str| row[name].as_f64().unwrap_or(f64::NAN);
        let steps = rows.iter().filter(|row| row["phase"] == "grpo");
        steps.map(|row| (number(row, "completions/max_length"), number(row, "completions/clipped_ratio"))).collect()
    };
    let settings = ["grpo.max_steps=1", "rollout.max_completion_length=24", "eval.max_completion_length=3"];
    train(&runs, "model", "free", &settings);
    // The tokenizer's first 256 tokens are the bytes; most completions contain an `e` early.
    let stop = ["rollout.stop=[e, a, o, '<|endoftext|>']"];
    train(&runs, "model", "stopped", &[&settings[..], &stop].concat());
    assert!(lengths("stopped")[0].1 < lengths("free")[0].1, "{:?} {:?}", lengths("stopped"), lengths("free"));
    let texts = rows(&runs.path("stopped/completions.jsonl"));
    assert!(!texts.is_empty());
    for row in &texts {
        let (text, truncated) = (row["completion"].as_str().expect("a text"), row["truncated"] == true);
        let before: String = text.chars().take(text.chars().count().saturating_sub(12)).collect();
        assert!(truncated || !before.contains(['e', 'a', 'o']), "{text:?}");
        assert!(!truncated || !text.contains(['e', 'a', 'o']), "{text:?}");
    }
    // With all tokens as stop tokens, no completion has more than one token.
    let ids: Vec<String> = (0..400).map(|id| id.to_string()).collect();
    train(&runs, "model", "one", &[&settings[..], &[&format!("rollout.stop_token_ids=[{}]", ids.join(","))]].concat());
    assert!(lengths("one")[0].1 < 0.5, "{:?}", lengths("one"));
    // `stop_strings` of generation_config.json apply unless `rollout.stop` is set.
    std::fs::write(runs.path("model/generation_config.json"), r#"{"stop_strings": ["e", "a"]}"#).expect("written");
    train(&runs, "model", "of_the_model", &settings);
    let config = |run: &str| std::fs::read_to_string(runs.path(run).join("config.yaml")).expect("a configuration");
    let text = config("of_the_model");
    assert!(text.contains("  stop:\n  - e\n  - a\n"), "{text}");
    assert!(lengths("of_the_model")[0].1 < lengths("free")[0].1);
    train(&runs, "model", "none", &[&settings[..], &["rollout.stop=[]"]].concat());
    assert_eq!(lengths("none"), lengths("free"));
    let arguments = |setting: &str| arguments(&runs, "model", "refused", &[setting]);
    for (setting, key) in [
        ("rollout.stop=['']", "rollout.stop"),
        ("rollout.stop_token_ids=[100000]", "rollout.stop_token_ids"),
        ("eval.max_completion_length=0", "eval.max_completion_length"),
        ("eval.max_completion_length=255", "eval.max_completion_length"),
    ] {
        let arguments = arguments(setting);
        let error = refuse(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(error.contains(&format!("`{key}`")), "{error}");
    }
}
