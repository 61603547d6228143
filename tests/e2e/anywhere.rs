//! Runs that go on in another folder, another time zone and on another day, and files that are named in other ways.

use crate::support::{Runs, command, refuse, stderr, stdout, succeed};
use crate::tiny_model::{arguments, prepare, train};
use std::path::Path;
use std::process::Output;

/// The output of the binary in the folder `folder`.
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
    // A program beside the rows judges, and the adapter's base is read again.
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
    // From its own folder it goes on as before, and from one that has been moved with everything in it, too.
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
    // At no time of the day are both in the same hour.
    let (west, east) = (dates("America/Los_Angeles"), dates("Asia/Tokyo"));
    assert_ne!(west, east);
    let expected = |zone: &str| jiff::Zoned::now().in_tz(zone).expect("a time zone").strftime("%d %b %Y").to_string();
    assert!(west.starts_with(&expected("America/Los_Angeles")) && east.starts_with(&expected("Asia/Tokyo")));

    // What a run was begun with stays, whenever and wherever it goes on.
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
    // A date of one's own.
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
    // The run keeps the files that it was begun with, wherever its home is then.
    std::fs::copy(runs.path("rows.jsonl"), home.join("part-3.jsonl")).expect("copied");
    succeed(&["train", "--resume", &runs.text("run"), "--set", "grpo.max_steps=2"]);
}
