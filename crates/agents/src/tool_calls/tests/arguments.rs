//! Several calls, and all kinds of arguments.

use super::*;

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

/// Writes calls as the chat template of the family does, given their names and their arguments in the family's form.
#[rstest]
#[case::hermes(
    ToolParser::Hermes,
    "",
    "<tool_call>\n{\"name\": \"NAME\", \"arguments\": JSON}\n</tool_call>",
    "\n",
    ""
)]
#[case::llama4(ToolParser::Llama4Json, "", "{\"name\": \"NAME\", \"parameters\": JSON}", "; ", "")]
#[case::mistral(ToolParser::Mistral, "", "[TOOL_CALLS]NAME[ARGS]JSON", "", "")]
#[case::granite4(
    ToolParser::Granite4,
    "",
    "<tool_call>\n{\"name\": \"NAME\", \"arguments\": JSON}\n</tool_call>",
    "\n",
    ""
)]
#[case::granite(ToolParser::Granite, "<|tool_call|>[", "{\"name\": \"NAME\", \"arguments\": JSON}", ", ", "]")]
#[case::phi4(ToolParser::Phi4MiniJson, "functools[", "{\"name\": \"NAME\", \"arguments\": JSON}", ", ", "]")]
#[case::xlam(ToolParser::Xlam, "[", "{\"name\": \"NAME\", \"arguments\": JSON}", ", ", "]")]
#[case::minimax(
    ToolParser::Minimax,
    "<tool_calls>\n",
    "{\"name\": \"NAME\", \"arguments\": JSON}",
    "\n",
    "\n</tool_calls>"
)]
#[case::openai(
    ToolParser::Openai,
    "<|channel|>analysis<|message|>Two calls: to=functions.x.<|end|>",
    "<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON",
    "<|call|>",
    "<|call|>"
)]
#[case::deepseek_v3(
    ToolParser::DeepseekV3,
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```<｜tool▁call▁end｜>",
    "\n",
    "<｜tool▁calls▁end｜>"
)]
#[case::deepseek_v31(
    ToolParser::DeepseekV31,
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>",
    "",
    "<｜tool▁calls▁end｜>"
)]
#[case::solar_open(
    ToolParser::SolarOpen,
    "<|tool_calls|>",
    "<|tool_call:begin|>x1<|tool_call:name|>NAME<|tool_call:args|>JSON<|tool_call:end|>",
    "",
    ""
)]
#[case::cohere(
    ToolParser::CohereCommand3,
    "<|START_ACTION|>[",
    "{\"tool_call_id\": \"0\", \"tool_name\": \"NAME\", \"parameters\": JSON}",
    ", ",
    "]<|END_ACTION|>"
)]
#[case::apertus(ToolParser::Apertus, "<|tools_prefix|>[", "{\"NAME\": JSON}", ", ", "]<|tools_suffix|>")]
#[case::kimi_k2(
    ToolParser::KimiK2,
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>functions.NAME:7<|tool_call_argument_begin|>JSON<|tool_call_end|>",
    "",
    "<|tool_calls_section_end|>"
)]
fn calls_with_json_are_read_as_templates_write_them(
    #[case] parser: ToolParser,
    #[case] before: &str,
    #[case] form: &str,
    #[case] between: &str,
    #[case] behind: &str,
) {
    let calls = [
        ("f", json!({"n": -3, "list": [1.5, {"deep": [null, true]}], "text": "a \"b\" {c} ]\n\t'd' </x> 日本 🙂"})),
        ("get.a-b_1", json!({})),
        ("f", json!({"text": "", "n": 9_007_199_254_740_993_i64})),
    ];
    let texts: Vec<String> = calls
        .iter()
        .map(|(name, arguments)| form.replace("NAME", name).replace("JSON", &arguments.to_string()))
        .collect();
    let text = format!("{before}{}{behind}", texts.join(between));
    let expected: Vec<_> = calls.into_iter().map(|(name, args)| call(name, args)).collect();
    assert_eq!(without_ids(parser.parse(&text, &tools()).calls), expected, "{text}");
    // A cut text has no panic and no invented call.
    for (at, _) in text.char_indices() {
        let read = without_ids(parser.parse(&text[..at], &tools()).calls);
        // The beginning of an end tag may be read as a broken call.
        assert!(read.len() <= 3 || read[3..].iter().all(Result::is_err), "{}", &text[..at]);
        // The last arguments may be missing.
        let is_cut = |call: &Result<ToolCall, String>| call.as_ref().map_or(true, |call| call.arguments.is_empty());
        assert!(read.iter().zip(&expected).all(|(read, whole)| read == whole || is_cut(read)), "{}", &text[..at]);
    }
}

/// Formats that write arguments as texts: the schema has their types.
#[rstest]
#[case::qwen3_coder(
    ToolParser::Qwen3Coder,
    "<tool_call>\n<function=f>\n",
    "<parameter=KEY>\nVALUE\n</parameter>\n",
    "</function>\n</tool_call>"
)]
#[case::seed_oss(
    ToolParser::SeedOss,
    "<seed:tool_call>\n<function=f>\n",
    "<parameter=KEY>VALUE</parameter>\n",
    "</function>\n</seed:tool_call>"
)]
#[case::glm45(
    ToolParser::Glm45,
    "<tool_call>f\n",
    "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
    "</tool_call>"
)]
#[case::minimax_m2(
    ToolParser::MinimaxM2,
    "<minimax:tool_call>\n<invoke name=\"f\">\n",
    "<parameter name=\"KEY\">VALUE</parameter>\n",
    "</invoke>\n</minimax:tool_call>"
)]
#[case::deepseek_v32(
    ToolParser::DeepseekV32,
    "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n",
    "<｜DSML｜parameter name=\"KEY\">VALUE</｜DSML｜parameter>\n",
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)]
fn arguments_as_texts_get_the_types_of_the_schema(
    #[case] parser: ToolParser,
    #[case] before: &str,
    #[case] form: &str,
    #[case] behind: &str,
) {
    let properties = json!({
        "text": {"type": "string"}, "n": {"type": "integer"}, "x": {"type": "number"}, "b": {"type": "boolean"}, "c": {"type": "bool"},
        "list": {"type": "array"}, "map": {"type": "object"}, "none": {"type": ["string", "null"]},
        "any": {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "one": {"enum": [1, 2]}, "wrong": {"type": "integer"},
    });
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}]);
    let written = [
        ("text", "12"),
        ("n", "-7"),
        ("x", "1e-3"),
        ("b", "True"),
        ("c", "false"),
        ("list", "[1, 'a', True]"),
        ("map", "{\"k\": [1, null]}"),
        ("none", "null"),
        ("any", "5"),
        ("one", "2"),
        ("wrong", "a < b"),
        ("other", "3"),
    ];
    let parameters: String =
        written.iter().map(|(key, value)| form.replace("KEY", key).replace("VALUE", value)).collect();
    let expected = json!({
        "text": "12", "n": -7, "x": 1e-3, "b": true, "c": false, "list": [1, "a", true], "map": {"k": [1, null]}, "none": null,
        "any": 5, "one": 2, "wrong": "a < b", "other": "3",
    });
    let text = format!("So:\n{before}{parameters}{behind}");
    let twice = format!("{text}\n{before}{behind}");
    let parsed = parser.parse(&twice, &tools);
    assert_eq!(
        (parsed.content.as_str(), parsed.calls),
        ("So:", vec![call("f", expected.clone()), call("f", json!({}))])
    );
    for (at, _) in text.char_indices() {
        let read = parser.parse(&text[..at], &tools).calls;
        assert!(read.len() <= 1, "{}", &text[..at]);
    }
    let multiline = form.replace("KEY", "text").replace("VALUE", "def f():\n    return \"<b>\" + 'é'");
    let parsed = parser.parse(&format!("{before}{multiline}{behind}"), &tools);
    assert_eq!(parsed.calls, [call("f", json!({"text": "def f():\n    return \"<b>\" + 'é'"}))]);
}

#[test]
fn values_of_gemma_and_of_python_are_read() {
    let gemma = "<|tool_call>call:f{list:[1,<|\"|>a, {b}<|\"|>,{k:true,<|\"|>o<|\"|>:[]}],n:2,text:<|\"|>x: 'y', \"z\"<|\"|>,x:-1.5e2,z:null}\
                 <tool_call|>";
    let arguments =
        json!({"list": [1, "a, {b}", {"k": true, "o": []}], "n": 2, "text": "x: 'y', \"z\"", "x": -150.0, "z": null});
    assert_eq!(ToolParser::Gemma4.parse(gemma, &tools()).calls, [call("f", arguments)]);
    let converted = "<|tool_call>call:f{n:<|\"|>7<|\"|>,text:12}<tool_call|><|tool_call>call:f{}<tool_call|>";
    let expected = [call("f", json!({"n": 7, "text": "12"})), call("f", json!({}))];
    assert_eq!(ToolParser::Gemma4.parse(converted, &tools()).calls, expected);
    let quotes = "<|tool_call_start|>[f(text='it's \"a\" 'b'', n=1)]<|tool_call_end|>";
    let expected = [call("f", json!({"text": "it's \"a\" 'b'", "n": 1}))];
    assert_eq!(ToolParser::Lfm2.parse(quotes, &tools()).calls, expected);
    let lfm2 = "So:<|tool_call_start|>[f(text='a \\'b\\' \\u00e9\\x41', n=1), f(map={\"k\": true})]<|tool_call_end|>Wait.\
                f()]<|tool_call_end|>";
    let parsed = ToolParser::Lfm2.parse(lfm2, &tools());
    let expected = vec![call("f", json!({"text": "a 'b' éA", "n": 1})), call("f", json!({"map": {"k": true}}))];
    assert_eq!((parsed.content.as_str(), parsed.calls), ("So:", expected));
}
