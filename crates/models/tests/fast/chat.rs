//! Tokenizers and chat templates of the three families against `transformers` (fixtures/chat/make.py), and broken ones.

use models::{ChatTemplate, Error, HfTokenizer, Tokenizer};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const FAMILIES: [&str; 3] = ["qwen2_5", "qwen3", "llama3"];

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat")
}

fn expected() -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join("expected.json")).unwrap()).unwrap()
}

fn open(family: &str) -> HfTokenizer {
    HfTokenizer::open(&fixtures().join(family), &[], 512).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn tools(case: &Value) -> Option<&Value> {
    case.get("tools").filter(|tools| !tools.is_null())
}

fn with_options(family: &str, case: &Value) -> HfTokenizer {
    open(family).with_chat_template_kwargs(case["options"].as_object().unwrap().clone())
}

#[test]
fn conversations_render_and_encode_as_in_transformers() {
    let expected = expected();
    for family in FAMILIES {
        let cases = expected["families"][family]["cases"].as_array().unwrap();
        assert!(cases.len() > 8, "{family}");
        for case in cases {
            let tokenizer = with_options(family, case);
            let messages = case["messages"].as_array().unwrap();
            assert_eq!(tokenizer.render(messages, tools(case)).unwrap(), case["text"], "{family}: {}", case["name"]);
            let found = tokenizer.encode_messages(messages, tools(case)).unwrap();
            assert_eq!(found, ids(&case["ids"]), "{family}: {}", case["name"]);
        }
    }
}

#[test]
fn texts_encode_as_in_transformers_and_special_strings_are_text() {
    let expected = expected();
    for family in FAMILIES {
        let tokenizer = open(family);
        for case in expected["families"][family]["texts"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let found = tokenizer.encode_prompt(text).unwrap();
            assert_eq!(found, ids(&case["ids"]), "{family}: {text:?}");
            assert_eq!(tokenizer.decode(&found).unwrap(), case["decoded"], "{family}: {text:?}");
        }
    }
}

#[test]
fn single_templates_render_as_in_jinja() {
    let expected = expected();
    let mut wrong = vec![];
    for snippet in expected["snippets"].as_array().unwrap() {
        let source = snippet["template"].as_str().unwrap();
        let variables = json!({"messages": expected["snippet_messages"], "tools": null, "documents": null,
            "add_generation_prompt": true});
        let found = ChatTemplate::new(source, "snippet").render(&variables);
        match found {
            Ok(text) if text == snippet["text"] => {}
            other => wrong.push(format!("{source}\n   expected {}\n   found    {other:?}", snippet["text"])),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn template_errors_have_a_line() {
    let case = &expected()["families"]["llama3"]["refused"];
    let error = with_options("llama3", case).encode_messages(case["messages"].as_array().unwrap(), tools(case));
    let error = error.unwrap_err();
    assert!(matches!(error, Error::ChatTemplate { line: Some(_), .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains(case["error"].as_str().unwrap()) && text.contains("tokenizer_config.json"), "{text}");
}
