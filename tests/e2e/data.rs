//! `grpo data` on files, with the tokenizers of small model folders.

use crate::support::{Call, Runs, assert_has, copy, grpo, repository};
use serde_json::{Value, json};

/// Creates a model folder without weights, and a file of rows in it.
fn folder(family: &str, rows: &str) -> Runs {
    let folder = Runs::new(&[]);
    copy(repository(&format!("crates/models/tests/fixtures/chat/{family}")).as_ref(), &folder.path(""));
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "vocab_size": 512, "hidden_size": 16,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true,
        "torch_dtype": "float32",
    });
    folder.write("config.json", config.to_string());
    folder.write("gsm8k.jsonl", rows);
    folder
}

/// Calls `grpo data` for the model and the rows of a folder.
fn data(folder: &Runs, settings: &[&str]) -> Call {
    grpo(["data", &folder.text("gsm8k.jsonl"), "--model", &folder.text("")]).set(settings)
}

/// Returns rows like GSM8K's; one is too long for the model, and one contains a special token.
fn gsm8k() -> String {
    let row = |question: String, answer: usize| json!({"question": question, "answer": format!("So it is {answer}.\n#### {answer}")});
    let mut rows: Vec<Value> = (0..40).map(|i| row(format!("What is {i} + 1?"), i + 1)).collect();
    // Of the tokens that a template names, `<think>` is none of the special ones.
    rows.push(row(format!("<think> {}", "long ".repeat(300)), 0));
    rows.push(row("Say <|im_end|> aloud.".into(), 1));
    rows.iter().map(|row| format!("{row}\n")).collect()
}

#[test]
fn what_the_policy_will_see_is_shown() {
    let folder = folder("qwen3", &gsm8k());
    let settings = ["data.system_prompt=Be brief.", "rollout.max_completion_length=8"];
    let text = data(&folder, &settings).args(["--show", "2"]).succeed();
    assert_has(
        &text,
        &[
            "gsm8k.jsonl: 42 rows, ",
            "1 dropped: longer than the model's context allows, 248 tokens",
            "note: 1 prompt has text that is written like a special token",
            "tokens of 42 prompts: min ",
            "█",
            " dropped\n",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n",
            "<|im_start|>assistant\n",
            "answer: ",
            "correct",
        ],
    );
    assert!(text.contains("prompt 2 (gsm8k, ") && !text.contains("prompt 3 ("), "{text}");
    // "So it is 7.\n#### 7" has more than 8 tokens.
    let expected = "note: 39 of them are longer than rollout.max_completion_length, 8: a completion like them would";
    assert_has(&text, &["tokens of 39 right completions: min 14, median 16, ", expected, " 30 cut off\n"]);
    let wide = data(&folder, &["rollout.max_completion_length=16"]).succeed();
    assert!(wide.contains("tokens of 39 right completions: ") && !wide.contains("cut off"), "{wide}");
    let json = data(&folder, &["data.max_prompt_length=100"]).args(["--json"]).exit(0).json();
    assert_eq!(json["prompt_lengths"].as_array().unwrap().len(), 42);
    // An answer is correct alone, and after the steps that lead to it.
    let means: Vec<_> = json["rewards"].as_array().unwrap().iter().map(|row| (&row["of"], &row["mean"])).collect();
    assert_eq!(means, [(&json!("answer"), &json!(1.0)), (&json!("completion"), &json!(1.0))]);
    assert_eq!(json["files"][0]["dropped"]["longer than data.max_prompt_length, 100 tokens"], 1);
}

#[test]
fn what_is_wrong_is_said_with_its_line() {
    let folder = folder("llama3", "{\"prompt\": \"a\"}\n{\"prompt\": \"b\"\n");
    let said = data(&folder, &[]).exit(2);
    assert!(said.stdout.is_empty() && said.stderr.contains("gsm8k.jsonl, line 2: "), "{said}");
    assert_has(&grpo(["data", &folder.text("gsm8k.jsonl")]).refuse(), &["expected --model FOLDER"]);
    assert_has(&grpo(["data", "--model", &folder.text("")]).refuse(), &["expected files, or data.files"]);
    let row = json!({"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": []}]});
    folder.write("gsm8k.jsonl", format!("{row}\n"));
    assert_has(&data(&folder, &[]).refuse(), &["line 1: the prompt: chat template", "single tool-calls"]);
}

#[test]
fn variables_of_the_chat_template_and_another_template_are_in_the_prompt() {
    let folder = folder("qwen3", &gsm8k());
    let prompts = |settings: &[&str]| -> Vec<String> {
        let call = data(&folder, &["data.shuffle=false"]).set(settings);
        let found = call.args(["--json", "--show", "3"]).exit(0).json();
        let prompts = found["prompts"].as_array().unwrap();
        assert_eq!(prompts.len(), 3);
        prompts.iter().map(|row| row["prompt"].as_str().unwrap().to_owned()).collect()
    };
    let plain = prompts(&[]);
    assert!(plain.iter().all(|prompt| prompt.ends_with(" + 1?<|im_end|>\n<|im_start|>assistant\n")), "{plain:?}");
    let thought = |prompt: &String| format!("{prompt}<think>\n\n</think>\n\n");
    let silent = prompts(&["data.chat_template_kwargs={enable_thinking: false}"]);
    assert_eq!(silent, plain.iter().map(thought).collect::<Vec<_>>(), "Qwen3 is told that it has thought already");
    // Another template, with its own variables of several types.
    let source = "{% for m in messages %}[{{ m.role }}, {{ tone }}]{{ m.content }}{% for n in shots %}|{{ n + 1 }}{% endfor %}\
                  {% endfor %}{% if add_generation_prompt %}[answer]{% endif %}";
    let of_file = format!("data.chat_template={}", folder.write("mine.jinja", source));
    let question = |prompt: &String| {
        let question = prompt.split_once("user\n").unwrap().1.split_once("<|im_end|>").unwrap().0;
        format!("[user, calm]{question}|2|3[answer]")
    };
    let mine = prompts(&[&of_file, "data.chat_template_kwargs={tone: calm, shots: [1, 2]}"]);
    assert_eq!(mine, plain.iter().map(question).collect::<Vec<_>>());
    // Errors name the key or the file.
    let text = data(&folder, &["data.chat_template_kwargs={messages: []}"]).refuse();
    assert_has(&text, &["data.chat_template_kwargs", "messages"]);
}

#[test]
fn prompts_have_the_tools_of_their_environment() {
    let folder = folder("qwen3", &gsm8k());
    let config =
        folder.read("config.json").replace("\"max_position_embeddings\":256", "\"max_position_embeddings\":4096");
    folder.write("config.json", config);
    let shown = |settings: &[&str]| data(&folder, settings).args(["--json", "--show", "1"]).exit(0).json();
    let program =
        "environments={sql: {command: [/nowhere/sql], tools: [{type: function, function: {name: query_pets}}]}}";
    let common = ["rollout.max_completion_length=8"];
    let plain = shown(&common);
    for (environment, name) in [(program, "query_pets"), ("environments={c: {built_in: calculator}}", "calculator")] {
        let found = shown(&[common[0], environment]);
        assert_has(found["prompts"][0]["prompt"].as_str().unwrap(), &[name]);
        let [with, without] = [&found, &plain].map(|json| json["prompt_lengths"][0].as_u64().unwrap());
        assert!(with > without && found["prompts"][0]["tokens"].as_u64().unwrap() > without, "{found}");
    }
}

/// `data` and `train` report the error before they look for weights.
#[test]
fn a_file_that_cannot_be_used_is_said_with_its_key_and_an_example() {
    let folder = folder("qwen3", &gsm8k());
    let directory = folder.text("");
    let open = folder.write("open.jinja", "{% for m in messages %}");
    let unknown = folder.write("unknown.jinja", "{{ messages | no_such_filter }}");
    let raises = folder.write("raises.jinja", "{{ raise_exception('only for tools') }}");
    let binary = folder.write("binary.jinja", [0xff, 0xfe, 0]);
    let object = folder.write("tools.json", "{}");
    let nowhere = "/nowhere/file";
    let mut missed = vec![];
    let jinja = "e.g. `--set data.chat_template=chatml.jinja`";
    for (key, path, words) in [
        ("data.chat_template", nowhere, ["No such file", "`data: { chat_template: chatml.jinja }`"]),
        ("data.chat_template", &directory, ["got a folder", "`--set data.chat_template=chatml.jinja`"]),
        ("data.chat_template", "/dev/null", ["got a device", "`--set data.chat_template=chatml.jinja`"]),
        ("data.chat_template", &open, ["open.jinja), line 1: ", jinja]),
        ("data.chat_template", &unknown, ["unknown.jinja), line 1: ", "no_such_filter"]),
        ("data.chat_template", &raises, ["raises.jinja), line 1: only for tools", "gsm8k.jsonl, line 1"]),
        ("data.chat_template", &binary, ["utf-8", jinja]),
        ("data.files", nowhere, ["No such file", "`data: { files: train.jsonl }` or `--set data.files=train.jsonl`"]),
        ("data.eval_files", nowhere, ["No such file", "`--set data.eval_files=test.jsonl`"]),
        ("data.eval_files", &directory, ["there is no split \"test\"", "name one with `split`"]),
        ("data.tools_file", nowhere, ["No such file", "`--set data.tools_file=tools.json`"]),
        ("data.tools_file", &directory, ["got a folder", "`--set data.tools_file=tools.json`"]),
        (
            "data.tools_file",
            &object,
            ["expected a list of functions with names, e.g. `[{\"type\": \"function\"", "got `{}`"],
        ),
    ] {
        let settings = [format!("data.files={}", folder.text("gsm8k.jsonl")), format!("{key}={path}")];
        let trained = grpo(["train"]).set([format!("model={directory}")]);
        for call in [grpo(["data", "--model", &directory]), trained] {
            let text = call.set(&settings).refuse();
            if !(text.contains(key) && words.iter().all(|word| text.contains(word))) {
                missed.push(format!("{settings:?}: {text}"));
            }
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

#[test]
fn a_think_tag_of_the_template_counts_for_format_rewards() {
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n";
    let row = json!({
        "prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4",
        "completion": "2 and 2.\n</think>\n<answer>4</answer>",
    });
    let folder = folder("qwen3", &format!("{row}\n"));
    let held_out = folder.write("ev.jsonl", "{\"prompt\": \"held out\", \"answer\": \"1\"}\n");
    let held_out = format!("data.eval_files={held_out}");
    let opens = format!("data.chat_template={}", folder.write("template.jinja", template));
    for (reward, without) in [("think_format", 0.0), ("tag_count", 0.75)] {
        let mean = |settings: &[&String]| {
            let call = data(&folder, &[&held_out, "rollout.max_completion_length=200"]).set(settings);
            let found = call.set([format!("rewards.{reward}=1")]).args(["--json"]).exit(0).json();
            let rewards = found["rewards"].as_array().unwrap();
            rewards.iter().find(|row| row["of"] == "completion").unwrap()["mean"].as_f64()
        };
        assert_eq!((mean(&[&opens]), mean(&[])), (Some(1.0), Some(without)), "{reward}");
    }
}

#[test]
fn rendered_prompts_are_an_error_unless_prompts_are_rendered_is_set() {
    let chat = |text: &str| format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n");
    let row = |text: String| format!("{}\n", json!({"prompt": text, "answer": "2"}));
    let rows: String = (0..20).map(|i| row(chat(&format!("What is {i} + 1?")))).collect();
    let folder = folder("qwen3", &("{\"prompt\": \"plain\", \"answer\": \"1\"}\n".to_owned() + &rows));
    let all = ["data.held_out_fraction=0", "data.shuffle=false"];
    let parts = ["line 2: the prompt: ", "\"<|im_start|>\"", "data.prompts_are_rendered=true", "false", "`messages`"];
    assert_has(&data(&folder, &all).refuse(), &parts);
    let lengths = |folder: &Runs, set: &str| -> (Vec<u64>, String) {
        let json = data(folder, &all).set([set]).args(["--json", "--show", "2"]).exit(0).json();
        let lengths = json["prompt_lengths"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
        (lengths, json["prompts"][1]["prompt"].as_str().unwrap().to_owned())
    };
    let (rendered, shown) = lengths(&folder, "data.prompts_are_rendered=true");
    let (as_text, _) = lengths(&folder, "data.prompts_are_rendered=false");
    assert_eq!(shown, chat("What is 0 + 1?"));
    assert_eq!(rendered[0], as_text[0], "a text without special tokens is the same either way");
    assert!(as_text[1] > rendered[1] + 3 * 5, "{rendered:?} {as_text:?}");
    // The rendered message has as many tokens as the same text with `data.prompts_are_rendered`.
    let message = |i: usize| json!([{"role": "user", "content": format!("What is {i} + 1?")}]);
    let messages = (0..20).map(|i| format!("{}\n", json!({"messages": message(i), "answer": "2"})));
    folder.write("gsm8k.jsonl", messages.collect::<String>());
    assert_eq!(lengths(&folder, "seed=1").0, rendered[1..]);

    // An existing BOS is not repeated, and a missing one is added.
    let text = "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>";
    let rows = row(format!("<|begin_of_text|>{text}")) + &row(text.to_owned());
    let folder = self::folder("llama3", &rows);
    let (found, shown) = lengths(&folder, "data.prompts_are_rendered=true");
    assert_eq!((found[0], shown), (found[1], format!("<|begin_of_text|>{text}")));
    let error = data(&folder, &["data.prompts_are_rendered=true", "data.system_prompt=x"]).refuse();
    assert_has(&error, &["data.prompts_are_rendered", "data.system_prompt"]);
}

/// Returns the settings of a reward program that runs `body`, shell commands, for each line `l`.
fn program(folder: &Runs, name: &str, body: &str) -> String {
    let script = folder.write(&format!("{name}.sh"), format!("while read -r l; do {body}; done\n"));
    format!("rewards.programs.{name}={{command: [/bin/sh, {script}], timeout: 3}}")
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn reward_programs_are_tried_on_a_row_without_an_answer() {
    let row = |i: usize| format!("{}\n", json!({"question": format!("What is {i}?"), "solution": i.to_string()}));
    let folder = folder("qwen3", &(0..20).map(row).collect::<String>());
    let settings = [
        program(&folder, "columns", "case \"$l\" in *'\"solution\":'*) echo 0.25;; *) echo 7;; esac"),
        program(&folder, "none", "echo null"),
        program(&folder, "raises", "echo 'RuntimeError: database is locked' >&2; exit 1"),
        program(&folder, "hangs", "read -r l"),
        "rewards.terminated=1".to_owned(),
    ];
    let call = || data(&folder, &["rollout.max_completion_length=8"]).set(&settings);
    let said = call().exit(1);
    assert_has(
        &said.stdout,
        &[
            "gsm8k.jsonl: 20 rows, ",
            "prompt 3 (gsm8k, ",
            "\neach reward function on a row",
            "\n  terminated (\"\"): 1\n",
            "\n  columns (\"\"): 0.25\n",
            "\n  none (\"\"): no reward\n",
            "\n  raises (\"\"): failed: rewards.programs.raises: it has ended (exit status: 1)",
            "RuntimeError: database is locked\n",
            "\n  hangs (\"\"): failed: rewards.programs.hangs: it has given 0 of 1 answers in 3 seconds, its timeout\n",
            "no reference answers",
            "`--set data.answer_column=solution`",
        ],
    );
    assert_has(&said.stderr, &["the reward `hangs` cannot judge a completion: "]);
    // A function that failed is not called for the other rows.
    let json = call().set(["data.answer_column=solution"]).args(["--json"]).exit(1).json();
    let of = |list: &str| json[list].as_array().unwrap().clone();
    let names = |rows: &[Value]| rows.iter().map(|row| row["reward"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(names(&of("tried")), ["terminated", "columns", "hangs", "none", "raises"]);
    let columns = &of("tried")[1];
    assert_eq!((&columns["value"], &columns["failure"]), (&json!(0.25), &Value::Null));
    assert!(columns["completion"].as_str().unwrap().parse::<usize>().is_ok(), "the right answer of a row: {columns}");
    assert_eq!(names(&of("rewards")), ["terminated", "columns", "none"]);
    assert_eq!(of("rewards")[1]["mean"], 0.25);
}

#[test]
fn held_out_rows_with_other_columns_are_tried_too() {
    let folder = folder("qwen3", &gsm8k());
    let held_out = folder.write("ev.jsonl", "{\"question\": \"held out\", \"answer\": \"7\", \"level\": 3}\n");
    let held_out = format!("data.eval_files={held_out}");
    let level = program(&folder, "level", "case \"$l\" in *'\"level\":3'*) echo 3;; *) exit 1;; esac");
    let said = data(&folder, &[&held_out, &level, "rollout.max_completion_length=8"]).exit(1);
    let failed = "): failed: rewards.programs.level: it has ended (exit status: 1)";
    assert_has(&said.stdout, &["on 2 rows, which have different columns", "\n  level (\"7\"): 3\n", failed]);
}

#[test]
fn a_missing_reward_program_does_not_hide_the_rows() {
    let folder = folder("qwen3", &gsm8k());
    let missing = ["rewards.programs.judge.command=[/nowhere/judge]", "rollout.max_completion_length=8"];
    let said = data(&folder, &missing).exit(2);
    assert_has(&said.stdout, &["gsm8k.jsonl: 42 rows, ", "prompt 3 (gsm8k, "]);
    assert_has(&said.stderr, &["rewards.programs.judge.command", "/nowhere/judge"]);
}

#[test]
fn a_missing_column_of_answers_is_suggested() {
    for (column, configured) in [("solution", None), ("ground_truth", Some("solution")), ("Final-Answer", Some("gold"))]
    {
        let folder = folder("qwen3", &format!("{}\n", json!({"question": "What is 3?", column: "3"})));
        let settings: Vec<String> = configured.map(|name| format!("data.answer_column={name}")).into_iter().collect();
        let call = || data(&folder, &["rollout.max_completion_length=8"]).set(&settings);
        let text = if configured.is_some() { call().refuse() } else { call().exit(1).stderr };
        assert_has(&text, &[&format!("--set data.answer_column={column}`")]);
        data(&folder, &["rollout.max_completion_length=8"]).set([format!("data.answer_column={column}")]).succeed();
    }
}
