//! `grpo init`: a configuration for a model and rows, which runs as it is.

use crate::support::{Runs, command, grpo, json, refuse, refused, rows, stderr, stdout, succeed};
use crate::tiny_model::prepare;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Output;

/// `grpo init` for the model and the rows of `runs`, run in their folder.
fn init(runs: &Runs, more: &[&str]) -> Output {
    let arguments = [&["init", "--model", "model", "--data", "rows.jsonl"][..], more].concat();
    command(&arguments).current_dir(runs.path("")).output().expect("the binary starts")
}

/// The file that `grpo init` has written.
fn written(runs: &Runs, more: &[&str]) -> String {
    let output = init(runs, &[&["--force"][..], more].concat());
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));
    std::fs::read_to_string(runs.path("train.yaml")).expect("a file")
}

/// Its keys.
fn keys(text: &str) -> Value {
    serde_saphyr::from_str(text).expect("YAML")
}

fn refusal(runs: &Runs, more: &[&str]) -> String {
    let text = refused(&["init"], &init(runs, more));
    assert!(!runs.path("train.yaml").exists(), "{text}");
    text
}

fn write_rows(runs: &Runs, row: impl Fn(usize) -> Value) {
    write_count(runs, 60, row);
}

fn write_count(runs: &Runs, count: usize, row: impl Fn(usize) -> Value) {
    let text: String = (0..count).map(|i| format!("{}\n", row(i))).collect();
    std::fs::write(runs.path("rows.jsonl"), text).expect("rows");
}

/// A few steps of the file as it is, in the folder of `runs`.
fn train(runs: &Runs, name: &str) -> PathBuf {
    let steps = ["--set", "grpo.max_steps=2"];
    let arguments = [&["train", "--config", "train.yaml", "--run-dir", name][..], &steps].concat();
    let output = command(&arguments).current_dir(runs.path("")).output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));
    assert!(!stderr(&output).contains("a text is sent as it is"), "{}", stderr(&output));
    runs.path(name)
}

#[test]
fn the_first_hour_of_the_readme_begins_with_init() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let output = init(&runs, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let said = stdout(&output);
    for words in [
        "a context of 256 tokens and a chat template; all of them are trained",
        "rows.jsonl: 60 rows with the columns `question` (60 texts), `answer` (60 texts); ",
        "column `question`, a text that becomes a user's message, which the chat template renders",
        "answer     column `answer`",
        "rewards    correct x 1",
        "wrote train.yaml; next:\n  grpo data --config train.yaml ",
        "\n  grpo train train.yaml ",
        "\n  grpo report runs/model-001 ",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let text = std::fs::read_to_string(runs.path("train.yaml")).expect("a file");
    for line in said.lines().filter(|line| line.starts_with("  grpo ")) {
        assert!(text.contains(&format!("# {line}\n")), "{line}: {text}");
    }
    let in_folder = |arguments: &[&str]| {
        let output = command(arguments).current_dir(runs.path("")).output().expect("the binary starts");
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}{}", stdout(&output), stderr(&output));
        stdout(&output)
    };
    // The printed commands, with fewer steps.
    let shown = in_folder(&["data", "--config", "train.yaml"]);
    assert!(shown.contains("<|im_start|>user\nWhat is ") && shown.contains("correct"), "{shown}");
    let short = ["--set", "grpo.max_steps=2", "--set", "eval.eval_steps=1"];
    let trained = in_folder(&[&["train", "train.yaml"][..], &short].concat());
    assert!(trained.contains("2 GRPO steps") && trained.contains("held-out pass@1"), "{trained}");
    let run = runs.path("runs/model-001");
    assert!(run.join("model/model.safetensors").is_file());
    let page = in_folder(&["report", "runs/model-001"]);
    assert!(page.contains("wrote report.html (1 run"), "{page}");
}

#[test]
fn every_key_of_the_file_has_a_comment_and_the_default_of_a_model_that_is_read() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let text = written(&runs, &[]);
    let lines: Vec<&str> = text.lines().collect();
    let mut found = 0;
    for (number, line) in lines.iter().enumerate().filter(|(_, line)| !line.trim_start().starts_with('#')) {
        let Some((key, _)) = line.trim_start().split_once(':') else { continue };
        found += 1;
        assert!(key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'), "{line}");
        assert!(lines[number - 1].trim_start().starts_with("# "), "{line} has no comment:\n{text}");
    }
    assert!(found > 20 && lines.iter().all(|line| line.chars().count() <= 130), "{found} keys:\n{text}");
    let keys = keys(&text);
    let expected = json!({
        "run": {"name": "model"}, "model": "model",
        "data": {"files": "rows.jsonl", "apply_chat_template": true, "held_out_fraction": 0.1},
        "rewards": {"correct": 1},
        "rollout": {"temperature": 1},
        "grpo": {"max_steps": 200, "prompts_per_step": 8, "num_generations": 8, "gradient_accumulation_steps": 8},
        "loss": {"loss_type": keys["loss"]["loss_type"], "beta": 0.0},
        "optimizer": {"learning_rate": 1e-6, "lr_scheduler_type": "linear", "weight_decay": 0.0},
        "eval": {"eval_steps": 50},
    });
    let mut without_length = keys.clone();
    let length = without_length["rollout"].as_object_mut().expect("a section").remove("max_completion_length");
    // The context has 256 tokens.
    let length = length.and_then(|length| length.as_u64()).expect("a length");
    assert!((200..256).contains(&length), "{length}");
    assert_eq!(without_length, expected, "{text}");
    // They are those of the program.
    let printed = succeed(&["train", "--config", &runs.text("train.yaml"), "--print-config"]);
    assert!(printed.contains("learning_rate: 1.0e-6"), "{printed}");
}

#[test]
fn columns_of_other_names_are_found_and_the_file_trains() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let user = |text: String| json!({"role": "user", "content": text});
    let question = |i: usize| format!("What is {i} + 1?");
    type Row = Box<dyn Fn(usize) -> Value>;
    let cases: Vec<(&str, Row, Value, &str)> = vec![
        (
            "messages",
            Box::new(move |i| {
                let right = json!({"role": "assistant", "content": format!("#### {}", i + 1)});
                json!({"messages": [user(question(i)), right]})
            }),
            json!({}),
            "correct",
        ),
        (
            "solution",
            Box::new(move |i| json!({"prompt": [user(question(i))], "solution": format!("\\boxed{{{}}}", i + 1)})),
            json!({"answer_column": "solution"}),
            "correct",
        ),
        (
            "truth",
            Box::new(move |i| json!({"problem": question(i), "ground_truth": i + 1, "level": 3})),
            json!({"prompt_column": "problem", "answer_column": "ground_truth", "apply_chat_template": true}),
            "correct",
        ),
        (
            "chat",
            Box::new(move |i| {
                let right = json!({"role": "assistant", "content": format!("{}", i + 1)});
                json!({"id": format!("row {i}"), "dialogue": [user(question(i)), right]})
            }),
            json!({"messages_column": "dialogue"}),
            "correct",
        ),
        (
            "verl",
            Box::new(
                move |i| json!({"prompt": [user(question(i))], "reward_model": {"style": "rule", "ground_truth": [format!("{}", i + 1)]}}),
            ),
            json!({"answer_column": "reward_model.ground_truth"}),
            "correct",
        ),
        (
            "words",
            Box::new(|i| {
                let (pupil, city) = [("France", "Paris"), ("Spain", "Madrid")][i % 2];
                json!({"query": format!("{i}. Which is the capital of {pupil}?"), "label": city})
            }),
            json!({"prompt_column": "query", "answer_column": "label", "apply_chat_template": true}),
            "normalized",
        ),
    ];
    for (name, row, expected, reward) in cases {
        write_rows(&runs, row);
        let keys = keys(&written(&runs, &[]));
        let mut data = keys["data"].as_object().expect("a section").clone();
        assert_eq!(data.remove("files"), Some(json!("rows.jsonl")));
        assert_eq!(data.remove("held_out_fraction"), Some(json!(0.1)));
        assert_eq!(Value::Object(data), expected, "{name}");
        assert_eq!(keys["rewards"], json!({reward: 1}), "{name}");
        let run = train(&runs, name);
        let metrics = rows(&run.join("metrics.jsonl"));
        let rewarded = format!("rewards/{reward}/mean");
        assert!(metrics.iter().any(|row| row.get(&rewarded).is_some()), "{name}: {metrics:?}");
        assert!(metrics.iter().any(|row| row["phase"] == "eval"), "{name}: nothing is evaluated");
    }
}

#[test]
fn a_model_without_a_chat_template_gets_texts() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    std::fs::remove_file(runs.path("model/chat_template.jinja")).expect("a template");
    let config = runs.path("model/tokenizer_config.json");
    let mut tokens = json(&config);
    tokens.as_object_mut().expect("an object").remove("chat_template");
    std::fs::write(&config, tokens.to_string()).expect("a file");
    let text = written(&runs, &[]);
    assert!(text.contains("no chat template") && !text.contains("apply_chat_template"), "{text}");
    train(&runs, "text");
    std::fs::remove_file(runs.path("train.yaml")).expect("a file");
    write_rows(&runs, |i| json!({"messages": [{"role": "user", "content": format!("{i}")}], "answer": i}));
    let text = refusal(&runs, &[]);
    assert!(text.contains("the model has no chat template") && text.contains("chat_template: chatml.jinja"), "{text}");
}

#[test]
fn few_rows_are_all_trained_on() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    write_count(&runs, 3, |i| json!({"question": format!("What is {i} + 1?"), "answer": i + 1}));
    let keys = keys(&written(&runs, &[]));
    assert_eq!((&keys["data"]["held_out_fraction"], &keys["eval"]), (&json!(0), &Value::Null));
    assert_eq!(keys["grpo"]["prompts_per_step"], 3);
    let run = train(&runs, "few");
    assert!(rows(&run.join("metrics.jsonl")).iter().all(|row| row["phase"] != "eval"));
    write_count(&runs, 1, |_| json!({"question": "What is 1 + 1?", "answer": 2}));
    let output = init(&runs, &["--force"]);
    assert!(stdout(&output).contains("rows.jsonl: 1 row with the columns `question` (1 text)"), "{}", stdout(&output));
    train(&runs, "one");
}

#[test]
fn keys_of_the_user_are_in_the_file_and_win() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    write_rows(&runs, |i| json!({"a": format!("What is {i}?"), "b": format!("{i}"), "c": "x"}));
    let text = refusal(&runs, &[]);
    let words = [
        "rows.jsonl: no column is the prompt of every row",
        "60 rows with the columns `a` (60 texts), `b` (60 texts), `c` (60 texts)",
        "--set data.prompt_column=",
    ];
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
    let text = refusal(&runs, &["--set", "data.prompt_column=a"]);
    let words =
        ["no column has the right answer of every row", "--set data.answer_column=", "rewards.programs.judge.command"];
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
    let set =
        ["--set", "data.prompt_column=a", "--set", "data.answer_column=b", "--set", "optimizer.learning_rate=0.001"];
    let keys_of = |text: &str| keys(text);
    let chosen = keys_of(&written(&runs, &set));
    assert_eq!(chosen["data"]["answer_column"], "b");
    assert_eq!(chosen["optimizer"]["learning_rate"], 0.001);
    train(&runs, "own");
    // A reward that needs no answer.
    let chosen = keys_of(&written(&runs, &["--set", "data.prompt_column=a", "--set", "rewards.terminated=2"]));
    assert_eq!(chosen["rewards"], json!({"terminated": 2}));
    train(&runs, "no_answer");
    // One with a secret: the file is for its owner alone.
    let path = std::env::var("PATH").unwrap_or_default();
    let reward = "rewards.programs.judge={command: [sh, -c, 'cat'], env: {KEY: S3CR3T}}";
    let arguments = [
        "init",
        "--model",
        "model",
        "--data",
        "rows.jsonl",
        "--force",
        "--set",
        "data.prompt_column=a",
        "--set",
        reward,
    ];
    let output = command(&arguments).env("PATH", path).current_dir(runs.path("")).output().expect("starts");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(!stdout(&output).contains("S3CR3T"));
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&runs.path("train.yaml").metadata().expect("a file").permissions());
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_file_is_replaced_only_by_force_and_a_dash_is_standard_output() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    std::fs::write(runs.path("train.yaml"), "mine").expect("a file");
    let text = refused(&["init"], &init(&runs, &[]));
    assert!(
        text.contains("train.yaml is there already") && text.contains("--force") && text.contains("--out"),
        "{text}"
    );
    assert_eq!(std::fs::read(runs.path("train.yaml")).expect("a file"), b"mine");
    let output = init(&runs, &["-o", "other.yaml"]);
    assert!(
        stdout(&output).contains("wrote other.yaml; next:\n  grpo data --config other.yaml "),
        "{}",
        stderr(&output)
    );
    let on_stdout = init(&runs, &["--out", "-"]);
    assert_eq!(on_stdout.status.code(), Some(0));
    assert_eq!(keys(&stdout(&on_stdout)), keys(&std::fs::read_to_string(runs.path("other.yaml")).expect("a file")));
    assert!(stderr(&on_stdout).contains("column `question`"), "{}", stderr(&on_stdout));
    assert_eq!(std::fs::read(runs.path("train.yaml")).expect("a file"), b"mine");
    let text = refused(&["init"], &init(&runs, &["--out", "nowhere/train.yaml"]));
    assert!(text.contains("nowhere"), "{text}");
}

#[test]
fn models_and_rows_that_do_not_say_enough_are_refused() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let of = |model: &str, data: &str| {
        refused(
            &["init"],
            &command(&["init", "--model", model, "--data", data])
                .env("HF_HUB_OFFLINE", "1")
                .current_dir(runs.path(""))
                .output()
                .expect("starts"),
        )
    };
    assert!(of("nowhere", "rows.jsonl").contains("model \"nowhere\" was not found"));
    let text = of("model", "rows.json");
    assert!(text.contains("`data.files`: ") && text.contains("No such file"), "{text}");
    assert!(of("model", "openai/gsm8k").contains("load_dataset('openai/gsm8k'"));
    std::fs::write(runs.path("rows.jsonl"), "").expect("a file");
    assert!(refusal(&runs, &[]).contains("rows.jsonl: expected rows, got an empty file"));
    std::fs::write(runs.path("rows.jsonl"), "{\"question\": \"a\", \"answer\": \"1\"}\n{\"question\":\n")
        .expect("a file");
    assert!(refusal(&runs, &[]).contains("rows.jsonl, line 2: "));
    // Some rows have no answer, and some no prompt.
    write_rows(&runs, |i| json!({"question": format!("What is {i}?"), "answer": (i != 7).then_some(i)}));
    assert!(refusal(&runs, &[]).contains("line 8"));
    write_rows(&runs, |i| json!({"question": (i != 7).then(|| format!("What is {i}?")), "answer": i}));
    let text = refusal(&runs, &[]);
    assert!(text.contains("no column is the prompt of every row") && text.contains("`question` (59 texts)"), "{text}");
    // Messages of another form, and answers that no completion repeats.
    write_rows(&runs, |i| json!({"conversations": [{"from": "human", "value": format!("{i}")}], "answer": i}));
    let text = refusal(&runs, &[]);
    assert!(
        text.contains("`conversations` (60 other lists or objects)") && text.contains("`role` and `content`"),
        "{text}"
    );
    write_rows(
        &runs,
        |i| json!({"question": format!("Why {i}?"), "answer": format!("Because {i}. {}", "And so on. ".repeat(20))}),
    );
    let text = refusal(&runs, &[]);
    assert!(text.contains("are long texts") && text.contains("rewards.programs.judge.command"), "{text}");
    assert!(refuse(&["init", "--model", &runs.text("model"), "--data", &runs.text("model")]).contains("got a folder"));
    let usage = grpo(&["init", "--model", "model"]);
    assert!(stderr(&usage).contains("--data <FILE>"), "{}", stderr(&usage));
}

#[test]
fn prompts_and_context_decide_how_long_completions_can_be() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    // Two rows of more than half of the context, which has 256 tokens.
    write_rows(&runs, |i| {
        let text = if i < 2 { "long ".repeat(30) } else { format!("What is {i} + 1?") };
        json!({"question": format!("{i} {text}"), "answer": i})
    });
    let output = init(&runs, &[]);
    let said = stdout(&output);
    assert!(
        said.contains("; 2 prompts with more than 128 are dropped; completions of up to 128"),
        "{said}{}",
        stderr(&output)
    );
    train(&runs, "long");
    let output = init(&runs, &["--force", "--set", "rollout.max_completion_length=20"]);
    assert!(
        stdout(&output).contains("completions of up to 20") && !stdout(&output).contains("dropped"),
        "{}",
        stdout(&output)
    );
}
