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

#[rstest]
#[case::hermes(
    ToolParser::Hermes,
    "So:\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_call>",
    "So:"
)]
#[case::hermes_with_parameters(
    ToolParser::Hermes,
    "So:\n<tool_call>\n{\"name\": \"f\", \"parameters\": {\"n\": 1}}\n</tool_call>",
    "So:"
)]
#[case::hermes_with_arguments_as_text(
    ToolParser::Hermes,
    "So:\n<tool_call>\n{\"name\": \"f\", \"arguments\": \"{\\\"n\\\": 1}\"}\n</tool_call>",
    "So:"
)]
#[case::hermes_without_end(ToolParser::Hermes, "So:<tool_call>{\"name\": \"f\", \"arguments\": {\"n\": 1}}", "So:")]
#[case::qwen3_coder(
    ToolParser::Qwen3Coder,
    "So:\n<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
    "So:"
)]
#[case::qwen3_coder_without_tags(
    ToolParser::Qwen3Coder,
    "So: <function=f>\n<parameter=n>\n1\n</parameter>\n</function>",
    "So:"
)]
#[case::openai(
    ToolParser::Openai,
    "<|channel|>analysis<|message|>Call functions.f.<|end|><|start|>assistant<|channel|>commentary to=functions.f \
     <|constrain|>json<|message|>{\"n\": 1}<|call|>",
    ""
)]
#[case::openai_as_templates_write_it(
    ToolParser::Openai,
    " to=functions.f<|channel|>commentary json<|message|>{\"n\": 1}",
    ""
)]
#[case::openai_with_preamble(
    ToolParser::Openai,
    "<|channel|>commentary<|message|>So:<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{\"n\": 1}",
    "So:"
)]
#[case::glm45(
    ToolParser::Glm45,
    "So:\n<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "So:"
)]
#[case::glm47(ToolParser::Glm45, "<tool_call>f<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>", "")]
#[case::deepseek_v3(
    ToolParser::DeepseekV3,
    "So:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"n\": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "So:"
)]
#[case::deepseek_v31(
    ToolParser::DeepseekV31,
    "So:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"n\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "So:"
)]
#[case::deepseek_v32(
    ToolParser::DeepseekV32,
    "So:\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"n\" string=\"false\">1</｜DSML｜parameter>\n\
     </｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "So:"
)]
#[case::deepseek_v4(
    ToolParser::DeepseekV4,
    "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"n\" string=\"false\">1</｜DSML｜parameter>\n\
     </｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    ""
)]
#[case::solar_open(
    ToolParser::SolarOpen,
    "So:<|tool_calls|><|tool_call:begin|>x1<|tool_call:name|>f<|tool_call:args|>{\"n\": 1}<|tool_call:end|><|calls|>",
    "So:"
)]
#[case::cohere(
    ToolParser::CohereCommand3,
    "So:<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": {\"n\": 1}}\n]<|END_ACTION|>",
    "So:"
)]
#[case::apertus(ToolParser::Apertus, "So:<|tools_prefix|>[{\"f\": {\"n\": 1}}]<|tools_suffix|>", "So:")]
#[case::hy_v3(
    ToolParser::HyV3,
    "So:<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n<arg_key:opensource>n</arg_key:opensource>\n\
     <arg_value:opensource>1</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
    "So:"
)]
#[case::muse(
    ToolParser::MuseGlimmer,
    "So:<atem:function_calls>\n<atem:invoke name=\"f\">\n<atem:parameter name=\"n\">1</atem:parameter>\n</atem:invoke>\n</atem:function_calls>",
    "So:"
)]
#[case::llama31_functions(ToolParser::Qwen3Coder, "So:<function=f>{\"n\": 1}</function>", "So:")]
#[case::kimi_k2(
    ToolParser::KimiK2,
    "So:<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"n\": 1}<|tool_call_end|>\
     <|tool_calls_section_end|>",
    "So:"
)]
#[case::gemma4(ToolParser::Gemma4, "So:<|tool_call>call:f{n:1}<tool_call|>", "So:")]
#[case::functiongemma(ToolParser::FunctionGemma, "<start_function_call>call:f{n:1}<end_function_call>", "")]
#[case::minimax(
    ToolParser::Minimax,
    "So:<tool_calls>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_calls>",
    "So:"
)]
#[case::minimax_m2(
    ToolParser::MinimaxM2,
    "So:\n<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"n\">1</parameter>\n</invoke>\n</minimax:tool_call>",
    "So:"
)]
#[case::seed_oss(
    ToolParser::SeedOss,
    "So:\n<seed:tool_call>\n<function=f>\n<parameter=n>1</parameter>\n</function>\n</seed:tool_call>",
    "So:"
)]
#[case::llama4_pythonic(ToolParser::Llama4Pythonic, "<|python_start|>[f(n=1)]<|python_end|>", "")]
#[case::lfm2(ToolParser::Lfm2, "So:<|tool_call_start|>[f(n=1)]<|tool_call_end|>", "So:")]
#[case::lfm2_with_json(
    ToolParser::Lfm2,
    "<|tool_call_start|>[{\"name\": \"f\", \"arguments\": {\"n\": 1}}]<|tool_call_end|>",
    ""
)]
#[case::xlam(ToolParser::Xlam, "[{\"name\": \"f\", \"arguments\": {\"n\": 1}}]", "")]
#[case::xlam_in_code(ToolParser::Xlam, "So:\n```json\n[{\"name\": \"f\", \"arguments\": {\"n\": 1}}]\n```", "So:")]
#[case::longcat(
    ToolParser::Longcat,
    "<longcat_tool_call>{\"name\": \"f\", \"arguments\": {\"n\": 1}}</longcat_tool_call>",
    ""
)]
#[case::internlm(
    ToolParser::Internlm,
    "<|action_start|><|plugin|>{\"name\": \"f\", \"parameters\": {\"n\": 1}}<|action_end|>",
    ""
)]
#[case::llama3_json_in_text(ToolParser::Llama3Json, "So: {\"name\": \"f\", \"parameters\": {\"n\": 1}}", "So:")]
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
fn a_call_is_found_and_its_format_is_recognized(#[case] parser: ToolParser, #[case] text: &str, #[case] content: &str) {
    let expected = call("f", json!({"n": 1}));
    let parsed = parser.parse(text, &tools());
    assert_eq!((without_ids(parsed.calls), parsed.content.as_str()), (vec![expected.clone()], content));
    assert_eq!(ToolParser::of_rendered(text, &expected.unwrap(), &tools()), Some(parser));
}

/// Every parser, by the names of the configuration.
fn every() -> Vec<ToolParser> {
    let names = "hermes qwen3_coder qwen3_xml qwen3_json llama3_json llama4_json llama4_pythonic pythonic mistral granite granite4 \
                 phi4_mini_json olmo3 openai glm45 glm47 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 kimi_k2 gemma4 functiongemma \
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

#[rstest]
#[case(ToolParser::Hermes, "<tool_call>{\"name\": \"f\"", "no JSON")]
#[case(ToolParser::Hermes, "<tool_call>[1]</tool_call>", "`name` and `arguments`")]
#[case(ToolParser::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": \"[1]\"}</tool_call>", "no JSON object")]
#[case(ToolParser::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": 1}</tool_call>", "`arguments`, an object")]
#[case(ToolParser::Openai, "<|channel|>commentary to=functions.f<|message|>{", "no JSON object")]
#[case(ToolParser::Glm45, "<tool_call>f<arg_key>n</arg_key><arg_value>1", "<arg_value>VALUE</arg_value>")]
#[case(ToolParser::Glm45, "<tool_call>{\"name\": \"f\"}</tool_call>", "the name of a function")]
#[case(
    ToolParser::DeepseekV3,
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f{}",
    "a block of JSON"
)]
#[case(ToolParser::DeepseekV31, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f{}", "<｜tool▁sep｜>")]
#[case(ToolParser::DeepseekV31, "<｜tool▁calls▁begin｜>f", "<｜tool▁call▁begin｜>")]
#[case(ToolParser::DeepseekV32, "<｜DSML｜function_calls>f", "<｜DSML｜invoke name=")]
#[case(
    ToolParser::KimiK2,
    "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}",
    "NAME:INDEX"
)]
#[case(ToolParser::Gemma4, "<|tool_call>call:f{n:<|\"|>a}<tool_call|>", "<|\"|>")]
#[case(ToolParser::Gemma4, "<|tool_call>call:f{n}<tool_call|>", "`KEY:`")]
#[case(ToolParser::Gemma4, "<|tool_call>f<tool_call|>", "call:NAME")]
#[case(ToolParser::Gemma4, "<|tool_call>call:f{n:}<tool_call|>", "a value")]
#[case(ToolParser::MinimaxM2, "<minimax:tool_call><invoke name=\"f\"><parameter name=\"n\">1", "VALUE</parameter>")]
#[case(ToolParser::MinimaxM2, "<minimax:tool_call><invoke name=\"f></invoke>", "a name in quotes")]
#[case(ToolParser::SeedOss, "<seed:tool_call>f</seed:tool_call>", "<function=NAME>")]
#[case(ToolParser::Lfm2, "<|tool_call_start|>f(n=1)<|tool_call_end|>", "`[`")]
#[case(ToolParser::Xlam, "[{\"name\": \"f\", \"arguments\": {]", "no JSON")]
#[case(ToolParser::Minimax, "<tool_calls>{</tool_calls>", "no JSON")]
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
                let inside = part.repeat(3_000);
                let unended = format!("{tag}{inside}");
                assert!(parser.parse(&unended, &tools()).calls.len() <= MOST_CALLS);
                let many = format!("{tag}{part}").repeat(3_000);
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
