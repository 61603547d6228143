//! Tokenizers and chat templates of the three families against `transformers` (fixtures/chat/make.py), and broken ones.

use crate::support::{fixture, fixture_json};
use grpo_models::{ChatTemplate, Error, HfTokenizer, Tokenizer};
use serde_json::{Value, json};

const FAMILIES: [&str; 3] = ["qwen2_5", "qwen3", "llama3"];

fn expected() -> Value {
    fixture_json("expected.json")
}

fn open(family: &str) -> HfTokenizer {
    HfTokenizer::open(&fixture(family), &[], 512).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// Returns an argument of `apply_chat_template`.
fn given<'a>(case: &'a Value, argument: &str) -> Option<&'a Value> {
    case.get(argument).filter(|value| !value.is_null())
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
            assert_eq!(
                tokenizer.render(messages, given(case, "tools"), None).unwrap(),
                case["text"],
                "{family}: {}",
                case["name"]
            );
            let found = tokenizer.encode_messages(messages, given(case, "tools"), None).unwrap();
            assert_eq!(found, ids(&case["ids"]), "{family}: {}", case["name"]);
        }
    }
}

#[test]
fn integers_of_any_length_in_calls_are_digits() {
    for digits in ["98765432109876543210987", "-1234567890123456789012345678901234567890123456789"] {
        let function = json!({"name": "f", "arguments": {"id": grpo_files::long_integer(digits), "n": [1]}});
        let call =
            json!({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]});
        let messages = [json!({"role": "user", "content": "x"}), call, json!({"role": "tool", "content": "y"})];
        for family in FAMILIES {
            let text = open(family).render(&messages, None, None).unwrap();
            assert!(text.contains(&format!("{{\"id\": {digits}, \"n\": [1]}}")), "{family}: {text}");
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
fn bounds_on_the_number_of_tokens_hold_and_are_only_given_below_the_limit() {
    let expected = expected();
    for family in FAMILIES {
        let tokenizer = open(family);
        // NFC makes three bytes of two here.
        let texts =
            expected["families"][family]["texts"].as_array().unwrap().iter().map(|case| case["text"].as_str().unwrap());
        for text in texts.chain(["\u{958}\u{95c}\u{1d160}", "plain", "", "<|im_end|><|eot_id|>"]) {
            let exact = tokenizer.encode_prompt(text).unwrap().len();
            assert!(tokenizer.count_prompt(text, usize::MAX).unwrap() >= exact, "{family}: {text:?}");
            for limit in 0..exact + 2 {
                let found = tokenizer.count_prompt(text, limit).unwrap();
                assert!(found == exact || (exact..=limit).contains(&found), "{family}: {text:?}: {found} at {limit}");
            }
        }
        for case in expected["families"][family]["cases"].as_array().unwrap() {
            let (tokenizer, messages) = (with_options(family, case), case["messages"].as_array().unwrap());
            let exact = ids(&case["ids"]).len();
            assert_eq!(tokenizer.count_messages(messages, given(case, "tools"), None, exact - 1).unwrap(), exact);
            let bound = tokenizer.count_messages(messages, given(case, "tools"), None, 1 << 20).unwrap();
            assert!((exact..1 << 20).contains(&bound), "{family}: {bound} for {exact}");
        }
    }
}

#[test]
fn templates_with_line_ends_of_windows_render_as_with_those_of_unix() {
    let case = &expected()["families"]["qwen2_5"]["cases"][0];
    let source = fixture_json("qwen2_5/tokenizer_config.json");
    let source = source["chat_template"].as_str().unwrap().replace('\n', "\r\n");
    assert!(source.contains("\r\n"));
    let tokenizer = with_options("qwen2_5", case).with_chat_template(&source, "windows.jinja");
    assert_eq!(
        tokenizer.render(case["messages"].as_array().unwrap(), given(case, "tools"), None).unwrap(),
        case["text"]
    );
}

#[test]
fn documents_render_and_encode_as_in_transformers() {
    for case in expected()["documents"].as_array().unwrap() {
        let (template, messages) = (case["template"].as_str().unwrap(), case["messages"].as_array().unwrap());
        let (tools, documents) = (given(case, "tools"), given(case, "documents"));
        let tokenizer = || open("qwen2_5").with_chat_template(template, "documents.jinja");
        assert_eq!(tokenizer().render(messages, tools, documents).unwrap(), case["text"]);
        assert_eq!(tokenizer().encode_messages(messages, tools, documents).unwrap(), ids(&case["ids"]), "{case}");
        // As a variable of all conversations; a conversation's own documents take precedence.
        let of_options = |value: &Value| json!({"documents": value}).as_object().unwrap().clone();
        let by_option = tokenizer().with_chat_template_kwargs(of_options(&case["documents"]));
        assert_eq!(by_option.encode_messages(messages, tools, None).unwrap(), ids(&case["ids"]), "{case}");
        if documents.is_some() {
            let other = tokenizer().with_chat_template_kwargs(of_options(&json!([{"text": "other"}])));
            assert_eq!(other.render(messages, tools, documents).unwrap(), case["text"]);
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

/// The templates have the style of Mistral, Ministral 3, SmolLM3, Phi-4, Granite, OLMo 3, Gemma 3 and 4, gpt-oss and Qwen3.5
/// (fixtures/styles/make.py).
#[test]
fn templates_in_the_style_of_families_render_as_in_transformers() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/styles");
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    let expected: Value = serde_json::from_str(&read("expected.json")).unwrap();
    let (mut wrong, mut texts, mut errors) = (vec![], 0, 0);
    for (name, cases) in expected["templates"].as_object().unwrap() {
        let template = ChatTemplate::new(&read(name), name);
        template.check().unwrap();
        for (conversation, case) in cases.as_object().unwrap() {
            let found = template.render(&expected["conversations"][conversation]);
            let is_right = match (&found, case.get("text")) {
                (Ok(text), Some(expected)) => expected == text,
                // Python's own errors have other words.
                (Err(error), None) => {
                    let words = case["error"].as_str().unwrap();
                    error.to_string().contains(words) || words.contains("concatenate")
                }
                _ => false,
            };
            texts += usize::from(case.get("text").is_some());
            errors += usize::from(case.get("text").is_none());
            if !is_right {
                wrong.push(format!("{name}, {conversation}\n   expected {case}\n   found    {found:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(texts > 100 && errors > 8, "{texts} {errors}");
}

#[test]
fn template_errors_have_a_line() {
    let case = &expected()["families"]["llama3"]["refused"];
    let error =
        with_options("llama3", case).encode_messages(case["messages"].as_array().unwrap(), given(case, "tools"), None);
    let error = error.unwrap_err();
    assert!(matches!(error, Error::ChatTemplate { line: Some(_), .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains(case["error"].as_str().unwrap()) && text.contains("tokenizer_config.json"), "{text}");
}
