//! Runs that resume in another folder, another time zone and on another day, and data files named by patterns.

use crate::support::{Runs, Said, assert_has, grpo, refuse, rows};
use crate::tiny_model::{call, train};
use serde_json::Value;
use std::path::Path;

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_run_with_relative_paths_goes_on_from_any_folder() {
    let (runs, elsewhere) = (Runs::small(), tempfile::tempdir().expect("a folder"));
    let home = runs.path("");
    // A program next to the rows is the reward, and the adapter's base model is read again on resume.
    runs.write("judge.sh", "while read -r line; do echo 0.5; done\n");
    let judge = "rewards.programs={judge: {command: [/bin/sh, judge.sh]}}";
    let relative = [judge, "lora={r: 2}", "model=model", "data.files=rows.jsonl"];
    call(&runs, "model", "run", &relative).at(&home).succeed();
    let resume = |folder: &Path, run: &str, steps: usize| -> Said {
        grpo(["train", "--resume", run]).set([format!("grpo.max_steps={steps}")]).at(folder).exit(0)
    };
    let run = runs.text("run");
    resume(elsewhere.path(), &run, 3);
    grpo(["export", &run, "--to", "exported"]).at(elsewhere.path()).succeed();
    assert!(elsewhere.path().join("exported/adapter_config.json").is_file(), "paths of the command go from here");
    let relative = format!("../{}/run", home.file_name().unwrap_or_default().to_string_lossy());
    let beside = home.parent().expect("a parent").join("beside-a-run");
    std::fs::create_dir_all(&beside).expect("made");
    resume(&beside, &relative, 4);
    std::fs::remove_dir(&beside).expect("nothing was written there");
    // The run resumes from its own folder, and after the whole folder was moved.
    resume(&home, "run", 5);
    let moved = elsewhere.path().join("moved");
    std::fs::rename(&home, &moved).expect("moved");
    assert_has(&resume(&moved, "run", 6).stderr, &["relative paths of the run go from here"]);
    resume(elsewhere.path(), "moved/run", 7);
    std::fs::rename(&moved, &home).expect("moved back");
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_checkpoint_in_the_place_of_a_run_names_the_run_and_from() {
    let runs = Runs::small();
    train(&runs, "model", "run", &[]);
    let run = runs.text("run");
    for part in ["checkpoints/step-000001", "checkpoints/step-000001/", "checkpoints/step-000001/state.json"] {
        let error = refuse(&["train", "--resume", &format!("{run}/{part}")]);
        assert_has(&error, &[&format!("name the run, as in `{run} --from step-000001`")]);
    }
    for part in ["checkpoints", "model", "metrics.jsonl"] {
        let error = refuse(&["export", &format!("{run}/{part}")]);
        assert_has(&error, &[&format!("name the run, as in `{run}`")]);
    }
    runs.resume("run").args(["--from", "step-000001"]).succeed();
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn the_date_of_a_template_is_local_and_that_of_the_start() {
    let runs = Runs::small();
    let source = "{% for m in messages %}{{ m.content }}{% endfor %} on {{ strftime_now('%d %b %Y %H') }}: ";
    runs.write("model/chat_template.jinja", source);
    let data = || grpo(["data", &runs.text("rows.jsonl"), "--model", &runs.text("model"), "--show", "1"]);
    let dates = |zone: &str| {
        let text = data().env("TZ", zone).succeed();
        let (_, date) = text.split_once(" on ").expect("a date");
        date.split(": ").next().expect("a date").to_owned()
    };
    // These time zones never have the same hour.
    let (west, east) = (dates("America/Los_Angeles"), dates("Asia/Tokyo"));
    assert_ne!(west, east);
    let today = |zone: &str, form: &str| jiff::Zoned::now().in_tz(zone).expect("a zone").strftime(form).to_string();
    assert!(west.starts_with(&today("America/Los_Angeles", "%d %b %Y")), "{west}");
    assert!(east.starts_with(&today("Asia/Tokyo", "%d %b %Y")), "{east}");

    // A resumed run keeps the date of its start, in any time zone.
    call(&runs, "model", "run", &[]).env("TZ", "Asia/Tokyo").succeed();
    let config = runs.read("run/config.yaml");
    let date = config.lines().find_map(|line| line.trim().strip_prefix("template_date: ")).expect("the date");
    assert!(date.trim_matches(['\'', '"']).starts_with(&today("Asia/Tokyo", "%Y-%m-%d")), "{date}");
    runs.resume("run").set(["grpo.max_steps=3"]).env("TZ", "America/Los_Angeles").succeed();
    assert_has(&runs.read("run/config.yaml"), &[&format!("template_date: {date}")]);
    // A configured date.
    assert_has(&data().set(["data.template_date=2024-07-26"]).succeed(), &[" on 26 Jul 2024 00: "]);
    assert_has(&data().set(["data.template_date=July"]).refuse(), &["data.template_date", "2026-11-25"]);
}

#[test]
fn data_files_are_named_by_patterns_and_from_the_home_folder() {
    let runs = Runs::small();
    let home = runs.path("home");
    std::fs::create_dir_all(&home).expect("made");
    for name in ["part-1.jsonl", "part-2.jsonl"] {
        std::fs::copy(runs.path("rows.jsonl"), home.join(name)).expect("copied");
    }
    let settings = ["data.files=~/part-*.jsonl", "grpo.max_steps=1"];
    call(&runs, "model", "run", &settings).env("HOME", &home).succeed();
    assert_has(&runs.read("run/config.yaml"), &["home/part-1.jsonl", "home/part-2.jsonl"]);
    // The run keeps its files, even if the home folder changes.
    std::fs::copy(runs.path("rows.jsonl"), home.join("part-3.jsonl")).expect("copied");
    runs.resume("run").set(["grpo.max_steps=2"]).succeed();
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn resumed_runs_use_the_row_index_instead_of_reading_all_rows() {
    let runs = Runs::small();
    train(&runs, "model", "run", &["run.allow_changed_data=true"]);
    let steps = |count: usize| drop(runs.resume("run").set([format!("grpo.max_steps={count}")]).succeed());
    let written = || runs.read("run/rows.json");
    let first = written();
    // An edited index is used while its key matches, which shows that the rows are not read again.
    let mut edited: Value = serde_json::from_str(&first).expect("JSON");
    edited["index"]["training"][0].as_array_mut().expect("places").truncate(20);
    let edited = edited.to_string();
    runs.write("run/rows.json", &edited);
    steps(3);
    assert_eq!(written(), edited, "it is used, and not made anew");
    // A damaged index, or an index of other rows, is not used.
    runs.write("run/rows.json", "{");
    steps(4);
    assert_eq!(written(), first);
    let rows = runs.read("rows.jsonl");
    runs.write("rows.jsonl", rows.replacen("What", "what", 1));
    runs.write("run/rows.json", &edited);
    steps(5);
    assert!(written() != edited && written() != first);
    std::fs::remove_file(runs.path("run/rows.json")).expect("removed");
    steps(6);
    assert!(!written().is_empty());
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn stop_texts_stop_tokens_and_eval_max_completion_length_end_completions() {
    let runs = Runs::small();
    let lengths = |run: &str| -> Vec<(f64, f64)> {
        let number = |row: &Value, name: &str| row[name].as_f64().unwrap_or(f64::NAN);
        let steps = runs.phase(run, "grpo");
        steps
            .iter()
            .map(|row| (number(row, "completions/max_length"), number(row, "completions/clipped_ratio")))
            .collect()
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
    runs.write("model/generation_config.json", r#"{"stop_strings": ["e", "a"]}"#);
    train(&runs, "model", "of_the_model", &settings);
    assert_has(&runs.read("of_the_model/config.yaml"), &["  stop:\n  - e\n  - a\n"]);
    assert!(lengths("of_the_model")[0].1 < lengths("free")[0].1);
    train(&runs, "model", "none", &[&settings[..], &["rollout.stop=[]"]].concat());
    assert_eq!(lengths("none"), lengths("free"));
    for (setting, key) in [
        ("rollout.stop=['']", "rollout.stop"),
        ("rollout.stop_token_ids=[100000]", "rollout.stop_token_ids"),
        ("eval.max_completion_length=0", "eval.max_completion_length"),
        ("eval.max_completion_length=255", "eval.max_completion_length"),
    ] {
        assert_has(&call(&runs, "model", "refused", &[setting]).refuse(), &[&format!("`{key}`")]);
    }
}
