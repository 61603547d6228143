//! `grpo data` on files, with the tokenizers of small model folders.

use crate::support::{grpo, refused, stdout, succeed};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Creates a model folder without weights, and a file of rows in it.
fn folder(family: &str, rows: &str) -> (TempDir, PathBuf, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures/chat").join(family);
    for entry in std::fs::read_dir(fixtures).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "vocab_size": 512, "hidden_size": 16,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true,
        "torch_dtype": "float32",
    });
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let data = folder.path().join("gsm8k.jsonl");
    std::fs::write(&data, rows).unwrap();
    let path = folder.path().to_owned();
    (folder, path, data)
}

/// Returns rows like GSM8K's; one is too long for the model, and one contains a special token.
fn gsm8k() -> String {
    let row = |question: String, answer: usize| json!({"question": question, "answer": format!("So it is {answer}.\n#### {answer}")});
    let mut rows: Vec<Value> = (0..40).map(|i| row(format!("What is {i} + 1?"), i + 1)).collect();
    rows.push(row("long ".repeat(300), 0));
    rows.push(row("Say <|im_end|> aloud.".into(), 1));
    rows.iter().map(|row| format!("{row}\n")).collect()
}

#[test]
fn what_the_policy_will_see_is_shown() {
    let (_folder, model, data) = folder("qwen3", &gsm8k());
    let (model, data) = (model.to_str().unwrap(), data.to_str().unwrap());
    let settings = ["--set", "data.system_prompt=Be brief.", "--set", "rollout.max_completion_length=8", "--show", "2"];
    let text = succeed(&[&["data", data, "--model", model][..], &settings].concat());
    for expected in [
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
    ] {
        assert!(text.contains(expected), "{expected:?} is not in\n{text}");
    }
    assert!(text.contains("prompt 2 (gsm8k, ") && !text.contains("prompt 3 ("), "{text}");
    // "So it is 7.\n#### 7" has more than 8 tokens.
    let expected = "note: 39 of them are longer than rollout.max_completion_length, 8: a completion like them would";
    assert!(text.contains("tokens of 39 right completions: min 14, median 16, "), "{text}");
    assert!(text.contains(expected) && text.contains(" 30 cut off\n"), "{text}");
    let wide = succeed(&["data", data, "--model", model, "--set", "rollout.max_completion_length=16"]);
    assert!(wide.contains("tokens of 39 right completions: ") && !wide.contains("cut off"), "{wide}");
    let json = succeed(&["data", data, "--model", model, "--json", "--set", "data.max_prompt_length=100"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["prompt_lengths"].as_array().unwrap().len(), 42);
    let of =
        |name: &str| json["rewards"].as_array().unwrap().iter().find(|row| row["of"] == name).unwrap()["mean"].clone();
    assert_eq!(
        (of("answer"), of("completion")),
        (json!(1.0), json!(1.0)),
        "an answer is right alone, and behind the steps that lead to it"
    );
    assert_eq!(json["files"][0]["dropped"]["longer than data.max_prompt_length, 100 tokens"], 1);
}

#[test]
fn what_is_wrong_is_said_with_its_line() {
    let (_folder, model, data) = folder("llama3", "{\"prompt\": \"a\"}\n{\"prompt\": \"b\"\n");
    let (model, data) = (model.to_str().unwrap(), data.to_str().unwrap());
    let refuse = |arguments: &[&str]| {
        let output = grpo(arguments);
        assert!(stdout(&output).is_empty());
        refused(arguments, &output)
    };
    assert!(refuse(&["data", data, "--model", model]).contains("gsm8k.jsonl, line 2: "));
    assert!(refuse(&["data", data]).contains("expected --model FOLDER"));
    assert!(refuse(&["data", "--model", model]).contains("expected files, or data.files"));
    std::fs::write(
        data,
        "{\"prompt\": [{\"role\": \"user\", \"content\": \"x\"}, {\"role\": \"assistant\", \"tool_calls\": []}]}\n",
    )
    .unwrap();
    let text = refuse(&["data", data, "--model", model]);
    assert!(text.contains("line 1: the prompt: chat template") && text.contains("single tool-calls"), "{text}");
}

#[test]
fn variables_of_the_chat_template_and_another_template_are_in_the_prompt() {
    let (folder, model, data) = folder("qwen3", &gsm8k());
    let (model, data) = (model.to_str().unwrap(), data.to_str().unwrap());
    let prompts = |settings: &[&str]| -> Vec<String> {
        let mut arguments =
            vec!["data", data, "--model", model, "--json", "--show", "3", "--set", "data.shuffle=false"];
        settings.iter().for_each(|setting| arguments.extend(["--set", setting]));
        let found: Value = serde_json::from_str(&succeed(&arguments)).unwrap();
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
    let template = folder.path().join("mine.jinja");
    let source = "{% for m in messages %}[{{ m.role }}, {{ tone }}]{{ m.content }}{% for n in shots %}|{{ n + 1 }}{% endfor %}\
                  {% endfor %}{% if add_generation_prompt %}[answer]{% endif %}";
    std::fs::write(&template, source).unwrap();
    let of_file = format!("data.chat_template={}", template.display());
    let question = |prompt: &String| {
        let question = prompt.split_once("user\n").unwrap().1.split_once("<|im_end|>").unwrap().0;
        format!("[user, calm]{question}|2|3[answer]")
    };
    let mine = prompts(&[&of_file, "data.chat_template_kwargs={tone: calm, shots: [1, 2]}"]);
    assert_eq!(mine, plain.iter().map(question).collect::<Vec<_>>());
    // Errors name the key or the file.
    let refuse = |setting: &str| {
        let arguments = ["data", data, "--model", model, "--set", setting];
        refused(&arguments, &grpo(&arguments))
    };
    let text = refuse("data.chat_template_kwargs={messages: []}");
    assert!(text.contains("data.chat_template_kwargs") && text.contains("messages"), "{text}");
    assert!(refuse("data.chat_template=/nowhere/mine.jinja").contains("/nowhere/mine.jinja"));
    std::fs::write(&template, "{% for m in messages %}").unwrap();
    let text = refuse(&of_file);
    assert!(text.contains("mine.jinja") && text.contains("line 1"), "{text}");
}

/// `data` and `train` report the error before they look for weights.
#[test]
fn a_file_that_cannot_be_used_is_said_with_its_key_and_an_example() {
    let (folder, model, data) = folder("qwen3", &gsm8k());
    let (model, data) = (model.to_str().unwrap(), data.to_str().unwrap());
    let write = |name: &str, content: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.display().to_string()
    };
    let directory = folder.path().display().to_string();
    let open = write("open.jinja", b"{% for m in messages %}");
    let unknown = write("unknown.jinja", b"{{ messages | no_such_filter }}");
    let raises = write("raises.jinja", b"{{ raise_exception('only for tools') }}");
    let binary = write("binary.jinja", &[0xff, 0xfe, 0]);
    let object = write("tools.json", b"{}");
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
        ("data.files", &directory, ["got a folder", "`--set data.files=train.jsonl`"]),
        ("data.eval_files", nowhere, ["No such file", "`--set data.eval_files=test.jsonl`"]),
        ("data.eval_files", &directory, ["got a folder", "`--set data.eval_files=test.jsonl`"]),
        ("data.tools_file", nowhere, ["No such file", "`--set data.tools_file=tools.json`"]),
        ("data.tools_file", &directory, ["got a folder", "`--set data.tools_file=tools.json`"]),
        ("data.tools_file", &object, ["expected a list of tools in JSON, e.g. `[{\"type\": \"function\"", "got `{}`"]),
    ] {
        let setting = format!("{key}={path}");
        let files = format!("data.files={data}");
        let of_model = format!("model={model}");
        let shown = ["data", "--model", model, "--set", &files, "--set", &setting];
        let trained = ["train", "--set", &of_model, "--set", &files, "--set", &setting];
        for arguments in [&shown[..], &trained] {
            let text = refused(arguments, &grpo(arguments));
            if !(text.contains(key) && words.iter().all(|word| text.contains(word))) {
                missed.push(format!("{arguments:?}: {text}"));
            }
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

/// Returns the mean reward of the completions of rows, from `grpo data`.
fn mean_reward(reward: &str, rows: &[Value], settings: &[String]) -> f64 {
    let rows: String = rows.iter().map(|row| format!("{row}\n")).collect();
    let (_folder, model, data) = folder("qwen3", &rows);
    let held_out = model.join("ev.jsonl");
    std::fs::write(&held_out, "{\"prompt\": \"held out\", \"answer\": \"1\"}\n").unwrap();
    let mut all = vec![
        format!("data.eval_files={}", held_out.display()),
        format!("rewards.{reward}=1"),
        "rollout.max_completion_length=200".into(),
    ];
    all.extend_from_slice(settings);
    let mut arguments = vec!["data", data.to_str().unwrap(), "--model", model.to_str().unwrap(), "--json"];
    arguments.extend(all.iter().flat_map(|setting| ["--set", setting]));
    let found: Value = serde_json::from_str(&succeed(&arguments)).unwrap();
    let judged = found["rewards"].as_array().unwrap();
    let of_completions = judged.iter().find(|row| row["of"] == "completion").unwrap();
    of_completions["mean"].as_f64().unwrap_or(0.0)
}

/// Returns the mean reward of pairs of reference answer and completion.
fn mean_of_pairs(reward: &str, pairs: &[(&str, &str)]) -> f64 {
    let rows = pairs.iter().enumerate();
    let rows = rows.map(
        |(i, (answer, completion))| json!({"prompt": format!("q{i}"), "answer": answer, "completion": completion}),
    );
    mean_reward(reward, &rows.collect::<Vec<_>>(), &[])
}

#[test]
fn a_think_tag_of_the_template_counts_for_format_rewards() {
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("template.jinja");
    std::fs::write(&template, "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n").unwrap();
    let row = json!({
        "prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4",
        "completion": "2 and 2.\n</think>\n<answer>4</answer>",
    });
    let opens = [format!("data.chat_template={}", template.display())];
    for (reward, without) in [("think_format", 0.0), ("tag_count", 0.75)] {
        assert_eq!(mean_reward(reward, std::slice::from_ref(&row), &opens), 1.0, "{reward}");
        assert_eq!(mean_reward(reward, std::slice::from_ref(&row), &[]), without, "{reward}");
    }
}

#[test]
fn any_answer_of_a_list_is_correct_and_long_integers_keep_their_digits() {
    let row =
        |answer: Value, completion: &str| json!({"prompt": completion, "answer": answer, "completion": completion});
    let rows = [row(json!(["1", "one"]), "one"), row(json!(["2"]), "2")];
    assert_eq!((mean_reward("exact", &rows, &[]), mean_reward("correct", &rows, &[])), (1.0, 1.0));
    let digits = "123456789012345678901234567890";
    let text = row(json!("N"), digits).to_string().replace("\"N\"", digits);
    let (_folder, model, data) = folder("qwen3", &format!("{text}\n"));
    std::fs::write(model.join("ev.jsonl"), "{\"prompt\": \"held out\", \"answer\": \"1\"}\n").unwrap();
    let held_out = format!("data.eval_files={}", model.join("ev.jsonl").display());
    let (model, data) = (model.to_str().unwrap(), data.to_str().unwrap());
    let settings = ["--set", &held_out, "--set", "rewards.exact=1", "--set", "rollout.max_completion_length=200"];
    let found = succeed(&[&["data", data, "--model", model, "--json"][..], &settings].concat());
    let found: Value = serde_json::from_str(&found).unwrap();
    assert_eq!(found["prompts"][0]["answer"], digits);
    assert!(found["rewards"].as_array().unwrap().iter().all(|row| row["mean"] == 1.0), "{found}");
}

/// Tests one completion of each kind; crates/rewards/tests/fast/answers.rs tests many.
#[test]
fn answers_in_common_notations_are_correct() {
    let steps = "First the boxes are counted, then the price of each one is looked up in the list.\n";
    let price = format!("{steps}So she gets $400 + $60 = $460.");
    let right = [
        ("x >= 5", "\\boxed{x \\geq 5}"),
        ("E", "\\boxed{E) 12 cm}"),
        ("3/4", "The probability is 3/4."),
        ("460", &price),
        ("f(3)=7", "\\boxed{7}"),
        ("72", "The answer is: Nora sold a total of 72 clips."),
        ("1, 2", "so $x=\\boxed{1}$ or $x=\\boxed{2}$"),
        ("12", "\\boxed{12\\,}"),
        ("42", "<think> perhaps \\boxed{99} </think>\n\nThe final answer is 42."),
    ];
    assert_eq!(mean_of_pairs("math", &right), 1.0);
    let wrong = [
        ("4", "The probability is 3/4."),
        ("42", "<think> My answer is \\boxed{42} </think> Some other text."),
        ("1,000", "\\boxed{1, 0}"),
    ];
    assert_eq!(mean_of_pairs("math", &wrong), 0.0);
    assert_eq!(mean_of_pairs("choice", &[("B", "Option B"), ("E", "The correct option is E.")]), 1.0);
    assert_eq!(mean_of_pairs("numeric", &[("3/4", "\\boxed{1/4}"), ("10:30", "\\boxed{9:30}")]), 0.0);
}

#[test]
fn rendered_prompts_are_an_error_unless_prompts_are_rendered_is_set() {
    let chat = |text: &str| format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n");
    let row = |text: String| format!("{}\n", json!({"prompt": text, "answer": "2"}));
    let rows: String = (0..20).map(|i| row(chat(&format!("What is {i} + 1?")))).collect();
    let (_folder, model, data) = folder("qwen3", &("{\"prompt\": \"plain\", \"answer\": \"1\"}\n".to_owned() + &rows));
    let (model, data) = (model.to_str().unwrap(), data.to_str().unwrap());
    let arguments =
        ["data", data, "--model", model, "--json", "--set", "data.held_out_fraction=0", "--set", "data.shuffle=false"];
    let output = grpo(&arguments);
    let text = refused(&arguments, &output);
    let parts = ["line 2: the prompt: ", "\"<|im_start|>\"", "data.prompts_are_rendered=true", "false", "`messages`"];
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    let lengths = |model: &str, data: &str, set: &str| -> (Vec<u64>, String) {
        let arguments = ["data", data, "--model", model, "--json", "--show", "2", "--set", "data.held_out_fraction=0"];
        let text = succeed(&[&arguments[..], &["--set", "data.shuffle=false", "--set", set]].concat());
        let json: Value = serde_json::from_str(&text).unwrap();
        let lengths = json["prompt_lengths"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
        (lengths, json["prompts"][1]["prompt"].as_str().unwrap().to_owned())
    };
    let (rendered, shown) = lengths(model, data, "data.prompts_are_rendered=true");
    let (as_text, _) = lengths(model, data, "data.prompts_are_rendered=false");
    assert_eq!(shown, chat("What is 0 + 1?"));
    assert_eq!(rendered[0], as_text[0], "a text without special tokens is the same either way");
    assert!(as_text[1] > rendered[1] + 3 * 5, "{rendered:?} {as_text:?}");
    // The rendered message has as many tokens as the same text with `data.prompts_are_rendered`.
    let messages: String = (0..20)
        .map(|i| {
            format!(
                "{}\n",
                json!({"messages": [{"role": "user", "content": format!("What is {i} + 1?")}], "answer": "2"})
            )
        })
        .collect();
    let path = format!("{data}.messages.jsonl");
    std::fs::write(&path, messages).unwrap();
    assert_eq!(lengths(model, &path, "seed=1").0, rendered[1..]);

    // An existing BOS is not repeated, and a missing one is added.
    let text = "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>";
    let rows = row(format!("<|begin_of_text|>{text}")) + &row(text.to_owned());
    let (_folder, model, data) = folder("llama3", &rows);
    let (model, data) = (model.to_str().unwrap(), data.to_str().unwrap());
    let (found, shown) = lengths(model, data, "data.prompts_are_rendered=true");
    assert_eq!((found[0], shown), (found[1], format!("<|begin_of_text|>{text}")));
    let error = refused(
        &[],
        &grpo(&[
            "data",
            data,
            "--model",
            model,
            "--set",
            "data.prompts_are_rendered=true",
            "--set",
            "data.system_prompt=x",
        ]),
    );
    assert!(error.contains("data.prompts_are_rendered") && error.contains("data.system_prompt"), "{error}");
}
