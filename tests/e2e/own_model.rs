//! A first run on a user's model and rows: data, settings, refusals and warnings.

use crate::support::{Runs, command, json, refuse, refused, rows, stderr, stdout, succeed};
use crate::tiny_model::prepare;
use serde_json::json;
use std::path::{Path, PathBuf};

fn config(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/train").join(name).display().to_string()
}

/// The settings that name the model and the rows of `runs`, and those that make a run quick.
fn settings(runs: &Runs, more: &[&str]) -> Vec<String> {
    let own = [format!("model={}", runs.text("model")), format!("data.files={}", runs.text("rows.jsonl"))];
    let quick = ["grpo.max_steps=1", "eval.num_problems=2", "eval.num_generations=0"].map(str::to_owned);
    own.into_iter().chain(quick).chain(more.iter().map(|s| (*s).to_owned())).collect()
}

fn arguments(files: &[&str], run: &str, settings: &[String]) -> Vec<String> {
    let start = [&["train"], files, &["--run-dir", run]].concat().into_iter().map(str::to_owned);
    start.chain(settings.iter().flat_map(|setting| ["--set".to_owned(), setting.clone()])).collect()
}

/// Standard error of a run that ends well, and its folder.
fn train(runs: &Runs, files: &[&str], name: &str, more: &[&str]) -> (String, PathBuf) {
    let run = runs.path(name);
    let arguments = arguments(files, &run.display().to_string(), &settings(runs, more));
    let output =
        command(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));
    (stderr(&output), run)
}

/// The warnings among lines of standard error that hold `words`.
fn warnings(text: &str, words: &str) -> usize {
    text.lines().filter(|line| line.contains("WARN") && line.contains(words)).count()
}

#[test]
fn the_first_run_on_a_model_has_the_settings_of_a_model_that_is_read() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let (dapo, ppo) = (config("dapo.yaml"), config("ppo.yaml"));
    // Few prompts, for these tests' sake; one step of a schedule that falls from the first.
    let small = ["grpo.prompts_per_step=4", "rewards.regex={vowel: {pattern: '[aeiou]{2}'}}"];
    for (name, files) in [("none", &[][..]), ("dapo", &[dapo.as_str()]), ("ppo", &[ppo.as_str()])] {
        let more = [&small[..], &["grpo.filter_groups.enable=false"]].concat();
        let (_, run) = train(&runs, files, name, &more);
        let metrics = rows(&run.join("metrics.jsonl"));
        assert!(metrics.iter().all(|row| row["phase"] != "warmup"), "{name}: supervised steps that nobody asked for");
        let step = metrics.iter().find(|row| row["phase"] == "grpo").expect("a step");
        // The mean over the updates of a step, of a rate that falls on a line from the first of them on.
        let rate = step["learning_rate"].as_f64().expect("a rate");
        let expected = if name == "none" { 1e-6 } else { 7.5e-7 };
        assert!((rate / expected - 1.0).abs() < 1e-9, "{name}: {rate}");
        // The context of this model has 256 tokens.
        let longest = step["completions/max_length"].as_f64().expect("a length");
        assert!(longest > 8.0 && longest <= 128.0, "{name}: {longest}");
        let text = std::fs::read_to_string(run.join("config.yaml")).expect("a configuration");
        assert!(text.contains("max_completion_length: 128"), "{name}: {text}");
    }
}

#[test]
fn a_model_without_data_and_data_without_a_model_are_refused() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let (model, files) = (format!("model={}", runs.text("model")), format!("data.files={}", runs.text("rows.jsonl")));
    for file in [None, Some(config("ppo.yaml")), Some(config("tiny.yaml"))] {
        for (setting, words) in [
            (&model, ["`data.files`: expected rows to train the model on", "--set data.files=train.jsonl"]),
            (&files, ["`model`: expected the model to train", "--set model=FOLDER"]),
        ] {
            let run = runs.text("run");
            let files = file.as_deref().map(|file| vec![file]).unwrap_or_default();
            let arguments = arguments(&files, &run, std::slice::from_ref(setting));
            let text = refuse(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
            assert!(words.iter().all(|word| text.contains(word)), "{file:?} {setting}: {text}");
            assert!(!runs.path("run").exists());
        }
    }
    let output = command(&["train"]).env("GRPO__MODEL", runs.text("model")).output().expect("starts");
    assert!(refused(&["train"], &output).contains("`data.files`"));
}

#[test]
fn a_section_of_rewards_is_all_the_rewards_of_a_run() {
    let runs = Runs::new(&["grpo.max_steps=1", "warmup.steps=0", "eval.num_problems=2"]);
    prepare(&runs);
    let short = ["rollout.max_completion_length=4", "grpo.prompts_per_step=2", "grpo.num_generations=2"];
    let names = |run: &Path| {
        let rows = rows(&run.join("metrics.jsonl"));
        let step = rows.iter().find(|row| row["phase"] == "grpo").expect("a step").as_object().expect("a row").clone();
        let name = |key: &str| Some(key.strip_prefix("rewards/")?.strip_suffix("/mean")?.to_owned());
        step.keys().filter_map(|key| name(key)).collect::<Vec<_>>()
    };
    let (_, run) = train(&runs, &[], "default", &short);
    assert_eq!(names(&run), ["correct"]);
    let (_, run) = train(&runs, &[], "own", &[&short[..], &["rewards.terminated=1"]].concat());
    assert_eq!(names(&run), ["terminated"]);
    let file = runs.path("train.yaml");
    for section in ["rewards: {}", "rewards:"] {
        std::fs::write(&file, section).expect("a file");
        let arguments = arguments(&[&file.display().to_string()], &runs.text("none"), &settings(&runs, &[]));
        let text = refuse(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(text.contains("`rewards`: expected at least one reward"), "{text}");
    }
}

#[test]
fn sampling_is_plain_unless_the_run_asks_for_the_models_own() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let generation =
        json!({"do_sample": true, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05});
    std::fs::write(runs.path("model/generation_config.json"), generation.to_string()).expect("a file");
    let short = ["rollout.max_completion_length=4", "grpo.prompts_per_step=2", "grpo.num_generations=2"];
    let warning = "the loss is over the whole softmax";
    let sampling = |run: &Path| {
        let text = std::fs::read_to_string(run.join("config.yaml")).expect("a configuration");
        let begin = text.find("rollout:").expect("a section");
        text[begin..].lines().skip(1).take(5).map(|line| line.trim().to_owned()).collect::<Vec<_>>()
    };
    let (text, run) = train(&runs, &[], "plain", &short);
    assert_eq!(warnings(&text, warning), 0, "{text}");
    assert_eq!(sampling(&run)[..2], ["temperature: null", "top_k: null"]);
    let (text, run) =
        train(&runs, &[], "own", &[&short[..], &["rollout.use_generation_config=true", "rollout.top_k=5"]].concat());
    assert_eq!(warnings(&text, warning), 1, "{text}");
    assert_eq!(sampling(&run)[..3], ["temperature: 0.7", "top_k: 5", "top_p: 0.8"]);
    for one in ["top_k=3", "top_p=0.9", "min_p=0.1", "repetition_penalty=1.2"] {
        let name = one.split('=').next().expect("a name");
        let (text, _) = train(&runs, &[], name, &[&short[..], &[&format!("rollout.{one}")]].concat());
        assert_eq!(warnings(&text, warning), 1, "{text}");
        assert!(text.contains(&format!("rollout.{one}")), "{text}");
    }
    // Truncated sampling in an evaluation is no reason for a warning.
    let (text, _) = train(&runs, &[], "eval", &[&short[..], &["eval.top_k=3", "eval.num_generations=1"]].concat());
    assert_eq!(warnings(&text, warning), 0, "{text}");
}

#[test]
fn the_first_command_still_trains_the_built_in_task() {
    let text = succeed(&["train", "--print-config"]);
    for line in [
        "name: arithmetic",
        "learning_rate: 0.0007",
        "until_pass_at_1: 0.35",
        "max_completion_length: 8",
        "correct: 1.0",
    ] {
        assert!(text.lines().any(|found| found.trim() == line), "{line}: {text}");
    }
    let runs = Runs::new(&[]);
    let more = ["--set", "warmup.steps=2", "--set", "grpo.max_steps=1", "--set", "eval.num_problems=4"];
    succeed(&[&["train", "--run-dir", &runs.text("a")][..], &more].concat());
    let summary = json(&runs.path("a/summary.json"));
    assert!(summary["eval_after"].is_object(), "{summary}");
}

/// Replaces the rows of `runs` by rows with these fields.
fn write_rows(runs: &Runs, row: impl Fn(usize) -> serde_json::Value) {
    let text: String = (0..60).map(|i| format!("{}\n", row(i))).collect();
    std::fs::write(runs.path("rows.jsonl"), text).expect("rows");
}

const SHORT: [&str; 3] = ["rollout.max_completion_length=4", "grpo.prompts_per_step=2", "grpo.num_generations=2"];

#[test]
fn rows_with_nothing_to_reward_are_refused_with_their_columns() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    write_rows(
        &runs,
        |i| json!({"question": format!("What is {i} + 1?"), "solution": format!("\\boxed{{{}}}", i + 1)}),
    );
    let words = ["none of its", "`question`, `solution`", "`correct`", "--set data.answer_column=solution"];
    let refusal = arguments(&[], &runs.text("a"), &settings(&runs, &SHORT));
    let text = refuse(&refusal.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
    assert!(!runs.path("a").exists());
    let (model, data) = (runs.text("model"), runs.text("rows.jsonl"));
    let output = command(&["data", &data, "--model", &model]).output().expect("starts");
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(words.iter().all(|word| stderr(&output).contains(word)), "{}", stderr(&output));
    // The key that the error names, and rewards that need no answer.
    train(&runs, &[], "named", &[&SHORT[..], &["data.answer_column=solution"]].concat());
    succeed(&["data", &data, "--model", &model, "--set", "data.answer_column=solution"]);
    train(&runs, &[], "without", &[&SHORT[..], &["rewards.terminated=1"]].concat());
    // A few rows without an answer.
    write_rows(&runs, |i| json!({"question": format!("What is {i}?"), "answer": if i == 4 { None } else { Some(i) }}));
    let text = refuse(&refusal.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(text.contains("1 of its ") && text.contains("line 5"), "{text}");
}

#[test]
fn a_text_prompt_beside_a_chat_template_is_warned_of_once() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let words = "a text is sent as it is; use `messages`, or `data.apply_chat_template: true`";
    let (text, _) = train(&runs, &[], "question", &SHORT);
    assert_eq!(warnings(&text, words), 0, "a question is a user's message: {text}");
    write_rows(&runs, |i| json!({"prompt": format!("What is {i} + 1?"), "answer": i + 1}));
    let (text, _) = train(&runs, &[], "text", &SHORT);
    assert_eq!(warnings(&text, words), 1, "{text}");
    for choice in ["true", "false"] {
        let setting = format!("data.apply_chat_template={choice}");
        let (text, _) = train(&runs, &[], choice, &[&SHORT[..], &[&setting]].concat());
        assert_eq!(warnings(&text, words), 0, "{text}");
    }
}

#[test]
fn a_first_step_that_teaches_nothing_is_warned_of_once() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let never = "rewards={correct: 1, think_format: 0.5, regex: {never: {pattern: 'zzzzzzzz'}}}";
    let (text, _) = train(&runs, &[], "never", &[&SHORT[..], &[never, "grpo.max_steps=2"]].concat());
    for words in [
        "of the first step's completions were cut off at rollout.max_completion_length, 4",
        "no group of the first step has completions with different rewards",
        "the reward `think_format` matched no completion",
        "the reward `never` matched no completion",
    ] {
        assert_eq!(warnings(&text, words), 1, "{words}: {text}");
    }
    let program = "rewards.programs.silent={command: [sh, -c, 'while read -r l; do echo null; done']}";
    let mut silent = command(&[]);
    let arguments = arguments(&[], &runs.text("none"), &settings(&runs, &[&SHORT[..], &[program]].concat()));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let output = silent.args(&arguments).env("PATH", path).output().expect("starts");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(warnings(&stderr(&output), "no completion of the first step has a reward"), 1, "{}", stderr(&output));
}
