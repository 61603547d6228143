//! `grpo init`: a configuration for a model and rows, which runs as it is.

use crate::support::{Call, Runs, assert_has, grpo, json};
use serde_json::{Value, json};

/// Makes a row from its number.
type Row<'a> = &'a dyn Fn(usize) -> Value;

/// Calls `grpo init` for the model and the rows of `runs`, in their folder.
fn init(runs: &Runs, settings: &[&str]) -> Call {
    grpo(["init", "--model", "model", "--data", "rows.jsonl"]).set(settings).at(&runs.path(""))
}

/// Returns the file that `grpo init` writes.
fn written(runs: &Runs, settings: &[&str]) -> String {
    init(runs, settings).args(["--force"]).succeed();
    runs.read("train.yaml")
}

/// Its keys.
fn keys(text: &str) -> Value {
    serde_saphyr::from_str(text).expect("YAML")
}

fn refusal(runs: &Runs, settings: &[&str]) -> String {
    let text = init(runs, settings).refuse();
    assert!(!runs.path("train.yaml").exists(), "{text}");
    text
}

/// Trains the file as it is for a few steps.
fn train(runs: &Runs, name: &str) {
    let train = grpo(["train", "--config", "train.yaml", "--run-dir", name]).set(["grpo.max_steps=2"]);
    let said = train.at(&runs.path("")).exit(0);
    assert!(!said.stderr.contains("a text is sent as it is"), "{said}");
}

#[test]
fn the_first_hour_of_the_readme_begins_with_init() {
    let runs = Runs::small();
    let said = init(&runs, &[]).succeed();
    assert_has(
        &said,
        &[
            "a context of 256 tokens and a chat template; all of them are trained",
            "rows.jsonl: 60 rows with the columns `question` (60 texts), `answer` (60 texts); ",
            "column `question`, a text that becomes a user's message, which the chat template renders",
            "answer     column `answer`",
            "rewards    correct x 1",
            "wrote train.yaml; next:\n  grpo data --config train.yaml ",
            "\n  grpo train train.yaml ",
            "\n  grpo report runs/model-001 ",
        ],
    );
    let text = runs.read("train.yaml");
    for line in said.lines().filter(|line| line.starts_with("  grpo ")) {
        assert_has(&text, &[&format!("# {line}\n")]);
    }
    // The printed commands, with fewer steps.
    let shown = grpo(["data", "--config", "train.yaml"]).at(&runs.path("")).succeed();
    assert_has(&shown, &["<|im_start|>user\nWhat is ", "correct"]);
    let train = grpo(["train", "train.yaml"]).set(["grpo.max_steps=2", "eval.eval_steps=1"]);
    assert_has(&train.at(&runs.path("")).succeed(), &["2 GRPO steps", "held-out pass@1"]);
    assert!(runs.path("runs/model-001/model/model.safetensors").is_file());
    let page = grpo(["report", "runs/model-001"]).at(&runs.path("")).succeed();
    assert_has(&page, &["wrote report.html (1 run"]);
}

#[test]
fn every_key_of_the_file_has_a_comment_and_the_default_of_a_model_that_is_read() {
    let runs = Runs::small();
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
    let printed = grpo(["train", "--print-config", "--config", &runs.text("train.yaml")]).succeed();
    assert_has(&printed, &["learning_rate: 1.0e-6"]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn columns_of_other_names_are_found_and_the_file_trains() {
    let runs = Runs::small();
    let question = |i: usize| format!("What is {i} + 1?");
    let user = |i: usize| json!({"role": "user", "content": question(i)});
    let right = |text: String| json!({"role": "assistant", "content": text});
    let cases: [(&str, Row<'_>, Value, &str); 6] = [
        ("messages", &|i| json!({"messages": [user(i), right(format!("#### {}", i + 1))]}), json!({}), "correct"),
        (
            "solution",
            &|i| json!({"prompt": [user(i)], "solution": format!("\\boxed{{{}}}", i + 1)}),
            json!({"answer_column": "solution"}),
            "correct",
        ),
        (
            "truth",
            &|i| json!({"problem": question(i), "ground_truth": i + 1, "level": 3}),
            json!({"prompt_column": "problem", "answer_column": "ground_truth", "apply_chat_template": true}),
            "correct",
        ),
        (
            "chat",
            &|i| json!({"id": format!("row {i}"), "dialogue": [user(i), right(format!("{}", i + 1))]}),
            json!({"messages_column": "dialogue"}),
            "correct",
        ),
        (
            "verl",
            &|i| json!({"prompt": [user(i)], "reward_model": {"style": "rule", "ground_truth": [format!("{}", i + 1)]}}),
            json!({"answer_column": "reward_model.ground_truth"}),
            "correct",
        ),
        (
            "words",
            &|i| {
                let (pupil, city) = [("France", "Paris"), ("Spain", "Madrid")][i % 2];
                json!({"query": format!("{i}. Which is the capital of {pupil}?"), "label": city})
            },
            json!({"prompt_column": "query", "answer_column": "label", "apply_chat_template": true}),
            "normalized",
        ),
    ];
    for (name, row, expected, reward) in cases {
        runs.write_rows(60, row);
        let keys = keys(&written(&runs, &[]));
        let mut data = keys["data"].as_object().expect("a section").clone();
        assert_eq!(data.remove("files"), Some(json!("rows.jsonl")));
        assert_eq!(data.remove("held_out_fraction"), Some(json!(0.1)));
        assert_eq!(Value::Object(data), expected, "{name}");
        assert_eq!(keys["rewards"], json!({reward: 1}), "{name}");
        train(&runs, name);
        let rewarded = format!("rewards/{reward}/mean");
        assert!(runs.metrics(name).iter().any(|row| row.get(&rewarded).is_some()), "{name}");
        assert!(!runs.phase(name, "eval").is_empty(), "{name}: nothing is evaluated");
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_model_without_a_chat_template_gets_texts() {
    let runs = Runs::small();
    std::fs::remove_file(runs.path("model/chat_template.jinja")).expect("a template");
    let mut tokens = json(&runs.path("model/tokenizer_config.json"));
    tokens.as_object_mut().expect("an object").remove("chat_template");
    runs.write("model/tokenizer_config.json", tokens.to_string());
    let text = written(&runs, &[]);
    assert!(text.contains("no chat template") && !text.contains("apply_chat_template"), "{text}");
    train(&runs, "text");
    std::fs::remove_file(runs.path("train.yaml")).expect("a file");
    runs.write_rows(60, |i| json!({"messages": [{"role": "user", "content": format!("{i}")}], "answer": i}));
    let text = refusal(&runs, &[]);
    assert_has(&text, &["the model has no chat template", "chat_template: chatml.jinja"]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn few_rows_are_all_trained_on() {
    let runs = Runs::small();
    runs.write_rows(3, |i| json!({"question": format!("What is {i} + 1?"), "answer": i + 1}));
    let keys = keys(&written(&runs, &[]));
    assert_eq!((&keys["data"]["held_out_fraction"], &keys["eval"]), (&json!(0), &Value::Null));
    assert_eq!(keys["grpo"]["prompts_per_step"], 3);
    train(&runs, "few");
    assert!(runs.phase("few", "eval").is_empty());
    runs.write_rows(1, |_| json!({"question": "What is 1 + 1?", "answer": 2}));
    let said = init(&runs, &[]).args(["--force"]).succeed();
    assert_has(&said, &["rows.jsonl: 1 row with the columns `question` (1 text)"]);
    train(&runs, "one");
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn keys_of_the_user_are_in_the_file_and_win() {
    let runs = Runs::small();
    runs.write_rows(60, |i| json!({"a": format!("What is {i}?"), "b": format!("{i}"), "c": "x"}));
    let text = refusal(&runs, &[]);
    let words = [
        "rows.jsonl: no column is the prompt of every row",
        "60 rows with the columns `a` (60 texts), `b` (60 texts), `c` (60 texts)",
        "--set data.prompt_column=",
    ];
    assert_has(&text, &words);
    let text = refusal(&runs, &["data.prompt_column=a"]);
    let words =
        ["no column has the right answer of every row", "--set data.answer_column=", "rewards.programs.judge.command"];
    assert_has(&text, &words);
    let settings = ["data.prompt_column=a", "data.answer_column=b", "optimizer.learning_rate=0.001"];
    let chosen = keys(&written(&runs, &settings));
    assert_eq!(chosen["data"]["answer_column"], "b");
    assert_eq!(chosen["optimizer"]["learning_rate"], 0.001);
    train(&runs, "own");
    // A reward that needs no answer.
    let chosen = keys(&written(&runs, &["data.prompt_column=a", "rewards.terminated=2"]));
    assert_eq!(chosen["rewards"], json!({"terminated": 2}));
    train(&runs, "no_answer");
    // With a secret, only the owner may read the file.
    let reward = "rewards.programs.judge={command: [sh, -c, 'cat'], env: {KEY: S3CR3T}}";
    let said = init(&runs, &["data.prompt_column=a", reward]).args(["--force"]).with_path().succeed();
    assert!(!said.contains("S3CR3T"));
    let file = runs.path("train.yaml").metadata().expect("a file");
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&file.permissions()) & 0o777, 0o600);
}

#[test]
fn a_file_is_replaced_only_by_force_and_a_dash_is_standard_output() {
    let runs = Runs::small();
    runs.write("train.yaml", "mine");
    assert_has(&init(&runs, &[]).refuse(), &["train.yaml is there already", "--force", "--out"]);
    assert_eq!(runs.read("train.yaml"), "mine");
    let said = init(&runs, &[]).args(["-o", "other.yaml"]).succeed();
    assert_has(&said, &["wrote other.yaml; next:\n  grpo data --config other.yaml "]);
    let on_stdout = init(&runs, &[]).args(["--out", "-"]).exit(0);
    assert_eq!(keys(&on_stdout.stdout), keys(&runs.read("other.yaml")));
    assert_has(&on_stdout.stderr, &["column `question`"]);
    assert_eq!(runs.read("train.yaml"), "mine");
    assert_has(&init(&runs, &[]).args(["--out", "nowhere/train.yaml"]).refuse(), &["nowhere"]);
}

#[test]
fn models_and_rows_that_do_not_say_enough_are_refused() {
    let runs = Runs::small();
    for (model, data, words) in [
        ("nowhere", "rows.jsonl", &["model \"nowhere\" was not found"][..]),
        ("model", "rows.json", &["`data.files`: ", "No such file"]),
        ("model", "openai/gsm8k", &["data set \"openai/gsm8k\" was not found", "HF_HUB_OFFLINE"]),
        ("model", "model/openai", &["no such file in the folder model here", "hf://datasets/model/openai"]),
    ] {
        let call = grpo(["init", "--model", model, "--data", data]).env("HF_HUB_OFFLINE", "1");
        assert_has(&call.at(&runs.path("")).refuse(), words);
    }
    for (rows, words) in [
        ("", "rows.jsonl: expected rows, got an empty file"),
        ("{\"question\": \"a\", \"answer\": \"1\"}\n{\"question\":\n", "rows.jsonl, line 2: "),
    ] {
        runs.write("rows.jsonl", rows);
        assert_has(&refusal(&runs, &[]), &[words]);
    }
    let long = "And so on. ".repeat(20);
    let cases: [(Row<'_>, &[&str]); 4] = [
        // Some rows have no answer, and some no prompt.
        (&|i| json!({"question": format!("What is {i}?"), "answer": (i != 7).then_some(i)}), &["line 8"]),
        (
            &|i| json!({"question": (i != 7).then(|| format!("What is {i}?")), "answer": i}),
            &["no column is the prompt of every row", "`question` (59 texts)"],
        ),
        // Messages of another form, and answers that no completion repeats.
        (
            &|i| json!({"conversations": [{"from": "human", "value": format!("{i}")}], "answer": i}),
            &["`conversations` (60 other lists or objects)", "`role` and `content`"],
        ),
        (
            &|i| json!({"question": format!("Why {i}?"), "answer": format!("Because {i}. {long}")}),
            &["are long texts", "rewards.programs.judge.command"],
        ),
    ];
    for (row, words) in cases {
        runs.write_rows(60, row);
        assert_has(&refusal(&runs, &[]), words);
    }
    assert_has(&grpo(["init", "--model", "model"]).output().stderr, &["--data <FILE>"]);
}

#[test]
fn prompts_and_context_decide_how_long_completions_can_be() {
    let runs = Runs::small();
    // Two rows of more than half of the context, which has 256 tokens.
    runs.write_rows(60, |i| {
        let text = if i < 2 { "long ".repeat(30) } else { format!("What is {i} + 1?") };
        json!({"question": format!("{i} {text}"), "answer": i})
    });
    let said = init(&runs, &[]).succeed();
    assert_has(&said, &["; 2 prompts with more than 128 are dropped; completions of up to 128"]);
    train(&runs, "long");
    let said = init(&runs, &["rollout.max_completion_length=20"]).args(["--force"]).succeed();
    assert!(said.contains("completions of up to 20") && !said.contains("dropped"), "{said}");
}
