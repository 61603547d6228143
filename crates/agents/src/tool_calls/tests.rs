use super::*;
use rstest::rstest;

fn call(name: &str, arguments: Value) -> Result<ToolCall, String> {
    let Value::Object(arguments) = arguments else { panic!("an object") };
    Ok(ToolCall { name: name.into(), arguments })
}

fn tools() -> Value {
    let properties = json!({"n": {"type": "integer"}, "list": {"type": "array"}, "text": {"type": "string"}});
    json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}])
}

#[rstest]
#[case::hermes(
    ToolParser::Hermes,
    "So:\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_call>",
    "So:"
)]
#[case::hermes_without_end(ToolParser::Hermes, "So:<tool_call>{\"name\": \"f\", \"arguments\": {\"n\": 1}}", "So:")]
#[case::qwen3_coder(
    ToolParser::Qwen3Coder,
    "So:\n<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
    "So:"
)]
#[case::llama3_json(ToolParser::Llama3Json, "{\"name\": \"f\", \"parameters\": {\"n\": 1}}", "")]
#[case::llama3_json_with_tag(ToolParser::Llama3Json, "<|python_tag|>{\"name\": \"f\", \"arguments\": {\"n\": 1}}", "")]
#[case::pythonic(ToolParser::Pythonic, " [f(n=1)] ", "")]
#[case::mistral(
    ToolParser::Mistral,
    "So:[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"n\": 1}, \"id\": \"abc\"}]",
    "So:"
)]
#[case::mistral_with_names(ToolParser::Mistral, "[TOOL_CALLS]f{\"n\": 1}", "")]
#[case::mistral_with_tags(ToolParser::Mistral, "So:[TOOL_CALLS]f[CALL_ID]a1B2[ARGS]{\"n\": 1}", "So:")]
#[case::granite(ToolParser::Granite, "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"n\": 1}}]", "")]
#[case::granite_with_other_tag(ToolParser::Granite, "<tool_call>\n[{\"name\": \"f\", \"arguments\": {\"n\": 1}}]", "")]
#[case::phi4(ToolParser::Phi4MiniJson, "So: functools[{\"name\": \"f\", \"arguments\": {\"n\": 1}}]", "So:")]
#[case::olmo3(ToolParser::Olmo3, "So:\n<function_calls>\nf(n=1)\n</function_calls>", "So:")]
#[case::olmo3_without_end(ToolParser::Olmo3, "<function_calls>f(n=1)", "")]
fn a_call_is_found_in_its_format_alone(#[case] parser: ToolParser, #[case] text: &str, #[case] content: &str) {
    let expected = call("f", json!({"n": 1}));
    let parsed = parser.parse(text, &tools());
    assert_eq!((parsed.calls, parsed.content.as_str()), (vec![expected.clone()], content));
    assert_eq!(ToolParser::of_rendered(text, &expected.unwrap(), &tools()), Some(parser));
}

#[rstest]
fn a_text_without_calls_is_kept(
    #[values(
        ToolParser::Hermes,
        ToolParser::Qwen3Coder,
        ToolParser::Llama3Json,
        ToolParser::Pythonic,
        ToolParser::Mistral,
        ToolParser::Granite,
        ToolParser::Phi4MiniJson,
        ToolParser::Olmo3
    )]
    parser: ToolParser,
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
        "function_calls"
    )]
    text: &str,
) {
    let parsed = parser.parse(text, &tools());
    assert_eq!((parsed.content.as_str(), parsed.calls), (text, vec![]));
}

#[rstest]
#[case(ToolParser::Hermes, "<tool_call>{\"name\": \"f\"", "no JSON")]
#[case(ToolParser::Hermes, "<tool_call>[1]</tool_call>", "`name` and `arguments`")]
#[case(ToolParser::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": \"{}\"}</tool_call>", "`arguments`, an object")]
#[case(ToolParser::Qwen3Coder, "<tool_call>{\"name\": \"f\"}</tool_call>", "<function=NAME>")]
#[case(ToolParser::Qwen3Coder, "<tool_call><function=f><parameter=n>1</function></tool_call>", "<parameter=NAME>")]
#[case(ToolParser::Llama3Json, "{\"name\": \"f\", ", "no JSON")]
#[case(ToolParser::Llama3Json, "<|python_tag|>{}", "`name`")]
#[case(ToolParser::Pythonic, "[f(n=)]", "a literal")]
#[case(ToolParser::Pythonic, "[f(n=1)", "`]`")]
#[case(ToolParser::Pythonic, "[f(1)]", "name of an argument")]
#[case(ToolParser::Pythonic, "[f(n='a)]", "a text that ends with '")]
#[case(ToolParser::Pythonic, "[f(n=1)] and more", "the end")]
#[case(ToolParser::Mistral, "[TOOL_CALLS][{]", "no JSON")]
#[case(ToolParser::Mistral, "[TOOL_CALLS][1]", "`name` and `arguments`")]
#[case(ToolParser::Mistral, "[TOOL_CALLS]{}", "the name of a function")]
#[case(ToolParser::Mistral, "[TOOL_CALLS]f[ARGS]", "the arguments of `f`, a JSON object")]
#[case(ToolParser::Mistral, "[TOOL_CALLS]f[ARGS][1]", "the arguments of `f` are no JSON object")]
#[case(ToolParser::Granite, "<|tool_call|>[{\"name\": \"f\"}", "no JSON")]
#[case(ToolParser::Phi4MiniJson, "functools[f(n=1)]", "no JSON")]
#[case(ToolParser::Olmo3, "<function_calls></function_calls>", "expected a call")]
#[case(ToolParser::Olmo3, "<function_calls>f(n=)</function_calls>", "a literal")]
fn a_broken_call_is_an_error(#[case] parser: ToolParser, #[case] text: &str, #[case] words: &str) {
    let calls = parser.parse(text, &tools()).calls;
    let error = calls[0].clone().unwrap_err();
    assert!(calls.len() == 1 && error.contains(words), "{error}");
}

#[test]
fn several_calls_and_all_kinds_of_arguments_are_read() {
    let hermes = "<tool_call>{\"name\": \"f\"}</tool_call>\n<tool_call>{\"name\": \"g\", \"arguments\": {\"x\": [1]}}</tool_call>";
    let expected = vec![call("f", json!({})), call("g", json!({"x": [1]}))];
    assert_eq!(ToolParser::Hermes.parse(hermes, &json!([])).calls, expected);
    let llama = "{\"name\": \"f\"}; {\"name\": \"g\", \"parameters\": {\"x\": [1]}}";
    assert_eq!(ToolParser::Llama3Json.parse(llama, &json!([])).calls, expected);
    let pythonic = r#"[f(), g(a="it's\n\"x\"", b=-1.5e3, c=[True, None, {'k': (-2)}])]"#;
    assert!(ToolParser::Pythonic.parse(pythonic, &json!([])).calls[0].is_err(), "tuples are no literals of JSON");
    let pythonic = r#"[f(), g(a="it's\n\"x\"", b=-1.5e3, c=[True, None, {'k': 1_000}],)]"#;
    let arguments = json!({"a": "it's\n\"x\"", "b": -1500.0, "c": [true, null, {"k": 1000}]});
    assert_eq!(ToolParser::Pythonic.parse(pythonic, &json!([])).calls, [call("f", json!({})), call("g", arguments)]);
    let coder = "<tool_call><function=f><parameter=n>1</parameter><parameter=list>[1, 2]</parameter>\
                 <parameter=text>\n12\n</parameter><parameter=other>3</parameter></function></tool_call>";
    let arguments = json!({"n": 1, "list": [1, 2], "text": "12", "other": "3"});
    assert_eq!(ToolParser::Qwen3Coder.parse(coder, &tools()).calls, [call("f", arguments)]);
    let list = r#"[{"name": "f"}, {"name": "g", "arguments": {"x": [1]}}]"#;
    for (parser, text) in [
        (ToolParser::Mistral, format!("[TOOL_CALLS]{list}")),
        (ToolParser::Mistral, r#"[TOOL_CALLS]f{}[TOOL_CALLS] g[ARGS]{"x": [1]}"#.to_owned()),
        (ToolParser::Granite, format!("<|tool_call|>{list}")),
        (ToolParser::Phi4MiniJson, format!("functools{list}")),
        (ToolParser::Olmo3, "<function_calls>\nf()\ng(x=[1])\n</function_calls>".to_owned()),
    ] {
        assert_eq!(parser.parse(&text, &json!([])).calls, expected, "{text}");
    }
    // Brackets within arguments do not end the list, and values may have line breaks.
    let nested = r#"functools[{"name": "f", "arguments": {"text": "a] b["}}] end"#;
    let parsed = ToolParser::Phi4MiniJson.parse(nested, &json!([]));
    assert_eq!((parsed.content.as_str(), parsed.calls), ("end", vec![call("f", json!({"text": "a] b["}))]));
    let lines = "<function_calls>\nf(text='a\nb', n=null)\n</function_calls>";
    assert_eq!(ToolParser::Olmo3.parse(lines, &json!([])).calls, [call("f", json!({"text": "a\nb", "n": null}))]);
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
}
