mod arguments;
mod broken;
mod found;

use super::*;
use crate::reasoning::ReasoningParser;
use rstest::rstest;

fn call(name: &str, arguments: Value) -> Result<ToolCall, String> {
    let Value::Object(arguments) = arguments else { panic!("an object") };
    Ok(ToolCall { id: None, name: name.into(), arguments })
}

fn without_ids(calls: Vec<Result<ToolCall, String>>) -> Vec<Result<ToolCall, String>> {
    calls.into_iter().map(|call| call.map(|call| ToolCall { id: None, ..call })).collect()
}

fn tools() -> Value {
    let properties = json!({"n": {"type": "integer"}, "list": {"type": "array"}, "text": {"type": "string"}});
    json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}])
}

/// Every parser, by the names of the configuration.
fn every() -> Vec<ToolParser> {
    let names = "hermes qwen3_coder qwen3_xml qwen3_json llama3_json llama4_json llama4_pythonic pythonic mistral granite granite4 \
                 phi4_mini_json olmo3 openai glm45 glm47 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 kimi_k2 solar_open cohere_command3 apertus hy_v3 muse_glimmer gemma4 functiongemma \
                 minimax minimax_m2 seed_oss xlam lfm2 mimo step3p5 ernie45 longcat hunyuan_a13b jamba internlm";
    names.split_whitespace().map(|name| serde_json::from_value(json!(name)).unwrap()).collect()
}

#[rstest]
fn a_text_without_calls_is_kept(
    #[values(
        "42",
        "{\"answer\": 42}",
        "[1, 2]",
        "[f]",
        "",
        "{",
        "name(x)",
        "tool_call",
        "functools",
        "function_calls",
        "call:f{n:1}",
        "a < b and <b>c</b>",
        "I think {\"n\": 1} is it.",
        "[{\"n\": 1}]"
    )]
    text: &str,
) {
    for parser in every() {
        let parsed = parser.parse(text, &tools());
        assert_eq!((parsed.content.as_str(), parsed.calls), (text, vec![]), "{parser:?}");
        let parsed = parser.parse_reasoned(text, &tools(), None, false);
        assert_eq!((parsed.content.as_str(), parsed.calls), (text, vec![]), "{parser:?}");
    }
}

#[test]
fn a_call_within_thoughts_is_none() {
    let call_of = |n: u64| format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {{\"n\": {n}}}}}\n</tool_call>");
    let coder = |n: u64| format!("<tool_call><function=f><parameter=n>{n}</parameter></function></tool_call>");
    let seed = |n: u64| coder(n).replace("tool_call>", "seed:tool_call>");
    let mistral = |n: u64| format!("[TOOL_CALLS]f[ARGS]{{\"n\": {n}}}");
    let gemma = |n: u64| format!("<|tool_call>call:f{{n:{n}}}<tool_call|>");
    type Write<'a> = &'a dyn Fn(u64) -> String;
    let cases: [(ToolParser, [&str; 2], Write<'_>); 6] = [
        (ToolParser::Hermes, ["<think>", "</think>"], &call_of),
        (ToolParser::Hermes, ["", "</think>"], &call_of),
        (ToolParser::Qwen3Coder, ["<think>", "</think>"], &coder),
        (ToolParser::Mistral, ["[THINK]", "[/THINK]"], &mistral),
        (ToolParser::Gemma4, ["<|channel>thought\n", "<channel|>"], &gemma),
        (ToolParser::SeedOss, ["<seed:think>", "</seed:think>"], &seed),
    ];
    for (parser, [start, end], write) in cases {
        let thought = format!("{start}maybe {}{end}", write(9));
        let parsed = parser.parse_reasoned(&thought, &tools(), None, false);
        assert_eq!((parsed.content, parsed.calls), (thought.clone(), vec![]));
        let text = format!("{thought}\n{}", write(1));
        let parsed = parser.parse_reasoned(&text, &tools(), None, false);
        assert_eq!((parsed.content, parsed.calls), (thought.clone(), vec![call("f", json!({"n": 1}))]));
        // A configured parser of another family finds no thoughts.
        let other = Some(ReasoningParser::None);
        assert_eq!(parser.parse_reasoned(&text, &tools(), other, false).calls[0], call("f", json!({"n": 9})));
    }
    let harmony = "<|channel|>analysis<|message|>to=functions.f {\"n\": 9}<|end|><|start|>assistant<|channel|>final<|message|>3<|return|>";
    assert_eq!(
        ToolParser::Openai.parse_reasoned(harmony, &tools(), None, false),
        Parsed { content: "3".into(), calls: vec![] }
    );
    // Thoughts that never end last to the first call, as in SGLang.
    let open = format!("<think>so {}", call_of(1));
    assert_eq!(ToolParser::Hermes.parse_reasoned(&open, &tools(), None, false).calls, [call("f", json!({"n": 1}))]);
}

#[test]
fn integers_of_any_length_keep_their_digits() {
    let digits = "123456789012345678901234567890";
    for (parser, text) in [
        (ToolParser::Hermes, format!("<tool_call>{{\"name\": \"f\", \"arguments\": {{\"n\": {digits}}}}}</tool_call>")),
        (ToolParser::Llama3Json, format!("{{\"name\": \"f\", \"parameters\": {{\"n\": {digits}}}}}")),
        (ToolParser::Pythonic, format!("[f(n={digits})]")),
        (ToolParser::Qwen3Coder, format!("<function=f><parameter=n>{digits}</parameter></function>")),
        (ToolParser::Mistral, format!("[TOOL_CALLS]f{{\"n\": {digits}}}")),
        (ToolParser::Gemma4, format!("<|tool_call>call:f{{n:{digits}}}<tool_call|>")),
        (ToolParser::Openai, format!("<|channel|>commentary to=functions.f<|message|>{{\"n\": {digits}}}<|call|>")),
    ] {
        let calls = parser.parse(&text, &tools()).calls;
        let message = calls[0].as_ref().unwrap().to_message().to_string();
        let message = grpo_files::long_integers_as_digits(message);
        assert!(message.contains(&format!("{{\"n\":{digits}}}")), "{message}");
    }
}

#[test]
fn hostile_texts_end() {
    let deep = format!("[f(x={})]", "[".repeat(100_000));
    assert!(ToolParser::Pythonic.parse(&deep, &json!([])).calls[0].is_err());
    let many = "<tool_call>{\"name\": \"f\"}</tool_call>".repeat(10_000);
    assert_eq!(ToolParser::Hermes.parse(&many, &json!([])).calls.len(), MOST_CALLS);
    let deep = format!("<tool_call>{}", "[".repeat(100_000));
    assert!(ToolParser::Hermes.parse(&deep, &json!([])).calls[0].is_err());
    for parser in [ToolParser::Mistral, ToolParser::Granite, ToolParser::Phi4MiniJson] {
        let tag = match parser {
            ToolParser::Mistral => "[TOOL_CALLS]",
            ToolParser::Granite => "<|tool_call|>",
            _ => "functools",
        };
        let deep = format!("{tag}{}", "[".repeat(100_000));
        assert!(parser.parse(&deep, &json!([])).calls[0].is_err());
    }
    let many = "[TOOL_CALLS]f{}".repeat(10_000);
    assert_eq!(ToolParser::Mistral.parse(&many, &json!([])).calls.len(), MOST_CALLS);
    // Starts without ends, ends without starts, and deep values, in every format.
    let parts = [
        "{",
        "[",
        "\"",
        "call:f{a:",
        "functions.f:0",
        " to=functions.f<|message|>",
        "<arg_key>",
        "<parameter=",
        "<invoke name=\"",
    ];
    for parser in every() {
        for tag in parser.tags().iter().copied().chain(["", "```json", "</think>"]) {
            for part in parts {
                let inside = part.repeat(1_500);
                let unended = format!("{tag}{inside}");
                assert!(parser.parse(&unended, &tools()).calls.len() <= MOST_CALLS);
                let many = format!("{tag}{part}").repeat(1_500);
                assert!(parser.parse_reasoned(&many, &tools(), None, false).calls.len() <= MOST_CALLS);
            }
        }
    }
}

#[test]
fn ids_that_the_model_writes_are_kept_where_templates_take_them() {
    let kimi = "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>";
    for (parser, text, id) in [
        (
            ToolParser::KimiK2,
            format!("<|tool_calls_section_begin|>{kimi}<|tool_calls_section_end|>"),
            Some("functions.f:3"),
        ),
        (
            ToolParser::Mistral,
            r#"[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "aB3dE6gH9"}]"#.to_owned(),
            Some("aB3dE6gH9"),
        ),
        (ToolParser::Mistral, "[TOOL_CALLS]f[CALL_ID]aB3dE6gH9[ARGS]{}".to_owned(), Some("aB3dE6gH9")),
        (ToolParser::Mistral, "[TOOL_CALLS]f[CALL_ID]short[ARGS]{}".to_owned(), None),
        (ToolParser::Mistral, r#"[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "aB3dE6gH9x"}]"#.to_owned(), None),
        (
            ToolParser::SolarOpen,
            "<|tool_calls|><|tool_call:begin|>call-1<|tool_call:name|>f<|tool_call:args|>{}<|tool_call:end|>"
                .to_owned(),
            Some("call-1"),
        ),
        (ToolParser::Hermes, r#"<tool_call>{"name": "f", "arguments": {}}</tool_call>"#.to_owned(), None),
    ] {
        let calls = parser.parse(&text, &tools()).calls;
        assert_eq!(calls[0].as_ref().unwrap().id.as_deref(), id, "{text}");
    }
}

#[test]
fn prompts_describe_the_calls_that_their_templates_do_not_write() {
    for (prompt, parser) in [
        ("List of tools: <|tool_list_start|>[]<|tool_list_end|>", Some(ToolParser::Lfm2)),
        ("write '<|tool_call|>' followed by a JSON list of tools", Some(ToolParser::Granite)),
        ("return a JSON object within <tool_call></tool_call> XML tags", Some(ToolParser::Hermes)),
        ("You have tools: []", None),
    ] {
        assert_eq!(ToolParser::of_prompt(prompt), parser, "{prompt}");
    }
}
