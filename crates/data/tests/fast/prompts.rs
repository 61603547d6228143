//! Prompts and answers of rows.

use crate::support::{file, lines, open, without_split, words};
use grpo_data::{ApplyChatTemplate, DataConfig, Dataset, FewShot, FileDataset, Item, Prompt, Result};
use serde_json::{Value, json};

/// Returns the row as a run reads it.
fn row(row: Value, has_chat_template: bool, change: impl FnOnce(&mut DataConfig)) -> Result<Item> {
    let (_folder, path) = file("rows.jsonl", lines(&[row]));
    let mut config = without_split(path);
    change(&mut config);
    let (mut rows, _) = FileDataset::open(&config, 0, &words(has_chat_template))?;
    Ok(rows.next_batch(1)?.remove(0))
}

fn with(row: &Value, column: &str, value: &Value) -> Value {
    let mut row = row.clone();
    row[column] = value.clone();
    row
}

fn messages(messages: Value) -> Prompt {
    Prompt::Messages { messages: messages.as_array().unwrap().clone(), tools: None, documents: None }
}

#[test]
fn gsm8k_rows_need_no_configuration() {
    let solution = "She sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = 72.\n#### 72";
    let gsm8k = || json!({"question": "How many clips?", "answer": solution});
    let item = row(gsm8k(), true, |_| {}).unwrap();
    assert_eq!(item.prompt, messages(json!([{"role": "user", "content": "How many clips?"}])));
    assert_eq!((item.answer.as_deref(), item.warmup_text()), (Some("72"), Some(solution)));
    assert_eq!(item.columns.get("answer"), Some(&solution.into()), "rewards have the column as it is");
    assert_eq!(row(gsm8k(), false, |_| {}).unwrap().prompt, Prompt::from("How many clips?"));
    let never = row(gsm8k(), true, |config| config.apply_chat_template = ApplyChatTemplate::Never).unwrap();
    assert_eq!(never.prompt, Prompt::from("How many clips?"));
}

#[test]
fn text_prompts_stay_text_by_default() {
    let prompt = || json!({"prompt": "6 x 7 = ", "answer": 42, "level": "easy"});
    let item = row(prompt(), true, |_| {}).unwrap();
    assert_eq!((&item.prompt, item.answer.as_deref()), (&Prompt::from("6 x 7 = "), Some("42")));
    assert_eq!(Value::Object((*item.columns).clone()), json!({"answer": 42, "level": "easy"}));
    assert_eq!((&*item.source, item.warmup_text()), ("rows", Some("42")));
    let wrapped = row(prompt(), true, |config| config.apply_chat_template = ApplyChatTemplate::Always).unwrap();
    assert_eq!(wrapped.prompt, messages(json!([{"role": "user", "content": "6 x 7 = "}])));
    let sourced = row(prompt(), true, |config| config.source_column = Some("level".into())).unwrap();
    assert_eq!(&*sourced.source, "easy");
}

#[test]
fn the_last_assistant_message_of_a_conversation_is_the_answer() {
    let turns = json!([
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "6 x 7?"}, {"role": "assistant", "content": "It is 42. #### 42"},
    ]);
    let item = row(json!({"messages": turns}), true, |_| {}).unwrap();
    assert_eq!(item.prompt, messages(turns.as_array().unwrap()[..3].to_vec().into()));
    assert_eq!((item.answer.as_deref(), item.warmup_text()), (Some("42"), Some("It is 42. #### 42")));
    let given = row(json!({"messages": turns, "answer": "43"}), true, |_| {}).unwrap();
    assert_eq!((given.answer.as_deref(), given.warmup_text()), (Some("43"), Some("It is 42. #### 42")));
    // TRL's columns `prompt` and `completion`.
    let completion = json!([{"role": "assistant", "content": "done"}]);
    let trl = row(json!({"prompt": turns, "completion": completion}), true, |_| {}).unwrap();
    assert_eq!((trl.prompt.clone(), trl.warmup_text()), (messages(turns.clone()), Some("done")));
    assert_eq!(trl.answer, None);
}

#[test]
fn nested_columns_are_found_by_path() {
    let verl = || {
        json!({
            "data_source": "m", "extra_info": {"index": 3, "turns": [{"question": "1 + 1?"}]},
            "prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"style": "rule", "ground_truth": "2", "a.b": {"c": 7}},
        })
    };
    let answer = |path: &str| {
        row(verl(), true, |config| config.answer_column = Some(path.into())).map(|item| item.answer.unwrap())
    };
    assert_eq!(answer("reward_model.ground_truth").unwrap(), "2");
    assert_eq!(answer("extra_info.turns.0.question").unwrap(), "1 + 1?");
    assert_eq!(answer("reward_model.a.b.c").unwrap(), "7");
    for wrong in ["reward_model.truth", "extra_info.turns.1.question", "prompt.first", "reward_model."] {
        let text = answer(wrong).unwrap_err().to_string();
        let there = "the columns are `data_source`, `extra_info`, `extra_info.index`, `extra_info.turns`, `prompt`, \
                     `reward_model`, `reward_model.style`, `reward_model.ground_truth`, `reward_model.a.b`";
        assert!(text.contains(&format!("in column `{wrong}`, and there is no such column; {there}")), "{text}");
    }
    let text = answer("reward_model").unwrap_err().to_string();
    assert!(text.contains("expected an answer (a text or a number) or a list of right answers"), "{text}");
    // A column with exactly this name takes precedence.
    let dotted = json!({"question": "q", "a.b": "1", "a": {"b": "2"}});
    let item = row(dotted, true, |config| config.answer_column = Some("a.b".into())).unwrap();
    assert_eq!(item.answer.as_deref(), Some("1"));
    let asked = row(verl(), true, |config| {
        config.prompt_column = Some("extra_info.turns.0.question".into());
        config.source_column = Some("reward_model.style".into());
    });
    let asked = asked.unwrap();
    assert_eq!((asked.prompt, &*asked.source), (Prompt::from("1 + 1?"), "rule"));
    assert!(asked.columns.contains_key("extra_info"), "what is around the prompt stays for rewards");
}

#[test]
fn lists_of_answers_are_passed_completely() {
    let answers = |value: Value, column: Option<&str>| {
        let row = json!({"question": "q", "answer": value});
        let item = self::row(row, true, |config| config.answer_column = column.map(str::to_owned));
        item.map(|item| item.answers().map(str::to_owned).collect::<Vec<_>>())
    };
    for column in [None, Some("answer")] {
        assert_eq!(answers(json!(["1", "one", 1.5, true]), column).unwrap(), ["1", "one", "1.5", "true"]);
        assert_eq!(answers(json!(["2"]), column).unwrap(), ["2"]);
        assert_eq!(answers(json!("3"), column).unwrap(), ["3"]);
        assert_eq!(answers(json!([]), column).unwrap(), [""; 0]);
        assert_eq!(answers(json!(["a #### 4", "b #### four"]), column).unwrap(), ["4", "four"]);
    }
    // An unconfigured `answer` column with other contents is only for rewards; a configured one is the answer.
    assert_eq!(answers(json!([{"text": "1"}]), None).unwrap(), [""; 0]);
    assert!(answers(json!([["1"]]), Some("answer")).unwrap_err().to_string().contains("a list of right answers"));
    assert!(answers(json!(null), Some("answer")).unwrap_err().to_string().contains("got null"));
    for blank in [json!(""), json!(" "), json!(["4", " \n"])] {
        let error = answers(blank.clone(), Some("answer")).unwrap_err().to_string();
        assert!(
            error.contains("column `answer`: expected an answer, a text or a number, got the empty answer"),
            "{error}"
        );
        // Without the key, the row has no answer, and rewards that need one refuse it.
        assert_eq!(answers(blank, None).unwrap(), Vec::<String>::new());
    }
}

#[test]
fn system_prompt_template_and_few_shot_surround_the_prompt() {
    let question = || json!({"question": "6 x 7?"});
    let shots = json!([{"role": "user", "content": "1 x 1?"}, {"role": "assistant", "content": "1"}]);
    let surround = |config: &mut DataConfig| {
        config.system_prompt = Some("Be brief.".into());
        config.prompt_template = Some("Q: {prompt}\nA:".into());
        config.few_shot = Some(FewShot::Messages(shots.as_array().unwrap().clone()));
    };
    let item = row(question(), true, surround).unwrap();
    let expected = json!([
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 x 1?"},
        {"role": "assistant", "content": "1"}, {"role": "user", "content": "Q: 6 x 7?\nA:"},
    ]);
    assert_eq!(item.prompt, messages(expected));
    // A row's own system message is kept and comes first.
    let own = json!({"prompt": [{"role": "system", "content": "Own."}, {"role": "user", "content": "6 x 7?"}]});
    let Prompt::Messages { messages, .. } = row(own, true, surround).unwrap().prompt else { panic!("no messages") };
    assert_eq!(
        (messages.len(), &messages[0]["content"], &messages[1]["content"]),
        (4, &json!("Own."), &json!("1 x 1?"))
    );
    let text = row(question(), false, |config| {
        surround(config);
        config.few_shot = Some(FewShot::Text("Q: 1 x 1?\nA: 1\n".into()));
    });
    assert_eq!(text.unwrap().prompt, Prompt::from("Be brief.\n\nQ: 1 x 1?\nA: 1\nQ: 6 x 7?\nA:"));
    let error = row(question(), false, surround).unwrap_err().to_string();
    assert!(error.contains("data.few_shot is a list of messages, and the prompt stays a text"), "{error}");
}

#[test]
fn tools_come_from_the_row_or_from_a_file() {
    let (_folder, path) = file("tools.json", r#"[{"z": 1, "name": "a"}]"#);
    let tools = |row: Value| match self::row(row, true, |config| config.tools_file = Some(path.clone())).unwrap().prompt
    {
        Prompt::Messages { tools, .. } => tools.unwrap().to_string(),
        Prompt::Text(text) | Prompt::Rendered(text) => panic!("{text}"),
    };
    assert_eq!(tools(json!({"question": "x"})), r#"[{"z":1,"name":"a"}]"#, "in the order of the file");
    let own = json!([{"name": "f"}]);
    for prompt in [json!({"prompt": [{"role": "user", "content": "x"}]}), json!({"question": "x"})] {
        let row = |tools: &Value| with(&prompt, "tools", tools);
        assert_eq!(tools(row(&own)), own.to_string());
        assert_eq!(tools(row(&Value::Null)), r#"[{"z":1,"name":"a"}]"#);
        let error = self::row(row(&json!("f")), true, |_| {}).unwrap_err().to_string();
        assert!(error.contains("column `tools`: expected a list of functions with names, e.g. `[{"), "{error}");
    }
    let (_other, wrong) = file("tools.json", "{}");
    let error = row(json!({"question": "x"}), true, |config| config.tools_file = Some(wrong)).unwrap_err().to_string();
    assert!(
        error.contains("`data.tools_file`: expected a list of functions with names") && error.contains("got `{}`"),
        "{error}"
    );
}

#[test]
fn documents_of_a_row_reach_the_prompt() {
    let documents = json!([{"title": "Clips", "text": "48 clips"}, {"text": "May"}]);
    for prompt in [json!({"messages": [{"role": "user", "content": "x"}]}), json!({"question": "x"})] {
        let row = |value: &Value| row(with(&prompt, "documents", value), true, |_| {});
        for (value, expected) in [(&documents, Some(&documents)), (&json!([]), Some(&json!([]))), (&Value::Null, None)]
        {
            let item = row(value).unwrap();
            let Prompt::Messages { documents, .. } = &item.prompt else { panic!("no messages") };
            assert_eq!((documents.as_ref(), &item.columns["documents"]), (expected, value));
        }
        for wrong in [json!("a text"), json!([{"text": "a"}, "b"]), json!({"text": "a"})] {
            let error = row(&wrong).unwrap_err().to_string();
            assert!(error.contains("column `documents`: expected a list of objects for the chat template"), "{error}");
        }
    }
    // A text prompt has no template, so its columns are only for rewards.
    let text = row(json!({"prompt": "x", "documents": "a"}), true, |_| {}).unwrap();
    assert_eq!((text.prompt, &text.columns["documents"]), (Prompt::from("x"), &json!("a")));
}

#[test]
fn long_integers_keep_their_digits() {
    let (_folder, path) = file(
        "rows.jsonl",
        r#"{"prompt": "12345678901234567890123 \" 12345678901234567890124", "answer":123456789012345678901234567890, "n": [-98765432109876543210, 18446744073709551615, -9223372036854775808, 1.5e300, 0.12345678901234567890]}"#,
    );
    let item = open(&without_split(path)).unwrap().0.next_batch(1).unwrap().remove(0);
    assert_eq!(item.prompt, Prompt::from("12345678901234567890123 \" 12345678901234567890124"));
    assert_eq!(item.answer.as_deref(), Some("123456789012345678901234567890"));
    let n = &item.columns["n"];
    assert_eq!(n[0], "-98765432109876543210");
    assert_eq!((n[1].as_u64(), n[2].as_i64(), n[3].as_f64()), (Some(u64::MAX), Some(i64::MIN), Some(1.5e300)));
    assert_eq!(n[4].as_f64(), Some(0.123_456_789_012_345_68));
}

#[test]
fn rows_with_images_are_refused() {
    let part = |part: Value| json!({"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]});
    let image = json!({"bytes": "", "path": "a.png"});
    for (of_row, parts) in [
        (part(json!({"type": "image"})), ["column `prompt`, message 1", "`image`"]),
        (part(json!({"type": "image_url", "image_url": {"url": "x"}})), ["column `prompt`, message 1", "`image_url`"]),
        (json!({"prompt": "a", "images": [image]}), ["column `images`", "a.png"]),
        (json!({"prompt": "a", "image": image}), ["column `image`", "a.png"]),
    ] {
        let error = row(of_row, true, |_| {}).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)) && error.contains("only text is supported"), "{error}");
    }
    for of_row in [part(json!({"type": "text", "text": "b"})), json!({"prompt": "a", "image": "name", "images": []})] {
        row(of_row, true, |_| {}).unwrap();
    }
}

/// Arrow cannot hold lists of objects with different keys, so people store them as JSON texts.
#[test]
fn messages_tools_and_documents_are_read_from_json_texts() {
    let turns = json!([{"role": "user", "content": "6 x 7?"}, {"role": "assistant", "content": "42"}]);
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    let documents = json!([{"title": "A", "text": "b"}]);
    let as_lists = json!({"messages": turns, "tools": tools, "documents": documents});
    let texts = |value: &Value| value.to_string();
    let entries = |value: &Value| value.as_array().unwrap().iter().map(texts).collect::<Vec<_>>();
    let expected = row(as_lists, true, |_| {}).unwrap();
    assert!(matches!(&expected.prompt, Prompt::Messages { tools: Some(_), documents: Some(_), .. }));
    for stored in [
        json!({"messages": texts(&turns), "tools": texts(&tools), "documents": format!(" {documents}\n")}),
        json!({"messages": entries(&turns), "tools": entries(&tools), "documents": entries(&documents)}),
    ] {
        let item = row(stored, true, |_| {}).unwrap();
        assert_eq!((&item.prompt, &item.answer), (&expected.prompt, &expected.answer));
    }
    // The last message of a `prompt` is no answer, and a text that is no conversation stays a text.
    let prompt = row(json!({"prompt": texts(&json!([turns[0]]))}), true, |_| {}).unwrap().prompt;
    assert_eq!(prompt, messages(json!([turns[0]])));
    for text in
        ["[1, 2]", "[", "[]", "[{\"role\": 1}]", "[{\"a\": 1}] is JSON", "{\"role\": \"user\", \"content\": \"a\"}"]
    {
        assert_eq!(row(json!({"prompt": text}), true, |_| {}).unwrap().prompt, Prompt::from(text));
    }
    let empty = row(json!({"prompt": turns, "tools": "", "documents": null}), true, |_| {}).unwrap().prompt;
    assert!(matches!(empty, Prompt::Messages { tools: None, documents: None, .. }));
}

#[test]
fn texts_that_are_no_json_lists_are_refused_as_messages_and_tools() {
    let user = json!([{"role": "user", "content": "a"}]);
    for (stored, part) in [
        (json!({"prompt": user, "tools": "f(x)"}), "column `tools`: expected a list of functions with names"),
        (json!({"prompt": user, "tools": "{\"a\": 1}"}), "column `tools`: expected a list of functions with names"),
        (json!({"prompt": user, "documents": "[1]"}), "column `documents`: expected a list of objects"),
        (json!({"messages": "[{\"role\": \"user\"}]"}), "column `messages`, message 1: expected an object with `role`"),
        (json!({"messages": "[{"}), "column `messages`: expected a list of messages"),
        (
            json!({"prompt": "[{'role': 'user', 'content': 'b'}]"}),
            "the messages as Python prints them: `json.dumps(messages)`",
        ),
        (json!({"messages": "[{'content': 'b', 'role': 'user'}]"}), "the messages as Python prints them"),
    ] {
        let text = row(stored, true, |_| {}).unwrap_err().to_string();
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn tools_are_functions_with_names() {
    let tools = |tools: Value| row(json!({"prompt": [{"role": "user", "content": "a"}], "tools": tools}), true, |_| {});
    let function = json!({"name": "add", "parameters": {"type": "object"}});
    for legal in
        [json!([]), json!([{"type": "function", "function": function}]), json!([function]), json!([{"name": "add"}])]
    {
        let Prompt::Messages { tools, .. } = tools(legal.clone()).unwrap().prompt else { panic!("messages") };
        assert_eq!(tools, Some(legal));
    }
    for wrong in [
        json!({"name": "add"}),
        json!([1]),
        json!(["add"]),
        json!([{}]),
        json!([{"type": "function", "function": "add"}]),
        json!([{"type": "function", "function": {"name": 1}}]),
        json!([{"name": ""}]),
        json!([{"name": "add", "parameters": "x"}]),
        json!([[{"name": "add"}]]),
    ] {
        let error = tools(wrong.clone()).unwrap_err().to_string();
        assert!(
            error.contains("column `tools`: expected a list of functions with names, e.g. `[{"),
            "{wrong}: {error}"
        );
    }
}

#[test]
fn long_integers_in_messages_are_numbers_for_chat_templates_and_texts_for_rewards() {
    let digits = "98765432109876543210987";
    let (_folder, path) = file(
        "rows.jsonl",
        format!(
            r#"{{"prompt": [{{"role": "user", "content": "{digits}"}}, {{"role": "assistant", "content": "", "tool_calls": [{{"function": {{"name": "get", "arguments": {{"id": {digits}}}}}}}]}}, {{"role": "tool", "content": "none"}}], "n": {{"id": {digits}}}}}"#
        ),
    );
    let item = open(&without_split(path)).unwrap().0.next_batch(1).unwrap().remove(0);
    assert_eq!(item.columns["n"]["id"], digits);
    let Prompt::Messages { messages, .. } = item.prompt else { panic!("messages") };
    assert_eq!(messages[0]["content"], digits);
    let written = grpo_files::long_integers_as_digits(messages[1]["tool_calls"][0].to_string());
    assert!(written.contains(&format!(r#""arguments":{{"id":{digits}}}"#)), "{written}");
}
